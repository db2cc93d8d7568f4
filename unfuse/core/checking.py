"""Validates a request's fields against the modality's table and the model spec.

A request is validated before any of its tasks is queued.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from unfuse.core.errors import InvalidParameter
from unfuse.core.modalities import IMAGE, LAST_FRAME, MediaLimits, Modality, asks_size, size_like
from unfuse.core.model_spec import ModelSpec
from unfuse.core.parameters import RANDOM_SEED, Parameter, Params, default_of, printable, text
from unfuse.core.request import Delivery
from unfuse.core.text_parameters import PromptTokens

DRAWN_SEEDS = 2**31  # random seeds are below this number, so that they are short enough to type
NEUTRAL_VALUES = (
    0,
    "",
    "auto",
)  # values without effect, which a client may send for a parameter that the model refuses


def check_request(
    spec: ModelSpec,
    fields: Mapping[str, object],
    modality: Modality = IMAGE,
    *,
    strict: bool = False,
    uploads: Collection[str] = (),
    files: Collection[str] = (),
    tokens: PromptTokens | None = None,
) -> tuple[Params, int]:
    """Return the checked parameters for the stages, and n, the number of results.

    A field that is missing or null gets the model's default. A missing seed, and -1, is replaced by a random one. The
    results have the seeds s … s + n − 1 (see `nth_seed`).

    - `fields`: the fields that the client sent.
    - `strict`: refuse fields without effect.
    - `uploads`: names of the request's uploads.
    - `files`: names of the fields that may hold uploads.
    - `tokens`: a chat's fields, as the tokenizer encodes them. Only chats need it.

    Raises InvalidParameter for a bad value, an unknown field, and, if `strict`, a field without effect.
    """
    sent = {name: value for name, value in fields.items() if value is not None}
    parameters = modality.parameters_for(spec.defaults)
    refused_names = {accepted.name for accepted in spec.accepts if not accepted.max}
    for name in sent:
        if name not in parameters:
            raise _unknown_parameter(name, parameters, files)
        if parameters[name].use == "refused":
            raise InvalidParameter(f"{name} {parameters[name].description}", name)
        if strict and parameters[name].use == "unused":
            raise InvalidParameter(f"{name} has no effect here: leave it out", name)
        if name in refused_names and sent[name] not in NEUTRAL_VALUES:
            raise InvalidParameter(f"model {spec.name} takes no {name}: leave it out", name)
    for parameter in modality.parameters:
        if parameter.required and parameter.name not in sent:
            raise InvalidParameter(f"{parameter.name} is missing: send {parameter.description}", parameter.name)

    limits = modality.limits_of(spec.limits)
    values = {name: parameters[name].read(value, limits) for name, value in sent.items()}

    # later sources override earlier ones: the table's defaults, the model's, the client's values, derived values
    stage_parameters = [parameter for parameter in modality.parameters if parameter.use == "stages"]
    params: Params = {
        parameter.name: parameter.default for parameter in stage_parameters if parameter.default is not None
    }
    params |= {**spec.defaults, **_quality(spec, values.get("quality", "auto"), strict)}
    params |= {name: value for name, value in values.items() if parameters[name].use == "stages"}
    params |= _lora_scale(params)
    params |= modality.complete_params(limits, params, values, tokens)
    params |= _strength(spec, values, params, uploads)
    if LAST_FRAME in uploads and default_of(params, "num_frames") < 2:
        raise InvalidParameter("num_frames must be greater than 1 with a last_frame", "num_frames")

    n = values.get("n", 1) if "n" in parameters and parameters["n"].use == "request" else 1
    seed = values.get("seed", RANDOM_SEED)
    # drawn so that the last of the n seeds is below DRAWN_SEEDS too
    params["seed"] = secrets.randbelow(DRAWN_SEEDS - n + 1) if seed == RANDOM_SEED else seed
    return params, n


def check_delivery(fields: Mapping[str, object], modality: Modality = IMAGE) -> Delivery:
    """Return the checked fields that do not change the result. Raises InvalidParameter."""
    delivery_parameters = [
        parameter
        for parameter in modality.parameters
        if parameter.use == "delivery" and fields.get(parameter.name) is not None
    ]
    return Delivery(
        **{parameter.name: parameter.read(fields[parameter.name], None) for parameter in delivery_parameters}
    )


def check_bounds(fields: Mapping[str, object], modality: Modality) -> None:
    """Raise InvalidParameter for a value that no model accepts.

    Bounds that differ between models are not checked.
    """
    for parameter in modality.parameters:
        value = fields.get(parameter.name)
        if value is not None and parameter.fixed:
            parameter.read(value, None)
        # the longest text depends on the model, but each model needs a text
        elif value is not None and parameter.kind == "text":
            text(parameter.name, value, 0, sys.maxsize)


def size_from(spec: ModelSpec, fields: Mapping[str, object], params: Params, picture: tuple[int, int]) -> Params:
    """Return width and height of a result that starts from a picture of this size.

    The result has the picture's shape and about width × height pixels of `params`. If the pipeline has no size
    parameter, its number of pixels follows from the picture. Empty if the client sets a size, and for a model whose
    results do not follow the picture.
    """
    if asks_size(fields) or not spec.follows_picture:
        return {}
    limits: MediaLimits = IMAGE.limits_of(spec.limits)
    area = default_of(params, "width") * default_of(params, "height")
    scale = spec.picture_scale
    if scale:
        area = picture[0] * picture[1] * scale**2
        # the start picture is resized to the model's multiple, and each side of the result is `scale` times as long
        limits = msgspec.structs.replace(limits, size_multiple=limits.size_multiple * scale)
    width, height = size_like(limits, area, *picture)
    return {"width": width, "height": height}


def _unknown_parameter(name: str, parameters: Mapping[str, Parameter], files: Collection[str]) -> InvalidParameter:
    """Return the error for an unknown field, with a hint."""
    if name == "feature_cache":
        return InvalidParameter("feature_cache is not exact: start the server with --batching batched", name)
    usable_names = {
        parameter.name for parameter in parameters.values() if parameter.use not in ("nothing", "unused", "refused")
    }
    hint = hint_for(name, usable_names, files) or f"the parameters are {', '.join(sorted({*usable_names, *files}))}"
    return InvalidParameter(f"unknown parameter {printable(name)}: {hint}", printable(name)[1:-1])


def _quality(spec: ModelSpec, name: str, strict: bool) -> Params:
    """Return the parameters of a quality and its name; empty if the model lacks it.

    With `strict`, raises InvalidParameter if the model lacks it.
    """
    if name in spec.quality:
        return {**spec.quality[name], "quality": name}
    if strict and name != "auto":
        known = ", ".join(["auto", *spec.quality])
        raise InvalidParameter(f"model {spec.name} has no quality {name}: send one of {known}", "quality")
    return {}


def _lora_scale(params: Params) -> Params:
    """Return the parameter `lora_scale`, 1.0 by default; empty without an adapter."""
    if "lora_scale" in params and "lora" not in params:
        raise InvalidParameter("lora_scale needs an adapter: send its name as lora", "lora_scale")
    return {"lora_scale": params.get("lora_scale", 1.0)} if "lora" in params else {}


def _strength(spec: ModelSpec, values: Mapping[str, Any], params: Params, uploads: Collection[str]) -> Params:
    """Return the parameter `strength`, which amounts to at least one denoising step.

    If no picture is redrawn, the result is empty, or has None to replace the model's default.

    Raises InvalidParameter for less than one step, and for a strength that has no effect.
    """
    strengths = spec.strengths
    if not strengths or "image" not in uploads:
        if "strength" in values:
            unsupported = f"model {spec.name} takes no strength: leave it out"
            missing = "strength needs a picture to redraw: send it as image to /v1/images/edits"
            raise InvalidParameter(missing if strengths else unsupported, "strength")
        return dict.fromkeys(params.keys() & {"strength"})

    default = params.get("strength") or strengths["mask" if "mask" in uploads else "image"]
    strength = float(values.get("strength", default))
    steps = default_of(params, "num_inference_steps")
    if strength * steps < 1:
        message = f"strength {strength:g} of {steps:g} steps is less than one step: send a larger strength"
        raise InvalidParameter(message, "strength")
    return {"strength": strength}


SAME_MEANING = {
    "num_inference_steps": (
        "steps",
        "step",
        "num_steps",
        "inference_steps",
        "sampling_steps",
        "sample_steps",
        "num_sampling_steps",
        "denoising_steps",
        "infer_steps",
    ),
    "guidance_scale": ("cfg_scale", "cfg", "guidance", "cfg_guidance_scale", "text_guidance_scale"),
    "true_cfg_scale": ("true_cfg",),
    "size": ("resolution", "dimensions", "image_size", "video_size", "output_size", "target_size", "aspect_ratio"),
    "n": (
        "num_images",
        "num_images_per_prompt",
        "num_outputs",
        "batch_size",
        "batch_count",
        "num_samples",
        "count",
        "n_images",
    ),
    "seconds": ("duration", "length", "duration_seconds", "video_duration", "video_length", "num_seconds"),
    "num_frames": ("frames", "num_video_frames", "video_frames"),
    "fps": ("frame_rate", "framerate", "frames_per_second", "target_fps", "video_fps"),
    "negative_prompt": ("negative", "neg_prompt", "uncond_prompt"),
    "seed": ("random_seed", "noise_seed", "manual_seed", "rng_seed", "generator"),
    "strength": ("denoise", "denoising_strength", "denoise_strength", "image_strength", "prompt_strength"),
    "lora_scale": ("lora_strength", "lora_weight", "lora_alpha", "adapter_scale", "adapter_weight"),
    "lora": ("loras", "lora_name", "adapter", "adapters", "lora_path", "lora_weights"),
    "input_reference": (
        "image",
        "images",
        "image_url",
        "input_image",
        "init_image",
        "first_frame",
        "start_image",
        "reference_image",
        "image_reference",
        "first_frame_image",
        "first_image",
        "start_frame",
        "image_urls",
        "init_images",
    ),
    "image": (
        "image_url",
        "input_image",
        "init_image",
        "reference_image",
        "input_reference",
        "image_urls",
        "init_images",
    ),
    "last_frame": ("last_image", "end_image", "end_frame", "image_tail", "tail_image", "last_frame_image", "image_end"),
    "mask": ("mask_image", "mask_url"),
    "output_format": ("format", "file_format", "image_format", "output_type"),
    "output_compression": ("jpeg_quality", "compression_quality"),
    "webhook": ("callback", "callback_url", "webhook_url"),
    "max_tokens": ("max_new_tokens", "max_length", "max_output_tokens", "n_predict", "num_predict"),
    "stop": ("stop_sequences", "stop_words", "stop_strings"),
    "repetition_penalty": ("repeat_penalty",),
    "messages": ("prompt", "input", "conversation", "chat_history"),
    "prompt": ("text", "caption", "input", "text_prompt"),
    "model": ("model_name", "model_id", "engine", "checkpoint"),
}
"""Other servers' names of each field. A hint names the first of these fields that the endpoint has."""

