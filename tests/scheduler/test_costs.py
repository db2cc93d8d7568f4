"""What requests are thought to cost, as learned from those before them, on the devices they ran on."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from structlog.testing import capture_logs

from tests.examples import examples
from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE, params
from tests.scheduler.test_scheduler import WORKER, done, info, run_to_the_end, scheduling, take
from tools.asking import asking
from unfuse.core.errors import Overloaded
from unfuse.core.plan import Value, compile_plan
from unfuse.core.request import GenerationRequest, RequestContext, StageState, Timings
from unfuse.queues.base import QueueLimits
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.costs import LEARNED, UNMEASURED_S, Costs
from unfuse.scheduler.maintenance import REVIEW_S
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import request_context
from unfuse.testing.virtual_time import VirtualClock, in_virtual_time

SECONDS = {"text_encode": 1.0, "denoise": 8.0, "vae_decode": 3.0}
"""What the stages of a 64 × 64 picture take here."""

Changes = dict[str, Any]


async def complete_one(scheduler: Scheduler, times: float = 1.0, batch: float = 1.0, device: str = "") -> None:
    while leases := await take(scheduler):
        run_s = SECONDS[leases[0].task.planned.kind] * times
        timings = Timings(run_s=run_s, batch=batch, device=device, share_s=run_s / batch)
        await scheduler.complete(msgspec.structs.replace(done(leases[0]), timings=timings), leases[0].worker)


def sized(width: int, **more: Value) -> dict[str, Value]:
    return params() | {"width": width} | more


def asked(**more: Value) -> RequestContext:
    """A request for one picture."""
    given = params(num_inference_steps=20, max_sequence_length=64, negative_prompt="", guidance_scale=4.0) | more
    plan = compile_plan(CARD.pipeline, CARD.pools(), given, [{"index": 0}])
    return request_context(GenerationRequest(f"req_{random.randbytes(8).hex()}", CARD.name, given), plan)


def completed(changes: dict[str, Changes] | None = None, worker: str = WORKER, **more: Value) -> RequestContext:
    """The same when it is over: each kind of stage took what SECONDS says, but for the changes."""
    context = asked(**more)
    stages = {}
    for stage in context.plan.stages:
        took: Changes = {"run_s": SECONDS[stage.kind], "steps": 20, "resumed": 0} | (changes or {}).get(stage.kind, {})
        attempt = took.pop("attempt", 1)
        stages[stage.name] = StageState("done", attempt, worker=worker, timings=Timings(**took))
    return msgspec.structs.replace(context, stages=stages, status="completed")


def predicted(costs: Costs, **more: Value) -> dict[str, float]:
    """Seconds of each stage of another one."""
    return {stage.kind: stage.cost for stage in costs.with_cost(asked(**more)).plan.stages}


def only(kind: str, seconds: float) -> dict[str, Changes]:
    return {kind: {"run_s": seconds}}


async def test_unmeasured_model_cost_is_estimated_from_pixels_and_steps() -> None:
    async with scheduling() as (scheduler, _):
        record = await scheduler.submit(*asking(CARD, sized(128, num_inference_steps=10), n=3))
        assert record.context.cost == pytest.approx(UNMEASURED_S * (1 + 3 * (10 + 1) * 128 * 64))
        costs = [stage.cost for stage in record.context.plan.stages if stage.kind == "denoise"]
        assert costs == pytest.approx([UNMEASURED_S * 10 * 128 * 64] * 3)
        assert scheduler.eta(record) is None


async def test_measured_cost_scales_with_pixels_frames_steps_and_tokens() -> None:
    async with scheduling() as (scheduler, _):
        await scheduler.submit(*asking(CARD, sized(64)))
        await complete_one(scheduler)
        works = [(sized(64), 12.0), (sized(128), 23.0), (sized(64, num_frames=5), 56.0)]
        works += [(sized(64, num_inference_steps=3), 28.0), (sized(64, max_sequence_length=2), 13.0)]
        for work, cost in works:
            assert (await scheduler.submit(*asking(CARD, work))).context.cost == pytest.approx(cost)
        assert (await scheduler.submit(*asking(CARD, params(), n=3))).context.cost == pytest.approx(1 + 3 * 11)


async def test_batched_stage_counts_its_share_of_the_forward() -> None:
    async with scheduling() as (scheduler, _):
        for times, batch in ((4.0, 4.0), (2.0, 2.0)):
            await scheduler.submit(*asking(CARD, params()))
            await complete_one(scheduler, times, batch)
        assert (await scheduler.submit(*asking(CARD, params()))).context.cost == pytest.approx(12)


def test_guidance_doubles_denoise_and_encode_cost_with_a_negative_prompt() -> None:
    costs = Costs()
    costs.learn(completed(guidance_scale=4.0))
    assert predicted(costs, guidance_scale=1.0) == pytest.approx(SECONDS | {"denoise": 4.0, "text_encode": 0.5})
    assert predicted(costs, negative_prompt=None) == pytest.approx(predicted(costs, guidance_scale=1.0))
    assert predicted(costs, true_cfg_scale=1.0) == pytest.approx(predicted(costs, guidance_scale=1.0))
    assert predicted(costs, true_cfg_scale=2.0, guidance_scale=0.0) == pytest.approx(SECONDS)


def test_resumed_stage_cost_is_learned_from_the_steps_it_ran() -> None:
    """Given a denoising that was resumed at step 15 of 20, when it took 2 seconds, then a whole one takes 8."""
    costs = Costs()
    costs.learn(completed({"denoise": {"run_s": 2.0, "steps": 5, "resumed": 15, "attempt": 2}}))
    assert predicted(costs) == pytest.approx(SECONDS)
    assert predicted(costs, num_inference_steps=40)["denoise"] == pytest.approx(16.0)


@pytest.mark.parametrize("odd", [{"steps": 0}, {"steps": -1}, {"steps": 5, "resumed": -2}, {"steps": 1}])
def test_implausible_step_counts_are_learned_as_a_whole_stage(odd: Changes) -> None:
    costs = Costs()
    costs.learn(completed({"denoise": odd}))
    assert predicted(costs) == pytest.approx(SECONDS)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0, 0.0, 1e300])
def test_implausible_seconds_are_not_learned(odd: float) -> None:
    costs = Costs()
    costs.learn(completed(only("denoise", odd)))
    assert predicted(costs, num_inference_steps=1)["denoise"] == pytest.approx(UNMEASURED_S * 2 * 64 * 64)
    costs.learn(completed())
    costs.learn(completed(only("denoise", odd)))
    assert predicted(costs) == pytest.approx(SECONDS)


def test_cached_stage_is_not_learned() -> None:
    costs = Costs()
    costs.learn(completed())
    costs.learn(completed({"text_encode": {"run_s": 1e-3, "attempt": 0}}))
    assert predicted(costs) == pytest.approx(SECONDS)


def test_learned_cost_of_one_stage_does_not_affect_others() -> None:
    costs = Costs()
    costs.learn(completed())
    for _ in range(9):
        costs.learn(completed(only("denoise", 80.0)))
    assert predicted(costs) == pytest.approx(SECONDS | {"denoise": 80.0})


def test_request_is_learned_only_once() -> None:
    costs, context = Costs(), completed()
    for _ in range(9):
        costs.learn(context)
    for _ in range(2):
        costs.learn(completed(only("denoise", 4.0)))
    assert predicted(costs)["denoise"] == pytest.approx(4.0)
    for _ in range(LEARNED):
        costs.learn(completed())
    assert len(costs._learned) == LEARNED


def test_predicted_cost_is_the_mean_over_the_devices_of_a_pool() -> None:
    pools = {"fast": (DENOISE,), "slow": (DENOISE,), "slower": (DENOISE, DECODE), "other": (ENCODE,)}
    devices = {"fast": "gpu", "slow": "cpu", "slower": "cpu", "other": "gpu"}
    workers = {name: msgspec.structs.replace(info(name, *pools[name]), device=devices[name]) for name in pools}
    costs = Costs(workers=workers)
    costs.learn(completed(only("denoise", 1.0), worker="fast"))
    assert predicted(costs)["denoise"] == pytest.approx(1.0)
    costs.learn(completed(only("denoise", 10.0), worker="slow"))
    assert predicted(costs)["denoise"] == pytest.approx((1 + 10 + 10) / 3)
    for name in ("slow", "slower", "other"):
        del workers[name]
    assert predicted(costs)["denoise"] == pytest.approx(1.0)
    workers.clear()
    assert predicted(costs)["denoise"] == pytest.approx(5.5)


async def test_scheduler_learns_costs_per_worker_device() -> None:
    async with scheduling() as (scheduler, _):
        gpu = msgspec.structs.replace(info(WORKER, ENCODE, DENOISE, DECODE), device="gpu")
        await scheduler.queue.register(gpu, [CARD])
        await scheduler.maintenance.workers()
        await scheduler.submit(*asking(CARD, params()))
        await complete_one(scheduler)
        assert {name for devices in scheduler._costs._models.values() for name in devices} == {"gpu"}


async def test_learned_costs_survive_a_restart(tmp_path: Path) -> None:
    file, dice = tmp_path / "data" / "costs.json", random.Random(5)
    costs = Costs(file)
    await costs.update_models()
    assert not file.exists()
    for _ in range(40):
        sizes: dict[str, Value] = {"width": dice.choice([32, 64, 96]), "num_inference_steps": dice.choice([5, 20])}
        known = completed(only("denoise", dice.random()), **sizes)
        costs.learn(known)
    await costs.update_models()
    heir = Costs(file)
    for width in (16, 64, 640):
        assert predicted(heir, width=width) == pytest.approx(predicted(costs, width=width))
    before = file.read_bytes()
    heir.learn(known)
    await heir.update_models()
    assert [one.name for one in file.parent.iterdir()] == ["costs.json"] and file.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"[1, 2",
        b"null",
        b'{"version": 2, "learned": [], "times": {}}',
        b'{"version": 1, "learned": [], "times": {"denoise:d:float32": {"": [[[1, 4096], []]]}}}',
        b'{"version": 1, "learned": [], "times": {"denoise:d:float32": {"": [[[1, 4096], [[1, -1.0]]]]}}}',
        b'{"version": 1, "learned": [], "times": {"denoise:d:float32": {"": [[[1e300, 4096], [[1, 1.0]]]]}}}',
    ],
)
async def test_unreadable_costs_file_is_logged_and_replaced(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(content)
    with capture_logs() as logs:
        costs = Costs(file)
    assert [(one["log_level"], one["file"]) for one in logs] == [("warning", str(file))]
    costs.learn(completed())
    await costs.update_models()
    assert predicted(Costs(file)) == pytest.approx(SECONDS)


numbers = st.floats(1e-9, 1e12)
times = st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), numbers), min_size=1, max_size=3)
devices = st.dictionaries(
    st.sampled_from(["", "cpu", "gpu"]), st.lists(st.tuples(st.tuples(numbers, numbers), times), max_size=4)
)


@settings(max_examples=examples(30))
@given(st.dictionaries(st.sampled_from([ENCODE, DENOISE, "", "what"]), devices))
def test_any_readable_costs_file_yields_finite_predictions(
    tmp_path_factory: pytest.TempPathFactory, found: object
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.json"
    file.write_bytes(msgspec.json.encode({"version": 1, "learned": [], "times": found}))
    costs = Costs(file)
    assert all(0 <= seconds < float("inf") for seconds in predicted(costs).values())
    for _ in range(40):
        costs.learn(completed())
    assert all(0 <= seconds < float("inf") for seconds in predicted(costs).values())


async def test_costs_are_saved_once_their_folder_can_be_written_again(tmp_path: Path) -> None:
    """Nothing more has to be learned for it. Meanwhile there is one warning, and not one for each try."""
    (tmp_path / "file").touch()
    costs = Costs(tmp_path / "file" / "costs.json")
    costs.learn(completed())
    with capture_logs() as logs:
        await costs.update_models()
        await costs.update_models()
    assert [one["log_level"] for one in logs] == ["warning"]

    (tmp_path / "file").unlink()
    await costs.update_models()
    assert predicted(Costs(tmp_path / "file" / "costs.json")) == pytest.approx(SECONDS)


async def test_scheduler_saves_costs_on_close_and_the_next_one_loads_them(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    async with scheduling(costs=file) as (scheduler, _):
        await scheduler.submit(*asking(CARD, params()))
        await complete_one(scheduler)
    async with scheduling(costs=file) as (heir, _):
        record = await heir.submit(*asking(CARD, params()))
        assert (record.context.cost, heir.eta(record)) == (pytest.approx(12), pytest.approx(12))


async def test_scheduler_learns_costs_from_completed_requests_at_start() -> None:
    async with scheduling() as (scheduler, clock):
        await scheduler.submit(*asking(CARD, params()))
        await complete_one(scheduler)
        heir = Scheduler(scheduler.queue, clock=clock)
        await heir.maintenance.learn_costs()
        assert (await heir.submit(*asking(CARD, params()))).context.cost == pytest.approx(12)


@in_virtual_time
async def test_schedulers_over_a_shared_queue_learn_from_each_other() -> None:
    class Shared(MemoryQueue):
        shared = True

    clock = VirtualClock()
    queue = Shared(clock)
    one, other = Scheduler(queue, clock=clock), Scheduler(queue, clock=clock)
    await other.start()
    await one.submit(*asking(CARD, params()))
    await complete_one(one)
    record = await one.submit(*asking(CARD, params()))
    assert other.eta(record) is None
    await asyncio.sleep(2 * REVIEW_S)
    assert other.eta(record) is not None
    await other.close()


async def test_requests_beyond_max_cost_are_rejected_until_cost_is_freed() -> None:
    async with scheduling(limits=QueueLimits(max_cost=30.0)) as (scheduler, _):
        await scheduler.submit(*asking(CARD, params()))
        await complete_one(scheduler)
        for _ in range(2):
            await scheduler.submit(*asking(CARD, params()))
        with pytest.raises(Overloaded):
            await scheduler.submit(*asking(CARD, params()))
        await scheduler.submit(*asking(CARD, sized(1)))
        await complete_one(scheduler)
        await scheduler.submit(*asking(CARD, sized(128)))


@pytest.mark.parametrize("every, retry_after", [(0.01, 1.0), (5.0, 5.0), (50.0, 50.0)])
async def test_retry_after_follows_the_completion_rate_within_bounds(every: float, retry_after: float) -> None:
    clock = ManualClock()
    scheduler = Scheduler(MemoryQueue(clock), limits=QueueLimits(max_active=9), clock=clock)
    for _ in range(9):
        await scheduler.submit(*asking(CARD, params()))
    for _ in range(3):
        (encode,) = await take(scheduler)
        await scheduler.cancel(encode.task.request)
        clock.advance(every)
        await scheduler.submit(*asking(CARD, params()))
    with pytest.raises(Overloaded) as refused:
        await scheduler.submit(*asking(CARD, params()))
    assert refused.value.retry_after == pytest.approx(retry_after)


async def test_retry_after_is_at_most_one_minute() -> None:
    async with scheduling(limits=QueueLimits(max_active=1)) as (scheduler, clock):
        await scheduler.submit(*asking(CARD, params()))
        await complete_one(scheduler)
        clock.advance(50)
        await scheduler.submit(*asking(CARD, params()))
        with pytest.raises(Overloaded) as refused:
            await scheduler.submit(*asking(CARD, sized(6400)))
        assert refused.value.retry_after == 60.0


async def test_eta_counts_remaining_work_and_work_ahead_in_the_queue() -> None:
    async with scheduling() as (scheduler, clock):
        await scheduler.submit(*asking(CARD, params()))
        await complete_one(scheduler)
        clock.advance(100)
        first, second = [(await scheduler.submit(*asking(CARD, params()))).context.id for _ in range(2)]

        async def eta(request: str) -> float | None:
            return scheduler.eta(await scheduler.queue.load(request))

        assert await eta(first) == pytest.approx(12)
        assert await eta(second) == pytest.approx(24)
        (encode,) = await take(scheduler)
        await scheduler.complete(done(encode), encode.worker)
        assert await eta(first) == pytest.approx(11)
        await run_to_the_end(scheduler)
        assert await eta(first) is None
