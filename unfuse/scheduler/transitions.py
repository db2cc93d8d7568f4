"""Commits decisions about requests, and decides again when another change came first."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from math import ceil

from msgspec.structs import replace

from unfuse.core.clock import Clock
from unfuse.core.errors import Conflict, LeaseLost, NotFound
from unfuse.core.plan import declared
from unfuse.core.request import (
    Change,
    RequestContext,
    RequestRecord,
    WebhookDelivery,
    billed_seconds,
    increase,
    lost_seconds,
)
from unfuse.core.supervisor import Observers
from unfuse.core.task import Task
from unfuse.queues.base import QueueBackend, RequestFilter
from unfuse.scheduler import lifecycle
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.registry import Registry

SHARE, REMEMBERED = 0.95, 64  # the part of outputs that the room is meant for, of the last so many of a pool


class OutputSizes:
    """The last lengths, in bytes, of what each pool made."""

    def __init__(self) -> None:
        self._lengths: defaultdict[str, deque[int]] = defaultdict(partial(deque, maxlen=REMEMBERED))

    def learn(self, pool: str, nbytes: int) -> None:
        """An output of that length was made."""
        self._lengths[declared(pool)].append(nbytes)

    def of(self, pool: str) -> int:
        """The room that SHARE of a pool's outputs had enough of; 0 while nothing is known."""
        lengths = sorted(self._lengths.get(declared(pool), ()))
        return lengths[ceil(SHARE * len(lengths)) - 1] if lengths else 0

    def given(self, tasks: Iterable[Task]) -> tuple[Task, ...]:
        """These tasks, with room where their pipelines declare none."""
        return tuple(
            task if task.planned.room else replace(task, planned=replace(task.planned, room=self.of(task.planned.pool)))
            for task in tasks
        )


PAGE = 256  # requests that are looked through in one go
CROWD_S = 0.05  # longest pause before a decision that conflicted with another one is made again
Decide = Callable[[RequestRecord, float], Change | None]  # what becomes of a request, by Unix time; None leaves it so


class Transitions:
    """Applies what is decided of a queue's requests, and tells the observers of each that is over by that.

    Every task is queued with the room that was learned for it, where somebody is.
    """

    def __init__(self, queue: QueueBackend, registry: Registry, clock: Clock, observers: Observers[Observer]) -> None:
        self.queue, self.registry, self.clock, self.observers = queue, registry, clock, observers
        self.output_sizes = OutputSizes()

    async def pages(self, which: RequestFilter) -> AsyncIterator[Sequence[RequestRecord]]:
        """Requests, oldest first, by the page. Raises NotFound if the last one of a page is gone."""
        after: str | None = None
        while page := await self.queue.list(which, after=after, limit=PAGE, oldest_first=True):
            yield page
            if len(page) < PAGE:
                return
            after = page[-1].context.id

    async def apply(
        self,
        request: str,
        decide: Decide,
        commit: Callable[[Change], Awaitable[RequestRecord]] | None = None,
        known: RequestRecord | None = None,
    ) -> tuple[RequestRecord, bool]:
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
            change = replace(change, push=self.output_sizes.given(change.push))
            change = lifecycle.placed(change, self.registry.home)
            with suppress(Conflict):
                record = await (commit or self.queue.commit)(change)
                ours = record.context == change.context and change.context.version > before.context.version
                if ours:
                    self._tell(before.context, record.context)
                return record, ours
            await asyncio.sleep(pause * random.random())
            pause = min(CROWD_S, 2 * pause + 0.001)

    def _tell(self, before: RequestContext, after: RequestContext) -> None:
        """Tell the observers that a request has ended, and what was added to its bill later, or lost."""
        if lost := increase(lost_seconds(before), lost_seconds(after)):
            self.observers.tell(Observer.written_off, after, lost)
        if after.over and not before.over:
            self.observers.tell(Observer.ended, after)
        elif after.over and (billed := increase(billed_seconds(before), billed_seconds(after))):
            self.observers.tell(Observer.billed, after, billed)

    async def apply_if_due(self, record: RequestRecord, decide: Decide) -> RequestRecord:
        """Apply what is decided of a request that was listed, if there is anything; it may be gone meanwhile."""
        if decide(record, self.clock.wall()) is not None:
            with suppress(NotFound):
                record, _ = await self.apply(record.context.id, decide)
        return record

    async def settled(self, record: RequestRecord) -> RequestRecord:
        """The request once its tasks wait where somebody is, and it is said which pools it wakes."""
        who = self.registry
        asleep, limit = who.asleep(), who.wake_limit
        return await self.apply_if_due(
            record,
            lambda now, wall: lifecycle.moved(now.context, who.home, wall, now.running, asleep, limit, who.has_other),
        )


ATTEMPT_S = 20.0  # seconds that a scheduler has for an attempt; then another one may make the next

PAUSES_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 7200.0, 14400.0, 28800.0)
"""Seconds after each failed attempt before the next one. The one behind the last pause is the last."""


class WebhookDeliveries:
    """Which webhooks have to be called, and what came of it. All of it is on the request's context.

    A scheduler takes an attempt before it makes it, so that no other one does. If it dies, another follows when the
    time of the attempt is over. All methods but `pending` raise NotFound for a request that is gone.
    """

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions

    async def pending(self) -> AsyncIterator[RequestContext]:
        """The requests that are over and whose webhooks have not heard of it, oldest first."""
        with suppress(NotFound):  # what is behind one that is gone is found the next time
            async for page in self._transitions.pages(RequestFilter(unheard=True)):
                for record in page:
                    yield record.context

    async def take(self, request: str) -> tuple[RequestContext, bool]:
        """The request, and whether its webhook is the caller's to call for ATTEMPT_S from now."""

        def taken(webhook: WebhookDelivery, wall: float) -> WebhookDelivery | None:
            if webhook.next_at > wall:
                return None
            return replace(webhook, attempts=webhook.attempts + 1, next_at=wall + ATTEMPT_S)

        return await self._change(request, taken)

    async def heard(self, request: str) -> RequestContext:
        """Record that the webhook has heard."""
        context, _ = await self._change(request, lambda webhook, _: replace(webhook, state="heard", reason=""))
        return context

    async def failed(self, request: str, reason: str, *, for_good: bool = False) -> RequestContext:
        """Record that an attempt failed, and, if it did `for_good`, that all others would."""

        def fail(webhook: WebhookDelivery, wall: float) -> WebhookDelivery:
            if for_good or webhook.attempts > len(PAUSES_S):
                return replace(webhook, state="given_up", reason=reason)
            return replace(webhook, next_at=wall + PAUSES_S[webhook.attempts - 1], reason=reason)

        context, _ = await self._change(request, fail)
        return context

    async def _change(
        self, request: str, decide: Callable[[WebhookDelivery, float], WebhookDelivery | None]
    ) -> tuple[RequestContext, bool]:
        def change(record: RequestRecord, wall: float) -> Change | None:
            context = record.context
            webhook = decide(context.webhook, wall) if context.unheard else None
            if webhook is None:
                return None
            return Change(replace(context, version=context.version + 1, webhook=webhook))

        record, ours = await self._transitions.apply(request, change)
        return record.context, ours
