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

#: Bytes of an arena's page. Every object starts on a page boundary.
BLOCK = 4096

MIB = 1 << 20


async def compute_order(order: Order, queue: QueueBackend, context: RequestContext) -> float:
    """Return the order of a new request; requests with a lower one are served first.

    `context.cost` must be set. Under "fair", the order is the time at which the request would end if its tenant had a
    machine of its own (start-time fair queueing, Goyal 1996). On that machine, the request starts after the tenant's
    newest active request. It does not start before the first waiting task, or before now if no task waits.
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
    entry_pools = {stage.pool for stage in context.plan.stages if not stage.after}
    first_orders = [task.order for pool in entry_pools for task in await queue.peek(pool, 1)]
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
        completed: Collection[str],
        workers: Iterable[WorkerInfo],
        read_workers: Callable[[], Awaitable[Sequence[RegisteredWorker]]],
    ) -> None:
        """Raise InvalidParameter for a plan whose outputs can never fit into the arenas together.

        Pools without known workers and outputs without a declared size are not checked.

        completed: names of the stages whose output exists already.
        workers: workers as of the last read of the registry. If they have room, `read_workers` is not called.
        read_workers: reads the live workers again, before a plan is refused.
        """
        try:
            self._require_capacity(plan, completed, workers)
        except InvalidParameter:
            # A worker with more room may have registered since the last read.
            self._require_capacity(plan, completed, [member.info for member in await read_workers()])

    def _require_resources(self, stages: Iterable[PlannedStage], live_workers: Sequence[WorkerInfo]) -> None:
        """Raise InvalidParameter for a task that needs more of a resource than any worker has.

        Workers that do not report the resource do not count.
        """
        for stage in stages:
            serving = self._serving(stage.pool, live_workers)
            for name, needed in stage.needs.items():
                limit = max((worker.resources[name] for worker in serving if name in worker.resources), default=needed)
                if needed > limit:
                    raise InvalidParameter(
                        f"stage {stage.name} needs {needed} of the resource {name}, but workers have at most {limit}: "
                        f"request less, or start the workers with --resources {name}={needed} or more"
                    )

    def _require_capacity(
        self, plan: ExecutionPlan, completed: Collection[str], live_workers: Iterable[WorkerInfo]
    ) -> None:
        """Raise InvalidParameter if these workers lack resources or room for the remaining stages."""
        workers = list(live_workers)
        stages_to_run = [stage for stage in plan.stages if stage.name not in completed]
        outputs = [stage for stage in stages_to_run if stage.output_size]
        self._require_resources(stages_to_run, workers)

        serving = {stage.pool: self._serving(stage.pool, workers) for stage in outputs}
        bounded = [stage for stage in outputs if _are_bounded(serving[stage.pool])]
        for stage in bounded:
            max_arena_bytes = max(worker.arena_bytes for worker in serving[stage.pool])
            if stage.output_size > max_arena_bytes:
                subject = f"the output of stage {stage.name} needs"
                raise _too_large(subject, stage.output_size, "an arena has at most", max_arena_bytes, stage.output_size)

        if not self._spills:
            for stages in _group_by_arenas(bounded, serving):
                _require_sum(stages, serving)

    def _serving(self, pool: str, live_workers: Iterable[WorkerInfo]) -> list[WorkerInfo]:
        """Return the live workers of a pool, or the expected ones if none is live."""
        serving = [worker for worker in live_workers if pool in worker.pools]
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
        arena_bytes = -(-needed // len(arenas))
        raise _too_large("the outputs of the request need", needed, "the arenas together have", available, arena_bytes)

    for pool in {stage.pool for stage in stages}:
        output_sizes = [stage.output_size for stage in stages if stage.pool == pool]
        # Only as many bytes are required as if all outputs had the smallest size: a plan that could fit is not refused.
        smallest = min(output_sizes)
        count = len(output_sizes)
        if smallest * count > sum(worker.arena_bytes // smallest * smallest for worker in serving[pool]):
            arena_bytes = -(-count // len(serving[pool])) * smallest
            subject = f"the {count} outputs of stage kind {pool.partition(':')[0]} need"
            limit = "none can be split over the arenas, which together have"
            raise _too_large(subject, smallest * count, limit, available, arena_bytes)


def _too_large(subject: str, needed: int, limit: str, available: int, arena_bytes: int) -> InvalidParameter:
    """Return the error for outputs of `needed` bytes that would need arenas of `arena_bytes` bytes.

    subject, limit: the words of the message before `needed` and before `available`.
    """
    return InvalidParameter(
        f"{subject} {needed} bytes, but {limit} {available}: request fewer pixels, frames or pictures, "
        f"or start the workers with --arena {-(-arena_bytes // MIB)}MiB or more"
    )
