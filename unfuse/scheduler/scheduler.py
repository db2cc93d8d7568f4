"""The scheduler: loads a context, lets the lifecycle decide, commits. It keeps nothing that the queue does not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from unfuse.core.clock import Clock, SystemClock
from unfuse.core.errors import Damaged, LeaseLost, LimitReached, NotFound, Overloaded, ShuttingDown, WeightsChanged
from unfuse.core.messages import CachePrefix, CheckpointSaved, OutputAnnounced, TaskCompleted, TaskFailed, TaskStopped
from unfuse.core.modalities import Work
from unfuse.core.model_spec import ModelSpec
from unfuse.core.parameters import nth_seed
from unfuse.core.paths import without_paths
from unfuse.core.plan import Params, PlannedStage, compile_plan, prefix_key
from unfuse.core.request import (
    Awaiting,
    Caller,
    Change,
    Delivery,
    GenerationRequest,
    RequestContext,
    RequestRecord,
    TenantLimits,
    request_ids,
)
from unfuse.core.supervisor import Observers, Supervisor
from unfuse.core.task import CACHED, Claim, Lease
from unfuse.queues.base import EXACT, LeaseRequest, QueueBackend, QueueLimits
from unfuse.scheduler import lifecycle
from unfuse.scheduler.admission import Order, PoolArenas, place
from unfuse.scheduler.backpressure import InFlight
from unfuse.scheduler.costs import Costs
from unfuse.scheduler.encoder_cache import EncoderCache
from unfuse.scheduler.maintenance import Maintenance
from unfuse.scheduler.model_swaps import ModelSwaps
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.output_rates import OutputRates
from unfuse.scheduler.registry import Registry
from unfuse.scheduler.transitions import Transitions, WebhookDeliveries

UNLIMITED = QueueLimits(EXACT, EXACT)  # room for a request that is over when it comes
ANY_NUMBER = TenantLimits()  # of requests that nobody asks for within an allowance
PATIENCE = 5.0  # a request may take so many times what was predicted, whatever the limit


class Scheduler:
    """Turns what happened into what happens next, over one queue. Any number may run over a shared one.

    `lease_ttl` is seconds; `cards` are the models it was configured to serve, beside those its workers bring. Encoder
    outputs of up to `cache_bytes` serve other requests too. What stages take is kept in the file `costs`, if any. What
    can never fit the `arenas` is refused. See the registry for roles that are `asleep`, and the `wake_limit`.
    """

    def __init__(
        self,
        queue: QueueBackend,
        *,
        limits: QueueLimits | None = None,
        lease_ttl: float = 15.0,
        cards: Sequence[ModelSpec] = (),
        clock: Clock | None = None,
        order: Order = "fifo",
        cache_bytes: int = 0,
        costs: Path | None = None,
        arenas: PoolArenas | None = None,
        asleep: Mapping[str, int] | None = None,
        wake_limit: float = 0.0,
    ) -> None:
        self.queue, self.lease_ttl = queue, lease_ttl
        self.draining = False  # whether new requests are refused because this scheduler is about to end
        self._limits = limits or QueueLimits()
        self.clock = clock or SystemClock()
        self._order: Order = order
        self._arenas, self.in_flight = arenas or PoolArenas(), InFlight()
        self.registry = Registry(queue, lease_ttl, cards, asleep or {}, wake_limit)
        self._costs = Costs(costs, self.clock, self.registry.known)
        self._background = Supervisor()
        self.observers = Observers[Observer](self._background)
        self._transitions = Transitions(queue, self.registry, self.clock, self.observers)
        self._apply = self._transitions.apply
        self._cache = EncoderCache(self._transitions, cache_bytes, self._background)
        self.upkeep = Maintenance(
            self._transitions, self._costs, self.in_flight, self._cache, lease_ttl, self._background
        )
        self.webhook_deliveries = WebhookDeliveries(self._transitions)
        self.swaps = ModelSwaps(queue, self.registry, self.clock, self.observers)
        self.growing = OutputRates(queue, self.clock, self.observers)
        self.observers.add(self.in_flight, self.upkeep, self._costs, self.growing)

    async def start(self) -> None:
        """Begin its upkeep: learn what requests cost, know the deadlines of what the queue holds, end leases."""
        self.upkeep.start()

    async def close(self) -> None:
        """End its upkeep. The queue stays open."""
        await self.upkeep.close()

    async def submit(
        self,
        card: ModelSpec,
        request: GenerationRequest,
        caller: Caller,
        delivery: Delivery,
        prefixes: Sequence[str] = (),
    ) -> RequestRecord:
        """Accept a request whose parameters were checked.

        `prefixes` are the digests of the beginnings that its prompt may share with others, the shortest first. Its
        stages may run for the limit that it has, or for five times what was predicted if that is more; a model of
        which nothing is known yet is not limited. A repeat (same tenant and idempotency key) gets the first record.
        Raises Overloaded, which says when to try again, InvalidParameter for what no arena can ever hold, and
        WeightsChanged.
        """
        params, seed = request.params, request.params["seed"]
        if not isinstance(seed, int):
            raise TypeError("params must carry an integer seed")
        samples: list[Params] = [{"seed": nth_seed(seed, index), "index": index} for index in range(request.n)]
        known = params | request.derived.values()
        works = {stage.name: stage.work.of(known) for stage in card.pipeline.stages}
        if (file := self.registry.changed_file(*card.pools().values())) and file.compared:
            raise WeightsChanged(f"the model is unavailable: {file}")
        pools = await self._chosen({name: (pool, works[name]) for name, pool in card.pools().items()})
        shared_by = self._cache.shared_by(caller.tenant, delivery.cache)
        plan = compile_plan(card.pipeline, pools, params, samples, shared_by, prefixes, request.derived)
        id = request.id or self.queue.placed(request_ids(), caller)
        request = replace(request, id=id)
        return await self._submit(RequestContext(request, caller, delivery, plan, {}))

    async def reuse(
        self, request: GenerationRequest, caller: Caller, delivery: Delivery, source: RequestContext
    ) -> RequestRecord:
        """Accept a request that has the results of an equal one already: it is over with that, whatever the limits but
        its tenant's rate.

        A repeat (same tenant and idempotency key) gets the first record.
        """
        metadata = delivery.metadata | {"reuse_of": source.id}
        delivery = replace(delivery, metadata=metadata)
        context = RequestContext(request, caller, delivery, source.plan, {})
        change = lifecycle.reused(context, source.result, self.clock.wall())
        limits = replace(UNLIMITED, tenant=replace(caller.allowance, concurrent=0))
        record = await self.queue.submit(change.context, (), change.events, limits)
        if record.context == change.context:
            self.observers.tell(Observer.submitted, record.context)
            self.observers.tell(Observer.ended, record.context)
        return record

    async def retry(self, request: str, id: str = "", allowance: TenantLimits = ANY_NUMBER) -> RequestRecord:
        """Submit a dead request anew, without deadline; it is dead no more. Raises NotFound, Overloaded."""
        old = (await self.queue.load(request)).context
        if not old.dead:
            raise NotFound(f"request {request} is not among the dead ones")
        id = id or self.retried_as(old, allowance)
        metadata = old.delivery.metadata | {"retry_of": request}
        plan = old.plan.moved(await self._chosen({stage.name: (stage.pool, stage.work) for stage in old.plan.stages}))
        fresh = RequestContext(
            replace(old.request, id=id, result_cache_key=""),
            Caller(old.caller.tenant, allowance=allowance, base_url=old.caller.base_url),
            replace(old.delivery, metadata=metadata, timeout=None),
            plan,
            {},
        )
        record = await self._submit(fresh)
        await self._apply(request, lambda record, _: lifecycle.retried(record.context))
        return record

    def retried_as(self, old: RequestContext, allowance: TenantLimits) -> str:
        """The id of the request that follows from a dead one: the same each time, so that no repeat makes another."""
        caller = Caller(old.caller.tenant, old.id, allowance=allowance)
        return self.queue.placed(request_ids(old.medium, old.id), caller)

    async def _submit(self, context: RequestContext) -> RequestRecord:
        if self.draining:
            raise ShuttingDown("the server is shutting down: try again when it is back", retry_after=5.0)
        timeout = context.delivery.timeout
        now = 0.0 if timeout is None else await self.queue.now()
        context = self._costs.priced(context)
        limit_s = context.request.time_limit_s if self._costs.known(context) else None
        limit_s = limit_s and max(limit_s, PATIENCE * context.cost)
        request = replace(context.request, time_limit_s=limit_s)
        deadline = timeout and now + timeout
        context = replace(context, request=request, created_at=self.clock.wall(), deadline=deadline)
        order = await place(self._order, self.queue, context)
        hits, misses = await self._cache.find(context.plan)
        await self._arenas.require_room(context.plan, hits, self.registry.known.values(), self.registry.workers)
        context = replace(context, order=order)
        leaders = await self._cache.leaders(context, hits)
        admitted = lifecycle.admitted(context, self.clock.wall(), hits, leaders)
        push = self._transitions.output_sizes.given(admitted.push)
        self.observers.tell(Observer.announced, context)
        try:
            limits = replace(self._limits, tenant=context.caller.allowance)
            record = await self.queue.submit(admitted.context, push, admitted.events, limits)
        except Overloaded as error:
            self.observers.tell(Observer.refused, context)
            if not (isinstance(error, LimitReached) and error.retry_after):
                error.retry_after = self._costs.until_room(context.cost)
            raise
        if record.context == admitted.context:
            self.observers.tell(Observer.submitted, record.context)
            self.observers.tell(Observer.looked_up, len(hits) + len(leaders), misses - len(leaders))
            self._cache.submitted(record.context)
            record = await self._transitions.settled(record)
            self.upkeep.arm(record.context, now)
        return record

    async def _chosen(self, wanted: Mapping[str, tuple[str, Work]]) -> dict[str, str]:
        """Of the pools that could serve in place of each stage's, the one where it is done first, if any is manned.

        Predicted are what is left to do there, shared by its workers, and the stage itself.
        """
        could = {name: self.registry.manned(pool) for name, (pool, _) in wanted.items()}
        several = sorted({pool for pools in could.values() if len(pools) > 1 for pool in pools})
        lines = (await self.queue.stats(several)).pools if several else {}

        def finish(name: str, pool: str) -> tuple[float, str]:
            left_s = lines[pool].left_s / could[name][pool] if pool in lines else 0.0
            return left_s + (self._costs.seconds(pool, wanted[name][1]) or 0.0), pool

        return {name: min(could[name] or [pool], key=partial(finish, name)) for name, (pool, _) in wanted.items()}

    async def cancel(self, request: str) -> RequestRecord:
        """End a request now; one that is over stays as it is. Raises NotFound."""
        record, _ = await self._apply(
            request, lambda record, wall: lifecycle.cancelled(record.context, wall, record.running)
        )
        return record

    async def give_up(self, request: str, reason: str) -> None:
        """Fail a request because its model cannot be served. One that is over stays as it is."""
        with suppress(NotFound):
            await self._apply(
                request, lambda record, wall: lifecycle.unserved(record.context, reason, wall, record.running)
            )

    async def client_disconnected(self, request: str) -> None:
        """Cancel a request because its client disconnected. A request that is over, or unknown, stays as it is."""
        with suppress(NotFound):
            await self._apply(
                request, lambda record, wall: lifecycle.client_disconnected(record.context, wall, record.running)
            )

    async def complete(
        self, done: TaskCompleted, worker: str, wanted: LeaseRequest | None = None
    ) -> tuple[RequestRecord, list[Lease]]:
        """Record an outcome and lease what is wanted next, nobody between. Raises LeaseLost if it is no longer held."""
        claim, leases = done.claim, list[Lease]()

        async def commit(change: Change) -> RequestRecord:
            if wanted is None:
                return await self.queue.commit(change)
            record, leases[:] = await self.queue.commit_and_lease(change, worker, wanted, self.lease_ttl)
            return record

        record, _ = await self._apply(
            claim.request,
            lambda record, wall: lifecycle.completed(record.context, done, worker, wall, record.running),
            commit,
            self.queue.known(claim),
        )
        if done.output and record.context.stages[claim.stage].output == done.output:
            stage = record.context.plan.stage(claim.stage)
            with self._background.besides("learning from an output"):
                self._transitions.output_sizes.learn(stage.pool, done.output.nbytes)
            with self._background.besides("keeping an output for other requests"):
                await self._cache.keep(stage.cache, done.output)
        return record, leases

    async def save(self, saved: CheckpointSaved, worker: str) -> None:
        """Record a checkpoint. Raises LeaseLost when the task is not that worker's (any more)."""
        await self._apply(
            saved.claim.request, lambda record, _: lifecycle.saved(record.context, saved, worker, record.running)
        )

    async def announce(self, news: OutputAnnounced, worker: str) -> None:
        """Let others read an output while it is written. Raises LeaseLost as `save` does."""
        await self._apply(
            news.claim.request,
            lambda record, wall: lifecycle.announced(record.context, news, worker, wall, record.running),
        )

    async def keep(self, kept: CachePrefix, worker: str) -> None:
        """Let other requests go on from what a running task has made. Raises LeaseLost as `save` does."""
        claim = kept.claim
        record = await self.queue.load(claim.request)
        known = claim.stage in record.context.stages and _may_keep(record.context.plan.stage(claim.stage), kept)
        if not known or kept.output.owner != worker or not lifecycle.held_by(worker, claim, record.running):
            raise LeaseLost(f"worker {worker} keeps what {claim.stage} of {claim.request} is not asked for")
        await self._cache.keep(kept.key, kept.output)

    async def resumed(self, lease: Lease) -> Lease:
        """The lease with what its task need not make: an earlier attempt's checkpoint, a prefix that others made."""
        task = lease.task
        if task.planned.prefixes:
            lease = replace(lease, prefix=await self._cache.prefix(task.planned.prefixes))
        if task.attempt == 1:
            return lease
        with suppress(NotFound, Damaged):
            state = (await self.queue.load(task.request)).context.stages[task.stage]
            return replace(lease, checkpoint=state.checkpoint)
        return lease

    async def fail(self, failed: TaskFailed, worker: str) -> RequestRecord:
        """Record a task's failure. Raises LeaseLost as `complete` does."""
        claim = failed.claim
        if failed.kind == "hand_back":
            return await self._handed_back(failed, worker)
        queue_now = await self.queue.now()
        message, evidence = without_paths(failed.message), without_paths(failed.evidence)
        told = replace(failed, message=message, evidence=evidence)
        if failed.error:
            await self.registry.workers()  # refresh the registry

        def decide(record: RequestRecord, wall: float) -> Change:
            known = record.context.stages.keys()
            pool = record.context.plan.stage(claim.stage).pool if claim.stage in known else ""
            has_other = self.registry.has_other(pool, worker)
            return lifecycle.failed(record.context, told, worker, wall, queue_now, record.running, has_other)

        record, _ = await self._apply(claim.request, decide)
        if failed.object_id:
            self.in_flight.announced(record.context)
            with self._background.besides("giving up a lost output"):
                await self._cache.lost(record.context.plan, claim.stage, failed.object_id)
        return record

    async def stopped(self, stopped: TaskStopped, worker: str) -> None:
        """Count what an attempt has used that its worker has dropped, or whose end was refused; each attempt once."""
        claim = stopped.claim
        if not stopped.timings.share_s:
            return
        if await self.queue.progress(claim, (), stopped.timings):
            return  # it still holds its lease: it is counted when that ends
        with suppress(NotFound, Damaged):
            await self._apply(
                claim.request,
                lambda record, wall: lifecycle.stopped(record.context, stopped, worker, wall, record.running),
            )

    async def _handed_back(self, failed: TaskFailed, worker: str) -> RequestRecord:
        """Let others have a task; who returns it again and again for no good reason gets it no more."""
        claim, blameless = failed.claim, failed.reason in lifecycle.BLAMELESS
        await self._apply(
            claim.request,
            lambda record, wall: lifecycle.handed_back(
                record.context, claim, worker, wall, record.running, failed.timings
            ),
        )
        if not await self.holds(worker, claim) or (blameless and not await self.queue.hand_back(claim)):
            raise LeaseLost(f"stage {claim.stage} of {claim.request} is not leased to {worker}")
        if not blameless and await self.queue.turn_down(claim) >= lifecycle.GIVEN_UP:
            await self._apply(
                claim.request,
                lambda record, wall: lifecycle.turned_down(
                    record.context, claim.stage, failed.message, wall, record.running
                ),
            )
        return await self.queue.load(claim.request)

    async def holds(self, worker: str, claim: Claim) -> bool:
        """Whether that worker was given the task, as far as the queue tells; whether its token is right, commits do."""
        try:
            return lifecycle.held_by(worker, claim, (await self.queue.load(claim.request)).running)
        except (NotFound, Damaged):
            return False

    def eta(self, record: RequestRecord) -> float | None:
        """Predicted seconds until a request is over; None once it is, and for models that nothing is known of yet."""
        (_, until), own = self.awaited(record), self._costs.eta(record)
        return own if until is None else until + (own or record.context.cost)

    def awaited(self, record: RequestRecord) -> tuple[Awaiting, float | None]:
        """What a request waits for beside its turn, and the predicted seconds until then; None if for nothing."""
        context = record.context
        until = lifecycle.seconds_until_awake(context, self._costs.woken, self.clock.wall())
        if until is not None or context.over or record.running:
            return "waking", until
        left = {stage.pool for stage in context.plan.stages if context.stages[stage.name].status != "done"}
        loads = (seconds for pool in left if (seconds := self.swaps.until_loaded(pool)) is not None)
        return "loading", max(loads, default=None)

    async def over(self, names: Sequence[str]) -> list[str]:
        """Which of these requests nothing will happen to any more, and which of these names the cache gave up."""
        cached = [name for name in names if name.startswith(CACHED)]
        requests = [name for name in names if not name.startswith(CACHED)]
        return await self.queue.over(requests) + await self._cache.over(cached)


def _may_keep(stage: PlannedStage, kept: CachePrefix) -> bool:
    """Whether the key is one that a stage is asked for: of a beginning of the prompt, or in the space it extends."""
    extends = bool(stage.extends and kept.digest) and kept.key == prefix_key(stage.extends, kept.digest)
    return extends or kept.key in stage.prefixes
