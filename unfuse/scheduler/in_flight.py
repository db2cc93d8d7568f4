"""What the requests that are not over put into arenas: how much must stay free for them to come to their end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from unfuse.core.pool import declared
from unfuse.core.request import RequestContext


class InFlight:
    """The declared bytes of every request in flight, by pool. Requests that others accepted are learned of later."""

    def __init__(self) -> None:
        self._requests: dict[str, Counter[str]] = {}
        self._seen: dict[str, int] = {}
        self._round = 0

    def begin(self, context: RequestContext) -> None:
        """A request is in flight, or still is."""
        self._seen[context.id] = self._round
        if context.id not in self._requests:
            sizes = self._requests[context.id] = Counter()
            for stage in context.plan.stages:
                sizes[declared(stage.pool)] += stage.room

    def end(self, request: str) -> None:
        """It is over, or was never accepted."""
        self._requests.pop(request, None)
        self._seen.pop(request, None)

    def sweep(self) -> None:
        """All that are in flight were told of since the last time: the others have ended elsewhere."""
        for request in [request for request, seen in self._seen.items() if seen < self._round]:
            self.end(request)
        self._round += 1

    def largest(self, pools: Collection[str]) -> int:
        """The most that one request puts into these pools together."""
        names = {declared(pool) for pool in pools}
        return max((sum(sizes[name] for name in names) for sizes in self._requests.values()), default=0)
