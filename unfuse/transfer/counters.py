"""Counts what transfers have moved, by engine; the heartbeat takes the counts."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from unfuse.core.messages import Moved


class TransferCounters:
    """Sums since the last `take`, by engine. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._moved: dict[str, Moved] = {}

    def add(self, engine: str, moved: Moved) -> None:
        """Add to the sums of an engine."""
        with self._lock:
            self._moved[engine] = self._moved.get(engine, Moved()) + moved

    def take(self) -> dict[str, Moved]:
        """Return the sums, and reset them."""
        with self._lock:
            taken, self._moved = self._moved, {}
            return taken

    def put_back(self, taken: Mapping[str, Moved]) -> None:
        """Add sums that were taken and could not be reported."""
        for engine, moved in taken.items():
            self.add(engine, moved)
