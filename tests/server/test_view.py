"""Progress as clients see it: the share of predicted seconds that is behind a request, whatever happens to it."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import msgspec
import pytest

from tests.scheduler.model import CARD, params
from tests.scheduler.test_costs import complete_one
from tests.scheduler.test_scheduler import WORKER, done, scheduling, take
from tools.asking import asking
from unfuse.core.messages import TaskFailed
from unfuse.core.request import Event, Timings
from unfuse.core.task import Lease
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.request_objects import Prices, progress, request_object


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


async def test_progress_is_the_share_of_predicted_seconds() -> None:
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


async def test_progress_does_not_decrease_when_predictions_change() -> None:
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


async def test_progress_does_not_decrease_when_a_stage_is_retried() -> None:
    async with scheduling() as (scheduler, clock):
        request = await measured(scheduler)
        (encode,) = await take(scheduler)
        await scheduler.complete(done(encode), WORKER)
        (denoise,) = await take(scheduler)
        await step(scheduler, denoise, 10)
        await scheduler.fail(TaskFailed(denoise.claim, "transient", "bang"), WORKER)
        assert await shown(scheduler, request) == 100 * 5 // 12
        clock.advance(1)
        (denoise,) = await take(scheduler)
        await step(scheduler, denoise, 2)
        assert await shown(scheduler, request) == 100 * 5 // 12
        await step(scheduler, denoise, 15)
        assert await shown(scheduler, request) == 100 * 7 // 12
        await scheduler.queue.sweep_expired(scheduler.lease_ttl)
        for _ in range(4):
            clock.advance(scheduler.lease_ttl / 3)
            for lease in await scheduler.queue.sweep_expired(scheduler.lease_ttl):
                await scheduler.maintenance.expire_lease(lease)
        (denoise,) = await take(scheduler)
        assert (denoise.task.attempt, await shown(scheduler, request)) == (3, 100 * 7 // 12)


async def test_progress_does_not_decrease_when_an_input_is_recomputed() -> None:
    async with scheduling() as (scheduler, _):
        request = await measured(scheduler)
        (encode,) = await take(scheduler)
        await scheduler.complete(done(encode), WORKER)
        (denoise,) = await take(scheduler)
        lost = denoise.task.inputs[0].id
        await scheduler.fail(TaskFailed(denoise.claim, "object_lost", "it is gone", object_id=lost), WORKER)
        assert await shown(scheduler, request) == 100 * 1 // 12


async def test_progress_of_an_unmeasured_model_counts_forwards() -> None:
    async with scheduling() as (scheduler, _):
        request = (await scheduler.submit(*asking(CARD, params(num_inference_steps=3)))).context.id
        for _ in range(2):
            (lease,) = await take(scheduler)
            await scheduler.complete(done(lease), WORKER)
        assert await shown(scheduler, request) == 75


async def test_request_object_reports_steps_and_cost_during_and_after_the_run() -> None:
    async with scheduling() as (scheduler, clock):
        id = (await scheduler.submit(*asking(CARD, params()))).context.id

        async def now() -> dict[str, Any]:
            shown: dict[str, Any] = request_object(
                await scheduler.queue.load(id), "", prices=Prices(["cpu=3600/h"]), wall=clock.wall()
            )
            return shown

        assert ((await now())["attempts"], (await now())["step"]) == (0, 0)
        (encode,) = await take(scheduler)
        began = clock.wall()
        clock.advance(50.0)
        used = Timings(share_s=4.0, device="cpu", steps=1)
        await scheduler.complete(msgspec.structs.replace(done(encode), timings=used), WORKER)
        (denoise,) = await take(scheduler)
        clock.advance(50.0)
        await scheduler.queue.progress(
            denoise.claim, [Event("progress", step=3, steps=20)], Timings(share_s=30.0, device="cpu")
        )
        shown = await now()
        assert (shown["step"], shown["steps"], shown["attempts"]) == (3, 20, 1)
        assert shown["cost"] == {"predicted_s": ANY, "device_s": {"cpu": 34.0}, "money": 34.0}

        await scheduler.fail(TaskFailed(denoise.claim, "hand_back", "leaves", reason="drain"), WORKER)
        waiting = await now()
        assert waiting["cost"]["device_s"] == {"cpu": 4.0}, "the attempt is lost"
        assert (waiting["started_at"], waiting["step"], waiting["attempts"]) == (pytest.approx(began), 3, 1)
        (denoise,) = await take(scheduler)
        assert ((await now())["attempts"], (await now())["started_at"]) == (2, pytest.approx(began))

        clock.advance(50.0)
        await scheduler.queue.progress(
            denoise.claim, [Event("progress", step=7, steps=20)], Timings(share_s=20.0, device="cpu")
        )
        await scheduler.cancel(id)
        over = await now()
        assert (over["status"], over["stage"], over["step"], over["steps"]) == ("cancelled", None, 7, 20)
        assert (over["cost"]["device_s"], over["attempts"]) == ({"cpu": 24.0}, 2)
        assert over["started_at"] == pytest.approx(began)


async def test_request_object_contains_params_tenant_and_device_seconds() -> None:
    async with scheduling() as (scheduler, clock):
        id = (await scheduler.submit(*asking(CARD, params(), tenant="ada", priority=3, alias="my model"))).context.id
        waiting = request_object(await scheduler.queue.load(id), "")

        assert (waiting["model"], waiting["modality"], waiting["tenant"], waiting["priority"]) == (
            "my model",
            "image",
            "ada",
            3,
        )
        assert (waiting["prompt"], waiting["started_at"]) == ("a red circle", None)
        assert waiting["params"] == {name: value for name, value in params().items() if name != "prompt"}
        assert waiting["cost"]["device_s"] == {}  # type: ignore[index]

        clock.advance(20.0)
        await complete_one(scheduler, device="cpu")
        ended = request_object(await scheduler.queue.load(id), "")

        assert ended["started_at"] == pytest.approx(clock.wall(), abs=0.01)
        assert ended["cost"]["device_s"] == {"cpu": 12.0}  # type: ignore[index]
        again = request_object(await scheduler.submit(*asking(CARD, params())), "")
        assert again["cost"]["predicted_s"] == pytest.approx(12.0)  # type: ignore[index]
