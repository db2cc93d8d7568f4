"""Admission control of new requests: their order in the queue, and room for their outputs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Literal

from unfuse.core.errors import InvalidParameter
from unfuse.core.messages import WorkerInfo
from unfuse.core.plan import ExecutionPlan, PlannedStage, declared_pool
from unfuse.core.request import RequestContext
from unfuse.queues.base import QueueBackend, RegisteredWorker, RequestFilter

#: The order of requests of equal priority: by arrival ("fifo"), earliest deadline first ("edf"), lowest cost first
#: ("shortest"), or an equal share for each tenant ("fair").
Order = Literal["fifo", "edf", "shortest", "fair"]

#: Seconds after its arrival that a request without a deadline counts as due under "edf". It is the longest deadline
#: that a client can ask for, so that requests without a deadline come late, but do not starve.
NO_HURRY_S = 86_400.0

#: Seconds of arrival time that one second of predicted cost counts for under "shortest". Shorter requests can overtake
#: one of ten seconds for 100 seconds, no longer.
PATIENCE = 10.0

#: Bytes of an arena's page. Objects start at pages.
BLOCK = 4096

MIB = 1 << 20


async def compute_order(order: Order, queue: QueueBackend, context: RequestContext) -> float:
    """Return the order of a new request; requests with a lower one are served first.

    `context.cost` must be set. Under "fair", the order is when the request would end if its tenant had its own machine
    (start-time fair queueing, Goyal 1996). There it starts after the tenant's newest active request, and not before the
    first task in line; if no task waits, not before now.
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
    newest = await queue.list(RequestFilter(is_over=False, tenant=context.caller.tenant), limit=1)
    entries = {stage.pool for stage in context.plan.stages if not stage.after}
    first_orders = [task.order for pool in entries for task in await queue.peek(pool, 1)]
    return max([min(first_orders, default=now), *(record.context.order for record in newest)]) + context.cost


class PoolArenas:
    """Checks that the arenas of workers have room for the outputs of a request.

    expected: workers whose arenas count for pools without live workers.
    spills: whether the tensor store spills. Then outputs that are too large together are accepted, and only an output
        that is too large alone is refused.
    """

    def __init__(self, expected: Sequence[WorkerInfo] = (), spills: bool = False) -> None:
        self.expected = expected
        self._spills = spills

    async def require_room(
        self,
        plan: ExecutionPlan,
        made: Collection[str],
        known: Iterable[WorkerInfo],
        look: Callable[[], Awaitable[Sequence[RegisteredWorker]]],
    ) -> None:
        """Raise InvalidParameter for a plan whose outputs can never fit into the arenas together.

        Pools without known workers and outputs without a declared size are not checked.

        made: stages whose output exists already.
        known: workers as of the last read of the registry. If they have room, `look` is not called.
        look: reads the live workers again, before a plan is refused.
        """
        try:
            self._require(plan, made, known)
        except InvalidParameter:
            self._require(plan, made, [member.info for member in await look()])

    def _require_resources(self, stages: Iterable[PlannedStage], live: Sequence[WorkerInfo]) -> None:
        """Raise InvalidParameter for a task that needs more of a resource than any worker has.

        Workers that do not report the resource do not count.
        """
        for stage in stages:
            serving = self._serving(stage.pool, live)
            for name, need in stage.needs.items():
                most = max((worker.resources[name] for worker in serving if name in worker.resources), default=need)
                if need > most:
                    raise InvalidParameter(
                        f"stage {stage.name} needs {need} of the resource {name}, but workers have at most {most}: "
                        f"request less, or start the workers with --resources {name}={need} or more"
                    )

    def _require(self, plan: ExecutionPlan, done: Collection[str], live: Iterable[WorkerInfo]) -> None:
        """Raise InvalidParameter if these workers lack resources or room for the remaining stages."""
        live_workers = list(live)
        stages_to_run = [stage for stage in plan.stages if stage.name not in done]
        outputs = [stage for stage in stages_to_run if stage.output_size]
        self._require_resources(stages_to_run, live_workers)

        serving = {stage.pool: self._serving(stage.pool, live_workers) for stage in outputs}
        bounded = [stage for stage in outputs if _are_bounded(serving[stage.pool])]
        for stage in bounded:
            most = max(worker.arena_bytes for worker in serving[stage.pool])
            if stage.output_size > most:
                what = f"the output of stage {stage.name} needs"
                raise _too_large(what, stage.output_size, "an arena has at most", most, stage.output_size)
        if not self._spills:
            for stages in _group_by_arenas(bounded, serving):
                _require_sum(stages, serving)

    def _serving(self, pool: str, live: Iterable[WorkerInfo]) -> list[WorkerInfo]:
        """Return the live workers of a pool, or the expected ones if none is live."""
        serving = [worker for worker in live if pool in worker.pools]
        return serving or [worker for worker in self.expected if declared_pool(pool) in worker.pools]


def _are_bounded(workers: Sequence[WorkerInfo]) -> bool:
    """Return whether there are workers, and all have arenas of a known size."""
    return bool(workers) and all(worker.arena_bytes for worker in workers)


def _group_by_arenas(outputs: Sequence[PlannedStage], serving: dict[str, list[WorkerInfo]]) -> list[list[PlannedStage]]:
    """Return the outputs in groups that share arenas, directly or through other outputs."""
    groups: list[tuple[set[str], list[PlannedStage]]] = []
    for stage in outputs:
        ids = {worker.id for worker in serving[stage.pool]}
        stages = [stage]
        for group in [group for group in groups if group[0] & ids]:
            groups.remove(group)
            ids, stages = ids | group[0], group[1] + stages
        groups.append((ids, stages))
    return [stages for _, stages in groups]


def _require_sum(stages: Sequence[PlannedStage], serving: dict[str, list[WorkerInfo]]) -> None:
    """Raise InvalidParameter if outputs that share arenas do not fit into these together.

    The outputs of one pool must fit without splitting one over two arenas.
    """
    arenas = {worker.id: worker.arena_bytes for stage in stages for worker in serving[stage.pool]}
    needed = sum(-(-stage.output_size // BLOCK) * BLOCK for stage in stages)  # each rounded up to pages
    available = sum(arenas.values())
    if needed > available:
        arena = -(-needed // len(arenas))
        raise _too_large("the outputs of the request need", needed, "the arenas together have", available, arena)

    for pool in {stage.pool for stage in stages}:
        output_sizes = [stage.output_size for stage in stages if stage.pool == pool]
        smallest = min(output_sizes)
        count = len(output_sizes)
        if smallest * count > sum(worker.arena_bytes // smallest * smallest for worker in serving[pool]):
            needed_arena = -(-count // len(serving[pool])) * smallest
            outputs = f"the {count} outputs of stage kind {pool.partition(':')[0]} need"
            split = "none can be split over the arenas, which together have"
            raise _too_large(outputs, smallest * count, split, available, needed_arena)


def _too_large(what: str, needed: int, where: str, available: int, arena: int) -> InvalidParameter:
    """Return the error for outputs of `needed` bytes that would need arenas of `arena` bytes."""
    return InvalidParameter(
        f"{what} {needed} bytes, but {where} {available}: request fewer pixels, frames or pictures, "
        f"or start the workers with --arena {-(-arena // MIB)}MiB or more"
    )
