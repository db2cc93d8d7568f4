"""Modalities (image, video, text): their parameters, limits, and rules for sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from unfuse.core.errors import InvalidParameter
from unfuse.core.parameters import (
    DELIVERY_PARAMETERS,
    MAX_S,
    MAX_SEED as MAX_SEED,
    MIN_S,
    MIN_SEED as MIN_SEED,
    PIXELS as PIXELS,
    Modality as Modality,
    OutputSize as OutputSize,
    Parameter,
    Params,
    Work as Work,
    Workload as Workload,
    default_of,
    integer,
    printable,
)
from unfuse.core.text_parameters import TEXT as TEXT

# bounds for every model; a model's own limits are lower
MAX_STEPS = 1000
MAX_FRAMES = 1_000_000
MAX_SIDE = 999_999

IGNORED = "accepted and ignored"

IMAGE_UPLOADS = ("image", *(f"image_{number}" for number in range(2, 9)))
"""Names of uploads: the picture that a request starts from, and further pictures, in order."""

UPLOAD = IMAGE_UPLOADS[0]

MASK, LAST_FRAME = "mask", "last_frame"
"""Names of uploads in addition to a start picture: the mask of the area to redraw, and the last frame of a video."""

UPLOADS = (*IMAGE_UPLOADS, MASK, LAST_FRAME)

FRAME_SLACK = 0.001  # fraction of a frame by which a length in seconds may be too short, because it was rounded


class MediaLimits(msgspec.Struct, frozen=True):
    """Limits of a model that generates pictures or videos."""

    #: Each side of a picture or frame is a multiple of this many pixels.
    size_multiple: int = 16
    #: The shortest side, in pixels.
    min_size: int = 16
    #: The longest side, in pixels.
    max_size: int = 2048
    #: The most pixels of a picture or frame.
    max_pixels: int = 2048 * 2048
    #: The most pixels of all frames of a video together; 0: as many as the other limits allow.
    max_video_pixels: int = 0
    #: The most frames of a result; 1: the model generates no videos.
    max_frames: int = 1
    #: A video has i · frame_multiple + 1 frames, as the VAE encodes its first frame alone.
    frame_multiple: int = 4
    #: The most denoising steps.
    max_steps: int = 1000
    #: Largest guidance scale.
    max_guidance: float = 100.0
    #: The most characters of a prompt, or of a negative prompt.
    max_prompt_chars: int = 10_000
    #: The most tokens of a prompt.
    max_sequence_length: int = 512
    #: The most results of one request.
    max_n: int = 10


def seconds_of(frames: float, fps: float) -> str:
    """Return the length of a video in seconds, as a client can send it."""
    return f"{frames / fps:.6f}".rstrip("0").rstrip(".")


def _complete_image(limits: MediaLimits, params: Params, values: Mapping[str, Any], _: object) -> Params:
    """Return the further parameters of a picture (`Modality.complete_params`)."""
    return _complete_common(limits, params, values) | {"num_frames": 1}


def _complete_video(limits: MediaLimits, params: Params, values: Mapping[str, Any], _: object) -> Params:
    """Return the further parameters of a video (`Modality.complete_params`)."""
    frames = _frames(limits, params, values)
    completed = _complete_common(limits, params, values)
    width, height = (int(completed.get(side) or default_of(params, side)) for side in ("width", "height"))
    _check_video_pixels(limits, width, height, frames)
    return completed | {"num_frames": frames}


def _check_video_pixels(limits: MediaLimits, width: int, height: int, frames: int) -> None:
    """Raise InvalidParameter if all frames together have too many pixels."""
    if not limits.max_video_pixels or width * height * frames <= limits.max_video_pixels:
        return
    possible = limits.max_video_pixels // (width * height)
    possible -= (possible - 1) % limits.frame_multiple
    advice = f"at most {possible} frames of this size" if possible > 0 else "a smaller size"
    raise InvalidParameter(
        f"{frames} frames of {width}x{height} have {width * height * frames} pixels, but a video may have at most "
        f"{limits.max_video_pixels}: ask for {advice}",
        "num_frames",
    )


def _complete_common(limits: MediaLimits, params: Params, values: Mapping[str, Any]) -> Params:
    """Return the interval of previews and the size, each only if the client requested it."""
    completed: Params = {}
    if interval := _preview_every(int(default_of(params, "num_inference_steps")), values):
        completed["preview_every"] = interval
    if asks_size(values):
        completed["width"], completed["height"] = _checked_size(limits, params, values)
    return completed


def asks_size(fields: Mapping[str, Any]) -> bool:
    """Whether these fields set the size of the result."""
    return fields.get("size") not in (None, "auto") or any(fields.get(side) is not None for side in ("width", "height"))


def _frames(limits: MediaLimits, params: Params, values: Mapping[str, Any]) -> int:
    """Return the number of frames of a video, from `num_frames` or `seconds`.

    For `seconds` it is the fewest frames that last that long. Without either it is the model's default, or the model's
    maximum if that default is 1.
    """
    multiple = limits.frame_multiple
    fps = default_of(params, "fps")
    max_frames = limits.max_frames - (limits.max_frames - 1) % multiple

    name = "num_frames"
    default_frames = int(default_of({"num_frames": 1, **params}, "num_frames"))
    frames = values.get(name) or (default_frames if default_frames > 1 else max_frames)
    seconds = values.get("seconds")
    if seconds and name not in values:
        name = "seconds"
        frames = max(1, math.ceil(seconds * fps - FRAME_SLACK))
        frames += (1 - frames) % multiple  # up to the next allowed number

    if frames > max_frames:
        bound = f"at most {max_frames} frames, {seconds_of(max_frames, fps)} seconds at {fps:g} fps"
        requested = f"{values[name]:g}" if name == "seconds" else printable(frames)
        raise InvalidParameter(f"{name} {requested} is too long: the model supports {bound}", name)
    if excess := (frames - 1) % multiple:
        rule = f"num_frames must be one more than a multiple of {multiple}, not {frames}"
        raise InvalidParameter(f"{rule}; the nearest below is {frames - excess}", name)
    return frames


def _preview_every(steps: int, values: Mapping[str, Any]) -> int:
    """Return the number of steps between previews; 0 for none.

    It is `preview_every`, or follows from the number of `partial_images`. `steps` is the number of denoising steps.
    """
    partial_images = values.get("partial_images", 0)
    interval = integer("preview_every", values.get("preview_every", 0), 0, steps)
    if partial_images and not values.get("stream"):
        raise InvalidParameter("partial_images need a streamed response: set stream to true", "partial_images")
    if partial_images and interval:
        raise InvalidParameter("partial_images and preview_every both set previews: send one of them", "partial_images")

    return math.ceil(steps / (partial_images + 1)) if partial_images else interval


def _checked_size(limits: MediaLimits, params: Params, values: Mapping[str, Any]) -> tuple[int, int]:
    """Return the requested width and height; a missing side has its default.

    They come from `size`, or from `width` and `height`.
    """
    size = values.get("size", "auto")
    sides = ("width", "height")
    if size == "auto":
        width, height = (int(values.get(side) or default_of(params, side)) for side in sides)
    else:
        width, height = map(int, size.split("x"))
    for side, length in zip(sides, (width, height), strict=True):
        if values.get(side, length) != length:
            raise InvalidParameter(f"size {size} contradicts {side} {values[side]}: send one of them", side)

    nearest = nearest_size(limits, width, height)
    if nearest != (width, height):
        wrong_side = "width" if nearest[0] != width else "height"
        raise InvalidParameter(
            f"size {width}x{height} is not supported: each side must be a multiple of {limits.size_multiple} from "
            f"{limits.min_size} to {limits.max_size}, with at most {limits.max_pixels} pixels in all; "
            f"the nearest is {nearest[0]}x{nearest[1]}",
            wrong_side if size == "auto" else "size",
        )
    return width, height


def size_like(limits: MediaLimits, area: float, width: int, height: int) -> tuple[int, int]:
    """Return a supported size of about `area` pixels, shaped like width x height.

    Sides are rounded down to multiples, as in diffusers' image-to-video scripts. A size with a side above the model's
    limit is scaled down.
    """
    multiple = limits.size_multiple
    area = min(area, limits.max_pixels)
    sides = math.sqrt(area * width / height), math.sqrt(area * height / width)
    scale = min(1.0, limits.max_size / max(sides))
    columns, rows = (max(round(side * scale) // multiple * multiple, multiple) for side in sides)
    return nearest_size(limits, columns, rows)


def nearest_size(limits: MediaLimits, width: int, height: int) -> tuple[int, int]:
    """Return the closest size, in pixels, that the model supports: this one if it does."""
    multiple = limits.size_multiple
    low = -(-limits.min_size // multiple) * multiple
    high = limits.max_size // multiple * multiple

    def fit(side: int) -> int:
        return min(max((side + multiple // 2) // multiple * multiple, low), high)

    width, height = fit(width), fit(height)
    # the longer side shrinks first, which keeps the shape as near as possible
    while width * height > limits.max_pixels and max(width, height) > low:
        width, height = (width - multiple, height) if width > height else (width, height - multiple)
    return width, height


COMMON = (
    Parameter(
        "prompt",
        "text",
        1,
        "max_prompt_chars",
        description="a description of the picture or video to generate",
        required=True,
        flag=None,
    ),
    Parameter(
        "negative_prompt",
        "text",
        0,
        "max_prompt_chars",
        default="",
        description="a description of what the result should not show",
        flag="--negative",
    ),
    Parameter(
        "size",
        "form",
        use="request",
        default="auto",
        metavar="WxH",
        description="width and height in pixels; auto: the model's default, in the aspect ratio of a start picture",
        form=("auto|[0-9]{1,6}x[0-9]{1,6}", "auto or WIDTHxHEIGHT in pixels (64x64)"),
    ),
    Parameter(
        "width",
        "integer",
        1,
        MAX_SIDE,
        use="request",
        flag=None,
        description="width in pixels, instead of size; the model's default if only height is sent",
    ),
    Parameter(
        "height",
        "integer",
        1,
        MAX_SIDE,
        use="request",
        flag=None,
        description="height in pixels, instead of size; the model's default if only width is sent",
    ),
    Parameter(
        "num_inference_steps", "integer", 1, "max_steps", description="number of denoising steps", flag="--steps"
    ),
    Parameter(
        "guidance_scale",
        "number",
        0,
        "max_guidance",
        description="guidance scale: how closely the result follows the prompt",
        flag="--guidance",
    ),
    Parameter(
        "guidance_scale_2",
        "number",
        0,
        "max_guidance",
        by_model=True,
        description="guidance scale of the less noisy steps, for models with a separate one",
    ),
    Parameter(
        "true_cfg_scale",
        "number",
        0,
        "max_guidance",
        by_model=True,
        description="classifier-free guidance scale with the negative prompt, for models with this parameter",
    ),
    Parameter(
        "strength",
        "number",
        0,
        1,
        description="how much a redrawn picture changes: the share of denoising steps that run; 1: all steps",
    ),
    Parameter(
        "feature_cache",
        "number",
        0,
        1,
        by_model=True,
        flag=None,
        description="first-block cache threshold: skip the other blocks below it; only in batched pools",
    ),
    Parameter(
        "seed",
        "integer",
        MIN_SEED,
        MAX_SEED,
        use="request",
        description="seed of the first result, which the response contains; random by default, or if it is -1",
    ),
    Parameter(
        "lora",
        "scaled",
        -10,
        10,
        metavar="NAME[:SCALE]",
        description="names of LoRA adapters in the folder of --loras, each with an optional scale; effects are added",
    ),
    Parameter("lora_scale", "number", -10, 10, description="scale of LoRA adapters without one; 1 by default"),
    Parameter("fps", "integer", 1, 120, description="frames per second of a video"),
    Parameter("output_compression", "integer", 0, 100, default=100, description="quality of jpeg and webp"),
    Parameter(
        "preview_every",
        "integer",
        0,
        MAX_STEPS,
        use="request",
        description="denoising steps between previews; 0: no previews",
        flag=None,
    ),
    *DELIVERY_PARAMETERS,
    *(Parameter(name, "any", use="nothing", description=IGNORED) for name in ("user", "safety_identifier")),
    *(Parameter(name, "any", use="unused", description=IGNORED) for name in ("style", "moderation", "input_fidelity")),
)
"""The parameters that pictures and videos share. The last few are fields that the `openai` client may send."""

IMAGE = Modality(
    "image",
    plural="pictures",
    prefix="req_",
    limit_name="max_size",
    min_limit=1,
    limits=MediaLimits,
    complete_params=_complete_image,
    parameters=(
        *COMMON,
        Parameter(
            "output_format",
            "choice",
            choices=("png", "jpeg", "webp"),
            default="png",
            description="format of the files",
            flag=None,
        ),
        Parameter(
            "n",
            "integer",
            1,
            "max_n",
            use="request",
            default=1,
            flag="-n",
            description="number of pictures, which have consecutive seeds",
        ),
        Parameter(
            "quality",
            "choice",
            use="request",
            default="auto",
            choices=("auto", "low", "medium", "standard", "high", "hd", "xhigh", "max"),
            description="preset of parameters such as the steps; the response contains the one that was used",
        ),
        Parameter("background", "choice", choices=("auto", "opaque"), use="nothing"),
        Parameter("complexity", "any", use="unused", description=IGNORED),
        Parameter("frame_count", "choice", choices=(1, "1"), use="nothing"),
        Parameter("frame_duration_ms", "any", use="nothing", description=IGNORED),
        Parameter("svg", "any", use="nothing", description=IGNORED),
        Parameter("markup", "any", use="refused", description="is not supported: draw it into the picture"),
        Parameter("num_frames", "choice", choices=(1, "1"), use="nothing"),
        Parameter(
            "response_format",
            "choice",
            choices=("b64_json", "url"),
            use="delivery",
            description="how the response returns pictures",
        ),
        Parameter("stream", "flag", use="delivery", description="stream the response as server-sent events"),
        Parameter(
            "partial_images",
            "integer",
            0,
            3,
            use="request",
            description="number of previews of each picture; needs stream",
            flag=None,
        ),
    ),
)
VIDEO = Modality(
    "video",
    plural="videos",
    prefix="video_",
    limit_name="max_frames",
    min_limit=2,
    limits=MediaLimits,
    complete_params=_complete_video,
    parameters=(
        *COMMON,
        Parameter(
            "output_format",
            "choice",
            choices=("mp4", "png"),
            default="mp4",
            description="format of the files",
            flag=None,
        ),
        Parameter("n", "choice", choices=(1, "1"), use="nothing"),
        Parameter(
            "num_frames",
            "integer",
            1,
            MAX_FRAMES,
            use="request",
            description="length of a video, in frames",
            flag="--frames",
        ),
        Parameter(
            "seconds",
            "number",
            MIN_S,
            MAX_S,
            use="request",
            description="length of a video in seconds, rounded up to a supported length; ignored with num_frames",
        ),
    ),
)
"""With output_format png, every frame is a separate, lossless file."""

MODALITIES = (IMAGE, VIDEO, TEXT)


def modality_of(id: str) -> Modality:
    """Return the modality of the request with this id."""
    return next((modality for modality in MODALITIES if id.startswith(modality.prefix)), IMAGE)


def modality_for(fields: Mapping[str, object]) -> Modality:
    """Return the modality that these parameters suggest.

    It is image, unless a parameter exists only in another modality.
    """
    other_fields = [
        (name, value) for name, value in fields.items() if value is not None and not IMAGE.allows(name, value)
    ]
    return next((modality for modality in MODALITIES if any(modality.allows(*field) for field in other_fields)), IMAGE)
