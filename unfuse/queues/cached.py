"""The index of the encoder cache, in memory."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from unfuse.core.object_ref import ObjectRef
from unfuse.queues.base import MAX_CACHED, EncoderIndex


class LocalEncoderIndex(EncoderIndex):
    """Refs of cached encoder outputs by cache key, the least recently used first."""

    def __init__(self) -> None:
        self._refs: dict[str, ObjectRef] = {}
        self._nbytes = 0

    @override
    async def cache(self, key: str, ref: ObjectRef, room: int) -> None:
        self._remove(key)
        if ref.nbytes > room:
            return
        self._refs[key] = ref
        self._nbytes += ref.nbytes
        while self._nbytes > room or len(self._refs) > MAX_CACHED:
            self._remove(next(iter(self._refs)))

    @override
    async def cached(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        found = {key: self._refs[key] for key in keys if key in self._refs}
        for key in keys:
            if use and key in found:
                self._refs[key] = self._refs.pop(key)
        return found

    @override
    async def cached_bytes(self) -> int:
        return self._nbytes

    @override
    async def uncache(self, key: str, id: str) -> None:
        if key in self._refs and self._refs[key].id == id:
            self._remove(key)

    def _remove(self, key: str) -> None:
        if ref := self._refs.pop(key, None):
            self._nbytes -= ref.nbytes
