"""The queue on disk, for one scheduler process: the memory queue decides, and SQLite is its journal.

A method decides and applies in memory, as MemoryQueue does, and returns once what it changed is committed; readers too
are told only what is. All that changed while one transaction was being written goes into the next one, as it stands
in memory at one moment: the file always holds what memory held at some moment.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import structlog

from unfuse.core.clock import AlarmClock, Clock
from unfuse.core.errors import ConfigError, Damaged, TransientError
from unfuse.core.event import Event
from unfuse.core.request import Change, Record, RequestContext, Running
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import Damage, Filter, Limits, Member, Renewal, Wanted
from unfuse.queues.history import History
from unfuse.queues.index import Entry
from unfuse.queues.journal import Journal, Row, Standing
from unfuse.queues.memory import MemoryQueue, _Held

FULL_PAUSE_S = 1.0
"""How long after the disk was found full it is tried again."""

EVENTS_A_START = 2**24
"""More events than one request publishes between two starts: numbers continue at the next multiple."""


log = structlog.get_logger(__name__)


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
        if isinstance(self._clock, AlarmClock):
            return self._clock.call_at(when - self._shift - 1e-6, callback)  # readings are rounded to 0.2 µs
        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()), callback).cancel


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


class SqliteQueue(MemoryQueue):
    """A queue that survives its process. While its disk is full, what would change anything is refused, and what is not
    written yet waits for room. When its file cannot be written for another reason, it does nothing any more.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(_UnixClock(clock))
        self._path = path
        self._journal = Journal(path)
        self._writing: _Batch | None = None
        self._coming: _Batch | None = None
        self._broken = self._full = ""
        self._trying: asyncio.TimerHandle | None = None
        self._restored: set[Claim] = set()
        rows, self._journal.rows = self._journal.rows, []
        for number, row in rows:
            self._restore(number, row)
        numbers = [number for number, _ in (*rows, *self._journal.damaged.values())]
        last = max(numbers, default=-1)
        ranks = [place.rank for place in self._queued.values()] + [held.rank for held in self._leased.values()]
        self._arrivals = count(max(last, *(rank[2] for rank in ranks), -1) + 1)

    @classmethod
    def at(cls, url: str, clock: Clock) -> SqliteQueue:
        """The queue in the file `sqlite:PATH`. Raises ConfigError when it cannot be kept there."""
        path = url.partition("://" if "://" in url else ":")[2]
        if not path:
            raise ConfigError("a SQLite queue is kept in a file: give its path, as in sqlite:queue.db")
        return cls(Path(path).expanduser().absolute(), clock)

    async def check(self) -> None:
        """Raise TransientError while the disk is full, and once the file could not be written."""
        self._check()

    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: Limits
    ) -> Record:
        """Store a new request, once."""
        self._check()
        return await self._kept(await super().submit(context, tasks, events, limits))

    async def lease(self, worker: str, wanted: Wanted, ttl: float, wait: float = 0.0) -> builtins.list[Lease]:
        """Claim tasks. This is written with what comes next and not waited for: at worst a task is leased twice."""
        self._check()
        leases = await super().lease(worker, wanted, ttl, wait)
        self._check_file()
        for lease in leases:
            self._note(self._requests[lease.task.request])
        return leases

    async def renew(self, claims: Sequence[Claim], ttl: float) -> Renewal:
        """Extend what is held, in memory."""
        self._restored.difference_update(claims)
        return await super().renew(claims, ttl)

    async def commit(self, change: Change) -> Record:
        """Apply a transition."""
        self._check()
        return await self._kept(await super().commit(change))

    async def hand_back(self, claim: Claim) -> bool:
        """Put a leased task back where it stood."""
        was_held = await super().hand_back(claim)
        if was_held:
            await self._settled(self._note(self._entry(claim.request)))
        return was_held

    async def expired(self, ttl: float) -> builtins.list[Lease]:
        """Leases whose time has passed. One from before the start that nobody has renewed since is handed back."""
        self._check()
        late = await super().expired(ttl)
        for lease in late:
            if lease.claim in self._restored:
                await self.hand_back(lease.claim)
        return [lease for lease in late if lease.claim not in self._restored]

    async def load(self, request: str) -> Record:
        """The stored request."""
        if request in self._journal.damaged:
            raise Damaged(f"what is stored of request {request} cannot be read, `unfuse dead ls` lists it")
        record = await super().load(request)
        await self._settled(self._requests[request])
        return record

    async def list(
        self, which: Filter, *, after: str | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[Record]:
        """Requests in the order of their arrival."""
        records = await super().list(which, after=after, limit=limit, oldest_first=oldest_first)
        for record in records:
            if entry := self._requests.get(record.context.id):
                await self._settled(entry)
        return records

    def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        """Follow a request's history, behind what is written of it."""
        return self._watch(self._entry(request), after)

    async def workers(self) -> Sequence[Member]:
        """The registry, which is new after a start: workers say that they live."""
        self._check_file()
        return await super().workers()

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

    async def drop(self, request: str) -> None:
        """Drop one that is over."""
        entry = self._requests.get(request)
        await super().drop(request)
        if entry is not None and request not in self._requests:
            await self._settled(self._note(entry))

    async def close(self) -> None:
        """Wake everyone who waits, write what is not written, and let go of the file."""
        await super().close()
        while (batch := self._coming or self._writing) and not self._full:
            await batch.done
        if self._trying is not None:
            self._trying.cancel()
        self._journal.close()

    def _entry(self, request: str) -> Entry:
        self._check_file()
        return super()._entry(request)

    def _held(self, claim: Claim) -> _Held | None:
        self._check()
        return super()._held(claim)

    def _check(self) -> None:
        """Before a change: nothing is changed that cannot be written."""
        self._check_file()
        if self._full:
            raise TransientError(self._full)

    def _check_file(self) -> None:
        if self._broken:
            raise TransientError(self._broken)

    async def _watch(self, entry: Entry, after: int) -> AsyncIterator[Event]:
        async for event in entry.history.follow(after):
            while self._unwritten(entry):
                with suppress(TransientError):  # whoever follows waits as long as the disk is full
                    await self._settled(entry)
                self._check_file()
            yield event
        self._check_file()

    async def _kept(self, record: Record) -> Record:
        """The record, once it is on the disk."""
        await self._settled(self._note(self._requests[record.context.id], durable=True))
        return record

    async def _settled(self, entry: Entry) -> None:
        """Wait until an entry is written as it is now. Raises TransientError when it cannot be, or not yet."""
        for batch in self._unwritten(entry)[-1:]:
            await asyncio.shield(batch.done)
            if self._full and self._unwritten(entry):
                raise TransientError(self._full)
        self._check_file()

    def _unwritten(self, entry: Entry) -> builtins.list[_Batch]:
        return [batch for batch in (self._writing, self._coming) if batch and entry.number in batch.entries]

    def _note(self, entry: Entry, durable: bool = False) -> Entry:
        """An entry has changed: the next transaction writes it."""
        if not self._broken:
            if self._coming is None:
                loop = asyncio.get_running_loop()
                self._coming = _Batch(loop.create_future())
                loop.call_soon(self._flush)
            self._coming.entries[entry.number] = entry
            self._coming.durable |= durable
        return entry

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
                log.error("the queue's file cannot be written", file=str(self._path), reason=str(error))
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
            self._closing = asyncio.ensure_future(super().close())
        for batch in filter(None, batches):
            batch.done.set_result(None)
        if error is None:
            self._flush()

    def _row(self, entry: Entry) -> Row | None:
        context = entry.context
        if self._requests.get(context.id) is not entry:
            return None
        standing = []
        for key in ((context.id, stage) for stage in entry.stages):
            if place := self._queued.get(key):
                standing.append(Standing(place.rank[2], place.rank[3], returned=dict(self._returned.by(key))))
            if held := self._leased.get(key):
                lease, since = held.lease, held.running.since
                returned = dict(self._returned.by(key))
                standing.append(Standing(held.rank[2], lease.task, lease.worker, lease.token, since, returned))
        return Row(context, tuple(entry.stages), tuple(standing), entry.history.lasting(), entry.history.last)

    def _restore(self, number: int, row: Row) -> None:
        """Take in a stored request."""
        context = row.context
        last = row.last if context.over else max(row.last, self._journal.start * EVENTS_A_START)
        entry = Entry(context, number, dict.fromkeys(row.stages), History(row.events, last))
        self._requests[context.id] = entry
        self._count(context, not context.over)
        self._publish(entry, ())
        for standing in row.tasks:
            self._restore_task(standing)
        self._list(entry)

    def _restore_task(self, stood: Standing) -> None:
        """Take in a task. Its lease gets a full time at the first sweep, as after any gap."""
        task = stood.task
        rank = (-task.priority, task.order, stood.arrival, task)
        for worker, times in stood.returned.items():
            self._returned.count(task.key, worker, times)
        if not stood.token:
            self._put(rank)
            return
        lease = Lease(task, stood.worker, stood.token, self._clock.now())
        self._leased[task.key] = _Held(lease, rank, Running(task.stage, task.attempt, stood.worker, stood.since))
        self._restored.add(lease.claim)
