"""Scores a training run while it goes on, from its checkpoints: one line of JSON each time, and the folder exported.

    python -m tools.shapes.curve --work DIR --every 8

Writes `DIR/curve.jsonl` (seconds of training, steps, and the share of each kind of caption that came out right) and
`DIR/interim`, the model so far. Ends with the training budget.
"""

import argparse
import json
import logging
import time
from pathlib import Path

import torch
from diffusers import WanPipeline

from tools.shapes import score
from tools.shapes.checkpoint import load, progress_of
from tools.shapes.dit import Denoiser, normalise
from tools.shapes.export import export
from tools.shapes.vae import make_vae

log = logging.getLogger(__name__)

POLL_S = 10.0


def export_checkpoint(work: Path, denoiser: Path, out: Path) -> None:
    """Write the model that a denoiser's checkpoint holds, with its averaged weights."""
    vae, average = make_vae(), Denoiser()
    refined = work / "decoder.safetensors"
    load(refined if refined.exists() else work / "vae.safetensors", "vae", vae)
    load(denoiser, "average", average)
    normalise(vae, work)
    export(vae, average, out)


def score_folder(folder: Path, count: int, seed: int) -> dict[str, float]:
    """The share right of `count` captions of each kind, at the serving defaults."""
    pipeline = WanPipeline.from_pretrained(folder)
    shares = {}
    for kind in score.KINDS:
        captions = score.random_captions(kind, count, seed)
        made = score.generate(pipeline, captions, 0, score.serving_defaults(folder, kind))
        found = score.score(made, captions)
        shown = 12 if kind == "motion" else 36
        score.sheet(made[:shown], captions[:shown]).save(folder.parent / f"watch-{kind}.png")
        log.info("%s: %s", kind, found)
        shares[kind] = round(found.right, 4)
    return shares


def follow(work: Path, every_s: float, count: int, seed: int) -> None:
    """Score whenever `every_s` more seconds have been trained, until the budget is spent."""
    checkpoint, scored_at = work / "denoiser.safetensors", 0.0
    while True:
        progress = progress_of(checkpoint) if checkpoint.exists() else {"spent_s": 0.0, "budget_s": 1.0}
        over = progress["spent_s"] >= progress["budget_s"]
        if over or progress["spent_s"] - scored_at >= every_s:
            scored_at = progress["spent_s"]
            export_checkpoint(work, checkpoint, work / "interim")
            line = {"spent_s": round(scored_at), "step": progress["step"]} | score_folder(work / "interim", count, seed)
            with (work / "curve.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        if over:
            return
        time.sleep(POLL_S)


def main() -> None:
    """Command line."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--every", type=float, default=8, help="minutes of training between two scores")
    parser.add_argument("--captions", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    follow(asked.work, asked.every * 60, asked.captions, asked.seed)


if __name__ == "__main__":
    main()
