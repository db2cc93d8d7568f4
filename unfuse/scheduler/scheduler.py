"""The scheduler: loads a context, lets the lifecycle decide, commits. It keeps nothing that the queue does not know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress

import structlog

from unfuse.core.card import ModelCard
from unfuse.core.clock import Clock, SystemClock
from unfuse.core.errors import Conflict, LeaseLost, NotFound, Overloaded
from unfuse.core.messages import Done, Failed
from unfuse.core.plan import Params, compile_plan
from unfuse.core.request import Change, Record, RequestContext, new_request_id
from unfuse.core.task import Lease
from unfuse.queues.base import Filter, Limits, Member, TaskQueue
from unfuse.scheduler import lifecycle

SWEEP_S = 0.5
"""How late the end of a lease may be noticed."""

SWEEP_PAGE = 1000

log = structlog.get_logger(__name__)


class Scheduler:
    """Turns what happened into what happens next, over one queue. Any number may run over a shared one.

    `lease_ttl` is seconds; `cards` are the models it was configured to serve, beside those its workers bring.
    """

    def __init__(
        self,
        queue: TaskQueue,
        *,
        limits: Limits | None = None,
        lease_ttl: float = 15.0,
        cards: Sequence[ModelCard] = (),
        clock: Clock | None = None,
    ) -> None:
        self.queue = queue
        self.lease_ttl = lease_ttl
        self.draining = False
        """Whether new requests are refused because this scheduler is about to end."""
        self.interruption: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done, and replaced by the next one, when a request ends while workers may still run it."""
        self._limits = limits or Limits()
        self._cards = {card.name: card for card in cards}
        self._clock = clock or SystemClock()
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin sweeping, and arm the deadlines of what the queue already holds."""
        self._spawn(self._sweep())
        after: str | None = None
        while page := await self.queue.list(Filter(over=False), after=after, limit=SWEEP_PAGE):
            for record in page:
                await self._arm(record.context)
            after = page[-1].context.id

    async def close(self) -> None:
        """Stop sweeping. The queue stays open."""
        for handle in self._deadlines.values():
            handle.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def submit(
        self,
        card: ModelCard,
        params: Params,
        *,
        n: int = 1,
        tenant: str = "default",
        idempotency_key: str = "",
        fingerprint: str = "",
        priority: int = 0,
        timeout: float | None = None,
        metadata: dict[str, str] | None = None,
        id: str = "",
    ) -> Record:
        """Accept a request whose parameters were checked: `n` pictures of seeds seed … seed + n − 1.

        `timeout` is seconds from now; `id` is the request's, drawn here if none is given. A repeat (same tenant and
        idempotency key) gets the first record. Raises Overloaded.
        """
        if self.draining:
            raise Overloaded("the server is shutting down: try again when it is back", retry_after=5.0)
        seed = params["seed"]
        if not isinstance(seed, int):
            raise TypeError("params must carry an integer seed")
        samples: list[Params] = [{"seed": seed + index, "index": index} for index in range(n)]
        plan = compile_plan(card.pipeline, card.pools(), params, samples)
        context = RequestContext(
            id=id or new_request_id(),
            model=card.name,
            params=params,
            plan=plan,
            stages={},
            tenant=tenant,
            idempotency_key=idempotency_key,
            fingerprint=fingerprint,
            priority=priority,
            deadline=None if timeout is None else await self.queue.now() + timeout,
            created_at=self._clock.wall(),
            metadata=metadata or {},
        )
        admitted = lifecycle.admitted(context, self._clock.wall())
        record = await self.queue.submit(admitted.context, admitted.push, admitted.events, self._limits)
        if record.context.id == context.id:
            await self._arm(record.context)
        return record

    async def cancel(self, request: str) -> Record:
        """End a request now; one that is over stays as it is. Raises NotFound."""
        return await self._apply(request, lambda record: lifecycle.cancelled(record.context, self._clock.wall()))

    async def complete(self, done: Done, worker: str) -> Record:
        """Record a task's outcome. Raises LeaseLost when it is not that worker's to complete any more."""
        now = self._clock.wall()
        return await self._apply(
            done.claim.request,
            lambda record: lifecycle.completed(record.context, done, worker, now, record.running),
        )

    async def fail(self, failed: Failed, worker: str) -> Record:
        """Record a task's failure. Raises LeaseLost as `complete` does."""
        queue_now, now = await self.queue.now(), self._clock.wall()
        if failed.kind == "hand_back":
            if not await self.queue.hand_back(failed.claim):
                raise LeaseLost(f"stage {failed.claim.stage} of {failed.claim.request} is not leased to {worker}")
            return await self.queue.load(failed.claim.request)
        return await self._apply(
            failed.claim.request,
            lambda record: lifecycle.failed(record.context, failed, worker, now, queue_now, record.running),
        )

    async def cards(self) -> dict[str, ModelCard]:
        """Served models by name; a live worker's word on a model goes before the configuration's."""
        return self._cards | {card.name: card for member in await self.workers() for card in member.cards}

    async def workers(self) -> Sequence[Member]:
        """Workers heard of within a lease time."""
        horizon = await self.queue.now() - self.lease_ttl
        return [member for member in await self.queue.workers() if member.seen >= horizon]

    async def missing(self) -> dict[str, list[str]]:
        """Pools without a live worker, by model; empty when everything served can run."""
        manned = {pool for member in await self.workers() for pool in member.info.pools}
        wanted = {name: sorted(set(card.pools().values()) - manned) for name, card in (await self.cards()).items()}
        return {name: pools for name, pools in wanted.items() if pools}

    async def addresses(self, leases: Sequence[Lease]) -> Mapping[str, tuple[str, str]]:
        """(node, arena address) of every worker that owns an input of these leases."""
        owners = {ref.owner for lease in leases for ref in lease.task.inputs}
        if not owners:
            return {}
        known = {member.info.id: member.info for member in await self.queue.workers()}
        return {owner: (known[owner].node, known[owner].arena) for owner in owners if owner in known}

    async def over(self, requests: Sequence[str]) -> list[str]:
        """Which of these requests nothing will happen to any more."""
        return [request for request in requests if await self._is_over(request)]

    async def _is_over(self, request: str) -> bool:
        try:
            return (await self.queue.load(request)).context.over
        except NotFound:
            return True

    async def _apply(self, request: str, decide: Callable[[Record], Change | None]) -> Record:
        """Load, decide, commit, again while others move the same context. A decision of None changes nothing."""
        while True:
            record = await self.queue.load(request)
            change = decide(record)
            if change is None:
                return record
            with suppress(Conflict):
                record = await self.queue.commit(change)
                if record.context.over:
                    self._ended(record.context)
                return record

    def _ended(self, context: RequestContext) -> None:
        if handle := self._deadlines.pop(context.id, None):
            handle.cancel()
        if context.status != "completed":
            self.interruption.set_result(None)
            self.interruption = asyncio.get_running_loop().create_future()

    async def _arm(self, context: RequestContext) -> None:
        if context.deadline is not None:
            delay = context.deadline - await self.queue.now()
            loop = asyncio.get_running_loop()
            self._deadlines[context.id] = loop.call_later(delay, self._time_out, context.id)

    def _time_out(self, request: str) -> None:
        self._deadlines.pop(request, None)
        self._spawn(self._expire(request))

    async def _expire(self, request: str) -> None:
        with suppress(NotFound):
            await self._apply(request, lambda record: lifecycle.timed_out(record.context, self._clock.wall()))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for lease in await self.queue.expired():
                await self._end(lease)

    async def _end(self, lease: Lease) -> None:
        log.warning("lease ended", request=lease.task.request, stage=lease.task.stage, worker=lease.worker)
        with suppress(LeaseLost, NotFound):
            await self._apply(
                lease.task.request, lambda record: lifecycle.expired_lease(record.context, lease, self._clock.wall())
            )

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
