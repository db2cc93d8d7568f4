"""The text encoder and the denoiser of the built-in model, trained together on latents of drawn scenes.

Flow matching as the served pipeline runs it: a latent is `(1 - sigma) * picture + sigma * noise`, and the
transformer, told `1000 * sigma`, predicts `noise - picture`.
"""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from transformers import UMT5Config, UMT5EncoderModel

from tools.shapes import scenes
from tools.shapes.checkpoint import Progress, Run, train
from tools.shapes.vae import encode
from tools.shapes.words import CaptionTable, make_tokenizer

log = logging.getLogger(__name__)

PEAK_RATE = 1.5e-3
EMA_DECAY = 0.998
BATCH, CLIPS_IN_BATCH = 64, 32
CLIPS_EVERY = 12  # one step in so many is on clips of 5 frames, the others on pictures
IMAGES, CLIPS = 16000, 1500
DROPPED, REWORDED = 0.1, 0.2  # shares of captions: dropped for guidance, worded another way


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
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                pad_token_id=0,
                eos_token_id=1,
            )
        )
        self.transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=32,
            in_channels=8,
            out_channels=8,
            text_dim=96,
            freq_dim=128,
            ffn_dim=384,
            num_layers=6,
            rope_max_seq_len=64,
        )

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, noisy: torch.Tensor, sigma: torch.Tensor
    ) -> torch.Tensor:
        """Velocity of (B, 8, T, h, w) latents at (B,) sigmas, for (B, 16) tokens.

        Embeddings beyond a prompt's end are set to zero and attended to, since the pipeline does so.
        """
        words = self.text_encoder(tokens, mask).last_hidden_state * mask.unsqueeze(-1)
        return self.transformer(
            hidden_states=noisy, timestep=sigma * 1000, encoder_hidden_states=words, return_dict=False
        )[0]


@dataclass(frozen=True)
class Latents:
    """What the denoiser learns from, normalised per channel, with each picture's row in the caption table."""

    pictures: torch.Tensor  # (N, 8, 1, 8, 8)
    picture_rows: np.ndarray
    clips: torch.Tensor  # (M, 8, 2, 8, 8)
    clip_rows: np.ndarray


def make_latents(path: Path, vae: AutoencoderKLWan, seed: int) -> Latents:
    """Encode the training pictures, or read them from `path`; their statistics go into `vae.config`."""
    table = CaptionTable(make_tokenizer())
    images, captions = scenes.pictures(IMAGES, seed + 20)
    clips, clip_captions = scenes.clips(CLIPS, seed + 21)
    if not path.exists():
        encoded = {"pictures": encode(vae, images[:, None]), "clips": encode(vae, clips)}
        save_file(encoded, path)
    tensors = load_file(path)
    mean = tensors["pictures"].mean(dim=(0, 2, 3, 4), keepdim=True)
    std = tensors["pictures"].std(dim=(0, 2, 3, 4), keepdim=True)
    vae.register_to_config(latents_mean=mean.flatten().tolist(), latents_std=std.flatten().tolist())
    return Latents(
        pictures=(tensors["pictures"] - mean) / std,
        picture_rows=table.rows(captions),
        clips=(tensors["clips"] - mean) / std,
        clip_rows=table.rows(clip_captions),
    )


def train_denoiser(
    path: Path, latents: Latents, budget_s: float, seed: int, watch: Callable[[Progress, Denoiser], None]
) -> Denoiser:
    """Train for `budget_s` seconds of stepping and return the averaged weights; resumes from `path`.

    The transformer's step is compiled (a fifth faster on one core), which needs a C++ compiler.
    """
    torch.manual_seed(seed)
    model = Denoiser()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    model.transformer.compile(dynamic=False)
    table = CaptionTable(make_tokenizer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    progress = Progress(budget_s)

    def step(index: int) -> None:
        rng = np.random.default_rng((seed, 30, index))
        optimizer.param_groups[0]["lr"] = progress.rate(PEAK_RATE)
        loss = _loss(model, latents, table, rng, clips=index % CLIPS_EVERY == CLIPS_EVERY - 1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        _follow(average, model, min(EMA_DECAY, (1 + index) / (10 + index)))
        if index % 100 == 0:
            log.info("denoiser step %d, %.0f s, loss %.4f", index, progress.spent_s, loss.item())

    modules = {"model": model, "average": average}
    train(Run(path, modules, optimizer), progress, step, lambda now: watch(now, average))
    return average


def _loss(
    model: Denoiser, latents: Latents, table: CaptionTable, rng: np.random.Generator, clips: bool
) -> torch.Tensor:
    """Mean squared error of the velocity on one random batch."""
    source, source_rows = latents.pictures, latents.picture_rows
    if clips:
        source, source_rows = latents.clips, latents.clip_rows
    which = rng.integers(len(source), size=CLIPS_IN_BATCH if clips else BATCH)
    clean = source[which]
    rows = table.vary(source_rows[which], rng, REWORDED, DROPPED)
    noise = torch.from_numpy(rng.standard_normal(clean.shape, dtype=np.float32))
    sigma = _sigmas(rng, len(which))
    share = sigma.view(-1, 1, 1, 1, 1)
    velocity = model(table.tokens[rows], table.mask[rows], (1 - share) * clean + share * noise, sigma)
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
