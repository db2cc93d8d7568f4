"""The clock, which tests can replace, and a token bucket."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from typing_extensions import override


class Clock(Protocol):
    """Monotonic time, Unix time and timers.

    The two times must not be mixed. `SystemClock` is this machine's clock.
    """

    def now(self) -> float:
        """Return monotonic seconds: only differences between readings mean anything."""
        ...

    def wall(self) -> float:
        """Return Unix seconds, to show to people. They jump when the clock is set."""
        ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` soon after `now` has reached `when`, never at once.

        Returns a function that cancels the call.
        """
        ...


class SystemClock(Clock):
    """The clock of this machine, usable in any thread. `call_at` needs a running event loop."""

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
        self._available = burst
        self._refilled_at = now

    def try_acquire(self, amount: float, now: float) -> bool:
        """Use `amount` units. Returns False, and uses none, if fewer are available."""
        self._available = min(self.burst, self._available + (now - self._refilled_at) * self.rate)
        self._refilled_at = now
        if amount > self._available:
            return False
        self._available -= amount
        return True
