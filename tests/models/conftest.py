"""Tiny models of random weights, and what undivided diffusers makes of them: once a run, in its own process."""

import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.forking import isolated
from tests.once import once
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.modalities import UPLOADS
from unfuse.core.plan import Params
from unfuse.models import find, resolve_source
from unfuse.models.base import RuntimeOptions
from unfuse.stages.base import Stage, StageInput

SHAPES = str(resolve_source("unfuse/shapes"))
EXACT = ComputeOptions()
Load = Callable[..., dict[str, Stage]]


@dataclass(frozen=True)
class Job:
    """One call of an undivided pipeline; `model` is a folder, relative to where the tiny ones are built.

    With `blocks` diffusers' modular pipeline is called too; with `tiled` its VAE decodes in tiles.
    """

    name: str
    model: str
    params: dict[str, Any]
    dtype: str = "float32"
    blocks: bool = False
    tiled: bool = False


def wan_params(seed: int = 0, prompt: str = "a red circle", **given: Any) -> dict[str, Any]:
    tiny = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 4, "guidance_scale": 5.0}
    return {"prompt": prompt, "negative_prompt": "", **tiny, "max_sequence_length": 24, "seed": seed, **given}


def image_params(seed: int = 0, prompt: str = "it turns", **given: Any) -> dict[str, Any]:
    return wan_params(seed, prompt, **{"num_frames": 5, "image": "sky.png", **given})


def flux_params(seed: int = 0, prompt: str = "a red circle", **given: Any) -> dict[str, Any]:
    own = {"guidance_scale": 3.5, "true_cfg_scale": 1.0, "negative_prompt": None}
    return wan_params(seed, prompt, **{**own, **given})


def hunyuan_params(seed: int = 0, prompt: str = "a red circle", **given: Any) -> dict[str, Any]:
    return flux_params(seed, prompt, **{"num_frames": 5, "guidance_scale": 6.0, **given})


def qwen_params(seed: int = 0, prompt: str = "a red circle", **given: Any) -> dict[str, Any]:
    return flux_params(seed, prompt, **{"true_cfg_scale": 4.0, "guidance_scale": None, **given})


def block_params(seed: int = 0, prompt: str = "a red circle", **given: Any) -> dict[str, Any]:
    return wan_params(seed, prompt, **{"negative_prompt": None, "guidance_scale": 4.0, **given})


def ltx_params(seed: int = 0, prompt: str = "a red circle", **given: Any) -> dict[str, Any]:
    rate = given.get("fps", 25)
    return guided_params(seed, prompt, **{"num_frames": 5, "fps": rate, "frame_rate": rate, **given})


def kontext_params(seed: int = 0, prompt: str = "a red circle", **given: Any) -> dict[str, Any]:
    found = flux_params(seed, prompt, **{"image": "wall.jpg", **given})
    return {**found, "max_area": found["width"] * found["height"]}


def guided_params(seed: int = 0, prompt: str = "a red circle", **given: Any) -> dict[str, Any]:
    return wan_params(seed, prompt, **{"negative_prompt": None, **given})


ODD = "  Ünïcode &amp;amp; “quotes”…\u3000ﬁne\u200b ☃️ naÃ¯ve\n\ttabs\x1c "
LONG = "a very long prompt that goes on and on, far behind what the model can read, and then goes on"
WORDS = "a blue star on black"
HALF = "bfloat16,vae=float32"
WHOLE_HALF = "bfloat16"

