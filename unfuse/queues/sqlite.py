"""A durable queue in a SQLite file, for one scheduler process.

The state is in memory, and SQLite is its journal. A method applies a change in memory, as MemoryQueue does, and returns
once it is committed to the file. Readers also wait until the state that they return is committed. All changes made
while a transaction is written go into the next one, in their state at one moment: so the file always has a state that
memory had.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from unfuse.core.clock import Clock, SystemClock
from unfuse.core.errors import ConfigError, RecordDamaged, TransientError
from unfuse.core.paths import expand_path
from unfuse.core.request import Event, RequestRecord, RunningStage
from unfuse.core.task import MAX_DELTAS_PER_MESSAGE, Claim, Lease, OutputDeltas
from unfuse.queues.base import DamagedRecord, DeclaredModels, RenewalResult, RequestFilter
from unfuse.queues.index import EventHistory, IndexEntry
from unfuse.queues.journal import Journal, JournalWriter, RequestRow, StoredTask
from unfuse.queues.memory import MemoryQueue
from unfuse.queues.tasks import QueuedTask

T = TypeVar("T")

#: More than the events of a request between two starts. After a start, their numbers continue at the next multiple,
#: so that no number of an event that was not stored is used twice.
EVENTS_A_START = 2**24


class _UnixClock(Clock):
    """A clock of Unix time that stays valid across restarts.

    Its time is the Unix time at the start plus the monotonic seconds since then.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._shift = clock.wall() - clock.now()

    @override
    def now(self) -> float:
        return self._clock.now() + self._shift

    def wall(self) -> float:
        return self._clock.wall()

    def call_at(self, when: float, callback: Callable[[], object]) -> Callable[[], None]:
        return self._clock.call_at(when - self._shift - 1e-6, callback)  # readings are rounded to 0.2 µs


