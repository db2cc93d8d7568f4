"""The queue in this process's memory: the plainest reading of the port, and what tests and small installations run on.

Nothing here awaits between its first check and its last effect, so a method is a transaction because the event loop
runs one thing at a time.
"""

from __future__ import annotations

import asyncio
import builtins
import math
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice

import msgspec

from unfuse.core.clock import AlarmClock, Clock
from unfuse.core.errors import Conflict, LeaseLost, NotFound, Overloaded
from unfuse.core.event import Event
from unfuse.core.request import Change, Record, RequestContext, Running
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import Filter, Limits, Renewal, Wanted, check_storable
from unfuse.queues.index import Entry, Index
from unfuse.queues.lines import Lines, Rank
from unfuse.queues.registry import RegistryInMemory
from unfuse.queues.returned import Key, Returned


@dataclass(eq=False, slots=True)
class _Place:
    rank: Rank
    withdraw_alarm: Callable[[], None] | None
    """Set while the task's time has not come."""


@dataclass(eq=False, slots=True)
class _Held:
    lease: Lease
    rank: Rank
    running: Running


@dataclass(eq=False, slots=True)
class _Waiter:
    """A caller of `lease` that waits. `pools` are all whose changes concern it."""

    worker: str
    wanted: Wanted
    pools: frozenset[str]
    woken: asyncio.Future[None]

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class MemoryQueue(RegistryInMemory):
    """A queue of one process and one event loop; it ends with them."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._requests: dict[str, Entry] = {}
        self._index = Index()
        self._active = 0
        self._cost = 0.0
        self._lines = Lines()
        self._delayed: Counter[str] = Counter()
        self._queued: dict[Key, _Place] = {}
        self._leased: dict[Key, _Held] = {}
        self._waiters: dict[_Waiter, None] = {}
        self._returned = Returned()
        self._arrivals = count()
        self._swept = -math.inf
        self._closed = False

    @classmethod
    def at(cls, url: str, clock: Clock) -> MemoryQueue:
        """A new, empty queue: memory has no address."""
        return cls(clock)

    async def now(self) -> float:
        """The clock's monotonic reading."""
        return self._clock.now()

    async def check(self) -> None:
        """Memory works as long as its process does."""

    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: Limits
    ) -> Record:
        """Store a new request, once."""
        check_storable(context, *tasks, *events)
        known = self._requests.get(context.id) or self._index.repeated(context)
        if known is not None:
            return self._record(known)
        self._admit(context, tasks, limits)
        entry = self._requests[context.id] = Entry(context, next(self._arrivals))
        self._count(context, not context.over)
        self._push(entry, tasks)
        self._publish(entry, events)
        self._list(entry)
        return self._record(entry)

    async def lease(self, worker: str, wanted: Wanted, ttl: float, wait: float = 0.0) -> list[Lease]:
        """Claim tasks, waiting for a first one."""
        until = self._clock.now() + wait
        while True:
            leases = self._claim(worker, wanted, ttl)
            if leases or wanted.slots < 1 or self._closed or self._clock.now() >= until:
                return leases
            await self._wait(worker, wanted, until)

    async def renew(self, claims: Sequence[Claim], ttl: float) -> Renewal:
        """Extend what is held."""
        held: list[Claim] = []
        ended: list[Claim] = []
        for claim in claims:
            mine = self._held(claim)
            (ended if mine is None else held).append(claim)
            if mine is not None:
                mine.lease = msgspec.structs.replace(mine.lease, expires=self._clock.now() + ttl)
        return Renewal(tuple(held), tuple(ended))

    async def progress(self, claim: Claim, events: Sequence[Event]) -> bool:
        """Publish while held."""
        check_storable(*events)
        mine = self._held(claim)
        if mine is None:
            return False
        for event in events[-1:]:
            mine.running = msgspec.structs.replace(mine.running, step=event.step, steps=event.steps)
        self._publish(self._requests[claim.request], events)
        return True

    async def commit(self, change: Change) -> Record:
        """Check everything, then apply everything."""
        context, claim = change.context, change.claim
        check_storable(context, *change.push, *change.events)
        entry = self._entry(context.id)
        if claim is not None:
            state = entry.context.stages.get(claim.stage)
            if state and (state.status, state.attempt, state.token) == ("done", claim.attempt, claim.token):
                return self._record(entry)
            if self._held(claim) is None:
                raise LeaseLost(f"attempt {claim.attempt} of {claim.stage} of {claim.request} does not hold its lease")
        if context.version != entry.context.version + 1:
            raise Conflict(f"{context.id} is at version {entry.context.version}: {context.version} does not follow it")
        self._count(context, (not context.over) - (not entry.context.over))
        entry.context = context
        for key in (claim.key, *change.close) if claim is not None else change.close:
            self._drop(key)
        self._push(entry, change.push)
        if context.over:
            for stage in entry.stages:
                self._drop((context.id, stage))
        self._publish(entry, change.events)
        self._list(entry)
        return self._record(entry)

    async def hand_back(self, claim: Claim) -> bool:
        """Put a leased task back where it stood."""
        mine = self._held(claim)
        if mine is None:
            return False
        del self._leased[claim.key]
        priority, order, arrival, task = mine.rank
        self._put((priority, order, arrival, msgspec.structs.replace(task, attempt=task.attempt + 1)))
        self._list(self._requests[task.request])
        return True

    async def turn_down(self, claim: Claim) -> int:
        """Put a leased task back where it stood, and remember whose it was."""
        mine = self._held(claim)
        if mine is None:
            raise LeaseLost(f"attempt {claim.attempt} of {claim.stage} of {claim.request} does not hold its lease")
        if not mine.running.step:
            self._returned.count(claim.key, mine.lease.worker)
        await self.hand_back(claim)
        return self._returned.done_with(claim.key)

    async def expired(self, ttl: float) -> list[Lease]:
        """Leases whose time has passed; none after a gap, which all of them are forgiven."""
        now = self._clock.now()
        for held in self._leased.values() if now - self._swept > ttl / 2 else ():
            held.lease = msgspec.structs.replace(held.lease, expires=max(held.lease.expires, now + ttl))
        self._swept = now
        return [held.lease for held in self._leased.values() if held.lease.expires <= now]

    async def load(self, request: str) -> Record:
        """The stored request."""
        return self._record(self._entry(request))

    async def list(
        self, which: Filter, *, after: str | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[Record]:
        """Requests in the order of their arrival."""
        behind = None if after is None else self._entry(after)
        if behind is not None and which.tenant not in (None, behind.context.tenant):
            raise _unknown(behind.context.id)
        found = self._index.find(which, behind, oldest_first)
        return [self._record(entry) for entry in islice(found, limit)]

    async def size(self, pool: str) -> int:
        """Tasks that wait, their time come or not."""
        return self._size(pool)

    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        """The tasks that would be leased next."""
        return [rank[3] for rank in self._lines.front(pool, limit)]

    def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        """Follow a request's history."""
        return self._entry(request).history.follow(after)

    async def forget(self, before: float) -> Sequence[str]:
        """Drop requests that were over before `before`."""
        old = [entry.context.id for entry in self._index.over_before(before)]
        for request in old:
            await self.drop(request)
        return old

    async def drop(self, request: str) -> None:
        """Drop one that is over."""
        entry = self._requests.get(request)
        if entry is not None and entry.context.over:
            del self._requests[request]
            self._index.remove(entry)
            entry.history.end()

    async def close(self) -> None:
        """Wake everyone who waits."""
        self._closed = True
        for waiter in self._waiters:
            waiter.wake()
        for entry in self._requests.values():
            entry.history.end()
        for place in self._queued.values():
            if place.withdraw_alarm is not None:
                place.withdraw_alarm()

    def _entry(self, request: str) -> Entry:
        entry = self._requests.get(request)
        if entry is None:
            raise _unknown(request)
        return entry

    def _leased_by_worker(self) -> Counter[str]:
        return Counter(held.lease.worker for held in self._leased.values())

    def _list(self, entry: Entry) -> None:
        """An entry, or what runs of it, has changed: list it as it stands."""
        context = entry.context
        is_running = any((context.id, stage) in self._leased for stage in entry.stages)
        self._index.put(entry, "in_progress" if is_running and context.status == "queued" else context.status)

    def _size(self, pool: str) -> int:
        return self._lines.size(pool) + self._delayed[pool]

    def _held(self, claim: Claim) -> _Held | None:
        held = self._leased.get(claim.key)
        return held if held is not None and held.lease.claim == claim else None

    def _record(self, entry: Entry) -> Record:
        keys = [(entry.context.id, stage) for stage in entry.stages]
        running = tuple(self._leased[key].running for key in keys if key in self._leased)
        if running:
            return Record(entry.context, running)
        waiting = [self._queued[key].rank for key in keys if key in self._queued]
        position = min((self._lines.position(rank) for rank in waiting), default=None)
        return Record(entry.context, (), position)

    def _admit(self, context: RequestContext, tasks: Sequence[Task], limits: Limits) -> None:
        if self._active >= limits.max_active:
            raise Overloaded(f"{self._active} requests are in progress, as many as are accepted: try again later")
        if limits.max_cost is not None and self._active and self._cost + context.cost > limits.max_cost:
            raise Overloaded(
                f"what is in progress and this together cost more than {limits.max_cost:g}: try again later"
            )
        for pool, more in Counter(task.pool for task in tasks).items():
            size = self._size(pool)
            if size + more > limits.max_queue:
                raise Overloaded(f"{size} tasks wait in pool {pool}, up to {limits.max_queue} may: try again later")

    def _count(self, context: RequestContext, change: int) -> None:
        self._active += change
        self._cost = self._cost + change * context.cost if self._active else 0.0

    def _publish(self, entry: Entry, events: Sequence[Event]) -> None:
        for event in events:
            entry.history.publish(event, self._clock.wall())
        if entry.context.over:
            entry.history.end()

    def _push(self, entry: Entry, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._drop(task.key)
            entry.stages[task.stage] = None
            self._put((-task.priority, task.order, next(self._arrivals), task))

    def _put(self, rank: Rank) -> None:
        task = rank[3]
        alarm = None
        if task.not_before > self._clock.now():
            alarm = self._call_at(task.not_before, partial(self._ripen, rank))
            self._delayed[task.pool] += 1
        else:
            self._lines.insert(rank, self._clock.now())
        self._queued[task.key] = _Place(rank, alarm)
        self._wake(task.pool)

    def _ripen(self, rank: Rank) -> None:
        """A task's time has come."""
        task = rank[3]
        self._queued[task.key].withdraw_alarm = None
        self._delayed[task.pool] -= 1
        self._lines.insert(rank, self._clock.now())
        self._wake(task.pool)

    def _drop(self, key: Key) -> None:
        """Take a task out of the queue, and end its lease."""
        self._leased.pop(key, None)
        self._returned.forget(key)
        place = self._queued.pop(key, None)
        if place is None:
            return
        if place.withdraw_alarm is not None:
            place.withdraw_alarm()
            self._delayed[place.rank[3].pool] -= 1
        else:
            self._lines.remove(place.rank)
        self._wake(place.rank[3].pool)

    def _next(self, worker: str, wanted: Wanted, used: int = 0) -> Rank | None:
        """The task that such a worker takes, having taken `used` bytes; pools that feed a full one are held back."""
        fed = ((pool, name, most) for pool, names in wanted.behind.items() for name, most in names.items())
        full = frozenset(pool for pool, name, most in fed if self._size(name) > most)
        return self._lines.next(wanted, full, self._returned.kept_from(worker), self._clock.now(), used)

    def _claim(self, worker: str, wanted: Wanted, ttl: float) -> builtins.list[Lease]:
        leases: list[Lease] = []
        used = 0
        while len(leases) < wanted.slots and (rank := self._next(worker, wanted, used)) is not None:
            task = rank[3]
            used += task.room
            self._lines.remove(rank)
            del self._queued[task.key]
            lease = Lease(task, worker, secrets.token_bytes(16), self._clock.now() + ttl)
            at = self._clock.wall()
            self._leased[task.key] = _Held(lease, rank, Running(task.stage, task.attempt, worker, at))
            started = Event("stage_started", at, task.stage, task.attempt, worker)
            entry = self._requests[task.request]
            entry.history.publish(started, at)
            self._list(entry)
            leases.append(lease)
        for pool in wanted.pools if leases else ():  # all: it may have been woken for another task than it took
            self._wake(pool)
        return leases

    def _wake(self, pool: str) -> None:
        """Wake the first in line among those that can take what is now first for them.

        Called after every change of a pool. One waiter is enough: what it claims is a change again.
        """
        for waiter in sorted(self._waiters, key=lambda waiter: (waiter.wanted.above is not None, waiter.wanted.rank)):
            if pool in waiter.pools and not waiter.woken.done() and self._next(waiter.worker, waiter.wanted):
                waiter.wake()
                return

    async def _wait(self, worker: str, wanted: Wanted, until: float) -> None:
        waiter = _Waiter(worker, wanted, wanted.concerned(), asyncio.get_running_loop().create_future())
        self._waiters[waiter] = None
        withdraw_alarm = self._call_at(until, waiter.wake)
        try:
            await waiter.woken
        except asyncio.CancelledError:
            for pool in wanted.pools:
                self._wake(pool)
            raise
        finally:
            withdraw_alarm()
            del self._waiters[waiter]

    def _call_at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Set an alarm; returns what takes it back."""
        if isinstance(self._clock, AlarmClock):
            return self._clock.call_at(when, callback)
        return asyncio.get_running_loop().call_later(max(0.0, when - self._clock.now()), callback).cancel


def _unknown(request: str) -> NotFound:
    return NotFound(f"no request {request}")
