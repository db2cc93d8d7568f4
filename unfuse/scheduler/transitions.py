"""Applies transitions to requests: load, decide and commit, with a retry on conflict."""

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
from unfuse.core.plan import declared_pool
from unfuse.core.request import (
    Change,
    RequestContext,
    RequestRecord,
    WebhookDelivery,
    billed_seconds,
    device_seconds_since,
    lost_seconds,
)
from unfuse.core.supervisor import Observers
from unfuse.core.task import Task
from unfuse.queues.base import QueueBackend, RequestFilter
from unfuse.scheduler import lifecycle
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.registry import Registry

#: The learned size of an output suffices for this share of the last REMEMBERED outputs of its pool.
SHARE, REMEMBERED = 0.95, 64

#: Number of requests that one page of a review has.
PAGE = 256

#: Longest pause, in seconds, before a transition that conflicted with another one is tried again.
CROWD_S = 0.05

#: Seconds that a scheduler has for one webhook call. After that, another scheduler may try again.
ATTEMPT_S = 20.0

#: Retry policy of webhooks: seconds after each failed attempt before the next one. One attempt follows the last pause.
PAUSES_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 7200.0, 14400.0, 28800.0)

#: `(record, wall) -> change`: decides on a transition at this Unix time. None leaves the request as it is.
Decide = Callable[[RequestRecord, float], Change | None]


class OutputSizes:
    """The sizes, in bytes, of each pool's last outputs."""

    def __init__(self) -> None:
        self._sizes: defaultdict[str, deque[int]] = defaultdict(partial(deque, maxlen=REMEMBERED))

    def learn(self, pool: str, nbytes: int) -> None:
        """Record the size of an output."""
        self._sizes[declared_pool(pool)].append(nbytes)

    def of(self, pool: str) -> int:
        """Return the bytes that suffice for SHARE of a pool's last outputs.

        0 if no output was recorded.
        """
        sizes = sorted(self._sizes.get(declared_pool(pool), ()))
        return sizes[ceil(SHARE * len(sizes)) - 1] if sizes else 0

    def with_learned_sizes(self, tasks: Iterable[Task]) -> tuple[Task, ...]:
        """Return the tasks with the learned output size where their pipelines declare none."""
        return tuple(
            task
            if task.planned.output_size
            else replace(task, planned=replace(task.planned, output_size=self.of(task.planned.pool)))
            for task in tasks
        )


class Transitions:
    """Applies transitions to the requests of a queue and notifies the observers.

    Tasks are queued with the learned size of their outputs, and in live pools where possible.
    """

    def __init__(self, queue: QueueBackend, registry: Registry, clock: Clock, observers: Observers[Observer]) -> None:
        self.queue = queue
        self.registry = registry
        self.clock = clock
        self.observers = observers
        self.output_sizes = OutputSizes()

    async def pages(self, request_filter: RequestFilter) -> AsyncIterator[Sequence[RequestRecord]]:
        """Yield pages of the selected requests, oldest first.

        Raises NotFound if the last request of a page is deleted before the next page is read.
        """
        after: str | None = None
        while page := await self.queue.list(request_filter, after=after, limit=PAGE, oldest_first=True):
            yield page
            if len(page) < PAGE:
                return
            after = page[-1].context.id

    async def apply(
        self,
        request: str,
        decide: Decide,
        commit: Callable[[Change], Awaitable[RequestRecord]] | None = None,
        cached: RequestRecord | None = None,
    ) -> tuple[RequestRecord, bool]:
        """Load a request, decide on a change and commit it.

        This is repeated after a conflict with another change. Returns the record, and whether this call changed it. A
        decision of None changes nothing, and neither does the repeat of a change that was applied.

        commit: commits the change. None: the queue's `commit`.
        cached: a cached record, possibly stale, that is tried first instead of a loaded one.

        Raises NotFound, and all errors of `decide` and `commit` except Conflict.
        """
        pause_s = 0.0
        while True:
            is_cached = cached is not None
            before = cached or await self.queue.load(request)
            cached = None
            try:
                change = decide(before, self.clock.wall())
            except LeaseLost:
                if is_cached:
                    continue  # the cached record may be stale
                raise
            if change is None:
                return before, False

            change = replace(change, push=self.output_sizes.with_learned_sizes(change.push))
            change = lifecycle.set_order(change, self.registry.waiting_pool)
            with suppress(Conflict):
                record = await (commit or self.queue.commit)(change)
                is_changed = record.context == change.context and change.context.version > before.context.version
                if is_changed:
                    self._notify_observers(before.context, record.context)
                return record, is_changed
            # At random, so that two schedulers that conflicted do not conflict again.
            await asyncio.sleep(pause_s * random.random())
            pause_s = min(CROWD_S, 2 * pause_s + 0.001)

    def _notify_observers(self, before: RequestContext, after: RequestContext) -> None:
        """Notify observers of a request's end, later additions to its bill, and lost device time."""
        if lost := device_seconds_since(lost_seconds(before), lost_seconds(after)):
            self.observers.notify(Observer.on_lost_device_time, after, lost)
        if after.is_over and not before.is_over:
            self.observers.notify(Observer.on_ended, after)
        elif after.is_over and (billed := device_seconds_since(billed_seconds(before), billed_seconds(after))):
            self.observers.notify(Observer.on_billed, after, billed)

    async def apply_if_due(self, record: RequestRecord, decide: Decide) -> RequestRecord:
        """Apply a transition to a listed request, if `decide` returns one for the listed record.

        Returns the new record, or the listed one if nothing changed or the request was deleted meanwhile.
        """
        if decide(record, self.clock.wall()) is not None:
            with suppress(NotFound):
                record, _ = await self.apply(record.context.id, decide)
        return record

    async def move_waiting(self, record: RequestRecord) -> RequestRecord:
        """Move a request's waiting tasks to live pools, and record their cold starts.

        Returns the new record, or the given one if nothing changed.
        """
        registry = self.registry
        scaled_to_zero = registry.scaled_to_zero()

        def move(record: RequestRecord, wall: float) -> Change | None:
            return lifecycle.requeue_waiting(
                record.context,
                registry.waiting_pool,
                wall,
                record.running,
                scaled_to_zero,
                registry.cold_start_limit,
                registry.has_other,
            )

        return await self.apply_if_due(record, move)


