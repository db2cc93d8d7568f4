"""Checks what a client asks for against the medium's table and the model's card, before anything is queued."""

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

DRAWN_SEEDS = 2**31  # a seed that the client left out is drawn below this number, so that it is short enough to type
NOTHING = (0, "", "auto")  # values that ask for nothing: a model that lacks their parameter may be given them


def check(
    card: ModelSpec, given: Mapping[str, object], medium: Modality = IMAGE, *, strict: bool = False,
    uploads: Collection[str] = (), files: Collection[str] = (), tokens: PromptTokens | None = None,
) -> tuple[Params, int]:  # fmt: skip
    """Check the fields that a client sent. Returns the parameters for the stages and the number of results, n.

    A field that the client left out, or sent as null, gets the card's default. A missing seed, and -1, is replaced by
    a random one. The results have the seeds s … s + n − 1 (see `nth_seed`). `uploads` names the request's uploads,
    `files` the fields that may hold them. A chat needs `tokens`, which a tokenizer made of its fields. Raises
    InvalidParameter for a bad value, an unknown field, and, if `strict`, a field without effect.
    """
    values = {name: value for name, value in given.items() if value is not None}
    known, lacks = medium.known(card.defaults), {one.name for one in card.accepts if not one.max}
    for name in values:
        if name not in known:
            raise _unknown(name, known, files)
        if known[name].use == "refused":
            raise InvalidParameter(f"{name} {known[name].description}", name)
        if strict and known[name].use == "unused":
            raise InvalidParameter(f"{name} has no effect here: leave it out", name)
        if name in lacks and values[name] not in NOTHING:
            raise InvalidParameter(f"model {card.name} takes no {name}: leave it out", name)
    for one in medium.parameters:
        if one.required and one.name not in values:
            raise InvalidParameter(f"{one.name} is missing: say {one.description}", one.name)
    limits = medium.limits_of(card.limits)
    read = {name: known[name].read(value, limits) for name, value in values.items()}
    usual = [one for one in medium.parameters if one.use == "stages" and one.default is not None]
    params: Params = {one.name: one.default for one in usual}
    params |= {**card.defaults, **_quality(card, read.get("quality", "auto"), strict)}
    params |= {name: value for name, value in read.items() if known[name].use == "stages"}
    params |= _adapter(params)
    params |= medium.settle(limits, params, read, tokens)
    params |= _strength(card, read, params, uploads)
    if LAST_FRAME in uploads and default_of(params, "num_frames") < 2:
        raise InvalidParameter("num_frames must be more than 1 where there is a last_frame", "num_frames")
    n = read.get("n", 1) if "n" in known and known["n"].use == "request" else 1
    seed = read.get("seed", RANDOM_SEED)
    params["seed"] = secrets.randbelow(DRAWN_SEEDS - n + 1) if seed == RANDOM_SEED else seed
    return params, n


def check_delivery(given: Mapping[str, object], medium: Modality = IMAGE) -> Delivery:
    """Check the fields that say how the client wants the request handled. Raises InvalidParameter."""
    asked = [one for one in medium.parameters if one.use == "delivery" and given.get(one.name) is not None]
    return Delivery(**{one.name: one.read(given[one.name], None) for one in asked})


def check_bounds(given: Mapping[str, object], medium: Modality) -> None:
    """Raise InvalidParameter for a value that no model accepts. Bounds that differ between models are not checked."""
    for one in medium.parameters:
        value = given.get(one.name)
        if value is not None and one.fixed:
            one.read(value, None)
        elif value is not None and one.kind == "text":
            text(one.name, value, 0, sys.maxsize)


def size_from(card: ModelSpec, given: Mapping[str, object], params: Params, picture: tuple[int, int]) -> Params:
    """Return width and height of a result that starts from a picture of this size; empty if the client sets a size.

    The result has the picture's shape and about as many pixels as `params` say. If the pipeline takes no size, its
    number of pixels follows from the picture. Empty too for a model that makes only one size.
    """
    if asks_size(given) or not card.follows_picture:
        return {}
    limits: MediaLimits = IMAGE.limits_of(card.limits)
    area, scale = default_of(params, "width") * default_of(params, "height"), card.picture_scale
    if scale:
        area = picture[0] * picture[1] * scale**2
        limits = msgspec.structs.replace(limits, size_multiple=limits.size_multiple * scale)
    width, height = size_like(limits, area, *picture)
    return {"width": width, "height": height}


def _unknown(name: str, known: Mapping[str, Parameter], files: Collection[str]) -> InvalidParameter:
    if name == "feature_cache":
        return InvalidParameter("feature_cache skips work and is not exact: serve with --batching batched", name)
    useful = {one.name for one in known.values() if one.use not in ("nothing", "unused", "refused")}
    hint = hint_for(name, useful, files) or f"the parameters are {', '.join(sorted({*useful, *files}))}"
    return InvalidParameter(f"unknown parameter {printable(name)}: {hint}", printable(name)[1:-1])


def _quality(card: ModelSpec, name: str, strict: bool) -> Params:
    """The parameters that a quality stands for, and its name; nothing for one that the card does not define."""
    if name in card.quality:
        return {**card.quality[name], "quality": name}
    if strict and name != "auto":
        known = ", ".join(["auto", *card.quality])
        raise InvalidParameter(f"quality {name} means nothing to model {card.name}: send one of {known}", "quality")
    return {}


