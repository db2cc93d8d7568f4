"""Who goes first: the number that a request's tasks are ordered by, computed once, when it is accepted."""

from __future__ import annotations

from typing import Literal

from unfuse.core.request import RequestContext
from unfuse.queues.base import Filter, QueueBackend

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
    newest = await queue.list(Filter(over=False, tenant=context.caller.tenant), limit=1)
    entries = {stage.pool for stage in context.plan.stages if not stage.after}
    line = [task.order for pool in entries for task in await queue.peek(pool, 1)]
    return max([min(line, default=now), *(record.context.order for record in newest)]) + context.cost
