"""The state of a queue in one process, and the rules of the port in their simplest form.

Nothing here waits or writes to disk. Each method first checks everything, then applies everything. The queue that holds
the state wakes callers that wait, and stores what has changed.
"""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import ceil
from types import MappingProxyType

import msgspec

from unfuse.core.clock import Clock
from unfuse.core.errors import Conflict, LeaseLost, LimitReached, NotFound, Overloaded
from unfuse.core.event import Event
from unfuse.core.growth import Grown, check_gap, check_growth
from unfuse.core.request import Allowance, Change, Record, RequestContext, Timings
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import FRONT, MOST_RETURNS, Filter, Limits, PoolStats, Stats, Wanted
from unfuse.queues.index import Entry, History, Index
from unfuse.queues.stored import NANOSECONDS, Row, StoredTask, check_storable, remaining_of
from unfuse.queues.tasks import Key, Leases, PoolQueues, Rank, Returned

MICROSECONDS = 10**6  # times are whole microseconds, which every backend adds exactly


class Tenants:
    """A queue's tenants: how many requests are not over, and when each rate will be whole again."""

    def __init__(self) -> None:
        self._active = Counter[str]()
        self._whole_at: dict[str, int] = {}

    def count(self, tenant: str, change: int) -> None:
        """Count requests that begin, or end."""
        self._active[tenant] += change
        if not self._active[tenant]:
            del self._active[tenant]

    def require(self, tenant: str, may: Allowance, now: float) -> None:
        """Raise LimitReached if the tenant may not have another request now, in seconds of the queue's clock."""
        if may.concurrent and (has := self._active[tenant]) >= may.concurrent:
            message = f"{tenant} has {has} requests in progress, its key allows {may.concurrent}"
            raise LimitReached(f"{message}: try again when one is over")
        early = self._next(tenant, may, now) - int(now * MICROSECONDS) - may.per_s * MICROSECONDS
        if may.rate and early > 0:
            wait = ceil(early / MICROSECONDS)
            message = f"the key of {tenant} allows {may.rate} requests in {may.per_s} s: try again in {wait} s"
            raise LimitReached(message, early / MICROSECONDS)

    def take(self, tenant: str, may: Allowance, now: float) -> None:
        """Use some of the tenant's rate, if it has one."""
        if may.rate:
            self._whole_at[tenant] = self._next(tenant, may, now)

    def _next(self, tenant: str, may: Allowance, now: float) -> int:
        """When all of the rate is there again if another request is accepted now."""
        each = may.per_s * MICROSECONDS // may.rate if may.rate else 0
        return max(self._whole_at.get(tenant, 0), int(now * MICROSECONDS)) + each


