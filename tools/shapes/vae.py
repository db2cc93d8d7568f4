"""The autoencoder of the built-in model: Wan's own class, small, 16x smaller in space and 4x in time.

Trained on 64 px crops, on whole pictures and on short clips of drawn scenes. A picture of one frame needs
only the last slice of each causal convolution's kernel (the other two meet zero padding), so training runs
those as 2-D convolutions, which is faster and gives the same numbers.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify

from tools.shapes import scenes
from tools.shapes.checkpoint import Progress, Run, finished, load, train
from tools.shapes.fast import half_precision

log = logging.getLogger(__name__)

PEAK_RATE = 1.2e-3
DECAY = 0.6  # share of the budget in which the rate falls
KL_WEIGHT = 1e-5
LATENT_NOISE = 0.1  # share of a channel's spread
Z = 16  # channels of the latents
CROP = 64  # pixels
IMAGES, CLIPS = 4000, 1500  # pictures of one shape (and twice as many of two), and clips; drawn once, kept in memory
IN_BATCH = {"crops": 32, "pictures": 8, "short crops of clips": 4, "crops of clips": 4, "clips": 1}
"""How many pictures or clips a batch of each kind has."""
SHORT = 5  # frames of short clips
MIX = {"crops": 12, "pictures": 4, "short crops of clips": 4, "crops of clips": 3, "clips": 1}
"""How often each kind of batch comes: pictures mostly, which make the first frames of clips."""
MIX_OF_DECODER = {"crops": 4, "pictures": 3, "short crops of clips": 4, "crops of clips": 11, "clips": 2}
"""Clips mostly: their later frames are what a decoder learns last."""


def make_vae() -> AutoencoderKLWan:
    """An untrained autoencoder. Its posterior starts narrow, so that it learns to use its latents at once."""
    vae = AutoencoderKLWan(
        base_dim=24,
        z_dim=Z,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        in_channels=48,
        out_channels=48,
        patch_size=4,
        latents_mean=[0.0] * Z,
        latents_std=[1.0] * Z,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
    )
    with torch.no_grad():
        vae.quant_conv.weight[Z:] *= 0.05
        vae.quant_conv.bias[Z:] = -5.0
    return vae


def train_vae(path: Path, budget_s: float, seed: int) -> AutoencoderKLWan:
    """Train for `budget_s` seconds of stepping, resuming from `path` when it exists."""
    torch.manual_seed(seed)
    vae = make_vae()
    _train(path, vae, Progress(budget_s, decay=DECAY), seed, MIX, noisy_from=0.5)
    return vae.eval()


def refine_decoder(path: Path, vae: AutoencoderKLWan, budget_s: float, seed: int) -> AutoencoderKLWan:
    """Train the decoder alone for `budget_s` seconds more, on noisy latents; those of the denoiser stay as they are."""
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)
    _train(path, vae, Progress(budget_s, decay=DECAY), seed + 5, MIX_OF_DECODER, noisy_from=0.0)
    return vae.eval()


def _train(
    path: Path, vae: AutoencoderKLWan, progress: Progress, seed: int, mix: dict[str, int], noisy_from: float
) -> None:
    """Train what is not frozen; from the share `noisy_from` of the budget on, latents are disturbed."""
    if finished(path, progress.budget_s):
        load(path, "vae", vae)
        return
    images = _pictures(IMAGES, seed)
    clips, _ = scenes.clips(CLIPS, seed + 1)
    held_out, held_clips = _pictures(20, seed + 2), scenes.clips(8, seed + 3)[0]
    learning = [parameter for parameter in vae.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.01)

    def step(index: int) -> None:
        rng = np.random.default_rng((seed, 10, index))
        torch.manual_seed(seed * 1_000_003 + index)
        progress.set_rates(optimizer)
        noise = LATENT_NOISE if progress.share > noisy_from else 0.0
        with half_precision():
            losses = _loss(vae, batch_of(rng, mix, images, clips), noise)
        optimizer.zero_grad()
        losses.sum().backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        if index % 100 == 0:
            spent = progress.spent_s
            log.info("vae step %d, %.0f s, l1 %.4f mse %.4f kl %.6f", index, spent, *losses.tolist())

    def watch(now: Progress) -> None:
        decibels = fidelity(vae, held_out[:, None]), fidelity(vae, held_clips)
        log.info("vae step %d, share %.2f: pictures %.1f dB, clips %.1f dB", now.step, now.share, *decibels)

    train(Run(path, {"vae": vae}, (optimizer,)), progress, step, watch)


def to_pixels(frames: np.ndarray) -> torch.Tensor:
    """(B, T, H, W, 3) uint8 to (B, 3, T, H, W) float in -1..1, as the pipelines' own pre-processing does."""
    return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


