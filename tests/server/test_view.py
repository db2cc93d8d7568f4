"""Progress as clients see it: the share of predicted seconds that is behind a request, whatever happens to it."""

from __future__ import annotations

import pytest

from tests.scheduler.model import CARD, params
from tests.scheduler.test_costs import complete_one
from tests.scheduler.test_scheduler import WORKER, done, scheduling, take
from tools.asking import asking
from unfuse.core.event import Event
from unfuse.core.messages import Failed
from unfuse.core.task import Lease
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.view import progress, request_object


async def shown(scheduler: Scheduler, request: str) -> int:
    return progress(await scheduler.queue.load(request))


async def step(scheduler: Scheduler, lease: Lease, number: int) -> None:
    claim = lease.claim
    await scheduler.queue.progress(claim, [Event("progress", 0.0, claim.stage, claim.attempt, WORKER, number, 20)])


async def measured(scheduler: Scheduler) -> str:
    """A request of a model whose encoder takes 1 s, its denoiser 8 and its decoder 3."""
    await scheduler.submit(*asking(CARD, params()))
    await complete_one(scheduler)
    return (await scheduler.submit(*asking(CARD, params()))).context.id


async def test_it_is_the_share_of_predicted_seconds() -> None:
    async with scheduling() as (scheduler, _):
        request = await measured(scheduler)
        assert await shown(scheduler, request) == 0
        (encode,) = await take(scheduler)
        await scheduler.complete(done(encode), WORKER)
        assert await shown(scheduler, request) == 100 * 1 // 12
        (denoise,) = await take(scheduler)
        await step(scheduler, denoise, 10)
        assert await shown(scheduler, request) == 100 * 5 // 12
        await scheduler.complete(done(denoise), WORKER)
        assert await shown(scheduler, request) == 100 * 9 // 12
        (decode,) = await take(scheduler)
        await scheduler.complete(done(decode), WORKER)
        assert await shown(scheduler, request) == 100


async def test_it_does_not_fall_when_predictions_change() -> None:
    async with scheduling() as (scheduler, _):
        request = await measured(scheduler)
        (encode,) = await take(scheduler)
        await scheduler.complete(done(encode), WORKER)
        before = await shown(scheduler, request)
        (denoise,) = await take(scheduler)
        for _ in range(3):
            await scheduler.submit(*asking(CARD, params(), priority=1))
            await complete_one(scheduler, times=100.0)
        assert await shown(scheduler, request) == before
        assert scheduler.eta(await scheduler.queue.load(request)) > 20  # type: ignore[operator]


async def test_it_does_not_fall_when_a_stage_is_tried_again() -> None:
    async with scheduling() as (scheduler, clock):
        request = await measured(scheduler)
        (encode,) = await take(scheduler)
        await scheduler.complete(done(encode), WORKER)
        (denoise,) = await take(scheduler)
        await step(scheduler, denoise, 10)
        await scheduler.fail(Failed(denoise.claim, "transient", "bang"), WORKER)
        assert await shown(scheduler, request) == 100 * 5 // 12
        clock.advance(1)
        (denoise,) = await take(scheduler)
        await step(scheduler, denoise, 2)
        assert await shown(scheduler, request) == 100 * 5 // 12
        await step(scheduler, denoise, 15)
        assert await shown(scheduler, request) == 100 * 7 // 12
        await scheduler.queue.expired(scheduler.lease_ttl)
        for _ in range(4):
            clock.advance(scheduler.lease_ttl / 3)
            for lease in await scheduler.queue.expired(scheduler.lease_ttl):
                await scheduler.upkeep.end(lease)
        (denoise,) = await take(scheduler)
        assert (denoise.task.attempt, await shown(scheduler, request)) == (3, 100 * 7 // 12)


async def test_it_does_not_fall_when_an_input_is_made_again() -> None:
    async with scheduling() as (scheduler, _):
        request = await measured(scheduler)
        (encode,) = await take(scheduler)
        await scheduler.complete(done(encode), WORKER)
        (denoise,) = await take(scheduler)
        lost = denoise.task.inputs[0].id
        await scheduler.fail(Failed(denoise.claim, "object_lost", "it is gone", object_id=lost), WORKER)
        assert await shown(scheduler, request) == 100 * 1 // 12


async def test_a_model_that_never_ran_counts_its_forwards() -> None:
    async with scheduling() as (scheduler, _):
        request = (await scheduler.submit(*asking(CARD, params(num_inference_steps=3)))).context.id
        for _ in range(2):
            (lease,) = await take(scheduler)
            await scheduler.complete(done(lease), WORKER)
        assert await shown(scheduler, request) == 75


async def test_a_request_shows_what_was_asked_by_whom_and_what_it_took() -> None:
    async with scheduling() as (scheduler, clock):
        id = (await scheduler.submit(*asking(CARD, params(), tenant="ada", priority=3, name="my model"))).context.id
        waiting = request_object(await scheduler.queue.load(id), "")

        assert (waiting["model"], waiting["medium"], waiting["tenant"], waiting["priority"]) == (
            "my model", "image", "ada", 3
        )  # fmt: skip
        assert (waiting["prompt"], waiting["started_at"]) == ("a red circle", None)
        assert waiting["params"] == {name: value for name, value in params().items() if name != "prompt"}
        assert waiting["cost"]["device_s"] == {}  # type: ignore[index]

        clock.advance(5.0)
        await complete_one(scheduler, device="cpu")
        ended = request_object(await scheduler.queue.load(id), "")

        assert ended["started_at"] == pytest.approx(clock.wall(), abs=0.01)
        assert ended["cost"]["device_s"] == {"cpu": 12.0}  # type: ignore[index]
        again = request_object(await scheduler.submit(*asking(CARD, params())), "")
        assert again["cost"]["predicted_s"] == pytest.approx(12.0)  # type: ignore[index]
