"""Which of several queues answer: one that does not is left alone until it does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import structlog

from unfuse.core.errors import TransientError, UnfuseError
from unfuse.queues.base import QueueBackend
from unfuse.queues.remote_waiters import Background

PATIENCE_S, LOOK_S = 5.0, 0.2
"""The longest time, in seconds, that all wait for one shard's answer; and until one that gave none is asked again."""

T = TypeVar("T")
Work = Callable[[QueueBackend], Awaitable[T]]

log = structlog.get_logger(__name__)


class Answering:
    """Asks the shards of a queue. `returned` is called with each that answers again."""

    def __init__(self, shards: Sequence[QueueBackend], returned: Callable[[QueueBackend], Awaitable[object]]) -> None:
        self.shards, self.background = tuple(shards), Background()
        self.away: dict[int, str] = {}
        """Why a shard that does not answer does not, in words, by its number."""
        self._returned = returned
        self._closed = False

    async def ask(self, shard: int, work: Work[T]) -> T:
        """What one shard answers. Raises what it raises."""
        try:
            return await work(self.shards[shard])
        except TransientError as error:
            self._miss(shard, str(error))
            raise

    async def ask_briefly(self, shard: int, work: Work[T]) -> T:
        """What one shard answers within PATIENCE_S; raises TransientError if nothing."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.ask(shard, work)
        except TimeoutError as error:
            self._miss(shard, f"no answer in {PATIENCE_S:g} s")
            raise TransientError(self.away.get(shard, "")) from error

    def present(self, among: Iterable[int] | None = None) -> list[int]:
        """Those of these shards that answer; all of these if none of the queue does."""
        asked = range(len(self.shards)) if among is None else among
        return [shard for shard in asked if shard not in self.away or len(self.away) == len(self.shards)]

    async def each(self, work: Work[T], among: Iterable[int] | None = None) -> dict[int, T]:
        """The answers, by number, of those of these shards that answer.

        Raises TransientError if none of the queue does, and any other error.
        """
        asked = self.present(among)
        found = await asyncio.gather(*(self.ask_briefly(shard, work) for shard in asked), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, TransientError):
                raise error
        answers = {shard: one for shard, one in zip(asked, found, strict=True) if not isinstance(one, BaseException)}
        if len(self.away) == len(self.shards) and not answers and asked:
            raise next(error for error in found if isinstance(error, BaseException))
        return answers

    async def first(self, work: Work[T]) -> T:
        """What the first shard that answers does, in the order of their numbers. Raises TransientError if none does."""
        *others, last = self.present()
        for shard in others:
            try:
                return await self.ask_briefly(shard, work)
            except TransientError:
                continue
        return await self.ask_briefly(last, work)

    async def close(self) -> None:
        """Close the shards."""
        self._closed = True
        await asyncio.gather(*(shard.close() for shard in self.shards))
        await self.background.end(*(f"shard {shard}" for shard in self.away))

    def _miss(self, shard: int, reason: str) -> None:
        if shard not in self.away and not self._closed:
            self.away[shard] = self._told(shard, reason)
            log.warning("a shard of the queue is away: the others go on", shard=shard, reason=reason)
            self.background.run(f"shard {shard}", partial(self._look_for, shard))

    def _told(self, shard: int, reason: str) -> str:
        return f"shard {shard} of {len(self.shards)}: {reason}"

    async def _look_for(self, shard: int) -> None:
        """Wait until a shard answers again, and as the shard it was: a server may come back with what is another's."""
        queue = self.shards[shard]
        while shard in self.away:
            await asyncio.sleep(LOOK_S)
            try:
                await queue.check()
                await self._returned(queue)
            except UnfuseError as error:
                self.away[shard] = self._told(shard, str(error))
                continue
            del self.away[shard]
        log.info("a shard of the queue answers again", shard=shard)