NOISE_SCHEDULER = (
    "sampler",
    "sampler_name",
    "sampler_index",
    "sampling_method",
    "scheduler",
    "scheduler_name",
    "sample_solver",
    "noise_scheduler",
    "flow_shift",
    "shift",
    "sigmas",
    "timesteps",
)
"""Other servers' names for the choice of the noise scheduler, which the model's folder fixes here."""

MIN_TYPO_CHARS = 5
"""Shorter names are not checked for typing errors: one letter more or less often makes another word."""


def hint_for(name: str, known: Collection[str], files: Collection[str] = ()) -> str:
    """Return a hint for an unknown field; "" if there is none.

    `known` has the fields of the endpoint, `files` its upload fields.
    """
    if name in NOISE_SCHEDULER and "num_inference_steps" in known:
        return "the noise scheduler is set in the model's folder, a request cannot change it"
    fields = {*known, *files}
    if field := _synonym_of(name, fields) or _misspelled_field(name, fields):
        return f"did you mean {field}?"
    if not files and "num_inference_steps" in known and name in ("mask", "image", "images", *SAME_MEANING["image"]):
        return "send start pictures to /v1/images/edits"
    return ""


def _synonym_of(name: str, fields: Collection[str]) -> str:
    """Return the field that has this name in another spelling, or on another server.

    "" if there is none.
    """
    normalized = _normalized(name)
    same_spelling = [field for field in fields if _normalized(field) == normalized]
    if same_spelling:
        return same_spelling[0]
    same_meaning = (
        field for field, names in SAME_MEANING.items() if field in fields and normalized in map(_normalized, names)
    )
    return next(same_meaning, "")


