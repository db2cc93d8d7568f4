"""What transfers did, by engine: counted in their threads, told elsewhere now and then."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from unfuse.core.messages import Moved


class Tally:
    """Sums since they were last taken. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._moved: dict[str, Moved] = {}

    def add(self, engine: str, moved: Moved) -> None:
        """Count something of an engine."""
        with self._lock:
            self._moved[engine] = self._moved.get(engine, Moved()) + moved

    def take(self) -> dict[str, Moved]:
        """The sums, which begin anew."""
        with self._lock:
            taken, self._moved = self._moved, {}
            return taken

    def put_back(self, taken: Mapping[str, Moved]) -> None:
        """Nobody heard of these."""
        for engine, moved in taken.items():
            self.add(engine, moved)
