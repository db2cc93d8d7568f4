"""The index of the encoder cache, in memory."""

from __future__ import annotations

from collections.abc import Sequence

from unfuse.core.object_ref import ObjectRef
from unfuse.queues.base import MAX_CACHED


class CachedRefs:
    """Refs of cached encoder outputs by cache key, the least recently used first."""

    def __init__(self) -> None:
        self._refs: dict[str, ObjectRef] = {}
        self.bytes = 0  # bytes of all objects in the index

    def add(self, key: str, ref: ObjectRef, room: int) -> None:
        """Put a ref under the key, and drop the least recently used until `room` bytes and MAX_CACHED refs are kept."""
        self._remove(key)
        if ref.nbytes > room:
            return
        self._refs[key] = ref
        self.bytes += ref.nbytes
        while self.bytes > room or len(self._refs) > MAX_CACHED:
            self._remove(next(iter(self._refs)))

    def find(self, keys: Sequence[str], use: bool) -> dict[str, ObjectRef]:
        """The refs that are found, by key. With `use` they count as used now."""
        found = {key: self._refs[key] for key in keys if key in self._refs}
        for key in keys:
            if use and key in found:
                self._refs[key] = self._refs.pop(key)
        return found

    def remove(self, key: str, id: str) -> None:
        """Remove the object of this id from the key; another object stays."""
        if key in self._refs and self._refs[key].id == id:
            self._remove(key)

    def _remove(self, key: str) -> None:
        if ref := self._refs.pop(key, None):
            self.bytes -= ref.nbytes
