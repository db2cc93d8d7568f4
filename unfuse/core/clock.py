"""The clock as a port, so that rules about time are tested without waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Two readings of time that must not be mixed, and alarms. `unfuse.supervision.clock` has this machine's."""

    def now(self) -> float:
        """Seconds that never run backwards; only differences between readings mean anything."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC, to show to people; this reading may jump."""
        ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` soon after `now` has reached `when`, never at once. Returns what cancels the alarm."""
        ...
