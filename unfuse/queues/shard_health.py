"""The shards of a queue, and which of them can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import structlog

from unfuse.core.errors import TransientError, UnfuseError
from unfuse.queues.base import QueueBackend
from unfuse.queues.remote_waiters import NamedTasks

log = structlog.get_logger(__name__)


T = TypeVar("T")
Work = Callable[[QueueBackend], Awaitable[T]]

#: Timeout of a call to one shard of several, in seconds.
PATIENCE_S = 5.0


#: Seconds between two checks of an unreachable shard.
LOOK_S = 0.2


class ShardHealth:
    """Calls shards, and tracks which of them are reachable.

    A shard is unreachable after a call that raised TransientError or timed out. It is then checked every LOOK_S.
    `on_return` is called with each shard that can be reached again, before `reachable` includes it.
    """

    def __init__(self, shards: Sequence[QueueBackend], on_return: Callable[[QueueBackend], Awaitable[object]]) -> None:
        self.shards = tuple(shards)
        self.background = NamedTasks()
        #: Why a shard is unreachable, by its number.
        self.unreachable: dict[int, str] = {}
        self._on_return = on_return
        self._closed = False

    async def call(self, shard: int, work: Work[T]) -> T:
        """Call one shard. Raises the shard's errors."""
        try:
            return await work(self.shards[shard])
        except TransientError as error:
            self._mark_unreachable(shard, str(error))
            raise

    async def call_with_timeout(self, shard: int, work: Work[T]) -> T:
        """Call one shard. Raises TransientError after PATIENCE_S, and the shard's errors."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.call(shard, work)
        except TimeoutError as error:
            self._mark_unreachable(shard, f"no response within {PATIENCE_S:g} s")
            raise TransientError(self.unreachable.get(shard, "")) from error

    def reachable(self, among: Iterable[int] | None = None) -> list[int]:
        """Return the reachable ones of these shards, or all if the whole queue is unreachable."""
        shards = range(len(self.shards)) if among is None else among
        # All, so that callers get the shards' errors and not an empty result.
        return [shard for shard in shards if shard not in self.unreachable or len(self.unreachable) == len(self.shards)]

    async def call_each(self, work: Work[T], among: Iterable[int] | None = None) -> dict[int, T]:
        """Call these shards concurrently. Returns the results of the reachable ones, by number.

        Raises TransientError if the whole queue is unreachable, and all other errors.
        """
        shards = self.reachable(among)
        results = await asyncio.gather(
            *(self.call_with_timeout(shard, work) for shard in shards), return_exceptions=True
        )
        for error in results:
            if isinstance(error, BaseException) and not isinstance(error, TransientError):
                raise error
        pairs = zip(shards, results, strict=True)
        answers = {shard: result for shard, result in pairs if not isinstance(result, BaseException)}
        if len(self.unreachable) == len(self.shards) and not answers and shards:
            raise next(error for error in results if isinstance(error, BaseException))
        return answers

    async def first(self, work: Work[T]) -> T:
        """Call the first reachable shard, by number. Raises TransientError if none is reachable."""
        *others, last = self.reachable()
        for shard in others:
            try:
                return await self.call_with_timeout(shard, work)
            except TransientError:
                continue
        return await self.call_with_timeout(last, work)

    async def close(self) -> None:
        """Close all shards."""
        self._closed = True
        await asyncio.gather(*(shard.close() for shard in self.shards))
        await self.background.end(*(f"shard {shard}" for shard in self.unreachable))

    def _mark_unreachable(self, shard: int, reason: str) -> None:
        """Record that a shard is unreachable, and check it until it is reachable again."""
        if shard not in self.unreachable and not self._closed:
            self.unreachable[shard] = self._describe(shard, reason)
            log.warning("queue shard is unreachable, the others continue", shard=shard, reason=reason)
            self.background.run(f"shard {shard}", partial(self._wait_for_return, shard))

    def _describe(self, shard: int, reason: str) -> str:
        return f"shard {shard} of {len(self.shards)}: {reason}"

    async def _wait_for_return(self, shard: int) -> None:
        """Check a shard until it is reachable again and has its own data."""
        queue = self.shards[shard]
        while shard in self.unreachable:
            await asyncio.sleep(LOOK_S)
            try:
                await queue.check()
                # While the shard is still left out: it lacks the declarations that were stored meanwhile.
                await self._on_return(queue)
            except UnfuseError as error:
                self.unreachable[shard] = self._describe(shard, str(error))
                continue
            del self.unreachable[shard]
        log.info("queue shard is reachable again", shard=shard)
