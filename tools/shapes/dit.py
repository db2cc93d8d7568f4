"""The text encoder and the denoiser of the built-in model, trained together on latents of drawn scenes.

Flow matching as the served pipeline runs it: a latent is `(1 - sigma) * picture + sigma * noise`, and the
transformer, told `1000 * sigma`, predicts `noise - picture`.
"""

import copy
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from transformers import UMT5Config, UMT5EncoderModel

from tools.shapes import scenes
from tools.shapes.checkpoint import Progress, Run, train
from tools.shapes.fast import StackedMuon, half_precision
from tools.shapes.halves import Halves
from tools.shapes.vae import Z, encode
from tools.shapes.words import Wordings, make_tokenizer

log = logging.getLogger(__name__)

PEAK_RATE, MATRIX_RATE = 1.2e-3, 2e-3
EMA_DECAY = 0.999
BATCH, CLIPS_IN_BATCH = 128, 48
RELATIONS_IN_BATCH = 74  # of the pictures, so that of ten samples three are one shape, four are two, three move
COUNTS = {"single": 12000, "relation": 32000, "motion": 4000}  # scenes drawn once and encoded
STILL = 0.15  # scenes that do not move among the clips, as a share of those that do
UNMOVED = 0.08  # share of single pictures whose caption says that they move
DROPPED, REWORDED = 0.1, 0.25  # shares of captions: dropped for guidance, worded another way


class Denoiser(torch.nn.Module):
    """Text encoder and transformer, joined the way `WanPipeline` joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(make_tokenizer()),
                d_model=96,
                d_kv=24,
                d_ff=192,
                num_layers=3,
                num_heads=4,
                dropout_rate=0.0,
                pad_token_id=0,
                eos_token_id=1,
            )
        )
        self.transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=36,
            in_channels=Z,
            out_channels=Z,
            text_dim=96,
            freq_dim=128,
            ffn_dim=432,
            num_layers=6,
            rope_max_seq_len=64,
        )

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, noisy: torch.Tensor, sigma: torch.Tensor
    ) -> torch.Tensor:
        """Velocity of (B, 16, T, h, w) latents at (B,) sigmas, for (B, 16) tokens.

        Embeddings beyond a prompt's end are set to zero and attended to, since the pipeline does so.
        """
        words = self.text_encoder(tokens, mask).last_hidden_state * mask.unsqueeze(-1)
        return self.transformer(
            hidden_states=noisy, timestep=sigma * 1000, encoder_hidden_states=words, return_dict=False
        )[0]


@dataclass(frozen=True)
class Samples:
    """Latents of scenes, normalised per channel, (N, 16, T, 8, 8), and the tokens of what can be said of each."""

    latents: torch.Tensor
    words: Wordings


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
    samples = {kind: Samples((encoded[kind] - mean) / std, Wordings(tokenizer, told[kind])) for kind in COUNTS}
    return samples | {"unmoved": Samples(samples["single"].latents, Wordings(tokenizer, _unmoved(told["single"])))}


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


def train_denoiser(path: Path, samples: dict[str, Samples], budget_s: float, seed: int, processes: int = 1) -> Denoiser:
    """Train for `budget_s` seconds of stepping and return the averaged weights; resumes from `path`.

    Of two `processes` each takes half of every batch.

    Both models' steps are compiled, which needs a C++ compiler.
    """
    torch.manual_seed(seed)
    model = Denoiser()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    model.text_encoder.compile(dynamic=False)
    model.transformer.compile(dynamic=False)
    optimizers = make_optimizers(model)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    progress = Progress(budget_s)

    def work(index: int, part: slice) -> torch.Tensor:
        rng = np.random.default_rng((seed, 30, index))
        loss = _loss(model, rng, *_batch(rng, samples, clips=index % 10 in (3, 6, 9)), part)
        loss.backward()
        return loss.detach()

    halves = Halves(model, work, alone=processes < 2)

    def step(index: int) -> None:
        for optimizer, peak in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = progress.rate(peak)
        loss = halves.step(index)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        _follow(average, model, min(EMA_DECAY, (1 + index) / (10 + index)))
        if index % 100 == 0:
            log.info("denoiser step %d, %.0f s, loss %.4f", index, progress.spent_s, loss)

    modules = {"model": model, "average": average}
    train(Run(path, modules, optimizers), progress, step)
    return average


def make_optimizers(model: Denoiser) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of the blocks, with which the loss falls about twice as fast, and AdamW for the rest."""
    blocks = [*model.transformer.blocks.parameters(), *model.text_encoder.encoder.block.parameters()]
    matrices = [parameter for parameter in blocks if parameter.ndim == 2 and min(parameter.shape) > 4]
    theirs = set(map(id, matrices))
    rest = [parameter for parameter in model.parameters() if id(parameter) not in theirs]
    muon = StackedMuon(matrices, lr=MATRIX_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return muon, torch.optim.AdamW(rest, lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.01)


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # latents, tokens and mask of the same scenes


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
    latents, tokens, mask = (torch.cat(part) for part in zip(*parts, strict=True))
    return latents, tokens, mask


def _drawn(rng: np.random.Generator, samples: Samples, count: int) -> Batch:
    which = rng.integers(len(samples.latents), size=count)
    rows = samples.words.vary(which, rng, REWORDED, DROPPED)
    return samples.latents[which], samples.words.tokens[rows], samples.words.mask[rows]


def _loss(
    model: Denoiser,
    rng: np.random.Generator,
    clean: torch.Tensor,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    part: slice,
) -> torch.Tensor:
    """Mean squared error of the velocity on a part of one batch."""
    noise = torch.from_numpy(rng.standard_normal(clean.shape, dtype=np.float32))
    sigma = _sigmas(rng, len(clean))
    clean, noise, sigma, tokens, mask = (one[part] for one in (clean, noise, sigma, tokens, mask))
    share = sigma.view(-1, 1, 1, 1, 1)
    with half_precision():
        velocity = model(tokens, mask, (1 - share) * clean + share * noise, sigma)
    return (velocity - (noise - clean)).square().mean()


def _sigmas(rng: np.random.Generator, count: int) -> torch.Tensor:
    """(count,) noise levels: 70 % logit-normal with mean 0.3, where most is learnt, and 30 % uniform."""
    normal = 1 / (1 + np.exp(-rng.normal(0.3, 1.0, count)))
    mixed = np.where(rng.random(count) < 0.7, normal, rng.random(count))
    return torch.from_numpy(mixed.astype(np.float32))


@torch.no_grad()
def _follow(average: Denoiser, model: Denoiser, decay: float) -> None:
    """Move the averaged weights towards the model's."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