class QueueState:
    """Requests with their tasks, leases and events.

    `changed` is called with each entry that a journal has to write, when it has changed. `changed_pools` has the pools
    in which a caller may find something new; the queue takes them from there.
    """

    def __init__(self, clock: Clock, changed: Callable[[Entry], object] = lambda _: None) -> None:
        self.requests: dict[str, Entry] = {}
        self.changed_pools: dict[str, None] = {}
        self._clock, self._changed = clock, changed
        self.index = Index()
        self._active = 0
        self._cost = 0.0
        self._tenants = Tenants()
        self._left = Counter[str]()
        self._pushed: dict[Key, float] = {}
        self.pool_queues = PoolQueues()
        self.leases = Leases()
        self._returned = Returned()
        self._arrivals = 0

    def submit(self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: Limits) -> Entry:
        """Store a new request; a repeat returns the stored one. See `TaskQueue.submit`."""
        check_storable(context, *tasks, *events)
        known = self.requests.get(context.id) or self.index.repeated(context)
        if known is not None:
            return known
        self._tenants.require(context.caller.tenant, limits.tenant, self._clock.now())
        self._admit(context, tasks, limits)
        self._tenants.take(context.caller.tenant, limits.tenant, self._clock.now())
        self.reserve(int(self._clock.wall() * 1e6) - 1)
        entry = self.requests[context.id] = Entry(context, self._arrival())
        self._count(entry, False)
        self._push(entry, tasks)
        self._publish(entry, events)
        self._note_change(entry)
        return entry

    def next_task(self, worker: str, wanted: Wanted, used: Mapping[str, int] = MappingProxyType({})) -> Rank | None:
        """The next task for a worker whose earlier tasks have `used` so much; pools that feed a full one wait."""
        self.release_due(self._clock.now())
        held_back = frozenset(
            pool
            for pool, offer in wanted.pools.items()
            if any(self.pool_queues.size(fed) > most for fed, most in offer.behind.items())
        )
        excluded = self._returned.excluded_for(worker)
        return self.pool_queues.next(wanted, held_back, excluded, self._clock.now(), used)

    def claim(self, worker: str, wanted: Wanted, ttl: float) -> list[Lease]:
        """Claim tasks, without waiting. See `TaskQueue.lease`."""
        leases: list[Lease] = []
        used = Counter[str]()
        while len(leases) < wanted.slots and (rank := self.next_task(worker, wanted, used)) is not None:
            task = rank[3]
            used.update(task.resources)
            self.pool_queues.remove(task.key)
            at = self._clock.wall()
            entry = self.requests[task.request]
            lease = self.leases.give(rank, worker, self._clock.now(), ttl, at)
            leases.append(msgspec.structs.replace(lease, appended=entry.appended.get(task.stage, 0)))
            entry.history.publish(Event("stage_started", at, task.stage, task.attempt, worker), at)
            self._note_change(entry)
        if leases:  # all pools: a caller may have been woken for another task than it took
            self.changed_pools |= dict.fromkeys(wanted.pools)
        return leases

    def progress(self, claim: Claim, events: Sequence[Event], used: Timings | None = None) -> bool:
        """Publish progress of a lease. False if it is not held."""
        check_storable(*events)
        mine = self.leases.held(claim)
        if mine is None:
            return False
        for event in events[-1:]:
            mine.running = msgspec.structs.replace(mine.running, step=event.step, steps=event.steps)
        if used is not None and used.share_s >= mine.running.timings.share_s:
            mine.running = msgspec.structs.replace(mine.running, timings=used)
        self._publish(self.requests[claim.request], events)
        return True

    def append(self, grown: Sequence[Grown]) -> builtins.list[Grown | None]:
        """Count what outputs have grown by. Returns of each what is new of it, None if its lease is not held.

        See `RequestStore.append_all`; the pieces themselves are the queue's to keep.
        """
        check_growth(grown)
        new: builtins.list[Grown | None] = []
        for one in grown:
            request, stage = one.claim.key
            recorded = self.requests[request].appended.get(stage, 0) if self.leases.held(one.claim) else None
            if recorded is not None:
                check_gap(one, recorded)
                one = Grown(one.claim, recorded, one.pieces[recorded - one.offset :])
            new.append(None if recorded is None else one)
        for one in filter(None, new):
            entry, claim, count = self.requests[one.claim.request], one.claim, one.offset + len(one.pieces)
            if one.pieces:
                entry.appended[claim.stage] = count
                self._publish(entry, [Event("appended", stage=claim.stage, attempt=claim.attempt, step=count)])
        return new

    def commit(self, change: Change) -> Entry:
        """Apply a transition. See `TaskQueue.commit`."""
        context, claim = change.context, change.claim
        check_storable(context, *change.push, *change.events)
        entry = self.entry(context.id)
        if claim is not None:
            state = entry.context.stages.get(claim.stage)
            if state and (state.status, state.attempt, state.token) == ("done", claim.attempt, claim.token):
                return entry
            if self.leases.held(claim) is None:
                raise _lost(claim)
        if context.version != entry.context.version + 1:
            raise Conflict(f"{context.id} is at version {entry.context.version}: {context.version} does not follow it")
        was_active, entry.context = not entry.context.over, context
        self._count(entry, was_active)
        for key in (claim.key, *change.close) if claim is not None else change.close:
            self._remove_task(key)
        self._push(entry, change.push)
        if context.over:
            for stage in entry.stages:
                self._remove_task((context.id, stage))
        self._publish(entry, change.events)
        self._note_change(entry)
        return entry

    def hand_back(self, claim: Claim) -> bool:
        """Return a leased task to its place. False if the lease is not held."""
        mine = self.leases.held(claim)
        if mine is None:
            return False
        self.leases.end(claim.key)
        priority, order, arrival, task = mine.rank
        self._put((priority, order, arrival, msgspec.structs.replace(task, attempt=task.attempt + 1)))
        self._note_change(self.requests[task.request])
        return True

    def turn_down(self, claim: Claim) -> int:
        """Return a leased task to its place and count that. Returns how many workers are now excluded from it."""
        mine = self.leases.held(claim)
        if mine is None:
            raise _lost(claim)
        if not mine.running.step:
            self._returned.count(claim.key, mine.lease.worker)
        self.hand_back(claim)
        return self._returned.count_excluded(claim.key)

    def entry(self, request: str) -> Entry:
        """The entry of a request. Raises NotFound."""
        entry = self.requests.get(request)
        if entry is None:
            raise _unknown(request)
        return entry

    def record(self, entry: Entry) -> Record:
        """The record of a request, with what runs now and its position."""
        keys = [(entry.context.id, stage) for stage in entry.stages]
        now = self._clock.now()
        running = tuple(self.leases.running(held, now) for key in keys if (held := self.leases.of(key)))
        if running:
            return Record(entry.context, running, None, entry.number)
        self.release_due(now)
        waiting = [rank for key in keys if (rank := self.pool_queues.rank(key))]
        position = min((self.pool_queues.position(rank) for rank in waiting), default=None)
        return Record(entry.context, (), position, entry.number)

    def list(self, which: Filter, after: str | int | None, limit: int, oldest_first: bool) -> builtins.list[Entry]:
        """Requests in the order of their arrival. Raises NotFound for `after`."""
        if isinstance(after, str):
            behind = self.entry(after)
            if which.tenant not in (None, behind.context.caller.tenant):
                raise _unknown(after)
            after = behind.number
        return [*islice(self.index.find(which, after, oldest_first), limit)]

    def stats(self, pools: Sequence[str]) -> Stats:
        """The number of active requests, and the statistics of these pools."""
        self.release_due(self._clock.now())
        return Stats(self._active, {pool: self._pool_stats(pool) for pool in pools})

    def _pool_stats(self, pool: str) -> PoolStats:
        wall = self._clock.wall()
        oldest = max((wall - self._pushed[rank[3].key] for rank in self.pool_queues.front(pool, FRONT)), default=0.0)
        return PoolStats(self.pool_queues.size(pool), max(0.0, oldest), self._left[pool] / NANOSECONDS)

    def drop(self, request: str) -> Entry | None:
        """Drop a request if it is over. Returns its entry; None if nothing was dropped."""
        entry = self.requests.get(request)
        if entry is None or not entry.context.over:
            return None
        del self.requests[request]
        self.index.remove(entry)
        entry.history.end()
        self._changed(entry)
        return entry

    def release_due(self, now: float) -> None:
        """Let the delayed tasks whose time has come be leased."""
        self.changed_pools |= dict.fromkeys(self.pool_queues.release_due(now))

    def row(self, entry: Entry) -> Row | None:
        """The row to store for an entry; None if the request was dropped."""
        context = entry.context
        if self.requests.get(context.id) is not entry:
            return None
        stored = []
        for key in ((context.id, stage) for stage in entry.stages):
            returned = dict(self._returned.counts(key))
            if rank := self.pool_queues.rank(key):
                stored.append(StoredTask(rank[2], rank[3], self._pushed[key], returned))
            if held := self.leases.of(key):
                lease, since = held.lease, held.running.since
                leased = lease.worker, lease.token, since
                stored.append(StoredTask(held.rank[2], lease.task, self._pushed[key], returned, *leased))
        return Row(context, tuple(entry.stages), tuple(stored), entry.history.lasting(), entry.history.last)

    def restore(self, number: int, row: Row, last: int) -> builtins.list[Claim]:
        """Load a stored request; its next event gets a number above `last`. Returns the claims of its leases.

        The first call of `expired` extends these leases, as after any gap.
        """
        context = row.context
        entry = Entry(context, number, dict.fromkeys(row.stages), History(row.events, last))
        self.requests[context.id] = entry
        self._count(entry, False)
        self._publish(entry, ())
        self.reserve(number)
        claims = []
        for stored in row.tasks:
            task = stored.task
            self.reserve(stored.arrival)
            rank = (-task.priority, task.order, stored.arrival, task)
            self._pushed[task.key] = stored.pushed
            for worker, times in stored.returned.items():
                self._returned.count(task.key, worker, times)
            if not stored.token:
                self._put(rank)
                continue
            lease = self.leases.restore(rank, stored.worker, stored.token, self._clock.now(), 0.0, stored.since)
            claims.append(lease.claim)
        self._update_index(entry)
        return claims

    def reserve(self, number: int) -> None:
        """Give no arrival a number up to this one: it is in use."""
        self._arrivals = max(self._arrivals, number + 1)

    def _arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals - 1

    def _admit(self, context: RequestContext, tasks: Sequence[Task], limits: Limits) -> None:
        if self._active >= limits.max_active:
            raise Overloaded(f"{self._active} requests are in progress, no more are accepted: try again later")
        if limits.max_cost is not None and self._active and self._cost + context.cost > limits.max_cost:
            raise Overloaded(
                f"what is in progress and this together cost more than {limits.max_cost:g}: try again later"
            )
        for pool, more in Counter(task.planned.pool for task in tasks).items():
            size = self.pool_queues.size(pool)
            if size + more > limits.max_queue:
                raise Overloaded(f"{size} tasks wait in pool {pool}, up to {limits.max_queue} may: try again later")

    def _count(self, entry: Entry, was_active: bool) -> None:
        """Update the sums for a new request, or a new version of one."""
        change = (not entry.context.over) - was_active
        self._active += change
        self._tenants.count(entry.context.caller.tenant, change)
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
            self._remove_task(task.key)
            entry.stages[task.stage] = None
            self._pushed[task.key] = self._clock.wall()
            if task.avoids:
                self._returned.count(task.key, task.avoids, MOST_RETURNS)
            self._put((-task.priority, task.order, self._arrival(), task))

    def _put(self, rank: Rank) -> None:
        self.pool_queues.put(rank, self._clock.now())
        self.changed_pools[rank[3].planned.pool] = None

    def _remove_task(self, key: Key) -> None:
        """Remove a task from its queue and end its lease, whichever there is."""
        self.leases.end(key)
        self._returned.forget(key)
        self._pushed.pop(key, None)
        if rank := self.pool_queues.remove(key):
            self.changed_pools[rank[3].planned.pool] = None

    def _note_change(self, entry: Entry) -> None:
        """Index an entry that has changed, and call `changed`."""
        self._update_index(entry)
        self._changed(entry)

    def _update_index(self, entry: Entry) -> None:
        context = entry.context
        is_running = any(self.leases.of((context.id, stage)) for stage in entry.stages)
        self.index.put(entry, "in_progress" if is_running and context.status == "queued" else context.status)


def _unknown(request: str) -> NotFound:
    return NotFound(f"no request {request}")


def _lost(claim: Claim) -> LeaseLost:
    return LeaseLost(f"attempt {claim.attempt} of {claim.stage} of {claim.request} does not hold its lease")
