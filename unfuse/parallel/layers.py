"""Blocks spread over ranks: each holds a range of them, and all get what a range gives from the rank that has it.

What lies around the blocks is on every rank, and computed there. One rank computes at a time, and the others wait: this
is for models that one device does not hold, and needs least of what connects devices.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from unfuse.parallel.cut import Cut
from unfuse.parallel.group import Axis


def spread(model: Module, cut: Cut, axis: Axis) -> None:
    """Spread a transformer's blocks over these ranks; those of others lose their weights."""
    blocks = cut.blocks_of(model)
    holders = held_by([sum(tensor.nbytes for tensor in block.parameters()) for block in blocks], axis.size)
    for block, holder, behind in zip(blocks, holders, [*holders[1:], axis.size], strict=True):
        if holder != axis.rank:
            _empty(block, cut.gives)
        if holder != behind:
            block.register_forward_hook(functools.partial(_hand_out, axis, holder))


def held_by(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that holds each block, so that each has about as many bytes, in a row, and one block at least."""
    holders, whole, before = [0], sum(sizes), sizes[0]
    for number, size in enumerate(sizes[1:], 1):
        even = int(ranks * (before + size / 2) / whole)
        holders.append(max(ranks - len(sizes) + number, min(holders[-1] + 1, even)))
        before += size
    return holders


def _empty(block: Module, gives: Sequence[str]) -> None:
    """Take the weights of a block, and have it give what it is given."""
    inner, signature = block.forward, inspect.signature(block.forward)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        passed = tuple(given[name] for name in gives if given.get(name) is not None)
        return passed if len(passed) > 1 else passed[0]

    block.to("meta")
    block.forward = forward


def _hand_out(axis: Axis, holder: int, block: Module, args: Any, made: Any) -> Any:
    """What the rank that holds a block has made of it."""
    if isinstance(made, Tensor):
        return axis.hand_out(made, holder)
    return tuple(axis.hand_out(part, holder) for part in made)
