"""The bounded history of one request, in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile

import msgspec

from unfuse.core.event import Event

MAX_EVENTS = 512  # events kept of one request
PASSING = ("progress", "preview")  # events that may be dropped, because a later one replaces them
APPENDED = "appended"  # the event of which only the last one of each stage is kept


class History:
    """Numbered events. Above MAX_EVENTS the oldest is dropped: progress first, then any."""

    def __init__(self, events: Iterable[Event] = (), last: int = 0) -> None:
        self._events = {event.seq: event for event in events}
        self._droppable: deque[int] = deque()
        self._appended: dict[str, int] = {}
        self.last = last  # the highest number that an event has got
        self.ended = False  # whether no more events will come
        self._listeners: dict[Callable[[], None], None] = {}

    def publish(self, event: Event, wall: float) -> None:
        """Give an event its number, and a time if it has none, then call the listeners."""
        self.last += 1
        self._events[self.last] = msgspec.structs.replace(event, seq=self.last, at=event.at or wall)
        if event.type in PASSING:
            self._droppable.append(self.last)
        elif event.type == APPENDED:
            self._events.pop(self._appended.get(event.stage, 0), None)
            self._appended[event.stage] = self.last
        if len(self._events) > MAX_EVENTS:
            del self._events[self._droppable.popleft() if self._droppable else next(iter(self._events))]
        self._call_listeners()

    def above(self, after: int) -> list[Event]:
        """The events with a number above `after`."""
        return list(takewhile(lambda event: event.seq > after, reversed(self._events.values())))[::-1]

    def lasting(self) -> tuple[Event, ...]:
        """The events that must not be lost: all but the PASSING ones, and those that only count pieces."""
        return tuple(event for event in self._events.values() if event.type not in (*PASSING, APPENDED))

    def end(self) -> None:
        """No more events will come: call the listeners."""
        self.ended = True
        self._call_listeners()

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """A context in which `listener` is called after each event and at the end."""
        self._listeners[listener] = None
        try:
            yield
        finally:
            del self._listeners[listener]

    def _call_listeners(self) -> None:
        for listener in self._listeners:
            listener()
