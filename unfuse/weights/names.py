"""Knows some models by name, before anything is downloaded."""

from __future__ import annotations

from fnmatch import fnmatchcase

from unfuse.core.errors import ConfigError
from unfuse.weights.folder import INDEX

SUFFIX = "-Diffusers"  # what hubs call the copy of a model in the layout that is served, beside the one of its makers

PLANS = {
    "unfuse/shapes": "WanPipeline",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "WanPipeline",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "WanPipeline",
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": "WanImageToVideoPipeline",
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": "WanImageToVideoPipeline",
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": "WanPipeline",
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": "WanImageToVideoPipeline",
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": "WanPipeline",
    "black-forest-labs/FLUX.1-dev": "FluxPipeline",
    "black-forest-labs/FLUX.1-schnell": "FluxPipeline",
    "black-forest-labs/FLUX.1-Kontext-dev": "FluxKontextPipeline",
    "black-forest-labs/FLUX.2-klein-*": "Flux2KleinPipeline",
    "hunyuanvideo-community/HunyuanVideo": "HunyuanVideoPipeline",
    "Qwen/Qwen-Image": "QwenImagePipeline",
    "stabilityai/stable-diffusion-xl-base-1.0": "StableDiffusionXLPipeline",
    "stabilityai/stable-diffusion-3.5-large": "StableDiffusion3Pipeline",
    "stabilityai/stable-diffusion-3.5-medium": "StableDiffusion3Pipeline",
    "Tongyi-MAI/Z-Image": "ZImagePipeline",
    "Tongyi-MAI/Z-Image-Turbo": "ZImagePipeline",
    "Lightricks/LTX-Video": "LTXPipeline",
    "Wan-AI/Wan2.1-T2V-*": "WanPipeline",
    "Wan-AI/Wan2.1-I2V-*": "WanImageToVideoPipeline",
    "Wan-AI/Wan2.1-FLF2V-*": "WanImageToVideoPipeline",
}
"""Pipeline classes by hub name; a name may be a pattern."""


def pipeline_class(name: str) -> str:
    """A model's pipeline class: the exact name first, then the first pattern that fits. Raises ConfigError."""
    for pattern, found in PLANS.items():
        if name == pattern or (name not in PLANS and fnmatchcase(name, pattern)):
            return found
    raise ConfigError(f"model {name!r} is not known by name; known are {', '.join(PLANS)}, and any folder with {INDEX}")


def hub_name(name: str) -> str:
    """A model's hub name, called without owner or SUFFIX, in any case; else the name itself. Exact names go first."""
    if name in PLANS or "@" in name:
        return name
    owner, _, short = name.rpartition("/")
    for known in PLANS:
        its_owner, _, its_short = known.partition("/")
        if owner in ("", its_owner) and short.lower() in (its_short.lower(), its_short.removesuffix(SUFFIX).lower()):
            return known
    for known in PLANS:
        its_owner, _, its_short = known.partition("/")
        if not owner and "*" in its_short and fnmatchcase(short, its_short):
            return f"{its_owner}/{short}"
    return name
