"""What a scheduler looks through the queue for now and then, beside what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from unfuse.core.request import Record
from unfuse.queues.base import Filter, TaskQueue
from unfuse.scheduler.costs import Costs
from unfuse.scheduler.registry import Registry
from unfuse.supervision.supervisor import Supervisor

REVIEW_S, REVIEW_PAUSE_S, REVIEW_PAGE = 5.0, 0.5, 256
"""How often the requests that are not over are looked through, for deadlines that another scheduler knew of, and how
many in one go."""

LEARN_FROM = 64
"""Completed requests that are learned from at the start, and of other schedulers at each review."""

GONE = 20
"""A worker that was silent for this many lease times is dropped from the registry."""


class Review:
    """Looks through one queue: `meet` hears of each request that is not over, with the queue's time, and `met` when
    those were all.
    """

    def __init__(
        self,
        registry: Registry,
        queue: TaskQueue,
        costs: Costs,
        lease_ttl: float,
        meet: Callable[[Record, float], Awaitable[None]],
        met: Callable[[], None],
    ) -> None:
        self._registry, self._queue, self._costs, self._lease_ttl = registry, queue, costs, lease_ttl
        self._meet, self._met = meet, met
        self._has_learned = False

    async def run(self, background: Supervisor) -> None:
        """Look at the workers, at what completed, also by other schedulers, and at what is not over; then wait."""
        for what, look in (
            ("looking at workers", self.workers),
            ("learning what requests cost", self.learn),
            ("looking for deadlines", self.requests),
            ("keeping what requests cost", self._costs.settle),
        ):
            with background.besides(what):
                await look()
        await asyncio.sleep(REVIEW_S)

    async def workers(self) -> None:
        """Learn who they are, and drop those that are gone."""
        horizon = await self._queue.now() - GONE * self._lease_ttl
        await self._registry.workers()
        for member in await self._queue.workers():
            if member.seen < horizon:
                await self._queue.bye(member.info.id)

    async def learn(self) -> None:
        """Learn what requests cost from those that completed, once, and always where other schedulers work too."""
        if self._has_learned and not self._queue.shared:
            return
        for record in reversed(await self._queue.list(Filter(status="completed"), limit=LEARN_FROM)):
            self._costs.learn(record.context)
        self._has_learned = True

    async def requests(self) -> None:
        """Meet every request that is not over."""
        after: str | None = None
        while page := await self._queue.list(Filter(over=False), after=after, limit=REVIEW_PAGE, oldest_first=True):
            now = await self._queue.now()
            for record in page:
                await self._meet(record, now)
            if len(page) < REVIEW_PAGE:
                break
            after = page[-1].context.id
            await asyncio.sleep(REVIEW_PAUSE_S)
        self._met()