OF_SHAPES: dict[str, Any] = {"width": 128, "height": 128, "max_sequence_length": 16, "guidance_scale": 3.0}
JOB_OF_SHAPES = wan_params(1, WORDS, **OF_SHAPES)
JOBS = [
    Job("unipc-image", "wan", wan_params()),
    Job("unipc-seed", "wan", wan_params(2**40 + 7)),
    Job("unipc-prompt", "wan", wan_params(prompt="b")),
    Job("unipc-unguided", "wan", wan_params(guidance_scale=1.0)),
    Job("unipc-negative", "wan", wan_params(3, negative_prompt="blurred, grey", num_inference_steps=7), blocks=True),
    Job("unipc-one-step", "wan", wan_params(4, num_inference_steps=1, height=16, width=48)),
    Job("unipc-video", "wan", wan_params(5, ODD, height=48, num_frames=5, num_inference_steps=3)),
    Job("unipc-video-unguided", "wan", wan_params(6, num_frames=3, guidance_scale=0.0)),
    Job("unipc-long", "wan", wan_params(7, LONG, max_sequence_length=16)),
    Job("unipc-half", "wan", wan_params(8, negative_prompt="no"), HALF),
    Job("euler-image", "wan-euler", wan_params(9)),
    Job("euler-next-seed", "wan-euler", wan_params(10)),
    Job("euler-video", "wan-euler", wan_params(11, ODD, width=48, num_frames=9, negative_prompt="n"), blocks=True),
    Job("euler-half", "wan-euler", wan_params(12, num_frames=3), HALF),
    Job("shapes-image", SHAPES, JOB_OF_SHAPES),
    Job("shapes-next", SHAPES, wan_params(2, WORDS, **OF_SHAPES)),
    Job("shapes-video", SHAPES, wan_params(13, WORDS, **OF_SHAPES, num_frames=5, negative_prompt="red")),
    Job("picture-video", "wan-image", image_params()),
    Job("picture-seed", "wan-image", image_params(1)),
    Job("picture-prompt", "wan-image", image_params(prompt="b")),
    Job("picture-other", "wan-image", image_params(image="wall.jpg")),
    Job("picture-unguided", "wan-image", image_params(guidance_scale=1.0)),
    Job("picture-negative", "wan-image", image_params(2, negative_prompt="still", num_inference_steps=6)),
    Job("picture-wide", "wan-image", image_params(3, ODD, image="wall.jpg", width=48, num_inference_steps=1)),
    Job("picture-one-frame", "wan-image", image_params(4, num_frames=1)),
    Job("picture-transparent", "wan-image", image_params(5, image="glass.webp", height=48)),
    Job("picture-half", "wan-image", image_params(6, negative_prompt="no"), HALF),
    Job("picture-whole-half", "wan-image", image_params(6), WHOLE_HALF),
    Job("picture-euler", "wan-image-euler", image_params(7, num_frames=9, guidance_scale=2.5)),
    Job("picture-euler-half", "wan-image-euler", image_params(8, image="wall.jpg"), HALF),
    Job("frames-video", "wan-image-last", image_params(last_frame="wall.jpg")),
    Job("frames-other", "wan-image-last", image_params(last_frame="glass.webp")),
    Job("frames-long", "wan-image-last", image_params(1, last_frame="wall.jpg", width=48, num_frames=9)),
    Job("frames-half", "wan-image-last", image_params(2, last_frame="sky.png", negative_prompt="no"), HALF),
    Job("two-image", "wan-2.2", wan_params()),
    Job("two-seed", "wan-2.2", wan_params(1)),
    Job("two-second-scale", "wan-2.2", wan_params(guidance_scale_2=2.0), blocks=True),
    Job("two-high-noise", "wan-2.2", wan_params(2, num_inference_steps=1, negative_prompt="b", guidance_scale_2=1.0)),
    Job("two-unguided", "wan-2.2", wan_params(3, ODD, num_frames=5, guidance_scale=1.0, guidance_scale_2=4.0)),
    Job("two-steps", "wan-2.2", wan_params(4, num_inference_steps=7, guidance_scale_2=1.0)),
    Job("two-half", "wan-2.2", wan_params(4, num_frames=3, width=48, guidance_scale_2=3.0), HALF),
    Job("two-picture", "wan-2.2-image", image_params()),
    Job("two-picture-other", "wan-2.2-image", image_params(image="wall.jpg")),
    Job("two-picture-half", "wan-2.2-image", image_params(1, guidance_scale_2=2.0, num_frames=1), HALF),
    Job("two-picture-last", "wan-2.2-image", image_params(last_frame="wall.jpg")),
    Job("two-picture-last-half", "wan-2.2-image", image_params(1, image="wall.jpg", last_frame="sky.png"), HALF),
    Job("tokens-video", "wan-2.2-5b", wan_params(num_frames=5)),
    Job("tokens-seed", "wan-2.2-5b", wan_params(1, num_frames=5)),
    Job("tokens-unguided", "wan-2.2-5b", wan_params(2, width=64, guidance_scale=1.0)),
    Job("tokens-half", "wan-2.2-5b", wan_params(3, num_frames=9, negative_prompt="b"), HALF),
    Job("tokens-picture", "wan-2.2-5b-image", image_params()),
    Job("tokens-picture-seed", "wan-2.2-5b-image", image_params(1)),
    Job("tokens-picture-other", "wan-2.2-5b-image", image_params(image="glass.webp")),
    Job("tokens-picture-half", "wan-2.2-5b-image", image_params(2, num_frames=9, width=64), HALF),
    Job("flux-image", "flux", flux_params()),
    Job("flux-seed", "flux", flux_params(2**40 + 7)),
    Job("flux-next-seed", "flux", flux_params(1)),
    Job("flux-prompt", "flux", flux_params(prompt="b")),
    Job("flux-guidance", "flux", flux_params(guidance_scale=1.5)),
    Job("flux-negative", "flux", flux_params(2, negative_prompt="blurred", true_cfg_scale=4.0, num_inference_steps=7)),
    Job("flux-empty-negative", "flux", flux_params(negative_prompt="", true_cfg_scale=2.0)),
    Job("flux-no-negative", "flux", flux_params(true_cfg_scale=2.0)),
    Job("flux-negative-unread", "flux", flux_params(negative_prompt="blurred")),
    Job("flux-wide", "flux", flux_params(3, ODD, height=16, width=72, num_inference_steps=1), blocks=True),
    Job("flux-high", "flux", flux_params(4, height=80, width=24, num_inference_steps=5)),
    Job("flux-long", "flux", flux_params(5, LONG, max_sequence_length=16)),
    Job("flux-half", "flux", flux_params(6), HALF),
    Job("flux-half-negative", "flux", flux_params(7, negative_prompt="no", true_cfg_scale=3.0, width=48), HALF),
    Job("flux-whole-half", "flux", flux_params(8), "bfloat16,vae=bfloat16"),
    Job("schnell-image", "flux-schnell", flux_params(9, guidance_scale=0.0), blocks=True),
    Job("schnell-guidance", "flux-schnell", flux_params(9)),
    Job("schnell-negative", "flux-schnell", flux_params(10, negative_prompt="n", true_cfg_scale=2.5)),
    Job("schnell-half", "flux-schnell", flux_params(11, ODD, height=40), HALF),
    Job("hunyuan-video", "hunyuan-video", hunyuan_params()),
    Job("hunyuan-seed", "hunyuan-video", hunyuan_params(1)),
    Job("hunyuan-prompt", "hunyuan-video", hunyuan_params(prompt="b")),
    Job("hunyuan-guidance", "hunyuan-video", hunyuan_params(guidance_scale=1.0)),
    Job("hunyuan-empty-negative", "hunyuan-video", hunyuan_params(negative_prompt="", true_cfg_scale=2.0)),
    Job("hunyuan-negative", "hunyuan-video", hunyuan_params(2, negative_prompt="b", true_cfg_scale=3.0)),
    Job("hunyuan-negative-unread", "hunyuan-video", hunyuan_params(negative_prompt="blurred")),
    Job("hunyuan-image", "hunyuan-video", hunyuan_params(3, ODD, num_frames=1, num_inference_steps=1, width=48)),
    Job("hunyuan-long", "hunyuan-video", hunyuan_params(4, LONG, num_frames=9, max_sequence_length=16, height=16)),
    Job("hunyuan-half", "hunyuan-video", hunyuan_params(5, negative_prompt="no", true_cfg_scale=3.0), HALF),
    Job("qwen-image", "qwen-image", qwen_params()),
    Job("qwen-next-seed", "qwen-image", qwen_params(1)),
    Job("qwen-prompt", "qwen-image", qwen_params(prompt="b")),
    Job(
        "qwen-negative",
        "qwen-image",
        qwen_params(2, negative_prompt="blurred and long", num_inference_steps=6),
        blocks=True,
    ),
    Job("qwen-empty-negative", "qwen-image", qwen_params(negative_prompt="")),
    Job("qwen-no-scale", "qwen-image", qwen_params(negative_prompt="blurred", true_cfg_scale=1.0)),
    Job("qwen-wide", "qwen-image", qwen_params(3, ODD, height=16, width=72, num_inference_steps=1), blocks=True),
    Job("qwen-long", "qwen-image", qwen_params(4, LONG, max_sequence_length=16, negative_prompt="b", height=48)),
    Job("qwen-half", "qwen-image", qwen_params(5, negative_prompt="no"), HALF),
    Job("qwen-whole-half", "qwen-image", qwen_params(6), "bfloat16,vae=bfloat16"),
    Job("klein-image", "klein", block_params()),
    Job("klein-seed", "klein", block_params(1)),
    Job("klein-prompt", "klein", block_params(prompt="b", num_inference_steps=6)),
    Job("klein-guidance", "klein", block_params(guidance_scale=2.0)),
    Job("klein-unguided", "klein", block_params(2, ODD, guidance_scale=0.5, height=16, width=72)),
    Job("klein-half", "klein", block_params(3, LONG, width=48), HALF),
    Job("klein-distilled", "klein-distilled", block_params(4, height=48, num_inference_steps=1)),
    Job("klein-seen", "klein", block_params(image="wall.jpg")),
    Job("klein-seen-two", "klein", block_params(image="wall.jpg", image_2="sea.png")),
    Job("klein-seen-turned", "klein", block_params(image="sea.png", image_2="wall.jpg")),
    Job("klein-seen-half", "klein", block_params(3, LONG, width=48, image="sea.png", guidance_scale=1.0), WHOLE_HALF),
    Job("klein-distilled-seen", "klein-distilled", block_params(4, image="sea.png", image_2="sea.png")),
    Job("krea-image", "krea", block_params()),
    Job("krea-seed", "krea", block_params(1)),
    Job("krea-prompt", "krea", block_params(prompt="b", num_inference_steps=6)),
    Job("krea-negative", "krea", block_params(negative_prompt="blurred", guidance_scale=0.5)),
    Job("krea-unguided", "krea", block_params(2, ODD, guidance_scale=0.0, height=16, width=72)),
    Job("krea-half", "krea", block_params(3, LONG, width=48, negative_prompt="b"), HALF),
    Job("krea-distilled", "krea-distilled", block_params(4, height=48, guidance_scale=0.0)),
]

