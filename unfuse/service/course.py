"""How far a comparison is, how long it will take, and what it comes to in words."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unfuse.service.comparison import Figures

ALIKE = 0.05
"""By how much figures of two runs may differ and be called equal."""


class Course:
    """Counts the requests of a comparison. As text it is what runs now, and how much is left.

    `totals` are the requests of each side, in order. Before the first request it says how many there are, with an
    estimate from the `predicted_s` of one, if known; after the first request, an estimate from that.
    """

    def __init__(
        self, totals: Mapping[str, int], predicted_s: float | None, say: Callable[[str], object],
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._totals, self._say, self._now = dict(totals), say, now
        self._side, self._done, self._began, self._first = "", 0, 0.0, 0.0
        self._each_s = predicted_s or 0.0
        self._is_known = False
        requests = ", then ".join(f"{count} requests with {side}" for side, count in totals.items())
        whole = sum(totals.values()) * self._each_s
        known = f"about {duration(whole)}, by what stages took on this machine before"
        say(f"{requests}: {known if whole else 'the first one will tell how long that takes'}")

    def begin(self, side: str) -> None:
        """The requests of this side are made from now on."""
        self._side, self._done, self._began = side, 0, self._now()

    def made(self) -> None:
        """A request of this side is done."""
        self._done += 1
        now = self._now()
        if self._done == 1:
            self._first = now
            self._each_s = self._each_s if self._is_known else now - self._began
        else:
            self._each_s = (now - self._first) / (self._done - 1)
        if not self._is_known:
            self._is_known = True
            self._say(f"estimate: about {duration(self.left_s)}, at {self._each_s:.2g} s a request")

    @property
    def left_s(self) -> float:
        """Seconds until all requests are made, if each takes as long as those of late."""
        left = self._totals.get(self._side, 0) - self._done + sum(self._totals[side] for side in self._later)
        return max(0, left) * self._each_s

    @property
    def _later(self) -> list[str]:
        """The sides whose requests are still to be made."""
        sides = [*self._totals]
        return sides[sides.index(self._side) + 1 :] if self._side else sides

    def __str__(self) -> str:
        if self._done == self._totals.get(self._side, 0):
            return f"starting {self._later[0]}" if self._later else "done"
        left = f", about {duration(self.left_s)} left" if self._is_known else ""
        return f"measuring {self._side}: {self._done} of {self._totals[self._side]} requests{left}"


def duration(seconds: float) -> str:
    """A time in words: 40 s, 4 min, 1 h 20 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def verdict(whole: Figures, split: Figures, workers: int) -> str:
    """What the figures of diffusers and of so many workers come to, in a sentence."""
    most = max(whole.throughput)
    alone, at_once = whole.latency / split.latency, split.throughput[most] / whole.throughput[most]
    best, worst = max(alone, at_once), min(alone, at_once)
    if best <= 1 + ALIKE and worst >= 1 - ALIKE:
        faster = "both are equally fast here"
    elif worst >= 1 - ALIKE:
        faster = "unfuse is faster here"
    elif best <= 1 + ALIKE:
        faster = "diffusers alone is faster here"
    else:
        faster = "which is faster here depends on how many ask at once"
    memory = split.memory / whole.memory
    return (
        f"{faster}: compared with diffusers, unfuse needs {_times(1 / alone, 'the time', 'as much time')} for one "
        f"request, makes {_times(at_once, 'as many', 'as many')} a second with {most} at once, and takes "
        f"{_times(memory, 'the memory', 'as much memory')}: {workers} worker{'s' * (workers > 1)} beside one process"
    )


def _times(factor: float, what: str, equal: str) -> str:
    """So many times something, in words."""
    return f"{factor:.2g} times {what}" if abs(factor - 1) > ALIKE else equal
