"""The StageSpec of each stage kind, as data. Model families fill in their model's values.

Needs no torch, because model specs are read by processes without it.
"""

from __future__ import annotations

from unfuse.core.modalities import PIXELS, Workload
from unfuse.core.plan import StageSpec

#: Parameters that hold a guidance scale, in order of preference.
GUIDANCE = ("true_cfg_scale", "guidance_scale")

#: The text encoder: prompt, and negative prompt under guidance, to embeddings.
TEXT_ENCODE = StageSpec(
    "text_encode",
    "text_encode",
    (),
    role="encoder",
    slots=4,
    work=Workload(guidance=GUIDANCE, size=("max_sequence_length",)),
)

#: The image encoder: uploaded pictures to what denoising is conditioned on.
IMAGE_ENCODE = StageSpec("image_encode", "image_encode", (), role="encoder", slots=4, uploads=True)

#: Image to image: the VAE encodes the picture that denoising starts from.
REDRAW_ENCODE = StageSpec(
    "redraw_encode",
    "redraw_encode",
    ("vae",),
    outputs=("moments", "mask"),
    role="decoder",
    slots=4,
    uploads=True,
    depends_on_params=("image", "mask", *PIXELS),
    parallelism={"tiles": 0},
    only_with="image",
)

#: The denoiser: noise and embeddings to latents.
DENOISE = StageSpec(
    "denoise",
    "denoise",
    (),
    outputs=("latents",),
    per_sample=True,
    role="denoiser",
    work=Workload("num_inference_steps", GUIDANCE, PIXELS, part="strength"),
)

#: The undivided pipeline as one stage.
UNDIVIDED = StageSpec(
    "whole",
    "whole",
    (),
    per_sample=True,
    role="whole",
    work=Workload("num_inference_steps", GUIDANCE, PIXELS, part="strength"),
)

#: Prefill of a language model: a prompt to its KV.
PREFILL = StageSpec(
    "prefill",
    "prefill",
    ("model",),
    outputs=("kv",),
    role="prefill",
    slots=32,
    work=Workload(size=("prompt_tokens",)),
    prefix_cached=True,
    uploads=True,
)

#: Decode of a language model: a prompt and its KV to an answer, token by token.
DECODE = StageSpec(
    "decode",
    "decode",
    ("model",),
    ("kv",),
    per_sample=True,
    role="decode",
    slots=32,
    work=Workload("expected_tokens", size=()),
    uploads=True,
    extends_prefix_of="kv",
)

#: The vision encoder of a language model: one picture or video of a prompt to embeddings.
VISION_ENCODE = StageSpec(
    "vision_encode",
    "vision_encode",
    ("model",),
    outputs=("seen",),
    role="vision",
    slots=4,
    per_item="shown",
    depends_on_params=("content_hash", "images", "frame_indexes", "frames", "rows", "columns"),
    work=Workload(size=("tokens",)),
    uploads=True,
)

#: The VAE decoder: latents to pixels and encoded files.
VAE_DECODE = StageSpec("vae_decode", "vae_decode", ("vae",), ("latents",), per_sample=True, role="decoder", slots=4)

#: The kinds of stages that use LoRA adapters.
ADAPTED = DENOISE.kind, UNDIVIDED.kind