FURTHER = [
    Job("xl-image", "sdxl", guided_params()),
    Job("xl-seed", "sdxl", guided_params(1)),
    Job("xl-prompt", "sdxl", guided_params(prompt="b", num_inference_steps=7)),
    Job("xl-negative", "sdxl", guided_params(negative_prompt="blurred", guidance_scale=3.0)),
    Job("xl-empty-negative", "sdxl", guided_params(negative_prompt="")),
    Job("xl-unguided", "sdxl", guided_params(2, ODD, guidance_scale=1.0, height=16, width=72, num_inference_steps=1)),
    Job("xl-half", "sdxl", guided_params(3, LONG, width=48, negative_prompt="b"), HALF),
    Job("three-image", "sd3", guided_params()),
    Job("three-seed", "sd3", guided_params(1)),
    Job("three-prompt", "sd3", guided_params(prompt="b", num_inference_steps=6)),
    Job("three-negative", "sd3", guided_params(negative_prompt="blurred", guidance_scale=3.0)),
    Job("three-unguided", "sd3", guided_params(2, ODD, guidance_scale=1.0, height=16, width=72)),
    Job("three-long", "sd3", guided_params(4, LONG, max_sequence_length=16, height=48, num_inference_steps=1)),
    Job("three-half", "sd3", guided_params(3, width=48, negative_prompt="b"), HALF),
    Job("three-medium", "sd3-medium", guided_params(5, width=24)),
    Job("z-image", "z-image", guided_params()),
    Job("z-seed", "z-image", guided_params(1)),
    Job("z-prompt", "z-image", guided_params(prompt="b", num_inference_steps=6)),
    Job("z-negative", "z-image", guided_params(negative_prompt=LONG, max_sequence_length=64, guidance_scale=0.5)),
    Job("z-unguided", "z-image", guided_params(2, ODD, guidance_scale=0.0, height=16, width=72)),
    Job("z-long", "z-image", guided_params(4, LONG, max_sequence_length=16, height=48, num_inference_steps=1)),
    Job("z-half", "z-image", guided_params(3, LONG, max_sequence_length=64, width=48, negative_prompt="b"), HALF),
    Job("ltx-video", "ltx", ltx_params()),
    Job("ltx-seed", "ltx", ltx_params(1)),
    Job("ltx-prompt", "ltx", ltx_params(prompt="b", num_inference_steps=6)),
    Job("ltx-rate", "ltx", ltx_params(fps=8)),
    Job("ltx-negative", "ltx", ltx_params(negative_prompt="blurred", guidance_scale=3.0, num_frames=9)),
    Job("ltx-unguided", "ltx", ltx_params(2, ODD, guidance_scale=1.0, num_frames=1, width=64)),
    Job("ltx-long", "ltx", ltx_params(4, LONG, max_sequence_length=16, num_inference_steps=1)),
    Job("ltx-half", "ltx", ltx_params(3, negative_prompt="b"), HALF),
    Job("ltx-timed", "ltx-timed", ltx_params(3, height=64)),
    Job("kontext-image", "kontext", kontext_params()),
    Job("kontext-seed", "kontext", kontext_params(1)),
    Job("kontext-other", "kontext", kontext_params(image="glass.webp", num_inference_steps=6)),
    Job("kontext-negative", "kontext", kontext_params(2, negative_prompt="n", true_cfg_scale=3.0, width=64)),
    Job("kontext-one-step", "kontext", kontext_params(3, ODD, image="sky.png", height=96, num_inference_steps=1)),
    Job("kontext-half", "kontext", kontext_params(4), "bfloat16,vae=bfloat16"),
]
"""Of further families."""


