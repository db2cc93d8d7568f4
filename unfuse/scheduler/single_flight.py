"""Equal encodes at one time are one: a request that needs what another one's encoder is about to make waits for it.

Who waits says so in its own context, and nothing else does. So whoever decides next, in whichever process, finds it
there; and a request that waits in vain is queued by the next look through the queue, at the latest.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from unfuse.core.errors import Damaged, NotFound
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import ExecutionPlan, PlannedStage
from unfuse.core.request import RequestContext, StageState
from unfuse.core.supervisor import Supervisor
from unfuse.queues.base import MAX_CACHED, RequestStore
from unfuse.scheduler import lifecycle
from unfuse.scheduler.encoder_cache import EncoderCache
from unfuse.scheduler.transitions import Transitions


class SingleFlight:
    """Finds who encodes the same already, among the last MAX_CACHED encodes that this scheduler has queued."""

    def __init__(self, transitions: Transitions, cache: EncoderCache, background: Supervisor) -> None:
        self._requests: RequestStore = transitions.queue
        self._apply, self._cache, self._background = transitions.apply, cache, background
        self._leaders: dict[str, str] = {}

    async def leaders(self, context: RequestContext, hits: Mapping[str, ObjectRef]) -> dict[str, str]:
        """The requests that encode the same and are not behind this new one, by the stage that would wait for them.

        Stages with `hits` need none. Some have just made it, and it is not in the cache yet.
        """
        found: dict[str, str] = {}
        for stage in context.plan.stages:
            leader = self._leaders.get(stage.cache) if stage.cache and stage.name not in hits else None
            first, state = await self._state(stage.cache, leader) if leader else (None, StageState())
            if leader and first and not _is_ahead(context, first) and (_is_under_way(state) or state.output):
                found[stage.name] = leader
        return found

    def submitted(self, context: RequestContext) -> None:
        """A request was accepted: who needs what it encodes may wait for it, as it waits for others."""
        for stage in context.plan.stages:
            if leader := context.stages[stage.name].follows:
                follow = partial(self._follow, context.id, stage, leader)
                self._background.once("waiting for what another request encodes", follow)
            else:
                self._lead(context, stage)

    async def review(self, context: RequestContext) -> None:
        """Go on with each stage that waits for a request which makes no more of it."""
        for stage in context.plan.stages:
            leader = context.stages[stage.name].follows
            if leader and not context.over and not await self._is_leading(stage.cache, leader):
                await self._go_on(context.id, stage, leader)

    def _lead(self, context: RequestContext, stage: PlannedStage) -> None:
        if stage.cache and context.stages[stage.name].status == "queued":
            self._leaders.pop(stage.cache, None)
            self._leaders[stage.cache] = context.id
            if len(self._leaders) > MAX_CACHED:
                del self._leaders[next(iter(self._leaders))]

    async def _follow(self, request: str, stage: PlannedStage, leader: str) -> None:
        with suppress(NotFound):
            async for event in self._requests.watch(leader):
                if event.type in ("stage_completed", "retrying") and not await self._is_leading(stage.cache, leader):
                    break
        await self._go_on(request, stage, leader)

    async def _go_on(self, request: str, stage: PlannedStage, leader: str) -> None:
        """Give a stage what its leader has made, if that is still there; else have it run."""
        hits, _ = await self._cache.find(ExecutionPlan((stage,)))
        output = hits.get(stage.name) or (await self._state(stage.cache, leader))[1].output
        with suppress(NotFound):
            record, _ = await self._apply(
                request, lambda record, wall: lifecycle.followed(record.context, stage.name, output, wall)
            )
            self._lead(record.context, stage)

    async def _is_leading(self, key: str, request: str) -> bool:
        """Whether a request encodes, for the first time, what is kept under this key."""
        return _is_under_way((await self._state(key, request))[1])

    async def _state(self, key: str, request: str) -> tuple[RequestContext | None, StageState]:
        """The request, and the state of its stage that makes what is kept under this key; None where there is none."""
        with suppress(NotFound, Damaged):
            context = (await self._requests.load(request)).context
            for stage in context.plan.stages:
                if stage.cache == key:
                    return context, context.stages[stage.name]
        return None, StageState()


def _is_under_way(state: StageState) -> bool:
    return state.status == "queued" and not (state.failures or state.crashes or state.recomputes)


def _is_ahead(context: RequestContext, leader: RequestContext) -> bool:
    """Whether a request goes before one that came earlier."""
    return (-context.delivery.priority, context.order) < (-leader.delivery.priority, leader.order)
