"""Media: what a client may ask for, a table of parameters each, checked against a model's card before it is queued."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from unfuse.core.card import Limits, ModelCard
from unfuse.core.errors import ConfigError, InvalidParameter
from unfuse.core.nearest import nearest
from unfuse.core.parameters import Parameter, integer, shown
from unfuse.core.plan import Params

MAX_SEED = 2**53 - 1
"""The largest seed a client may send, and the largest of a request's pictures: every JSON reader keeps it exactly."""

DRAWN_SEEDS = 2**31
"""A seed that was left out is drawn below this, short enough to type again."""

MIN_S, MAX_S = 0.001, 86_400.0
MAX_FRAMES, MAX_STEPS = 10_000, 1000

FRAME_SLACK = 0.001
"""Part of a frame that seconds may lack by having been rounded, as ours are when they are told."""

MADE = (
    Parameter("prompt", "text", 1, "max_prompt_chars", says="what to show"),
    Parameter("negative_prompt", "text", 0, "max_prompt_chars", default="", says="what not to show"),
    Parameter("size", "size", use="request", says="WIDTHxHEIGHT in pixels, or auto"),
    Parameter("num_inference_steps", "integer", 1, "max_steps", says="denoising steps"),
    Parameter("guidance_scale", "number", 0, "max_guidance", says="how strongly to follow the prompt"),
    Parameter("guidance_scale_2", "number", 0, "max_guidance", says="of models that have it", particular=True),
    Parameter("true_cfg_scale", "number", 0, "max_guidance", says="of models that have it", particular=True),
    Parameter(
        "feature_cache", "number", 0, 1, particular=True,
        says="where pools batch: skip transformer blocks while the first one's effect differs by less",
    ),
    Parameter("seed", "integer", 0, MAX_SEED, use="request", says="of the first picture; each other has the next"),
    Parameter("lora", "text", 1, 128, says="name of an adapter that the server has, see GET /v1/models"),
    Parameter("lora_scale", "number", -10, 10, says="how strong the adapter is"),
    Parameter("fps", "integer", 1, 120, says="frames a second"),
    Parameter("output_compression", "integer", 0, 100, default=100, says="quality of jpeg and webp"),
    Parameter("preview_every", "integer", 0, MAX_STEPS, use="request", says="steps between previews; 0: none"),
    Parameter("model", "any", use="request", says="may be left out where one model is served"),
    Parameter("priority", "integer", -100, 100, use="delivery", says="the higher, the sooner"),
    Parameter("timeout", "number", MIN_S, MAX_S, use="delivery", says="seconds from acceptance to the end"),
    Parameter("metadata", "texts", use="delivery", says="texts that are shown with the request"),
    Parameter("cache", "flag", use="delivery", says="false: encode anew, for this request alone"),
    *(
        Parameter(name, "any", use="nothing", says="accepted, and of no use here")
        for name in ("user", "style", "moderation", "safety_identifier", "input_fidelity")
    ),
)  # fmt: skip
"""What pictures and videos have in common; the last few are fields that the `openai` client may send."""


class Medium(msgspec.Struct, frozen=True):
    """What is asked for, and the table of its parameters. Its usual format is first; one that `moves` has frames."""

    name: Literal["image", "video"]
    formats: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    moves: bool = False

    def known(self, card: ModelCard) -> dict[str, Parameter]:
        """What may be sent for a model, by name."""
        return {one.name: one for one in self.parameters if not one.particular or one.name in card.defaults}


def _format(*formats: str) -> Parameter:
    return Parameter("output_format", "choice", choices=formats, use="request", says="of the files")


