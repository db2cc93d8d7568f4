"""The denoiser of the built-in model, trained on latents of drawn scenes and on prompts that its text encoder reads.

Flow matching as the served pipeline runs it: a latent is `(1 - sigma) * picture + sigma * noise`, and the
transformer, told `1000 * sigma`, predicts `noise - picture`.
"""

import copy
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from transformers import UMT5EncoderModel

from tools.shapes import scenes
from tools.shapes.checkpoint import Progress, Run, train
from tools.shapes.fast import half_precision, make_optimizers
from tools.shapes.halves import Halves
from tools.shapes.layout import UNKNOWN, PatchHeads, layout
from tools.shapes.reader import REWORDED, WIDTH, make_text_encoder, read
from tools.shapes.vae import Z, encode
from tools.shapes.words import Wordings, make_tokenizer

log = logging.getLogger(__name__)

EMA_DECAY = 0.999
BATCH, CLIPS_IN_BATCH = 128, 48
RELATIONS_IN_BATCH = 74  # of the pictures, so that of ten samples three are one shape, four are two, three move
COUNTS = {"single": 12000, "relation": 32000, "motion": 4000}  # scenes drawn once and encoded
STILL = 0.15  # scenes that do not move among the clips, as a share of those that do
UNMOVED = 0.08  # share of single pictures whose caption says that they move
DROPPED = 0.1  # share of captions dropped for guidance
LAYOUT_WEIGHT = 0.1  # of what patches are asked beside drawing
DECAY = 0.1  # share of the budget in which the rate falls
HEADS, HEAD_WIDTH = 4, 36


class Denoiser(torch.nn.Module):
    """A text encoder that learns nothing here and the transformer, joined the way `WanPipeline` joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = make_text_encoder().requires_grad_(False)
        self.transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_WIDTH,
            in_channels=Z,
            out_channels=Z,
            text_dim=WIDTH,
            freq_dim=128,
            ffn_dim=432,
            num_layers=6,
            rope_max_seq_len=64,
        )

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, noisy: torch.Tensor, sigma: torch.Tensor
    ) -> torch.Tensor:
        """Velocity of (B, 16, T, h, w) latents at (B,) sigmas, for (B, 16) tokens."""
        words = read(self.text_encoder, tokens, mask)
        return self.transformer(
            hidden_states=noisy, timestep=sigma * 1000, encoder_hidden_states=words, return_dict=False
        )[0]


@dataclass(frozen=True)
class Samples:
    """Latents of scenes, normalised per channel, (N, 16, T, 8, 8), what can be said of each, and (N, 2, 3) layouts."""

    latents: torch.Tensor
    words: Wordings
    layouts: torch.Tensor


def training_scenes(kind: str, seed: int) -> list[scenes.Scene]:
    """What the denoiser learns of one kind. Among the moving are some that stand still, as their captions say."""
    count = COUNTS[kind]
    drawn = scenes.scenes(kind, count, seed + 20)
    if kind == "motion":
        drawn += scenes.scenes("single", round(count * STILL * 2 / 3), seed + 21)
        drawn += scenes.scenes("relation", round(count * STILL / 3), seed + 22)
    return drawn


def encode_scenes(path: Path, vae: AutoencoderKLWan, kind: str, seed: int) -> torch.Tensor:
    """The latents of all training scenes of a kind, not yet normalised; read from `path` when it exists."""
    if not path.exists():
        drawn, frames = training_scenes(kind, seed), scenes.FRAMES if kind == "motion" else 1
        parts = [
            encode(vae, np.stack([scenes.draw_clip(scene, frames) for scene in drawn[i : i + 256]]))
            for i in range(0, len(drawn), 256)
        ]
        unfinished = path.with_suffix(".unfinished")
        save_file({"latents": torch.cat(parts)}, unfinished)
        os.replace(unfinished, path)
    return load_file(path)["latents"]


def make_samples(folder: Path, vae: AutoencoderKLWan, seed: int) -> dict[str, Samples]:
    """Samples of every kind, their latents kept in `folder`; the latents' statistics go into `vae.config`."""
    encoded = {kind: encode_scenes(_kept(folder, kind), vae, kind, seed) for kind in COUNTS}
    mean, std = normalise(vae, folder)
    told = {kind: training_scenes(kind, seed) for kind in COUNTS}
    tokenizer = make_tokenizer()
    latents = {kind: (encoded[kind] - mean) / std for kind in COUNTS}
    latents["unmoved"], told["unmoved"] = latents["single"], _unmoved(told["single"])
    return {
        kind: Samples(latents[kind], Wordings(tokenizer, shown), torch.tensor([layout(scene) for scene in shown]))
        for kind, shown in told.items()
    }


