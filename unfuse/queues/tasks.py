"""Tasks in memory: those that wait, by pool, and those that are leased."""

from __future__ import annotations

import heapq
import math
import secrets
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

import msgspec

from unfuse.core.request import Running
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import MOST_RETURNS, PREFERENCE_AMONG, PREFERENCE_S, Renewal, Wanted

Key = tuple[str, str]  # the request and the stage of a task

Rank = tuple[float, float, int, Task]
"""The sort key of a task, (−priority, order, arrival), then the task, which is never compared: arrivals differ."""


class PoolQueues:
    """One sorted list of ready tasks for each pool, and one list of tasks whose `not_before` is in the future.

    Inserting is a bisection and a move of pointers: microseconds at 100,000 tasks.
    """

    def __init__(self) -> None:
        self._ranks: dict[Key, Rank] = {}
        self._queues: defaultdict[str, list[Rank]] = defaultdict(list)
        self._since: dict[Key, float] = {}
        self._delayed: list[tuple[float, int, Rank]] = []
        self._sizes = Counter[str]()

    def put(self, rank: Rank, now: float) -> None:
        """Add a task to its pool's queue, or to the delayed tasks if its time has not come."""
        task = rank[3]
        self._ranks[task.key] = rank
        self._sizes[task.planned.pool] += 1
        if task.not_before > now:
            insort(self._delayed, (task.not_before, rank[2], rank))
        else:
            self._insert(rank, now)

    def release_due(self, now: float) -> list[str]:
        """Move delayed tasks whose time has come to their queues. Returns the pools of these tasks."""
        count = bisect_right(self._delayed, now, key=itemgetter(0))
        due = [rank for _, _, rank in self._delayed[:count]]
        del self._delayed[:count]
        for rank in due:
            self._insert(rank, rank[3].not_before)
        return [rank[3].planned.pool for rank in due]

    def next_due(self) -> float | None:
        """When the next delayed task may be leased; None if no task is delayed."""
        return self._delayed[0][0] if self._delayed else None

    def remove(self, key: Key) -> Rank | None:
        """Remove a task. Returns its rank, if it was there."""
        rank = self._ranks.pop(key, None)
        if rank is None:
            return None
        self._sizes[rank[3].planned.pool] -= 1
        if self._since.pop(key, None) is None:
            del self._delayed[bisect_left(self._delayed, (rank[3].not_before, rank[2], rank))]
        else:
            queue = self._queues[rank[3].planned.pool]
            del queue[bisect_left(queue, rank)]
        return rank

    def rank(self, key: Key) -> Rank | None:
        """The rank of a task, if it waits."""
        return self._ranks.get(key)

    def size(self, pool: str) -> int:
        """The number of tasks that wait in a pool, delayed ones included."""
        return self._sizes[pool]

    def front(self, pool: str, count: int) -> list[Rank]:
        """The first tasks of a pool's queue."""
        return self._queues[pool][:count] if pool in self._queues else []

    def position(self, rank: Rank) -> int:
        """How many tasks of its pool are ahead of this one."""
        return bisect_left(self._queues[rank[3].planned.pool], rank)

    def next(
        self, wanted: Wanted, full: frozenset[str], others: frozenset[Key], now: float, used: Mapping[str, int]
    ) -> Rank | None:
        """The next task for a worker whose earlier tasks have `used` so much of its resources.

        Pools in `full` are held back; `others` are keys of tasks that this worker must not get. When a task needs more
        of a resource than is left, only pools that are later, or do not use this resource, are considered further.
        """
        pools = [pool for pool in wanted.pools if pool not in full and pool in self._queues]
        while (rank := self._first(wanted, pools, others, now)) is not None:
            task = rank[3]
            offer = wanted.pools[task.planned.pool]
            lacking = offer.lacks(task.resources, used)
            if not lacking:
                return rank
            pools = [
                pool
                for pool in pools
                if wanted.pools[pool].later > offer.later or lacking.isdisjoint(wanted.pools[pool].amounts)
            ]
        return None

    def _insert(self, rank: Rank, now: float) -> None:
        insort(self._queues[rank[3].planned.pool], rank)
        self._since[rank[3].key] = now

    def _first(self, wanted: Wanted, pools: list[str], others: frozenset[Key], now: float) -> Rank | None:
        """The first task of these pools that the worker may have; within PREFERENCE_S, one that it prefers."""
        heads = []
        for pool in pools:
            head = next((rank for rank in self._queues[pool] if rank[3].key not in others), None)
            if head is not None:
                heads.append((head[0], -wanted.pools[pool].later, head))
        if not heads:
            return None
        negative_priority, negative_later, first = min(heads)
        if wanted.above is not None and -negative_priority <= wanted.above:
            return None
        if not (wanted.near or wanted.affinity) or now - self._since[first[3].key] >= PREFERENCE_S:
            return first
        equally_late = [pool for pool in pools if -wanted.pools[pool].later == negative_later]
        front = heapq.merge(*(self._queues[pool][:PREFERENCE_AMONG] for pool in equally_late))
        candidates = [
            rank
            for rank in islice(front, PREFERENCE_AMONG)
            if rank[0] == negative_priority and rank[3].key not in others
        ]
        return max(candidates, key=lambda rank: _preference(wanted, rank[3]))


