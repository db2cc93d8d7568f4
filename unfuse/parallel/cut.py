"""Where a model may be cut to be spread over ranks, as data: a family says it of each of its transformers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from torch.nn import Module


class Along(msgspec.Struct, frozen=True):
    """A tensor with tokens along the dimension `axis`: those of these segments, one behind the other.

    With `dims`, only a tensor of so many dimensions has them; another one is for all tokens.
    """

    axis: int
    segments: tuple[str, ...]
    dims: int = 0


class Cut(msgspec.Struct, frozen=True):
    """Where a transformer may be cut.

    `blocks` are its lists of blocks, in the order in which they run, and `attention` the module of a block in which
    every token sees the others, whose `order` is that of these segments. Tokens enter in those arguments of the first
    block that are named in `enter`, one segment each; `follow` names what all blocks are given that lies along tokens,
    a rule an element where it is a tuple. They leave in what the last block returns, of which `leave` has a rule an
    element; one without segments is not read any more. `gives` names the arguments of a block in the place of which it
    gives others, in their order; what a block is not given, it does not give.
    """

    blocks: tuple[str, ...]
    attention: str
    order: tuple[str, ...]
    enter: Mapping[str, Along]
    leave: tuple[Along, ...]
    follow: Mapping[str, tuple[Along, ...]] = {}
    gives: tuple[str, ...] = ("hidden_states",)

    def blocks_of(self, model: Module) -> list[Module]:
        """The blocks of such a transformer, in the order in which they run."""
        return [block for name in self.blocks for block in model.get_submodule(name).children()]
