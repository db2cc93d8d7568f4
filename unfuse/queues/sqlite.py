"""The queue on disk, for one scheduler process: the state in memory decides, and SQLite is its journal.

A method decides and applies in memory, as MemoryQueue does, and returns once what it changed is committed; readers too
are told only what is. All that changed while one transaction was being written goes into the next one, as it stands
in memory at one moment: the file always holds what memory held at some moment.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from unfuse.core.card import ModelCard
from unfuse.core.clock import AlarmClock, Clock
from unfuse.core.errors import ConfigError, Damaged, TransientError
from unfuse.core.event import Event
from unfuse.core.messages import WorkerInfo
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Change, Record, RequestContext
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import Damage, Declaration, Filter, Limits, Member, Renewal, Stats, TaskQueue
from unfuse.queues.index import Entry
from unfuse.queues.journal import Journal
from unfuse.queues.row import Row
from unfuse.queues.state import QueueState
from unfuse.queues.waiters import Waiters, call_at, follow
from unfuse.queues.wanted import Wanted
from unfuse.queues.writer import Writer

EVENTS_A_START = 2**24
"""More events than one request publishes between two starts: numbers continue at the next multiple."""


class _UnixClock(AlarmClock):
    """A clock whose readings mean the same after a restart: Unix time at the start, and what has passed since."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._shift = clock.wall() - clock.now()

    def now(self) -> float:
        return self._clock.now() + self._shift

    def wall(self) -> float:
        return self._clock.wall()

    def call_at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        return call_at(self._clock, when - self._shift - 1e-6, callback)  # readings are rounded to 0.2 µs


