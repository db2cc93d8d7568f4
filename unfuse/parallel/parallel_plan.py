"""Parallel plans: how a transformer is sharded over ranks, as data.

Each model family declares a plan for each of its transformers. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import gcd
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from torch.nn import Module


#: The parameters with all experts of a layer: (dimension of the experts' width, matrices side by side along it). Their
#: first dimension is the expert.
EXPERTS = {"gate_up_proj": (1, 2), "down_proj": (2, 1)}


class SequenceDim(msgspec.Struct, frozen=True):
    """Which dimension of a tensor has the tokens, and of which segments (sequence parallel)."""

    #: The dimension of the tokens.
    axis: int
    #: The segments of tokens, such as text and picture, in their order along that dimension.
    segments: tuple[str, ...]
    #: If not 0, only a tensor with this number of dimensions has the tokens. Any other tensor is whole on all ranks.
    dims: int = 0


class TensorParallelLayers(msgspec.Struct, frozen=True):
    """The layers whose weights are sharded for tensor parallelism.

    Layers and modules are named by `fnmatch` patterns. A rank computes some outputs of a layer: some heads, or a part
    of the feed-forward width. It holds the matching input columns of the next layer, and the partial results are summed
    over ranks.
    """

    #: Layers of which each rank holds some outputs (column parallel).
    outputs: tuple[str, ...]
    #: Layers of which each rank holds the columns for its inputs (row parallel). Their results are summed over ranks.
    inputs: tuple[str, ...]
    #: Entries of the model's configuration that the degree must divide.
    divided: tuple[str, ...]
    #: Layers of which each rank holds some outputs, which are gathered at once.
    gathered: tuple[str, ...] = ()
    #: Layers with several matrices side by side along the sharded dimension, by pattern: (how many are as wide as the
    #: other side of the weight, into how many equal matrices the rest is split).
    packed: Mapping[str, tuple[int, int]] = {}
    #: Norms over all heads: each rank has the weights of its own heads.
    norms: tuple[str, ...] = ()
    #: Attributes (MODULE.NAME) that hold a number of heads, which is divided by the degree.
    heads: tuple[str, ...] = ()
    #: Names under which files store some of the `gathered` layers.
    stored: tuple[str, ...] = ()
    #: Modules that hold experts: each rank has a part of the width of every expert, as in a feed-forward. Files may
    #: store each expert by itself, under its number, or the gate projection apart.
    experts: tuple[str, ...] = ()

    def sharded_elements(self, tensors: Mapping[str, int]) -> int:
        """Return how many elements of a model's files are in sharded tensors.

        All other tensors count as whole on every rank, which is an upper bound: a bias that is added to a sum is on the
        first rank only.

        `tensors`: elements of each tensor by name.
        """
        column_parallel = (*self.outputs, *self.gathered, *self.stored)
        expert_layers = tuple(f"{pattern}.*" for pattern in self.experts)
        patterns_by_parameter = {
            "weight": (*column_parallel, *self.inputs, *self.norms, *expert_layers),
            "bias": column_parallel,
        }
        patterns_by_parameter |= dict.fromkeys((*EXPERTS, "gate_proj", "up_proj"), self.experts)
        split_names = ((*name.rpartition("."), elements) for name, elements in tensors.items())
        return sum(
            count
            for layer, _, parameter, count in split_names
            if any(fnmatchcase(layer, pattern) for pattern in patterns_by_parameter.get(parameter, ()))
        )

    def common(self, config: Mapping[str, Any]) -> int:
        """Return the number (a greatest common divisor) that tensor parallel degrees must divide.

        `config`: the model's configuration; its text part is used if it has several. An entry that is null counts as
        equal to the others. A missing entry gives 1, so that no degree fits.
        """
        text_config = config.get("text_config", config)
        return gcd(*(int(text_config.get(entry, 1) or 0) for entry in self.divided))


class ParallelPlan(msgspec.Struct, frozen=True):
    """The parallel plan of a transformer: what each kind of parallelism shards."""

    #: The lists of blocks (submodule names), in the order in which they run.
    blocks: tuple[str, ...]
    #: The submodule of a block in which all tokens attend to each other.
    attention: str
    #: The order of the segments in that attention.
    order: tuple[str, ...]
    #: Arguments of the first block with the tokens, one segment each.
    block_inputs: Mapping[str, SequenceDim]
    #: One rule for each element that the last block returns. An element without segments is not read any more.
    block_outputs: tuple[SequenceDim, ...]
    #: The layers that tensor parallelism shards.
    matrices: TensorParallelLayers
    #: Further arguments of every block with a dimension of tokens, by name: one rule for each element of a tuple.
    follow: Mapping[str, tuple[SequenceDim, ...]] = {}
    #: The arguments whose new values a block returns, in order. A block returns no value for an argument that it lacks.
    updated_inputs: tuple[str, ...] = ("hidden_states",)

    def blocks_of(self, model: Module) -> list[Module]:
        """Return the blocks of a transformer of this plan, in execution order."""
        return [block for name in self.blocks for block in model.get_submodule(name).children()]
