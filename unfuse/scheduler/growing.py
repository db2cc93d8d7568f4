"""Records what outputs grow by, and tells how fast that goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from typing_extensions import override

from unfuse.core.clock import Clock
from unfuse.core.errors import Damaged, NotFound, ProtocolError
from unfuse.core.growth import Grown
from unfuse.core.observers import Observers
from unfuse.core.request import RequestContext
from unfuse.core.task import Claim
from unfuse.queues.base import RequestStore
from unfuse.scheduler.observer import Observer

MOST = 4096  # requests whose growth is known here at one time; the one that is known longest is forgotten first

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Output:
    """What of a stage is recorded: the number of the next piece, and when the last came, in monotonic seconds."""

    pieces: int
    at: float | None


@dataclass(eq=False, slots=True)
class _Request:
    """A request whose outputs grow, by stage; accepted at `created_at`, in seconds of the wall clock."""

    model: str
    created_at: float
    outputs: dict[str, _Output]


class Growing(Observer):
    """Of each request that grows here, who hears of it learns when its first pieces came, and when those that followed.

    Attempts at a stage follow one another: a piece that is made again is not counted again.
    """

    def __init__(self, store: RequestStore, clock: Clock, observers: Observers[Observer]) -> None:
        self._store, self._clock, self._observers = store, clock, observers
        self._requests: dict[str, _Request] = {}

    async def append(self, grown: Sequence[Grown]) -> set[Claim]:
        """Record what outputs have grown by. Returns the claims of which it is recorded.

        What cannot be, such as what follows pieces that a queue has lost, costs its own task alone.
        """
        if not grown:
            return set()
        try:
            held = await self._store.append_all(grown)
        except ProtocolError as error:
            if len(grown) > 1:
                return {claim for one in grown for claim in await self.append([one])}
            log.warning("cannot be recorded", request=grown[0].claim.request, reason=str(error))
            return set()
        recorded = [one for one, is_held in zip(grown, held, strict=True) if is_held]
        for one in recorded:
            await self._tell(one)
        return {one.claim for one in recorded}

    @override
    def ended(self, context: RequestContext) -> None:
        self._requests.pop(context.id, None)

    async def _tell(self, grown: Grown) -> None:
        request = self._requests.get(grown.claim.request) or await self._known(grown.claim.request)
        if request is None:
            return
        output = request.outputs.setdefault(grown.claim.stage, _Output(grown.offset, None))
        fresh, now = grown.offset + len(grown.pieces) - output.pieces, self._clock.now()
        if fresh <= 0:
            return
        if output.pieces:
            since = None if output.at is None else now - output.at
            self._observers.tell(Observer.grew, request.model, fresh, since)
        else:
            seconds = max(0.0, self._clock.wall() - request.created_at)
            self._observers.tell(Observer.began_to_grow, request.model, fresh, seconds)
        output.pieces, output.at = output.pieces + fresh, now

    async def _known(self, id: str) -> _Request | None:
        """A request that grows here from now on; None if it is gone already."""
        try:
            context = (await self._store.load(id)).context
        except (NotFound, Damaged):
            return None
        self._requests[id] = request = _Request(context.request.model, context.created_at, {})
        if len(self._requests) > MOST:
            del self._requests[next(iter(self._requests))]
        return request
