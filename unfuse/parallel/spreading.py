"""Parallelizes a loaded model over ranks: tensor, sequence, pipeline parallel, or FSDP.

Tensor parallel: each rank has a share of the heads and of the feed-forward's width in every layer, and only their
weights. After Shoeybi et al., Megatron-LM, 2019. All ranks have all tokens. The values between the two layers of a pair
stay on their rank. The results of the second layer are summed over ranks, so they differ from those of one rank by
rounding.

Sequence parallel: see `parallel/sequence.py`.

Layers (pipeline parallel without micro-batches): each rank has the weights of a range of blocks, and broadcasts the
result of its range. The modules around the blocks are on every rank and are computed there. One rank computes at a
time, and the others wait. This is for models that do not fit into one device, and needs the least bandwidth between
devices.

Shard: torch's FSDP2 shards the weights. Ranks gather a block's weights before it runs and free the other ranks' shards
after it. So a rank has its share, the model around the blocks, and one or two whole blocks. The computation itself is
not parallel.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import OffloadPolicy, fully_shard
from torch.nn import Linear, Module, Parameter

from unfuse.core.compute_options import SHARD
from unfuse.parallel.group import Axis, Mesh, trim_heap
from unfuse.parallel.parallel_plan import EXPERTS, ParallelPlan, TensorParallelLayers
from unfuse.parallel.sequence import RingAttention, shard_tokens, ulysses


def parallelize(
    model: Module,
    plan: ParallelPlan | TensorParallelLayers,
    mesh: Mesh,
    offload_policy: OffloadPolicy | None = None,
) -> None:
    """Parallelize a model, in place, over the ranks of a stage.

    The kinds of parallelism are those of the mesh. `plan`: the model's plan, or only its tensor parallel layers.
    `offload_policy`: where FSDP keeps the shards; None: on the device.
    """
    if "tensor" in mesh.degrees:
        shard_layers(model, plan if isinstance(plan, TensorParallelLayers) else plan.matrices, mesh.axis("tensor"))

    if isinstance(plan, ParallelPlan) and "layers" in mesh.degrees:
        assign_blocks(model, plan, mesh.axis("layers"))

    if isinstance(plan, ParallelPlan) and mesh.degrees.keys() & {"ring", "ulysses"}:
        ring, heads = mesh.axis("ring"), mesh.axis("ulysses")
        attend = RingAttention(ring, heads) if ring.size > 1 else ulysses
        shard_tokens(model, plan, mesh.axis("ring", "ulysses"), attend)

    if isinstance(plan, ParallelPlan) and SHARD in mesh.degrees:
        shard_weights(model, plan, mesh.axis(SHARD), offload_policy)

    trim_heap()


def shard_weights(model: Module, plan: ParallelPlan, axis: Axis, offload_policy: OffloadPolicy | None = None) -> None:
    """Shard a transformer's weights over these ranks by FSDP2.

    This rank's share is on its device, or where the policy keeps it.
    """
    model.requires_grad_(False)  # else all weights of a block would have to be of one dtype
    mesh, policy = axis.mesh, offload_policy or OffloadPolicy()
    for module in (*plan.blocks_of(model), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
        if axis.group.device.type == "cpu":
            module.register_forward_hook(lambda *_: trim_heap())

    # FSDP2 makes its exchanges by itself. They would wait for a rank that failed before the model runs.
    model.register_forward_pre_hook(lambda *_: axis.group.meet(), prepend=True)


#: The dimensions of outputs and inputs in the weight of a linear layer. An embedding has them the other way round.
OUTPUTS, INPUTS = 0, 1


def shard_layers(model: Module, matrices: TensorParallelLayers, axis: Axis) -> None:
    """Make a model tensor parallel: shard its layers, and exchange their results."""
    for name, module in [*model.named_modules()]:
        if _matches_any(name, matrices.outputs):
            _shard_layer(name, module, matrices, OUTPUTS, axis)
        elif _matches_any(name, matrices.inputs):
            _shard_layer(name, module, matrices, INPUTS, axis)
            module.register_forward_hook(lambda _module, _args, output: axis.sum(output))
        elif _matches_any(name, matrices.gathered):
            _shard_layer(name, module, matrices, OUTPUTS, axis)
            module.register_forward_hook(lambda _module, _args, output: axis.gather(output).movedim(0, -2).flatten(-2))
        elif _matches_any(name, matrices.experts):
            for parameter, (dim, parts) in EXPERTS.items():
                weight = getattr(module, parameter)
                _shard(weight, dim, [weight.shape[dim] // parts] * parts, axis)
            module.register_forward_hook(lambda _module, _args, output: axis.sum(output))
        elif _matches_any(name, matrices.norms):
            module.forward = _ShardedNorm(module, axis)

        for pattern in matrices.heads:
            module_pattern, _, attribute = pattern.rpartition(".")
            if fnmatchcase(name, module_pattern):
                setattr(module, attribute, getattr(module, attribute) // axis.size)


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _shard_layer(name: str, layer: Any, matrices: TensorParallelLayers, side: int, axis: Axis) -> None:
    """Replace a layer's weights by this rank's share.

    `side`: OUTPUTS or INPUTS, the sharded dimension. A bias that is added to a sum over ranks stays whole on the first
    rank and is removed on the others.
    """
    weight = layer.weight
    dim = side if isinstance(layer, Linear) else 1 - side
    # Each matrix is sharded by itself, because a rank needs its heads of every one: of queries, keys and values.
    matching = (packed for pattern, packed in matrices.packed.items() if fnmatchcase(name, pattern))
    squares, others = next(matching, (0, 1))

    width = weight.shape[1 - dim]
    lengths = [width] * squares + [(weight.shape[dim] - squares * width) // others] * others
    _shard(weight, dim, lengths, axis)

    bias = getattr(layer, "bias", None)
    if bias is not None and side == OUTPUTS:
        _shard(bias, 0, lengths, axis)
    elif bias is not None and axis.rank:
        layer.bias = None


def _shard(weight: Parameter, dim: int, lengths: list[int], axis: Axis) -> None:
    """Replace a weight, in place, by this rank's share of each part.

    `weight`: (…, sum of lengths, …) along dimension `dim`. Becomes (…, sum of lengths / ranks, …), for all modules
    that share it.
    `lengths`: the lengths of the parts that lie side by side.
    """
    parts = torch.split(weight.data, lengths, dim)
    own_shares = [torch.unflatten(part, dim, (axis.size, -1)).select(dim, axis.rank) for part in parts]
    weight.data = torch.cat(own_shares, dim)


class _ShardedNorm:
    """The forward of a root mean square norm over the heads of all ranks."""

    def __init__(self, norm: Any, axis: Axis) -> None:
        _shard(norm.weight, 0, [len(norm.weight)], axis)
        self._norm, self._axis = norm, axis

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return this rank's heads, (…, own width), normalized over all ranks' heads."""
        mean_squares = self._axis.sum(hidden.float().square().mean(-1, keepdim=True))
        normed: Tensor = hidden * torch.rsqrt(mean_squares / self._axis.size + self._norm.eps) * self._norm.weight
        return normed.to(hidden.dtype)


