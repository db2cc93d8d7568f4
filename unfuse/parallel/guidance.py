"""Guidance halves on ranks of their own: one predicts towards the prompt, the other away from the negative one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from unfuse.parallel.group import Axis

Half = Callable[[], Tensor]


def side_by_side(axis: Axis, towards: Half, away: Half) -> tuple[Tensor, Tensor]:
    """Both halves, on a rank each; both ranks get both, as one rank would compute them."""
    first, second = axis.gather((towards, away)[axis.rank]()).unbind(0)
    return first, second


def in_turn(towards: Half, away: Half) -> tuple[Tensor, Tensor]:
    """Both halves on this rank, one after the other."""
    return towards(), away()
