"""Folders with other noise schedulers or a safety checker, and what diffusers makes of them."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.forking import isolated
from tests.once import once
from tools.server import Server

SCRIPT = Path(__file__).with_name("undivided.py")
SEED = 5
SIZE = {"height": 32, "width": 32, "num_inference_steps": 4}

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "num_train_timesteps": 1000}
SHIFTED = {**FLOW, "use_dynamic_shifting": True, "time_shift_type": "exponential"}

SCHEDULED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "wan-dpm": ("wan", "DPMSolverMultistepScheduler", {**FLOW, "flow_shift": 3.0}),
    "wan-deis": ("wan", "DEISMultistepScheduler", {**FLOW, "flow_shift": 3.0}),
    "wan-heun": ("wan", "FlowMatchHeunDiscreteScheduler", {"shift": 3.0}),
    "flux-unipc": ("flux", "UniPCMultistepScheduler", SHIFTED),
    "flux-dpm": ("flux", "DPMSolverMultistepScheduler", SHIFTED),
    "qwen-unipc": ("qwen-image", "UniPCMultistepScheduler", SHIFTED),
    "hunyuan-unipc": ("hunyuan-video", "UniPCMultistepScheduler", {**FLOW, "flow_shift": 7.0}),
    "ltx-unipc": ("ltx", "UniPCMultistepScheduler", SHIFTED),
    "sdxl-dpm": ("sdxl", "DPMSolverMultistepScheduler", {}),
    "sd3-lcm": ("sd3", "FlowMatchLCMScheduler", {"shift": 3.0}),
    "flux-lcm": ("flux", "FlowMatchLCMScheduler", {"use_dynamic_shifting": True}),
    "lumina-stochastic": ("lumina2", "FlowMatchEulerDiscreteScheduler", {"shift": 6.0, "stochastic_sampling": True}),
    "wan-sde": ("wan", "DPMSolverMultistepScheduler", {**FLOW, "algorithm_type": "sde-dpmsolver++"}),
}
"""By name: the kind of tiny model, the class of its noise scheduler, and what the scheduler's configuration says."""

BY_DAY = ("wan-dpm", "flux-unipc", "sd3-lcm", "lumina-stochastic")
"""Those of SCHEDULED that are tried by day."""

TOGETHER = (*BY_DAY, "checked", "cogvideox")
"""Models that one server has by day."""


def scheduled(source: Path, target: Path, kind: str, **config: Any) -> Path:
    """Copy a folder and give it a noise scheduler of that class and configuration."""
    shutil.copytree(source, target)
    told = {"_class_name": kind, "_diffusers_version": "0.42.1", **config}
    (target / "scheduler" / "scheduler_config.json").write_text(json.dumps(told))
    index = json.loads((target / "model_index.json").read_text())
    (target / "model_index.json").write_text(json.dumps({**index, "scheduler": ["diffusers", kind]}))
    return target


def checked(source: Path, target: Path) -> Path:
    """Copy a Stable Diffusion folder and give it a safety checker that flags one of the seeds SEED and SEED + 1."""
    import torch
    from diffusers import StableDiffusionPipeline
    from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
    from transformers import CLIPConfig, CLIPImageProcessor

    inner = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sees = {**inner, "image_size": 32, "patch_size": 8, "projection_dim": 16}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        checker = StableDiffusionSafetyChecker(
            CLIPConfig(text_config=inner, vision_config=sees, projection_dim=16)
        ).eval()
        checker.concept_embeds.data.normal_()
        checker.concept_embeds_weights.fill_(2.0)
        checker.special_care_embeds_weights.fill_(2.0)
        extractor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
        pipe = StableDiffusionPipeline.from_pretrained(source)
        pipe.set_progress_bar_config(disable=True)
        seeds = [torch.Generator("cpu").manual_seed(SEED + more) for more in range(2)]
        pictures = [pipe("cats", **SIZE, generator=seed).images[0] for seed in seeds]
        pixels = extractor(pictures, return_tensors="pt").pixel_values
        embeds = checker.visual_projection(checker.vision_model(pixels)[1])
        scores = torch.nn.functional.cosine_similarity(embeds, checker.concept_embeds[:1])
        checker.concept_embeds_weights[0] = scores.mean()
        assert abs(float(scores[0] - scores[1])) > 0.004, "both pictures look alike to the checker"
    index = {**pipe.components, "safety_checker": checker, "feature_extractor": extractor}
    StableDiffusionPipeline(**index).save_pretrained(target)
    return target


def build(name: str, folder: Callable[[str], Path], factory: pytest.TempPathFactory) -> Path:
    """Return the folder of that name: of SCHEDULED, `checked`, or of a kind of tiny models. Built once a run."""
    if name not in (*SCHEDULED, "checked"):
        return folder(name)
    if name == "checked":
        return once("sampled", factory, lambda unfinished: checked(folder("sd"), unfinished / name) and None) / name
    kind, scheduler, config = SCHEDULED[name]
    made = once(f"sampled-{name}", factory, lambda to: scheduled(folder(kind), to / name, scheduler, **config) and None)
    return made / name


def called(folder: Path, jobs: list[dict[str, Any]]) -> dict[str, tuple[NDArray[np.uint8], Any]]:
    """Return what diffusers makes of each job: pixels, and what its safety checker said."""
    usual = {"seed": SEED, "dtype": "float32"}
    isolated(SCRIPT, str(folder), folder=folder, given=json.dumps([usual | job for job in jobs]))
    names = [job["name"] for job in jobs]
    return {n: (np.load(folder / f"{n}.npy"), json.loads((folder / f"{n}.json").read_text())) for n in names}


def pixels_of(picture: dict[str, Any]) -> NDArray[np.uint8]:
    """Return the pixels (height, width, 3) of an entry of an answer's `data`."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["b64_json"]))).convert("RGB"))


def drawn(server: Server, model: Path, **asked: Any) -> list[dict[str, Any]]:
    """Return the `data` of a request for pictures of cats."""
    body = {"model": str(model), "prompt": "cats", "seed": SEED, **asked}
    found: list[dict[str, Any]] = server.post("/v1/images/generations", body)["data"]
    return found
