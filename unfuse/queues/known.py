"""Records of requests as this process last heard of them, so that who goes on with one need not load it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from unfuse.core.request import Record, Running
from unfuse.core.task import Claim, Lease

MOST_KNOWN = 1024  # requests that are known at most: those that were stored last


class KnownRecords:
    """What a queue was told of its active records, but for steps. Another process may have changed them since.

    What is decided by one is checked when it is committed: by its version, and by the lease that is shown.
    """

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def keep(self, record: Record) -> Record:
        """This is how a record was stored just now. Returns it."""
        self._records.pop(record.context.id, None)
        if not record.context.over:
            self._records[record.context.id] = record
            if len(self._records) > MOST_KNOWN:
                del self._records[next(iter(self._records))]
        return record

    def leased(self, leases: Iterable[Lease], since: float) -> None:
        """These leases were given, at that time in Unix seconds."""
        for lease in leases:
            task = lease.task
            if record := self._records.get(task.request):
                others = (run for run in record.running if run.stage != task.stage)
                running = (*others, Running(task.stage, task.attempt, lease.worker, since))
                self._records[task.request] = msgspec.structs.replace(record, running=running, position=None)

    def of(self, claim: Claim) -> Record | None:
        """The record of a leased task's request, if that lease was heard of."""
        record = self._records.get(claim.request)
        held = record and any((run.stage, run.attempt) == (claim.stage, claim.attempt) for run in record.running)
        return record if held else None
