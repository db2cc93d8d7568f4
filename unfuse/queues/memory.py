"""The queue in this process's memory, for tests and small installations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence

from typing_extensions import override

from unfuse.core.clock import Clock, SystemClock
from unfuse.core.event import Event
from unfuse.core.growth import PIECES_AT_ONCE, Grown
from unfuse.queues.local import LocalQueue, follow


class MemoryQueue(LocalQueue):
    """A queue of one process and one event loop; it ends with them."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._pieces = defaultdict[str, defaultdict[str, list[bytes]]](lambda: defaultdict(list))

    @classmethod
    def at(cls, url: str, clock: Clock | None = None) -> MemoryQueue:
        """A new, empty queue: memory has no address."""
        return cls(clock or SystemClock())

    @override
    async def append_all(self, grown: Sequence[Grown]) -> list[bool]:
        new = self._state.append(grown)
        for one in filter(None, new):
            self._pieces[one.claim.request][one.claim.stage] += one.pieces
        return [one is not None for one in new]

    @override
    async def appended(self, request: str, stage: str, after: int = 0, limit: int = PIECES_AT_ONCE) -> list[bytes]:
        self._state.entry(request)
        return self._pieces[request][stage][after : after + limit]

    @override
    def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        return follow(self._state.entry(request).history, after)

    @override
    async def drop(self, request: str) -> None:
        await super().drop(request)
        if request not in self._state.requests:
            self._pieces.pop(request, None)