def redrawn(params: dict[str, Any], strength: float = 0.6, steps: int = 6, **given: Any) -> dict[str, Any]:
    return {**params, "image": "sky.png", "strength": strength, "num_inference_steps": steps, **given}


REDRAWN = [
    Job("redrawn-flux", "flux", redrawn(flux_params())),
    Job("redrawn-flux-seed", "flux", redrawn(flux_params(1))),
    Job("redrawn-flux-less", "flux", redrawn(flux_params(), 0.35)),
    Job("redrawn-flux-other", "flux", redrawn(flux_params(), image="wall.jpg")),
    Job("redrawn-flux-all", "flux", redrawn(flux_params(2, width=48), 1.0, image="wall.jpg")),
    Job("redrawn-flux-negative", "flux", redrawn(flux_params(2, negative_prompt="n", true_cfg_scale=3.0), 0.45)),
    Job("redrawn-flux-half", "flux", redrawn(flux_params(3)), HALF),
    Job("redrawn-flux-whole-half", "flux", redrawn(flux_params(3)), WHOLE_HALF),
    Job("masked-schnell", "flux-schnell", redrawn(flux_params(4, guidance_scale=0.0), mask="hole.png")),
    Job("redrawn-xl", "sdxl", redrawn(guided_params())),
    Job("redrawn-xl-seed", "sdxl", redrawn(guided_params(1))),
    Job("redrawn-xl-less", "sdxl", redrawn(guided_params(), 0.35)),
    Job("redrawn-xl-all", "sdxl", redrawn(guided_params(2, negative_prompt="b"), 1.0, image="wall.jpg", height=48)),
    Job("redrawn-xl-unguided", "sdxl", redrawn(guided_params(2, guidance_scale=1.0), 0.5, 7)),
    Job("redrawn-xl-half", "sdxl", redrawn(guided_params(3)), HALF),
    Job("redrawn-xl-whole-half", "sdxl", redrawn(guided_params(3)), WHOLE_HALF),
    Job("redrawn-three", "sd3", redrawn(guided_params())),
    Job("redrawn-three-half", "sd3", redrawn(guided_params(1, guidance_scale=1.0), 0.35), HALF),
    Job("redrawn-qwen", "qwen-image", redrawn(qwen_params())),
    Job("masked-qwen", "qwen-image", redrawn(qwen_params(1, negative_prompt="n"), mask="hole.png")),
    Job("masked-qwen-half", "qwen-image", redrawn(qwen_params(1, width=48), 0.45, mask="glass.webp"), WHOLE_HALF),
    Job("redrawn-z", "z-image", redrawn(guided_params())),
    Job("redrawn-z-half", "z-image", redrawn(guided_params(1, negative_prompt="b"), 0.35), HALF),
    Job("masked-z", "z-image", redrawn(guided_params(1), mask="hole.png")),
    Job("masked-z-all", "z-image", redrawn(guided_params(2, width=48), 1.0, mask="hole.png")),
    Job("masked-z-whole-half", "z-image", redrawn(guided_params(2, width=48), 1.0, mask="hole.png"), WHOLE_HALF),
    Job("masked-flux", "flux", redrawn(flux_params(), mask="hole.png")),
    Job("masked-flux-seed", "flux", redrawn(flux_params(1), mask="hole.png")),
    Job("masked-flux-all", "flux", redrawn(flux_params(2, width=48), 1.0, mask="hole.png", image="wall.jpg")),
    Job("masked-flux-half", "flux", redrawn(flux_params(3), 0.45, mask="glass.webp"), HALF),
    Job("masked-xl", "sdxl", redrawn(guided_params(), mask="hole.png")),
    Job("masked-xl-seed", "sdxl", redrawn(guided_params(1), mask="hole.png")),
    Job("masked-xl-all", "sdxl", redrawn(guided_params(2, width=48), 1.0, mask="glass.webp", image="wall.jpg")),
    Job("masked-xl-half", "sdxl", redrawn(guided_params(3, negative_prompt="n"), 0.45, mask="hole.png"), HALF),
]
"""From a picture, and where a mask says."""
JOBS += FURTHER + REDRAWN

