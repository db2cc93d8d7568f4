"""Tasks that wait: one sorted queue for each pool, and the choice of a worker's next task."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import islice
from operator import itemgetter

from unfuse.core.task import Task
from unfuse.queues.wanted import PREFERENCE_AMONG, PREFERENCE_S, Wanted

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
