"""The queue on disk, for one scheduler process: the state in memory decides, and SQLite is its journal.

A method applies a change in memory, as MemoryQueue does, and returns when it is committed to the file. Readers, too,
wait until what they read is committed. Everything that changes while a transaction is being written goes into the next
one, as memory has it at one moment: so the file always has a state that memory had.
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
from unfuse.core.errors import ConfigError, Damaged, TransientError
from unfuse.core.paths import expanded
from unfuse.core.request import Event, RequestRecord, RunningStage
from unfuse.core.task import PIECES_AT_ONCE, Claim, Lease, OutputDeltas
from unfuse.queues.base import DamagedRecord, DeclaredModels, RenewalResult, RequestFilter
from unfuse.queues.index import EventHistory, IndexEntry
from unfuse.queues.journal import Journal, JournalWriter, RequestRow, StoredTask
from unfuse.queues.memory import MemoryQueue
from unfuse.queues.tasks import QueuedTask

T = TypeVar("T")

EVENTS_A_START = 2**24  # above a request's events between two starts: numbers go on at the next multiple after one


class _UnixClock(Clock):
    """A clock whose readings stay valid after a restart: Unix time at the start plus monotonic seconds since."""

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
    """A queue that survives its process. While the disk is full, methods that change anything raise TransientError, and
    what is not written yet waits. If the file cannot be written for another reason, all methods raise TransientError.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(_UnixClock(clock))
        self._journal = Journal(path)
        self._writer = JournalWriter(self._journal, self._row, self._end)
        self._restored = set[Claim]()  # of leases from before the start that were not renewed since
        rows, self._journal.rows = self._journal.rows, []
        for number, row in rows:
            self._restore(number, row)
        self._arrivals = max([self._arrivals, *(number + 1 for number, _ in self._journal.damaged.values())])
        self._declared, self._declaring = self._journal.declared, asyncio.Lock()

    @classmethod
    def at(cls, url: str, clock: Clock | None = None) -> SqliteQueue:
        """Open the queue in the file `sqlite:PATH`.

        Raises ConfigError if it cannot be kept there, and TransientError while the disk is full.
        """
        path = url.partition("://" if "://" in url else ":")[2]
        if not path:
            raise ConfigError("a SQLite queue is kept in a file: give its path, as in sqlite:queue.db")
        return cls(expanded(path).absolute(), clock or SystemClock())

    @override
    def _on_change(self, entry: IndexEntry) -> None:
        self._writer.note(entry)

    @override
    async def _wait_until_stored(self, entry: IndexEntry, durable: bool = False) -> None:
        if durable:
            self._writer.note(entry, durable=True)
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
    def _store_pieces(self, entry: IndexEntry, grown: OutputDeltas) -> None:
        """Memory has only the number of pieces; the file has the pieces."""
        self._writer.append(entry, grown)

    @override
    async def appended(
        self, request: str, stage: str, after: int = 0, limit: int = PIECES_AT_ONCE
    ) -> builtins.list[bytes]:
        await self._writer.wait_until_written(self._entry(request))
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._journal.thread, self._journal.pieces, request, stage, after, limit)
        except Exception as error:
            raise TransientError(f"the queue's file cannot be read: {error}") from error

    @override
    async def expired(self, ttl: float) -> builtins.list[Lease]:
        """A lease from before the start that was never renewed since is handed back."""
        late = await super().expired(ttl)
        for lease in late:
            if lease.claim in self._restored:
                await self.hand_back(lease.claim)
        return [lease for lease in late if lease.claim not in self._restored]

    @override
    async def load(self, request: str) -> RequestRecord:
        if request in self._journal.damaged:
            raise Damaged(f"the stored record of request {request} cannot be read: see `unfuse dead ls`")
        record = await super().load(request)
        await self._wait_until_stored(self._requests[request])
        return record

    @override
    async def over(self, requests: Sequence[str]) -> builtins.list[str]:
        """Leaves out a request whose end cannot be stored now."""
        found = await super().over([request for request in requests if request not in self._journal.damaged])
        over = [(request, self._requests.get(request)) for request in found]
        return [request for request, entry in over if entry is None or await self._is_stored(entry)]

    @override
    async def list(
        self, which: RequestFilter, *, after: str | int | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[RequestRecord]:
        records = await super().list(which, after=after, limit=limit, oldest_first=oldest_first)
        listed = builtins.list[RequestRecord]()
        for record, entry in [(record, self._requests[record.context.id]) for record in records]:
            found = record if await self._is_stored(entry) else await self._last_stored(entry, which)
            listed += [found] if found else []
        return listed

    async def _is_stored(self, entry: IndexEntry) -> bool:
        """Return True when a request is stored as it is now, False if that is impossible until there is room."""
        if not self._writer.is_blocked(entry):  # else the next attempt to write would be waited for, entry by entry
            with suppress(TransientError):
                await self._writer.wait_until_written(entry)
                return True
        self._writer.check_file()
        return False

    async def _last_stored(self, entry: IndexEntry, which: RequestFilter) -> RequestRecord | None:
        """The record of a request as it was stored last; None if it was not, or the filter does not select that."""
        row = await self._in_file("read", self._journal.row, entry.number)
        if row is None:
            return None
        running = [
            RunningStage(one.task.stage, one.task.attempt, one.worker, one.since) for one in row.tasks if one.token
        ]
        record = RequestRecord(row.context, tuple(running), None, entry.number)
        stored = IndexEntry(row.context, entry.number, {}, entry.history, status=record.status)
        return record if stored.fits(which) else None

    @override
    def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        """An event comes after it is written."""
        return self._watch(self._entry(request), after)

    async def _watch(self, entry: IndexEntry, after: int) -> AsyncIterator[Event]:
        async for event in entry.history.follow(after):
            while not self._writer.is_written(entry):
                with suppress(TransientError):  # while the disk is full, the stream waits
                    await self._writer.wait_until_written(entry)
                    break  # whatever has changed since
                self._writer.check_file()
            yield event
        self._writer.check_file()

    @override
    async def declare(self, by: str, declaration: DeclaredModels, *, new: bool = False) -> bool:
        self._check_writable()
        async with self._declaring:
            known = self._declared.get(by)
            if known != declaration and not (new and known and known.is_current):
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

    async def _in_file(self, done: str, work: Callable[..., T], *args: Any) -> T:
        """Run this in the thread that writes. Raises TransientError if the file cannot be `done` so."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._journal.thread, work, *args)
        except TransientError:
            raise
        except Exception as error:
            raise TransientError(f"the queue's file cannot be {done}: {error}") from error

    def _row(self, entry: IndexEntry) -> RequestRow | None:
        """The row to store for a request; None if it was dropped."""
        if self._requests.get(entry.context.id) is not entry:
            return None
        tasks = []
        for queued in entry.queued:
            leased = self._leases.of(queued.task.key)
            held = (leased.lease.worker, leased.lease.token, leased.running.since) if leased else ()
            tasks.append(StoredTask(queued.arrival, queued.task, queued.pushed, dict(queued.returned), *held))
        return RequestRow(entry.context, tuple(entry.tasks), tuple(tasks), entry.history.lasting(), entry.history.last)

    def _restore(self, number: int, row: RequestRow) -> None:
        """Load a stored request. The first call of `expired` extends its leases, as after any gap."""
        context, now = row.context, self._clock.now()
        last = row.last if context.over else max(row.last, self._journal.start * EVENTS_A_START)
        appended = self._journal.appended.pop(context.id, {})
        entry = IndexEntry(
            context, number, dict.fromkeys(row.stages), EventHistory(row.events, last), appended=appended
        )
        self._requests[context.id] = entry
        self._arrivals = max([self._arrivals, number + 1, *(stored.arrival + 1 for stored in row.tasks)])
        for stored in row.tasks:
            queued = QueuedTask(stored.task, stored.arrival, stored.pushed, stored.returned)
            entry.tasks[stored.task.stage] = queued
            if stored.token:
                lease = Lease(stored.task, stored.worker, stored.token, now)
                self._leases.give(queued, lease, now, stored.since)
                self._restored.add(lease.claim)
            else:
                self._put(queued)
        self._publish(entry, ())
        self._update_index(entry)
        self._account(entry, None)
