"""Trains the built-in model from nothing and exports it: autoencoder, latents, text encoder, denoiser, decoder, folder.

    python -m tools.shapes.train --out unfuse/models/shapes --work DIR --vae-minutes 48 --dit-minutes 95

`--work` holds the checkpoints; the same command run again goes on from them, and with more minutes from where the
learning rate had not yet begun to fall. One core is enough, and one torch thread is faster than two on a machine that
others share. `tools.shapes.curve` beside it scores the checkpoints as they come.
"""

import argparse
import logging
from pathlib import Path

import torch

from tools.shapes.dit import make_samples, train_denoiser
from tools.shapes.export import export
from tools.shapes.reader import train_text_encoder
from tools.shapes.vae import refine_decoder, train_vae

log = logging.getLogger(__name__)


def train(
    out: Path,
    work: Path,
    vae_s: float,
    words_s: float,
    denoiser_s: float,
    decoder_s: float,
    seed: int,
    processes: int = 1,
) -> None:
    """Every stage in order; a stage whose budget its checkpoint has spent takes no steps."""
    work.mkdir(parents=True, exist_ok=True)
    vae = train_vae(work / "vae.safetensors", vae_s, seed)
    samples = make_samples(work, vae, seed)
    log.info("latents: mean %s, std %s", vae.config.latents_mean, vae.config.latents_std)
    encoder = train_text_encoder(work / "words.safetensors", words_s, seed)
    denoiser = train_denoiser(work / "denoiser.safetensors", encoder, samples, denoiser_s, seed, processes)
    if decoder_s:
        refine_decoder(work / "decoder.safetensors", vae, decoder_s, seed)
    export(vae, denoiser, out)
    log.info("exported to %s", out)


def main() -> None:
    """Command line."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--vae-minutes", type=float, default=48)
    parser.add_argument("--words-minutes", type=float, default=2)
    parser.add_argument("--dit-minutes", type=float, default=95)
    parser.add_argument("--decoder-minutes", type=float, default=20)
    parser.add_argument("--processes", type=int, default=1, help="2: each computes half of a denoiser batch")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    minutes = (asked.vae_minutes, asked.words_minutes, asked.dit_minutes, asked.decoder_minutes)
    train(asked.out, asked.work, *(60 * each for each in minutes), asked.seed, asked.processes)


if __name__ == "__main__":
    main()
