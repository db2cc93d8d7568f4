"""Scores the built-in model: how many random captions of each kind give what they ask for.

    python -m tools.shapes.score --model unfuse/models/shapes --captions 200 --seeds 3
    python -m tools.shapes.score --pictures DIR     # made elsewhere, listed in DIR/captions.json

`captions.json` maps each file's name to its caption; a clip is named `NAME-%04d.png` and lies there frame by frame.
The kinds: `single`, `relation`, `motion`, and `held-out`, single shapes in combinations that training never shows.
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

KINDS = ("single", "relation", "motion", "held-out")
BATCH = 50
SHEET = 36  # pictures, or a third as many clips, on a sheet


@dataclass(frozen=True)
class Score:
    """Shares, 0 to 1, of pictures or clips right in each part and in all of them, and the misses in words."""

    right: float
    parts: dict[str, float]
    misses: tuple[str, ...]

    def __str__(self) -> str:
        return f"all right {self.right:.3f} ({', '.join(f'{name} {share:.3f}' for name, share in self.parts.items())})"


def random_captions(kind: str, count: int, seed: int) -> list[str]:
    """`count` captions of a kind, drawn uniformly with repetition."""
    pairs = scenes.HELD_OUT if kind == "held-out" else scenes.TRAINED
    drawn = scenes.scenes("single" if kind == "held-out" else kind, count, seed, pairs)
    return [scene.caption for scene in drawn]


def generate(
    pipeline: WanPipeline, captions: Sequence[str], first_seed: int, defaults: dict[str, object]
) -> np.ndarray:
    """A picture or clip for each caption, (N, T, H, W, 3) uint8; number i has seed `first_seed + i`."""
    pipeline.set_progress_bar_config(disable=True)
    batches = []
    for start in range(0, len(captions), BATCH):
        texts = list(captions[start : start + BATCH])
        seeds = range(first_seed + start, first_seed + start + len(texts))
        noise = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        frames = pipeline(prompt=texts, generator=noise, output_type="np", **defaults).frames
        batches.append((frames * 255).round().astype(np.uint8))
    return np.concatenate(batches)


def serving_defaults(folder: Path, kind: str) -> dict[str, object]:
    """What the pipeline is called with when a request says nothing; a picture is one frame."""
    defaults: dict[str, object] = json.loads((folder / "serving.json").read_text())["defaults"]
    del defaults["fps"]
    return defaults if kind == "motion" else defaults | {"num_frames": 1}


def score(made: Sequence[np.ndarray], captions: Sequence[str]) -> Score:
    """What the checker says of pictures and clips, (T, H, W, 3) uint8 each, asked for by `captions` of one kind."""
    found = [checker.check(frames, text) for frames, text in zip(made, captions, strict=True)]
    misses = tuple(
        f"{text}: {checker.describe(frames)}"
        for frames, text, parts in zip(made, captions, found, strict=True)
        if not all(parts.values())
    )
    parts = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    return Score(float(np.mean([all(one.values()) for one in found])), parts, misses)


def sheet(made: Sequence[np.ndarray], captions: Sequence[str]) -> Image.Image:
    """Pictures, six in a row, or clips, two in a row with three of their frames, each with its caption below."""
    frames = [0, len(made[0]) // 2, len(made[0]) - 1] if len(made[0]) > 1 else [0]
    side, columns = made[0].shape[1], 6 // len(frames)
    width, height = len(frames) * (side + 2) + 6, side + 18
    page = Image.new("RGB", (columns * width, -(-len(made) // columns) * height), (236, 236, 240))
    pen = ImageDraw.Draw(page)
    for index, (clip, text) in enumerate(zip(made, captions, strict=True)):
        x, y = index % columns * width + 4, index // columns * height + 2
        for place, frame in enumerate(frames):
            page.paste(Image.fromarray(clip[frame]), (x + place * (side + 2), y))
        pen.text((x, y + side + 1), text, fill=(30, 30, 30), font_size=10 if len(text) < 28 else 7)
    return page


def score_model(
    folder: Path, kind: str, count: int, seeds: int, changes: dict[str, object], sheets: Path | None = None
) -> Score:
    """Score a model folder at its serving defaults with `changes`; the folder `sheets` receives a PNG to look at."""
    pipeline = WanPipeline.from_pretrained(folder)
    defaults = serving_defaults(folder, kind) | changes
    made: list[np.ndarray] = []
    captions: list[str] = []
    for seed in range(seeds):
        asked = random_captions(kind, count, 1000 + seed)
        made.extend(generate(pipeline, asked, 1_000_000 * (seed + 1), defaults))
        captions.extend(asked)
        log.info("%s, seed %d: %s", kind, seed, score(made[-count:], asked))
    if sheets:
        shown = SHEET // 3 if kind == "motion" else SHEET
        sheet(made[:shown], captions[:shown]).save(sheets / f"shapes-{kind}.png", optimize=True)
    return score(made, captions)


def score_folder(folder: Path) -> dict[str, Score]:
    """Score what is named in `captions.json`, by kind."""
    named: dict[str, str] = json.loads((folder / "captions.json").read_text())
    kinds: dict[str, list[str]] = {}
    for name, text in named.items():
        kinds.setdefault(_kind(text), []).append(name)
    return {
        kind: score([_read(folder, name) for name in names], [named[name] for name in names])
        for kind, names in kinds.items()
    }


def _kind(caption: str) -> str:
    """The kind that a caption is of."""
    asked = checker.CAPTION.fullmatch(caption)
    if asked is None:
        raise ValueError(f"{caption!r} is not a caption that can be scored")
    if asked["relation"] or asked["direction"]:
        return "relation" if asked["relation"] else "motion"
    return "held-out" if (asked["colour"], asked["shape"]) in scenes.HELD_OUT else "single"


def _read(folder: Path, name: str) -> np.ndarray:
    """A picture, or all frames of a clip, as (T, H, W, 3) uint8."""
    paths = sorted(folder.glob(name.replace("%04d", "[0-9]" * 4)))
    return np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])


def main() -> None:
    """Command line; logs the scores and every miss."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path)
    source.add_argument("--pictures", type=Path)
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all")
    parser.add_argument("--captions", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--sheets", type=Path, help="folder for a PNG of the first pictures of each kind")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if asked.pictures:
        scores = score_folder(asked.pictures)
    else:
        changes = {"num_inference_steps": asked.steps, "guidance_scale": asked.guidance}
        given = {name: value for name, value in changes.items() if value is not None}
        scores = {
            kind: score_model(asked.model, kind, asked.captions, asked.seeds, given, asked.sheets)
            for kind in asked.kind or KINDS
        }
    for kind, result in scores.items():
        for miss in result.misses:
            log.info("  %s", miss)
        log.info("%s: %s", kind, result)


if __name__ == "__main__":
    main()
