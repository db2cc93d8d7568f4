"""What requests are thought to cost, as learned from those before them."""

from __future__ import annotations

import msgspec
import pytest

from tests.scheduler.model import CARD, params
from tests.scheduler.test_scheduler import done, run_to_the_end, scheduling, take
from unfuse.core.errors import Overloaded
from unfuse.core.request import Timings
from unfuse.queues.base import Limits
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.costs import UNMEASURED_S
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock

SECONDS = {"text_encode": 1.0, "denoise": 8.0, "vae_decode": 3.0}
"""What the stages of a 64 × 64 picture take here."""


async def complete_one(scheduler: Scheduler, times: float = 1.0, batch: float = 1.0) -> None:
    while leases := await take(scheduler):
        timings = Timings(run_s=SECONDS[leases[0].task.kind] * times, batch=batch)
        await scheduler.complete(msgspec.structs.replace(done(leases[0]), timings=timings), leases[0].worker)


def sized(width: int, **more: int) -> dict[str, int | str | float | bool | None]:
    return params() | {"width": width} | more


async def test_an_unmeasured_model_counts_by_its_pixels() -> None:
    async with scheduling() as (scheduler, _):
        record = await scheduler.submit(CARD, sized(128, num_inference_steps=10), n=3)
        assert record.context.cost == pytest.approx(UNMEASURED_S * 128 * 64 * 10 * 3)
        assert scheduler.eta(record) is None


async def test_a_measured_one_counts_what_it_took_by_pixels_frames_and_steps() -> None:
    async with scheduling() as (scheduler, _):
        await scheduler.submit(CARD, sized(64))
        await complete_one(scheduler)
        for work, cost in [(sized(64), 12.0), (sized(128), 24.0), (sized(64, num_frames=5), 60.0)]:
            assert (await scheduler.submit(CARD, work)).context.cost == pytest.approx(cost)
        assert (await scheduler.submit(CARD, params(), n=3)).context.cost == pytest.approx(1 + 3 * 11)


async def test_who_shares_a_forward_counts_their_part_and_news_counts_a_tenth() -> None:
    async with scheduling() as (scheduler, _):
        for times, batch in ((4.0, 4.0), (2.0, 1.0)):
            await scheduler.submit(CARD, params())
            await complete_one(scheduler, times, batch)
        assert (await scheduler.submit(CARD, params())).context.cost == pytest.approx(12 * 1.1)


async def test_a_scheduler_that_starts_learns_from_what_the_queue_holds() -> None:
    async with scheduling() as (scheduler, clock):
        await scheduler.submit(CARD, params())
        await complete_one(scheduler)
        heir = Scheduler(scheduler.queue, clock=clock)
        await heir._learn()
        assert (await heir.submit(CARD, params())).context.cost == pytest.approx(12)


async def test_beyond_the_cost_that_is_accepted_it_refuses_until_there_is_room() -> None:
    async with scheduling(limits=Limits(max_cost=30.0)) as (scheduler, _):
        await scheduler.submit(CARD, params())
        await complete_one(scheduler)
        for _ in range(2):
            await scheduler.submit(CARD, params())
        with pytest.raises(Overloaded):
            await scheduler.submit(CARD, params())
        await scheduler.submit(CARD, sized(1))
        await complete_one(scheduler)
        await scheduler.submit(CARD, sized(128))


@pytest.mark.parametrize("every, retry_after", [(0.01, 1.0), (5.0, 5.0), (50.0, 50.0)])
async def test_when_to_come_back_is_the_pace_of_completions_within_bounds(every: float, retry_after: float) -> None:
    clock = ManualClock()
    scheduler = Scheduler(MemoryQueue(clock), limits=Limits(max_active=9), clock=clock)
    for _ in range(9):
        await scheduler.submit(CARD, params())
    for _ in range(3):
        (encode,) = await take(scheduler)
        await scheduler.cancel(encode.task.request)
        clock.advance(every)
        await scheduler.submit(CARD, params())
    with pytest.raises(Overloaded) as refused:
        await scheduler.submit(CARD, params())
    assert refused.value.retry_after == pytest.approx(retry_after)


async def test_nobody_is_sent_away_for_more_than_a_minute() -> None:
    async with scheduling(limits=Limits(max_active=1)) as (scheduler, clock):
        await scheduler.submit(CARD, params())
        await complete_one(scheduler)
        clock.advance(50)
        await scheduler.submit(CARD, params())
        with pytest.raises(Overloaded) as refused:
            await scheduler.submit(CARD, sized(6400))
        assert refused.value.retry_after == 60.0


async def test_eta_counts_what_is_left_and_what_is_ahead() -> None:
    async with scheduling() as (scheduler, clock):
        await scheduler.submit(CARD, params())
        await complete_one(scheduler)
        clock.advance(100)
        first, second = [(await scheduler.submit(CARD, params())).context.id for _ in range(2)]

        async def eta(request: str) -> float | None:
            return scheduler.eta(await scheduler.queue.load(request))

        assert await eta(first) == pytest.approx(12)
        assert await eta(second) == pytest.approx(24)
        (encode,) = await take(scheduler)
        await scheduler.complete(done(encode), encode.worker)
        assert await eta(first) == pytest.approx(11)
        await run_to_the_end(scheduler)
        assert await eta(first) is None
