"""The bounded history of one request, in memory, and those who follow it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
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
        self._ended = False
        self._followers: dict[asyncio.Future[None], None] = {}

    def publish(self, event: Event, wall: float) -> None:
        """Number an event, date it if it is not dated, and tell the followers."""
        self.last += 1
        self._events[self.last] = msgspec.structs.replace(event, seq=self.last, at=event.at or wall)
        if event.type in PASSING:
            self._droppable.append(self.last)
        if len(self._events) > MAX_EVENTS:
            del self._events[self._droppable.popleft() if self._droppable else next(iter(self._events))]
        self._wake()

    def lasting(self) -> tuple[Event, ...]:
        """What happened, without how far it was meanwhile."""
        return tuple(event for event in self._events.values() if event.type not in PASSING)

    def end(self) -> None:
        """Nothing more will come: followers finish with what there is."""
        self._ended = True
        self._wake()

    async def follow(self, after: int) -> AsyncIterator[Event]:
        """Events numbered above `after`, waiting for more until the end."""
        while True:
            while unseen := self._above(after):
                for event in unseen:
                    yield event
                after = unseen[-1].seq
            if self._ended:
                return
            news = asyncio.get_running_loop().create_future()
            self._followers[news] = None
            try:
                await news
            finally:
                self._followers.pop(news, None)

    def _above(self, after: int) -> list[Event]:
        return list(takewhile(lambda event: event.seq > after, reversed(self._events.values())))[::-1]

    def _wake(self) -> None:
        for news in self._followers:
            if not news.done():
                news.set_result(None)
        self._followers.clear()
