"""Where a model may be cut to be spread over ranks, as data: a family says it of each of its transformers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import gcd
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from torch.nn import Module


EXPERTS = {"gate_up_proj": (1, 2), "down_proj": (2, 1)}
"""What the experts of a model have in a parameter each, number of the expert first: along which dimension their width
is, and how many things lie side by side there.
"""


class SequenceDim(msgspec.Struct, frozen=True):
    """A tensor with tokens along the dimension `axis`: those of these segments, one behind the other.

    With `dims`, only a tensor of so many dimensions has them; another one is for all tokens.
    """

    axis: int
    segments: tuple[str, ...]
    dims: int = 0


class TensorParallelLayers(msgspec.Struct, frozen=True):
    """Of which weights of a model each rank keeps a share. Layers are named by patterns, as `fnmatch` has them.

    A rank has some `outputs` of a layer, and what follows works on so much less: on some heads, on a part of the width.
    Of the layer behind, it has the columns for these `inputs`, and what ranks make of them is summed. Of `gathered`
    layers it has some outputs too, which are put together at once. Where several things lie side by side along what is
    cut, `packed` says how many of them are as wide as the other side, and into how many equal ones the rest falls. Of
    modules that are `experts` a rank has a part of the width of each expert, as of a feed-forward; files may have each
    expert by itself, under its number, or what gates them apart. `norms` are over all heads, `heads` the numbers of
    heads that modules hold (MODULE.NAME). Files have some `gathered` layers under the names `stored`. Degrees must
    divide what the entries `divided` of the model's configuration say.
    """

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    divided: tuple[str, ...]
    gathered: tuple[str, ...] = ()
    packed: Mapping[str, tuple[int, int]] = {}
    norms: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()

    def shared(self, tensors: Mapping[str, int]) -> int:
        """How many elements ranks have a share of, by those of all tensors in a model's files: all but these a rank
        has whole, at most, since of a bias that is added to a sum only the first has any.
        """
        whole = (*self.outputs, *self.gathered, *self.stored)
        each = tuple(f"{pattern}.*" for pattern in self.experts)
        ways = {"weight": (*whole, *self.inputs, *self.norms, *each), "bias": whole}
        ways |= dict.fromkeys((*EXPERTS, "gate_proj", "up_proj"), self.experts)
        named = ((*name.rpartition("."), elements) for name, elements in tensors.items())
        return sum(n for layer, _, kind, n in named if any(fnmatchcase(layer, way) for way in ways.get(kind, ())))

    def common(self, config: Mapping[str, Any]) -> int:
        """What degrees must divide, by a model's configuration: that of the language, where it has several.

        An entry that is null is as another one says; where one is missing no degree will do.
        """
        own = config.get("text_config", config)
        return gcd(*(int(own.get(entry, 1) or 0) for entry in self.divided))


class ParallelPlan(msgspec.Struct, frozen=True):
    """Where a transformer may be cut.

    `blocks` are its lists of blocks, in the order in which they run, and `attention` the module of a block in which
    every token sees the others, whose `order` is that of these segments. Tokens enter in those arguments of the first
    block that are named in `enter`, one segment each; `follow` names what all blocks are given that lies along tokens,
    a rule an element where it is a tuple. They leave in what the last block returns, of which `leave` has a rule an
    element; one without segments is not read any more. `gives` names the arguments of a block in the place of which it
    gives others, in their order; what a block is not given, it does not give. Its weights are cut as `matrices` says.
    """

    blocks: tuple[str, ...]
    attention: str
    order: tuple[str, ...]
    enter: Mapping[str, SequenceDim]
    leave: tuple[SequenceDim, ...]
    matrices: TensorParallelLayers
    follow: Mapping[str, tuple[SequenceDim, ...]] = {}
    gives: tuple[str, ...] = ("hidden_states",)

    def blocks_of(self, model: Module) -> list[Module]:
        """The blocks of such a transformer, in the order in which they run."""
        return [block for name in self.blocks for block in model.get_submodule(name).children()]
