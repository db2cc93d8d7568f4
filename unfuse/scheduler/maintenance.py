"""Background maintenance of a queue: expires leases and deadlines, drops dead workers, moves waiting tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import structlog
from typing_extensions import override

from unfuse.core.errors import LeaseLost, NotFound
from unfuse.core.plan import readable_pool
from unfuse.core.request import Change, RequestContext, RequestRecord
from unfuse.core.supervisor import Supervisor
from unfuse.core.task import Lease
from unfuse.queues.base import RequestFilter
from unfuse.scheduler import cold_starts, deadlines, lifecycle
from unfuse.scheduler.backpressure import InFlight
from unfuse.scheduler.costs import Costs
from unfuse.scheduler.encoder_cache import EncoderCache
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.transitions import PAGE, Transitions

#: Seconds between two sweeps that end expired leases.
SWEEP_S = 0.5

#: Seconds between two reviews of all active requests, and between two pages of one review.
REVIEW_S, REVIEW_PAUSE_S = 5.0, 0.5

#: Number of completed requests, the newest, whose costs are learned at the start and at each review of a shared queue.
LEARN_FROM = 64

#: Seconds that a worker whose connection broke has to reconnect before its tasks are retried.
RETURN_S = 2.0

#: Lease times without a heartbeat after which a worker is removed from the registry.
GONE = 20

#: The deadline and cancel function of a request without a timer.
NO_ALARM: tuple[float, Callable[[], object]] = 0.0, lambda: None

log = structlog.get_logger(__name__)


class Maintenance(Observer):
    """The background tasks of one scheduler."""

    def __init__(
        self,
        transitions: Transitions,
        costs: Costs,
        in_flight: InFlight,
        cache: EncoderCache,
        lease_ttl: float,
        background: Supervisor,
    ) -> None:
        self._transitions = transitions
        self._queue = transitions.queue
        self._registry = transitions.registry
        self._costs = costs
        self._in_flight = in_flight
        self._cache = cache
        self._lease_ttl = lease_ttl
        self._background = background
        #: By request, its deadline and the function that cancels its timer.
        self._deadlines: dict[str, tuple[float, Callable[[], object]]] = {}
        #: By worker without heartbeats, the clock's reading when this was noticed.
        self._silent_workers: dict[str, float] = {}
        self._has_learned = False

    def start(self) -> None:
        """Start the loops that expire leases and review the queue."""
        self._background.start_loop("expiring leases", self._sweep)
        self._background.start_loop("reviewing the queue", self._review)

    async def close(self) -> None:
        """Stop the loops and save the learned costs."""
        for _, cancel in self._deadlines.values():
            cancel()
        await self._background.close()
        with self._background.log_errors("saving learned costs"):
            await self._costs.update_models()

    def set_deadline_timer(self, context: RequestContext, now: float) -> None:
        """Start or move the timer that expires a request at its deadline.

        now: the time, in seconds of the queue's clock.
        """
        due = cold_starts.latest_end(context, self._registry.cold_start_limit)
        previous, cancel = self._deadlines.get(context.id, NO_ALARM)
        if due is not None and due != previous and not context.is_over:
            cancel()
            expire = partial(
                self._background.start, "expiring a request at its deadline", partial(self.expire_deadline, context.id)
            )
            clock = self._transitions.clock
            self._deadlines[context.id] = due, clock.call_at(clock.now() + due - now, expire)

    @override
    def on_ended(self, context: RequestContext) -> None:
        _, cancel = self._deadlines.pop(context.id, NO_ALARM)
        cancel()

    async def on_worker_registered(self) -> None:
        """Move waiting tasks, since the new worker may serve pools that were not live."""
        await self._registry.workers()
        self._background.start("moving waiting tasks to live pools", self._move_waiting_tasks)

    def on_client_disconnected(self, worker: str) -> None:
        """Remove a worker whose connection broke, unless it reconnects within RETURN_S."""
        self._background.start("waiting for a worker to reconnect", partial(self._await_return, worker))

    async def expire_lease(self, lease: Lease) -> None:
        """Retry the task of an expired lease."""
        task = lease.task
        with suppress(LeaseLost, NotFound):
            _, is_changed = await self._transitions.apply(
                task.request, lambda record, wall: lifecycle.expire_lease(record.context, lease, wall, record.running)
            )
            if is_changed:
                log_fields = {"request": task.request, "stage": task.stage, "attempt": task.attempt}
                log.warning("lease expired", **log_fields, worker=lease.worker, pool=readable_pool(task.planned.pool))
                self._transitions.observers.notify(Observer.on_lease_expired, task.planned.pool)

    async def expire_deadline(self, request: str) -> None:
        """Expire a request at its deadline, or start a new timer if the deadline moved."""
        self._deadlines.pop(request, None)
        now = await self._queue.now()
        cold_start_limit = self._registry.cold_start_limit
        with suppress(NotFound):
            record, _ = await self._transitions.apply(
                request,
                lambda record, wall: deadlines.expire_deadline(
                    record.context, wall, now, cold_start_limit, record.running
                ),
            )
            self.set_deadline_timer(record.context, now)

    async def workers(self) -> None:
        """Refresh the registry and remove workers without heartbeats.

        A worker is removed after GONE lease times without one, but not before one lease time since this was noticed:
        after a gap without a scheduler, or a change of the queue's clock, all workers seem to be silent.
        """
        oldest_heartbeat = await self._queue.now() - GONE * self._lease_ttl
        now = self._transitions.clock.now()
        await self._registry.model_specs()
        silent = {member.info.id for member in await self._queue.workers() if member.last_heartbeat < oldest_heartbeat}
        self._silent_workers = {worker: self._silent_workers.get(worker, now) for worker in silent}
        for worker in [
            worker for worker, noticed_at in self._silent_workers.items() if now - noticed_at > self._lease_ttl
        ]:
            await self._queue.unregister(worker)

    async def learn_costs(self) -> None:
        """Learn costs from completed requests: once, or on each call if the queue is shared."""
        if self._has_learned and not self._queue.shared:
            return
        for record in reversed(await self._queue.list(RequestFilter(status="completed"), limit=LEARN_FROM)):
            self._costs.learn(record.context)
        self._has_learned = True

    async def requests(self) -> None:
        """Review active requests: set timers, move waiting tasks, and enforce time limits."""
        async for page in self._transitions.pages(RequestFilter(is_over=False)):
            now = await self._queue.now()
            for record in page:
                self._in_flight.on_announced(record.context)
                await self._cache.review(record.context)
                moved = await self._move_tasks(record)
                self.set_deadline_timer(moved.context, now)
                started = await self._transitions.apply_if_due(
                    moved, lambda record, _: lifecycle.record_start(record.context, record.running)
                )
                await self._transitions.apply_if_due(
                    started, lambda record, wall: deadlines.enforce_time_limit(record.context, wall, record.running)
                )
            # A review of many requests must not delay the answers to workers.
            if len(page) == PAGE:
                await asyncio.sleep(REVIEW_PAUSE_S)
        self._in_flight.sweep()

    async def _await_return(self, worker: str) -> None:
        """Remove a worker that sends no heartbeat for RETURN_S from now."""
        since = await self._queue.now()
        await asyncio.sleep(RETURN_S)
        if any(member.info.id == worker and member.last_heartbeat <= since for member in await self._queue.workers()):
            log.warning("worker did not reconnect, its tasks are retried", worker=worker)
            await self._queue.unregister(worker)
            await self._registry.workers()

    async def _move_waiting_tasks(self) -> None:
        """Move the waiting tasks of all active requests."""
        async for page in self._transitions.pages(RequestFilter(is_over=False)):
            now = await self._queue.now()
            for record in page:
                self.set_deadline_timer((await self._move_tasks(record)).context, now)

    async def _move_tasks(self, record: RequestRecord) -> RequestRecord:
        """Move a request's waiting tasks to live pools.

        Fails the request if it needs a pool that has no workers because a model file changed.
        """

        def fail(record: RequestRecord, wall: float) -> Change | None:
            return lifecycle.fail_unavailable(record.context, self._registry.changed_file, wall, record.running)

        return await self._transitions.apply_if_due(await self._transitions.move_waiting(record), fail)

    async def _sweep(self) -> None:
        """Wait for SWEEP_S, then end all expired leases."""
        await asyncio.sleep(SWEEP_S)
        for lease in await self._queue.sweep_expired(self._lease_ttl):
            with self._background.log_errors("retrying an expired lease"):
                await self.expire_lease(lease)

    async def _review(self) -> None:
        """Refresh workers, learn costs, review active requests and save costs; then wait for REVIEW_S.

        An error in one of these does not stop the others.
        """
        for description, step in (
            ("refreshing workers", self.workers),
            ("learning costs", self.learn_costs),
            ("reviewing active requests", self.requests),
            ("saving learned costs", self._costs.update_models),
        ):
            with self._background.log_errors(description):
                await step()
        await asyncio.sleep(REVIEW_S)
