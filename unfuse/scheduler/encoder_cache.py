"""The encoder cache and prefix cache: reuses encoder outputs and prompt prefixes of other requests.

Cached objects stay in the tensor store of the worker that made them. The store retains each under an owner name of its
own (`cache_owner_name`). The index is in the queue, so that all schedulers share it. A cached object that is lost is
computed again, like any lost object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile

from unfuse.core.errors import NotFound, RecordDamaged, TransientError
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import ExecutionPlan, PlannedStage
from unfuse.core.request import RequestContext, StageState
from unfuse.core.supervisor import Supervisor
from unfuse.core.task import CACHED, cache_owner_name
from unfuse.queues.base import MAX_CACHED
from unfuse.scheduler import lifecycle
from unfuse.scheduler.transitions import Transitions


class EncoderCache:
    """A cache of encoder outputs, which also merges equal encodes.

    It has at most `capacity` bytes; 0 disables it.

    If several requests need the same encode at one time, one of them, the leader, runs it and the others wait. The
    wait is recorded in the waiting request's context only, where every scheduler reads it. If the leader fails, the
    waiting stage is queued at the next review of the queue at the latest. Each scheduler knows the leaders of the last
    MAX_CACHED encodes that it queued.
    """

    def __init__(self, transitions: Transitions, capacity: int, background: Supervisor) -> None:
        self._queue = transitions.queue
        self._apply = transitions.apply
        self._workers = transitions.registry.workers
        self._capacity = capacity
        self._background = background
        #: By cache key, the request whose stage encodes it.
        self._leaders: dict[str, str] = {}

    def shared_by(self, tenant: str, use_cache: bool) -> tuple[str, ...] | None:
        """Return the scope in which a tenant's outputs are shared, or None.

        None if they are not shared: without `use_cache`, or if the cache is disabled. The scope is part of cache keys.
        """
        return (tenant,) if use_cache and self._capacity else None

    async def find(self, plan: ExecutionPlan) -> tuple[dict[str, ObjectRef], int]:
        """Return the cached outputs of a plan, by stage, and the number of misses.

        Entries of workers that are not live are evicted.
        """
        keys = {stage.name: stage.cache_key for stage in plan.stages if stage.cache_key and self._capacity}
        cached = await self._queue.find_encoding(list(keys.values())) if keys else {}
        live = {member.info.id for member in await self._workers()} if cached else set()
        for key, ref in cached.items():
            if ref.owner not in live:
                with suppress(TransientError):
                    await self._queue.remove_encoding(key, ref.id)
        hits = {name: cached[key] for name, key in keys.items() if key in cached and cached[key].owner in live}
        return hits, len(keys) - len(hits)

    async def prefix(self, keys: Sequence[str]) -> tuple[ObjectRef, ...]:
        """Return the cached prefix blocks of these keys, up to the first missing one."""
        # In reverse, so that the last blocks of a prefix count as the least recently used ones.
        cached = await self._queue.find_encoding(keys[::-1]) if self._capacity else {}
        live = {member.info.id for member in await self._workers()} if cached else set()
        refs = [cached.get(key) for key in keys]
        return tuple(ref for ref in takewhile(lambda ref: ref is not None and ref.owner in live, refs) if ref)

    async def add(self, key: str, output: ObjectRef) -> None:
        """Add a stage's output to the cache, if the stage has a key.

        Nothing is cached while the queue is unreachable.
        """
        if key and self._capacity:
            with suppress(TransientError):
                await self._queue.put_encoding(key, output, self._capacity)

    async def evict_lost(self, plan: ExecutionPlan, reader: str, id: str) -> None:
        """Evict an object that the stage `reader` could not read, if it is cached.

        id: the object's id.
        """
        with suppress(TransientError):
            for name in plan.stage(reader).after:
                if key := plan.stage(name).cache_key:
                    await self._queue.remove_encoding(key, id)

    async def evicted(self, names: Sequence[str]) -> list[str]:
        """Return those of these names whose objects were evicted.

        For the names, see `cache_owner_name`. Empty while the queue is unreachable.
        """
        # Without `use`: these lookups are not uses, and must not count for the least recently used entries.
        keys = [name.removeprefix(CACHED).partition(":")[0] for name in names]
        try:
            cached = await self._queue.find_encoding(keys, use=False) if keys else {}
        except TransientError:
            return []
        cached_names = {cache_owner_name(key, ref.id) for key, ref in cached.items()}
        return [name for name in names if name not in cached_names]

    async def leaders(self, context: RequestContext, hits: Mapping[str, ObjectRef]) -> dict[str, str]:
        """Return by stage the leaders that a new request can wait for.

        A leader encodes the same and is not behind the request in the queue. A leader that has just completed the
        encode is included, since its output may not be cached yet.

        hits: cached outputs by stage. These stages need no leader.
        """
        leaders: dict[str, str] = {}
        for stage in context.plan.stages:
            leader = self._leaders.get(stage.cache_key) if stage.cache_key and stage.name not in hits else None
            leader_context, state = await self._load_state(stage.cache_key, leader) if leader else (None, StageState())
            if (
                leader
                and leader_context
                and not _is_ahead(context, leader_context)
                and (_is_first_try(state) or _shared_output(state))
            ):
                leaders[stage.name] = leader
        return leaders

    def on_submitted(self, context: RequestContext) -> None:
        """Register the encodes of an accepted request, and watch the leaders of its waiting stages."""
        for stage in context.plan.stages:
            if leader := context.stages[stage.name].shares_with_request:
                follow = partial(self._follow, context.id, stage, leader)
                self._background.start("waiting for the encode of another request", follow)
            else:
                self._register_leader(context, stage)

    async def review(self, context: RequestContext) -> None:
        """Continue the stages of a request that wait for a leader which no longer encodes."""
        for stage in context.plan.stages:
            leader = context.stages[stage.name].shares_with_request
            if leader and not context.is_over and not await self._is_leading(stage.cache_key, leader):
                await self._end_wait(context.id, stage, leader)

    def _register_leader(self, context: RequestContext, stage: PlannedStage) -> None:
        """Register a request as the leader of a queued stage with a cache key."""
        if stage.cache_key and context.stages[stage.name].status == "queued":
            self._leaders.pop(stage.cache_key, None)
            self._leaders[stage.cache_key] = context.id
            if len(self._leaders) > MAX_CACHED:
                del self._leaders[next(iter(self._leaders))]

    async def _follow(self, request: str, stage: PlannedStage, leader: str) -> None:
        """Wait until the leader no longer encodes, then end the stage's wait.

        The leader completes the encode, retries it or ends.
        """
        with suppress(NotFound):
            async for event in self._queue.watch(leader):
                if event.type in ("stage_completed", "retrying") and not await self._is_leading(
                    stage.cache_key, leader
                ):
                    break
        await self._end_wait(request, stage, leader)

    async def _end_wait(self, request: str, stage: PlannedStage, leader: str) -> None:
        """Complete a waiting stage with its leader's output, or queue it if there is none."""
        hits, _ = await self.find(ExecutionPlan((stage,)))
        # An output that is not cached yet, or no longer, is still in the leader's record.
        output = hits.get(stage.name) or _shared_output((await self._load_state(stage.cache_key, leader))[1])
        with suppress(NotFound):
            record, _ = await self._apply(
                request, lambda record, wall: lifecycle.share_encoding(record.context, stage.name, output, wall)
            )
            self._register_leader(record.context, stage)

    async def _is_leading(self, key: str, request: str) -> bool:
        """Return whether a request's encode of this key is queued or running, and never failed."""
        _, state = await self._load_state(key, request)
        return _is_first_try(state)

    async def _load_state(self, key: str, request: str) -> tuple[RequestContext | None, StageState]:
        """Return a request and the state of its stage with this cache key.

        None and an empty state if the request is unknown or damaged, or no stage of it has the key.
        """
        with suppress(NotFound, RecordDamaged):
            context = (await self._queue.load(request)).context
            for stage in context.plan.stages:
                if stage.cache_key == key:
                    return context, context.stages[stage.name]
        return None, StageState()


def _is_first_try(state: StageState) -> bool:
    """Return whether a stage is queued or runs, and has not failed before."""
    return state.status == "queued" and not (state.failures or state.crashes or state.recomputes)


def _shared_output(state: StageState) -> ObjectRef | None:
    """Return the output of a leader's stage.

    None if there is none, or if tiles have changed its bytes.
    """
    return None if state.vae else state.output


def _is_ahead(context: RequestContext, leader: RequestContext) -> bool:
    """Return whether a new request is ordered before its possible leader."""
    return (-context.delivery.priority, context.order) < (-leader.delivery.priority, leader.order)
