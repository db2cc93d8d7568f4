"""Media: what can be asked for, a table of parameters each, and how much of it there is. Only here is it pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from unfuse.core.errors import ConfigError, InvalidParameter
from unfuse.core.parameters import Parameter, Params, default_of, integer, shown

MAX_SEED = 2**53 - 1
"""The largest seed a client may send, and the largest of a request's pictures: every JSON reader keeps it exactly."""

MIN_S, MAX_S = 0.001, 86_400
MAX_STEPS, MAX_FRAMES = 1000, 1_000_000
"""Beyond what any model makes."""

FRAME_SLACK = 0.001
"""Part of a frame that seconds may lack by having been rounded, as ours are when they are told."""

PIXELS = ("width", "height", "num_frames")
"""What says how large a picture or a video is."""

Work = tuple[float, float]
"""Forwards of a stage's network, and the size of each."""


class Room(msgspec.Struct, frozen=True, rename={"each": "per_pixel", "group": "frame_group"}):
    """Predicted bytes of a stage's output: fixed + each × the product of the parameters in `size`.

    The last of these counts in groups: n are 1 + (n − 1) // group of them. Cards have the names on the wire that they
    had when there was no other size than PIXELS.
    """

    fixed: int = 0
    each: float = 0.0
    group: int = 1
    size: tuple[str, ...] = PIXELS

    def bytes(self, params: Params) -> int:
        """Bytes for one request with these parameters."""
        counts = [_count(params, name) for name in self.size]
        groups = [1 + (count - 1) // self.group for count in counts[-1:]]
        return self.fixed + round(self.each * math.prod(counts[:-1] + groups))


class Workload(msgspec.Struct, frozen=True):
    """How much a stage has to do for a request, by its parameters.

    `forwards` names the one that counts forwards of its network, each of which is a step ("": there is one). They are
    twice as many under guidance: where the first of the scales in `guidance` that is there is above 1, and there is a
    negative prompt. The size of a forward is the product of the parameters in `size`.
    """

    forwards: str = ""
    guidance: tuple[str, ...] = ()
    size: tuple[str, ...] = PIXELS

    def of(self, params: Params) -> Work:
        """What a request with these parameters is."""
        scale = next((params[name] for name in self.guidance if name in params), None)
        guided = isinstance(scale, int | float) and scale > 1 and params.get("negative_prompt") is not None
        forwards = _count(params, self.forwards) if self.forwards else 1
        return forwards * (1.0 + guided), float(math.prod(_count(params, name) for name in self.size))


def _count(params: Params, name: str) -> int:
    value = params.get(name)
    return value if isinstance(value, int) and value > 0 else 1


class Limits(msgspec.Struct, frozen=True):
    """What a model can be asked for. Sizes in pixels; `frame_multiple` k allows k·i + 1 frames."""

    size_multiple: int = 16
    min_size: int = 16
    max_size: int = 2048
    max_pixels: int = 2048 * 2048
    max_frames: int = 1
    frame_multiple: int = 4
    max_steps: int = 1000
    max_guidance: float = 100.0
    max_prompt_chars: int = 10_000
    max_sequence_length: int = 512
    max_n: int = 10


class Medium(msgspec.Struct, frozen=True):
    """What is asked for: the table of its parameters, and what `settle` makes of those that a client gave.

    `several` is what people call more than one; ids of its requests begin with `prefix`. It has `limits` of its own,
    and a model makes it whose limit `sign` is at least `least`. `settle` gets the model's limits, what the stages get
    so far, and what was read of the client's values; it returns what they get beside, or raises InvalidParameter. What
    is to share a forward has the parameters in `size` in common.
    """

    name: str
    several: str
    prefix: str
    sign: str
    least: int
    limits: type[msgspec.Struct]
    settle: Callable[[Any, Params, Mapping[str, Any]], Params]
    parameters: tuple[Parameter, ...]
    size: tuple[str, ...] = PIXELS

    def made_by(self, limits: Mapping[str, float]) -> bool:
        """Whether a model with these limits can be asked for it."""
        return limits.get(self.sign, 0) >= self.least

    def limits_of(self, limits: Mapping[str, float]) -> Any:
        """Those of a model's limits that it has, and the usual ones where the model says nothing.

        Raises ConfigError for some that are none.
        """
        try:
            return msgspec.convert(limits, self.limits)
        except msgspec.ValidationError as error:
            raise ConfigError(f"the limits of the model cannot be read: {error}") from error

    def takes(self, name: str, value: object) -> bool:
        """Whether its table has a use for this, as far as that can be told without a model."""
        found = (one for one in self.parameters if one.name == name)
        return any(not one.choices or value in one.choices for one in found)

    def known(self, defaults: Params) -> dict[str, Parameter]:
        """What may be sent for a model with these defaults, by name."""
        return {one.name: one for one in self.parameters if not one.particular or one.name in defaults}


def seconds_of(frames: float, fps: float) -> str:
    """How long so many frames last, short enough to read and exact enough to be sent back."""
    return f"{frames / fps:.6f}".rstrip("0").rstrip(".")


def _still(limits: Limits, params: Params, read: Mapping[str, Any]) -> Params:
    return _pictured(limits, params, read) | {"num_frames": 1}


def _moving(limits: Limits, params: Params, read: Mapping[str, Any]) -> Params:
    frames = _length(limits, params, read)
    return _pictured(limits, params, read) | {"num_frames": frames}


def _pictured(limits: Limits, params: Params, read: Mapping[str, Any]) -> Params:
    settled: Params = {}
    if every := _preview_every(int(default_of(params, "num_inference_steps")), read):
        settled["preview_every"] = every
    if (size := read.get("size", "auto")) != "auto":
        settled["width"], settled["height"] = _fitting(limits, *map(int, size.split("x")))
    return settled


def _length(limits: Limits, params: Params, read: Mapping[str, Any]) -> int:
    """Frames of a video: those asked for, or the fewest the model can make that fill the seconds asked for.

    Where neither is said it is the model's own number, or the most it makes if that is a single one.
    """
    multiple, fps = limits.frame_multiple, default_of(params, "fps")
    most = limits.max_frames - (limits.max_frames - 1) % multiple
    name, frames = "num_frames", int(default_of({"num_frames": 1, **params}, "num_frames"))
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


def _preview_every(steps: int, read: Mapping[str, Any]) -> int:
    """After how many steps a preview is made (0: none): as asked for, or so that no more come than partial images."""
    partial = read.get("partial_images", 0)
    every = integer("preview_every", read.get("preview_every", 0), 0, steps)
    if partial and not read.get("stream"):
        raise InvalidParameter("partial_images come in a stream: send stream as true", "partial_images")
    if partial and every:
        raise InvalidParameter("partial_images and preview_every say the same: send one of them", "partial_images")
    return math.ceil(steps / (partial + 1)) if partial else every


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


MADE = (
    Parameter("prompt", "text", 1, "max_prompt_chars", says="what the picture should show", required=True, flag=None),
    Parameter(
        "negative_prompt", "text", 0, "max_prompt_chars", default="", says="what the picture should not show",
        flag="--negative",
    ),
    Parameter(
        "size", "form", use="request", default="auto", says="width and height in pixels", stands="WxH",
        form=("auto|[0-9]{1,6}x[0-9]{1,6}", "auto or WIDTHxHEIGHT in pixels (64x64)"), also=("width", "height"),
    ),
    Parameter("num_inference_steps", "integer", 1, "max_steps", says="denoising steps", flag="--steps"),
    Parameter(
        "guidance_scale", "number", 0, "max_guidance", says="how strongly to follow the prompt", flag="--guidance"
    ),
    Parameter(
        "guidance_scale_2", "number", 0, "max_guidance", particular=True,
        says="guidance of the less noisy steps, for models that have one of their own",
    ),
    Parameter(
        "true_cfg_scale", "number", 0, "max_guidance", particular=True,
        says="guidance by the negative prompt, for models that have another one too",
    ),
    Parameter(
        "feature_cache", "number", 0, 1, particular=True, flag=None,
        says="where pools batch: skip transformer blocks while the first one's effect differs by less",
    ),
    Parameter(
        "seed", "integer", 0, MAX_SEED, use="request", says="seed of the first picture; drawn, and told, if left out"
    ),
    Parameter("lora", "text", 1, 128, says="adapter to use, by its name in --loras", stands="NAME"),
    Parameter("lora_scale", "number", -10, 10, says="how strong the adapter is; 1 if left out"),
    Parameter("fps", "integer", 1, 120, says="frames a second of a video"),
    Parameter("output_compression", "integer", 0, 100, default=100, says="quality of jpeg and webp"),
    Parameter(
        "preview_every", "integer", 0, MAX_STEPS, use="request", says="steps between previews; 0: none", flag=None
    ),
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

IMAGE = Medium(
    "image", "pictures", "req_", "max_size", 1, Limits, _still,
    (
        *MADE,
        Parameter(
            "output_format", "choice", choices=("png", "jpeg", "webp"), default="png", says="of the files", flag=None
        ),
        Parameter(
            "n", "integer", 1, "max_n", use="request", default=1, flag="-n",
            says="how many pictures; each further one has the next seed",
        ),
        Parameter(
            "quality", "choice", choices=("auto", "low", "medium", "standard", "high", "hd"), use="request",
            default="auto", says="how much to put into it; the answer says which one was used",
        ),
        Parameter("background", "choice", choices=("auto", "opaque"), use="nothing"),
        Parameter("num_frames", "choice", choices=(1, "1"), use="nothing"),
        Parameter("response_format", "choice", choices=("b64_json", "url"), use="delivery"),
        Parameter("stream", "flag", use="delivery", says="answer with events"),
        Parameter(
            "partial_images", "integer", 0, 3, use="request", says="previews of each picture; needs stream", flag=None
        ),
    ),
)  # fmt: skip
VIDEO = Medium(
    "video", "videos", "video_", "max_frames", 2, Limits, _moving,
    (
        *MADE,
        Parameter("output_format", "choice", choices=("mp4", "png"), default="mp4", says="of the files", flag=None),
        Parameter("n", "choice", choices=(1, "1"), use="nothing"),
        Parameter(
            "num_frames", "integer", 1, MAX_FRAMES, use="request", says="length of a video, in frames", flag="--frames"
        ),
        Parameter(
            "seconds", "number", MIN_S, MAX_S, use="request",
            says="length of a video, in seconds; rounded up to one that the model can make",
        ),
    ),
)  # fmt: skip
"""As png every frame is a file of its own, without loss."""

MEDIA = (IMAGE, VIDEO)


def medium_of(id: str) -> Medium:
    """What a request with this id asks for."""
    return next((medium for medium in MEDIA if id.startswith(medium.prefix)), IMAGE)


def medium_for(asked: Mapping[str, object]) -> Medium:
    """What somebody means who asks for this and does not say what: pictures, unless only another has a use for it."""
    given = [(name, value) for name, value in asked.items() if value is not None and not IMAGE.takes(name, value)]
    return next((medium for medium in MEDIA if any(medium.takes(*one) for one in given)), IMAGE)
