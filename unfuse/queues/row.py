"""A request as a journal stores it."""

from __future__ import annotations

import msgspec

from unfuse.core.event import Event
from unfuse.core.request import RequestContext
from unfuse.core.task import Task


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """A task that is queued, or leased to the worker it names, and how often workers have turned it down.

    `since` and `pushed` are Unix seconds.
    """

    arrival: int
    task: Task
    worker: str = ""
    token: bytes = b""
    since: float = 0.0
    returned: dict[str, int] = {}
    pushed: float = 0.0


class Row(msgspec.Struct, frozen=True):
    """A request as it is stored, whole: whatever changes, one row is replaced."""

    context: RequestContext
    stages: tuple[str, ...]
    tasks: tuple[Standing, ...]
    events: tuple[Event, ...]
    last: int