def _preference(wanted: Wanted, task: Task) -> int:
    """How much a worker prefers a task: 2 for inputs on its node, 1 for its affinity, else 0."""
    if wanted.near and task.near == wanted.near:
        return 2
    return int(bool(wanted.affinity) and task.affinity == wanted.affinity)


@dataclass(eq=False, slots=True)
class Held:
    """A leased task, its rank in the queue, and its progress. It was leased when so many seconds were `worked`."""

    lease: Lease
    rank: Rank
    running: Running
    began: float


class Leases:
    """All leases, by the task's key. Times are seconds of the queue's clock; `since` is Unix seconds."""

    def __init__(self) -> None:
        self._held: dict[Key, Held] = {}
        self._swept = -math.inf
        self._worked = self._most_between = 0.0

    def give(self, rank: Rank, worker: str, now: float, ttl: float, since: float) -> Lease:
        """Lease a task under a new token."""
        return self.restore(rank, worker, secrets.token_bytes(16), now, ttl, since)

    def restore(self, rank: Rank, worker: str, token: bytes, now: float, ttl: float, since: float) -> Lease:
        """Lease a task under this token."""
        task = rank[3]
        lease = Lease(task, worker, token, now + ttl)
        running = Running(task.stage, task.attempt, worker, since)
        self._held[task.key] = Held(lease, rank, running, self._worked_at(now))
        return lease

    def running(self, held: Held, now: float) -> Running:
        """What is shown of a leased task."""
        return msgspec.structs.replace(held.running, ran_s=self._worked_at(now) - held.began)

    def of(self, key: Key) -> Held | None:
        """The lease of a task, if it is leased."""
        return self._held.get(key)

    def held(self, claim: Claim) -> Held | None:
        """The lease that this claim holds, if it still holds one."""
        held = self._held.get(claim.key)
        return held if held is not None and held.lease.claim == claim else None

    def end(self, key: Key) -> None:
        """End the lease of a task, if there is one."""
        self._held.pop(key, None)

    def renew(self, claims: Sequence[Claim], expires: float) -> Renewal:
        """Extend the leases that are still held."""
        held: list[Claim] = []
        ended: list[Claim] = []
        for claim in claims:
            mine = self.held(claim)
            (ended if mine is None else held).append(claim)
            if mine is not None:
                mine.lease = msgspec.structs.replace(mine.lease, expires=expires)
        return Renewal(tuple(held), tuple(ended))

    def lapse(self, worker: str, now: float) -> None:
        """Have all leases of a worker expire."""
        for held in self._held.values():
            if held.lease.worker == worker:
                held.lease = msgspec.structs.replace(held.lease, expires=min(held.lease.expires, now))

    def expired(self, now: float, ttl: float) -> list[Lease]:
        """Leases that ran out. If the last call was over ttl / 2 ago, none could be renewed: all are extended."""
        if now - self._swept > ttl / 2:
            for held in self._held.values():
                held.lease = msgspec.structs.replace(held.lease, expires=max(held.lease.expires, now + ttl))
        self._worked, self._swept, self._most_between = self._worked_at(now), now, ttl / 2
        return [held.lease for held in self._held.values() if held.lease.expires <= now]

    def _worked_at(self, now: float) -> float:
        """Seconds for which time limits count until now: between two calls of `expired`, ttl / 2 at most."""
        return self._worked + min(max(0.0, now - self._swept), self._most_between)

    def by_worker(self) -> Counter[str]:
        """How many leases each worker holds."""
        return Counter(held.lease.worker for held in self._held.values())


class Returned:
    """Counts by task and worker. A worker with MOST_RETURNS of a task is excluded from it."""

    def __init__(self) -> None:
        self._counts: dict[Key, Counter[str]] = {}
        self._excluded: dict[str, set[Key]] = {}

    def count(self, key: Key, worker: str, times: int = 1) -> None:
        """Count that a worker has returned a task."""
        counts = self._counts.setdefault(key, Counter())
        counts[worker] += times
        if counts[worker] >= MOST_RETURNS:
            self._excluded.setdefault(worker, set()).add(key)

    def counts(self, key: Key) -> Mapping[str, int]:
        """How often each worker has returned a task."""
        return self._counts.get(key, {})

    def count_excluded(self, key: Key) -> int:
        """How many workers are excluded from a task."""
        return sum(times >= MOST_RETURNS for times in self.counts(key).values())

    def excluded_for(self, worker: str) -> frozenset[Key]:
        """The tasks that a worker is excluded from."""
        return frozenset(self._excluded.get(worker, ()))

    def forget(self, key: Key) -> None:
        """Drop the counts of a task that is gone."""
        for worker in self._counts.pop(key, {}):
            if tasks := self._excluded.get(worker):
                tasks.discard(key)
                if not tasks:
                    del self._excluded[worker]
