"""Trains the built-in model from nothing and exports it: autoencoder, latents, denoiser, folder.

    python -m tools.shapes.train --out unfuse/models/shapes --work DIR --vae-minutes 30 --dit-minutes 62

`--work` holds the checkpoints; the same command run again goes on from them. One core is enough, and one
torch thread is faster than two on a machine that others share.
"""

import argparse
import logging
from pathlib import Path

import torch

from tools.shapes import score
from tools.shapes.checkpoint import Progress
from tools.shapes.dit import Denoiser, make_latents, train_denoiser
from tools.shapes.export import SERVING, assemble, export
from tools.shapes.vae import train_vae

log = logging.getLogger(__name__)

WATCH_CAPTIONS = 48
WATCH_EVERY_S = 300.0


def train(out: Path, work: Path, vae_s: float, denoiser_s: float, seed: int) -> None:
    """Every stage in order; a stage whose budget its checkpoint has spent takes no steps."""
    work.mkdir(parents=True, exist_ok=True)
    vae = train_vae(work / "vae.safetensors", vae_s, seed)
    latents = make_latents(work / "latents.safetensors", vae, seed)
    log.info("latents: mean %s, std %s", vae.config.latents_mean, vae.config.latents_std)
    watched_at = 0.0

    def watch(now: Progress, average: Denoiser) -> None:
        nonlocal watched_at
        if now.spent_s - watched_at < WATCH_EVERY_S and now.share < 1:
            return
        watched_at = now.spent_s
        captions = score.random_captions(WATCH_CAPTIONS, seed)
        defaults = {name: value for name, value in SERVING["defaults"].items() if name != "fps"}
        pictures = score.generate(assemble(vae, average), captions, 0, defaults)
        log.info("denoiser step %d, share %.2f: %s", now.step, now.share, score.score(pictures, captions))
        score.grid(pictures, captions).save(work / "watch.png")

    export(vae, train_denoiser(work / "denoiser.safetensors", latents, denoiser_s, seed, watch), out)
    log.info("exported to %s", out)


def main() -> None:
    """Command line."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--vae-minutes", type=float, default=30)
    parser.add_argument("--dit-minutes", type=float, default=62)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    train(asked.out, asked.work, asked.vae_minutes * 60, asked.dit_minutes * 60, asked.seed)


if __name__ == "__main__":
    main()
