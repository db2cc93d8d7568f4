"""The queue in this process's memory, for tests and small installations.

A method is a transaction because it does not await between its first check and its last effect, and the event loop runs
one task at a time.
"""

from __future__ import annotations

import builtins
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence

from unfuse.core.card import ModelCard
from unfuse.core.clock import Clock
from unfuse.core.event import Event
from unfuse.core.growth import PIECES_AT_ONCE, Grown
from unfuse.core.messages import WorkerInfo
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Change, Record, RequestContext
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import Declaration, Filter, Limits, Member, Renewal, Stats, TaskQueue
from unfuse.queues.state import QueueState
from unfuse.queues.waiters import Waiters, follow
from unfuse.queues.wanted import Wanted
from unfuse.supervision.clock import SystemClock


class MemoryQueue(TaskQueue):
    """A queue of one process and one event loop; it ends with them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._state = QueueState(clock)
        self._waiters = Waiters(self._state, clock)
        self._pieces = defaultdict[str, defaultdict[str, list[bytes]]](lambda: defaultdict(list))

    @classmethod
    def at(cls, url: str, clock: Clock | None = None) -> MemoryQueue:
        """A new, empty queue: memory has no address."""
        return cls(clock or SystemClock())

    async def now(self) -> float:
        """The clock's monotonic reading."""
        return self._clock.now()

    async def check(self) -> None:
        """Return at once: memory always works."""

    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: Limits
    ) -> Record:
        """Store a new request; a repeat returns the stored one."""
        entry = self._state.submit(context, tasks, events, limits)
        self._waiters.wake()
        return self._state.record(entry)

    async def lease(self, worker: str, wanted: Wanted, ttl: float, wait: float = 0.0) -> list[Lease]:
        """Claim tasks, waiting up to `wait` seconds for a first one."""
        return await self._waiters.claim(worker, wanted, ttl, wait)

    async def renew(self, claims: Sequence[Claim], ttl: float) -> Renewal:
        """Extend the leases that are held."""
        return self._state.renew(claims, ttl)

    async def progress(self, claim: Claim, events: Sequence[Event]) -> bool:
        """Publish progress of a lease that is held."""
        return self._state.progress(claim, events)

    async def append_all(self, grown: Sequence[Grown]) -> list[bool]:
        """Keep what is new."""
        new = self._state.append(grown)
        for one in filter(None, new):
            self._pieces[one.claim.request][one.claim.stage] += one.pieces
        return [one is not None for one in new]

    async def appended(self, request: str, stage: str, after: int = 0, limit: int = PIECES_AT_ONCE) -> list[bytes]:
        """The pieces that are kept of a stage."""
        self._state.entry(request)
        return self._pieces[request][stage][after : after + limit]

    async def commit(self, change: Change) -> Record:
        """Apply a transition."""
        entry = self._state.commit(change)
        self._waiters.wake()
        return self._state.record(entry)

    async def commit_and_lease(
        self, change: Change, worker: str, wanted: Wanted, ttl: float
    ) -> tuple[Record, list[Lease]]:
        """Apply a transition, then claim tasks."""
        entry = self._state.commit(change)
        leases = self._state.claim(worker, wanted, ttl)
        self._waiters.wake()
        return self._state.record(entry), leases

    async def hand_back(self, claim: Claim) -> bool:
        """Return a leased task to its place."""
        was_held = self._state.hand_back(claim)
        self._waiters.wake()
        return was_held

    async def turn_down(self, claim: Claim) -> int:
        """Return a leased task to its place, and count that for its worker."""
        excluded = self._state.turn_down(claim)
        self._waiters.wake()
        return excluded

    async def expired(self, ttl: float) -> builtins.list[Lease]:
        """Leases whose time has passed."""
        return self._state.expired(ttl)

    async def load(self, request: str) -> Record:
        """The stored record of a request."""
        return self._state.record(self._state.entry(request))

    async def over(self, requests: Sequence[str]) -> builtins.list[str]:
        """Which of these requests are over, or unknown."""
        return self._state.over(requests)

    async def list(
        self, which: Filter, *, after: str | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[Record]:
        """Requests in the order of their arrival."""
        return [self._state.record(entry) for entry in self._state.list(which, after, limit, oldest_first)]

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
        """Follow a request's history."""
        return follow(self._state.entry(request).history, after)

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
        """All registered workers, in order of arrival."""
        return self._state.workers()

    async def forget(self, before: float) -> Sequence[str]:
        """Drop requests that ended before the Unix time `before`."""
        old = [entry.context.id for entry in self._state.over_before(before)]
        for request in old:
            await self.drop(request)
        return old

    async def drop(self, request: str) -> None:
        """Drop a request, if it is over."""
        if self._state.drop(request):
            self._pieces.pop(request, None)

    async def close(self) -> None:
        """Wake all callers that wait."""
        self._waiters.close()
        self._state.end()
