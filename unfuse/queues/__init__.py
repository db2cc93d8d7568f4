"""Queue backends by name, and `open` for a queue's URL."""

from __future__ import annotations

from unfuse.core.clock import Clock
from unfuse.core.registry import resolve
from unfuse.queues.base import QueueBackend

#: The class of each backend, by the first part of its URLs.
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
    """Open the queue at `url`.

    `url`: the name of a backend, optionally with ":" and an address. A backend outside unfuse is named `module:attr`,
    optionally with "://" and an address.
    `clock`: replaces the clock of the backend.
    Raises ConfigError for an unknown backend, and TransientError if the queue cannot be opened now.
    """
    scheme = url.partition(":")[0]
    name = scheme if scheme in BACKENDS else url.partition("://")[0]
    backend: type[QueueBackend] = resolve(BACKENDS, name, "queue")
    return backend.open(url, clock)


__all__ = ["BACKENDS", "QueueBackend", "open"]
