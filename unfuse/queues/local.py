"""A queue of one process: the state in memory decides, whatever else a backend does to keep it.

A method is a transaction because it does not await between its first check and its last effect, and the event loop runs
one task at a time.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence

import msgspec

from unfuse.core.card import ModelCard
from unfuse.core.clock import Clock
from unfuse.core.event import Event
from unfuse.core.messages import WorkerInfo
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Change, Record, RequestContext, Timings
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import Declaration, Filter, Limits, Member, Renewal, Stats, TaskQueue
from unfuse.queues.index import Entry
from unfuse.queues.state import QueueState
from unfuse.queues.waiters import Waiters
from unfuse.queues.wanted import Wanted


class LocalQueue(TaskQueue):
    """A queue of one process and one event loop, which keeps nothing: a backend that does says so in `_may_change`,
    `_may_read` and `_kept`. `changed` is called with each entry that it would have to write.
    """

    def __init__(self, clock: Clock, changed: Callable[[Entry], object] = lambda _: None) -> None:
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

    async def now(self) -> float:
        """The clock's reading."""
        return self._clock.now()

    async def check(self) -> None:
        """Raise TransientError if nothing can be changed now."""
        self._may_change()

    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: Limits
    ) -> Record:
        """Store a new request; a repeat returns the stored one."""
        self._may_change()
        return await self._when_kept(self._state.submit(context, tasks, events, limits))

    async def lease(self, worker: str, wanted: Wanted, ttl: float, wait: float = 0.0) -> list[Lease]:
        """Claim tasks. Returns before the leases are kept: after a crash, a task may be leased a second time."""
        self._may_change()
        leases = await self._waiters.claim(worker, wanted, ttl, wait)
        self._may_read()
        return leases

    async def renew(self, claims: Sequence[Claim], ttl: float) -> Renewal:
        """Extend the leases that are held, in memory."""
        if claims:
            self._may_change()
        return self._state.leases.renew(claims, self._clock.now() + ttl)

    async def progress(self, claim: Claim, events: Sequence[Event], used: Timings | None = None) -> bool:
        """Publish progress of a lease that is held, in memory."""
        self._may_change()
        return self._state.progress(claim, events, used)

    async def commit(self, change: Change) -> Record:
        """Apply a transition."""
        self._may_change()
        return await self._when_kept(self._state.commit(change))

    async def commit_and_lease(
        self, change: Change, worker: str, wanted: Wanted, ttl: float
    ) -> tuple[Record, list[Lease]]:
        """Apply a transition and claim tasks; returns when it is kept."""
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

    async def hand_back(self, claim: Claim) -> bool:
        """Return a leased task to its place."""
        self._may_change()
        was_held = self._state.hand_back(claim)
        self._waiters.wake()
        if was_held:
            await self._kept(self._state.entry(claim.request))
        return was_held

    async def turn_down(self, claim: Claim) -> int:
        """Return a leased task to its place, and count that for its worker."""
        self._may_change()
        excluded = self._state.turn_down(claim)
        self._waiters.wake()
        await self._kept(self._state.entry(claim.request))
        return excluded

    async def expired(self, ttl: float) -> builtins.list[Lease]:
        """Leases whose time has passed; none after a gap, which extends all leases."""
        self._may_change()
        return self._state.leases.expired(self._clock.now(), ttl)

    async def load(self, request: str) -> Record:
        """The stored record of a request."""
        entry = self._entry(request)
        record = self._state.record(entry)
        await self._kept(entry)
        return record

    async def over(self, requests: Sequence[str]) -> builtins.list[str]:
        """Which of these requests are over or unknown, once that is kept; without those of which it cannot be kept."""
        self._may_read()
        over = [(request, self._state.requests.get(request)) for request in self._state.over(requests)]
        return [request for request, entry in over if entry is None or await self._can_be_kept(entry)]

    async def list(
        self, which: Filter, *, after: str | int | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[Record]:
        """Requests in the order of their arrival. One that cannot be kept as it is now is listed as it was kept."""
        self._may_read()
        entries = self._state.list(which, after, limit, oldest_first)
        listed = builtins.list[Record]()
        for entry, record in [(entry, self._state.record(entry)) for entry in entries]:
            found = record if await self._can_be_kept(entry) else await self._last_kept(entry, which)
            listed += [found] if found else []
        return listed

    async def size(self, pool: str) -> int:
        """The number of tasks that wait in a pool, delayed ones included."""
        return self._state.pool_queues.size(pool)

    async def stats(self, pools: Sequence[str]) -> Stats:
        """The number of active requests, and the statistics of these pools."""
        return self._state.stats(pools)

    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        """The tasks of a pool that would be leased next."""
        return self._state.peek(pool, limit)

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
        known = self._members.get(worker.id)
        self._members[worker.id] = Member(worker, tuple(cards) or (known.cards if known else ()), self._clock.now())

    async def bye(self, worker: str) -> None:
        """Forget a worker: its leases expire now."""
        self._members.pop(worker, None)
        self._state.leases.lapse(worker, self._clock.now())

    async def declare(self, by: str, declaration: Declaration, *, new: bool = False) -> bool:
        """Store a declaration for as long as this process lives."""
        if new and by in self._declared and self._declared[by].is_current:
            return False
        self._declared[by] = declaration
        return True

    async def declared(self) -> dict[str, Declaration]:
        """All declarations."""
        return dict(self._declared)

    async def secret(self, name: str, proposed: str) -> str:
        """Return the secret of this name. It lasts as long as this process."""
        return self._secrets.setdefault(name, proposed)

    async def workers(self) -> Sequence[Member]:
        """All registered workers, in order of arrival. After a start there are none, until workers register again."""
        self._may_read()
        leased = self._state.leases.by_worker()
        return [msgspec.structs.replace(member, leased=leased[name]) for name, member in self._members.items()]

    async def forget(self, before: float) -> Sequence[str]:
        """Drop requests that ended before the Unix time `before`."""
        old = [entry.context.id for entry in self._state.index.over_before(before)]
        for request in old:
            await self.drop(request)
        return old

    async def drop(self, request: str) -> None:
        """Drop a request, if it is over."""
        if entry := self._state.drop(request):
            await self._kept(entry)

    async def close(self) -> None:
        """Wake all callers that wait."""
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
