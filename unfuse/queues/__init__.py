"""Queues: where tasks wait and contexts live."""

from __future__ import annotations

from unfuse.core.clock import Clock
from unfuse.core.registry import resolve
from unfuse.queues.base import QueueBackend

BACKENDS = {
    "memory": "unfuse.queues.memory:MemoryQueue",
    "redis": "unfuse.queues.redis:RedisQueue",
    "rediss": "unfuse.queues.redis:RedisQueue",
    "redis+sentinel": "unfuse.queues.redis:RedisQueue",
    "rediss+sentinel": "unfuse.queues.redis:RedisQueue",
    "redis+cluster": "unfuse.queues.redis:RedisQueue",
    "rediss+cluster": "unfuse.queues.redis:RedisQueue",
    "sqlite": "unfuse.queues.sqlite:SqliteQueue",
}


def open(url: str, clock: Clock | None = None) -> QueueBackend:
    """Open the queue at `url`: the name of a backend, which may be followed by ":" and an address for that backend.

    A backend outside unfuse is named `module:attr`, which may be followed by "://" and an address. Raises ConfigError
    for an unknown backend, and TransientError if the queue cannot be opened now.
    """
    known = url.partition(":")[0]
    name = known if known in BACKENDS else url.partition("://")[0]
    backend: type[QueueBackend] = resolve(BACKENDS, name, "queue")
    return backend.at(url, clock)


__all__ = ["BACKENDS", "QueueBackend", "open"]
