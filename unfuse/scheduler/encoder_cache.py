"""The encoder cache: what one request has encoded serves others that ask for the same, or for the same beginning.

The objects stay where they were made, each held by its owner under a name of its own; the queue has the index, so that
all schedulers share it. What is found there may be lost all the same: it is then made again, as any lost object is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile

from unfuse.core.errors import Damaged, NotFound, TransientError
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import ExecutionPlan, PlannedStage
from unfuse.core.request import RequestContext, StageState
from unfuse.core.supervisor import Supervisor
from unfuse.core.task import CACHED, cached_as
from unfuse.queues.base import MAX_CACHED
from unfuse.scheduler import lifecycle
from unfuse.scheduler.transitions import Transitions


class EncoderCache:
    """Up to `room` bytes of encoder outputs, 0 for none at all; and who encodes what is about to be there.

    Equal encodes at one time are one. A request that needs what another one is about to encode waits for it, and says
    so in its own context alone: whoever decides next, in whichever process, finds it there. One that waits in vain is
    queued by the next look through the queue, at the latest. The last MAX_CACHED encodes queued here are known.
    """

    def __init__(self, transitions: Transitions, room: int, background: Supervisor) -> None:
        self._queue, self._apply, self._workers = transitions.queue, transitions.apply, transitions.registry.workers
        self._room, self._background = room, background
        self._leaders: dict[str, str] = {}

    def shared_by(self, tenant: str, wanted: bool) -> tuple[str, ...] | None:
        """Which requests share what they encode with one of this tenant; None if it shares nothing."""
        return (tenant,) if wanted and self._room else None

    async def find(self, plan: ExecutionPlan) -> tuple[dict[str, ObjectRef], int]:
        """The outputs, by stage, that are there for a request, and how many more it could have had."""
        keys = {stage.name: stage.cache for stage in plan.stages if stage.cache and self._room}
        found = await self._queue.cached(list(keys.values())) if keys else {}
        live = {member.info.id for member in await self._workers()} if found else set()
        for key, ref in found.items():
            if ref.owner not in live:
                with suppress(TransientError):
                    await self._queue.uncache(key, ref.id)
        hits = {name: found[key] for name, key in keys.items() if key in found and found[key].owner in live}
        return hits, len(keys) - len(hits)

    async def prefix(self, keys: Sequence[str]) -> tuple[ObjectRef, ...]:
        """What is there of these keys, from the first one on without a gap."""
        found = await self._queue.cached(keys[::-1]) if self._room else {}
        live = {member.info.id for member in await self._workers()} if found else set()
        refs = [found.get(key) for key in keys]
        return tuple(ref for ref in takewhile(lambda ref: ref is not None and ref.owner in live, refs) if ref)

    async def keep(self, key: str, output: ObjectRef) -> None:
        """Let others have what a stage made, if it has a key. That may fail: nothing but time is lost by it."""
        if key and self._room:
            with suppress(TransientError):
                await self._queue.cache(key, output, self._room)

    async def lost(self, plan: ExecutionPlan, reader: str, id: str) -> None:
        """A stage could not read the object of that id: if it is one that others would be given, they are not."""
        with suppress(TransientError):
            for name in plan.stage(reader).after:
                if key := plan.stage(name).cache:
                    await self._queue.uncache(key, id)

    async def over(self, names: Sequence[str]) -> list[str]:
        """Which of these names (see `cached_as`) are of objects that the index, if it answers, has no more."""
        keys = [name.removeprefix(CACHED).partition(":")[0] for name in names]
        try:
            found = await self._queue.cached(keys, use=False) if keys else {}
        except TransientError:
            return []
        kept = {cached_as(key, ref.id) for key, ref in found.items()}
        return [name for name in names if name not in kept]

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
            async for event in self._queue.watch(leader):
                if event.type in ("stage_completed", "retrying") and not await self._is_leading(stage.cache, leader):
                    break
        await self._go_on(request, stage, leader)

    async def _go_on(self, request: str, stage: PlannedStage, leader: str) -> None:
        """Give a stage what its leader has made, if that is still there; else have it run."""
        hits, _ = await self.find(ExecutionPlan((stage,)))
        output = hits.get(stage.name) or (await self._state(stage.cache, leader))[1].output
        with suppress(NotFound):
            record, _ = await self._apply(
                request, lambda record, wall: lifecycle.followed(record.context, stage.name, output, wall)
            )
            self._lead(record.context, stage)

    async def _is_leading(self, key: str, request: str) -> bool:
        """Whether a request is making the output for this cache key for the first time."""
        return _is_under_way((await self._state(key, request))[1])

    async def _state(self, key: str, request: str) -> tuple[RequestContext | None, StageState]:
        """The request, and the state of its stage whose output is cached under this key; None if it is gone."""
        with suppress(NotFound, Damaged):
            context = (await self._queue.load(request)).context
            for stage in context.plan.stages:
                if stage.cache == key:
                    return context, context.stages[stage.name]
        return None, StageState()


def _is_under_way(state: StageState) -> bool:
    return state.status == "queued" and not (state.failures or state.crashes or state.recomputes)


def _is_ahead(context: RequestContext, leader: RequestContext) -> bool:
    """Whether a request goes before one that came earlier."""
    return (-context.delivery.priority, context.order) < (-leader.delivery.priority, leader.order)
