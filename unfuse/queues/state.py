"""What a queue in one process holds, and its rules: the plainest reading of the port.

Nothing here waits, tells the time or writes anything down: each method checks everything, then applies everything, and
whoever holds the state wakes those who wait and keeps what has changed.
"""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

import msgspec

from unfuse.core.clock import Clock
from unfuse.core.errors import Conflict, LeaseLost, NotFound, Overloaded
from unfuse.core.event import Event
from unfuse.core.request import Change, Record, RequestContext
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import FRONT, Filter, Limits, Member, PoolStats, Renewal, Stats, check_storable
from unfuse.queues.cached import Cached
from unfuse.queues.history import History
from unfuse.queues.index import Entry, Index
from unfuse.queues.leases import Leases
from unfuse.queues.members import Registry
from unfuse.queues.pool_queues import PoolQueues, Rank
from unfuse.queues.remaining import NANOSECONDS, remaining_of
from unfuse.queues.returned import Key, Returned
from unfuse.queues.row import Row, Standing
from unfuse.queues.wanted import Wanted


class QueueState:
    """Requests with their tasks, leases and events, what is cached, and who works.

    `changed` hears of each entry that a journal has to write, as soon as it has changed; the pools in which somebody
    may find something new are in `pools`, until they are taken.
    """

    def __init__(self, clock: Clock, changed: Callable[[Entry], object] = lambda _: None) -> None:
        self.requests: dict[str, Entry] = {}
        self.pools: dict[str, None] = {}
        self.cached, self.registry = Cached(), Registry()
        self._clock, self._changed = clock, changed
        self._index = Index()
        self._active = 0
        self._cost = 0.0
        self._left = Counter[str]()
        self._pushed: dict[Key, float] = {}
        self._pool_queues = PoolQueues()
        self._leases = Leases()
        self._returned = Returned()
        self._arrivals = 0

    def submit(self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: Limits) -> Entry:
        """Store a new request, once."""
        check_storable(context, *tasks, *events)
        known = self.requests.get(context.id) or self._index.repeated(context)
        if known is not None:
            return known
        self._admit(context, tasks, limits)
        entry = self.requests[context.id] = Entry(context, self._arrival())
        self._count(entry, False)
        self._push(entry, tasks)
        self._publish(entry, events)
        self._alter(entry)
        return entry

    def first(self, worker: str, wanted: Wanted, used: Mapping[str, int] = MappingProxyType({})) -> Rank | None:
        """The task that such a worker takes, having used so much; pools that feed a full one are held back."""
        self.ripen(self._clock.now())
        fed = ((pool, name, most) for pool, offer in wanted.pools.items() for name, most in offer.behind.items())
        full = frozenset(pool for pool, name, most in fed if self._pool_queues.size(name) > most)
        return self._pool_queues.next(wanted, full, self._returned.kept_from(worker), self._clock.now(), used)

    def claim(self, worker: str, wanted: Wanted, ttl: float) -> list[Lease]:
        """Claim tasks."""
        leases: list[Lease] = []
        used = Counter[str]()
        while len(leases) < wanted.slots and (rank := self.first(worker, wanted, used)) is not None:
            task = rank[3]
            used.update(task.resources)
            self._pool_queues.remove(task.key)
            at = self._clock.wall()
            leases.append(self._leases.give(rank, worker, self._clock.now() + ttl, at))
            entry = self.requests[task.request]
            entry.history.publish(Event("stage_started", at, task.stage, task.attempt, worker), at)
            self._alter(entry)
        if leases:  # all: somebody may have been woken for another task than it took
            self.pools |= dict.fromkeys(wanted.pools)
        return leases

    def renew(self, claims: Sequence[Claim], ttl: float) -> Renewal:
        """Extend what is held."""
        return self._leases.renew(claims, self._clock.now() + ttl)

    def progress(self, claim: Claim, events: Sequence[Event]) -> bool:
        """Publish while held."""
        check_storable(*events)
        mine = self._leases.held(claim)
        if mine is None:
            return False
        for event in events[-1:]:
            mine.running = msgspec.structs.replace(mine.running, step=event.step, steps=event.steps)
        self._publish(self.requests[claim.request], events)
        return True

    def commit(self, change: Change) -> Entry:
        """Apply a transition."""
        context, claim = change.context, change.claim
        check_storable(context, *change.push, *change.events)
        entry = self.entry(context.id)
        if claim is not None:
            state = entry.context.stages.get(claim.stage)
            if state and (state.status, state.attempt, state.token) == ("done", claim.attempt, claim.token):
                return entry
            if self._leases.held(claim) is None:
                raise _lost(claim)
        if context.version != entry.context.version + 1:
            raise Conflict(f"{context.id} is at version {entry.context.version}: {context.version} does not follow it")
        was_active, entry.context = not entry.context.over, context
        self._count(entry, was_active)
        for key in (claim.key, *change.close) if claim is not None else change.close:
            self._drop(key)
        self._push(entry, change.push)
        if context.over:
            for stage in entry.stages:
                self._drop((context.id, stage))
        self._publish(entry, change.events)
        self._alter(entry)
        return entry

    def hand_back(self, claim: Claim) -> bool:
        """Put a leased task back where it stood."""
        mine = self._leases.held(claim)
        if mine is None:
            return False
        self._leases.end(claim.key)
        priority, order, arrival, task = mine.rank
        self._put((priority, order, arrival, msgspec.structs.replace(task, attempt=task.attempt + 1)))
        self._alter(self.requests[task.request])
        return True

    def turn_down(self, claim: Claim) -> int:
        """Put a leased task back where it stood, and remember whose it was."""
        mine = self._leases.held(claim)
        if mine is None:
            raise _lost(claim)
        if not mine.running.step:
            self._returned.count(claim.key, mine.lease.worker)
        self.hand_back(claim)
        return self._returned.done_with(claim.key)

    def expired(self, ttl: float) -> list[Lease]:
        """Leases whose time has passed; none after a gap, which all of them are forgiven."""
        return self._leases.expired(self._clock.now(), ttl)

    def entry(self, request: str) -> Entry:
        """What is stored of a request. Raises NotFound."""
        entry = self.requests.get(request)
        if entry is None:
            raise _unknown(request)
        return entry

    def record(self, entry: Entry) -> Record:
        """A request as it stands."""
        keys = [(entry.context.id, stage) for stage in entry.stages]
        running = tuple(held.running for key in keys if (held := self._leases.of(key)))
        if running:
            return Record(entry.context, running)
        self.ripen(self._clock.now())
        waiting = [rank for key in keys if (rank := self._pool_queues.rank(key))]
        position = min((self._pool_queues.position(rank) for rank in waiting), default=None)
        return Record(entry.context, (), position)

    def over(self, requests: Sequence[str]) -> builtins.list[str]:
        """Which of these are over, or not known."""
        known = ((request, self.requests.get(request)) for request in requests)
        return [request for request, entry in known if entry is None or entry.context.over]

    def list(self, which: Filter, after: str | None, limit: int, oldest_first: bool) -> builtins.list[Entry]:
        """Requests in the order of their arrival."""
        behind = None if after is None else self.entry(after)
        if behind is not None and which.tenant not in (None, behind.context.tenant):
            raise _unknown(behind.context.id)
        return [*islice(self._index.find(which, behind, oldest_first), limit)]

    def size(self, pool: str) -> int:
        """Tasks that wait, their time come or not."""
        return self._pool_queues.size(pool)

    def stats(self, pools: Sequence[str]) -> Stats:
        """How much there is to do."""
        self.ripen(self._clock.now())
        return Stats(self._active, {pool: self._line(pool) for pool in pools})

    def _line(self, pool: str) -> PoolStats:
        wall = self._clock.wall()
        oldest = max((wall - self._pushed[rank[3].key] for rank in self._pool_queues.front(pool, FRONT)), default=0.0)
        return PoolStats(self._pool_queues.size(pool), max(0.0, oldest), self._left[pool] / NANOSECONDS)

    def peek(self, pool: str, limit: int) -> Sequence[Task]:
        """The tasks that would be leased next."""
        self.ripen(self._clock.now())
        return [rank[3] for rank in self._pool_queues.front(pool, limit)]

    def workers(self) -> Sequence[Member]:
        """The registry, in order of arrival."""
        return self.registry.members(self._leases.by_worker())

    def over_before(self, time: float) -> Sequence[Entry]:
        """Requests that were over before that Unix time."""
        return self._index.over_before(time)

    def drop(self, request: str) -> Entry | None:
        """Drop a request that is over; what it was, if it was."""
        entry = self.requests.get(request)
        if entry is None or not entry.context.over:
            return None
        del self.requests[request]
        self._index.remove(entry)
        entry.history.end()
        self._changed(entry)
        return entry

    def ripen(self, now: float) -> None:
        """Tasks whose time has come by then may be leased."""
        self.pools |= dict.fromkeys(self._pool_queues.ripen(now))

    def ripens(self) -> float | None:
        """When the next task's time comes."""
        return self._pool_queues.ripens()

    def end(self) -> None:
        """Nothing more will come of any request."""
        for entry in self.requests.values():
            entry.history.end()

    def row(self, entry: Entry) -> Row | None:
        """All of a request that is to be found after a restart; None once it is dropped."""
        context = entry.context
        if self.requests.get(context.id) is not entry:
            return None
        standing = []
        for key in ((context.id, stage) for stage in entry.stages):
            returned = dict(self._returned.by(key))
            if rank := self._pool_queues.rank(key):
                standing.append(Standing(rank[2], rank[3], returned=returned, pushed=self._pushed[key]))
            if held := self._leases.of(key):
                lease, since = held.lease, held.running.since
                leased = lease.task, lease.worker, lease.token, since
                standing.append(Standing(held.rank[2], *leased, returned, self._pushed[key]))
        return Row(context, tuple(entry.stages), tuple(standing), entry.history.lasting(), entry.history.last)

    def restore(self, number: int, row: Row, last: int) -> builtins.list[Claim]:
        """Take in a stored request, whose next event comes behind `last`; what of it is leased.

        A lease gets a full time at the first sweep, as after any gap.
        """
        context = row.context
        entry = Entry(context, number, dict.fromkeys(row.stages), History(row.events, last))
        self.requests[context.id] = entry
        self._count(entry, False)
        self._publish(entry, ())
        self.reserve(number)
        claims = []
        for stood in row.tasks:
            task = stood.task
            self.reserve(stood.arrival)
            rank = (-task.priority, task.order, stood.arrival, task)
            state = context.stages.get(task.stage)
            self._pushed[task.key] = stood.pushed or (state and state.queued_at) or self._clock.wall()
            for worker, times in stood.returned.items():
                self._returned.count(task.key, worker, times)
            if not stood.token:
                self._put(rank)
                continue
            claims.append(self._leases.restore(rank, stood.worker, stood.token, self._clock.now(), stood.since).claim)
        self._list(entry)
        return claims

    def reserve(self, number: int) -> None:
        """Numbers up to this one are taken."""
        self._arrivals = max(self._arrivals, number + 1)

    def _arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals - 1

    def _admit(self, context: RequestContext, tasks: Sequence[Task], limits: Limits) -> None:
        if self._active >= limits.max_active:
            raise Overloaded(f"{self._active} requests are in progress, as many as are accepted: try again later")
        if limits.max_cost is not None and self._active and self._cost + context.cost > limits.max_cost:
            raise Overloaded(
                f"what is in progress and this together cost more than {limits.max_cost:g}: try again later"
            )
        for pool, more in Counter(task.pool for task in tasks).items():
            size = self._pool_queues.size(pool)
            if size + more > limits.max_queue:
                raise Overloaded(f"{size} tasks wait in pool {pool}, up to {limits.max_queue} may: try again later")

    def _count(self, entry: Entry, was_active: bool) -> None:
        """A request is new, or another version of it."""
        change = (not entry.context.over) - was_active
        self._active += change
        self._cost = self._cost + change * entry.context.cost if self._active else 0.0
        was, entry.left = entry.left, remaining_of(entry.context)
        for pool in was.keys() | entry.left.keys():
            self._left[pool] += entry.left.get(pool, 0) - was.get(pool, 0)
            if not self._left[pool]:
                del self._left[pool]

    def _publish(self, entry: Entry, events: Sequence[Event]) -> None:
        for event in events:
            entry.history.publish(event, self._clock.wall())
        if entry.context.over:
            entry.history.end()

    def _push(self, entry: Entry, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._drop(task.key)
            entry.stages[task.stage] = None
            self._pushed[task.key] = self._clock.wall()
            self._put((-task.priority, task.order, self._arrival(), task))

    def _put(self, rank: Rank) -> None:
        self._pool_queues.put(rank, self._clock.now())
        self.pools[rank[3].pool] = None

    def _drop(self, key: Key) -> None:
        """Take a task out of the queue, and end its lease."""
        self._leases.end(key)
        self._returned.forget(key)
        self._pushed.pop(key, None)
        if rank := self._pool_queues.remove(key):
            self.pools[rank[3].pool] = None

    def _alter(self, entry: Entry) -> None:
        """An entry, or what runs of it, has changed."""
        self._list(entry)
        self._changed(entry)

    def _list(self, entry: Entry) -> None:
        context = entry.context
        is_running = any(self._leases.of((context.id, stage)) for stage in entry.stages)
        self._index.put(entry, "in_progress" if is_running and context.status == "queued" else context.status)


def _unknown(request: str) -> NotFound:
    return NotFound(f"no request {request}")


def _lost(claim: Claim) -> LeaseLost:
    return LeaseLost(f"attempt {claim.attempt} of {claim.stage} of {claim.request} does not hold its lease")
