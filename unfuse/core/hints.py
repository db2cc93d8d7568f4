"""Hints for unknown fields: the field of the same meaning, or the one that was mistyped."""

from __future__ import annotations

from collections.abc import Collection, Iterable

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
