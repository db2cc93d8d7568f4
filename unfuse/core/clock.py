"""The clock as a port, so that rules about time are tested without waiting; and a bucket that limits a rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from typing_extensions import override


class Clock(Protocol):
    """Two readings of time that must not be mixed, and alarms. `SystemClock` is this machine's."""

    def now(self) -> float:
        """Seconds that never run backwards; only differences between readings mean anything."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC, to show to people; this reading may jump."""
        ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` soon after `now` has reached `when`, never at once. Returns what cancels the alarm."""
        ...


class SystemClock(Clock):
    """Monotonic and Unix seconds, in any thread; alarms are the running event loop's."""

    @override
    def now(self) -> float:
        return time.monotonic()

    @override
    def wall(self) -> float:
        return time.time()

    @override
    def call_at(self, when: float, callback: Callable[[], object]) -> Callable[[], None]:
        import asyncio  # who only reads the time, such as a process that serves objects, has no event loop

        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()), callback).cancel


class TokenBucket:
    """Allows `burst` units at once and `rate` units a second in the long run. All times are seconds of one clock."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst = rate, burst
        self._left, self._at = burst, now

    def take(self, amount: float, now: float) -> bool:
        """Take that many units. False, with nothing taken, when there are not so many."""
        self._left = min(self.burst, self._left + (now - self._at) * self.rate)
        self._at = now
        if amount > self._left:
            return False
        self._left -= amount
        return True
