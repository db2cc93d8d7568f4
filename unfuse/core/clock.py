"""The clock as a port, for tests without waiting, and a token bucket."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from typing_extensions import override


class Clock(Protocol):
    """Two readings of time, which must not be mixed, and alarms.

    `SystemClock` is this machine's clock.
    """

    def now(self) -> float:
        """Return monotonic seconds: only differences between readings mean anything."""
        ...

    def wall(self) -> float:
        """Return Unix seconds, to show to people. This reading may jump."""
        ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` soon after `now` has reached `when`, never at once.

        Returns a function that cancels the alarm.
        """
        ...


class SystemClock(Clock):
    """The clock of this machine, usable in any thread. Alarms need a running event loop."""

    @override
    def now(self) -> float:
        return time.monotonic()

    @override
    def wall(self) -> float:
        return time.time()

    @override
    def call_at(self, when: float, callback: Callable[[], object]) -> Callable[[], None]:
        import asyncio  # not at the top: a process that only reads the time, such as an object server, has no loop

        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()), callback).cancel


class TokenBucket:
    """A rate limit: `burst` units at once, and `rate` units a second on average.

    All times are seconds of one clock.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._left = burst
        self._at = now

    def try_acquire(self, amount: float, now: float) -> bool:
        """Use that many units. Returns False, and uses none, if fewer are left."""
        self._left = min(self.burst, self._left + (now - self._at) * self.rate)
        self._at = now
        if amount > self._left:
            return False
        self._left -= amount
        return True
