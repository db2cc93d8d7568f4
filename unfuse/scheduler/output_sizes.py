"""Room for outputs whose length nobody can tell before: by the lengths of late."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from functools import partial
from math import ceil

import msgspec

from unfuse.core.pool import declared
from unfuse.core.task import Task

SHARE, REMEMBERED = 0.95, 64
"""The part of outputs that the room is meant for, of the last so many of a pool."""


class OutputSizes:
    """The last lengths, in bytes, of what each pool made."""

    def __init__(self) -> None:
        self._lengths: defaultdict[str, deque[int]] = defaultdict(partial(deque, maxlen=REMEMBERED))

    def learn(self, pool: str, nbytes: int) -> None:
        """An output of that length was made."""
        self._lengths[declared(pool)].append(nbytes)

    def of(self, pool: str) -> int:
        """The room that SHARE of a pool's outputs had enough of; 0 while nothing is known."""
        lengths = sorted(self._lengths.get(declared(pool), ()))
        return lengths[ceil(SHARE * len(lengths)) - 1] if lengths else 0

    def given(self, tasks: Iterable[Task]) -> tuple[Task, ...]:
        """These tasks, with room where their pipelines declare none."""
        return tuple(task if task.room else msgspec.structs.replace(task, room=self.of(task.pool)) for task in tasks)
