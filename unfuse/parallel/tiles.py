"""VAE tiling over ranks, each of which decodes or encodes some tiles.

All ranks blend all tiles.

A VAE's own code cuts a grid or a picture into tiles, decodes or encodes each, and blends them at the borders. It runs
twice here. First its decoder only records its calls and computes nothing. Then each rank computes its share of these
calls, all ranks exchange their results, and the VAE runs again with a decoder that returns the recorded results.
Encoding works alike. The result is the same as on one rank that works in tiles, bit for bit. The result of a tile
leaves its rank once for each other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from unfuse.parallel.group import Axis


def parallelize_tiles(vae: Any, axis: Axis) -> None:
    """Make these ranks share the tiles that a VAE decodes and encodes.

    The VAE must have tiling enabled. It is changed in place.
    """
    vae.decode = Tiles(vae.decode, vae.decoder, axis)
    vae.encode = Tiles(vae.encode, vae.encoder, axis, getattr(vae.quant_conv, "in_channels", 1))


class TileCall(NamedTuple):
    """The arguments of one call of a decoder or encoder.

    Calls with the same `feat_cache` (the VAE's memory of earlier frames) belong to one tile.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tile(self) -> int:
        """The identity of the tile."""
        return id(self.kwargs.get("feat_cache", self.args))

    @property
    def tensor(self) -> Tensor:
        """The tensor to decode or encode."""
        tensor: Tensor = self.args[0]
        return tensor


class Tiles:
    """A VAE's `decode` or `encode`, with its tiles shared by the ranks of an axis.

    `work`: the VAE's original method.
    `part`: the decoder or encoder module that it calls for each tile.
    `channels`: how many channels of that module's result the rest of `work` may slice.
    """

    def __init__(self, work: Callable[..., Any], part: Module, axis: Axis, channels: int = 1) -> None:
        self._work = work
        self._part = part
        self._axis = axis
        self._channels = channels

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `work` returns on one rank."""
        calls = list[TileCall]()

        with self._replaced_forward(lambda *args, **kwargs: self._record(calls, TileCall(args, kwargs))):
            self._work(*args, **kwargs)

        first_tensor = calls[0].tensor
        owners = assign_calls(calls, self._axis.size)
        own_results = list[Tensor]()
        for owner in owners:
            # Popped, so that a tile's `feat_cache` is freed after the last call of the tile.
            call = calls.pop(0)
            if owner == self._axis.rank:
                own_results.append(self._part(*call.args, **call.kwargs))

        results = _exchange(self._axis, own_results, owners, first_tensor)

        with self._replaced_forward(lambda *args, **kwargs: next(results)):
            return self._work(*args, **kwargs)

    @contextmanager
    def _replaced_forward(self, forward: Callable[..., Tensor]) -> Iterator[None]:
        """Replace the module's forward within the block."""
        original_forward = self._part.forward
        self._part.forward = forward
        try:
            yield
        finally:
            self._part.forward = original_forward

    def _record(self, calls: list[TileCall], call: TileCall) -> Tensor:
        """Record a call. Returns an empty tensor, (0, channels, 1, …).

        The batch size is 0, so that the VAE can still concatenate and blend it.
        """
        calls.append(call)
        return call.tensor.new_empty(0, self._channels, *[1] * (call.tensor.dim() - 2))


def assign_calls(calls: Sequence[TileCall], ranks: int) -> list[int]:
    """Return the rank that computes each call.

    The largest tiles are assigned first, each to the rank with the least work.
    """
    sizes = dict[int, int]()
    for call in calls:
        sizes[call.tile] = sizes.get(call.tile, 0) + call.tensor.numel()

    loads, owners = [0] * ranks, dict[int, int]()
    for tile in sorted(sizes, key=lambda tile: -sizes[tile]):
        owners[tile] = loads.index(min(loads))

        loads[owners[tile]] += sizes[tile]

    return [owners[call.tile] for call in calls]


def _exchange(axis: Axis, own_results: list[Tensor], owners: Sequence[int], like: Tensor) -> Iterator[Tensor]:
    """Return the results of all ranks, in the order of the calls.

    Shapes may differ. Each rank sends its results in one flat row.

    `own_results`: the results of this rank, in order; emptied.
    `owners`: the rank of each call.
    `like`: a tensor with the dtype, the device and the number of dimensions of the results.
    """
    unsent_results, rank = iter(own_results), axis.rank
    own_shapes = torch.tensor([next(unsent_results).shape if owner == rank else [0] * like.dim() for owner in owners])

    shapes = axis.gather(own_shapes.to(like.device)).sum(0).tolist()
    sizes = [
        [prod(shape) for shape, owner in zip(shapes, owners, strict=True) if owner == of_rank]
        for of_rank in range(axis.size)
    ]

    buffer = like.new_empty(max(map(sum, sizes)))
    for slot, result in zip(torch.split(buffer[: sum(sizes[rank])], sizes[rank]), own_results, strict=True):
        slot.copy_(result.flatten())

    own_results.clear()
    results_by_rank = [
        iter(torch.split(buffer[: sum(rank_sizes)], rank_sizes))
        for buffer, rank_sizes in zip(axis.gather(buffer), sizes, strict=True)
    ]
    return (next(results_by_rank[owner]).view(shape) for owner, shape in zip(owners, shapes, strict=True))
