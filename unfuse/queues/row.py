"""A request as the journal stores it, and pieces of what its stages make."""

from __future__ import annotations

import msgspec

from unfuse.core.event import Event
from unfuse.core.request import RequestContext
from unfuse.core.task import Task


class StoredTask(msgspec.Struct, frozen=True, array_like=True):
    """A task that is queued, or leased if it has a token: then to `worker`, `since` that time.

    `returned` counts how often each worker has turned it down. `since` and `pushed` are Unix seconds.
    """

    arrival: int
    task: Task
    pushed: float
    returned: dict[str, int]
    worker: str = ""
    token: bytes = b""
    since: float = 0.0


class Pieces(msgspec.Struct, frozen=True):
    """Pieces of a stage of the request `id`, from number `first` on, as they were recorded at one time."""

    id: str
    stage: str
    first: int
    pieces: tuple[bytes, ...]


class Row(msgspec.Struct, frozen=True):
    """A whole stored request: any change replaces its row. `last` is the highest number of an event."""

    context: RequestContext
    stages: tuple[str, ...]
    tasks: tuple[StoredTask, ...]
    events: tuple[Event, ...]
    last: int