def normalise(vae: AutoencoderKLWan, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and spread per channel of the pictures' latents that `folder` holds, which `vae.config` is told too."""
    pictures = torch.cat([load_file(_kept(folder, kind))["latents"] for kind in ("single", "relation")])
    mean = pictures.mean(dim=(0, 2, 3, 4), keepdim=True)
    std = pictures.std(dim=(0, 2, 3, 4), keepdim=True)
    vae.register_to_config(latents_mean=mean.flatten().tolist(), latents_std=std.flatten().tolist())
    return mean, std


def _kept(folder: Path, kind: str) -> Path:
    return folder / f"latents-{kind}.safetensors"


def _unmoved(told: list[scenes.Scene]) -> list[scenes.Scene]:
    """Single scenes captioned as if they moved: a picture of a moving shape is a picture of that shape."""
    ways = list(scenes.DIRECTIONS)
    return [replace(scene, direction=ways[i % len(ways)]) for i, scene in enumerate(told)]


def train_denoiser(
    path: Path, encoder: UMT5EncoderModel, samples: dict[str, Samples], budget_s: float, seed: int, processes: int = 1
) -> Denoiser:
    """Train for `budget_s` seconds of stepping and return the averaged weights; resumes from `path`.

    Of two `processes` each takes half of every batch. What the text encoder is stays as it is.

    Both models' steps are compiled, which needs a C++ compiler.
    """
    torch.manual_seed(seed)
    model = Denoiser()
    model.text_encoder.load_state_dict(encoder.state_dict())
    average = copy.deepcopy(model).eval().requires_grad_(False)
    heads = PatchHeads(model.transformer.blocks, HEADS * HEAD_WIDTH, side=scenes.SIZE // 32)
    learner = torch.nn.ModuleDict({"model": model, "heads": heads})
    model.text_encoder.compile(dynamic=False)
    model.transformer.compile(dynamic=False)
    optimizers = make_optimizers(learner, model.transformer.blocks)
    progress = Progress(budget_s, decay=DECAY)

    def work(index: int, part: slice) -> torch.Tensor:
        rng = np.random.default_rng((seed, 30, index))
        batch = _batch(rng, samples, clips=index % 10 in (3, 6, 9))
        loss = _loss(model, rng, batch, part) + LAYOUT_WEIGHT * heads.loss(batch.layouts[part])
        loss.backward()
        return loss.detach()

    halves = Halves(learner, work, alone=processes < 2)

    def step(index: int) -> None:
        progress.set_rates(*optimizers)
        loss = halves.step(index)
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        _follow(average, model, min(EMA_DECAY, (1 + index) / (10 + index)))
        if index % 100 == 0:
            log.info("denoiser step %d, %.0f s, loss %.4f", index, progress.spent_s, loss)

    train(Run(path, {"learner": learner, "average": average}, optimizers), progress, step)
    return average


class Batch(NamedTuple):
    """Latents, tokens and mask of the same scenes, and what their captions say of layouts."""

    latents: torch.Tensor
    tokens: torch.Tensor
    mask: torch.Tensor
    layouts: torch.Tensor


def _batch(rng: np.random.Generator, samples: dict[str, Samples], clips: bool) -> Batch:
    """Random clips, or pictures of every kind."""
    if clips:
        return _drawn(rng, samples["motion"], CLIPS_IN_BATCH)
    unmoved = int(rng.binomial(BATCH - RELATIONS_IN_BATCH, UNMOVED))
    counts = {
        "single": BATCH - RELATIONS_IN_BATCH - unmoved,
        "relation": RELATIONS_IN_BATCH,
        "unmoved": unmoved,
    }
    parts = [_drawn(rng, samples[kind], count) for kind, count in counts.items()]
    return Batch(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _drawn(rng: np.random.Generator, samples: Samples, count: int) -> Batch:
    which = rng.integers(len(samples.latents), size=count)
    rows = samples.words.vary(which, rng, REWORDED, DROPPED)
    layouts = samples.layouts[which]
    layouts[torch.from_numpy(rows == samples.words.row("")), :, 1:] = UNKNOWN
    return Batch(samples.latents[which], samples.words.tokens[rows], samples.words.mask[rows], layouts)


def _loss(model: Denoiser, rng: np.random.Generator, batch: Batch, part: slice) -> torch.Tensor:
    """Mean squared error of the velocity on a part of one batch."""
    noise = torch.from_numpy(rng.standard_normal(batch.latents.shape, dtype=np.float32))[part]
    sigma = _sigmas(rng, len(batch.latents))[part]
    clean, share = batch.latents[part], sigma.view(-1, 1, 1, 1, 1)
    with half_precision():
        velocity = model(batch.tokens[part], batch.mask[part], (1 - share) * clean + share * noise, sigma)
    return (velocity - (noise - clean)).square().mean()


def _sigmas(rng: np.random.Generator, count: int) -> torch.Tensor:
    """(count,) noise levels: half logit-normal with mean 0.3, 30 % in the upper quarter, where places are decided."""
    normal = 1 / (1 + np.exp(-rng.normal(0.3, 1.0, count)))
    upper, any_level = 0.75 + 0.25 * rng.random(count), rng.random(count)
    mixed = np.choose(rng.choice(3, count, p=(0.5, 0.3, 0.2)), (normal, upper, any_level))
    return torch.from_numpy(mixed.astype(np.float32))


@torch.no_grad()
def _follow(average: Denoiser, model: Denoiser, decay: float) -> None:
    """Move the averaged weights towards the model's."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
