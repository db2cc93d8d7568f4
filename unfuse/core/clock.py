"""The clock as a port, so that rules about time are tested without waiting."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Two readings of time that must not be mixed."""

    def now(self) -> float:
        """Seconds that never run backwards; only differences between readings mean anything."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC, to show to people; this reading may jump."""
        ...


class AlarmClock(Clock, ABC):
    """A Clock that sets alarms of its own, such as a test's clock. Other clocks use the event loop's timers."""

    @abstractmethod
    def call_at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once `now` has reached `when`. Returns a function that cancels the alarm."""


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix seconds."""
        return time.time()
