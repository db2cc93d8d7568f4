"""A VAE spread over ranks by tiles: each decodes, or encodes, some of them, and all of them blend what all have made.

A VAE's own code cuts a grid or a picture into tiles, has each decoded or encoded, and blends them where they meet. It
runs twice here. First its decoder only notes what it is given, and makes nothing of it; then each rank decodes its
share of that, all exchange what they made, and the decoder plays this back. So does its encoder. So all is as on one
rank that works in tiles, bit for bit. What a tile becomes leaves the rank that made it once for each other rank.
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


def spread(vae: Any, axis: Axis) -> None:
    """Have these ranks share the tiles of what a VAE decodes and encodes, which has to work in tiles."""
    vae.decode = Tiles(vae.decode, vae.decoder, axis)
    vae.encode = Tiles(vae.encode, vae.encoder, axis, getattr(vae.quant_conv, "in_channels", 1))


class TileCall(NamedTuple):
    """What a decoder or encoder is given. Those with one `feat_cache`, its memory of frames, are of one tile."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tile(self) -> int:
        """What tells the calls of one tile from others."""
        return id(self.kwargs.get("feat_cache", self.args))

    @property
    def given(self) -> Tensor:
        """What is decoded or encoded."""
        given: Tensor = self.args[0]
        return given


class Tiles:
    """`work` of a VAE, which is to decode or to encode by that `part` of it, and whose tiles these ranks share.

    What follows the part in `work` may read so many `channels` of what it makes.
    """

    def __init__(self, work: Callable[..., Any], part: Module, axis: Axis, channels: int = 1) -> None:
        self._work, self._part, self._axis, self._channels = work, part, axis, channels

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `work` makes of this on one rank."""
        calls = list[TileCall]()
        with self._doing(lambda *given, **how: self._noted(calls, TileCall(given, how))):
            self._work(*args, **kwargs)
        like, owners, own = calls[0].given, shares(calls, self._axis.size), list[Tensor]()
        for owner in owners:
            call = calls.pop(0)  # so that what layers remember goes with the last call of a tile
            if owner == self._axis.rank:
                own.append(self._part(*call.args, **call.kwargs))
        made = _exchanged(self._axis, own, owners, like)
        with self._doing(lambda *given, **how: next(made)):
            return self._work(*args, **kwargs)

    @contextmanager
    def _doing(self, forward: Callable[..., Tensor]) -> Iterator[None]:
        """Meanwhile the part does that."""
        own, self._part.forward = self._part.forward, forward
        try:
            yield
        finally:
            self._part.forward = own

    def _noted(self, calls: list[TileCall], call: TileCall) -> Tensor:
        """What is made of no request, and can be joined and blended with its like."""
        calls.append(call)
        return call.given.new_empty(0, self._channels, *[1] * (call.given.dim() - 2))


def shares(calls: Sequence[TileCall], ranks: int) -> list[int]:
    """The rank that makes each call. Tiles go to whoever has least to do, the largest first."""
    sizes = dict[int, int]()
    for call in calls:
        sizes[call.tile] = sizes.get(call.tile, 0) + call.given.numel()
    loads, owners = [0] * ranks, dict[int, int]()
    for tile in sorted(sizes, key=lambda tile: -sizes[tile]):
        owners[tile] = loads.index(min(loads))
        loads[owners[tile]] += sizes[tile]
    return [owners[call.tile] for call in calls]


def _exchanged(axis: Axis, own: list[Tensor], owners: Sequence[int], like: Tensor) -> Iterator[Tensor]:
    """What all ranks made, in the order of calls: tensors of any shapes, behind each other in a row of each rank."""
    mine, rank = iter(own), axis.rank
    table = torch.tensor([next(mine).shape if owner == rank else [0] * like.dim() for owner in owners])
    shapes = axis.gather(table.to(like.device)).sum(0).tolist()
    sizes = [[prod(s) for s, owner in zip(shapes, owners, strict=True) if owner == each] for each in range(axis.size)]
    row = like.new_empty(max(map(sum, sizes)))
    for place, made in zip(torch.split(row[: sum(sizes[rank])], sizes[rank]), own, strict=True):
        place.copy_(made.flatten())
    own.clear()
    pieces = [iter(torch.split(row[: sum(of)], of)) for row, of in zip(axis.gather(row), sizes, strict=True)]
    return (next(pieces[owner]).view(shape) for owner, shape in zip(owners, shapes, strict=True))
