"""Records output chunks of running tasks and reports their rate to observers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from typing_extensions import override

from unfuse.core.clock import Clock
from unfuse.core.errors import NotFound, ProtocolError, RecordDamaged
from unfuse.core.request import RequestContext
from unfuse.core.supervisor import Observers
from unfuse.core.task import Claim, OutputDeltas
from unfuse.queues.base import RequestStore
from unfuse.scheduler.observer import Observer

#: Most outputs that are tracked at one time. The one that is tracked longest is dropped first.
MAX_RATES = 4096

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Output:
    """An output that is still being written."""

    #: Name of the model.
    model: str

    #: When its request was accepted, in Unix seconds.
    created_at: float

    #: Number of chunks that were reported so far: the number of the next one.
    chunks: int

    #: When the last chunk was recorded, in monotonic seconds. None if another scheduler recorded it.
    recorded_at: float | None = None


class OutputRates(Observer):
    """Records output chunks and reports time to first chunk and seconds between chunks.

    A chunk that a later attempt computes again is not counted again.
    """

    def __init__(self, store: RequestStore, clock: Clock, observers: Observers[Observer]) -> None:
        self._store = store
        self._clock = clock
        self._observers = observers
        #: Outputs that are still being written, by the key of the task. The one that is tracked longest is first.
        self._outputs: dict[tuple[str, str], _Output] = {}

    async def append(self, task_deltas: Sequence[OutputDeltas]) -> set[Claim]:
        """Record new output chunks of several tasks. Returns the claims whose chunks are recorded.

        If the chunks of one task are invalid, those of the others are still recorded. Chunks are invalid after a gap,
        for example, which exists if the queue has lost chunks.
        """
        if not task_deltas:
            return set()
        try:
            are_leased = await self._store.append_deltas(task_deltas)
        except ProtocolError as error:
            if len(task_deltas) > 1:  # the queue refuses all of them for one that is invalid, so try each alone
                return {claim for deltas in task_deltas for claim in await self.append([deltas])}
            log.warning("output chunks cannot be recorded", request=task_deltas[0].claim.request, reason=str(error))
            return set()
        recorded = [deltas for deltas, is_leased in zip(task_deltas, are_leased, strict=True) if is_leased]
        for deltas in recorded:
            await self._report_rate(deltas)
        return {deltas.claim for deltas in recorded}

    @override
    def on_ended(self, context: RequestContext) -> None:
        for stage in context.stages:
            self._outputs.pop((context.id, stage), None)

    async def _report_rate(self, deltas: OutputDeltas) -> None:
        """Report recorded chunks to the observers, except those that were reported before."""
        output = self._outputs.get(deltas.claim.key) or await self._track_output(deltas)
        if output is None:
            return
        count = deltas.offset + len(deltas.deltas) - output.chunks
        now = self._clock.now()
        if count <= 0:
            return

        if output.chunks:
            since = None if output.recorded_at is None else now - output.recorded_at
            self._observers.notify(Observer.on_deltas, output.model, count, since)
        else:
            seconds = max(0.0, self._clock.wall() - output.created_at)
            self._observers.notify(Observer.on_first_delta, output.model, count, seconds)
        output.chunks += count
        output.recorded_at = now

    async def _track_output(self, deltas: OutputDeltas) -> _Output | None:
        """Return a new entry for the output of a task, or None.

        None if its request is deleted or damaged.
        """
        try:
            record = self._store.cached_record(deltas.claim) or await self._store.load(deltas.claim.request)
        except (NotFound, RecordDamaged):
            return None
        context = record.context
        self._outputs[deltas.claim.key] = output = _Output(context.request.model, context.created_at, deltas.offset)
        if len(self._outputs) > MAX_RATES:
            del self._outputs[next(iter(self._outputs))]
        return output
