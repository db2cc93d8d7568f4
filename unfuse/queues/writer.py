"""Writes changed entries to the journal, and lets callers wait until they are written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from unfuse.core.errors import TransientError
from unfuse.queues.index import Entry
from unfuse.queues.journal import Journal
from unfuse.queues.row import Pieces, Row

FULL_PAUSE_S = 1.0  # seconds until a write is tried again after the disk was full

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Batch:
    """One transaction: changed requests, new pieces by requests' numbers; `done` is set when it has ended."""

    done: asyncio.Future[None]
    entries: dict[int, Entry] = field(default_factory=dict)
    pieces: dict[int, list[Pieces]] = field(default_factory=dict)
    durable: bool = False


def _merged(batches: Sequence[_Batch]) -> _Batch:
    """One batch with the content of these."""
    merged = _Batch(asyncio.get_running_loop().create_future())
    for batch in batches:
        merged.entries |= batch.entries
        for number, pieces in batch.pieces.items():
            merged.pieces.setdefault(number, []).extend(pieces)
        merged.durable |= batch.durable
    return merged


class Writer:
    """Writes one transaction after the other; each has all that changed during the one before.

    `row` gives the row of an entry when its transaction begins. While the disk is full, writing is tried again. When
    the file cannot be written for another reason, `broken` is called, and nothing is written any more.
    """

    def __init__(self, journal: Journal, row: Callable[[Entry], Row | None], broken: Callable[[], object]) -> None:
        self._journal, self._row, self._on_broken = journal, row, broken
        self._writing: _Batch | None = None
        self._next: _Batch | None = None
        self._broken = self._full = ""
        self._trying: asyncio.TimerHandle | None = None

    def check(self) -> None:
        """Raise TransientError while nothing can be written. To be called before each change."""
        self.check_file()
        if self._full:
            raise TransientError(self._full)

    def check_file(self) -> None:
        """Raise TransientError once writing has failed for good."""
        if self._broken:
            raise TransientError(self._broken)

    def note(self, entry: Entry, durable: bool = False) -> Entry:
        """Have the next transaction write this entry, and sync the disk if `durable`."""
        if batch := self._upcoming():
            batch.entries[entry.number] = entry
            batch.durable |= durable
        return entry

    def append(self, entry: Entry, pieces: Pieces) -> None:
        """Have the next transaction add pieces of an entry's stage, and sync the disk."""
        if batch := self._upcoming():
            batch.pieces.setdefault(entry.number, []).append(pieces)
            batch.durable = True

    def is_blocked(self, entry: Entry) -> bool:
        """Whether a change of the entry waits for room on the disk."""
        return bool(self._full and self._unwritten(entry))

    def is_written(self, entry: Entry) -> bool:
        """Whether no change of the entry waits to be written."""
        return not self._unwritten(entry)

    async def wait_until_written(self, entry: Entry) -> None:
        """Wait until the entry is written as it is now. Raises TransientError if the disk is full or writing failed."""
        for batch in self._unwritten(entry)[-1:]:
            await asyncio.shield(batch.done)
            if self.is_blocked(entry):
                raise TransientError(self._full)
        self.check_file()

    async def close(self) -> None:
        """Write everything that is left, unless the disk is full."""
        while (batch := self._next or self._writing) and not self._full:
            await batch.done
        if self._trying is not None:
            self._trying.cancel()

    def _upcoming(self) -> _Batch | None:
        """The batch of the next transaction, if there will be one."""
        if self._next is None and not self._broken:
            loop = asyncio.get_running_loop()
            self._next = _Batch(loop.create_future())
            loop.call_soon(self._flush)
        return self._next

    def _unwritten(self, entry: Entry) -> list[_Batch]:
        batches = [batch for batch in (self._writing, self._next) if batch]
        return [batch for batch in batches if entry.number in batch.entries or entry.number in batch.pieces]

    def _flush(self) -> None:
        """Begin the next transaction, unless one is being written."""
        if self._writing is None and self._next is not None:
            batch, self._next = self._next, None
            self._writing = batch
            try:
                rows = [(number, self._row(entry)) for number, entry in batch.entries.items()]
                dropped = {number for number, row in rows if row is None}
                pieces = [one for number in batch.pieces.keys() - dropped for one in batch.pieces[number]]
                loop = asyncio.get_running_loop()
                writing = loop.run_in_executor(self._journal.thread, self._journal.write, rows, batch.durable, pieces)
                writing.add_done_callback(lambda written: self._written(written.exception()))
            except Exception as error:  # otherwise callers would wait for ever
                self._written(error)

    def _written(self, error: BaseException | None) -> None:
        """A transaction has ended: begin the next one, or the same again later if the disk was full."""
        batches, self._writing = [self._writing], None
        if error is not None:
            batches, self._next = [*batches, self._next], None
            if not self._full:
                log.error("the queue's file cannot be written", file=str(self._journal.path), reason=str(error))
        self._full = ""
        if isinstance(error, TransientError):
            self._full = "the disk of the queue is full: nothing is accepted or changed until there is room again"
            self._next = _merged([batch for batch in batches if batch])
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
