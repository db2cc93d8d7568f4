"""Hears, by Redis pub/sub, which pools and requests of the queue have changed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from unfuse.queues.remote_waiters import RETRY_S, RemoteWaiters
from unfuse.supervision.supervisor import Supervisor

SWEEP_S = 5.0  # seconds without a message after which all waiters look at the queue anyway


class Subscription:
    """One subscription for all callers in this process that wait for tasks or follow requests."""

    def __init__(self, redis: Redis, tag: str, waiting: RemoteWaiters) -> None:
        self._redis, self._waiting = redis, waiting
        self._channel = f"{tag}:news"
        self._supervisor = Supervisor()
        self._followers: dict[str, list[asyncio.Future[None]]] = {}
        self._closed = False

    def news_of(self, request: str) -> asyncio.Future[None]:
        """A future that is done when the request has changed, or may have."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._followers.setdefault(request, []).append(news)
        return news

    def notify(self, *requests: str) -> None:
        """Complete the futures of these requests."""
        for news in [news for request in requests for news in self._followers.pop(request, ())]:
            if not news.done():
                news.set_result(None)

    async def listen(self) -> None:
        """Receive messages until `close`, on one connection after the other."""
        while not self._closed:
            with self._supervisor.besides("hearing what changed"), suppress(RedisError, OSError):
                await self._hear_changes()
            await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        """Wake everyone who waits."""
        self._closed = True
        self._waiting.close()
        self.notify(*self._followers)

    async def _hear_changes(self) -> None:
        """Receive messages; after connecting, and after SWEEP_S without a message, wake everyone.

        Then the server is asked for a sign of life: one that gives none may not be who the others talk to any more.
        """
        async with self._redis.pubsub() as channel:
            await channel.subscribe(self._channel)
            is_asked = False
            while not self._closed:
                message = await channel.get_message(timeout=SWEEP_S)
                self._hear(message)
                if message is None and is_asked:
                    return
                if is_asked := message is None:
                    await channel.ping()

    def _hear(self, message: dict[str, Any] | None) -> None:
        if message is None or message["type"] != "message":
            self._waiting.serve()
            self.notify(*self._followers)
            return
        for what in message["data"].decode(errors="replace").split("\0"):
            kind, _, name = what.partition(":")
            if kind == "request":
                self.notify(name)
            elif self._waiting.waits_for(name):
                self._waiting.serve()