class SqliteQueue(MemoryQueue):
    """A queue backend in a SQLite file that survives its process.

    While the disk is full, methods that change the queue raise TransientError, and unwritten changes wait. If the file
    cannot be written for another reason, all methods raise TransientError.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(_UnixClock(clock))
        self._journal = Journal(path)
        self._writer = JournalWriter(self._journal, self._row, self._end)
        #: Claims of leases from before the start that were not renewed since.
        self._restored = set[Claim]()

        rows, self._journal.rows = self._journal.rows, []  # the journal's copy is not needed any more
        for number, row in rows:
            self._restore(number, row)
        # Numbers of unreadable rows stay in use: a new request must not replace one of them.
        self._arrivals = max([self._arrivals, *(number + 1 for number, _ in self._journal.damaged.values())])
        self._declared = self._journal.declared
        #: Serializes `declare`, whose check and change have an await between them.
        self._declaring = asyncio.Lock()

    @classmethod
    def open(cls, url: str, clock: Clock | None = None) -> SqliteQueue:
        """Open the queue in the file `sqlite:PATH`.

        Raises ConfigError if the file cannot be used, and TransientError while the disk is full.
        """
        path = url.partition("://" if "://" in url else ":")[2]
        if not path:
            raise ConfigError("a SQLite queue needs the path of a file, such as sqlite:queue.db")
        return cls(expand_path(path).absolute(), clock or SystemClock())

    @override
    def _on_change(self, entry: IndexEntry) -> None:
        self._writer.add(entry)

    @override
    async def _wait_until_stored(self, entry: IndexEntry, durable: bool = False) -> None:
        if durable:
            self._writer.add(entry, durable=True)
        await self._writer.wait_until_written(entry)

    @override
    def _check_writable(self) -> None:
        self._writer.check()

    @override
    def _check_readable(self) -> None:
        self._writer.check_file()

    @override
    async def renew(self, claims: Sequence[Claim], ttl: float) -> RenewalResult:
        renewal = await super().renew(claims, ttl)
        self._restored.difference_update(claims)
        return renewal

    @override
    def _store_pieces(self, entry: IndexEntry, output: OutputDeltas) -> None:
        """Only the file has the output deltas; memory has their number."""
        self._writer.append(entry, output)

    @override
    async def read_deltas(
        self, request: str, stage: str, after: int = 0, limit: int = MAX_DELTAS_PER_MESSAGE
    ) -> builtins.list[bytes]:
        await self._writer.wait_until_written(self._entry(request))
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._journal.thread, self._journal.pieces, request, stage, after, limit)
        except Exception as error:
            raise TransientError(f"the queue's file cannot be read: {error}") from error

    @override
    async def sweep_expired(self, ttl: float) -> builtins.list[Lease]:
        """Leases from before the start that were not renewed since are handed back, not returned."""
        expired = await super().sweep_expired(ttl)
        for lease in expired:
            if lease.claim in self._restored:
                await self.hand_back(lease.claim)
        return [lease for lease in expired if lease.claim not in self._restored]

    @override
    async def load(self, request: str) -> RequestRecord:
        if request in self._journal.damaged:
            raise RecordDamaged(f"the stored record of request {request} cannot be read: see `unfuse dead ls`")
        record = await super().load(request)
        await self._wait_until_stored(self._requests[request])
        return record

    @override
    async def ended_among(self, requests: Sequence[str]) -> builtins.list[str]:
        """Requests whose end cannot be stored, because the disk is full, are left out."""
        # Without unreadable requests: they are not in memory, and would count as unknown.
        ended = await super().ended_among([request for request in requests if request not in self._journal.damaged])
        entries = [(request, self._requests.get(request)) for request in ended]
        return [request for request, entry in entries if entry is None or await self._is_stored(entry)]

    @override
    async def list(
        self, which: RequestFilter, *, after: str | int | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[RequestRecord]:
        records = await super().list(which, after=after, limit=limit, oldest_first=oldest_first)
        listed = builtins.list[RequestRecord]()
        for record, entry in [(record, self._requests[record.context.id]) for record in records]:
            stored = record if await self._is_stored(entry) else await self._last_stored(entry, which)
            listed += [stored] if stored else []
        return listed

    async def _is_stored(self, entry: IndexEntry) -> bool:
        """Wait until the present state of a request is stored, and return whether it is.

        False if the disk is full.
        """
        if not self._writer.is_blocked(entry):  # otherwise each entry would wait for another try to write
            with suppress(TransientError):
                await self._writer.wait_until_written(entry)
                return True
        self._writer.check_file()
        return False

    async def _last_stored(self, entry: IndexEntry, which: RequestFilter) -> RequestRecord | None:
        """Return the last stored record of a request, or None.

        None if nothing is stored, or the filter excludes the record.
        """
        row = await self._in_file("read", self._journal.row, entry.number)
        if row is None:
            return None
        leased = [task for task in row.tasks if task.token]
        running = [RunningStage(task.task.stage, task.task.attempt, task.worker, task.since) for task in leased]
        record = RequestRecord(row.context, tuple(running), None, entry.number)
        stored_entry = IndexEntry(row.context, entry.number, {}, entry.history, status=record.status)
        return record if stored_entry.matches(which) else None

    @override
    def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        """Events are yielded once they are written."""
        return self._watch(self._entry(request), after)

    async def _watch(self, entry: IndexEntry, after: int) -> AsyncIterator[Event]:
        async for event in entry.history.follow(after):
            while not self._writer.is_written(entry):
                with suppress(TransientError):  # while the disk is full, the stream waits
                    await self._writer.wait_until_written(entry)
                    break  # this event is written, even if the entry has changed again
                self._writer.check_file()
            yield event
        self._writer.check_file()

    @override
    async def declare(self, by: str, declaration: DeclaredModels, *, new: bool = False) -> bool:
        self._check_writable()
        async with self._declaring:
            current = self._declared.get(by)
            if current != declaration and not (new and current and current.is_current):
                await self._in_file("written", self._journal.declare, by, declaration)
            return await super().declare(by, declaration, new=new)

    @override
    async def secret(self, name: str, proposed: str) -> str:
        self._check_readable()
        return await self._in_file("written", self._journal.secret, name, proposed)

    @override
    async def damaged(self) -> Sequence[DamagedRecord]:
        return [DamagedRecord(id, "request", reason) for id, (_, reason) in self._journal.damaged.items()]

    @override
    async def discard(self, id: str) -> None:
        if id not in self._journal.damaged:
            await self.drop(id)
            return
        number, _ = self._journal.damaged[id]
        await self._in_file("written", self._journal.write, [(number, None)], True)
        self._journal.damaged.pop(id, None)

    @override
    async def close(self) -> None:
        await super().close()
        await self._writer.close()
        self._journal.close()

    async def _in_file(self, action: str, work: Callable[..., T], *args: Any) -> T:
        """Run a function in the writer thread. Raises TransientError if it fails.

        `action`: "read" or "written", for the error message.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._journal.thread, work, *args)
        except TransientError:
            raise
        except Exception as error:
            raise TransientError(f"the queue's file cannot be {action}: {error}") from error

    def _row(self, entry: IndexEntry) -> RequestRow | None:
        """Return the row to store for a request, or None if it was dropped."""
        if self._requests.get(entry.context.id) is not entry:
            return None
        tasks = []
        for queued in entry.queued:
            leased = self._leases.get(queued.task.key)
            lease_fields = (leased.lease.worker, leased.lease.token, leased.running.since) if leased else ()
            tasks.append(StoredTask(queued.arrival, queued.task, queued.pushed, dict(queued.returned), *lease_fields))
        return RequestRow(
            entry.context, tuple(entry.tasks), tuple(tasks), entry.history.undroppable(), entry.history.last
        )

    def _restore(self, number: int, row: RequestRow) -> None:
        """Restore a stored request and its leases.

        The first call of `sweep_expired` extends the leases, as after any gap.
        """
        context = row.context
        now = self._clock.now()
        last_event = row.last_event if context.is_over else max(row.last_event, self._journal.start * EVENTS_A_START)
        appended = self._journal.deltas.pop(context.id, {})
        entry = IndexEntry(
            context, number, dict.fromkeys(row.stages), EventHistory(row.events, last_event), appended=appended
        )
        self._requests[context.id] = entry
        self._arrivals = max([self._arrivals, number + 1, *(stored.arrival + 1 for stored in row.tasks)])

        for stored in row.tasks:
            queued = QueuedTask(stored.task, stored.arrival, stored.pushed, stored.returned)
            entry.tasks[stored.task.stage] = queued
            if stored.token:
                lease = Lease(stored.task, stored.worker, stored.token, now)
                self._leases.add(queued, lease, now, stored.since)
                self._restored.add(lease.claim)
            else:
                self._put(queued)
        self._publish(entry, ())
        self._update_index(entry)
        self._account(entry, None)
