"""A manual clock for tests of time limits and alarms."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

from unfuse.core.clock import Clock


class ManualClock(Clock):
    """A clock that stands still until `advance`, which also runs due alarms in order."""

    def __init__(self, now: float = 1_000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._offset = wall - now
        self._alarms: list[tuple[float, int, Callable[[], object]]] = []
        self._cancelled: set[int] = set()
        self._numbers = count()

    def now(self) -> float:
        """Return seconds that never run backwards."""
        return self._now

    def wall(self) -> float:
        """Return Unix seconds, which advance with `now`."""
        return self._now + self._offset

    def call_at(self, when: float, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` once `now` has reached `when`. Returns what cancels the alarm."""
        if when <= self._now:
            return asyncio.get_running_loop().call_soon(callback).cancel
        number = next(self._numbers)
        heapq.heappush(self._alarms, (when, number, callback))
        return lambda: self._cancelled.add(number)

    def advance(self, seconds: float) -> None:
        """Advance the clock by `seconds`, running alarms at their times.

        Tasks that an alarm wakes run when the event loop runs next.
        """
        end = self._now + seconds
        while self._alarms and self._alarms[0][0] <= end:
            when, number, callback = heapq.heappop(self._alarms)
            self._now = max(self._now, when)
            if number not in self._cancelled:
                callback()
            self._cancelled.discard(number)
        self._now = end
