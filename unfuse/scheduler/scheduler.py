"""The scheduler: admits requests and turns finished tasks into the next ones.

Each method loads a request, lets `lifecycle` decide, and commits the change. All state of requests is in the queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from unfuse.core.clock import Clock, SystemClock
from unfuse.core.errors import (
    LeaseLost,
    LimitReached,
    NotFound,
    Overloaded,
    RecordDamaged,
    ShuttingDown,
    WeightsChanged,
)
from unfuse.core.messages import CachePrefix, CheckpointSaved, OutputAnnounced, TaskCompleted, TaskFailed, TaskStopped
from unfuse.core.modalities import Work
from unfuse.core.model_spec import ModelSpec
from unfuse.core.parameters import nth_seed
from unfuse.core.paths import without_paths
from unfuse.core.plan import Params, PlannedStage, compile_plan, prefix_key
from unfuse.core.request import (
    Caller,
    Change,
    Delivery,
    GenerationRequest,
    RequestContext,
    RequestRecord,
    TenantLimits,
    WaitReason,
    request_ids,
)
from unfuse.core.supervisor import Observers, Supervisor
from unfuse.core.task import CACHED, Claim, Lease
from unfuse.queues.base import MAX_SAFE_INTEGER, LeaseRequest, QueueBackend, QueueLimits
from unfuse.scheduler import cold_starts, lifecycle
from unfuse.scheduler.admission import Order, PoolArenas, compute_order
from unfuse.scheduler.backpressure import InFlight
from unfuse.scheduler.costs import Costs
from unfuse.scheduler.encoder_cache import EncoderCache
from unfuse.scheduler.maintenance import Maintenance
from unfuse.scheduler.model_swaps import ModelSwaps
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.output_rates import OutputRates
from unfuse.scheduler.registry import Registry
from unfuse.scheduler.transitions import Transitions, WebhookDeliveries

#: Queue limits of a request that is complete when it is submitted.
UNLIMITED = QueueLimits(MAX_SAFE_INTEGER, MAX_SAFE_INTEGER)

#: Tenant limits without any bound.
ANY_NUMBER = TenantLimits()

#: A request may run for this many times its predicted cost, even if that exceeds its time limit.
PATIENCE = 5.0


class Scheduler:
    """Schedules the requests of one queue. Any number of schedulers may share a queue.

    limits: admission control of the queue.
    lease_ttl: seconds after which a lease without a heartbeat expires.
    specs: specs of the configured models. Workers may bring further ones.
    order: the order of tasks of equal priority, see `admission.Order`.
    cache_bytes: size of the encoder cache. 0 disables it.
    costs: file that stores the measured durations of stages. None: they are lost when the process ends.
    arenas: the workers' arenas. Requests whose outputs can never fit are refused.
    scale_to_zero, cold_start_limit: `scalable_roles` and `cold_start_limit` of the `Registry`.
    """

    def __init__(
        self,
        queue: QueueBackend,
        *,
        limits: QueueLimits | None = None,
        lease_ttl: float = 15.0,
        specs: Sequence[ModelSpec] = (),
        clock: Clock | None = None,
        order: Order = "fifo",
        cache_bytes: int = 0,
        costs: Path | None = None,
        arenas: PoolArenas | None = None,
        scale_to_zero: Mapping[str, int] | None = None,
        cold_start_limit: float = 0.0,
    ) -> None:
        self.queue = queue
        self.lease_ttl = lease_ttl
        #: Whether new requests are refused because this scheduler is about to end.
        self.draining = False
        self._limits = limits or QueueLimits()
        self.clock = clock or SystemClock()
        self._order: Order = order
        self._arenas = arenas or PoolArenas()
        self.in_flight = InFlight()
        self.registry = Registry(queue, lease_ttl, specs, scale_to_zero or {}, cold_start_limit)

        self._costs = Costs(costs, self.clock, self.registry.known_workers)
        self._background = Supervisor()
        self.observers = Observers[Observer](self._background)
        self._transitions = Transitions(queue, self.registry, self.clock, self.observers)
        self._apply = self._transitions.apply
        self._cache = EncoderCache(self._transitions, cache_bytes, self._background)
        self.maintenance = Maintenance(
            self._transitions, self._costs, self.in_flight, self._cache, lease_ttl, self._background
        )
        self.webhook_deliveries = WebhookDeliveries(self._transitions)
        self.model_swaps = ModelSwaps(queue, self.registry, self.clock, self.observers)
        self.output_rates = OutputRates(queue, self.clock, self.observers)
        self.observers.add(self.in_flight, self.maintenance, self._costs, self.output_rates)

    async def start(self) -> None:
        """Start background maintenance: learn costs, watch deadlines and expire leases."""
        self.maintenance.start()

    async def close(self) -> None:
        """Stop background maintenance. The queue stays open."""
        await self.maintenance.close()

    async def submit(
        self,
        spec: ModelSpec,
        request: GenerationRequest,
        caller: Caller,
        delivery: Delivery,
        prefixes: Sequence[str] = (),
    ) -> RequestRecord:
        """Admit a request with checked parameters and queue its first tasks.

        Its stages may run for its time limit, or for PATIENCE times their predicted seconds if that is more. If a stage
        was never measured, there is no limit. A repeat (same tenant and idempotency key) returns the first record.

        prefixes: digests of the prompt prefixes that may be in the prefix cache, the shortest first.

        Raises Overloaded, with the seconds until a retry, InvalidParameter for outputs that fit no arena,
        WeightsChanged if model files have changed since loading, and ShuttingDown.
        """
        params = request.params
        seed = params["seed"]
        if not isinstance(seed, int):
            raise TypeError("params must carry an integer seed")

        samples: list[Params] = [{"seed": nth_seed(seed, index), "index": index} for index in range(request.n)]
        size_params = params | request.derived.values()
        works = {stage.name: stage.work.of(size_params) for stage in spec.pipeline.stages}
        if (file := self.registry.changed_file(*spec.pools().values())) and file.compared:
            raise WeightsChanged(f"the model is unavailable: {file}")

        pools = await self._choose_pools({name: (pool, works[name]) for name, pool in spec.pools().items()})
        shared_by = self._cache.shared_by(caller.tenant, delivery.cache)
        plan = compile_plan(spec.pipeline, pools, params, samples, shared_by, prefixes, request.derived)
        id = request.id or self.queue.choose_id(request_ids(), caller)
        request = replace(request, id=id)
        return await self._submit(RequestContext(request, caller, delivery, plan, {}))

    async def reuse(
        self, request: GenerationRequest, caller: Caller, delivery: Delivery, source: RequestContext
    ) -> RequestRecord:
        """Record a request as completed with the cached results of an equal one, `source`.

        Of all limits, only the tenant's rate applies. A repeat (same tenant and idempotency key) returns the first
        record.
        """
        metadata = delivery.metadata | {"reuse_of": source.id}
        delivery = replace(delivery, metadata=metadata)
        context = RequestContext(request, caller, delivery, source.plan, {})
        change = lifecycle.complete_from_results(context, source.result, self.clock.wall())
        limits = replace(UNLIMITED, tenant=replace(caller.limits, concurrent=0))
        record = await self.queue.submit(change.context, (), change.events, limits)
        if record.context == change.context:
            self.observers.notify(Observer.on_submitted, record.context)
            self.observers.notify(Observer.on_ended, record.context)
        return record

    async def retry(self, request: str, id: str = "", allowance: TenantLimits = ANY_NUMBER) -> RequestRecord:
        """Submit a dead letter again, without a deadline, and return the new request.

        The old request is no longer a dead letter. Raises NotFound if it is not one now, and Overloaded.

        id: the id of the new request. "": that of `choose_retry_id`.
        allowance: the tenant limits of the new request.
        """
        dead_letter = (await self.queue.load(request)).context
        if not dead_letter.is_dead_letter:
            raise NotFound(f"request {request} is not a dead letter")
        id = id or self.choose_retry_id(dead_letter, allowance)
        metadata = dead_letter.delivery.metadata | {"retry_of": request}
        stages = {stage.name: (stage.pool, stage.work) for stage in dead_letter.plan.stages}
        plan = dead_letter.plan.with_pools(await self._choose_pools(stages))
        retry_context = RequestContext(
            replace(dead_letter.request, id=id, result_cache_key=""),
            Caller(dead_letter.caller.tenant, limits=allowance, base_url=dead_letter.caller.base_url),
            replace(dead_letter.delivery, metadata=metadata, timeout=None),
            plan,
            {},
        )
        record = await self._submit(retry_context)
        await self._apply(request, lambda record, _: lifecycle.clear_dead_letter(record.context))
        return record

    def choose_retry_id(self, dead_letter: RequestContext, allowance: TenantLimits) -> str:
        """Return the id of the request that retries a dead letter.

        It is the same for each retry of that dead letter, so that a repeated retry returns the same request.
        """
        caller = Caller(dead_letter.caller.tenant, dead_letter.id, limits=allowance)
        return self.queue.choose_id(request_ids(dead_letter.modality, dead_letter.id), caller)

    async def _submit(self, context: RequestContext) -> RequestRecord:
        """Predict a request's cost, choose its order, and admit and queue it."""
        if self.draining:
            raise ShuttingDown("the server is shutting down: try again when it is back", retry_after=5.0)

        timeout = context.delivery.timeout
        now = 0.0 if timeout is None else await self.queue.now()

        context = self._costs.with_cost(context)
        limit_s = context.request.time_limit_s if self._costs.is_measured(context) else None
        limit_s = limit_s and max(limit_s, PATIENCE * context.cost)
        request = replace(context.request, time_limit_s=limit_s)
        deadline = timeout and now + timeout
        context = replace(context, request=request, created_at=self.clock.wall(), deadline=deadline)

        order = await compute_order(self._order, self.queue, context)
        hits, misses = await self._cache.find(context.plan)
        await self._arenas.require_room(context.plan, hits, self.registry.known_workers.values(), self.registry.workers)
        context = replace(context, order=order)
        leaders = await self._cache.leaders(context, hits)
        admitted = lifecycle.admit(context, self.clock.wall(), hits, leaders)
        push = self._transitions.output_sizes.with_learned_sizes(admitted.push)

        # Announced before it is queued, so that no waiting worker leases its tasks with too small a reserve.
        self.observers.notify(Observer.on_announced, context)
        try:
            limits = replace(self._limits, tenant=context.caller.limits)
            record = await self.queue.submit(admitted.context, push, admitted.events, limits)
        except Overloaded as error:
            self.observers.notify(Observer.on_refused, context)
            if not (isinstance(error, LimitReached) and error.retry_after):
                error.retry_after = self._costs.seconds_until_admitted(context.cost)
            raise

        if record.context == admitted.context:  # else it is the record of an earlier, equal request
            self.observers.notify(Observer.on_submitted, record.context)
            self.observers.notify(Observer.on_cache_lookup, len(hits) + len(leaders), misses - len(leaders))
            self._cache.on_submitted(record.context)
            record = await self._transitions.move_waiting(record)
            self.maintenance.set_deadline_timer(record.context, now)
        return record

    async def _choose_pools(self, stages: Mapping[str, tuple[str, Work]]) -> dict[str, str]:
        """Return the pool for each stage: the live equivalent one with the earliest predicted end.

        The prediction is the pool's backlog, divided by its workers, plus the stage itself. A stage without a live
        pool gets its declared one.

        stages: the declared pool and the work of each stage, by name.
        """
        candidates = {name: self.registry.live_pools(pool) for name, (pool, _) in stages.items()}
        pools_to_compare = sorted({pool for pools in candidates.values() if len(pools) > 1 for pool in pools})
        backlogs = (await self.queue.stats(pools_to_compare)).pools if pools_to_compare else {}

        def predicted_end(name: str, pool: str) -> tuple[float, str]:
            left_s = backlogs[pool].left_s / candidates[name][pool] if pool in backlogs else 0.0
            return left_s + (self._costs.seconds(pool, stages[name][1]) or 0.0), pool

        return {
            name: min(candidates[name] or [pool], key=partial(predicted_end, name))
            for name, (pool, _) in stages.items()
        }

    async def cancel(self, request: str) -> RequestRecord:
        """Cancel a request. A request that has ended stays as it is. Raises NotFound."""
        record, _ = await self._apply(
            request, lambda record, wall: lifecycle.cancel(record.context, wall, record.running)
        )
        return record

    async def fail_unserved(self, request: str, reason: str) -> None:
        """Fail a request whose model cannot be served, unless it has ended or is unknown."""
        with suppress(NotFound):
            await self._apply(
                request, lambda record, wall: lifecycle.fail_unserved(record.context, reason, wall, record.running)
            )

    async def client_disconnected(self, request: str) -> None:
        """Cancel a request because its client disconnected, unless it has ended or is unknown."""
        with suppress(NotFound):
            await self._apply(
                request, lambda record, wall: lifecycle.disconnect_client(record.context, wall, record.running)
            )

    async def complete(
        self, completed: TaskCompleted, worker: str, lease_request: LeaseRequest | None = None
    ) -> tuple[RequestRecord, list[Lease]]:
        """Record a completed task and lease the worker's next tasks in the same transaction.

        Without a `lease_request`, nothing is leased. Raises LeaseLost if the worker's lease on the task has ended.
        """
        claim = completed.claim
        leases = list[Lease]()

        async def commit(change: Change) -> RequestRecord:
            if lease_request is None:
                return await self.queue.commit(change)
            record, leases[:] = await self.queue.commit_and_lease(change, worker, lease_request, self.lease_ttl)
            return record

        record, _ = await self._apply(
            claim.request,
            lambda record, wall: lifecycle.complete_stage(record.context, completed, worker, wall, record.running),
            commit,
            self.queue.cached_record(claim),
        )
        # An error from here on is only logged: the task is recorded as completed.
        if completed.output and record.context.stages[claim.stage].output == completed.output:
            stage = record.context.plan.stage(claim.stage)
            with self._background.log_errors("learning the size of an output"):
                self._transitions.output_sizes.learn(stage.pool, completed.output.nbytes)
            with self._background.log_errors("caching an output"):
                if not completed.vae:  # tiles have changed its bytes
                    await self._cache.add(stage.cache_key, completed.output)
        return record, leases

    async def save_checkpoint(self, saved: CheckpointSaved, worker: str) -> None:
        """Record a checkpoint. Raises LeaseLost if the task is not leased to this worker."""
        await self._apply(
            saved.claim.request,
            lambda record, _: lifecycle.save_checkpoint(record.context, saved, worker, record.running),
        )

    async def announce_output(self, announced: OutputAnnounced, worker: str) -> None:
        """Queue the readers of an output that is still being written.

        Raises LeaseLost as `save_checkpoint` does.
        """
        await self._apply(
            announced.claim.request,
            lambda record, wall: lifecycle.announce_output(record.context, announced, worker, wall, record.running),
        )

    async def cache_prefix(self, cached: CachePrefix, worker: str) -> None:
        """Add a running task's prefix to the prefix cache. Raises LeaseLost as `save_checkpoint` does."""
        claim = cached.claim
        record = await self.queue.load(claim.request)
        is_allowed = claim.stage in record.context.stages and _may_cache(record.context.plan.stage(claim.stage), cached)
        if not is_allowed or cached.output.owner != worker or not lifecycle.is_held_by(worker, claim, record.running):
            raise LeaseLost(f"worker {worker} may not cache this prefix for {claim.stage} of {claim.request}")
        await self._cache.add(cached.key, cached.output)

    async def add_resume_data(self, lease: Lease) -> Lease:
        """Return the lease with an earlier attempt's checkpoint and the cached prefix, if any."""
        task = lease.task
        if task.planned.prefixes:
            lease = replace(lease, prefix=await self._cache.prefix(task.planned.prefixes))
        if task.attempt == 1:  # there is no earlier attempt
            return lease
        with suppress(NotFound, RecordDamaged):
            state = (await self.queue.load(task.request)).context.stages[task.stage]
            return replace(lease, checkpoint=state.checkpoint)
        return lease

    async def fail(self, failed: TaskFailed, worker: str) -> RequestRecord:
        """Record a task's failure. Raises LeaseLost as `complete` does."""
        claim = failed.claim
        if failed.kind == "hand_back":
            return await self._hand_back(failed, worker)
        queue_now = await self.queue.now()
        failure = replace(failed, message=without_paths(failed.message), evidence=without_paths(failed.evidence))
        if failed.error or failed.kind == "device":
            await self.registry.workers()  # refresh the registry, which `decide` asks for another worker

        def decide(record: RequestRecord, wall: float) -> Change:
            stages = record.context.stages.keys()
            pool = record.context.plan.stage(claim.stage).pool if claim.stage in stages else ""
            has_other = self.registry.has_other(pool, worker)
            return lifecycle.fail_stage(record.context, failure, worker, wall, queue_now, record.running, has_other)

        record, _ = await self._apply(claim.request, decide)
        if failed.object_id:
            self.in_flight.on_announced(record.context)
            with self._background.log_errors("removing a lost output from the cache"):
                await self._cache.evict_lost(record.context.plan, claim.stage, failed.object_id)
        return record

    async def account_stopped(self, stopped: TaskStopped, worker: str) -> None:
        """Account for the device time of an attempt that its worker stopped.

        Each attempt is counted once.
        """
        claim = stopped.claim
        if not stopped.timings.share_s:
            return
        if await self.queue.progress(claim, (), stopped.timings):
            return  # the lease is still valid: the attempt is counted when it ends
        with suppress(NotFound, RecordDamaged):
            await self._apply(
                claim.request,
                lambda record, wall: lifecycle.account_stopped(record.context, stopped, worker, wall, record.running),
            )

    async def _hand_back(self, failed: TaskFailed, worker: str) -> RequestRecord:
        """Return a leased task to its queue, so that another worker can lease it.

        A hand-back for a reason that is not in `lifecycle.UNLIMITED_HAND_BACKS` is counted. After MAX_HAND_BACK_WORKERS
        workers that handed it back too often, the request becomes a dead letter. Raises LeaseLost.
        """
        claim = failed.claim
        is_blameless = failed.reason in lifecycle.UNLIMITED_HAND_BACKS
        await self._apply(
            claim.request,
            lambda record, wall: lifecycle.hand_back(
                record.context, claim, worker, wall, record.running, failed.timings
            ),
        )
        if not await self.is_leased_to(worker, claim) or (is_blameless and not await self.queue.hand_back(claim)):
            raise LeaseLost(f"stage {claim.stage} of {claim.request} is not leased to {worker}")
        if not is_blameless and await self.queue.refuse(claim) >= lifecycle.MAX_HAND_BACK_WORKERS:
            await self._apply(
                claim.request,
                lambda record, wall: lifecycle.dead_letter_handed_back(
                    record.context, claim.stage, failed.message, wall, record.running
                ),
            )
        return await self.queue.load(claim.request)

    async def is_leased_to(self, worker: str, claim: Claim) -> bool:
        """Return whether the task is leased to this worker. Commits check the lease token."""
        try:
            return lifecycle.is_held_by(worker, claim, (await self.queue.load(claim.request)).running)
        except (NotFound, RecordDamaged):
            return False

    def eta(self, record: RequestRecord) -> float | None:
        """Return the predicted seconds until a request ends.

        None if it has ended, or if a stage of it was never measured.
        """
        _, wait_s = self.awaited_condition(record)
        compute_s = self._costs.eta(record)
        return compute_s if wait_s is None else wait_s + (compute_s or record.context.cost)

    def awaited_condition(self, record: RequestRecord) -> tuple[WaitReason, float | None]:
        """Return what a request waits for before it runs, and for how many predicted seconds.

        It waits for a cold start ("cold_start") or a model swap ("loading"). The seconds are None if it waits for
        neither; the reason then has no meaning.
        """
        context = record.context
        waking_s = cold_starts.seconds_until_started(context, self._costs.cold_starts, self.clock.wall())
        if waking_s is not None or context.is_over or record.running:
            return "cold_start", waking_s
        pools = {stage.pool for stage in context.plan.stages if context.stages[stage.name].status != "done"}
        loading_s = (seconds for pool in pools if (seconds := self.model_swaps.until_loaded(pool)) is not None)
        return "loading", max(loading_s, default=None)

    async def releasable(self, names: Sequence[str]) -> list[str]:
        """Return the requests among `names` that have ended, and the cached objects that were evicted.

        Objects of these names may be freed. Names of cached objects are those of `task.cache_owner_name`.
        """
        cached = [name for name in names if name.startswith(CACHED)]
        requests = [name for name in names if not name.startswith(CACHED)]
        return await self.queue.ended_among(requests) + await self._cache.evicted(cached)


def _may_cache(stage: PlannedStage, prefix: CachePrefix) -> bool:
    """Return whether a stage may add this prefix to the cache.

    It may add the prefixes of its plan. It may also add a block whose key is that of its digest under the
    stage's `extends_prefix_of`.
    """
    is_extension = bool(stage.extends_prefix_of and prefix.digest) and prefix.key == prefix_key(
        stage.extends_prefix_of, prefix.digest
    )
    return is_extension or prefix.key in stage.prefixes
