"""The queues in which tasks wait, one a pool, and who goes first for a worker."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import islice
from operator import itemgetter

from unfuse.core.task import Task
from unfuse.queues.returned import Key
from unfuse.queues.wanted import PREFERENCE_AMONG, PREFERENCE_S, Wanted

Rank = tuple[float, float, int, Task]
"""Where a task stands, (−priority, order, arrival), and the task; arrivals differ, so tasks are never compared."""


class PoolQueues:
    """Ready tasks of each pool as a sorted list: finding a place is a bisection, and the move of pointers behind it
    costs microseconds even at 100,000 tasks. Those whose time has not come are in one list, by that time.
    """

    def __init__(self) -> None:
        self._ranks: dict[Key, Rank] = {}
        self._queues: defaultdict[str, list[Rank]] = defaultdict(list)
        self._since: dict[Key, float] = {}
        self._delayed: list[tuple[float, int, Rank]] = []
        self._sizes = Counter[str]()

    def put(self, rank: Rank, now: float) -> None:
        """A task takes its place, or waits for its time."""
        task = rank[3]
        self._ranks[task.key] = rank
        self._sizes[task.pool] += 1
        if task.not_before > now:
            insort(self._delayed, (task.not_before, rank[2], rank))
        else:
            self._insert(rank, now)

    def ripen(self, now: float) -> list[str]:
        """Tasks whose time has come join their queues; their pools."""
        count = bisect_right(self._delayed, now, key=itemgetter(0))
        ripe = [rank for _, _, rank in self._delayed[:count]]
        del self._delayed[:count]
        for rank in ripe:
            self._insert(rank, rank[3].not_before)
        return [rank[3].pool for rank in ripe]

    def ripens(self) -> float | None:
        """When the next task's time comes."""
        return self._delayed[0][0] if self._delayed else None

    def remove(self, key: Key) -> Rank | None:
        """A task is gone; where it stood, if it was there."""
        rank = self._ranks.pop(key, None)
        if rank is None:
            return None
        self._sizes[rank[3].pool] -= 1
        if self._since.pop(key, None) is None:
            del self._delayed[bisect_left(self._delayed, (rank[3].not_before, rank[2], rank))]
        else:
            line = self._queues[rank[3].pool]
            del line[bisect_left(line, rank)]
        return rank

    def rank(self, key: Key) -> Rank | None:
        """Where a task stands."""
        return self._ranks.get(key)

    def size(self, pool: str) -> int:
        """Tasks that wait in a pool, their time come or not."""
        return self._sizes[pool]

    def front(self, pool: str, count: int) -> list[Rank]:
        """The first of a pool's line."""
        return self._queues[pool][:count] if pool in self._queues else []

    def position(self, rank: Rank) -> int:
        """How many of its pool go before a task."""
        return bisect_left(self._queues[rank[3].pool], rank)

    def next(
        self, wanted: Wanted, full: frozenset[str], others: frozenset[Key], now: float, used: Mapping[str, int]
    ) -> Rank | None:
        """The task that such a worker takes, having taken tasks that have `used` so much of its resources.

        `full` are pools that are held back, `others` the keys of tasks that are for others.
        Where there is not enough for one, only pools go on that are later than its own or need nothing of that.
        """
        pools = [pool for pool in wanted.pools if pool not in full and pool in self._queues]
        while (rank := self._first(wanted, pools, others, now)) is not None:
            task = rank[3]
            offer = wanted.pools[task.pool]
            lacks = offer.lacks(task.resources, used)
            if not lacks:
                return rank
            pools = [
                pool
                for pool in pools
                if wanted.pools[pool].later > offer.later or lacks.isdisjoint(wanted.pools[pool].amounts)
            ]
        return None

    def _insert(self, rank: Rank, now: float) -> None:
        insort(self._queues[rank[3].pool], rank)
        self._since[rank[3].key] = now

    def _first(self, wanted: Wanted, pools: list[str], others: frozenset[Key], now: float) -> Rank | None:
        firsts = (
            (next((rank for rank in self._queues[pool] if rank[3].key not in others), None), pool) for pool in pools
        )
        heads = ((rank, pool) for rank, pool in firsts if rank is not None)
        found = min(((rank[0], -_later(wanted, pool), rank) for rank, pool in heads), default=None)
        if found is None or (wanted.above is not None and -found[0] <= wanted.above):
            return None
        priority, later, first = found
        if (wanted.near or wanted.affinity) and now - self._since[first[3].key] < PREFERENCE_S:
            lines = [self._queues[pool][:PREFERENCE_AMONG] for pool in pools if -_later(wanted, pool) == later]
            front = islice(heapq.merge(*lines), PREFERENCE_AMONG)
            among = [rank for rank in front if rank[0] == priority and rank[3].key not in others]
            first = max(among, key=lambda rank: _liking(wanted, rank[3]))
        return first


def _later(wanted: Wanted, pool: str) -> int:
    """How far a pool is from the beginning of its pipelines."""
    return wanted.pools[pool].later


def _liking(wanted: Wanted, task: Task) -> int:
    """How much a worker prefers a task: inputs that are near, then company."""
    if wanted.near and task.near == wanted.near:
        return 2
    return int(bool(wanted.affinity) and task.affinity == wanted.affinity)