IMAGE = Medium(
    "image",
    ("png", "jpeg", "webp"),
    (
        *MADE,
        _format("png", "jpeg", "webp"),
        Parameter("n", "integer", 1, "max_n", use="request", says="how many pictures"),
        Parameter(
            "quality", "choice", choices=("auto", "low", "medium", "standard", "high", "hd"), use="request",
            says="the answer says which one was used",
        ),
        Parameter("background", "choice", choices=("auto", "opaque"), use="nothing"),
        Parameter("num_frames", "choice", choices=(1, "1"), use="nothing"),
        Parameter("response_format", "choice", choices=("b64_json", "url"), use="delivery"),
        Parameter("stream", "flag", use="delivery", says="answer with events"),
        Parameter("partial_images", "integer", 0, 3, use="request", says="previews of each picture; needs stream"),
    ),
)  # fmt: skip
VIDEO = Medium(
    "video",
    ("mp4", "png"),
    (
        *MADE,
        _format("mp4", "png"),
        Parameter("n", "choice", choices=(1, "1"), use="nothing"),
        Parameter("num_frames", "integer", 1, MAX_SEED, use="request", says="how long it is"),
        Parameter(
            "seconds", "number", MIN_S, MAX_S, use="request",
            says="instead of num_frames; rounded up to a length that the model can make",
        ),
    ),
    moves=True,
)  # fmt: skip
"""As png every frame is a file of its own, without loss."""


class Delivery(msgspec.Struct, frozen=True):
    """What a client may ask about a request rather than about the picture. `timeout` is seconds (None: no limit).

    Without `cache` nothing that another request has encoded is used for it, nor the other way round.
    """

    response_format: Literal["b64_json", "url"] = "b64_json"
    stream: bool = False
    priority: int = 0
    timeout: float | None = None
    metadata: dict[str, str] = {}
    cache: bool = True


def check(
    card: ModelCard, given: Mapping[str, object], medium: Medium = IMAGE, *, strict: bool = False
) -> tuple[Params, int]:
    """Everything the stages need for a request, and how many pictures it asks for.

    What the client left out, or gave as null, comes from the card's defaults; a missing seed is drawn. The pictures
    have the seeds s … s + n − 1. Raises InvalidParameter, also for a field that nobody knows, and if `strict` for a
    quality that means nothing to the model.
    """
    values = {name: value for name, value in given.items() if value is not None}
    known = medium.known(card)
    for name in values:
        if name not in known:
            raise _unknown(name, known)
    if "prompt" not in values:
        raise InvalidParameter("prompt is missing: say what to show", "prompt")
    read = {name: known[name].read(value, card.limits) for name, value in values.items()}
    params: Params = {one.name: one.default for one in medium.parameters if one.default is not None}
    params |= {"num_frames": 1, **card.defaults, **_quality(card, read.get("quality", "auto"), strict)}
    params |= {name: value for name, value in read.items() if known[name].use == "stages"}
    params |= _adapter(params)
    params["output_format"] = read.get("output_format", medium.formats[0])
    params["num_frames"] = _length(card.limits, params, read) if medium.moves else 1
    if every := _preview_every(int(_default(params, "num_inference_steps")), read):
        params["preview_every"] = every
    if read.get("size"):
        params["width"], params["height"] = _fitting(card.limits, *read["size"])
    n = read.get("n", 1) if known["n"].use == "request" else 1
    if "seed" in read:
        params["seed"] = integer("seed", read["seed"], 0, MAX_SEED - n + 1)
    else:
        params["seed"] = secrets.randbelow(DRAWN_SEEDS - n + 1)
    return params, n


def check_delivery(given: Mapping[str, object], medium: Medium = IMAGE) -> Delivery:
    """How the client wants the request handled. Raises InvalidParameter."""
    asked = [one for one in medium.parameters if one.use == "delivery" and given.get(one.name) is not None]
    return Delivery(**{one.name: one.read(given[one.name], None) for one in asked})


def seconds_of(frames: float, fps: float) -> str:
    """How long so many frames last, short enough to read and exact enough to be sent back."""
    return f"{frames / fps:.6f}".rstrip("0").rstrip(".")


def _unknown(name: str, known: Mapping[str, Parameter]) -> InvalidParameter:
    if name == "feature_cache":
        return InvalidParameter("feature_cache skips work and is not exact: serve with --batching batched", name)
    near = "size" if name in ("width", "height") else nearest(name, sorted(known), 0.4)
    hint = f"did you mean {near}?" if near else f"the parameters are {', '.join(sorted(known))}"
    return InvalidParameter(f"unknown parameter {shown(name)}: {hint}", shown(name)[1:-1])


