"""Ends requests that exceed their deadline or their time limit.

The error names the stage that was not done. Parameters are those of `lifecycle`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from unfuse.core.plan import readable_pool
from unfuse.core.request import Change, ErrorInfo, RequestContext, RunningStage
from unfuse.scheduler.change_builder import ChangeBuilder
from unfuse.scheduler.cold_starts import latest_end


def expire_deadline(
    context: RequestContext,
    wall: float,
    queue_now: float = math.inf,
    cold_start_limit: float = 0.0,
    running: Sequence[RunningStage] = (),
) -> Change | None:
    """Expire a request at its deadline, or return None before its `latest_end`.

    The request must have a deadline.
    """
    if context.is_over or (latest_end(context, cold_start_limit) or queue_now) > queue_now:
        return None
    stage, state = _unfinished_stage(context, wall, running)
    pools = [
        readable_pool(planned.pool)
        for planned in context.plan.stages
        if context.stages[planned.name].waits_for_cold_start
    ]
    hint = f"; {pools[0]} was not ready within the {cold_start_limit:.0f} s of --cold-start-timeout" if pools else ""
    reason = f"the request did not complete before its deadline{state}"
    error = ErrorInfo("expired", f"{reason}: increase its timeout{hint}", stage)
    return ChangeBuilder(context, wall, running).end_request("expired", error)


def enforce_time_limit(context: RequestContext, wall: float, running: Sequence[RunningStage] = ()) -> Change | None:
    """Expire a request whose stages were leased for longer than its time limit.

    The longest chain of stages counts, so that parallel stages count once. The time in queues, gaps without a scheduler
    and clock changes are not counted: see `TaskQueue.sweep_expired`. None if the limit is not exceeded.
    """
    if context.is_over or context.request.time_limit_s is None:
        return None
    chain_s: dict[str, float] = {}  # by stage, the leased seconds of the longest chain that ends with it
    for stage in context.plan.stages:  # inputs come before their readers
        running_s = sum(run.ran_s for run in running if run.stage == stage.name)
        inputs_s = max((chain_s[name] for name in stage.after), default=0.0)
        chain_s[stage.name] = inputs_s + context.stages[stage.name].leased_s + running_s
    longest = max(chain_s, key=chain_s.__getitem__)  # a reader that has not run comes after its input
    if chain_s[longest] <= context.request.time_limit_s:
        return None
    reason = f"the stages of the request ran for more than its limit of {context.request.time_limit_s:.0f} s"
    error = ErrorInfo("expired", f"{reason}: request less, or increase the server's time limit", longest)
    return ChangeBuilder(context, wall, running).end_request("expired", error)


def _unfinished_stage(context: RequestContext, wall: float, running: Sequence[RunningStage]) -> tuple[str, str]:
    """Return a stage that waits for a worker, else one that runs, with its description."""
    leased = {run.stage for run in running}
    unfinished = [stage.name for stage in context.plan.stages if context.stages[stage.name].status != "done"]
    for name in unfinished:
        if name not in leased and context.stages[name].status == "queued":
            waited_s = max(0.0, wall - context.stages[name].queued_at)
            return name, f", and stage {name} has waited {waited_s:.0f} s for a worker"
    for name in unfinished:
        if name in leased:
            return name, f" while stage {name} ran"
    return next(iter(unfinished), ""), ""
