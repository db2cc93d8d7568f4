"""What a scheduler does without anybody asking, with the pauses that it has."""

from __future__ import annotations

import asyncio

import pytest

from tests.scheduler.model import CARD, ENCODE, params
from tests.scheduler.test_scheduler import info
from tools.asking import asking
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.scheduler import Scheduler
from unfuse.scheduler.upkeep import GONE, REVIEW_S, SWEEP_S
from unfuse.testing.queue_samples import wanted
from unfuse.testing.virtual_time import VirtualClock, in_virtual_time


@in_virtual_time
async def test_leases_deadlines_and_workers_end_in_their_time() -> None:
    """Given a worker that takes a task and is heard of no more, then its task is another's when the lease is over, the
    request ends at its deadline, and the worker is forgotten."""
    clock = VirtualClock()
    scheduler = Scheduler(MemoryQueue(clock), cards=[CARD], clock=clock, lease_ttl=15.0)
    queue = scheduler.queue
    await scheduler.start()
    began = clock.now()
    await queue.hello(info("silent", ENCODE), [CARD])
    request = (await scheduler.submit(*asking(CARD, params(), timeout=60))).context.id
    await queue.lease("silent", wanted(ENCODE), 15.0)

    (again,) = await queue.lease("other", wanted(ENCODE), 3600.0, wait=3600.0)
    assert (again.task.attempt, clock.now() - began) == (2, pytest.approx(15.0, abs=2 * SWEEP_S))

    events = [event.type async for event in queue.watch(request)]
    assert (events[-1], clock.now() - began) == ("failed", pytest.approx(60.0))
    assert (await queue.load(request)).context.status == "expired"

    assert len(await queue.workers()) == 1
    await asyncio.sleep(GONE * 15.0 + REVIEW_S)
    assert await queue.workers() == []
    await scheduler.close()
