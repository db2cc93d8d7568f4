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
    context: RequestContext, scaled_to_zero: Collection[str], wall: float, limit_s: float = 0.0
) -> RequestContext:
    """Return the request with its stages' cold starts recorded, or itself if nothing changed.

    The deadline moves by the longest cold start that has ended, up to `limit_s`. If requests are ordered by deadline,
    the order moves too. A second cold start moves them only by its seconds beyond the first one.

    scaled_to_zero: declared pools that are scaled to zero.
    """
    changed_states: dict[str, StageState] = {}
    for stage in () if context.is_over else context.plan.stages:
        state = context.stages[stage.name]
        is_waiting = state.status != "done" and declared_pool(stage.pool) in scaled_to_zero
        if is_waiting != state.waits_for_cold_start:
            changed_states[stage.name] = replace(
                state, cold_start=(wall, 0.0) if is_waiting else (state.cold_start[0], wall)
            )
    if not changed_states:
        return context

    # The longest wait counts, not the sum: an autoscaler starts all pools of a request in parallel.
    stages = context.stages | changed_states
    waits_s = (state.cold_start[1] - state.cold_start[0] for state in stages.values() if state.cold_start[1])
    extension_s = max(0.0, min(limit_s, max(waits_s, default=0.0)) - context.deadline_extension_s)
    order = context.order + extension_s if context.order == context.deadline else context.order
    deadline = context.deadline and context.deadline + extension_s
    return replace(
        context,
        stages=stages,
        deadline=deadline,
        order=order,
        deadline_extension_s=context.deadline_extension_s + extension_s,
    )


def latest_end(context: RequestContext, limit_s: float) -> float | None:
    """Return the latest time at which a request expires, in seconds of the queue's clock.

    It is the deadline, plus the unused part of `limit_s` during a cold start. None for a request without a deadline.
    """
    is_waiting = any(state.waits_for_cold_start for state in context.stages.values())
    return context.deadline and context.deadline + (
        max(0.0, limit_s - context.deadline_extension_s) if is_waiting else 0.0
    )


def seconds_until_started(
    context: RequestContext, last_cold_starts: Mapping[str, ColdStart], wall: float
) -> float | None:
    """Return the predicted seconds until the request's last cold start ends, or None.

    None if it waits for no cold start.

    last_cold_starts: by declared pool, its last cold start.
    """
    remaining_s: list[float] = []
    for stage in () if context.is_over else context.plan.stages:
        if (state := context.stages[stage.name]).waits_for_cold_start:
            started, ended = last_cold_starts.get(declared_pool(stage.pool), (0.0, DEFAULT_COLD_START_S))
            remaining_s.append(max(0.0, state.cold_start[0] + ended - started - wall))
    return max(remaining_s, default=None)
