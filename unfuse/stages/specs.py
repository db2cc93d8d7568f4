"""What each kind of stage is, as data: a family fills in what is its model's. No torch here, for cards need none."""

from __future__ import annotations

from unfuse.core.modalities import PIXELS, Workload
from unfuse.core.plan import StageSpec

GUIDANCE = ("true_cfg_scale", "guidance_scale")

TEXT_ENCODE = StageSpec(
    "text_encode", "text_encode", (), role="encoder", slots=4,
    work=Workload(guidance=GUIDANCE, size=("max_sequence_length",)),
)  # fmt: skip

IMAGE_ENCODE = StageSpec("image_encode", "image_encode", (), role="encoder", slots=4, uploads=True)

REDRAW_ENCODE = StageSpec(
    "redraw_encode", "redraw_encode", ("vae",), outputs=("moments", "mask"), role="decoder", slots=4, uploads=True,
    reads=("image", "mask", *PIXELS), spreads={"tiles": 0}, when="image",
)  # fmt: skip

DENOISE = StageSpec(
    "denoise", "denoise", (), outputs=("latents",), per_sample=True, role="denoiser",
    work=Workload("num_inference_steps", GUIDANCE, PIXELS, part="strength"),
)  # fmt: skip

WHOLE = StageSpec(
    "whole", "whole", (), per_sample=True, role="whole",
    work=Workload("num_inference_steps", GUIDANCE, PIXELS, part="strength"),
)  # fmt: skip

PREFILL = StageSpec(
    "prefill", "prefill", ("model",), outputs=("kv",), role="prefill", slots=32,
    work=Workload(size=("prompt_tokens",)), goes_on=True, uploads=True,
)  # fmt: skip

DECODE = StageSpec(
    "decode", "decode", ("model",), ("kv",), per_sample=True, role="decode", slots=32,
    work=Workload("expected_tokens", size=()), uploads=True, extends="kv",
)  # fmt: skip

VISION_ENCODE = StageSpec(
    "vision_encode", "vision_encode", ("model",), outputs=("seen",), role="vision", slots=4, each="shown",
    reads=("shown", "images", "picked", "frames", "rows", "columns"), work=Workload(size=("tokens",)),
    uploads=True,
)  # fmt: skip

VAE_DECODE = StageSpec(
    "vae_decode", "vae_decode", ("vae",), ("latents",), per_sample=True, role="decoder", slots=4
)  # fmt: skip

ADAPTED = DENOISE.kind, WHOLE.kind  # the kinds of stages that use adapters
