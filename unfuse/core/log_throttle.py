"""Limits how often the same thing is logged."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

LOG_EVERY_S = 1.0  # seconds between two log lines about one cause


class LogThrottle:
    """Lets each cause be logged once in `LOG_EVERY_S` seconds, and counts how often it occurred meanwhile.

    Every cause is remembered for ever: pass texts of our own, never text that a peer sent.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next: dict[str, float] = {}
        self._unlogged: Counter[str] = Counter()

    def count_if_due(self, cause: str) -> int:
        """Count this occurrence. Returns how many there were since the last log line; 0: do not log now."""
        now = self._now()
        self._unlogged[cause] += 1
        if now < self._next.get(cause, now):
            return 0
        self._next[cause] = now + LOG_EVERY_S
        return self._unlogged.pop(cause)