class SqliteQueue(TaskQueue):
    """A queue that survives its process. While its disk is full, what would change anything is refused, and what is not
    written yet waits for room. When its file cannot be written for another reason, it does nothing any more.
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
    def at(cls, url: str, clock: Clock) -> SqliteQueue:
        """The queue in the file `sqlite:PATH`. Raises ConfigError when it cannot be kept there."""
        path = url.partition("://" if "://" in url else ":")[2]
        if not path:
            raise ConfigError("a SQLite queue is kept in a file: give its path, as in sqlite:queue.db")
        return cls(Path(path).expanduser().absolute(), clock)

    async def now(self) -> float:
        """Unix seconds at the start, and what has passed since."""
        return self._clock.now()

    async def check(self) -> None:
        """Raise TransientError while the disk is full, and once the file could not be written."""
        self._writer.check()

    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: Limits
    ) -> Record:
        """Store a new request, once."""
        self._writer.check()
        return await self._kept(self._state.submit(context, tasks, events, limits))

    async def lease(self, worker: str, wanted: Wanted, ttl: float, wait: float = 0.0) -> list[Lease]:
        """Claim tasks. This is written with what comes next and not waited for: at worst a task is leased twice."""
        self._writer.check()
        leases = await self._waiters.claim(worker, wanted, ttl, wait)
        self._writer.check_file()
        return leases

    async def renew(self, claims: Sequence[Claim], ttl: float) -> Renewal:
        """Extend what is held, in memory."""
        if claims:
            self._writer.check()
        self._restored.difference_update(claims)
        return self._state.renew(claims, ttl)

    async def progress(self, claim: Claim, events: Sequence[Event]) -> bool:
        """Publish while held, in memory."""
        self._writer.check()
        return self._state.progress(claim, events)

    async def commit(self, change: Change) -> Record:
        """Apply a transition."""
        self._writer.check()
        return await self._kept(self._state.commit(change))

    async def commit_and_lease(
        self, change: Change, worker: str, wanted: Wanted, ttl: float
    ) -> tuple[Record, list[Lease]]:
        """Apply a transition, then claim tasks; both are in one transaction, which is waited for."""
        self._writer.check()
        entry = self._state.commit(change)
        leases = self._state.claim(worker, wanted, ttl)
        return await self._kept(entry), leases

    async def hand_back(self, claim: Claim) -> bool:
        """Put a leased task back where it stood."""
        self._writer.check()
        was_held = self._state.hand_back(claim)
        self._waiters.tell()
        if was_held:
            await self._writer.settled(self._state.entry(claim.request))
        return was_held

    async def turn_down(self, claim: Claim) -> int:
        """Put a leased task back where it stood, and remember whose it was."""
        self._writer.check()
        done_with = self._state.turn_down(claim)
        self._waiters.tell()
        await self._writer.settled(self._state.entry(claim.request))
        return done_with

    async def expired(self, ttl: float) -> builtins.list[Lease]:
        """Leases whose time has passed. One from before the start that nobody has renewed since is handed back."""
        self._writer.check()
        late = self._state.expired(ttl)
        for lease in late:
            if lease.claim in self._restored:
                await self.hand_back(lease.claim)
        return [lease for lease in late if lease.claim not in self._restored]

    async def load(self, request: str) -> Record:
        """The stored request."""
        if request in self._journal.damaged:
            raise Damaged(f"what is stored of request {request} cannot be read, `unfuse dead ls` lists it")
        entry = self._entry(request)
        record = self._state.record(entry)
        await self._writer.settled(entry)
        return record

    async def over(self, requests: Sequence[str]) -> builtins.list[str]:
        """Which of these are over, or not known, by what is written."""
        self._writer.check_file()
        over = [request for request in self._state.over(requests) if request not in self._journal.damaged]
        for request in over:
            if entry := self._state.requests.get(request):
                await self._writer.settled(entry)
        return over

    async def list(
        self, which: Filter, *, after: str | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[Record]:
        """Requests in the order of their arrival."""
        self._writer.check_file()
        entries = self._state.list(which, after, limit, oldest_first)
        records = [self._state.record(entry) for entry in entries]
        for entry in entries:
            await self._writer.settled(entry)
        return records

    async def size(self, pool: str) -> int:
        """Tasks that wait, their time come or not."""
        return self._state.size(pool)

    async def stats(self, pools: Sequence[str]) -> Stats:
        """How much there is to do."""
        return self._state.stats(pools)

    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        """The tasks that would be leased next."""
        return self._state.peek(pool, limit)

    def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        """Follow a request's history, behind what is written of it."""
        return self._watch(self._entry(request), after)

    async def cache(self, key: str, ref: ObjectRef, room: int) -> None:
        """Keep a handle, and no more than there is room for."""
        self._state.cached.keep(key, ref, room)

    async def cached(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        """Look handles up."""
        return self._state.cached.find(keys, use)

    async def cached_bytes(self) -> int:
        """Their sum."""
        return self._state.cached.bytes

    async def uncache(self, key: str, id: str) -> None:
        """Give that object up."""
        self._state.cached.lose(key, id)

    async def hello(self, worker: WorkerInfo, cards: Sequence[ModelCard] = ()) -> None:
        """Register a worker; cards it brought before are kept when it brings none."""
        self._state.registry.hello(worker, cards, self._clock.now())

    async def bye(self, worker: str) -> None:
        """Forget a worker."""
        self._state.registry.bye(worker)

    async def declare(self, by: str, declaration: Declaration) -> None:
        """Keep what somebody declares."""
        self._state.registry.declared[by] = declaration

    async def declared(self) -> dict[str, Declaration]:
        """All of it."""
        return dict(self._state.registry.declared)

    async def workers(self) -> Sequence[Member]:
        """The registry, which is new after a start: workers say that they live."""
        self._writer.check_file()
        return self._state.workers()

    async def damaged(self) -> Sequence[Damage]:
        """Rows that could not be read at the start."""
        return [Damage(id, "request", reason) for id, (_, reason) in self._journal.damaged.items()]

    async def discard(self, id: str) -> None:
        """Delete such a row, or drop one that is over."""
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
        """Drop requests that were over before `before`."""
        old = [entry.context.id for entry in self._state.over_before(before)]
        for request in old:
            await self.drop(request)
        return old

    async def drop(self, request: str) -> None:
        """Drop one that is over."""
        if entry := self._state.drop(request):
            await self._writer.settled(entry)

    async def close(self) -> None:
        """Wake everyone who waits, write what is not written, and let go of the file."""
        self._end()
        await self._writer.close()
        self._journal.close()

    def _end(self) -> None:
        self._waiters.close()
        self._state.end()

    def _entry(self, request: str) -> Entry:
        self._writer.check_file()
        return self._state.entry(request)

    async def _kept(self, entry: Entry) -> Record:
        """The record as it is now, once it is on the disk."""
        self._waiters.tell()
        record = self._state.record(entry)
        await self._writer.settled(self._writer.note(entry, durable=True))
        return record

    async def _watch(self, entry: Entry, after: int) -> AsyncIterator[Event]:
        async for event in follow(entry.history, after):
            while not self._writer.is_written(entry):
                with suppress(TransientError):  # whoever follows waits as long as the disk is full
                    await self._writer.settled(entry)
                self._writer.check_file()
            yield event
        self._writer.check_file()

    def _restore(self, number: int, row: Row) -> builtins.list[Claim]:
        last = row.last if row.context.over else max(row.last, self._journal.start * EVENTS_A_START)
        return self._state.restore(number, row, last)
