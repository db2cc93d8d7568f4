"""Guidance halves on ranks of their own: one predicts towards the prompt, the other away from the negative one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from unfuse.parallel.group import Axis

Half = Callable[[], Tensor]


class Halves:
    """Both halves of guidance, computed side by side on two ranks; each gets both, as one rank would compute them."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, towards: Half, away: Half) -> tuple[Tensor, Tensor]:
        """What both halves give."""
        own = (towards, away)[self._axis.rank]()
        first, second = self._axis.gather(own).unbind(0)
        return first, second


def in_turn(towards: Half, away: Half) -> tuple[Tensor, Tensor]:
    """Both halves on this rank, one after the other."""
    return towards(), away()
