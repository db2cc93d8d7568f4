"""Previews: what a request is becoming, as a small picture, while it is still being denoised."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import interpolate

from unfuse.core.plan import Params
from unfuse.stages.base import Media
from unfuse.stages.media import encode
from unfuse.stages.vae_decode import VaeDecoder, to_pixels

CELLS = 32  # longest side that is decoded, in latent cells: 256 pixels of a VAE that makes eight of a cell

FORMAT: Params = {"output_format": "jpeg", "output_compression": 80}


class Preview:
    """Decodes one frame of a shrunk grid. `load` brings the VAE; it is called when the first preview is asked for."""

    def __init__(self, load: Callable[[], VaeDecoder]) -> None:
        self._load = load
        self._decoder: VaeDecoder | None = None

    def picture(self, latents: Tensor, params: Params) -> Media:
        """A JPEG of a request's latents."""
        self._decoder = self._decoder or self._load()
        grid = self._decoder.unpack(latents, params)[:, :, :1]
        height, width = grid.shape[-2:]
        shrink = CELLS / max(height, width)
        if shrink < 1:
            size = (1, max(1, round(height * shrink)), max(1, round(width * shrink)))
            grid = interpolate(grid, size, mode="area")
        (media,) = encode(to_pixels(self._decoder.decode(grid)[0])[:1], FORMAT)
        return media
