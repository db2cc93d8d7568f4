"""Spreads a loaded model over the ranks of its stage: by tensor, by tokens (`sequence`), by layers, or weights alone.

Tensor: each rank has a share of the heads and of the feed-forward's width, in every layer, and their weights alone.
After Shoeybi et al., Megatron-LM, 2019. Tokens are whole on all ranks. What a pair of layers makes between them stays
on its rank; what the second one makes is summed over ranks, so that results differ from those of one rank by rounding.

Layers: each rank holds a range of the blocks, and all get what a range gives from the rank that has it. What lies
around the blocks is on every rank, and computed there. One rank computes at a time, and the others wait: this is for
models that one device does not hold, and needs least of what connects devices.

Shard: weights of which each rank keeps a share are spread by torch's FSDP2. Ranks gather a block's weights before it
runs, and let go of what is not theirs behind it, so that a rank holds its share, the rest of the model around the
blocks, and a block or two. What is computed is not spread.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import Linear, Module, Parameter

from unfuse.core.compute_options import SHARD
from unfuse.parallel.group import Axis, Mesh, give_back
from unfuse.parallel.parallel_plan import EXPERTS, ParallelPlan, TensorParallelLayers
from unfuse.parallel.sequence import RingAttention, share_tokens, ulysses


def spread(model: Module, cut: ParallelPlan | TensorParallelLayers, mesh: Mesh) -> None:
    """Have the model compute its part of each forward, by the kinds over which its stage is spread."""
    if "tensor" in mesh.degrees:
        share_matrices(model, cut if isinstance(cut, TensorParallelLayers) else cut.matrices, mesh.axis("tensor"))
    if isinstance(cut, ParallelPlan) and "layers" in mesh.degrees:
        share_layers(model, cut, mesh.axis("layers"))
    if isinstance(cut, ParallelPlan) and mesh.degrees.keys() & {"ring", "ulysses"}:
        ring, heads = mesh.axis("ring"), mesh.axis("ulysses")
        attend = RingAttention(ring, heads) if ring.size > 1 else ulysses
        share_tokens(model, cut, mesh.axis("ring", "ulysses"), attend)
    if isinstance(cut, ParallelPlan) and SHARD in mesh.degrees:
        share_weights(model, cut, mesh.axis(SHARD))
    give_back()


def share_weights(model: Module, cut: ParallelPlan, axis: Axis) -> None:
    """Spread a transformer's weights over these ranks; what this one keeps lies on its device."""
    model.requires_grad_(False)  # else all weights of a block would have to be of one dtype
    mesh = axis.mesh
    for part in (*cut.blocks_of(model), model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
        if axis.group.device.type == "cpu":
            part.register_forward_hook(lambda *_: give_back())
    model.register_forward_pre_hook(lambda *_: axis.group.meet(), prepend=True)


OUTPUTS, INPUTS = 0, 1  # where in the weight of a linear layer they are; an embedding has it the other way round


def share_matrices(model: Module, matrices: TensorParallelLayers, axis: Axis) -> None:
    """Keep this rank's share of the weights, and have the layers exchange what they make with it."""
    for name, module in [*model.named_modules()]:
        if _among(name, matrices.outputs):
            _keep(name, module, matrices, OUTPUTS, axis)
        elif _among(name, matrices.inputs):
            _keep(name, module, matrices, INPUTS, axis)
            module.register_forward_hook(lambda _module, _given, made: axis.sum(made))
        elif _among(name, matrices.gathered):
            _keep(name, module, matrices, OUTPUTS, axis)
            module.register_forward_hook(lambda _module, _given, made: axis.gather(made).movedim(0, -2).flatten(-2))
        elif _among(name, matrices.experts):
            for parameter, (along, parts) in EXPERTS.items():
                weight = getattr(module, parameter)
                _cut(weight, along, [weight.shape[along] // parts] * parts, axis)
            module.register_forward_hook(lambda _module, _given, made: axis.sum(made))
        elif _among(name, matrices.norms):
            module.forward = _Norm(module, axis)
        for pattern in matrices.heads:
            modules, _, number = pattern.rpartition(".")
            if fnmatchcase(name, modules):
                setattr(module, number, getattr(module, number) // axis.size)


def _among(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _keep(name: str, layer: Any, matrices: TensorParallelLayers, side: int, axis: Axis) -> None:
    """This rank's share of a layer's weights; of a bias that is added to a sum, the first rank has all."""
    weight = layer.weight
    along = side if isinstance(layer, Linear) else 1 - side
    found = (packed for pattern, packed in matrices.packed.items() if fnmatchcase(name, pattern))
    equal, rest = next(found, (0, 1))
    width = weight.shape[1 - along]
    lengths = [width] * equal + [(weight.shape[along] - equal * width) // rest] * rest
    _cut(weight, along, lengths, axis)
    bias = getattr(layer, "bias", None)
    if bias is not None and side == OUTPUTS:
        _cut(bias, 0, lengths, axis)
    elif bias is not None and axis.rank:
        layer.bias = None


def _cut(weight: Parameter, along: int, lengths: list[int], axis: Axis) -> None:
    """Of each of the parts that lie side by side, this rank's; in place, for all modules that have it."""
    parts = torch.split(weight.data, lengths, along)
    own = [torch.unflatten(part, along, (axis.size, -1)).select(along, axis.rank) for part in parts]
    weight.data = torch.cat(own, along)


class _Norm:
    """A root mean square norm over the heads of all ranks, of which this one has some."""

    def __init__(self, norm: Any, axis: Axis) -> None:
        _cut(norm.weight, 0, [len(norm.weight)], axis)
        self._norm, self._axis = norm, axis

    def __call__(self, given: Tensor) -> Tensor:
        """What it makes of this rank's heads."""
        squares = self._axis.sum(given.float().square().mean(-1, keepdim=True))
        normed: Tensor = given * torch.rsqrt(squares / self._axis.size + self._norm.eps) * self._norm.weight
        return normed.to(given.dtype)


def share_layers(model: Module, cut: ParallelPlan, axis: Axis) -> None:
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
