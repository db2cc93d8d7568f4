"""What families share whose transformer sees latents packed: (rows, patches, channels of a patch), pictures only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from typing_extensions import override

from unfuse.core.media import Limits
from unfuse.core.plan import Params
from unfuse.models.base import Loader
from unfuse.models.flow_matching import PATCH, FlowDenoiser, Packing
from unfuse.models.redraw import Redrawing
from unfuse.stages.base import need
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DEFAULT_CELLS = 128  # the pipelines' default size, in latents


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

    noise_scheduler = FlowDenoiser.shifted


class PackedFamily(Redrawing):
    """Pictures of any size that patches fill. There is no negative prompt unless one is given, not even an empty one"""

    packing: Callable[[ModelFolder], Packing]
    packs = True

    @override
    def standard(self, folder: ModelFolder) -> Params:
        side = DEFAULT_CELLS * self.packing(folder).scale
        return {"width": side, "height": side, "num_frames": 1, "negative_prompt": None}

    @override
    def limits(self, folder: ModelFolder, defaults: Params) -> Limits:
        multiple, length = self.packing(folder).scale * PATCH, need(defaults, "max_sequence_length", int)
        return Limits(size_multiple=multiple, min_size=multiple, frame_multiple=1, max_sequence_length=length)
