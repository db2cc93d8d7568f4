"""What a client may ask for, checked against a model's card before anything is queued.

Values arrive as JSON values (where 2.0 is the whole number 2) or as form strings; null counts as left out. Whatever is
refused is refused with InvalidParameter, whose sentence holds the bound and the value.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from unfuse.core.card import Limits, ModelCard
from unfuse.core.errors import ConfigError, InvalidParameter
from unfuse.core.nearest import nearest
from unfuse.core.plan import Params, Value

MAX_SEED = 2**53 - 1
"""The largest seed a client may send, and the largest of a request's pictures: every JSON reader keeps it exactly."""

DRAWN_SEEDS = 2**31
"""A seed that was left out is drawn below this, short enough to type again."""

MIN_TIMEOUT, MAX_TIMEOUT = 0.001, 86_400.0
MAX_PRIORITY = 100
MAX_FPS = 120
MAX_METADATA = 16
MAX_LORA_SCALE = 10.0
MAX_PARTIAL = 3

UNUSED = frozenset({"user", "style", "moderation", "safety_identifier", "input_fidelity"})
"""Fields the `openai` client may send and unfuse has no use for: any value is accepted."""


class Medium(msgspec.Struct, frozen=True):
    """A kind of call: the formats it has, its standard one first; fields no other kind has; fields with one value."""

    formats: tuple[str, ...]
    own: frozenset[str]
    only: dict[str, tuple[object, ...]]


QUALITIES = ("auto", "low", "medium", "standard", "high", "hd")
"""What OpenAI's clients may ask for; a model's card says what it means, or else it means nothing."""

PICTURE = Medium(
    ("png", "jpeg", "webp"),
    frozenset({"response_format", "stream", "partial_images", "quality"}),
    {"num_frames": (1, "1"), "background": ("auto", "opaque")},
)
VIDEO = Medium(("mp4", "png"), frozenset({"seconds"}), {"n": (1, "1")})
"""As png every frame is a file of its own, without loss."""

_SHARED = frozenset({"model", "n", "seed", "size", "num_frames", "preview_every", "output_format"})
_STANDARD: Params = {"negative_prompt": "", "num_frames": 1, "output_compression": 100}
_PARTICULAR = {"guidance_scale_2", "true_cfg_scale", "feature_cache"}
"""Fields that are known where a model, or who serves it, has a default for them."""

