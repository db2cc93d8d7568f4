"""What families share whose transformer sees latents packed: (rows, patches, channels of a patch), pictures only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from unfuse.core.media import Limits
from unfuse.core.plan import Params
from unfuse.models.base import DiffusersFamily, Loader
from unfuse.models.flow_matching import FlowDenoiser, shift
from unfuse.models.folder import ModelFolder
from unfuse.stages.base import need

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from unfuse.stages.denoise import NoiseScheduler

PATCH = 2
"""Side of the square of latents that the transformer sees as one."""

DEFAULT_CELLS = 128
"""The pipelines' default size, in latents."""


@dataclass(frozen=True)
class Packing:
    """Channels of latents, and how many pixels one stands for along a side."""

    channels: int
    scale: int

    @classmethod
    def of(cls, folder: ModelFolder) -> Packing:
        """Read the VAE's configuration. Raises ConfigError."""
        vae = folder.config("vae")
        with folder.reading("vae"):
            if "z_dim" in vae:
                return Packing(int(vae["z_dim"]), 2 ** len(vae["temperal_downsample"]))
            return Packing(int(vae["latent_channels"]), 2 ** (len(vae["block_out_channels"]) - 1))

    def patches(self, params: Params) -> tuple[int, int]:
        """Rows and columns of patches."""
        side = self.scale * PATCH
        return need(params, "height", int) // side, need(params, "width", int) // side

    def pack(self, grid: Tensor) -> Tensor:
        """Latents (rows, channels, height, width) as patches."""
        count, channels, rows, columns = grid.shape
        tiled = grid.view(count, channels, rows // PATCH, PATCH, columns // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
        return tiled.flatten(3).flatten(1, 2)

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        """Patches put side by side, as a video of one frame."""
        rows, columns = self.patches(params)
        grid = latents.view(1, rows, columns, -1, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
        return grid.reshape(1, -1, 1, PATCH * rows, PATCH * columns)


class PackedDenoiser(FlowDenoiser):
    """A FlowDenoiser of packed latents; `predict` is for its family to say."""

    def __init__(self, loader: Loader, packing: Packing) -> None:
        super().__init__(loader, packing.patches)
        self._packing = packing

    def draw(self, params: Params, generator: torch.Generator) -> Tensor:
        """In the transformer's dtype, which in an undivided pipeline is the prompt embeddings' too."""
        import torch

        rows, columns = self._packing.patches(params)
        grid = (1, self._packing.channels, PATCH * rows, PATCH * columns)
        noise = torch.randn(grid, generator=generator, device=generator.device, dtype=self.dtype)
        return self._packing.pack(noise)

    def noise_scheduler(self, params: Params, latents: Tensor) -> NoiseScheduler:
        """The more patches, the longer it stays at high noise."""
        import numpy as np

        steps, mu = need(params, "num_inference_steps", int), shift(self._scheduler.config, latents.shape[1])
        return self._fresh(latents, sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)


class PackedFamily(DiffusersFamily):
    """Pictures of any size that patches fill. There is no negative prompt unless one is given, not even an empty one"""

    packing: Callable[[ModelFolder], Packing]

    @override
    def standard(self, folder: ModelFolder) -> Params:
        side = DEFAULT_CELLS * self.packing(folder).scale
        return {"width": side, "height": side, "num_frames": 1, "negative_prompt": None}

    @override
    def limits(self, folder: ModelFolder, defaults: Params) -> Limits:
        multiple, length = self.packing(folder).scale * PATCH, need(defaults, "max_sequence_length", int)
        return Limits(size_multiple=multiple, min_size=multiple, frame_multiple=1, max_sequence_length=length)