CACHED = [
    Job("cached-wan", "wan", wan_params(1, num_inference_steps=12, feature_cache=0.3)),
    Job("cached-shapes", SHAPES, {**JOB_OF_SHAPES, "num_inference_steps": 20, "feature_cache": 0.15}),
    Job("cached-picture", "wan-image", image_params(1, num_inference_steps=12, feature_cache=0.3)),
    Job("cached-flux", "flux", flux_params(1, num_inference_steps=12, feature_cache=0.2)),
]
"""Those that skip blocks: they equal diffusers' own cache, and are not exact."""

LORA_JOBS = [
    Job("lora-plain", "wan", wan_params(20, lora="wan-plain", lora_scale=1.0)),
    Job("lora-alpha", "wan", wan_params(20, lora="wan-alpha", lora_scale=1.0)),
    Job("lora-none", "wan", wan_params(20)),
    Job("lora-scaled", "wan", wan_params(20, lora="wan-plain", lora_scale=-0.35)),
    Job("lora-original", "wan", wan_params(21, num_frames=5, negative_prompt="n", lora="wan-original", lora_scale=1.5)),
    Job("lora-two", "wan", wan_params(20, lora="wan-alpha,wan-plain:-0.35", lora_scale=0.7)),
    Job("lora-half", "wan", wan_params(22, lora="wan-alpha", lora_scale=0.7), HALF),
    Job("lora-euler", "wan-euler", wan_params(23, num_frames=9, lora="wan-plain", lora_scale=1.0)),
    Job("lora-picture", "wan-image", image_params(24, lora="wan-plain", lora_scale=1.0)),
    Job("lora-flux", "flux", flux_params(25, lora="flux-plain", lora_scale=1.0)),
    Job("lora-flux-alpha", "flux", flux_params(25, lora="flux-alpha", lora_scale=0.5)),
    Job(
        "lora-flux-alphas",
        "flux",
        flux_params(25, negative_prompt="n", true_cfg_scale=3.0, lora="flux-alphas", lora_scale=1.0),
    ),
    Job("lora-flux-two", "flux", flux_params(25, lora="flux-plain:0.4,flux-alphas:1.5", lora_scale=1.0)),
    Job("lora-flux-kohya", "flux", flux_params(25, lora="flux-kohya:0.5", lora_scale=1.0)),
    Job("lora-flux-half", "flux", flux_params(26, lora="flux-plain", lora_scale=0.9), HALF),
    Job("lora-flux-none", "flux", flux_params(25)),
    Job("lora-schnell", "flux-schnell", flux_params(27, lora="flux-plain", lora_scale=1.0)),
    Job("lora-xl", "sdxl", guided_params(28, lora="sdxl-plain", lora_scale=0.8)),
    Job("lora-xl-kohya", "sdxl", guided_params(28, lora="sdxl-kohya", lora_scale=1.0)),
    Job("lora-three", "sd3", guided_params(29, lora="sd3-plain", lora_scale=1.0)),
    Job("lora-z", "z-image", guided_params(29, lora="z-image-plain", lora_scale=1.0)),
    Job("lora-ltx", "ltx", ltx_params(29, lora="ltx-plain", lora_scale=1.0)),
    Job("lora-kontext", "kontext", kontext_params(29, lora="flux-plain", lora_scale=1.0)),
]
"""With adapters, which the reference makes under `loras`."""

