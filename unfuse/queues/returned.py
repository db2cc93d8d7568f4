"""Counts how often a worker has handed a task back without a step of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from unfuse.queues.base import MOST_RETURNS

Key = tuple[str, str]


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
