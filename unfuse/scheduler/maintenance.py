"""What happens in a queue without anybody asking: leases and deadlines end, workers go, tasks move to who is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import structlog
from typing_extensions import override

from unfuse.core.errors import LeaseLost, NotFound
from unfuse.core.request import Change, RequestContext, RequestRecord
from unfuse.core.supervisor import Supervisor
from unfuse.core.task import Lease
from unfuse.queues.base import RequestFilter
from unfuse.scheduler import lifecycle
from unfuse.scheduler.backpressure import InFlight
from unfuse.scheduler.costs import Costs
from unfuse.scheduler.encoder_cache import EncoderCache
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.transitions import PAGE, Transitions

SWEEP_S = 0.5  # how late the end of a lease may be noticed

REVIEW_S, REVIEW_PAUSE_S = 5.0, 0.5
"""How often requests that are not over are looked through, for deadlines that others knew of, and between pages."""

LEARN_FROM = 64  # completed requests that are learned from at the start, and of other schedulers at each review
RETURN_S = 2.0  # seconds a worker whose connection broke has to come back to a scheduler before others get its tasks
GONE = 20  # a worker that was silent for this many lease times is dropped from the registry

NO_ALARM: tuple[float, Callable[[], object]] = 0.0, lambda: None

log = structlog.get_logger(__name__)


class Maintenance(Observer):
    """What one scheduler does in the `background`."""

    def __init__(
        self,
        transitions: Transitions,
        costs: Costs,
        in_flight: InFlight,
        cache: EncoderCache,
        lease_ttl: float,
        background: Supervisor,
    ) -> None:
        self._transitions, self._queue, self._registry = transitions, transitions.queue, transitions.registry
        self._costs, self._in_flight, self._lease_ttl, self._background = costs, in_flight, lease_ttl, background
        self._cache = cache
        self._deadlines: dict[str, tuple[float, Callable[[], object]]] = {}
        self._silent: dict[str, float] = {}
        self._has_learned = False

    def start(self) -> None:
        """Sweep for leases that ended, and look through the queue, again and again."""
        self._background.forever("looking for leases that ended", self._sweep)
        self._background.forever("looking through the queue", self._review)

    async def close(self) -> None:
        """End all of it, and keep what requests cost."""
        for _, withdraw in self._deadlines.values():
            withdraw()
        await self._background.close()
        with self._background.besides("keeping what requests cost"):
            await self._costs.settle()

    def arm(self, context: RequestContext, now: float) -> None:
        """End a request at its deadline, if it has one and is not over then; `now` is the queue's time."""
        due, (known, withdraw) = (
            lifecycle.latest_end(context, self._registry.wake_limit),
            self._deadlines.get(context.id, NO_ALARM),
        )
        if due is not None and due != known and not context.over:
            withdraw()
            end = partial(self._background.once, "ending a request at its deadline", partial(self.expire, context.id))
            clock = self._transitions.clock
            self._deadlines[context.id] = due, clock.call_at(clock.now() + due - now, end)

    @override
    def ended(self, context: RequestContext) -> None:
        _, withdraw = self._deadlines.pop(context.id, NO_ALARM)
        withdraw()

    async def joined(self) -> None:
        """A worker has come: what waits for one like it is told so."""
        await self._registry.workers()
        self._background.once("having tasks wait where somebody is", self._settle)

    def disconnected(self, worker: str) -> None:
        """A worker's connection broke: it comes back at once, or is dead, and whom it leaves waiting need not wait."""
        self._background.once("waiting for a worker to come back", partial(self._await_return, worker))

    async def end(self, lease: Lease) -> None:
        """Give the task of a lease whose time is over to others."""
        task = lease.task
        with suppress(LeaseLost, NotFound):
            _, ours = await self._transitions.apply(
                task.request, lambda record, wall: lifecycle.expired_lease(record.context, lease, wall, record.running)
            )
            if ours:
                log.warning(
                    "lease ended", request=task.request, stage=task.stage, attempt=task.attempt, worker=lease.worker
                )
                self._transitions.observers.tell(Observer.lease_expired, task.planned.pool)

    async def expire(self, request: str) -> None:
        """End a request whose deadline has come, unless that was moved meanwhile."""
        self._deadlines.pop(request, None)
        now, limit = await self._queue.now(), self._registry.wake_limit
        with suppress(NotFound):
            record, _ = await self._transitions.apply(
                request, lambda record, wall: lifecycle.timed_out(record.context, wall, now, limit, record.running)
            )
            self.arm(record.context, now)

    async def workers(self) -> None:
        """Learn who they are and who may be away, and drop those that are gone.

        A worker is gone if it was silent for long, and for a lease time since this was first noticed: after a gap, or
        a step of the queue's clock, every worker seems to have been silent.
        """
        horizon, now = await self._queue.now() - GONE * self._lease_ttl, self._transitions.clock.now()
        await self._registry.cards()
        silent = {member.info.id for member in await self._queue.workers() if member.seen < horizon}
        self._silent = {worker: self._silent.get(worker, now) for worker in silent}
        for worker in [worker for worker, noticed in self._silent.items() if now - noticed > self._lease_ttl]:
            await self._queue.bye(worker)

    async def learn(self) -> None:
        """Learn what requests cost from those that completed, once, and always where other schedulers work too."""
        if self._has_learned and not self._queue.shared:
            return
        for record in reversed(await self._queue.list(RequestFilter(status="completed"), limit=LEARN_FROM)):
            self._costs.learn(record.context)
        self._has_learned = True

    async def requests(self) -> None:
        """Of every request that is not over, know the deadline and what it still needs; end what took too long."""
        async for page in self._transitions.pages(RequestFilter(over=False)):
            now = await self._queue.now()
            for record in page:
                self._in_flight.announced(record.context)
                await self._cache.review(record.context)
                settled = await self._settled(record)
                self.arm(settled.context, now)
                settled = await self._transitions.apply_if_due(
                    settled, lambda record, _: lifecycle.began(record.context, record.running)
                )
                await self._transitions.apply_if_due(
                    settled, lambda record, wall: lifecycle.overran(record.context, wall, record.running)
                )
            if len(page) == PAGE:
                await asyncio.sleep(REVIEW_PAUSE_S)
        self._in_flight.sweep()

    async def _await_return(self, worker: str) -> None:
        since = await self._queue.now()
        await asyncio.sleep(RETURN_S)
        if any(member.info.id == worker and member.seen <= since for member in await self._queue.workers()):
            log.warning("a worker is gone: its tasks go to others", worker=worker)
            await self._queue.bye(worker)
            await self._registry.workers()

    async def _settle(self) -> None:
        async for page in self._transitions.pages(RequestFilter(over=False)):
            now = await self._queue.now()
            for record in page:
                self.arm((await self._settled(record)).context, now)

    async def _settled(self, record: RequestRecord) -> RequestRecord:
        """Move a request's waiting tasks if needed, or fail it if it needs a pool whose model files have changed."""

        def fail(record: RequestRecord, wall: float) -> Change | None:
            return lifecycle.unavailable(record.context, self._registry.changed_file, wall, record.running)

        return await self._transitions.apply_if_due(await self._transitions.settled(record), fail)

    async def _sweep(self) -> None:
        await asyncio.sleep(SWEEP_S)
        for lease in await self._queue.expired(self._lease_ttl):
            with self._background.besides("ending a lease"):
                await self.end(lease)

    async def _review(self) -> None:
        """Look at the workers, at what completed, also by other schedulers, and at what is not over; then wait."""
        for what, look in (
            ("looking at workers", self.workers),
            ("learning what requests cost", self.learn),
            ("looking for deadlines", self.requests),
            ("keeping what requests cost", self._costs.settle),
        ):
            with self._background.besides(what):
                await look()
        await asyncio.sleep(REVIEW_S)
