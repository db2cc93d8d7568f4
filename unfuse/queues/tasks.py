"""In-memory task queues by pool, and the leases on running tasks."""

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
from unfuse.queues.base import MAX_REFUSALS, PREFERENCE_S, PREFERENCE_TASKS, LeaseRequest, RenewalResult


@dataclass(eq=False, slots=True)
class QueuedTask:
    """A task of a stored request, waiting or leased."""

    #: The task. A hand-back replaces it by one with the next attempt number.
    task: Task
    #: Number of arrival among all pushed tasks.
    arrival: int
    #: When it was pushed, in Unix seconds.
    pushed: float
    #: How often each worker has turned it down. A worker with MAX_REFUSALS is excluded.
    returned: dict[str, int] = field(default_factory=dict)
    #: Since when it may be leased, in seconds of the queue's clock. None while it is delayed.
    ready_since: float | None = None

    @property
    def sort_key(self) -> SortKey:
        """The sort key in its pool, followed by the task.

        The task is never compared, since arrivals differ.
        """
        return -self.task.priority, self.task.order, self.arrival, self

    def excludes(self, worker: str) -> bool:
        """Return whether this worker may not lease the task any more."""
        return self.returned.get(worker, 0) >= MAX_REFUSALS


#: Negative priority, order, arrival and the task.
SortKey = tuple[float, float, int, QueuedTask]


class PoolQueues:
    """A priority queue of ready tasks for each pool, and one queue of delayed tasks.

    A task is delayed while its `not_before` is in the future. Inserting is a bisection and a move of pointers:
    microseconds at 100,000 tasks.
    """

    def __init__(self) -> None:
        self._queues: defaultdict[str, list[SortKey]] = defaultdict(list)
        self._delayed: list[tuple[float, int, QueuedTask]] = []
        self._sizes = Counter[str]()

    def put(self, queued: QueuedTask, now: float) -> None:
        """Add a task to its pool's queue, or to the delayed tasks.

        It is delayed if its `not_before` is in the future.
        """
        task = queued.task
        self._sizes[task.planned.pool] += 1
        if task.not_before > now:
            queued.ready_since = None
            insort(self._delayed, (task.not_before, queued.arrival, queued))
        else:
            self._insert(queued, now)

    def release_due(self, now: float) -> list[str]:
        """Move delayed tasks whose `not_before` has passed to their queues, and return their pools."""
        count = bisect_right(self._delayed, now, key=itemgetter(0))
        due = [queued for _, _, queued in self._delayed[:count]]
        del self._delayed[:count]
        for queued in due:
            self._insert(queued, queued.task.not_before)
        return [queued.task.planned.pool for queued in due]

    def next_due(self) -> float | None:
        """Return the `not_before` of the next delayed task, or None."""
        return self._delayed[0][0] if self._delayed else None

    def remove(self, queued: QueuedTask) -> None:
        """Remove a waiting task, ready or delayed."""
        pool = queued.task.planned.pool
        self._sizes[pool] -= 1
        if queued.ready_since is None:
            del self._delayed[bisect_left(self._delayed, (queued.task.not_before, queued.arrival, queued))]
        else:
            del self._queues[pool][bisect_left(self._queues[pool], queued.sort_key)]

    def size(self, pool: str) -> int:
        """Return the number of waiting tasks of a pool, delayed ones included."""
        return self._sizes[pool]

    def front(self, pool: str, count: int) -> list[QueuedTask]:
        """Return up to `count` tasks from the front of a pool's queue."""
        return [queued for *_, queued in self._queues[pool][:count]] if pool in self._queues else []

    def position(self, queued: QueuedTask) -> int:
        """Return the number of tasks of its pool that are ahead of this one."""
        return bisect_left(self._queues[queued.task.planned.pool], queued.sort_key)

    def next(self, worker: str, wanted: LeaseRequest, now: float, used: Mapping[str, int]) -> QueuedTask | None:
        """Return the next task that a worker may lease, or None.

        `used`: the resources, by name, that tasks of the same call use already.
        Pools that feed a full pool are left out (back-pressure). When a task needs more of a resource than is free,
        only pools of a greater `stage_depth`, and pools that do not use this resource, are considered further.
        """
        pools = [
            pool
            for pool, offer in wanted.pools.items()
            if pool in self._queues and all(self._sizes[fed] <= limit for fed, limit in offer.backpressure.items())
        ]
        while (queued := self._first(worker, wanted, pools, now)) is not None:
            offer = wanted.pools[queued.task.planned.pool]
            missing = offer.missing_resources(queued.task.resources, used)
            if not missing:
                return queued
            pools = [
                pool
                for pool in pools
                if wanted.pools[pool].stage_depth > offer.stage_depth or missing.isdisjoint(wanted.pools[pool].amounts)
            ]
        return None

    def _insert(self, queued: QueuedTask, since: float) -> None:
        """Add a task to its pool's queue of ready tasks."""
        insort(self._queues[queued.task.planned.pool], queued.sort_key)
        queued.ready_since = since

    def _first(self, worker: str, wanted: LeaseRequest, pools: list[str], now: float) -> QueuedTask | None:
        """Return the first or preferred task of these pools that the worker may lease.

        A preferred task passes over the first one only within PREFERENCE_S of the time when that became ready.
        """
        heads = []
        for pool in pools:
            head = next((sort_key for sort_key in self._queues[pool] if not sort_key[3].excludes(worker)), None)
            if head is not None:
                heads.append((head[0], -wanted.pools[pool].stage_depth, head))
        if not heads:
            return None

        negative_priority, negative_depth, (*_, first) = min(heads)
        if wanted.priority_above is not None and -negative_priority <= wanted.priority_above:
            return None
        if not (wanted.preferred_node or wanted.affinity) or now - (first.ready_since or 0.0) >= PREFERENCE_S:
            return first

        equally_deep = [pool for pool in pools if -wanted.pools[pool].stage_depth == negative_depth]
        front = heapq.merge(*(self._queues[pool][:PREFERENCE_TASKS] for pool in equally_deep))
        candidates = [
            queued
            for priority, _, _, queued in islice(front, PREFERENCE_TASKS)
            if priority == negative_priority and not queued.excludes(worker)
        ]
        # Of equal preferences, `max` returns the first in the queue.
        return max(candidates, key=lambda queued: _preference(wanted, queued.task))


