"""Tasks in memory: those that wait, by pool, and the leases on the others."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter

import msgspec

from unfuse.core.request import RunningStage
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import MOST_RETURNS, PREFERENCE_AMONG, PREFERENCE_S, LeaseRequest, RenewalResult


@dataclass(eq=False, slots=True)
class QueuedTask:
    """A task of a stored request, whether it waits or is leased."""

    task: Task
    #: Its place among all tasks that were pushed.
    arrival: int
    #: When it was pushed, in Unix seconds.
    pushed: float
    #: How often each worker has turned it down. A worker with MOST_RETURNS does not get it again.
    returned: dict[str, int] = field(default_factory=dict)
    #: Since when it may be leased, in seconds of the queue's clock. None while it is delayed.
    ready_since: float | None = None

    @property
    def rank(self) -> Rank:
        """The key by which the tasks of a pool are sorted, and the task, which is never compared: arrivals differ."""
        return -self.task.priority, self.task.order, self.arrival, self

    def excludes(self, worker: str) -> bool:
        """Whether this worker does not get the task any more."""
        return self.returned.get(worker, 0) >= MOST_RETURNS


Rank = tuple[float, float, int, QueuedTask]


class PoolQueues:
    """One sorted list of ready tasks for each pool, and one list of tasks whose `not_before` is in the future.

    Inserting is a bisection and a move of pointers: microseconds at 100,000 tasks.
    """

    def __init__(self) -> None:
        self._queues: defaultdict[str, list[Rank]] = defaultdict(list)
        self._delayed: list[tuple[float, int, QueuedTask]] = []
        self._sizes = Counter[str]()

    def put(self, queued: QueuedTask, now: float) -> None:
        """Add a task to its pool's queue, or to the delayed tasks if its time has not come."""
        task = queued.task
        self._sizes[task.planned.pool] += 1
        if task.not_before > now:
            queued.ready_since = None
            insort(self._delayed, (task.not_before, queued.arrival, queued))
        else:
            self._insert(queued, now)

    def release_due(self, now: float) -> list[str]:
        """Move delayed tasks whose time has come to their queues. Returns the pools of these tasks."""
        count = bisect_right(self._delayed, now, key=itemgetter(0))
        due = [queued for _, _, queued in self._delayed[:count]]
        del self._delayed[:count]
        for queued in due:
            self._insert(queued, queued.task.not_before)
        return [queued.task.planned.pool for queued in due]

    def next_due(self) -> float | None:
        """When the next delayed task may be leased; None if no task is delayed."""
        return self._delayed[0][0] if self._delayed else None

    def remove(self, queued: QueuedTask) -> None:
        """Remove a task that waits."""
        pool = queued.task.planned.pool
        self._sizes[pool] -= 1
        if queued.ready_since is None:
            del self._delayed[bisect_left(self._delayed, (queued.task.not_before, queued.arrival, queued))]
        else:
            del self._queues[pool][bisect_left(self._queues[pool], queued.rank)]

    def size(self, pool: str) -> int:
        """The number of tasks that wait in a pool, delayed ones included."""
        return self._sizes[pool]

    def front(self, pool: str, count: int) -> list[QueuedTask]:
        """The first tasks of a pool's queue."""
        return [queued for *_, queued in self._queues[pool][:count]] if pool in self._queues else []

    def position(self, queued: QueuedTask) -> int:
        """How many tasks of its pool are ahead of this one."""
        return bisect_left(self._queues[queued.task.planned.pool], queued.rank)

    def next(self, worker: str, wanted: LeaseRequest, now: float, used: Mapping[str, int]) -> QueuedTask | None:
        """The next task for a worker whose earlier tasks have `used` so much of its resources.

        Pools that feed a full one are held back. When a task needs more of a resource than is left, only pools that
        are later, or do not use this resource, are considered further.
        """
        pools = [
            pool
            for pool, offer in wanted.pools.items()
            if pool in self._queues and all(self._sizes[fed] <= most for fed, most in offer.behind.items())
        ]
        while (queued := self._first(worker, wanted, pools, now)) is not None:
            offer = wanted.pools[queued.task.planned.pool]
            lacking = offer.lacks(queued.task.resources, used)
            if not lacking:
                return queued
            pools = [
                pool
                for pool in pools
                if wanted.pools[pool].later > offer.later or lacking.isdisjoint(wanted.pools[pool].amounts)
            ]
        return None

    def _insert(self, queued: QueuedTask, since: float) -> None:
        insort(self._queues[queued.task.planned.pool], queued.rank)
        queued.ready_since = since

    def _first(self, worker: str, wanted: LeaseRequest, pools: list[str], now: float) -> QueuedTask | None:
        """The first task of these pools that the worker may have; within PREFERENCE_S, one that it prefers."""
        heads = []
        for pool in pools:
            head = next((rank for rank in self._queues[pool] if not rank[3].excludes(worker)), None)
            if head is not None:
                heads.append((head[0], -wanted.pools[pool].later, head))
        if not heads:
            return None
        negative_priority, negative_later, (*_, first) = min(heads)
        if wanted.above is not None and -negative_priority <= wanted.above:
            return None
        if not (wanted.near or wanted.affinity) or now - (first.ready_since or 0.0) >= PREFERENCE_S:
            return first
        equally_late = [pool for pool in pools if -wanted.pools[pool].later == negative_later]
        front = heapq.merge(*(self._queues[pool][:PREFERENCE_AMONG] for pool in equally_late))
        candidates = [
            queued
            for priority, _, _, queued in islice(front, PREFERENCE_AMONG)
            if priority == negative_priority and not queued.excludes(worker)
        ]
        return max(candidates, key=lambda queued: _preference(wanted, queued.task))


