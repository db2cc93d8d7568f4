"""Talks with Redis: runs the script for many calls at once, and hears what has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import MovedError, NoScriptError, ReadOnlyError, RedisError

from unfuse.core.supervisor import Supervisor
from unfuse.queues.remote_waiters import MAX_BATCH, RETRY_S, Background, RemoteWaiters
from unfuse.queues.script import SCRIPT, SCRIPT_ID

Call = tuple[str, bytes]  # a verb of the script, and its arguments

RUN_CALLS, RUN_BYTES = 32, 2**20
"""The most calls in one run of the script, and the most bytes of their arguments: other clients wait for its end."""


REPLICATED_MS = 1000  # the longest time, in milliseconds, for replicas to have what was changed


def runs(calls: Sequence[Call]) -> list[list[Call]]:
    """These calls in their order, as many in a run as RUN_CALLS and RUN_BYTES allow; a longer one runs alone."""
    found: list[list[Call]] = []
    nbytes = 0
    for call in calls:
        nbytes += len(call[1])
        if not found or len(found[-1]) == RUN_CALLS or nbytes > RUN_BYTES:
            found.append([])
            nbytes = len(call[1])
        found[-1].append(call)
    return found


async def answers(redis: Redis, tag: str, calls: Sequence[Call], replicas: int = 0) -> list[Any]:
    """The answer to each of these calls, or its error, in one round trip. Raises what the connection does.

    Raises RedisError too if fewer than `replicas` have what was changed.
    """
    shared = runs(calls)
    async with redis.pipeline(transaction=False) as pipeline:
        for run in shared:
            words: list[str | bytes] = [word for call in run for word in call]
            pipeline.evalsha(SCRIPT_ID, 1, tag, *words)
        if replicas:
            pipeline.execute_command("WAIT", replicas, REPLICATED_MS)
        replies = await pipeline.execute(raise_on_error=False)
    if replicas and (reached := replies.pop()) not in range(replicas, 1000):
        raise RedisError(f"replicas that have what it was told: {reached}, wanted: {replicas}")
    found: list[Any] = []
    for run, reply in zip(shared, replies, strict=True):
        if isinstance(reply, NoScriptError):
            await redis.script_load(SCRIPT)
            found += await answers(redis, tag, run, replicas)
        else:
            found += [reply] * len(run) if isinstance(reply, Exception) else reply
    if any(isinstance(one, ReadOnlyError | MovedError) for one in found):  # a primary no more: ask again who is
        await redis.connection_pool.disconnect()
    return found


class Calls:
    """Calls that wait to be sent, by `execute`: those that come while others are under way go together."""

    def __init__(self, execute: Callable[[Sequence[Call]], Awaitable[list[Any]]], background: Background) -> None:
        self._execute, self._background = execute, background
        self._unsent: list[tuple[Call, asyncio.Future[Any]]] = []

    async def answer(self, verb: str, args: bytes) -> Any:
        """The answer to one call. Raises what its verb does, and the connection."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unsent.append(((verb, args), answer))
        self._background.run("send", self._send)
        return await answer

    async def _send(self) -> None:
        """Send all calls that wait, MAX_BATCH in a round trip, until there are none."""
        while self._unsent:
            batch, self._unsent = self._unsent[:MAX_BATCH], self._unsent[MAX_BATCH:]
            try:
                replies = await self._execute([call for call, _ in batch])
            except Exception as error:  # the callers must get any error
                replies = [error] * len(batch)
            for (_, answer), reply in zip(batch, replies, strict=True):
                if answer.done():
                    continue
                if isinstance(reply, Exception):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)
            await asyncio.sleep(0)  # what those who were answered ask next goes together


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
