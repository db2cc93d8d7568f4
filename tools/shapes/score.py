"""Scores the built-in model: how many random captions give the colour, the shape and the ground they ask for.

    python -m tools.shapes.score --model unfuse/models/shapes --captions 200 --seeds 3
    python -m tools.shapes.score --pictures DIR     # PNGs made elsewhere, listed in DIR/captions.json

`captions.json` maps each file's name to its caption.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import WanPipeline
from PIL import Image, ImageDraw

from tools.shapes import checker, scenes

log = logging.getLogger(__name__)

BATCH = 50


@dataclass(frozen=True)
class Score:
    """Shares, 0 to 1, of pictures right in one respect and in all three, and the misses in words."""

    colour: float
    shape: float
    ground: float
    all_three: float
    misses: tuple[str, ...]

    def __str__(self) -> str:
        parts = f"colour {self.colour:.3f}, shape {self.shape:.3f}, ground {self.ground:.3f}"
        return f"all three {self.all_three:.3f} ({parts})"


def random_captions(count: int, seed: int) -> list[str]:
    """`count` captions drawn uniformly with repetition."""
    rng = np.random.default_rng(seed)
    return [str(text) for text in rng.choice(scenes.every_caption(), size=count)]


def generate(
    pipeline: WanPipeline, captions: Sequence[str], first_seed: int, defaults: dict[str, object]
) -> np.ndarray:
    """One picture a caption, (N, H, W, 3) uint8; picture i has seed `first_seed + i`."""
    pipeline.set_progress_bar_config(disable=True)
    batches = []
    for start in range(0, len(captions), BATCH):
        texts = list(captions[start : start + BATCH])
        seeds = range(first_seed + start, first_seed + start + len(texts))
        noise = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        frames = pipeline(prompt=texts, generator=noise, output_type="np", **defaults).frames
        batches.append((frames[:, 0] * 255).round().astype(np.uint8))
    return np.concatenate(batches)


def score(pictures: Sequence[np.ndarray], captions: Sequence[str]) -> Score:
    """What the checker says of `pictures`, which were asked for by `captions`."""
    verdicts = [checker.judge(picture) for picture in pictures]
    right = np.array([verdict.names(text) for verdict, text in zip(verdicts, captions, strict=True)])
    misses = tuple(
        f"{text}: {verdict.colour} {verdict.shape} on {verdict.ground}"
        for verdict, text, row in zip(verdicts, captions, right, strict=True)
        if not row.all()
    )
    colour, shape, ground = right.mean(axis=0)
    return Score(float(colour), float(shape), float(ground), float(right.all(axis=1).mean()), misses)


def grid(pictures: Sequence[np.ndarray], captions: Sequence[str], side: int = 128) -> Image.Image:
    """The pictures enlarged to `side` pixels, six in a row, each with its caption below."""
    columns = 6
    height = side + 18
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (side + 8), rows * height), (236, 236, 240))
    pen = ImageDraw.Draw(sheet)
    for index, (picture, text) in enumerate(zip(pictures, captions, strict=True)):
        x, y = index % columns * (side + 8) + 4, index // columns * height + 2
        sheet.paste(Image.fromarray(picture).resize((side, side), Image.Resampling.NEAREST), (x, y))
        pen.text((x, y + side + 1), text, fill=(30, 30, 30))
    return sheet


def score_model(folder: Path, count: int, seeds: int, changes: dict[str, object], sheet: Path | None) -> Score:
    """Score a model folder at its serving defaults with `changes`; `sheet` receives a grid of 36 pictures."""
    pipeline = WanPipeline.from_pretrained(folder)
    defaults = json.loads((folder / "serving.json").read_text())["defaults"]
    del defaults["fps"]
    pictures: list[np.ndarray] = []
    captions: list[str] = []
    for seed in range(seeds):
        asked = random_captions(count, 1000 + seed)
        made = generate(pipeline, asked, 1_000_000 * (seed + 1), defaults | changes)
        log.info("seed %d: %s", seed, score(made, asked))
        pictures.extend(made)
        captions.extend(asked)
    if sheet:
        grid(pictures[:36], captions[:36]).save(sheet)
    return score(pictures, captions)


def score_folder(folder: Path) -> Score:
    """Score the PNGs named in `captions.json`."""
    captions: dict[str, str] = json.loads((folder / "captions.json").read_text())
    pictures = [np.asarray(Image.open(folder / name).convert("RGB")) for name in captions]
    return score(pictures, list(captions.values()))


def main() -> None:
    """Command line; logs the score and every miss."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path)
    source.add_argument("--pictures", type=Path)
    parser.add_argument("--captions", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--grid", type=Path, help="where to write a PNG of the first 36 pictures")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if asked.pictures:
        result = score_folder(asked.pictures)
    else:
        changes = {"num_inference_steps": asked.steps, "guidance_scale": asked.guidance}
        given = {name: value for name, value in changes.items() if value is not None}
        result = score_model(asked.model, asked.captions, asked.seeds, given, asked.grid)
    for miss in result.misses:
        log.info("  %s", miss)
    log.info("%s", result)


if __name__ == "__main__":
    main()
