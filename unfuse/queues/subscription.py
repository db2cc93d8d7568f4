"""What is heard of a queue that is elsewhere: which pools and which requests have changed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from unfuse.queues.remote_waiters import RETRY_S, RemoteWaiters
from unfuse.supervision.supervisor import Supervisor

SWEEP_S = 5.0
"""Seconds until those who wait look by themselves, should nothing come."""


class Subscription:
    """One channel, for those who wait for tasks and those who follow requests in this process."""

    def __init__(self, redis: Redis, channel: str, waiting: RemoteWaiters) -> None:
        self._redis, self._channel, self._waiting = redis, channel, waiting
        self._supervisor = Supervisor()
        self._followers: dict[str, list[asyncio.Future[None]]] = {}
        self._closed = False

    def of(self, request: str) -> asyncio.Future[None]:
        """Done when something is heard of a request, or may have been."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._followers.setdefault(request, []).append(news)
        return news

    def tell(self, *requests: str) -> None:
        """There may be something new of these requests."""
        for news in [news for request in requests for news in self._followers.pop(request, ())]:
            if not news.done():
                news.set_result(None)

    async def listen(self) -> None:
        """Hear what changes, until `close`."""
        await self._supervisor.repeat("hearing what changed", self._hear_changes)

    def close(self) -> None:
        """Nobody waits any longer."""
        self._closed = True
        self._waiting.close()
        self.tell(*self._followers)

    async def _hear_changes(self) -> None:
        """On a new connection, and when it is quiet, everyone looks."""
        while not self._closed:
            with suppress(RedisError, OSError):
                async with self._redis.pubsub() as ear:
                    await ear.subscribe(self._channel)
                    while not self._closed:
                        self._hear(await ear.get_message(timeout=SWEEP_S))
            await asyncio.sleep(RETRY_S)

    def _hear(self, message: dict[str, Any] | None) -> None:
        if message is None or message["type"] != "message":
            self._waiting.serve()
            self.tell(*self._followers)
            return
        kind, _, name = message["data"].decode(errors="replace").partition(":")
        if kind == "request":
            self.tell(name)
        elif self._waiting.concerns(name):
            self._waiting.serve()
