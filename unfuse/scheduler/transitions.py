"""How a request moves: what is decided of it is committed, again while others move it too."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from unfuse.core.clock import Clock
from unfuse.core.errors import Conflict, LeaseLost, NotFound
from unfuse.core.request import Change, Record
from unfuse.queues.base import TaskQueue
from unfuse.scheduler import lifecycle
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.output_sizes import OutputSizes
from unfuse.scheduler.registry import Registry
from unfuse.supervision.observers import Observers

CROWD_S = 0.05
"""Longest pause before a decision that conflicted with another one is made again."""

Decide = Callable[[Record, float], Change | None]
"""What the lifecycle makes of a request as it is now, in Unix seconds; None leaves it so."""


class Transitions:
    """Applies what is decided of a queue's requests, and tells the observers of each that is over by that.

    Every task is queued with the room that was learned for it, where somebody is.
    """

    def __init__(self, queue: TaskQueue, registry: Registry, clock: Clock, observers: Observers[Observer]) -> None:
        self.queue, self.registry, self.clock, self.observers = queue, registry, clock, observers
        self.output_sizes = OutputSizes()

    async def apply(
        self,
        request: str,
        decide: Decide,
        commit: Callable[[Change], Awaitable[Record]] | None = None,
        known: Record | None = None,
    ) -> tuple[Record, bool]:
        """Load, decide, commit, again while others move the same context; says whether this changed it.

        A decision of None changes nothing, nor does the repeat of one that was applied. A record that is `known`, and
        may be out of date, is tried first instead of a loaded one. Raises NotFound, and whatever `decide` and `commit`
        raise.
        """
        pause = 0.0
        while True:
            is_known, before, known = known is not None, known or await self.queue.load(request), None
            try:
                change = decide(before, self.clock.wall())
            except LeaseLost:
                if is_known:
                    continue
                raise
            if change is None:
                return before, False
            change = msgspec.structs.replace(change, push=self.output_sizes.given(change.push))
            change = lifecycle.placed(change, self.registry.home)
            with suppress(Conflict):
                record = await (commit or self.queue.commit)(change)
                ours = record.context == change.context and change.context.version > before.context.version
                if ours and record.context.over and not before.context.over:
                    self.observers.tell(Observer.ended, record.context)
                return record, ours
            await asyncio.sleep(pause * random.random())
            pause = min(CROWD_S, 2 * pause + 0.001)

    async def apply_if_due(self, record: Record, decide: Decide) -> Record:
        """Apply what is decided of a request that was listed, if there is anything; it may be gone meanwhile."""
        if decide(record, self.clock.wall()) is not None:
            with suppress(NotFound):
                record, _ = await self.apply(record.context.id, decide)
        return record

    async def settled(self, record: Record) -> Record:
        """The request once its tasks wait where somebody is, and it is said which pools it wakes."""
        who = self.registry
        asleep, limit = who.asleep(), who.wake_limit
        return await self.apply_if_due(
            record, lambda now, wall: lifecycle.moved(now.context, who.home, wall, now.running, asleep, limit)
        )
