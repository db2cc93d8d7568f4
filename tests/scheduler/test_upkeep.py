"""What a scheduler does without anybody asking, with the pauses that it has."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.scheduler.model import CARD, ENCODE, params
from tests.scheduler.test_scheduler import info
from tools.asking import asking
from unfuse.core.request import Change
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.maintenance import GONE, REVIEW_S, SWEEP_S
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.queue_samples import lease_request
from unfuse.testing.virtual_time import VirtualClock, in_virtual_time


@in_virtual_time
async def test_leases_deadlines_and_workers_expire_on_time() -> None:
    """Given a worker that takes a task and is heard of no more, then its task is another's when the lease is over, the
    request ends at its deadline, and the worker is forgotten."""
    clock = VirtualClock()
    scheduler = Scheduler(MemoryQueue(clock), specs=[CARD], clock=clock, lease_ttl=15.0)
    queue = scheduler.queue
    await scheduler.start()
    began = clock.now()
    await queue.register(info("silent", ENCODE), [CARD])
    request = (await scheduler.submit(*asking(CARD, params(), timeout=60))).context.id
    await queue.lease("silent", lease_request(ENCODE), 15.0)

    (again,) = await queue.lease("other", lease_request(ENCODE), 3600.0, wait=3600.0)
    assert (again.task.attempt, clock.now() - began) == (2, pytest.approx(15.0, abs=2 * SWEEP_S))

    events = [event.type async for event in queue.watch(request)]
    assert (events[-1], clock.now() - began) == ("failed", pytest.approx(60.0))
    assert (await queue.load(request)).context.status == "expired"

    assert len(await queue.workers()) == 1
    await asyncio.sleep((GONE + 1) * 15.0 + 3 * REVIEW_S)
    assert await queue.workers() == []
    await scheduler.close()


class SteppedClock(VirtualClock):
    """Both readings can be set forward: `now` as of a server whose clock is set, `wall` as of this machine."""

    now_ahead = wall_ahead = 0.0

    def now(self) -> float:
        return super().now() + self.now_ahead

    def wall(self) -> float:
        return super().wall() + self.wall_ahead


@pytest.mark.parametrize("reading", ["now_ahead", "wall_ahead"])
@in_virtual_time
async def test_clock_set_forward_does_not_end_a_running_request(reading: str) -> None:
    """Given stages that run within their limits, when a clock is set forward by an hour, then they stay with their
    workers, which are not forgotten, and their requests complete; one that runs for too long still ends."""
    clock = SteppedClock()
    scheduler = Scheduler(MemoryQueue(clock), specs=[CARD], clock=VirtualClock(), lease_ttl=15.0)
    scheduler.clock.wall = clock.wall  # type: ignore[method-assign]
    queue = scheduler.queue
    await scheduler.start()
    await queue.register(info("w", ENCODE), [CARD])
    request = (await scheduler.submit(*asking(CARD, params()))).context
    limited = msgspec.structs.replace(request.request, time_limit_s=300.0)
    await queue.commit(Change(msgspec.structs.replace(request, version=request.version + 1, request=limited)))
    (lease,) = await queue.lease("w", lease_request(ENCODE), 15.0)

    async def run_for(seconds: float) -> None:
        for _ in range(int(seconds / 3)):
            await asyncio.sleep(3.0)
            await queue.renew([lease.claim], 15.0)

    await run_for(30.0)
    setattr(clock, reading, 3600.0)
    await run_for(9.0)
    await queue.register(info("w", ENCODE))
    await run_for(60.0)
    assert (await queue.load(request.id)).status == "in_progress"
    assert [member.info.id for member in await queue.workers()] == ["w"]
    assert (await queue.renew([lease.claim], 15.0)).ended == ()

    await run_for(240.0)
    ended = (await queue.load(request.id)).context
    assert (ended.status, ended.error and "300 s" in ended.error.message) == ("expired", True)
    await scheduler.close()
