"""What a journal still has to write, and those who wait until it is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from unfuse.core.errors import TransientError
from unfuse.queues.index import Entry
from unfuse.queues.journal import Journal
from unfuse.queues.row import Row

FULL_PAUSE_S = 1.0
"""How long after the disk was found full it is tried again."""

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Batch:
    """What one transaction writes: requests that have changed, by number."""

    done: asyncio.Future[None]
    entries: dict[int, Entry] = field(default_factory=dict)
    durable: bool = False


def _merged(batches: Sequence[_Batch]) -> _Batch:
    """What these were to write, to be written by one transaction."""
    merged = _Batch(asyncio.get_running_loop().create_future())
    for batch in batches:
        merged.entries |= batch.entries
        merged.durable |= batch.durable
    return merged


class Writer:
    """All that changes while one transaction is being written goes into the next, as `row` says it stands when that
    begins. While the disk is full it waits for room; when the file cannot be written for another reason, `broken` is
    called, and nothing is written any more.
    """

    def __init__(self, journal: Journal, row: Callable[[Entry], Row | None], broken: Callable[[], object]) -> None:
        self._journal, self._row, self._on_broken = journal, row, broken
        self._writing: _Batch | None = None
        self._coming: _Batch | None = None
        self._broken = self._full = ""
        self._trying: asyncio.TimerHandle | None = None

    def check(self) -> None:
        """Before a change: nothing is changed that cannot be written. Raises TransientError."""
        self.check_file()
        if self._full:
            raise TransientError(self._full)

    def check_file(self) -> None:
        """Raise TransientError once the file could not be written."""
        if self._broken:
            raise TransientError(self._broken)

    def note(self, entry: Entry, durable: bool = False) -> Entry:
        """An entry has changed: the next transaction writes it."""
        if not self._broken:
            if self._coming is None:
                loop = asyncio.get_running_loop()
                self._coming = _Batch(loop.create_future())
                loop.call_soon(self._flush)
            self._coming.entries[entry.number] = entry
            self._coming.durable |= durable
        return entry

    def is_written(self, entry: Entry) -> bool:
        """Whether an entry is written as it is now."""
        return not self._unwritten(entry)

    async def settled(self, entry: Entry) -> None:
        """Wait until an entry is written as it is now. Raises TransientError when it cannot be, or not yet."""
        for batch in self._unwritten(entry)[-1:]:
            await asyncio.shield(batch.done)
            if self._full and self._unwritten(entry):
                raise TransientError(self._full)
        self.check_file()

    async def close(self) -> None:
        """Write what is not written, unless the disk is full."""
        while (batch := self._coming or self._writing) and not self._full:
            await batch.done
        if self._trying is not None:
            self._trying.cancel()

    def _unwritten(self, entry: Entry) -> list[_Batch]:
        return [batch for batch in (self._writing, self._coming) if batch and entry.number in batch.entries]

    def _flush(self) -> None:
        """Have the next transaction written, unless one still is."""
        if self._writing is None and self._coming is not None:
            batch, self._coming = self._coming, None
            self._writing = batch
            try:
                rows = [(number, self._row(entry)) for number, entry in batch.entries.items()]
                loop = asyncio.get_running_loop()
                writing = loop.run_in_executor(self._journal.thread, self._journal.write, rows, batch.durable)
                writing.add_done_callback(lambda written: self._written(written.exception()))
            except Exception as error:  # or everyone would wait for what nobody writes
                self._written(error)

    def _written(self, error: BaseException | None) -> None:
        """A transaction is over: go on with the next, or with the same again where the disk is full."""
        batches, self._writing = [self._writing], None
        if error is not None:
            batches, self._coming = [*batches, self._coming], None
            if not self._full:
                log.error("the queue's file cannot be written", file=str(self._journal.path), reason=str(error))
        self._full = ""
        if isinstance(error, TransientError):
            self._full = "the disk of the queue is full: nothing is accepted or changed until there is room again"
            self._coming = _merged([batch for batch in batches if batch])
            self._trying = asyncio.get_running_loop().call_later(FULL_PAUSE_S, self._flush)
        elif error is not None:
            self._broken = (
                f"the queue's file cannot be written ({error}): repair the disk, then start the server again; "
                "all that was accepted is kept"
            )
            self._on_broken()
        for batch in filter(None, batches):
            batch.done.set_result(None)
        if error is None:
            self._flush()