def assign_blocks(model: Module, plan: ParallelPlan, axis: Axis) -> None:
    """Assign a transformer's blocks to these ranks (pipeline parallel).

    Frees the weights of the blocks of other ranks.
    """
    blocks = plan.blocks_of(model)
    owners = rank_by_block([sum(tensor.nbytes for tensor in block.parameters()) for block in blocks], axis.size)
    for block, owner, next_owner in zip(blocks, owners, [*owners[1:], axis.size], strict=True):
        if owner != axis.rank:
            _skip_block(block, plan.updated_inputs)
        # To all ranks, because each of them computes the modules around the blocks.
        if owner != next_owner:
            block.register_forward_hook(functools.partial(_broadcast, axis, owner))


def rank_by_block(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that has the weights of each block.

    Ranks are in order. Each has at least one block, and all have about as many bytes.

    `sizes`: bytes of each block.
    """
    owners = [0]
    total_bytes = sum(sizes)
    bytes_before = sizes[0]
    for index, size in enumerate(sizes[1:], 1):
        even_rank = int(ranks * (bytes_before + size / 2) / total_bytes)
        # At most one rank further than the last block, and no fewer blocks left than ranks.
        owners.append(max(ranks - len(sizes) + index, min(owners[-1] + 1, even_rank)))
        bytes_before += size
    return owners


def _skip_block(block: Module, updated_inputs: Sequence[str]) -> None:
    """Free a block's weights, and make it return its inputs unchanged.

    `updated_inputs`: the arguments whose new values the block returns, in order.
    """
    original_forward, signature = block.forward, inspect.signature(block.forward)

    @functools.wraps(original_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        inputs = tuple(arguments[name] for name in updated_inputs if arguments.get(name) is not None)
        return inputs if len(inputs) > 1 else inputs[0]

    # Not removed, so that adapters find every layer.
    block.to("meta")
    block.forward = forward


def _broadcast(axis: Axis, owner: int, block: Module, args: Any, outputs: Any) -> Any:
    """Return the outputs of a block from the rank that has its weights."""
    if isinstance(outputs, Tensor):
        return axis.scatter(outputs, owner)
    return tuple(axis.scatter(output, owner) for output in outputs)
