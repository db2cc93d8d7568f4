"""VAE tiling over ranks: each rank computes some tiles, and all ranks blend them.

A VAE's own code cuts a grid or a picture into tiles, decodes or encodes each, and blends them at the borders. That code
runs twice here. The first time its decoder only records its calls. Then each rank computes its share of these calls,
and all ranks exchange the results. The second time the decoder returns these results. Encoding works alike. The result
is the same as on one rank with tiling, bit for bit. The result of a tile is sent to each other rank.
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

    Calls with the same `feat_cache` (the layers' cache of earlier frames) belong to one tile.
    """

    #: Positional arguments. The first one is the tensor to decode or encode.
    args: tuple[Any, ...]
    #: Keyword arguments, with `feat_cache` if the VAE's layers have one.
    kwargs: dict[str, Any]

    @property
    def tile(self) -> int:
        """The identity of the tile: of its `feat_cache`, or without one of this call."""
        return id(self.kwargs.get("feat_cache", self.args))

    @property
    def tensor(self) -> Tensor:
        """The latents or pixels of the call."""
        tensor: Tensor = self.args[0]
        return tensor


class Tiles:
    """A VAE's `decode` or `encode`, with its tiles shared by the ranks of an axis.

    `method`: the VAE's original method.
    `module`: the decoder or encoder that the method calls for each tile.
    `channels`: channels of the module's empty results while calls are recorded. The method may need the right number.
    """

    def __init__(self, method: Callable[..., Any], module: Module, axis: Axis, channels: int = 1) -> None:
        self._method = method
        self._module = module
        self._axis = axis
        self._channels = channels

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result that the method has on one rank."""
        calls = list[TileCall]()

        with self._replaced_forward(lambda *args, **kwargs: self._record(calls, TileCall(args, kwargs))):
            self._method(*args, **kwargs)

        first_tensor = calls[0].tensor
        owners = assign_calls(calls, self._axis.size)
        own_results = list[Tensor]()
        for owner in owners:
            # Popped, so that a tile's `feat_cache` is freed after the last call of the tile.
            call = calls.pop(0)
            if owner == self._axis.rank:
                own_results.append(self._module(*call.args, **call.kwargs))

        results = _exchange(self._axis, own_results, owners, first_tensor)

        with self._replaced_forward(lambda *args, **kwargs: next(results)):
            return self._method(*args, **kwargs)

    @contextmanager
    def _replaced_forward(self, forward: Callable[..., Tensor]) -> Iterator[None]:
        """Replace the module's forward within the block."""
        original_forward = self._module.forward
        self._module.forward = forward
        try:
            yield
        finally:
            self._module.forward = original_forward

    def _record(self, calls: list[TileCall], call: TileCall) -> Tensor:
        """Record a call. Returns an empty tensor, (0, channels, 1, …).

        The VAE can still concatenate and blend tensors with batch size 0, at no cost.
        """
        calls.append(call)
        return call.tensor.new_empty(0, self._channels, *[1] * (call.tensor.dim() - 2))


def assign_calls(calls: Sequence[TileCall], ranks: int) -> list[int]:
    """Return the rank that computes each call.

    All calls of a tile have the same rank. The largest tiles are assigned first, each to the rank with the least work.
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

    # Each shape is known to one rank, and 0 on the others.
    shapes = axis.gather(own_shapes.to(like.device)).sum(0).tolist()
    sizes = [
        [prod(shape) for shape, owner in zip(shapes, owners, strict=True) if owner == other_rank]
        for other_rank in range(axis.size)
    ]

    # As long as the longest row, because all ranks must send tensors of equal shape.
    buffer = like.new_empty(max(map(sum, sizes)))
    for slot, result in zip(torch.split(buffer[: sum(sizes[rank])], sizes[rank]), own_results, strict=True):
        slot.copy_(result.flatten())

    own_results.clear()
    results_by_rank = [
        iter(torch.split(row[: sum(rank_sizes)], rank_sizes))
        for row, rank_sizes in zip(axis.gather(buffer), sizes, strict=True)
    ]
    return (next(results_by_rank[owner]).view(shape) for owner, shape in zip(owners, shapes, strict=True))
