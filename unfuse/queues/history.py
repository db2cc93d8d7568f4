"""The bounded history of one request, in memory, and those who follow it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from unfuse.core.event import Event

MAX_EVENTS = 512
"""Events kept of one request."""


class History:
    """Numbered events, the oldest progress dropped first once there are more than MAX_EVENTS."""

    def __init__(self) -> None:
        self._events: dict[int, Event] = {}
        self._droppable: deque[int] = deque()
        self._last = 0
        self._ended = False
        self._followers: list[asyncio.Future[None]] = []

    def publish(self, event: Event, wall: float) -> None:
        """Number an event, date it if it is not dated, and tell the followers."""
        self._last += 1
        self._events[self._last] = msgspec.structs.replace(event, seq=self._last, at=event.at or wall)
        if event.type in ("progress", "preview"):
            self._droppable.append(self._last)
        if len(self._events) > MAX_EVENTS:
            del self._events[self._droppable.popleft() if self._droppable else next(iter(self._events))]
        self._wake()

    def end(self) -> None:
        """Nothing more will come: followers finish with what there is."""
        self._ended = True
        self._wake()

    async def follow(self, after: int) -> AsyncIterator[Event]:
        """Events numbered above `after`, waiting for more until the end."""
        while True:
            while after < self._last:
                after += 1
                if after in self._events:
                    yield self._events[after]
            if self._ended:
                return
            news = asyncio.get_running_loop().create_future()
            self._followers.append(news)
            await news

    def _wake(self) -> None:
        for news in self._followers:
            if not news.done():
                news.set_result(None)
        self._followers.clear()