def _length(limits: Limits, params: Params, read: Mapping[str, Any]) -> int:
    """Frames of a video: those asked for, or the fewest the model can make that fill the seconds asked for.

    Where neither is said it is the model's own number, or the most it makes if that is a single one.
    """
    multiple, fps = limits.frame_multiple, _default(params, "fps")
    most = limits.max_frames - (limits.max_frames - 1) % multiple
    name, frames = "num_frames", int(_default(params, "num_frames"))
    frames = read.get(name) or (frames if frames > 1 else most)
    if seconds := read.get("seconds"):
        needed = max(1, math.ceil(seconds * fps - FRAME_SLACK))
        needed += (1 - needed) % multiple
        if name in read and frames != needed:
            differs = f"{seconds:g} seconds are {needed} frames at {fps:g} fps, not {frames}"
            raise InvalidParameter(f"{differs}: send seconds or num_frames, not both", "seconds")
        name, frames = "seconds", needed
    if frames > most:
        bound = f"at most {most} frames, {seconds_of(most, fps)} seconds at {fps:g} fps"
        asked = f"{read[name]:g}" if name == "seconds" else shown(frames)
        raise InvalidParameter(f"{name} {asked} is too long: the model makes {bound}", name)
    if beyond := (frames - 1) % multiple:
        rule = f"num_frames must be one more than a multiple of {multiple}, not {frames}"
        raise InvalidParameter(f"{rule}; the nearest below is {frames - beyond}", name)
    return frames


def _quality(card: ModelCard, name: str, strict: bool) -> Params:
    """What a quality stands for, and its name if it does for anything."""
    if name in card.quality:
        return {**card.quality[name], "quality": name}
    if strict and name != "auto":
        known = ", ".join(["auto", *card.quality])
        raise InvalidParameter(f"quality {name} means nothing to model {card.name}: send one of {known}", "quality")
    return {}


def _preview_every(steps: int, read: Mapping[str, Any]) -> int:
    """After how many steps a preview is made (0: none): as asked for, or so that no more come than partial images."""
    partial = read.get("partial_images", 0)
    every = integer("preview_every", read.get("preview_every", 0), 0, steps)
    if partial and not read.get("stream"):
        raise InvalidParameter("partial_images come in a stream: send stream as true", "partial_images")
    if partial and every:
        raise InvalidParameter("partial_images and preview_every say the same: send one of them", "partial_images")
    return math.ceil(steps / (partial + 1)) if partial else every


def _adapter(params: Params) -> Params:
    """How strong an adapter is unless the client says so."""
    if "lora_scale" in params and "lora" not in params:
        raise InvalidParameter("lora_scale says how strong a lora is: send the name of one as lora too", "lora_scale")
    return {"lora_scale": params.get("lora_scale", 1.0)} if "lora" in params else {}


def _default(params: Params, name: str) -> float:
    value = params.get(name)
    if not isinstance(value, int | float):
        raise ConfigError(f"the model has no default {name}: set one in its serving.json")
    return value


def _fitting(limits: Limits, width: int, height: int) -> tuple[int, int]:
    near = nearest_size(limits, width, height)
    if near != (width, height):
        raise InvalidParameter(
            f"size {width}x{height} cannot be made: each side must be a multiple of {limits.size_multiple} from "
            f"{limits.min_size} to {limits.max_size}, with at most {limits.max_pixels} pixels in all; "
            f"the nearest is {near[0]}x{near[1]}",
            "size",
        )
    return width, height


def nearest_size(limits: Limits, width: int, height: int) -> tuple[int, int]:
    """The size in pixels closest to this one that the model can make (itself when it can)."""
    multiple = limits.size_multiple
    low, high = -(-limits.min_size // multiple) * multiple, limits.max_size // multiple * multiple

    def fit(side: int) -> int:
        return min(max((side + multiple // 2) // multiple * multiple, low), high)

    width, height = fit(width), fit(height)
    while width * height > limits.max_pixels and max(width, height) > low:
        width, height = (width - multiple, height) if width > height else (width, height - multiple)
    return width, height
