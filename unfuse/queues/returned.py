"""The part of a queue in memory that remembers who handed which task back without a step of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from unfuse.queues.base import MOST_RETURNS

Key = tuple[str, str]


class Returned:
    """How often each worker has so returned each task that is there, and whom that is enough of."""

    def __init__(self) -> None:
        self._counts: dict[Key, Counter[str]] = {}
        self._kept_from: dict[str, set[Key]] = {}

    def count(self, key: Key, worker: str, times: int = 1) -> None:
        """A worker has returned a task."""
        counts = self._counts.setdefault(key, Counter())
        counts[worker] += times
        if counts[worker] >= MOST_RETURNS:
            self._kept_from.setdefault(worker, set()).add(key)

    def by(self, key: Key) -> Mapping[str, int]:
        """How often each worker has returned a task."""
        return self._counts.get(key, {})

    def done_with(self, key: Key) -> int:
        """How many workers get a task no more."""
        return sum(times >= MOST_RETURNS for times in self.by(key).values())

    def kept_from(self, worker: str) -> frozenset[Key]:
        """The tasks that a worker gets no more."""
        return frozenset(self._kept_from.get(worker, ()))

    def forget(self, key: Key) -> None:
        """The task is gone."""
        for worker in self._counts.pop(key, {}):
            if tasks := self._kept_from.get(worker):
                tasks.discard(key)
                if not tasks:
                    del self._kept_from[worker]
