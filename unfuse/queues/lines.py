"""The lines in which ready tasks wait, one a pool, and who goes first for a worker."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from itertools import islice

from unfuse.core.task import Task
from unfuse.queues.base import PREFERENCE_AMONG, PREFERENCE_S, Wanted

Rank = tuple[float, float, int, Task]
"""Where a task stands, (−priority, order, arrival), and the task; arrivals differ, so tasks are never compared."""


class Lines:
    """Ready tasks of each pool as a sorted list: finding a place is a bisection, and the move of pointers behind it
    costs microseconds even at 100,000 tasks.
    """

    def __init__(self) -> None:
        self._lines: defaultdict[str, list[Rank]] = defaultdict(list)
        self._since: dict[tuple[str, str], float] = {}

    def insert(self, rank: Rank, now: float) -> None:
        """A task is ready, now."""
        insort(self._lines[rank[3].pool], rank)
        self._since[rank[3].key] = now

    def remove(self, rank: Rank) -> None:
        """A task is gone."""
        line = self._lines[rank[3].pool]
        del line[bisect_left(line, rank)], self._since[rank[3].key]

    def size(self, pool: str) -> int:
        """Tasks in a pool's line."""
        return len(self._lines[pool]) if pool in self._lines else 0

    def front(self, pool: str, count: int) -> list[Rank]:
        """The first of a pool's line."""
        return self._lines[pool][:count] if pool in self._lines else []

    def position(self, rank: Rank) -> int:
        """How many of its pool go before a task."""
        return bisect_left(self._lines[rank[3].pool], rank)

    def next(self, wanted: Wanted, full: frozenset[str], now: float, used: int = 0) -> Rank | None:
        """The task that such a worker takes, having taken `used` bytes; `full` are pools that are held back."""
        lines = [self._lines[pool] for pool in wanted.pools - full if pool in self._lines]
        first = min((line[0] for line in lines if line), default=None)
        if first is None or (wanted.above is not None and -first[0] <= wanted.above):
            return None
        if (wanted.near or wanted.affinity) and now - self._since[first[3].key] < PREFERENCE_S:
            merged = heapq.merge(*(line[:PREFERENCE_AMONG] for line in lines))
            among = [rank for rank in islice(merged, PREFERENCE_AMONG) if rank[0] == first[0]]
            first = max(among, key=lambda rank: _liking(wanted, rank[3]))
        return first if wanted.room is None or used + first[3].room <= wanted.room else None


def _liking(wanted: Wanted, task: Task) -> int:
    """How much a worker prefers a task: inputs that are near, then company."""
    if wanted.near and task.near == wanted.near:
        return 2
    return int(bool(wanted.affinity) and task.affinity == wanted.affinity)
