"""Tensor: each rank has a share of the heads and of the feed-forward's width, in every layer, and their weights alone.

After Shoeybi et al., Megatron-LM, 2019. Tokens are whole on all ranks. What a pair of layers makes between them stays
on its rank; what the second one makes is summed over ranks, so that results differ from those of one rank by rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from unfuse.parallel.cut import EXPERTS, Matrices
from unfuse.parallel.group import Axis

OUTPUTS, INPUTS = 0, 1  # where in the weight of a linear layer they are; an embedding has it the other way round


def spread(model: Module, matrices: Matrices, axis: Axis) -> None:
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


def _keep(name: str, layer: Any, matrices: Matrices, side: int, axis: Axis) -> None:
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
