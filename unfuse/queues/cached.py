"""An index in memory: where outputs of encoders are that serve more than one request."""

from __future__ import annotations

from collections.abc import Sequence

from unfuse.core.object_ref import ObjectRef
from unfuse.queues.base import MAX_CACHED


class Cached:
    """Handles by key, the least recently used first."""

    def __init__(self) -> None:
        self._refs: dict[str, ObjectRef] = {}
        self.bytes = 0
        """Of all of them."""

    def keep(self, key: str, ref: ObjectRef, room: int) -> None:
        """Keep a handle, and no more than there is room for."""
        self._give_up(key)
        if ref.nbytes > room:
            return
        self._refs[key] = ref
        self.bytes += ref.nbytes
        while self.bytes > room or len(self._refs) > MAX_CACHED:
            self._give_up(next(iter(self._refs)))

    def find(self, keys: Sequence[str], use: bool) -> dict[str, ObjectRef]:
        """Look handles up."""
        found = {key: self._refs[key] for key in keys if key in self._refs}
        for key in keys:
            if use and key in found:
                self._refs[key] = self._refs.pop(key)
        return found

    def lose(self, key: str, id: str) -> None:
        """Give that object up."""
        if key in self._refs and self._refs[key].id == id:
            self._give_up(key)

    def _give_up(self, key: str) -> None:
        if ref := self._refs.pop(key, None):
            self.bytes -= ref.nbytes
