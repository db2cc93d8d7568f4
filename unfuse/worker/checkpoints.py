"""When the state of a running task is saved, and in what form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np

from unfuse.core.codec import decode, encode
from unfuse.core.errors import ConfigError, PermanentError
from unfuse.stages.base import Checkpoint, Tensors

FAILS_S = 4 * 3600.0
"""Mean seconds between two failures of a worker that `auto` reckons with: those of a machine that may be taken away."""

UNKNOWN_S = 0.05
"""What saving is taken to cost before it was ever done."""

VALUES = "unfuse.values"
"""The tensor that holds a checkpoint's plain values, as bytes."""

SPOKEN = re.compile(r"(?P<steps>[1-9]\d*)|(?P<seconds>\d+(\.\d+)?)s|auto|none")


@dataclass
class Policy:
    """Every so many `steps`, or `seconds`, or by what saving costs (`auto`); never if neither is given.

    By cost: the interval between two checkpoints that loses least, sqrt(2 × cost × time between failures) (Young, "A
    first order approximation to the optimum checkpoint interval", CACM 17(9), 1974), and none when less than half an
    interval of work is left, since then losing it costs less than saving it, on average.
    """

    steps: int = 0
    seconds: float = 0.0
    auto: bool = False
    cost_s: float = field(default=UNKNOWN_S, init=False)
    """Seconds that a task waits while it is saved, as measured."""

    @classmethod
    def parse(cls, text: str) -> Policy:
        """`10` is every ten steps, `30s` every thirty seconds, and there are `auto` and `none`. Raises ConfigError."""
        found = SPOKEN.fullmatch(text)
        if found is None or float(found["seconds"] or 1) == 0:
            raise ConfigError(f"--checkpoint {text}: say auto, none, a number of steps (10) or of seconds (30s)")
        return cls(int(found["steps"] or 0), float(found["seconds"] or 0), text == "auto")

    @property
    def never(self) -> bool:
        """Whether nothing is ever saved."""
        return not (self.steps or self.seconds or self.auto)

    def due(self, unsaved_steps: int, unsaved_s: float, left_s: float) -> bool:
        """Whether to save now: so much would be lost, and so much is predicted to be left."""
        if self.steps:
            return unsaved_steps >= self.steps
        if self.seconds:
            return unsaved_s >= self.seconds
        interval = sqrt(2 * self.cost_s * FAILS_S)
        return self.auto and unsaved_s >= interval and left_s >= interval / 2

    def took(self, seconds: float) -> None:
        """Take in what saving cost just now."""
        self.cost_s = (self.cost_s + seconds) / 2


def packed(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint as the tensors of one object."""
    return {**checkpoint.tensors, VALUES: np.frombuffer(encode(checkpoint.values), np.uint8)}


def unpacked(tensors: Mapping[str, Any]) -> Checkpoint:
    """What was packed. Raises PermanentError for an object that is no checkpoint."""
    values = tensors.get(VALUES)
    if values is None:
        raise PermanentError("an object that is no checkpoint was given as one")
    saved: Tensors = {name: tensor for name, tensor in tensors.items() if name != VALUES}
    return Checkpoint(saved, decode(np.asarray(values).tobytes(), dict[str, Any]))
