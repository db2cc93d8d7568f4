"""Weights spread over ranks, by torch's FSDP2: each keeps a share of every block, and lends it as the block runs.

Ranks gather a block's weights before it runs, and let go of what is not theirs behind it, so that a rank holds its
share, the rest of the model around the blocks, and a block or two. What is computed is not spread.
"""

from __future__ import annotations

from torch.distributed.fsdp import fully_shard
from torch.nn import Module

from unfuse.parallel.cut import Cut
from unfuse.parallel.group import Axis, give_back


def spread(model: Module, cut: Cut, axis: Axis) -> None:
    """Spread a transformer's weights over these ranks; what this one keeps lies on its device."""
    model.requires_grad_(False)  # else all weights of a block would have to be of one dtype
    mesh = axis.mesh
    for part in (*cut.blocks_of(model), model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
        if axis.group.device.type == "cpu":
            part.register_forward_hook(lambda *_: give_back())
    model.register_forward_pre_hook(lambda *_: axis.group.meet(), prepend=True)
