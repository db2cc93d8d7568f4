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

from unfuse.core.card import ModelCard
from unfuse.core.clock import Clock
from unfuse.core.errors import ConfigError, Damaged, TransientError
from unfuse.core.event import Event
from unfuse.core.growth import PIECES_AT_ONCE, Grown
from unfuse.core.messages import WorkerInfo
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Change, Record, RequestContext
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import Damage, Declaration, Filter, Limits, Member, Renewal, Stats, TaskQueue
from unfuse.queues.index import Entry
from unfuse.queues.journal import Journal
from unfuse.queues.row import Pieces, Row
from unfuse.queues.state import QueueState
from unfuse.queues.waiters import Waiters, follow
from unfuse.queues.wanted import Wanted
from unfuse.queues.writer import Writer
from unfuse.supervision.clock import SystemClock

EVENTS_A_START = 2**24
"""More than the events of one request between two starts: after a start, numbers go on at the next multiple."""


class _UnixClock(Clock):
    """A clock whose readings stay valid after a restart: Unix time at the start plus monotonic seconds since."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._shift = clock.wall() - clock.now()

    def now(self) -> float:
        return self._clock.now() + self._shift

    def wall(self) -> float:
        return self._clock.wall()

    def call_at(self, when: float, callback: Callable[[], object]) -> Callable[[], None]:
        return self._clock.call_at(when - self._shift - 1e-6, callback)  # readings are rounded to 0.2 µs


class SqliteQueue(TaskQueue):
    """A queue that survives its process. While the disk is full, methods that change anything raise TransientError, and
    what is not written yet waits. If the file cannot be written for another reason, all methods raise TransientError.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock = _UnixClock(clock)
        self._journal = Journal(path)
        self._state = QueueState(self._clock, lambda entry: self._writer.note(entry))
        self._waiters = Waiters(self._state, self._clock)
        self._writer = Writer(self._journal, self._state.row, self._end)
        rows, self._journal.rows = self._journal.rows, []
        self._restored = {claim for number, row in rows for claim in self._restore(number, row)}
        for number, _ in self._journal.damaged.values():
            self._state.reserve(number)

    @classmethod
    def at(cls, url: str, clock: Clock | None = None) -> SqliteQueue:
        """Open the queue in the file `sqlite:PATH`. Raises ConfigError if it cannot be kept there."""
        path = url.partition("://" if "://" in url else ":")[2]
        if not path:
            raise ConfigError("a SQLite queue is kept in a file: give its path, as in sqlite:queue.db")
        return cls(Path(path).expanduser().absolute(), clock or SystemClock())

    async def now(self) -> float:
        """Unix seconds at the start plus the monotonic seconds since."""
        return self._clock.now()

    async def check(self) -> None:
        """Raise TransientError while the disk is full, and after a write has failed for good."""
        self._writer.check()

    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: Limits
    ) -> Record:
        """Store a new request; a repeat returns the stored one."""
        self._writer.check()
        return await self._when_written(self._state.submit(context, tasks, events, limits))

    async def lease(self, worker: str, wanted: Wanted, ttl: float, wait: float = 0.0) -> list[Lease]:
        """Claim tasks. Returns before the leases are written: after a crash, a task may be leased a second time."""
        self._writer.check()
        leases = await self._waiters.claim(worker, wanted, ttl, wait)
        self._writer.check_file()
        return leases

    async def renew(self, claims: Sequence[Claim], ttl: float) -> Renewal:
        """Extend the leases that are held, in memory."""
        if claims:
            self._writer.check()
        self._restored.difference_update(claims)
        return self._state.renew(claims, ttl)

    async def progress(self, claim: Claim, events: Sequence[Event]) -> bool:
        """Publish progress of a lease that is held, in memory."""
        self._writer.check()
        return self._state.progress(claim, events)

    async def append_all(self, grown: Sequence[Grown]) -> list[bool]:
        """Record pieces; returns when they are written. Memory has only their number."""
        self._writer.check()
        new = self._state.append(grown)
        entries = [self._state.entry(one.claim.request) for one in new if one]
        for entry, one in zip(entries, filter(None, new), strict=True):
            if one.pieces:
                self._writer.append(entry, Pieces(entry.context.id, one.claim.stage, one.offset, one.pieces))
        for entry in entries:  # also of a repeat, of which the first may not be written yet
            await self._writer.wait_until_written(entry)
        return [one is not None for one in new]

    async def appended(self, request: str, stage: str, after: int = 0, limit: int = PIECES_AT_ONCE) -> list[bytes]:
        """The pieces of a stage, once they are written."""
        await self._writer.wait_until_written(self._entry(request))
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._journal.thread, self._journal.pieces, request, stage, after, limit)
        except Exception as error:
            raise TransientError(f"the queue's file cannot be read: {error}") from error

    async def commit(self, change: Change) -> Record:
        """Apply a transition."""
        self._writer.check()
        return await self._when_written(self._state.commit(change))

    async def commit_and_lease(
        self, change: Change, worker: str, wanted: Wanted, ttl: float
    ) -> tuple[Record, list[Lease]]:
        """Apply a transition and claim tasks in one transaction; returns when it is written."""
        self._writer.check()
        entry = self._state.commit(change)
        leases = self._state.claim(worker, wanted, ttl)
        try:
            return await self._when_written(entry), leases
        except BaseException:  # nobody learns of these leases
            for lease in leases:
                self._state.hand_back(lease.claim)
            self._waiters.wake()
            raise

    async def hand_back(self, claim: Claim) -> bool:
        """Return a leased task to its place."""
        self._writer.check()
        was_held = self._state.hand_back(claim)
        self._waiters.wake()
        if was_held:
            await self._writer.wait_until_written(self._state.entry(claim.request))
        return was_held

    async def turn_down(self, claim: Claim) -> int:
        """Return a leased task to its place, and count that for its worker."""
        self._writer.check()
        excluded = self._state.turn_down(claim)
        self._waiters.wake()
        await self._writer.wait_until_written(self._state.entry(claim.request))
        return excluded

    async def expired(self, ttl: float) -> builtins.list[Lease]:
        """Leases whose time has passed. A lease from before the start that was never renewed since is handed back."""
        self._writer.check()
        late = self._state.expired(ttl)
        for lease in late:
            if lease.claim in self._restored:
                await self.hand_back(lease.claim)
        return [lease for lease in late if lease.claim not in self._restored]

    async def load(self, request: str) -> Record:
        """The stored record of a request."""
        if request in self._journal.damaged:
            raise Damaged(f"the stored record of request {request} cannot be read: see `unfuse dead ls`")
        entry = self._entry(request)
        record = self._state.record(entry)
        await self._writer.wait_until_written(entry)
        return record

    async def over(self, requests: Sequence[str]) -> builtins.list[str]:
        """Which of these requests are over or unknown, once that is written."""
        self._writer.check_file()
        over = [request for request in self._state.over(requests) if request not in self._journal.damaged]
        for request in over:
            if entry := self._state.requests.get(request):
                await self._writer.wait_until_written(entry)
        return over

    async def list(
        self, which: Filter, *, after: str | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[Record]:
        """Requests in the order of their arrival."""
        self._writer.check_file()
        entries = self._state.list(which, after, limit, oldest_first)
        records = [self._state.record(entry) for entry in entries]
        for entry in entries:
            await self._writer.wait_until_written(entry)
        return records

    async def size(self, pool: str) -> int:
        """The number of tasks that wait in a pool, delayed ones included."""
        return self._state.size(pool)

    async def stats(self, pools: Sequence[str]) -> Stats:
        """The number of active requests, and the statistics of these pools."""
        return self._state.stats(pools)

    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        """The tasks of a pool that would be leased next."""
        return self._state.peek(pool, limit)

    def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        """Follow a request's history; an event comes after it is written."""
        return self._watch(self._entry(request), after)

    async def cache(self, key: str, ref: ObjectRef, room: int) -> None:
        """Put an output into the cache; remove the least recently used ones above `room` bytes."""
        self._state.cached.add(key, ref, room)

    async def cached(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        """Find cached outputs."""
        return self._state.cached.find(keys, use)

    async def cached_bytes(self) -> int:
        """Bytes of all cached outputs."""
        return self._state.cached.bytes

    async def uncache(self, key: str, id: str) -> None:
        """Remove this object from the cache."""
        self._state.cached.remove(key, id)

    async def hello(self, worker: WorkerInfo, cards: Sequence[ModelCard] = ()) -> None:
        """Register a worker. One that brings no cards keeps those that it brought before."""
        self._state.members.hello(worker, cards, self._clock.now())

    async def bye(self, worker: str) -> None:
        """Forget a worker."""
        self._state.bye(worker)

    async def declare(self, by: str, declaration: Declaration) -> None:
        """Store a declaration."""
        self._state.members.declared[by] = declaration

    async def declared(self) -> dict[str, Declaration]:
        """All declarations."""
        return dict(self._state.members.declared)

    async def workers(self) -> Sequence[Member]:
        """All registered workers. The registry is empty after a start, until workers register again."""
        self._writer.check_file()
        return self._state.workers()

    async def damaged(self) -> Sequence[Damage]:
        """The rows that could not be read at the start."""
        return [Damage(id, "request", reason) for id, (_, reason) in self._journal.damaged.items()]

    async def discard(self, id: str) -> None:
        """Delete a row that cannot be read, or drop a request that is over."""
        if id not in self._journal.damaged:
            await self.drop(id)
            return
        number, _ = self._journal.damaged[id]
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._journal.thread, self._journal.write, [(number, None)], True)
        except Exception as error:
            raise TransientError(f"the queue's file cannot be written: {error}") from error
        self._journal.damaged.pop(id, None)

    async def forget(self, before: float) -> Sequence[str]:
        """Drop requests that ended before the Unix time `before`."""
        old = [entry.context.id for entry in self._state.over_before(before)]
        for request in old:
            await self.drop(request)
        return old

    async def drop(self, request: str) -> None:
        """Drop a request, if it is over."""
        if entry := self._state.drop(request):
            await self._writer.wait_until_written(entry)

    async def close(self) -> None:
        """Wake all callers that wait, write what is not written, and close the file."""
        self._end()
        await self._writer.close()
        self._journal.close()

    def _end(self) -> None:
        self._waiters.close()
        self._state.end()

    def _entry(self, request: str) -> Entry:
        self._writer.check_file()
        return self._state.entry(request)

    async def _when_written(self, entry: Entry) -> Record:
        """Wait until the entry is on the disk, and return its record as it is now."""
        self._waiters.wake()
        record = self._state.record(entry)
        await self._writer.wait_until_written(self._writer.note(entry, durable=True))
        return record

    async def _watch(self, entry: Entry, after: int) -> AsyncIterator[Event]:
        async for event in follow(entry.history, after):
            while not self._writer.is_written(entry):
                with suppress(TransientError):  # while the disk is full, the stream waits
                    await self._writer.wait_until_written(entry)
                    break  # whatever has changed since
                self._writer.check_file()
            yield event
        self._writer.check_file()

    def _restore(self, number: int, row: Row) -> builtins.list[Claim]:
        last = row.last if row.context.over else max(row.last, self._journal.start * EVENTS_A_START)
        claims = self._state.restore(number, row, last)
        self._state.requests[row.context.id].appended = self._journal.appended.pop(row.context.id, {})
        return claims