FILES = [
    Job("single", "wan-single", wan_params(20)),
    Job("even", "wan-even", wan_params(20)),
    Job("quantized", "wan-gguf", wan_params(20)),
    Job("lora-quantized", "wan-gguf", wan_params(20, lora="even-plain:0.5", lora_scale=1.0)),
]
"""Of transformers that are one file in another tool's layout, and of one whose weights are such a file's too."""
QUANTIZED = [
    Job("torchao-video", "wan-int8", wan_params(20, num_frames=5)),
    Job("torchao-half", "wan-int8", wan_params(20, negative_prompt="no"), HALF),
    Job("torchao-float8", "wan-float8", wan_params(20), HALF),
    Job("torchao-activations", "flux-int8", flux_params(20)),
]
"""Of transformers and encoders that torchao has quantized."""

WIDE = {"width": 448, "num_inference_steps": 1}
"""Three tiles in a row of VAEs whose tiles are 256 pixels, of which the last is 64."""
TILED = [
    Job("tiled-video", "wan-2.2-5b", wan_params(30, **WIDE, height=288, num_frames=5), tiled=True),
    Job("tiled-shapes", SHAPES, wan_params(31, WORDS, **OF_SHAPES | WIDE | {"height": 288}), tiled=True),
    Job("tiled-half", "wan-2.2-5b", wan_params(32, **WIDE, num_frames=5), "bfloat16,vae=bfloat16", tiled=True),
    Job("tiled-flux", "flux", flux_params(33, width=144, height=80, num_inference_steps=1), tiled=True),
    Job("tiled-one", "flux", flux_params(34, width=48, num_inference_steps=1), tiled=True),
    Job("tiled-frames", "hunyuan-video", hunyuan_params(35, **WIDE, height=16, num_frames=21), tiled=True),
    Job("tiled-qwen", "qwen-image", qwen_params(36, **WIDE), tiled=True),
    Job("tiled-klein", "klein", block_params(37, width=144, height=80, num_inference_steps=1), tiled=True),
    Job("tiled-krea", "krea", block_params(38, **WIDE, height=16), tiled=True),
    Job("tiled-picture", "wan-image-euler", image_params(39, **WIDE, image="wall.jpg"), tiled=True),
    Job("tiled-first", "wan-2.2-5b-image", image_params(40, **WIDE | {"width": 896}), HALF, tiled=True),
]
"""Those whose VAE works in tiles; all but one are larger than a tile. The last two start from a picture."""