def _normalized(name: str) -> str:
    """Return a name without "_" and "-", in lower case."""
    return name.replace("_", "").replace("-", "").lower()


def _misspelled_field(name: str, fields: Iterable[str]) -> str:
    """Return the only field whose name is one typing error away, or "".

    A typing error is one inserted, missing, wrong or swapped letter.
    """
    # the time grows with the length, which the client chooses
    if not MIN_TYPO_CHARS <= len(name) <= 64:
        return ""
    spellings = {field: (field, *SAME_MEANING.get(field, ())) for field in fields}
    similar_fields = [
        field for field, names in spellings.items() if any(_one_letter_apart(name, known_name) for known_name in names)
    ]
    return similar_fields[0] if len(similar_fields) == 1 else ""


def _one_letter_apart(name: str, other: str) -> bool:
    """Return whether one typing error turns one name into the other.

    That is one insertion, deletion, substitution or swap of neighbours.
    """
    if len(other) < MIN_TYPO_CHARS or abs(len(name) - len(other)) > 1:
        return False
    pairs = enumerate(zip(name, other, strict=False))
    difference = next((index for index, (letter, other_letter) in pairs if letter != other_letter), None)
    if difference is None:
        return len(name) != len(other)

    tail = name[difference:]
    other_tail = other[difference:]
    # compare what follows the first difference, as after a swap, an insertion, a substitution and a deletion
    swapped = len(tail) > 1 and tail[1::-1] == other_tail[:2] and tail[2:] == other_tail[2:]
    return swapped or other_tail[1:] in (tail, tail[1:]) or tail[1:] == other_tail
