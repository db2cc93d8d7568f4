"""Queues: where tasks wait and contexts live."""

from __future__ import annotations

from unfuse.core.clock import Clock, SystemClock
from unfuse.core.registry import resolve
from unfuse.queues.base import TaskQueue

BACKENDS = {
    "memory": "unfuse.queues.memory:MemoryQueue",
    "redis": "unfuse.queues.redis:RedisQueue",
    "rediss": "unfuse.queues.redis:RedisQueue",
    "sqlite": "unfuse.queues.sqlite:SqliteQueue",
}


def open(url: str, clock: Clock | None = None) -> TaskQueue:
    """The queue at `url`: a backend's name, alone or followed by ":" and what that backend makes of the rest.

    A backend of somebody else is named `module:attr`, alone or followed by "://" and the rest.
    Raises ConfigError for a backend that nobody knows.
    """
    known = url.partition(":")[0]
    name = known if known in BACKENDS else url.partition("://")[0]
    backend: type[TaskQueue] = resolve(BACKENDS, name, "queue")
    return backend.at(url, clock or SystemClock())


__all__ = ["BACKENDS", "TaskQueue", "open"]