def traits(job: Job) -> set[tuple[str, str]]:
    """Return what this job shows of its model, which another job of that model may not: each with the model's name."""
    params = job.params
    negative, guidance = params.get("negative_prompt"), params.get("guidance_scale")
    shown = {
        job.dtype: True,
        "negative prompt": bool(negative),
        "true guidance without a negative prompt": not negative and params.get("true_cfg_scale", 1.0) != 1.0,
        "no guidance": guidance is not None and guidance <= 1.0,
        "video": params["num_frames"] > 1,
        "one step": params["num_inference_steps"] == 1,
        "oblong": params["width"] != params["height"],
        "odd characters": params["prompt"] == ODD,
        "more text than the model reads": LONG in (params["prompt"], negative),
        "modular pipeline": job.blocks,
    }
    shown |= {name: name in params for name in ("guidance_scale_2", "image_2", "strength", *UPLOADS)}
    return {(job.model, trait) for trait, is_shown in shown.items() if is_shown}


def representatives(jobs: Sequence[Job]) -> list[Job]:
    """Return few of these jobs that show every trait of every model: the one that adds most, again and again."""
    chosen: list[Job] = []
    missing = {trait for job in jobs for trait in traits(job)}
    while missing:
        best = max(jobs, key=lambda job: len(traits(job) & missing))
        chosen.append(best)
        missing -= traits(best)
    return chosen


