"""Records of requests as this process last heard of them, so that who goes on with one need not load it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from unfuse.core.clock import Clock
from unfuse.core.request import Record, Running
from unfuse.core.task import Claim, Lease

MOST_KNOWN = 1024  # requests that are known at most: those that were stored last
KNOWN_S = 10.0  # the longest time, in seconds, that a record is known: the queue may have left out a gap since


class KnownRecords:
    """What a queue was told of its active records, but for steps. Another process may have changed them since.

    What is decided by one is checked when it is committed: by its version, and by the lease that is shown.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[str, tuple[Record, float]] = {}

    def keep(self, record: Record) -> Record:
        """This is how a record was stored just now. Returns it."""
        self._records.pop(record.context.id, None)
        if not record.context.over:
            self._records[record.context.id] = record, self._clock.now()
            if len(self._records) > MOST_KNOWN:
                del self._records[next(iter(self._records))]
        return record

    def leased(self, leases: Iterable[Lease], since: float) -> None:
        """These leases were given, at that time in Unix seconds."""
        for lease in leases:
            task = lease.task
            if record := self._current(task.request):
                others = (run for run in record.running if run.stage != task.stage)
                running = (*others, Running(task.stage, task.attempt, lease.worker, since))
                known = msgspec.structs.replace(record, running=running, position=None)
                self._records[task.request] = known, self._clock.now()

    def of(self, claim: Claim) -> Record | None:
        """The record of a leased task's request, if that lease was heard of."""
        record = self._current(claim.request)
        held = record and any((run.stage, run.attempt) == (claim.stage, claim.attempt) for run in record.running)
        return record if held else None

    def _current(self, request: str) -> Record | None:
        """The record of a request with the time that its stages have run by now; None if that is not known."""
        record, heard = self._records.get(request, (None, 0.0))
        passed = self._clock.now() - heard
        if record is None or passed > KNOWN_S:
            return None
        running = (msgspec.structs.replace(run, ran_s=run.ran_s + passed) for run in record.running)
        return msgspec.structs.replace(record, running=tuple(running))
