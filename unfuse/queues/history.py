"""The bounded history of one request, in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile

import msgspec

from unfuse.core.event import Event

MAX_EVENTS = 512
"""Events kept of one request."""

PASSING = ("progress", "preview")
"""Events that may be dropped: they tell how far something is, not what happened."""


class History:
    """Numbered events, the oldest progress dropped first once there are more than MAX_EVENTS."""

    def __init__(self, events: Iterable[Event] = (), last: int = 0) -> None:
        self._events = {event.seq: event for event in events}
        self._droppable: deque[int] = deque()
        self.last = last
        """The newest number that was given."""
        self.ended = False
        """Whether nothing more will come."""
        self._listeners: dict[Callable[[], None], None] = {}

    def publish(self, event: Event, wall: float) -> None:
        """Number an event, date it if it is not dated, and tell who listens."""
        self.last += 1
        self._events[self.last] = msgspec.structs.replace(event, seq=self.last, at=event.at or wall)
        if event.type in PASSING:
            self._droppable.append(self.last)
        if len(self._events) > MAX_EVENTS:
            del self._events[self._droppable.popleft() if self._droppable else next(iter(self._events))]
        self._tell()

    def above(self, after: int) -> list[Event]:
        """What there is with a higher number."""
        return list(takewhile(lambda event: event.seq > after, reversed(self._events.values())))[::-1]

    def lasting(self) -> tuple[Event, ...]:
        """What happened, without how far it was meanwhile."""
        return tuple(event for event in self._events.values() if event.type not in PASSING)

    def end(self) -> None:
        """Nothing more will come."""
        self.ended = True
        self._tell()

    @contextmanager
    def told(self, listener: Callable[[], None]) -> Iterator[None]:
        """Have someone called whenever something comes, and at the end."""
        self._listeners[listener] = None
        try:
            yield
        finally:
            del self._listeners[listener]

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
