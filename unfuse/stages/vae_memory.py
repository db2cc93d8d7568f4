"""How a VAE decodes or encodes with less memory: sliced, then in ever smaller tiles.

Slices are the rows of a batch, computed one by one; they keep the bytes. Tiles overlap and are blended, which changes
pixels. Both are diffusers' own: its attributes are set on the VAE for one decode or encode, and restored after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import OutOfMemory
from unfuse.parallel.accelerator import Accelerator

#: The shape of one request's latents. It ends in height and width.
Size = tuple[int, ...]

#: The smallest side of a tile, in latents. Smaller tiles would consist of their borders.
SMALLEST = 8

#: The tile of a VAE whose tiles have one size only.
ONLY_SIZE = -1

#: A size is decoded whole again once the device has this many times the memory that was too little.
MORE_FREE = 1.25

#: Most sizes whose modes are remembered.
MAX_SIZES = 256

#: What diffusers reads when it decodes or encodes.
ATTRIBUTES = (
    "use_slicing",
    "use_tiling",
    "tile_sample_min_size",
    "tile_latent_min_size",
    "tile_sample_min_height",
    "tile_sample_min_width",
    "tile_sample_stride_height",
    "tile_sample_stride_width",
)

#: Why a decode or an encode is not repeated in tiles.
REFUSAL = "tiles of the VAE might fit, but tiles change pixels, and --exact-only forbids that"


class DecodeMode(NamedTuple):
    """How a VAE decodes or encodes one size. By default, as `--vae` has it."""

    #: Whether the rows of a batch are computed one by one.
    sliced: bool = False
    #: Side of a tile in latents; 0: as configured, ONLY_SIZE: the VAE's own.
    tile: int = 0

    @property
    def vae(self) -> Literal["", "tiled"]:
        """What the request's stage reports: "tiled" if memory was too small for the configured mode."""
        return "tiled" if self.tile else ""


AS_CONFIGURED = DecodeMode()


class VaeModes:
    """The modes that need less memory, by size, in which one VAE decodes, or encodes.

    `vae`: the VAE of diffusers; None for one without such modes.
    `exact_only`: whether modes that change bytes are refused.
    `free`: returns the bytes that this process can use on the device; None: unknown, a mode is remembered for good.
    """

    def __init__(self, vae: Any, exact_only: bool = False, free: Callable[[], int] | None = None) -> None:
        self._vae = vae
        self._exact_only = exact_only
        self._free = free
        self._modes = dict[Size, tuple[DecodeMode, int]]()

    @classmethod
    def create(cls, vae: Any, options: ComputeOptions | None, device: torch.device | None) -> VaeModes:
        """Return the modes for these options.

        `device`: None if ranks must agree, whose devices may differ.
        """
        on_gpu = device is not None and device.type != "cpu"
        exact_only = options is not None and options.exact_only
        return cls(vae, exact_only, Accelerator(str(device)).free_bytes if on_gpu else None)

    def latents(self, height: int, width: int) -> Size:
        """Return the size of the latents of a picture with these sides, in pixels."""
        scale = self._scale() if self._vae is not None and hasattr(self._vae, "use_tiling") else 0
        return height // (scale or 1), width // (scale or 1)

    def mode(self, size: Size) -> DecodeMode:
        """Return the mode with which this size is computed next."""
        mode, free_then = self._modes.get(size, (AS_CONFIGURED, 0))
        if mode != AS_CONFIGURED and self._free is not None and self._free() > MORE_FREE * free_then:
            del self._modes[size]
            return AS_CONFIGURED
        return mode

    def reduce(self, size: Size, mode: DecodeMode, rows: int = 1) -> DecodeMode | None:
        """Return the next mode after this one, which needs less memory.

        Later ones of the size start in it. None if there is none. `rows`: the rows of the batch. Raises
        OutOfMemory if the mode would change bytes and that is refused.
        """
        if self._vae is None or not hasattr(self._vae, "use_tiling"):
            return None
        slices = [DecodeMode(True)] if rows > 1 and not self._vae.use_slicing else []
        modes = [AS_CONFIGURED, *slices, *(DecodeMode(True, tile) for tile in self._tiles(max(size[-2:])))]
        smaller = modes[modes.index(mode) + 1 :] if mode in modes else []
        if not smaller:
            return None
        if smaller[0].tile and self._exact_only:
            raise OutOfMemory(REFUSAL)
        self._modes.pop(size, None)
        self._modes[size] = smaller[0], self._free() if self._free is not None else 0
        if len(self._modes) > MAX_SIZES:
            del self._modes[next(iter(self._modes))]
        return smaller[0]

    @contextmanager
    def use(self, mode: DecodeMode) -> Iterator[None]:
        """Decode or encode in this mode within the block."""
        if mode == AS_CONFIGURED:
            yield
            return
        original = {name: getattr(self._vae, name) for name in ATTRIBUTES if hasattr(self._vae, name)}
        self._set(self._attributes(mode))
        try:
            yield
        finally:
            self._set(original)

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._vae, name, value)

    def _attributes(self, mode: DecodeMode) -> dict[str, Any]:
        """Return the values of ATTRIBUTES for a mode."""
        if not mode.tile:
            return {"use_slicing": True}
        values: dict[str, Any] = {"use_slicing": True, "use_tiling": True}
        scale, tile = self._scale(), mode.tile
        if tile == ONLY_SIZE:
            return values
        if hasattr(self._vae, "tile_latent_min_size"):
            return values | {"tile_sample_min_size": tile * scale, "tile_latent_min_size": tile}
        stride = tile - max(1, tile // 4)
        sides = dict.fromkeys(("tile_sample_min_height", "tile_sample_min_width"), tile * scale)
        return values | sides | dict.fromkeys(("tile_sample_stride_height", "tile_sample_stride_width"), stride * scale)

    def _tiles(self, longest: int) -> list[int]:
        """Return the sides of tiles that are smaller than the configured ones, in descending order.

        `longest`: the longer side of the latents.
        """
        scale = self._scale()
        if not scale:
            return [] if self._vae.use_tiling else [ONLY_SIZE]
        if hasattr(self._vae, "tile_latent_min_size"):
            tile = int(self._vae.tile_latent_min_size)
        else:
            tile = int(self._vae.tile_sample_min_height) // scale
        configured = tile if self._vae.use_tiling else longest
        tiles = list[int]()
        while tile > SMALLEST:
            tiles.append(tile)
            tile //= 2
        return [tile for tile in (*tiles, SMALLEST) if tile < min(longest, configured)]

    def _scale(self) -> int:
        """Return the pixels per latent along a side.

        0 if the VAE's tiles cannot be made smaller.
        """
        if hasattr(self._vae, "tile_latent_min_size"):
            side = self._vae.tile_sample_min_size
            pixels = side[0] if isinstance(side, list | tuple) else side
            return round(int(pixels) / int(self._vae.tile_latent_min_size))
        has_strides = hasattr(self._vae, "tile_sample_stride_height")
        return int(getattr(self._vae, "spatial_compression_ratio", 0)) if has_strides else 0


def most_frugal(modes: Iterator[DecodeMode]) -> DecodeMode:
    """Return the mode among these that needs the least memory."""
    return max(modes, key=lambda mode: (mode.tile != 0, -mode.tile, mode.sliced))
