"""Spreads a loaded model over the ranks of its stage.

Weights of which each rank keeps a share are spread by torch's FSDP2. Ranks gather a block's weights before it runs, and
let go of what is not theirs behind it, so that a rank holds its share, the rest of the model around the blocks, and a
block or two. What is computed is not spread.
"""

from __future__ import annotations

from torch.distributed.fsdp import fully_shard
from torch.nn import Module

from unfuse.core.spread import SHARD
from unfuse.parallel import layers, sequence, tensor
from unfuse.parallel.cut import Cut, Matrices
from unfuse.parallel.group import Axis, Mesh, give_back
from unfuse.parallel.ring import Ring
from unfuse.parallel.ulysses import ulysses


def spread(model: Module, cut: Cut | Matrices, mesh: Mesh) -> None:
    """Have the model compute its part of each forward, by the kinds over which its stage is spread."""
    if "tensor" in mesh.degrees:
        tensor.spread(model, cut if isinstance(cut, Matrices) else cut.matrices, mesh.axis("tensor"))
    if isinstance(cut, Cut) and "layers" in mesh.degrees:
        layers.spread(model, cut, mesh.axis("layers"))
    if isinstance(cut, Cut) and mesh.degrees.keys() & {"ring", "ulysses"}:
        ring, heads = mesh.axis("ring"), mesh.axis("ulysses")
        attend = Ring(ring, heads) if ring.size > 1 else ulysses
        sequence.spread(model, cut, mesh.axis("ring", "ulysses"), attend)
    if isinstance(cut, Cut) and SHARD in mesh.degrees:
        share_weights(model, cut, mesh.axis(SHARD))
    give_back()


def share_weights(model: Module, cut: Cut, axis: Axis) -> None:
    """Spread a transformer's weights over these ranks; what this one keeps lies on its device."""
    model.requires_grad_(False)  # else all weights of a block would have to be of one dtype
    mesh = axis.mesh
    for part in (*cut.blocks_of(model), model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
        if axis.group.device.type == "cpu":
            part.register_forward_hook(lambda *_: give_back())
    model.register_forward_pre_hook(lambda *_: axis.group.meet(), prepend=True)
