"""Spreads a loaded model over the ranks of its stage."""

from __future__ import annotations

from torch.nn import Module

from unfuse.core.spread import SHARD
from unfuse.parallel import layers, sequence, shard, tensor
from unfuse.parallel.cut import Cut, Matrices
from unfuse.parallel.group import Mesh, give_back
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
        shard.spread(model, cut, mesh.axis(SHARD))
    give_back()
