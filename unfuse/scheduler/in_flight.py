"""What the requests that are not over put into arenas: how much must stay free for them to come to their end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from typing_extensions import override

from unfuse.core.plan import declared
from unfuse.core.request import RequestContext
from unfuse.scheduler.observer import Observer


class InFlight(Observer):
    """The declared bytes of every request in flight, by pool, and which outputs of it were given up.

    Requests that others accepted, and what others gave up, are learned of later.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Counter[str]] = {}
        self._lost: dict[str, list[str]] = {}
        self._seen: set[str] = set()

    @override
    def announced(self, context: RequestContext) -> None:
        """A request is in flight, or still is."""
        self._seen.add(context.id)
        if context.id not in self._requests:
            sizes = self._requests[context.id] = Counter()
            for stage in context.plan.stages:
                sizes[declared(stage.pool)] += stage.room
        if lost := [state.lost for state in context.stages.values() if state.lost]:
            self._lost[context.id] = lost

    @override
    def ended(self, context: RequestContext) -> None:
        self._requests.pop(context.id, None)
        self._lost.pop(context.id, None)

    refused = ended

    def sweep(self) -> None:
        """All that are in flight were told of since the last time: the others have ended elsewhere."""
        self._requests = {request: sizes for request, sizes in self._requests.items() if request in self._seen}
        self._lost = {request: ids for request, ids in self._lost.items() if request in self._seen}
        self._seen = set()

    def largest(self, pools: Collection[str]) -> int:
        """The most that one request puts into these pools together."""
        names = {declared(pool) for pool in pools}
        return max((sum(sizes[name] for name in names) for sizes in self._requests.values()), default=0)

    def lost(self, requests: Iterable[str]) -> list[str]:
        """The ids of the outputs of these requests that were given up: who still has one need not keep it."""
        return [id for request in requests for id in self._lost.get(request, ())]
