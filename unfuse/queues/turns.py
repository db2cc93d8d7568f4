"""Several queues at once: which of them answer, and how each worker asks them in turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec
import structlog

from unfuse.core.errors import TransientError, UnfuseError
from unfuse.core.task import Lease
from unfuse.queues.base import QueueBackend, Wanted
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


Asking = asyncio.Task[list[Lease]]


class Turns:
    """Whose turn it is, by worker. A claim takes from one shard, by its rules.

    While a worker has no room for the next task of a shard, it takes from the others only what that shard would let by:
    else what needs much would wait for ever beside what needs little.
    """

    def __init__(self, answering: Answering) -> None:
        self._answering, self._count = answering, len(answering.shards)
        self._next, self._outcomes = Counter[str](), Counter[str]()
        self._kept = set[str]()

    def of(self, worker: str, last: int = -1) -> list[int]:
        """The shards that answer, in the order in which a worker asks them; but this one comes `last`."""
        turn = self._next[worker]
        return self._answering.present(
            sorted(range(self._count), key=lambda shard: (shard == last, (shard - turn) % self._count))
        )

    def is_due(self, worker: str) -> bool:
        """Whether a worker that has an outcome is to ask others first: every so many times, and while one keeps it."""
        self._outcomes[worker] += 1
        return worker in self._kept or self._outcomes[worker] % self._count == 0

    def forget(self, worker: str) -> None:
        """A worker is gone."""
        del self._next[worker], self._outcomes[worker]
        self._kept.discard(worker)

    async def claim(
        self, worker: str, wanted: Wanted, ttl: float, among: Iterable[int]
    ) -> tuple[list[Lease], dict[int, Wanted]]:
        """Claim tasks of the first of these shards that has any; else says what may be waited for at each.

        Raises TransientError if none answers.
        """
        wants, found, keeper = dict[int, Wanted](), list[Lease](), None
        failures = dict[int, TransientError]()
        for shard in among:
            wants[shard] = wanted
            try:
                found = await self._answering.ask(shard, lambda queue: queue.lease(worker, wants[shard], ttl))  # noqa: B023
                if found:
                    self._next[worker] = shard + 1
                    break
                wanted = await self._answering.ask(shard, partial(_let_by, wanted))
            except TransientError as error:
                failures[shard] = error
            if keeper is None and wanted is not wants[shard]:
                keeper = shard
            if not wanted.pools:
                break
        if failures and len(failures) == len(wants):
            raise failures.popitem()[1]
        self._kept.discard(worker)
        if keeper is not None:
            self._kept.add(worker)
            self._next[worker] = keeper
        return found, wants

    async def wait(self, worker: str, wants: Mapping[int, Wanted], ttl: float, wait: float) -> list[Lease]:
        """Claim tasks of whichever shard has any first within `wait` seconds; what others gave then goes back.

        A shard that is away is not waited for. Raises TransientError if none answers.
        """
        asking = {
            asyncio.create_task(self._answering.shards[shard].lease(worker, wanted, ttl, wait)): shard
            for shard, wanted in wants.items()
        }
        waiting, won = {*asking}, None
        try:
            while won is None and waiting and not self._are_away(asking[one] for one in waiting):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                won = next((one for one in done if one.exception() is None and one.result()), None)
            failed = [one for one in asking if one.done() and one.exception()]
            return won.result() if won else failed[0].result() if len(failed) == len(asking) else []
        finally:
            lost = {one: shard for one, shard in asking.items() if one is not won}
            for one in lost:
                one.cancel()
            given = self._answering.background.run(f"wait {id(lost)}", partial(self._give_back, lost))
            if won is None:
                await asyncio.shield(given)

    def _are_away(self, shards: Iterable[int]) -> bool:
        away = self._answering.away
        return len(away) < self._count and all(shard in away for shard in shards)

    async def _give_back(self, lost: Mapping[Asking, int]) -> None:
        await asyncio.gather(*lost, return_exceptions=True)
        for one, shard in lost.items():
            for lease in () if one.cancelled() or one.exception() else one.result():
                with suppress(TransientError):
                    await self._answering.shards[shard].hand_back(lease.claim)


async def _let_by(wanted: Wanted, queue: QueueBackend) -> Wanted:
    """What a worker may take of others while it has no room for the next tasks of this queue."""
    lines = (await queue.stats([*wanted.watched_pools()])).pools
    for pool, offer in wanted.pools.items():
        is_held_back = any(lines[fed].waiting > most for fed, most in offer.behind.items())
        for task in await queue.peek(pool, 1) if lines[pool].waiting and not is_held_back else ():
            lacking = offer.lacks(task.resources, {})
            if lacking and pool in wanted.pools and (wanted.above is None or task.priority > wanted.above):
                others = {
                    name: other for name, other in wanted.pools.items()
                    if other.later > offer.later or lacking.isdisjoint(other.amounts)
                }  # fmt: skip
                wanted = msgspec.structs.replace(wanted, pools=others)
    return wanted
