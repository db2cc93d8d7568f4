"""The part of a queue in memory that is an index: where outputs of encoders are that serve more than one request."""

from __future__ import annotations

from collections.abc import Sequence

from unfuse.core.object_ref import ObjectRef
from unfuse.queues.base import MAX_CACHED, TaskQueue


class CacheInMemory(TaskQueue):
    """Handles by key, the least recently used first."""

    def __init__(self) -> None:
        self._cached: dict[str, ObjectRef] = {}
        self._cached_bytes = 0

    async def cache(self, key: str, ref: ObjectRef, room: int) -> None:
        """Keep a handle, and no more than there is room for."""
        self._give_up(key)
        if ref.nbytes > room:
            return
        self._cached[key] = ref
        self._cached_bytes += ref.nbytes
        while self._cached_bytes > room or len(self._cached) > MAX_CACHED:
            self._give_up(next(iter(self._cached)))

    async def cached(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        """Look handles up."""
        found = {key: self._cached[key] for key in keys if key in self._cached}
        for key in keys:
            if use and key in found:
                self._cached[key] = self._cached.pop(key)
        return found

    async def cached_bytes(self) -> int:
        """Their sum."""
        return self._cached_bytes

    async def uncache(self, key: str, id: str) -> None:
        """Give that object up."""
        if key in self._cached and self._cached[key].id == id:
            self._give_up(key)

    def _give_up(self, key: str) -> None:
        if ref := self._cached.pop(key, None):
            self._cached_bytes -= ref.nbytes
