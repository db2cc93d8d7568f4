"""What the requests in flight still put into arenas."""

from __future__ import annotations

import pytest

from tests.scheduler.model import CARD, DENOISE, ENCODE, params
from tools.asking import asking
from unfuse.core.errors import Overloaded
from unfuse.queues.base import Limits
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.backpressure import InFlight
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock


async def test_what_was_refused_or_has_ended_needs_nothing() -> None:
    """Given room for one request, when a larger one is refused and the first one ends, then only that was in flight."""
    scheduler = Scheduler(MemoryQueue(ManualClock()), limits=Limits(max_active=1))
    first = await scheduler.submit(*asking(CARD, params()))
    small = scheduler.in_flight.largest([ENCODE, DENOISE])
    with pytest.raises(Overloaded):
        await scheduler.submit(*asking(CARD, params(width=640)))
    assert scheduler.in_flight.largest([ENCODE, DENOISE]) == small > 0
    await scheduler.cancel(first.context.id)
    assert scheduler.in_flight.largest([ENCODE, DENOISE]) == 0


async def test_what_is_not_met_any_more_has_ended_elsewhere() -> None:
    record = await Scheduler(MemoryQueue(ManualClock())).submit(*asking(CARD, params()))
    in_flight = InFlight()
    in_flight.announced(record.context)
    in_flight.sweep()
    assert in_flight.largest([ENCODE]) > 0
    in_flight.sweep()
    assert in_flight.largest([ENCODE]) == 0
