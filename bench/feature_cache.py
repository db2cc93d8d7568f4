"""What skipping blocks gives and takes: seconds of a denoising against a whole one, and how far off the picture is.

The denoise stage of a model's folder (the built-in one), in this process, one request a forward, halves of guidance
apart. `python -m bench.feature_cache [MODEL [PICTURES]]`
"""

from __future__ import annotations

import io
import sys
import time
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bench.model import PROMPTS, Model, with_halves
from bench.report import ratio, show
from unfuse.core.compute_options import ComputeOptions
from unfuse.models import resolve_source
from unfuse.stages.denoise import Denoise

THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
STEPS = (20, 50)
PICTURES = 12


def denoised(model: Model, seed: int, **given: Any) -> tuple[float, Tensor]:
    """Seconds, and the latents."""
    params = model.params(seed, **given)
    stage, task = model.stages["denoise"], model.task("denoise", params, model.encode(params))[1]
    assert isinstance(stage, Denoise)
    stage = with_halves(stage, "apart")
    stage.verify(task)
    began = time.perf_counter()
    (output,) = stage.run([task])
    model.synchronize()
    latents = output.tensors["latents"]
    assert latents is not None
    return time.perf_counter() - began, latents


def pixels(model: Model, seed: int, latents: Tensor) -> np.ndarray:
    output = model.run("vae_decode", model.params(seed), {"latents": latents})
    return np.stack([np.asarray(Image.open(io.BytesIO(media.data))) for media in output.media]).astype(float)


def decibels(error: float) -> float:
    """Peak signal-to-noise ratio of a mean squared error of levels of 255."""
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


def measured(model: Model, steps: int, pictures: int) -> dict[str, Any]:
    """By threshold, in pairs: each request without and with, one right after the other."""
    found: dict[str, dict[str, list[float]]] = {
        str(threshold): {"s": [], "whole_s": [], "db": [], "mean": [], "most": []} for threshold in THRESHOLDS
    }
    for seed in range(pictures):
        for threshold in THRESHOLDS:
            whole_s, whole = denoised(model, seed, num_inference_steps=steps, feature_cache=0.0)
            seconds, latents = denoised(model, seed, num_inference_steps=steps, feature_cache=threshold)
            apart = np.abs(pixels(model, seed, latents) - pixels(model, seed, whole))
            row = found[str(threshold)]
            for name, value in (("s", seconds), ("whole_s", whole_s), ("mean", apart.mean()), ("most", apart.max())):
                row[name].append(float(value))
            row["db"].append(decibels(float((apart**2).mean())))
    return {
        threshold: {
            "speed_up": ratio(row["whole_s"], row["s"])["p50"],
            "psnr_db": round(median(row["db"]), 1),
            "worst_psnr_db": round(min(row["db"]), 1),
            "mean_levels_of_255": round(mean(row["mean"]), 2),
            "most_levels_of_255": max(row["most"]),
        }
        for threshold, row in found.items()
    }


def main() -> None:
    source = sys.argv[1] if sys.argv[1:] else "unfuse/shapes"
    pictures = int(sys.argv[2]) if sys.argv[2:] else PICTURES
    torch.set_num_threads(1)
    model = Model(resolve_source(source), ComputeOptions(batching="batched"))
    for seed in range(len(PROMPTS)):
        denoised(model, seed)
    show("feature_cache", model=source, by_steps={str(steps): measured(model, steps, pictures) for steps in STEPS})


if __name__ == "__main__":
    main()