@contextmanager
def single_frames() -> Iterator[None]:
    """Run a causal convolution that sees one frame and no past as the 2-D convolution it then is."""
    original = WanCausalConv3d.forward

    def forward(conv: WanCausalConv3d, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        if cache_x is not None or x.shape[2] != 1 or conv.stride[0] != 1:
            return original(conv, x, cache_x)
        padding = (conv._padding[2], conv._padding[0])
        return F.conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, conv.stride[1:], padding).unsqueeze(2)

    WanCausalConv3d.forward = forward
    try:
        yield
    finally:
        WanCausalConv3d.forward = original


@torch.no_grad()
def encode(vae: AutoencoderKLWan, frames: np.ndarray, batch: int = 32) -> torch.Tensor:
    """Means of the latents of (B, T, H, W, 3) uint8 frames: (B, 16, 1 + (T - 1) / 4, H / 16, W / 16)."""
    with single_frames():
        parts = [vae.encode(to_pixels(frames[i : i + batch])) for i in range(0, len(frames), batch)]
    return torch.cat([part.latent_dist.mean for part in parts]).contiguous()


@torch.no_grad()
def fidelity(vae: AutoencoderKLWan, frames: np.ndarray) -> float:
    """Peak signal-to-noise ratio, in dB, of (B, T, H, W, 3) uint8 frames encoded and decoded."""
    rebuilt = vae.decode(encode(vae, frames)).sample
    error = ((rebuilt - to_pixels(frames)) / 2).square().mean()
    return float(-10 * torch.log10(error))


def _pictures(count: int, seed: int) -> np.ndarray:
    """`count` pictures of one shape and twice as many of two, (3 * count, H, W, 3) uint8."""
    kinds = {"single": count, "relation": 2 * count}
    return np.concatenate([scenes.pictures(kind, each, seed)[0] for kind, each in kinds.items()])


def batch_of(rng: np.random.Generator, mix: dict[str, int], images: np.ndarray, clips: np.ndarray) -> torch.Tensor:
    """One batch, of a kind drawn from `mix`."""
    weights = np.array([*mix.values()])
    kind = str(rng.choice([*mix], p=weights / weights.sum()))
    frames = clips if "clips" in kind else images[:, None]
    if "crops" in kind:
        frames = _crops(rng, frames, IN_BATCH[kind])
    else:
        frames = frames[rng.integers(len(frames), size=IN_BATCH[kind])]
    return to_pixels(frames[:, :SHORT] if "short" in kind else frames)


def _crops(rng: np.random.Generator, frames: np.ndarray, count: int) -> np.ndarray:
    """`count` CROP x CROP windows of (N, T, H, W, 3) frames, each the less plain one of two at random places."""
    which = rng.integers(len(frames), size=count)
    corners = rng.integers(0, frames.shape[2] - CROP + 1, size=(count, 2, 2))
    windows = [
        max((frames[i, :, y : y + CROP, x : x + CROP] for y, x in places), key=lambda window: window[:, ::4, ::4].std())
        for i, places in zip(which, corners, strict=True)
    ]
    return np.stack(windows)


def _loss(vae: AutoencoderKLWan, pixels: torch.Tensor, noise: float) -> torch.Tensor:
    """(L1, MSE, weighted KL) of one batch, with latents disturbed by `noise` of their spread per channel.

    Noise comes once pictures are good, and teaches the decoder to forgive small errors of the denoiser.
    Decodes by hand because `vae.decode` clamps to -1..1, and a clamped pixel has no gradient.
    """
    with single_frames():
        posterior = vae.encode(pixels).latent_dist
        latents = posterior.sample()
        spread = latents.detach().std(dim=(0, 2, 3, 4), keepdim=True)
        rebuilt = decode_unclamped(vae, latents + noise * spread * torch.randn_like(latents))
    error = rebuilt - pixels
    divergence = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
    return torch.stack([error.abs().mean(), error.square().mean(), KL_WEIGHT * divergence])


def decode_unclamped(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """(B, 16, T', H / 16, W / 16) latents to (B, 3, T, H, W) pixels; `vae.decode` without its clamp."""
    vae.clear_cache()
    x = vae.post_quant_conv(latents)
    frames = []
    for i in range(x.shape[2]):
        vae._conv_idx = [0]
        frames.append(
            vae.decoder(x[:, :, i : i + 1], feat_cache=vae._feat_map, feat_idx=vae._conv_idx, first_chunk=i == 0)
        )
    vae.clear_cache()
    return unpatchify(torch.cat(frames, 2), patch_size=vae.config.patch_size)
