"""How often something may happen: a steady pace with room for bursts, and causes that are told now and then."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

TELL_S = 1.0
"""Seconds between two tellings of one cause."""


class TokenBucket:
    """At most `burst` at once, and `rate` a second for ever (a token bucket). Times are seconds of one clock."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst = rate, burst
        self._left, self._at = burst, now

    def take(self, amount: float, now: float) -> bool:
        """Whether that much may happen now; if so it counts as done."""
        self._left = min(self.burst, self._left + (now - self._at) * self.rate)
        self._at = now
        if amount > self._left:
            return False
        self._left -= amount
        return True


class Seldom:
    """Says which causes are to be told: each once in `TELL_S` seconds, however often it comes.

    RepeatedErrors are words of ours, not what a stranger sends: all that ever came are remembered.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next: dict[str, float] = {}
        self._untold: Counter[str] = Counter()

    def times(self, cause: str) -> int:
        """How often this cause came since it was told last, now included; 0 if it is not to be told now."""
        now = self._now()
        self._untold[cause] += 1
        if now < self._next.get(cause, now):
            return 0
        self._next[cause] = now + TELL_S
        return self._untold.pop(cause)
