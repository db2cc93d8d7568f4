"""What a new request needs before it is queued: its place in line, and arenas that can hold its outputs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Literal

from unfuse.core.errors import InvalidParameter
from unfuse.core.messages import WorkerInfo
from unfuse.core.plan import ExecutionPlan, PlannedStage, declared
from unfuse.core.request import RequestContext
from unfuse.queues.base import QueueBackend, RegisteredWorker, RequestFilter

Order = Literal["fifo", "edf", "shortest", "fair"]  # by arrival, by deadline, short ones first, every tenant its share

NO_HURRY_S = 86_400.0
"""Under edf a request without a deadline is due this long after it came, the longest that any can ask for: it goes
behind those in a hurry, but not behind all that ever will be."""

PATIENCE = 10.0
"""Under shortest, a second of predicted work is as much as this many seconds of having come later: a request of ten
seconds lets shorter ones pass for 100 seconds, no longer."""


async def place(order: Order, queue: QueueBackend, context: RequestContext) -> float:
    """Where a new request of known cost stands; lower goes first.

    For fair it is when the request would end if its tenant had a machine of its own: it begins behind the newest one of
    that tenant in the queue, or else as the next one in line does, or now (start-time fair queueing, Goyal 1996).
    """
    if order == "fifo":
        return 0.0
    if order == "edf" and context.deadline is not None:
        return context.deadline
    now = await queue.now()
    if order == "edf":
        return now + NO_HURRY_S
    if order == "shortest":
        return now + PATIENCE * context.cost
    newest = await queue.list(RequestFilter(over=False, tenant=context.caller.tenant), limit=1)
    entries = {stage.pool for stage in context.plan.stages if not stage.after}
    line = [task.order for pool in entries for task in await queue.peek(pool, 1)]
    return max([min(line, default=now), *(record.context.order for record in newest)]) + context.cost


BLOCK = 4096  # arenas are cut in pages

MIB = 1 << 20


class PoolArenas:
    """The arenas of a pool's live workers; while it has none, those of the workers that are `expected`.

    Where a store `spills`, what does not fit together goes elsewhere, and only what is alone too large does not fit.
    """

    def __init__(self, expected: Sequence[WorkerInfo] = (), spills: bool = False) -> None:
        self.expected, self._spills = expected, spills

    async def require_room(
        self,
        plan: ExecutionPlan,
        made: Collection[str],
        known: Iterable[WorkerInfo],
        look: Callable[[], Awaitable[Sequence[RegisteredWorker]]],
    ) -> None:
        """Raise InvalidParameter for a plan whose outputs can never be there together; those of `made` stages are.

        Workers that are `known` are enough to say yes; before it says no, it has a `look` at who is there now. What
        nobody knows, of pools without workers or of outputs that declare nothing, is no reason.
        """
        try:
            self._require(plan, made, known)
        except InvalidParameter:
            self._require(plan, made, [member.info for member in await look()])

    def _require_resources(self, stages: Iterable[PlannedStage], live: Sequence[WorkerInfo]) -> None:
        """Each task's needs are there in one worker, of those that say how much they have."""
        for stage in stages:
            serving = self._serving(stage.pool, live)
            for name, need in stage.needs.items():
                most = max((worker.resources[name] for worker in serving if name in worker.resources), default=need)
                if need > most:
                    raise InvalidParameter(
                        f"stage {stage.name} needs {need} of the resource {name}, and a worker has {most}: "
                        f"ask for less, or have the workers started with --resources {name}={need} or more"
                    )

    def _require(self, plan: ExecutionPlan, made: Collection[str], live: Iterable[WorkerInfo]) -> None:
        workers, outputs = list(live), [stage for stage in plan.stages if stage.room and stage.name not in made]
        self._require_resources([stage for stage in plan.stages if stage.name not in made], workers)
        serving = {stage.pool: self._serving(stage.pool, workers) for stage in outputs}
        bounded = [stage for stage in outputs if _bounded(serving[stage.pool])]
        for stage in bounded:
            most = max(worker.room for worker in serving[stage.pool])
            if stage.room > most:
                raise _too_large(f"what stage {stage.name} makes takes", stage.room, "an arena holds", most, stage.room)
        if not self._spills:
            for stages in _together(bounded, serving):
                _require_sum(stages, serving)

    def _serving(self, pool: str, live: Iterable[WorkerInfo]) -> list[WorkerInfo]:
        found = [worker for worker in live if pool in worker.pools]
        return found or [worker for worker in self.expected if declared(pool) in worker.pools]


def _bounded(workers: Sequence[WorkerInfo]) -> bool:
    """Whether all there is to put something into are arenas."""
    return bool(workers) and all(worker.room for worker in workers)


def _together(outputs: Sequence[PlannedStage], serving: dict[str, list[WorkerInfo]]) -> list[list[PlannedStage]]:
    """The outputs by what shares arenas, directly or by way of others."""
    groups: list[tuple[set[str], list[PlannedStage]]] = []
    for stage in outputs:
        ids, stages = {worker.id for worker in serving[stage.pool]}, [stage]
        for group in [group for group in groups if group[0] & ids]:
            groups.remove(group)
            ids, stages = ids | group[0], group[1] + stages
        groups.append((ids, stages))
    return [stages for _, stages in groups]


def _require_sum(stages: Sequence[PlannedStage], serving: dict[str, list[WorkerInfo]]) -> None:
    """Outputs that share arenas fit all of these together; those of one pool fit them whole, one by one."""
    arenas = {worker.id: worker.room for stage in stages for worker in serving[stage.pool]}
    needed, there = sum(-(-stage.room // BLOCK) * BLOCK for stage in stages), sum(arenas.values())
    if needed > there:
        raise _too_large("its outputs together take", needed, "the arenas hold", there, -(-needed // len(arenas)))
    for pool in {stage.pool for stage in stages}:
        output_sizes = [stage.room for stage in stages if stage.pool == pool]
        least, count = min(output_sizes), len(output_sizes)
        if least * count > sum(worker.room // least * least for worker in serving[pool]):
            fit = -(-count // len(serving[pool])) * least
            raise _too_large(f"its {count} outputs of stage kind {pool.partition(':')[0]} take",
                             least * count, "whole ones in the arenas", there, fit)  # fmt: skip


def _too_large(what: str, needed: int, where: str, there: int, arena: int) -> InvalidParameter:
    return InvalidParameter(
        f"{what} {needed} bytes, and {where} {there}: ask for fewer pixels, frames or pictures, "
        f"or have the workers started with --arena {-(-arena // MIB)}MiB or more"
    )