def _adapter(params: Params) -> Params:
    """The strength of the adapter: 1 unless the client says otherwise; nothing without an adapter."""
    if "lora_scale" in params and "lora" not in params:
        raise InvalidParameter("lora_scale says how strong a lora is: send the name of one as lora too", "lora_scale")
    return {"lora_scale": params.get("lora_scale", 1.0)} if "lora" in params else {}


def _strength(card: ModelSpec, read: Mapping[str, Any], params: Params, uploads: Collection[str]) -> Params:
    """How far a picture is redrawn, which takes a step at least; nothing where none is."""
    strengths = card.strengths
    if not strengths or "image" not in uploads:
        if "strength" in read:
            how = f"model {card.name} takes no strength: leave it out"
            missing = "strength says how far a picture is redrawn: send it as image to /v1/images/edits"
            raise InvalidParameter(missing if strengths else how, "strength")
        return dict.fromkeys(params.keys() & {"strength"})
    usual = params.get("strength") or strengths["mask" if "mask" in uploads else "image"]
    strength, steps = float(read.get("strength", usual)), default_of(params, "num_inference_steps")
    if strength * steps < 1:
        raise InvalidParameter(f"strength {strength:g} of {steps:g} steps is less than one step: send more", "strength")
    return {"strength": strength}


SAME_MEANING = {
    "num_inference_steps": (
        "steps", "step", "num_steps", "inference_steps", "sampling_steps", "sample_steps", "num_sampling_steps",
        "denoising_steps", "infer_steps",
    ),
    "guidance_scale": ("cfg_scale", "cfg", "guidance", "cfg_guidance_scale", "text_guidance_scale"),
    "true_cfg_scale": ("true_cfg",),
    "size": ("resolution", "dimensions", "image_size", "video_size", "output_size", "target_size", "aspect_ratio"),
    "n": (
        "num_images", "num_images_per_prompt", "num_outputs", "batch_size", "batch_count", "num_samples",
        "count", "n_images",
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
        "image", "images", "image_url", "input_image", "init_image", "first_frame", "start_image", "reference_image",
        "image_reference", "first_frame_image", "first_image", "start_frame", "image_urls", "init_images",
    ),
    "image": (
        "image_url", "input_image", "init_image", "reference_image", "input_reference", "image_urls", "init_images",
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
}  # fmt: skip
"""Names that other servers and scripts use for a field. The hint names the first field that the endpoint has."""

NOISE_SCHEDULER = (
    "sampler", "sampler_name", "sampler_index", "sampling_method", "scheduler", "scheduler_name", "sample_solver",
    "noise_scheduler", "flow_shift", "shift", "sigmas", "timesteps",
)  # fmt: skip
"""Names that other servers use for the choice of the noise scheduler, which is fixed by the model's folder here."""

LEAST_TYPO = 5
"""Shorter names are not checked for typing errors: one letter more or less is often another word."""


def hint_for(name: str, known: Collection[str], files: Collection[str] = ()) -> str:
    """Return a hint for a field that is neither in `known` nor an upload field in `files`; "" if there is none."""
    if name in NOISE_SCHEDULER and "num_inference_steps" in known:
        return "the noise scheduler is set in the model's folder, a request cannot change it"
    fields = {*known, *files}
    if meant := _meant(name, fields) or _mistyped(name, fields):
        return f"did you mean {meant}?"
    if not files and "num_inference_steps" in known and name in ("mask", "image", "images", *SAME_MEANING["image"]):
        return "send start pictures to /v1/images/edits"
    return ""


def _meant(name: str, fields: Collection[str]) -> str:
    """Return the field with another spelling of this name, or with another name for the same meaning."""
    plain = _plain(name)
    spelled = [field for field in fields if _plain(field) == plain]
    if spelled:
        return spelled[0]
    found = (field for field, names in SAME_MEANING.items() if field in fields and plain in map(_plain, names))
    return next(found, "")


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _mistyped(name: str, fields: Iterable[str]) -> str:
    """Return the only field whose name differs by one inserted, missing, wrong or swapped letter; "" if not unique."""
    if not LEAST_TYPO <= len(name) <= 64:
        return ""
    spellings = {field: (field, *SAME_MEANING.get(field, ())) for field in fields}
    near = [field for field, names in spellings.items() if any(_one_letter_apart(name, one) for one in names)]
    return near[0] if len(near) == 1 else ""


def _one_letter_apart(name: str, other: str) -> bool:
    """Return whether one insertion, deletion, substitution or swap of neighbours turns one name into the other."""
    if len(other) < LEAST_TYPO or abs(len(name) - len(other)) > 1:
        return False
    same = next((at for at, (ours, theirs) in enumerate(zip(name, other, strict=False)) if ours != theirs), None)
    if same is None:
        return len(name) != len(other)
    rest, others = name[same:], other[same:]
    swapped = len(rest) > 1 and rest[1::-1] == others[:2] and rest[2:] == others[2:]
    return swapped or others[1:] in (rest, rest[1:]) or rest[1:] == others
