"""A queue of one process: the state in memory decides, whatever else a backend does to keep it.

A method is a transaction because it does not await between its first check and its last effect, and the event loop runs
one task at a time.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from typing_extensions import override

from unfuse.core.card import ModelCard
from unfuse.core.clock import Clock
from unfuse.core.event import Event
from unfuse.core.messages import WorkerInfo
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Change, Record, RequestContext, Timings
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import (
    MAX_CACHED,
    Declaration,
    EncoderIndex,
    Filter,
    Limits,
    Member,
    QueueBackend,
    Renewal,
    Stats,
    Wanted,
)
from unfuse.queues.index import Entry, History
from unfuse.queues.state import QueueState


class LocalEncoderIndex(EncoderIndex):
    """Refs of cached encoder outputs by cache key, the least recently used first."""

    def __init__(self) -> None:
        self._refs: dict[str, ObjectRef] = {}
        self._nbytes = 0

    @override
    async def cache(self, key: str, ref: ObjectRef, room: int) -> None:
        self._remove(key)
        if ref.nbytes > room:
            return
        self._refs[key] = ref
        self._nbytes += ref.nbytes
        while self._nbytes > room or len(self._refs) > MAX_CACHED:
            self._remove(next(iter(self._refs)))

    @override
    async def cached(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        found = {key: self._refs[key] for key in keys if key in self._refs}
        for key in keys:
            if use and key in found:
                self._refs[key] = self._refs.pop(key)
        return found

    @override
    async def cached_bytes(self) -> int:
        return self._nbytes

    @override
    async def uncache(self, key: str, id: str) -> None:
        if key in self._refs and self._refs[key].id == id:
            self._remove(key)

    def _remove(self, key: str) -> None:
        if ref := self._refs.pop(key, None):
            self._nbytes -= ref.nbytes


@dataclass(eq=False, slots=True)
class _Waiter:
    """A caller of `lease` that waits. A change in one of `pools` may let it take a task."""

    worker: str
    wanted: Wanted
    pools: frozenset[str]
    woken: asyncio.Future[None]


class Waiters:
    """All callers that wait for tasks. Whoever changes the state must call `wake` before it awaits anything."""

    def __init__(self, state: QueueState, clock: Clock) -> None:
        self._state, self._clock = state, clock
        self._waiters: dict[_Waiter, None] = {}
        self._closed = False
        self._due: float | None = None
        self._withdraw_alarm: Callable[[], None] = lambda: None

    async def claim(self, worker: str, wanted: Wanted, ttl: float, wait: float) -> list[Lease]:
        """Claim tasks, waiting up to `wait` seconds for a first one."""
        until = self._clock.now() + wait
        while True:
            leases = self._state.claim(worker, wanted, ttl)
            self.wake()
            if leases or wanted.slots < 1 or self._closed or self._clock.now() >= until:
                return leases
            await self._wait(worker, wanted, until)

    def wake(self) -> None:
        """For each pool that has changed, wake the first waiter that can take a task there now.

        One waiter is enough, since its claim is a change again. An alarm wakes waiters for tasks that are delayed.
        """
        pools, self._state.changed_pools = self._state.changed_pools, {}
        for pool in pools:
            self._wake_for(pool)
        due = None if self._closed else self._state.pool_queues.next_due()
        if due != self._due:
            self._withdraw_alarm()
            self._due, self._withdraw_alarm = due, lambda: None
            if due is not None:
                self._withdraw_alarm = self._clock.call_at(due, partial(self._release, due))

    def close(self) -> None:
        """Wake all waiters for good."""
        self._closed = True
        for waiter in self._waiters:
            _done(waiter.woken)
        self.wake()

    def _release(self, at: float) -> None:
        self._state.release_due(at)
        self.wake()

    def _wake_for(self, pool: str) -> None:
        for waiter in sorted(self._waiters, key=lambda waiter: (waiter.wanted.above is not None, waiter.wanted.rank)):
            if pool in waiter.pools and not waiter.woken.done() and self._state.next_task(waiter.worker, waiter.wanted):
                _done(waiter.woken)
                return

    async def _wait(self, worker: str, wanted: Wanted, until: float) -> None:
        waiter = _Waiter(worker, wanted, wanted.watched_pools(), asyncio.get_running_loop().create_future())
        self._waiters[waiter] = None
        withdraw_alarm = self._clock.call_at(until, partial(_done, waiter.woken))
        try:
            await waiter.woken
        except asyncio.CancelledError:
            self._state.changed_pools |= dict.fromkeys(wanted.pools)
            self.wake()
            raise
        finally:
            withdraw_alarm()
            del self._waiters[waiter]


async def follow(history: History, after: int) -> AsyncIterator[Event]:
    """Events with a number above `after`; waits for more until the history has ended."""
    while True:
        while unseen := history.above(after):
            for event in unseen:
                yield event
            after = unseen[-1].seq
        if history.ended:
            return
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with history.listening(partial(_done, news)):
            await news


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class LocalQueue(LocalEncoderIndex, QueueBackend):
    """A queue of one process and one event loop, which keeps nothing: a backend that does says so in `_may_change`,
    `_may_read` and `_kept`. `changed` is called with each entry that it would have to write.
    """

    def __init__(self, clock: Clock, changed: Callable[[Entry], object] = lambda _: None) -> None:
        super().__init__()
        self._clock = clock
        self._state = QueueState(clock, changed)
        self._waiters = Waiters(self._state, clock)
        self._members: dict[str, Member] = {}
        self._declared: dict[str, Declaration] = {}
        self._secrets: dict[str, str] = {}

    def _may_change(self) -> None:
        """Raise TransientError if nothing can be changed now."""
        return

    def _may_read(self) -> None:
        """Raise TransientError if what is in memory will never be kept."""
        return

    async def _kept(self, entry: Entry, durable: bool = False) -> None:
        """Return when an entry is kept as it is now."""
        return

    async def _can_be_kept(self, entry: Entry) -> bool:
        """Return True when an entry is kept as it is now, False if that is impossible until there is room."""
        await self._kept(entry)
        return True

    async def _last_kept(self, entry: Entry, which: Filter) -> Record | None:
        """The record of an entry as it was kept last; None if it was not, or if the filter does not select that."""
        return None

    @override
    async def now(self) -> float:
        return self._clock.now()

    @override
    async def check(self) -> None:
        self._may_change()

    @override
    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: Limits
    ) -> Record:
        self._may_change()
        return await self._when_kept(self._state.submit(context, tasks, events, limits))

    @override
    async def lease(self, worker: str, wanted: Wanted, ttl: float, wait: float = 0.0) -> list[Lease]:
        """Returns before the leases are kept: after a crash, a task may be leased a second time."""
        self._may_change()
        leases = await self._waiters.claim(worker, wanted, ttl, wait)
        self._may_read()
        return leases

    @override
    async def renew(self, claims: Sequence[Claim], ttl: float) -> Renewal:
        if claims:
            self._may_change()
        return self._state.leases.renew(claims, self._clock.now() + ttl)

    @override
    async def progress(self, claim: Claim, events: Sequence[Event], used: Timings | None = None) -> bool:
        self._may_change()
        return self._state.progress(claim, events, used)

    @override
    async def commit(self, change: Change) -> Record:
        self._may_change()
        return await self._when_kept(self._state.commit(change))

    @override
    async def commit_and_lease(
        self, change: Change, worker: str, wanted: Wanted, ttl: float
    ) -> tuple[Record, list[Lease]]:
        self._may_change()
        entry = self._state.commit(change)
        leases = self._state.claim(worker, wanted, ttl)
        try:
            return await self._when_kept(entry), leases
        except BaseException:  # nobody learns of these leases
            for lease in leases:
                self._state.hand_back(lease.claim)
            self._waiters.wake()
            raise

    @override
    async def hand_back(self, claim: Claim) -> bool:
        self._may_change()
        was_held = self._state.hand_back(claim)
        self._waiters.wake()
        if was_held:
            await self._kept(self._state.entry(claim.request))
        return was_held

    @override
    async def turn_down(self, claim: Claim) -> int:
        self._may_change()
        excluded = self._state.turn_down(claim)
        self._waiters.wake()
        await self._kept(self._state.entry(claim.request))
        return excluded

    @override
    async def expired(self, ttl: float) -> builtins.list[Lease]:
        self._may_change()
        return self._state.leases.expired(self._clock.now(), ttl)

    @override
    async def load(self, request: str) -> Record:
        entry = self._entry(request)
        record = self._state.record(entry)
        await self._kept(entry)
        return record

    @override
    async def over(self, requests: Sequence[str]) -> builtins.list[str]:
        """Leaves out a request whose end cannot be kept now."""
        self._may_read()
        known = [(request, self._state.requests.get(request)) for request in requests]
        over = [(request, entry) for request, entry in known if entry is None or entry.context.over]
        return [request for request, entry in over if entry is None or await self._can_be_kept(entry)]

    @override
    async def list(
        self, which: Filter, *, after: str | int | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[Record]:
        self._may_read()
        entries = self._state.list(which, after, limit, oldest_first)
        listed = builtins.list[Record]()
        for entry, record in [(entry, self._state.record(entry)) for entry in entries]:
            found = record if await self._can_be_kept(entry) else await self._last_kept(entry, which)
            listed += [found] if found else []
        return listed

    @override
    async def stats(self, pools: Sequence[str]) -> Stats:
        return self._state.stats(pools)

    @override
    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        self._state.release_due(self._clock.now())
        return [rank[3] for rank in self._state.pool_queues.front(pool, limit)]

    @override
    async def hello(self, worker: WorkerInfo, cards: Sequence[ModelCard] = ()) -> None:
        known = self._members.get(worker.id)
        self._members[worker.id] = Member(worker, tuple(cards) or (known.cards if known else ()), self._clock.now())

    @override
    async def bye(self, worker: str) -> None:
        self._members.pop(worker, None)
        self._state.leases.lapse(worker, self._clock.now())

    @override
    async def declare(self, by: str, declaration: Declaration, *, new: bool = False) -> bool:
        if new and by in self._declared and self._declared[by].is_current:
            return False
        self._declared[by] = declaration
        return True

    @override
    async def declared(self) -> dict[str, Declaration]:
        return dict(self._declared)

    @override
    async def secret(self, name: str, proposed: str) -> str:
        return self._secrets.setdefault(name, proposed)

    @override
    async def workers(self) -> Sequence[Member]:
        self._may_read()
        leased = self._state.leases.by_worker()
        return [msgspec.structs.replace(member, leased=leased[name]) for name, member in self._members.items()]

    @override
    async def forget(self, before: float) -> Sequence[str]:
        old = [entry.context.id for entry in self._state.index.over_before(before)]
        for request in old:
            await self.drop(request)
        return old

    @override
    async def drop(self, request: str) -> None:
        if entry := self._state.drop(request):
            await self._kept(entry)

    @override
    async def close(self) -> None:
        self._end()

    def _end(self) -> None:
        self._waiters.close()
        for entry in self._state.requests.values():
            entry.history.end()

    def _entry(self, request: str) -> Entry:
        self._may_read()
        return self._state.entry(request)

    async def _when_kept(self, entry: Entry) -> Record:
        """Wait until an entry that was changed is kept, and return its record as it is now."""
        self._waiters.wake()
        record = self._state.record(entry)
        await self._kept(entry, durable=True)
        return record