class WebhookDeliveries:
    """The pending webhook deliveries and their outcomes, stored in the contexts of their requests.

    A scheduler claims an attempt before it calls the webhook, so that no other one calls it too. If the scheduler dies,
    another one may try again after ATTEMPT_S. All methods but `pending` raise NotFound for a request that was deleted.
    """

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions

    async def pending(self) -> AsyncIterator[RequestContext]:
        """Yield the ended requests with a pending webhook delivery, oldest first."""
        with suppress(NotFound):  # requests behind a deleted one are found by the next call
            async for page in self._transitions.pages(RequestFilter(webhook_pending=True)):
                for record in page:
                    yield record.context

    async def claim(self, request: str) -> tuple[RequestContext, bool]:
        """Claim the next delivery attempt for ATTEMPT_S. Returns the request, and whether it was claimed."""

        def claim(webhook: WebhookDelivery, wall: float) -> WebhookDelivery | None:
            if webhook.next_at > wall:
                return None
            return replace(webhook, attempts=webhook.attempts + 1, next_at=wall + ATTEMPT_S)

        return await self._change(request, claim)

    async def record_delivered(self, request: str) -> RequestContext:
        """Record that the webhook was delivered."""
        context, _ = await self._change(request, lambda webhook, _: replace(webhook, state="delivered", reason=""))
        return context

    async def record_failed(self, request: str, reason: str, *, for_good: bool = False) -> RequestContext:
        """Record that a delivery attempt failed.

        There is no next attempt if it failed `for_good`, or after the last pause.
        """

        def fail(webhook: WebhookDelivery, wall: float) -> WebhookDelivery:
            if for_good or webhook.attempts > len(PAUSES_S):
                return replace(webhook, state="given_up", reason=reason)
            return replace(webhook, next_at=wall + PAUSES_S[webhook.attempts - 1], reason=reason)

        context, _ = await self._change(request, fail)
        return context

    async def _change(
        self, request: str, decide: Callable[[WebhookDelivery, float], WebhookDelivery | None]
    ) -> tuple[RequestContext, bool]:
        """Change a request's pending webhook delivery, and return its context and whether it changed."""

        def change(record: RequestRecord, wall: float) -> Change | None:
            context = record.context
            webhook = decide(context.webhook, wall) if context.webhook_pending else None
            if webhook is None:
                return None
            return Change(replace(context, version=context.version + 1, webhook=webhook))

        record, is_changed = await self._transitions.apply(request, change)
        return record.context, is_changed