def _preference(wanted: LeaseRequest, task: Task) -> int:
    """Return a worker's preference for a task, from 0 to 2.

    2 for inputs on its node, 1 for its affinity, else 0.
    """
    if wanted.preferred_node and task.preferred_node == wanted.preferred_node:
        return 2
    return int(bool(wanted.affinity) and task.affinity == wanted.affinity)


@dataclass(eq=False, slots=True)
class LeasedTask:
    """A leased task and its progress."""

    #: The task, to be requeued with its old arrival number if it is handed back.
    queued: QueuedTask
    #: The lease. A renewal replaces it by one that expires later.
    lease: Lease
    #: Its attempt, worker and progress, as the request's record shows them.
    running: RunningStage
    #: The reading of `Leases`' time-limit clock when the task was leased, in seconds.
    started: float


class Leases:
    """All leases, by the task's request and stage. Times are seconds of the queue's clock.

    Time limits are measured by a clock of their own (`_worked_at`): gaps between two calls of `sweep_expired`, in which
    no scheduler ran, count for at most half a lease.
    """

    def __init__(self) -> None:
        self._leased: dict[tuple[str, str], LeasedTask] = {}
        #: Time of the last call of `expired`.
        self._swept = -math.inf
        #: Reading of the time-limit clock at that time.
        self._worked = 0.0
        #: Most seconds that it may advance until the next call.
        self._most_between = 0.0

    def add(self, queued: QueuedTask, lease: Lease, now: float, since: float) -> None:
        """Lease a task. `since` is the same time as `now`, in Unix seconds."""
        running = RunningStage(lease.task.stage, lease.task.attempt, lease.worker, since)
        self._leased[lease.task.key] = LeasedTask(queued, lease, running, self._worked_at(now))

    def running(self, keys: Sequence[tuple[str, str]], now: float) -> tuple[RunningStage, ...]:
        """Return the running attempts of the leased ones among these tasks."""
        worked = self._worked_at(now)
        leased_tasks = [leased for key in keys if (leased := self._leased.get(key))]
        return tuple(msgspec.structs.replace(leased.running, ran_s=worked - leased.started) for leased in leased_tasks)

    def get(self, key: tuple[str, str]) -> LeasedTask | None:
        """Return the leased task of this key, or None."""
        return self._leased.get(key)

    def find(self, claim: Claim) -> LeasedTask | None:
        """Return the leased task of this claim, or None if the claim holds no lease."""
        leased = self._leased.get(claim.key)
        return leased if leased is not None and leased.lease.claim == claim else None

    def end(self, key: tuple[str, str]) -> LeasedTask | None:
        """End the lease of a task, if it is leased. Returns the task."""
        return self._leased.pop(key, None)

    def renew(self, claims: Sequence[Claim], expires: float) -> RenewalResult:
        """Set the expiry of the leases that are still held."""
        renewed: list[Claim] = []
        ended: list[Claim] = []
        for claim in claims:
            leased = self.find(claim)
            if leased is None:
                ended.append(claim)
            else:
                renewed.append(claim)
                leased.lease = msgspec.structs.replace(leased.lease, expires=expires)
        return RenewalResult(tuple(renewed), tuple(ended))

    def expire_worker(self, worker: str, now: float) -> None:
        """Expire all leases of a worker."""
        for leased in self._leased.values():
            if leased.lease.worker == worker:
                leased.lease = msgspec.structs.replace(leased.lease, expires=min(leased.lease.expires, now))

    def expired(self, now: float, ttl: float) -> list[Lease]:
        """Return the expired leases, unless the last call was over ttl / 2 ago.

        In that case, all leases are extended instead. Nothing could renew them in that time: no scheduler ran, or the
        clock was set.
        """
        if now - self._swept > ttl / 2:
            for leased in self._leased.values():
                leased.lease = msgspec.structs.replace(leased.lease, expires=max(leased.lease.expires, now + ttl))
        self._worked = self._worked_at(now)
        self._swept = now
        self._most_between = ttl / 2
        return [leased.lease for leased in self._leased.values() if leased.lease.expires <= now]

    def _worked_at(self, now: float) -> float:
        """Return the reading of the time-limit clock.

        Between two calls of `sweep_expired`, it advances ttl / 2 at most.
        """
        return self._worked + min(max(0.0, now - self._swept), self._most_between)

    def by_worker(self) -> Counter[str]:
        """Return the number of leases of each worker."""
        return Counter(leased.lease.worker for leased in self._leased.values())
