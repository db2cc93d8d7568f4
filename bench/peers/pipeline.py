"""What other servers run: the whole pipeline of a folder, one thread, pictures as PNG. No unfuse in it."""

from __future__ import annotations

import io
import os
from typing import Any

import diffusers
import torch
import transformers
from PIL import Image


def load() -> diffusers.DiffusionPipeline:
    """The pipeline of the folder in BENCH_MODEL, with BENCH_THREADS."""
    torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    pipeline = diffusers.DiffusionPipeline.from_pretrained(os.environ["BENCH_MODEL"])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def pictures(pipeline: diffusers.DiffusionPipeline, prompts: list[str], seeds: list[int], **call: int) -> list[bytes]:
    """One PNG for each prompt and seed, made together."""
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    made = pipeline(prompts, generator=generators, output_type="np", **call).images
    files = []
    for pixels in (made * 255).round().astype("uint8"):
        Image.fromarray(pixels).save(file := io.BytesIO(), "PNG", compress_level=1)
        files.append(file.getvalue())
    return files


def together(pipeline: diffusers.DiffusionPipeline, asked: list[dict[str, Any]]) -> list[bytes]:
    """One PNG for each request: those of equal parameters are made together."""
    alike: dict[str, list[int]] = {}
    for number, one in enumerate(asked):
        alike.setdefault(str(one["call"]), []).append(number)
    made: dict[int, bytes] = {}
    for numbers in alike.values():
        group = [asked[number] for number in numbers]
        files = pictures(pipeline, [one["prompt"] for one in group], [one["seed"] for one in group], **group[0]["call"])
        made |= dict(zip(numbers, files, strict=True))
    return [made[number] for number in range(len(asked))]