BY_DAY = {job.name for job in representatives(JOBS)}
"""Jobs that tests of every job run by day. The others are nightly."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "job" in metafunc.fixturenames:
        nightly = [() if job.name in BY_DAY else pytest.mark.nightly for job in JOBS]
        params = [pytest.param(job, id=job.name, marks=marks) for job, marks in zip(JOBS, nightly, strict=True)]
        metafunc.parametrize("job", params)


@dataclass(frozen=True)
class Undivided:
    """Where the tiny models are (by kind), pictures to start from, and the reference results.

    Those of jobs that are nightly are made when the first of them is asked for.
    """

    root: Path
    make_nightly: Callable[[], object] = lambda: None

    def folder(self, model: str) -> Path:
        return self.root / model

    def result(self, name: str) -> dict[str, np.ndarray]:
        if not (self.root / f"{name}.npz").exists():
            self.make_nightly()
        with np.load(self.root / f"{name}.npz", allow_pickle=False) as found:
            return dict(found)

    def uploads(self, params: Params) -> dict[str, bytes]:
        names = [name for name in UPLOADS if name in params]
        return {name: (self.root / str(params[name])).read_bytes() for name in names}


def draw_pictures(root: Path) -> None:
    """Two PNG; a large JPEG that lies on its side and says so; a WebP with holes; a mask for the first."""
    noise = np.random.default_rng(0).integers(0, 256, (3, 40, 56, 4), dtype=np.uint8)
    Image.fromarray(noise[0, :36, :40, :3]).save(root / "sky.png")
    Image.fromarray(noise[2, ..., :3]).resize((100, 68)).save(root / "sea.png")
    sideways = Image.Exif()
    sideways[0x0112] = 6
    Image.fromarray(noise[1, ..., :3]).resize((300, 200)).save(root / "wall.jpg", exif=sideways)
    Image.fromarray(noise[2]).save(root / "glass.webp", lossless=True)
    hole = np.zeros((36, 40, 4), np.uint8)
    hole[6:20, 8:30, 3] = 255
    Image.fromarray(255 - hole).save(root / "hole.png")


@pytest.fixture(scope="session")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> Undivided:
    def run(jobs: Sequence[Job], root: Path, folder: Path) -> None:
        script = Path(__file__).with_name("undivided.py")
        isolated(script, str(root), folder=folder, given=json.dumps([asdict(job) for job in jobs]))

    def make(root: Path) -> None:
        draw_pictures(root)
        by_day = [job for job in JOBS if job.name in BY_DAY]
        run([*by_day, *CACHED, *LORA_JOBS, *FILES, *QUANTIZED, *TILED], root, root)

    def make_nightly() -> Path:
        nightly = [job for job in JOBS if job.name not in BY_DAY]
        return once("undivided-nightly", tmp_path_factory, lambda folder: run(nightly, root, folder))

    root = once("undivided", tmp_path_factory, make)
    return Undivided(root, make_nightly)


@pytest.fixture
def copied(undivided: Undivided, tmp_path: Path) -> Callable[[str], Path]:
    """A tiny model's folder to break, by kind."""
    return lambda kind: Path(shutil.copytree(undivided.folder(kind), tmp_path / kind))


@pytest.fixture(scope="session")
def stages() -> Load:
    """Every stage of a model by name, loaded once a session for each dtype and options."""
    import torch

    torch.set_num_threads(1)

    @cache
    def load(
        folder: Path, dtype: str = "float32", options: ComputeOptions = EXACT, loras: str = ""
    ) -> dict[str, Stage]:
        family = find(folder)
        card = family.model_spec("model", folder, dtype)
        runtime = RuntimeOptions("cpu", card.dtypes, options, loras)
        return {spec.name: family.load(spec, folder, runtime) for spec in card.pipeline.stages}

    return load


SMALL = {"height": 32, "width": 32, "num_frames": 1, "max_sequence_length": 24}


def serve(folder: Path, defaults: Mapping[str, Any] = SMALL, limits: Mapping[str, Any] | None = None) -> None:
    """Write a serving.json."""
    said = {"defaults": {**SMALL, **defaults}, "limits": {**(limits or {})}}
    (folder / "serving.json").write_text(json.dumps(said))


def edit(file: Path, **changes: object) -> None:
    """Change entries of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def task(params: Params, tensors: Any = None, uploads: Any = None) -> StageInput:
    """A task of a request that has these pictures."""
    pictures = dict.fromkeys(uploads or {}, "hash")
    return StageInput(params, tensors or {}, uploads or {}, derived=DerivedFacts(image_hashes=pictures))


def run(stage: Stage, params: Params, tensors: Any = None, uploads: Any = None) -> Any:
    given = task({**params, "output_format": "png"}, tensors, uploads)
    stage.verify(given)
    (output,) = stage.run([given])
    return output


def encode(stages: dict[str, Stage], params: Params, uploads: dict[str, bytes]) -> dict[str, Any]:
    """What all encoders of a model that the request is for make of it."""
    names = [name for name, stage in stages.items() if "encode" in name and set(stage.uploads) <= uploads.keys()]
    return {key: value for name in names for key, value in run(stages[name], params, None, uploads).tensors.items()}


def frames(media: Any) -> np.ndarray:
    return np.stack([np.asarray(Image.open(io.BytesIO(picture.data))) for picture in media])


def divided(
    stages: dict[str, Stage], params: Params, uploads: dict[str, bytes], seeds: list[int]
) -> Iterator[tuple[Any, np.ndarray]]:
    """Encoded once, then each sample denoised and decoded on its own, as an execution plan has it."""
    encoded = encode(stages, params, uploads)
    for seed in seeds:
        own = {**params, "seed": seed}
        latents = run(stages["denoise"], own, encoded).tensors["latents"]
        yield latents, frames(run(stages["vae_decode"], own, {"latents": latents}).media)
