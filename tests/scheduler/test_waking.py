"""Pools that sleep: a request for one wakes it, says so, and is given the time that it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from tests.examples import examples
from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE, SHARING, params
from tests.scheduler.test_outcomes import CPU, come, settled
from tests.scheduler.test_scheduler import WORKER, done, info, run_to_the_end, take
from tools.asking import asking
from tools.redis_server import RedisServer
from unfuse import queues
from unfuse.core.plan import ExecutionPlan, PlannedStage
from unfuse.core.request import ColdStart, GenerationRequest, RequestContext, StageState
from unfuse.queues.base import QueueBackend
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.cold_starts import DEFAULT_COLD_START_S, latest_end, record_cold_starts
from unfuse.scheduler.costs import last_cold_start
from unfuse.scheduler.registry import Registry
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import request_context
from unfuse.testing.virtual_time import VirtualClock, in_virtual_time

ASLEEP = {"denoiser": 2}
LIMIT_S = 100.0


@asynccontextmanager
async def sleeping(queue: QueueBackend | None = None, **options: Any) -> AsyncIterator[tuple[Scheduler, ManualClock]]:
    """A scheduler whose encoder and decoder are there, and whose denoisers sleep."""
    clock = ManualClock()
    queue = queue or MemoryQueue(clock)
    scheduler = Scheduler(
        queue, specs=[CARD], clock=clock, **{"scale_to_zero": ASLEEP, "cold_start_limit": LIMIT_S} | options
    )
    await scheduler.registry.declare([CARD])
    await come(scheduler, WORKER, ENCODE, DECODE)
    await scheduler.registry.model_specs()
    try:
        yield scheduler, clock
    finally:
        await scheduler.close()
        await queue.close()


async def woken(scheduler: Scheduler, *contexts: RequestContext) -> list[RequestContext]:
    """A denoiser comes, and the scheduler sees to these requests."""
    await come(scheduler, WORKER, ENCODE, DENOISE, DECODE)
    await settled(scheduler, contexts)
    return [(await scheduler.queue.load(context.id)).context for context in contexts]


def slept(context: RequestContext) -> dict[str, ColdStart]:
    """When which stages waited for a pool that slept."""
    return {name: state.cold_start for name, state in context.stages.items() if any(state.cold_start)}


async def submitted(scheduler: Scheduler, **fields: Any) -> RequestContext:
    return (await scheduler.submit(*asking(CARD, params(), **fields))).context


class TestWhatIsSaid:
    async def test_request_for_a_scaled_to_zero_pool_reports_cold_start_and_eta(self) -> None:
        async with sleeping() as (scheduler, clock):
            assert (
                scheduler.registry.state(DENOISE) == "scaled_to_zero"
                and not await scheduler.registry.unavailable_pools()
            )
            context = await submitted(scheduler)
            record = await scheduler.queue.load(context.id)
            assert scheduler.awaited_condition(record) == ("cold_start", DEFAULT_COLD_START_S)
            assert scheduler.eta(record) == DEFAULT_COLD_START_S + context.cost
            clock.advance(100)
            assert scheduler.awaited_condition(record) == ("cold_start", DEFAULT_COLD_START_S - 100)
            clock.advance(DEFAULT_COLD_START_S)
            assert scheduler.awaited_condition(record) == ("cold_start", 0.0)
            await woken(scheduler, context)
            assert scheduler.awaited_condition(await scheduler.queue.load(context.id)) == ("loading", None)
            assert await run_to_the_end(scheduler) == ["text_encode", "denoise.0", "vae_decode.0"]

    async def test_cold_start_is_reported_while_another_stage_runs(self) -> None:
        async with sleeping() as (scheduler, _):
            context = await submitted(scheduler)
            await take(scheduler, ENCODE)
            record = await scheduler.queue.load(context.id)
            assert record.status == "in_progress" and scheduler.awaited_condition(record)[0] == "cold_start"

    async def test_live_and_unavailable_pools_do_not_cause_a_cold_start(self) -> None:
        async with sleeping(scale_to_zero={"encoder": 1}) as (scheduler, _):
            assert slept(await submitted(scheduler)) == {}
        async with sleeping(scale_to_zero={}) as (scheduler, _):
            context = await submitted(scheduler)
            assert (slept(context), scheduler.registry.state(DENOISE)) == ({}, "unavailable")

    async def test_scale_to_zero_accepts_combined_worker_roles(self) -> None:
        async with sleeping(scale_to_zero={"encoder+decoder": 1, "all": 3}) as (scheduler, _):
            assert (await scheduler.queue.declarations())["serve"].scalable_to_zero == dict.fromkeys(
                (ENCODE, DENOISE, DECODE), 3
            )
        async with sleeping(scale_to_zero={"encoder+decoder": 1}) as (scheduler, _):
            await scheduler.registry.admit(CARD)
            assert (await scheduler.queue.declarations())[f"model {CARD.name}"].scalable_to_zero == {
                ENCODE: 1,
                DECODE: 1,
            }

    async def test_servers_of_other_models_do_not_change_the_scaled_to_zero_state(self) -> None:
        """They declare what they serve in place of what was declared, and know nothing of who may sleep here."""
        async with sleeping() as (scheduler, _):
            await Registry(scheduler.queue, 15).declare([])
            await scheduler.registry.model_specs()
            assert (
                scheduler.registry.state(DENOISE) == "scaled_to_zero"
                and not await scheduler.registry.unavailable_pools()
            )
            assert (
                scheduler.awaited_condition(await scheduler.queue.load((await submitted(scheduler)).id))[0]
                == "cold_start"
            )

    async def test_cached_encoding_does_not_cause_an_encoder_cold_start(self) -> None:
        async with sleeping(scale_to_zero={"encoder": 1}, cache_bytes=1 << 20) as (scheduler, _):
            await come(scheduler, WORKER, ENCODE, DENOISE, DECODE)
            await scheduler.submit(*asking(SHARING, params()))
            await run_to_the_end(scheduler)
            await come(scheduler, WORKER, DENOISE, DECODE)
            for prompt, wakes in (("a red circle", False), ("a blue star", True)):
                record = await scheduler.submit(*asking(SHARING, params(prompt=prompt)))
                assert bool(slept(record.context)) == wakes


class TestWhatIsLearned:
    async def test_last_cold_start_duration_predicts_the_next(self, tmp_path: Path) -> None:
        costs = tmp_path / "costs.json"
        async with sleeping(costs=costs) as (scheduler, clock):
            for seconds in (60.0, 40.0):
                first = await submitted(scheduler)
                clock.advance(seconds - 20)
                second = await submitted(scheduler)
                clock.advance(20)
                await woken(scheduler, first, second)
                await run_to_the_end(scheduler)
                await come(scheduler, WORKER, ENCODE, DECODE)
                record = await scheduler.queue.load((await submitted(scheduler)).id)
                assert scheduler.awaited_condition(record) == ("cold_start", seconds)
                await scheduler.cancel(record.context.id)
        async with sleeping(costs=costs) as (again, _):
            record = await again.queue.load((await submitted(again)).id)
            assert again.awaited_condition(record) == ("cold_start", 40.0)

    def test_overlapping_cold_starts_are_merged_and_older_ones_ignored(self) -> None:
        assert last_cold_start(None, (10.0, 70.0)) == (10.0, 70.0)
        assert last_cold_start((10.0, 70.0), (30.0, 71.0)) == (10.0, 71.0)
        assert last_cold_start((10.0, 70.0), (80.0, 90.0)) == (80.0, 90.0)
        assert last_cold_start((80.0, 90.0), (10.0, 70.0)) == (80.0, 90.0)


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    server = RedisServer(tmp_path) if request.param == "redis" else None
    yield {"memory": "memory:", "sqlite": f"sqlite:{tmp_path}/queue.db"}.get(
        request.param
    ) or f"{server and server.url}"
    if server:
        server.stop()


class TestDeadlines:
    @pytest.mark.parametrize(("took", "moves"), [(60.0, 60.0), (250.0, LIMIT_S)])
    async def test_deadline_and_order_move_by_the_cold_start_up_to_the_limit(
        self, url: str, took: float, moves: float
    ) -> None:
        """Given a request for a pool that sleeps, then its deadline and its place move with it, in every queue."""
        clock = ManualClock()
        queue = queues.open(url, clock)
        scheduler = Scheduler(
            queue, specs=[CARD], clock=clock, order="edf", scale_to_zero=ASLEEP, cold_start_limit=LIMIT_S
        )
        await scheduler.registry.declare([CARD])
        await come(scheduler, WORKER, ENCODE, DECODE)
        await scheduler.registry.model_specs()
        before = await submitted(scheduler, timeout=1000)
        assert before.deadline is not None and before.order == before.deadline
        clock.advance(took)
        (after,) = await woken(scheduler, before)
        assert (after.deadline, after.order) == (before.deadline + moves, before.order + moves)
        (waits,) = await queue.peek(ENCODE)
        assert (waits.order, waits.deadline, waits.attempt) == (after.order, after.deadline, 1)
        assert len(await run_to_the_end(scheduler)) == 3
        await scheduler.close()
        await queue.close()

    async def test_cold_start_does_not_requeue_tasks_without_edf(self) -> None:
        async with sleeping() as (scheduler, clock):
            first, second = [await submitted(scheduler, timeout=1000) for _ in range(2)]
            clock.advance(50)
            (after,) = await woken(scheduler, first)
            assert after.order == first.order == 0 and after.deadline == (first.deadline or 0) + 50
            assert [task.request for task in await scheduler.queue.peek(ENCODE)] == [first.id, second.id]

    async def test_cold_start_adds_no_deadline_to_a_request_without_one(self) -> None:
        async with sleeping() as (scheduler, clock):
            context = await submitted(scheduler)
            clock.advance(50)
            (after,) = await woken(scheduler, context)
            since, until = slept(after)["denoise.0"]
            assert (after.deadline, until - since) == (None, 50.0)

    async def test_waiting_task_moves_pool_and_order_in_one_commit(self) -> None:
        async with sleeping(order="edf") as (scheduler, clock):
            context = await submitted(scheduler, timeout=500)
            (encode,) = await take(scheduler, ENCODE)
            await scheduler.complete(done(encode), WORKER)
            clock.advance(10)
            version = (await scheduler.queue.load(context.id)).context.version
            await come(scheduler, "c", CPU)
            await settled(scheduler, [context])
            (waits,) = await scheduler.queue.peek(CPU)
            assert (waits.order, waits.attempt) == (context.order + 10, 1)
            assert (await scheduler.queue.load(context.id)).context.version == version + 1


@in_virtual_time
async def test_request_expires_at_its_moved_deadline_or_cold_start_limit() -> None:
    """Given a deadline after 30 s and a pool that is awake after 60, then it ends at 90; and at 130 if none comes."""
    clock = VirtualClock()
    for comes, ends in ((True, 90.0), (False, 30.0 + LIMIT_S)):
        queue = MemoryQueue(clock)
        scheduler = Scheduler(
            queue, specs=[CARD], clock=clock, scale_to_zero=ASLEEP, cold_start_limit=LIMIT_S, lease_ttl=3600
        )
        await scheduler.registry.declare([CARD])
        await queue.register(info(WORKER, ENCODE, DECODE))
        await scheduler.registry.model_specs()
        await scheduler.start()
        began = clock.now()
        context = await submitted(scheduler, timeout=30)
        if comes:
            await asyncio.sleep(60)
            await queue.register(info("d", DENOISE))
            await scheduler.maintenance.on_worker_registered()
        assert [event.type async for event in queue.watch(context.id)][-1] == "failed"
        assert clock.now() - began == pytest.approx(ends, abs=0.1)
        error = (await queue.load(context.id)).context.error
        assert error and ("--cold-start-timeout" in error.message) == (not comes)
        await scheduler.close()


@in_virtual_time
async def test_pool_scaled_to_zero_while_requests_wait_starts_for_them() -> None:
    clock = VirtualClock()
    queue = MemoryQueue(clock)
    scheduler = Scheduler(
        queue, specs=[CARD], clock=clock, scale_to_zero=ASLEEP, cold_start_limit=LIMIT_S, lease_ttl=3600
    )
    await scheduler.registry.declare([CARD])
    await queue.register(info(WORKER, ENCODE, DENOISE, DECODE))
    await scheduler.registry.model_specs()
    await scheduler.start()
    context = await submitted(scheduler, timeout=30)
    assert slept(context) == {}
    await queue.register(info(WORKER, ENCODE, DECODE))
    await asyncio.sleep(12)
    assert scheduler.awaited_condition(await queue.load(context.id))[0] == "cold_start"
    await asyncio.sleep(60)
    assert (await queue.load(context.id)).status == "queued"
    await scheduler.close()


@in_virtual_time
async def test_scheduler_enforces_a_deadline_moved_by_another_scheduler() -> None:
    """Given a scheduler that has accepted a request, and another one that moved its deadline and is gone, then the
    first one ends it at the moved one."""
    clock = VirtualClock()
    queue = MemoryQueue(clock)
    first, second = (
        Scheduler(queue, specs=[CARD], clock=clock, scale_to_zero=ASLEEP, cold_start_limit=LIMIT_S, lease_ttl=3600)
        for _ in "12"
    )
    await first.registry.declare([CARD])
    await queue.register(info(WORKER, ENCODE, DENOISE, DECODE))
    await first.registry.model_specs()
    began = clock.now()
    context = await submitted(first, timeout=30)
    await queue.register(info(WORKER, ENCODE, DECODE))
    await second.start()
    await asyncio.sleep(12)
    await second.close()
    assert [event.type async for event in queue.watch(context.id)][-1] == "failed"
    assert clock.now() - began == pytest.approx(30.0 + LIMIT_S, abs=0.1)
    await first.close()


class TestWaiting:
    @settings(max_examples=examples(50), deadline=None)
    @given(
        looks=st.lists(st.tuples(st.floats(0.1, 50), st.sets(st.sampled_from([ENCODE, DENOISE, DECODE]))), max_size=8),
        limit=st.floats(0, 100),
    )
    @example(looks=[(0.5, {ENCODE, DENOISE}), (1.0, {ENCODE}), (1.0, {ENCODE, DENOISE}), (1.0, set())], limit=3.0)
    def test_deadline_moves_only_forward_and_at_most_by_the_cold_start_limit(
        self, looks: list[tuple[float, set[str]]], limit: float
    ) -> None:
        plan = ExecutionPlan(tuple(PlannedStage(pool, "", pool, (), {}, 0, False) for pool in CARD.pools().values()))
        states = {stage.name: StageState() for stage in plan.stages}
        context = request_context(GenerationRequest("r", CARD.name, {}), plan, stages=states, deadline=10.0)
        wall, began = 1000.0, 1000.0
        for seconds, asleep in looks:
            wall += seconds
            before, context = context, record_cold_starts(context, asleep, wall, limit)
            assert {pool for pool, state in context.stages.items() if state.waits_for_cold_start} == asleep
            assert before.deadline and context.deadline
            assert before.deadline <= context.deadline <= 10.0 + limit + 1e-6
            assert context.deadline <= 10.0 + wall - began + 1e-6
            latest = latest_end(context, limit)
            assert latest is not None and latest >= (context.deadline or 0)
            assert record_cold_starts(context, asleep, wall + 1, limit) is context
