"""VAE decoding: latents become pixels, and pixels an encoded file. Pixels never leave this stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages.base import Stage, StageInput, StageOutput, need, need_tensor
from unfuse.stages.media import encode, need_format


class VaeDecoder(Protocol):
    """What a family says about decoding: a VAE in memory."""

    @property
    def latents(self) -> tuple[int | None, ...]:
        """Shape of the latents a request brings, with a batch axis of 1; None is any length."""
        ...

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        """A request's latents as a grid (1, channels, frames, height, width), on the VAE's device and in its dtype."""
        ...

    def decode(self, grid: Tensor) -> Tensor:
        """Pixels (requests, 3, frames, height, width), −1 to 1, for a grid of one or more requests."""
        ...


class VaeDecode(Stage):
    """`latents` in, media out, in the request's `output_format`: one video, or one picture a frame."""

    kind = "vae_decode"

    def __init__(self, decoder: VaeDecoder) -> None:
        self._decoder = decoder

    def verify(self, task: StageInput) -> None:
        """Raise PermanentError unless latents of the right shape and a known format are there."""
        need_tensor(task, "latents", self._decoder.latents)
        need_format(need(task.params, "output_format", str))

    @torch.no_grad()
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        """Decode all at once, and encode each."""
        grids = [self._decoder.unpack(_latents(task), task.params) for task in batch]
        pixels = self._decoder.decode(torch.cat(grids))
        return [
            StageOutput(media=encode(to_pixels(video), task.params)) for video, task in zip(pixels, batch, strict=True)
        ]


def _latents(task: StageInput) -> Tensor:
    latents = task.tensors["latents"]
    if latents is None:
        raise PermanentError("input latents is missing")
    return latents


def to_pixels(video: Tensor) -> NDArray[np.uint8]:
    """Frames (frames, height, width, 3) as uint8 of pixels (3, frames, height, width), −1 to 1.

    The arithmetic is diffusers' `VideoProcessor.postprocess_video` and `numpy_to_pil`: halves round to even.
    Raises PermanentError for values that are not finite.
    """
    unit = (video.permute(1, 0, 2, 3) * 0.5 + 0.5).clamp(0, 1)
    frames: NDArray[np.float32] = unit.cpu().permute(0, 2, 3, 1).float().numpy()
    if not np.isfinite(frames).all():
        raise PermanentError("the decoder made pixels that are not finite: serve the model's decoder in float32")
    return (frames * 255).round().astype(np.uint8)
