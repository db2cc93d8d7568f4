"""What is still to be computed for a request, by the seconds that were predicted when it came."""

from __future__ import annotations

from collections import Counter

from unfuse.core.request import RequestContext

NANOSECONDS = 10**9
"""Sums are of whole nanoseconds, so that what is added and taken away again leaves nothing."""

MOST_S = 10**5
"""No stage is predicted to take longer: a number beyond it, or none, counts for nothing."""


def remaining_of(context: RequestContext) -> dict[str, int]:
    """Nanoseconds of the stages that are not done, by pool; nothing of a request that is over."""
    left = Counter[str]()
    for stage in () if context.over else context.plan.stages:
        state = context.stages.get(stage.name)
        if 0 < stage.cost <= MOST_S and (state is None or state.status != "done"):
            left[stage.pool] += round(stage.cost * NANOSECONDS)
    return {pool: nanoseconds for pool, nanoseconds in left.items() if nanoseconds}
