"""Cold starts: how requests wait for pools that are scaled to zero."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from unfuse.core.plan import declared_pool
from unfuse.core.request import (
    ColdStart,
    RequestContext,
    StageState,
)

DEFAULT_COLD_START_S = 300.0  # predicted seconds of a pool's first cold start: the chart's `coldStartSeconds`


def record_cold_starts(
    context: RequestContext, asleep: Collection[str], wall: float, limit_s: float = 0.0
) -> RequestContext:
    """Return the request with its stages' cold starts recorded, or itself if nothing changed.

    The deadline moves by the longest cold start that has ended, up to `limit_s`; with an order by deadline, the order
    moves too. A stage that waits for a second cold start moves them only by the seconds beyond the first one.

    asleep: declared pools that are scaled to zero.
    """
    changed: dict[str, StageState] = {}
    for stage in () if context.is_over else context.plan.stages:
        state = context.stages[stage.name]
        sleeps = state.status != "done" and declared_pool(stage.pool) in asleep
        if sleeps != state.waits_for_cold_start:
            changed[stage.name] = replace(state, cold_start=(wall, 0.0) if sleeps else (state.cold_start[0], wall))
    if not changed:
        return context
    stages = context.stages | changed
    waits_s = (state.cold_start[1] - state.cold_start[0] for state in stages.values() if state.cold_start[1])
    more_s = max(0.0, min(limit_s, max(waits_s, default=0.0)) - context.deadline_extension_s)
    order = context.order + more_s if context.order == context.deadline else context.order
    deadline = context.deadline and context.deadline + more_s
    return replace(
        context,
        stages=stages,
        deadline=deadline,
        order=order,
        deadline_extension_s=context.deadline_extension_s + more_s,
    )


def latest_end(context: RequestContext, limit_s: float) -> float | None:
    """Return the deadline (queue clock), plus the rest of `limit_s` during a cold start."""
    waits = any(state.waits_for_cold_start for state in context.stages.values())
    return context.deadline and context.deadline + (max(0.0, limit_s - context.deadline_extension_s) if waits else 0.0)


def seconds_until_started(context: RequestContext, took: Mapping[str, ColdStart], wall: float) -> float | None:
    """Return the predicted seconds until the request's last cold start ends, or None.

    None if it waits for no cold start. took: the last cold start of each declared pool.
    """
    remaining_s: list[float] = []
    for stage in () if context.is_over else context.plan.stages:
        if (state := context.stages[stage.name]).waits_for_cold_start:
            started, ended = took.get(declared_pool(stage.pool), (0.0, DEFAULT_COLD_START_S))
            remaining_s.append(max(0.0, state.cold_start[0] + ended - started - wall))
    return max(remaining_s, default=None)
