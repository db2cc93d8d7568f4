"""Time as a port, so that rules about time are tested without waiting."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Two readings that must not be mixed."""

    def now(self) -> float:
        """Seconds that never run backwards; only differences mean anything."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC, for people to read; may jump."""
        ...


class AlarmClock(Clock, ABC):
    """A Clock that calls back when its own time comes. One without alarms is as fast as the event loop's time."""

    @abstractmethod
    def call_at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once `now` has reached `when`; returns what takes the alarm back."""


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix seconds."""
        return time.time()
