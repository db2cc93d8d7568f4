"""Requests that need pools which sleep: they wake them, wait for that, and are given the time that it takes.

`asleep` are declared pools that have no workers and may have none. Times are Unix seconds, deadlines the queue's time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from unfuse.core.plan import declared
from unfuse.core.request import RequestContext, StageState, Waking

USUAL_S = 300.0  # seconds that waking a pool is said to take before it was seen: the chart's `coldStartSeconds`


def waiting(context: RequestContext, asleep: Collection[str], wall: float, limit_s: float = 0.0) -> RequestContext:
    """The request with the stages that wait for a pool which sleeps marked so; itself if they are.

    Its deadline moves by the longest that a stage has waited for one that is awake now, up to the limit; so does its
    place in line, where that is its deadline. A stage that waits once more moves it by what is longer than before.
    """
    changed: dict[str, StageState] = {}
    for stage in () if context.over else context.plan.stages:
        state = context.stages[stage.name]
        sleeps = state.status != "done" and declared(stage.pool) in asleep
        if sleeps != state.sleeps:
            changed[stage.name] = replace(state, slept=(wall, 0.0) if sleeps else (state.slept[0], wall))
    if not changed:
        return context
    stages = context.stages | changed
    slept = (state.slept[1] - state.slept[0] for state in stages.values() if state.slept[1])
    more = max(0.0, min(limit_s, max(slept, default=0.0)) - context.moved)
    order = context.order + more if context.order == context.deadline else context.order
    deadline = context.deadline and context.deadline + more
    return replace(context, stages=stages, deadline=deadline, order=order, moved=context.moved + more)


def due(context: RequestContext, limit_s: float) -> float | None:
    """When a request ends at the latest, as things stand: its deadline moves on while it waits. None if it has none."""
    waits = any(state.sleeps for state in context.stages.values())
    return context.deadline and context.deadline + (max(0.0, limit_s - context.moved) if waits else 0.0)


def until_awake(context: RequestContext, took: Mapping[str, Waking], wall: float) -> float | None:
    """Predicted seconds until the pools that a request waits for are awake, by what that `took`; None if for none."""
    left: list[float] = []
    for stage in () if context.over else context.plan.stages:
        if (state := context.stages[stage.name]).sleeps:
            began, ended = took.get(declared(stage.pool), (0.0, USUAL_S))
            left.append(max(0.0, state.slept[0] + ended - began - wall))
    return max(left, default=None)


def last_waking(known: Waking | None, waking: Waking) -> Waking:
    """The last waking of a pool, after another request has told of the part of it that it waited for."""
    if known is None or waking[0] >= known[1]:
        return waking
    return known if waking[1] <= known[0] else (min(known[0], waking[0]), max(known[1], waking[1]))
