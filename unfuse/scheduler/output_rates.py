"""Records the chunks of growing outputs, and reports their rate to observers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from typing_extensions import override

from unfuse.core.clock import Clock
from unfuse.core.errors import Damaged, NotFound, ProtocolError
from unfuse.core.request import RequestContext
from unfuse.core.supervisor import Observers
from unfuse.core.task import Claim, OutputDeltas
from unfuse.queues.base import RequestStore
from unfuse.scheduler.observer import Observer

MOST = 4096  # growing outputs that are known here at one time; the one that is known longest is forgotten first

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Output:
    """A growing output of a request that was accepted at `created_at`, in seconds of the wall clock."""

    model: str
    created_at: float

    #: The number of the next chunk.
    chunks: int

    #: When the last chunk came, in monotonic seconds. None if another scheduler recorded it.
    at: float | None = None


class OutputRates(Observer):
    """Tells observers when the first chunks of each output came, and the seconds between those that followed.

    Attempts at a stage follow one another: a chunk that is made again is not counted again.
    """

    def __init__(self, store: RequestStore, clock: Clock, observers: Observers[Observer]) -> None:
        self._store, self._clock, self._observers = store, clock, observers
        self._outputs: dict[tuple[str, str], _Output] = {}  # by the key of the task

    async def append(self, grown: Sequence[OutputDeltas]) -> set[Claim]:
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
        for stage in context.stages:
            self._outputs.pop((context.id, stage), None)

    async def _tell(self, grown: OutputDeltas) -> None:
        output = self._outputs.get(grown.claim.key) or await self._known(grown)
        if output is None:
            return
        new, now = grown.offset + len(grown.pieces) - output.chunks, self._clock.now()
        if new <= 0:
            return
        if output.chunks:
            since = None if output.at is None else now - output.at
            self._observers.tell(Observer.grew, output.model, new, since)
        else:
            seconds = max(0.0, self._clock.wall() - output.created_at)
            self._observers.tell(Observer.began_to_grow, output.model, new, seconds)
        output.chunks, output.at = output.chunks + new, now

    async def _known(self, grown: OutputDeltas) -> _Output | None:
        """The output that grows here from now on; None if its request is gone already."""
        try:
            record = self._store.known(grown.claim) or await self._store.load(grown.claim.request)
        except (NotFound, Damaged):
            return None
        context = record.context
        self._outputs[grown.claim.key] = output = _Output(context.request.model, context.created_at, grown.offset)
        if len(self._outputs) > MOST:
            del self._outputs[next(iter(self._outputs))]
        return output