def _preference(wanted: LeaseRequest, task: Task) -> int:
    """How much a worker prefers a task: 2 for inputs on its node, 1 for its affinity, else 0."""
    if wanted.near and task.near == wanted.near:
        return 2
    return int(bool(wanted.affinity) and task.affinity == wanted.affinity)


@dataclass(eq=False, slots=True)
class LeasedTask:
    """A leased task and its progress. It was leased when time limits had counted `began` seconds."""

    queued: QueuedTask
    lease: Lease
    running: RunningStage
    began: float


class Leases:
    """All leases, by the task's request and stage. Times are seconds of the queue's clock."""

    def __init__(self) -> None:
        self._leased: dict[tuple[str, str], LeasedTask] = {}
        self._swept = -math.inf
        self._worked = self._most_between = 0.0

    def give(self, queued: QueuedTask, lease: Lease, now: float, since: float) -> None:
        """Lease a task. `since` is Unix seconds."""
        running = RunningStage(lease.task.stage, lease.task.attempt, lease.worker, since)
        self._leased[lease.task.key] = LeasedTask(queued, lease, running, self._worked_at(now))

    def running(self, keys: Sequence[tuple[str, str]], now: float) -> tuple[RunningStage, ...]:
        """The running attempts of those tasks that are leased."""
        worked = self._worked_at(now)
        leased = [one for key in keys if (one := self._leased.get(key))]
        return tuple(msgspec.structs.replace(one.running, ran_s=worked - one.began) for one in leased)

    def of(self, key: tuple[str, str]) -> LeasedTask | None:
        """The lease of a task, if it is leased."""
        return self._leased.get(key)

    def held(self, claim: Claim) -> LeasedTask | None:
        """The lease that this claim holds, if it still holds one."""
        leased = self._leased.get(claim.key)
        return leased if leased is not None and leased.lease.claim == claim else None

    def end(self, key: tuple[str, str]) -> LeasedTask | None:
        """End the lease of a task, if there is one. Returns it."""
        return self._leased.pop(key, None)

    def renew(self, claims: Sequence[Claim], expires: float) -> RenewalResult:
        """Extend the leases that are still held."""
        held: list[Claim] = []
        ended: list[Claim] = []
        for claim in claims:
            leased = self.held(claim)
            (ended if leased is None else held).append(claim)
            if leased is not None:
                leased.lease = msgspec.structs.replace(leased.lease, expires=expires)
        return RenewalResult(tuple(held), tuple(ended))

    def lapse(self, worker: str, now: float) -> None:
        """Have all leases of a worker expire."""
        for leased in self._leased.values():
            if leased.lease.worker == worker:
                leased.lease = msgspec.structs.replace(leased.lease, expires=min(leased.lease.expires, now))

    def expired(self, now: float, ttl: float) -> list[Lease]:
        """Leases that ran out. If the last call was over ttl / 2 ago, none could be renewed: all are extended."""
        if now - self._swept > ttl / 2:
            for leased in self._leased.values():
                leased.lease = msgspec.structs.replace(leased.lease, expires=max(leased.lease.expires, now + ttl))
        self._worked, self._swept, self._most_between = self._worked_at(now), now, ttl / 2
        return [leased.lease for leased in self._leased.values() if leased.lease.expires <= now]

    def _worked_at(self, now: float) -> float:
        """Seconds for which time limits count until now: between two calls of `expired`, ttl / 2 at most."""
        return self._worked + min(max(0.0, now - self._swept), self._most_between)

    def by_worker(self) -> Counter[str]:
        """How many leases each worker holds."""
        return Counter(leased.lease.worker for leased in self._leased.values())
