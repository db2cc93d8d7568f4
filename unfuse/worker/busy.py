"""How busy a worker is, and what its processes hold in memory, as its heartbeats tell."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import exp
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")

OVER_S = 15.0  # seconds over which the share is a mean; what lies longer back counts ever less


class BusyShare:
    """The share of the last seconds in which there were tasks to compute."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._at = now, now()
        self._share, self._busy = 0.0, False

    def tell(self, busy: bool) -> None:
        """From now on there are tasks, or none."""
        self._share, self._at, self._busy = self.share, self._now(), busy

    @property
    def share(self) -> float:
        """From 0 to 1."""
        target = float(self._busy)
        return target + (self._share - target) * exp((self._at - self._now()) / OVER_S)


def resident(pids: Iterable[int]) -> int:
    """Bytes of host memory that these processes have; what several map counts in each."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return total
