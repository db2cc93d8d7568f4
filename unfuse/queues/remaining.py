"""The predicted seconds of a request's stages that are not done, by pool."""

from __future__ import annotations

from collections import Counter

from unfuse.core.request import RequestContext

NANOSECONDS = 10**9  # sums count whole nanoseconds: adding and subtracting the same number leaves exactly nothing
MOST_S = 10**5  # the longest prediction, in seconds, that counts; a longer one, or one of no number, counts as 0


def remaining_of(context: RequestContext) -> dict[str, int]:
    """Predicted nanoseconds of the stages that are not done, by pool; empty for a request that is over."""
    left = Counter[str]()
    for stage in () if context.over else context.plan.stages:
        state = context.stages.get(stage.name)
        if 0 < stage.cost <= MOST_S and (state is None or state.status != "done"):
            left[stage.pool] += round(stage.cost * NANOSECONDS)
    return {pool: nanoseconds for pool, nanoseconds in left.items() if nanoseconds}