_FRAME_SLACK = 0.001
"""Part of a frame that seconds may lack by having been rounded, as ours are when they are told."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?")
_SIZE = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")


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
    card: ModelCard, given: Mapping[str, object], medium: Medium = PICTURE, *, strict: bool = False
) -> tuple[Params, int]:
    """Everything the stages need for a request, and how many pictures it asks for.

    What the client left out comes from the card's defaults; a missing seed is drawn. The pictures have the seeds
    s … s + n − 1. Raises InvalidParameter, also for a field that nobody knows, and if `strict` for a quality that means
    nothing to the model.
    """
    values = {name: value for name, value in given.items() if value is not None}
    for name in values:
        _known(card, medium, name)
    for name, allowed in medium.only.items():
        if name in values and values[name] not in allowed:
            can = " or ".join(dict.fromkeys(str(value) for value in allowed))
            raise InvalidParameter(f"{name} can only be {can} here, not {_shown(values[name])}", name)
    limits = card.limits
    params: Params = {**_STANDARD, **card.defaults, **_quality(card, values.get("quality", "auto"), strict)}
    if "prompt" not in values:
        raise InvalidParameter("prompt is missing: say what to show", "prompt")
    for name, read in _READERS.items():
        if name in values:
            params[name] = read(limits, values[name])
    params |= _adapter(params)
    params["output_format"] = _choice("output_format", values.get("output_format", medium.formats[0]), medium.formats)
    params["num_frames"] = _length(limits, params, values) if medium is VIDEO else 1
    if every := _preview_every(int(_default(params, "num_inference_steps")), values):
        params["preview_every"] = every
    if values.get("size", "auto") != "auto":
        params["width"], params["height"] = _size(limits, values["size"])
    n = _integer("n", values.get("n", 1), 1, limits.max_n)
    if "seed" in values:
        params["seed"] = _integer("seed", values["seed"], 0, MAX_SEED - n + 1)
    else:
        params["seed"] = secrets.randbelow(DRAWN_SEEDS - n + 1)
    return params, n


def check_delivery(given: Mapping[str, object]) -> Delivery:
    """How the client wants the request handled. Raises InvalidParameter."""
    values = {name: given[name] for name in Delivery.__struct_fields__ if given.get(name) is not None}
    form = _choice("response_format", values.get("response_format", "b64_json"), ("b64_json", "url"))
    timeout = values.get("timeout")
    return Delivery(
        response_format="url" if form == "url" else "b64_json",
        stream=_flag("stream", values.get("stream", False)),
        priority=_integer("priority", values.get("priority", 0), -MAX_PRIORITY, MAX_PRIORITY),
        timeout=None if timeout is None else _number("timeout", timeout, MIN_TIMEOUT, MAX_TIMEOUT),
        metadata=_metadata(values.get("metadata", {})),
        cache=_flag("cache", values.get("cache", True)),
    )


def seconds_of(frames: float, fps: float) -> str:
    """How long so many frames last, short enough to read and exact enough to be sent back."""
    return f"{frames / fps:.6f}".rstrip("0").rstrip(".")


def _known(card: ModelCard, medium: Medium, name: str) -> None:
    delivery = {*Delivery.__struct_fields__} - PICTURE.own
    fields = _READERS.keys() - (_PARTICULAR - card.defaults.keys())
    known = sorted({*fields, *_SHARED, *UNUSED, *delivery, *medium.own, *medium.only})
    if name in known:
        return
    if name == "feature_cache":
        raise InvalidParameter("feature_cache skips work and is not exact: serve with --batching batched", name)
    near = "size" if name in ("width", "height") else nearest(name, known, 0.4)
    hint = f"did you mean {near}?" if near else f"the parameters are {', '.join(known)}"
    raise InvalidParameter(f"unknown parameter {_shown(name)}: {hint}", _shown(name)[1:-1])


def _text(name: str, value: object, low: int, high: int) -> str:
    if not isinstance(value, str):
        raise InvalidParameter(f"{name} must be text, not {_shown(value)}", name)
    if not low <= len(value) <= high:
        raise InvalidParameter(f"{name} must be {low} to {high} characters long, not {len(value)}", name)
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidParameter(f"{name} holds half of a surrogate pair, which is not text", name)
    return value


def _integer(name: str, value: object, low: int, high: int) -> int:
    number = value
    if isinstance(value, str) and _INTEGER.fullmatch(value) or isinstance(value, float) and value.is_integer():
        number = int(value)
    if not isinstance(number, int) or isinstance(number, bool):
        raise InvalidParameter(f"{name} must be a whole number ({low} to {high}), not {_shown(value)}", name)
    if not low <= number <= high:
        raise InvalidParameter(f"{name} must be {low} to {high}, not {_shown(number)}", name)
    return number


def _number(name: str, value: object, low: float, high: float) -> float:
    number = float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise InvalidParameter(f"{name} must be a number ({low:g} to {high:g}), not {_shown(value)}", name)
    if not low <= number <= high:
        raise InvalidParameter(f"{name} must be {low:g} to {high:g}, not {_shown(number)}", name)
    return float(number)


def _length(limits: Limits, params: Params, values: Mapping[str, object]) -> int:
    """Frames of a video: those asked for, or the fewest the model can make that fill the seconds asked for.

    Where neither is said it is the model's own number, or the most it makes if that is a single one.
    """
    multiple, fps = limits.frame_multiple, _default(params, "fps")
    most = limits.max_frames - (limits.max_frames - 1) % multiple
    name, frames = "num_frames", int(_default(params, "num_frames"))
    frames = frames if frames > 1 else most
    if name in values:
        frames = _integer(name, values[name], 1, MAX_SEED)
    if "seconds" in values:
        seconds = _number("seconds", values["seconds"], MIN_TIMEOUT, MAX_TIMEOUT)
        needed = max(1, math.ceil(seconds * fps - _FRAME_SLACK))
        needed += (1 - needed) % multiple
        if name in values and frames != needed:
            differs = f"{seconds:g} seconds are {needed} frames at {fps:g} fps, not {frames}"
            raise InvalidParameter(f"{differs}: send seconds or num_frames, not both", "seconds")
        name, frames = "seconds", needed
    if frames > most:
        bound = f"at most {most} frames, {seconds_of(most, fps)} seconds at {fps:g} fps"
        raise InvalidParameter(f"{name} {_shown(values[name])} is too long: the model makes {bound}", name)
    if beyond := (frames - 1) % multiple:
        rule = f"num_frames must be one more than a multiple of {multiple}, not {frames}"
        raise InvalidParameter(f"{rule}; the nearest below is {frames - beyond}", name)
    return frames


def _quality(card: ModelCard, value: object, strict: bool) -> Params:
    """What a quality stands for, and its name if it does for anything."""
    name = _choice("quality", value, QUALITIES)
    if name in card.quality:
        return {**card.quality[name], "quality": name}
    if strict and name != "auto":
        known = ", ".join(["auto", *card.quality])
        raise InvalidParameter(f"quality {name} means nothing to model {card.name}: send one of {known}", "quality")
    return {}


def _preview_every(steps: int, values: Mapping[str, object]) -> int:
    """After how many steps a preview is made (0: none): as asked for, or so that no more come than partial images."""
    partial = _integer("partial_images", values.get("partial_images", 0), 0, MAX_PARTIAL)
    every = _integer("preview_every", values.get("preview_every", 0), 0, steps)
    if partial and str(values.get("stream")).lower() != "true":
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


def _choice(name: str, value: object, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        raise InvalidParameter(f"{name} must be one of {', '.join(known)}, not {_shown(value)}", name)
    return value


def _flag(name: str, value: object) -> bool:
    return _choice(name, str(value).lower(), ("true", "false")) == "true"


def _size(limits: Limits, value: object) -> tuple[int, int]:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise InvalidParameter(f"size must be auto or WIDTHxHEIGHT in pixels (64x64), not {_shown(value)}", "size")
    width, height = int(match[1]), int(match[2])
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


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise InvalidParameter(f"metadata must be an object of at most {MAX_METADATA} texts", "metadata")
    return {_text("metadata key", key, 1, 64): _text(f"metadata.{key}"[:80], one, 0, 512) for key, one in value.items()}


def _shown(value: object) -> str:
    """The value as it may stand in a sentence: short, printable whatever it is."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:60] + "…")
    if isinstance(value, bytes):
        return "a file"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


_READERS: dict[str, Callable[[Limits, object], Value]] = {
    "prompt": lambda limits, value: _text("prompt", value, 1, limits.max_prompt_chars),
    "negative_prompt": lambda limits, value: _text("negative_prompt", value, 0, limits.max_prompt_chars),
    "num_inference_steps": lambda limits, value: _integer("num_inference_steps", value, 1, limits.max_steps),
    "guidance_scale": lambda limits, value: _number("guidance_scale", value, 0.0, limits.max_guidance),
    "guidance_scale_2": lambda limits, value: _number("guidance_scale_2", value, 0.0, limits.max_guidance),
    "true_cfg_scale": lambda limits, value: _number("true_cfg_scale", value, 0.0, limits.max_guidance),
    "feature_cache": lambda _, value: _number("feature_cache", value, 0.0, 1.0),
    "lora": lambda _, value: _text("lora", value, 1, 128),
    "lora_scale": lambda _, value: _number("lora_scale", value, -MAX_LORA_SCALE, MAX_LORA_SCALE),
    "fps": lambda _, value: _integer("fps", value, 1, MAX_FPS),
    "output_compression": lambda _, value: _integer("output_compression", value, 0, 100),
}
