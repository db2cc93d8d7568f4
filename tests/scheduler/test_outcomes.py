"""Workers that make other bytes are other pools: who gets a request, and what becomes of it when they come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE, params
from tests.scheduler.test_scheduler import WORKER, done, info, pass_by, scheduling, take
from tools.asking import asking
from unfuse.core.messages import CheckpointSaved, LeasesGranted, Register, RequestTasks, StorageLocations, TaskFailed
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import declared_pool, numerics_of, pool_with_numerics
from unfuse.core.request import RequestContext, Timings
from unfuse.core.task import Lease
from unfuse.queues.base import DeclaredModels
from unfuse.scheduler.backpressure import AHEAD
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.queue_samples import count_waiting

CPU, GPU = f"{DENOISE}@cpu", f"{DENOISE}@gpu"


async def come(scheduler: Scheduler, name: str, *pools: str) -> None:
    """A worker of these pools says hello at another scheduler, and this one looks."""
    await scheduler.queue.register(info(name, *pools), [CARD])
    await scheduler.registry.workers()


async def encoded(scheduler: Scheduler, seed: int = 7) -> RequestContext:
    """A request whose denoising waits."""
    record = await scheduler.submit(*asking(CARD, params(seed)))
    (encode,) = await take(scheduler, ENCODE)
    await scheduler.complete(done(encode), WORKER)
    return (await scheduler.queue.load(record.context.id)).context


async def denoised(scheduler: Scheduler, pool: str, seconds: float) -> None:
    """A request is run whose denoising takes so long."""
    (lease,) = await take(scheduler, pool)
    report = done(lease)
    await scheduler.complete(msgspec.structs.replace(report, timings=Timings(run_s=seconds, steps=1)), WORKER)
    (decode,) = await take(scheduler, DECODE)
    await scheduler.complete(done(decode), WORKER)


def pools_of(context: RequestContext) -> list[str]:
    return [stage.pool for stage in context.plan.stages]


def checkpoint(lease: Lease) -> ObjectRef:
    task = lease.task
    return ObjectRef("c", WORKER, "node-1", task.request, task.stage, task.attempt, 1, 0, (), (), b"", 0.0)


class TestNames:
    def test_pool_name_includes_the_numerics_hash(self) -> None:
        pool = pool_with_numerics(DENOISE, {"batching": "exact", "torch": "2"})
        assert (declared_pool(pool), len(numerics_of(pool))) == (DENOISE, 8)
        assert pool == pool_with_numerics(DENOISE, {"torch": "2", "batching": "exact"})
        assert pool != pool_with_numerics(DENOISE, {"torch": "2", "batching": "batched"})

    def test_pool_name_without_numerics_is_the_declared_name(self) -> None:
        assert pool_with_numerics(DENOISE, {}) == DENOISE == declared_pool(DENOISE)
        assert numerics_of(DENOISE) == ""


class TestWhoGetsIt:
    async def test_request_queued_before_its_workers_moves_to_their_pools(self) -> None:
        async with scheduling() as (scheduler, _):
            dispatcher = Dispatcher(scheduler, [], StorageLocations("memory"))
            before = (await scheduler.submit(*asking(CARD, params()))).context
            assert pools_of(before) == [ENCODE, DENOISE, DECODE]
            await dispatcher.answer(b"w", Register(info(WORKER, f"{ENCODE}@1", CPU, f"{DECODE}@1"), (CARD,)))
            after = await waits_in(scheduler, before.id, f"{ENCODE}@1")
            assert pools_of(after) == [f"{ENCODE}@1", DENOISE, DECODE]
            for pool in (f"{ENCODE}@1", CPU, f"{DECODE}@1"):
                (lease,) = await take(scheduler, pool)
                await scheduler.complete(done(lease), WORKER)
            assert (await scheduler.queue.load(before.id)).context.status == "completed"

    async def test_new_request_is_planned_for_the_live_pools(self) -> None:
        async with scheduling() as (scheduler, _):
            await come(scheduler, WORKER, f"{ENCODE}@1", CPU, DECODE)
            context = (await scheduler.submit(*asking(CARD, params(), n=2))).context
            assert pools_of(context) == [f"{ENCODE}@1", CPU, CPU, DECODE, DECODE]

    async def test_pool_with_the_earliest_predicted_completion_is_chosen(self) -> None:
        async with scheduling() as (scheduler, _):
            await come(scheduler, WORKER, ENCODE, DECODE)
            for name, pool, seconds in (("c", CPU, 8.0), ("g", GPU, 1.0)):
                await come(scheduler, name, pool)
                await encoded(scheduler)
                await denoised(scheduler, pool, seconds)
                await scheduler.queue.unregister(name)
            await come(scheduler, "c", CPU)
            await come(scheduler, "g", GPU)
            chosen = [
                pools_of((await scheduler.submit(*asking(CARD, params(number)))).context)[1] for number in range(20)
            ]
            assert chosen[:7] == [GPU] * 7
            assert 2 <= chosen.count(CPU) <= 4

    async def test_workers_without_numerics_use_the_declared_pools(self) -> None:
        async with scheduling() as (scheduler, _):
            await come(scheduler, WORKER, ENCODE, DENOISE, DECODE)
            assert pools_of((await scheduler.submit(*asking(CARD, params()))).context) == [ENCODE, DENOISE, DECODE]


async def waits_in(scheduler: Scheduler, request: str, pool: str) -> RequestContext:
    """The context once its first task waits in that pool."""
    for _ in range(100):
        if await count_waiting(scheduler.queue, pool):
            return (await scheduler.queue.load(request)).context
        await asyncio.sleep(0)
    raise AssertionError(f"nothing came to wait in {pool}")


class TestWhenWorkersGo:
    async def test_queued_tasks_of_a_lost_pool_move_to_a_live_pool(self) -> None:
        async with scheduling() as (scheduler, _):
            await come(scheduler, WORKER, ENCODE, DECODE)
            await come(scheduler, "c", CPU)
            contexts = [await encoded(scheduler, seed) for seed in range(3)]
            await scheduler.queue.unregister("c")
            await settled(scheduler, contexts)
            assert await count_waiting(scheduler.queue, CPU) == 3, "nobody else could serve it"
            await come(scheduler, "g", GPU)
            await settled(scheduler, contexts)
            assert (await count_waiting(scheduler.queue, CPU), await count_waiting(scheduler.queue, GPU)) == (0, 3)
            leases = await take(scheduler, GPU, slots=9)
            assert [lease.task.params["seed"] for lease in leases] == [0, 1, 2], "in the order in which they came"
            assert {lease.task.attempt for lease in leases} == {1}, "nobody had begun"

    async def test_running_task_stays_in_its_pool_if_its_worker_unregisters(self) -> None:
        async with scheduling() as (scheduler, _):
            await come(scheduler, WORKER, ENCODE, DECODE)
            await come(scheduler, "c", CPU)
            context = await encoded(scheduler)
            (lease,) = await take(scheduler, CPU)
            await scheduler.queue.unregister("c")
            await come(scheduler, "g", GPU)
            await settled(scheduler, [context])
            await scheduler.complete(done(lease), WORKER)
            assert pools_of((await scheduler.queue.load(context.id)).context)[1] == CPU

    @pytest.mark.parametrize(("again", "goes_on"), [(CPU, True), (GPU, False)])
    async def test_checkpoint_is_used_only_by_a_pool_with_the_same_numerics(self, again: str, goes_on: bool) -> None:
        async with scheduling() as (scheduler, _):
            await come(scheduler, WORKER, ENCODE, DECODE)
            await come(scheduler, "c", CPU)
            await encoded(scheduler)
            (lease,) = await take(scheduler, CPU)
            await scheduler.save_checkpoint(CheckpointSaved(lease.claim, checkpoint(lease), 5), WORKER)
            await scheduler.queue.unregister("c")
            await come(scheduler, "again", again)
            await scheduler.fail(TaskFailed(lease.claim, "crash", "bang"), WORKER)
            (retry,) = await take(scheduler, again)
            assert ((await scheduler.add_resume_data(retry)).checkpoint is not None) == goes_on

    async def test_expired_task_is_requeued_to_a_live_pool(self) -> None:
        async with scheduling() as (scheduler, clock):
            await come(scheduler, WORKER, ENCODE, DECODE)
            await come(scheduler, "c", CPU)
            await encoded(scheduler)
            (lease,) = await take(scheduler, CPU)
            await pass_by(scheduler, clock, scheduler.lease_ttl + 1)
            await come(scheduler, "g", GPU)
            for late in await scheduler.queue.sweep_expired(scheduler.lease_ttl):
                await scheduler.maintenance.expire_lease(late)
            (again,) = await take(scheduler, GPU)
            assert (again.task.key, again.task.attempt) == (lease.task.key, 2)


async def settled(scheduler: Scheduler, contexts: Sequence[RequestContext]) -> None:
    """The scheduler looks at who is there, and at these."""
    await scheduler.registry.workers()
    for context in contexts:
        await scheduler._transitions.move_waiting(await scheduler.queue.load(context.id))


class TestTwoCardsOfOneName:
    async def test_newest_model_spec_is_used_and_the_conflict_is_logged_once(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = msgspec.structs.replace(CARD, weights=CARD.weights | {"transformer": "0" * 32})
        async with scheduling() as (scheduler, _):
            await scheduler.queue.register(info("old", ENCODE, DENOISE, DECODE), [CARD])
            await scheduler.queue.register(info("new", *other.pools().values()), [other])
            for _ in range(3):
                cards = await scheduler.registry.model_specs()
            assert cards[CARD.name] == other
            said = capsys.readouterr()
            assert (said.out + said.err).count("has other weights") == 1
            record = await scheduler.submit(*asking(cards[CARD.name], params()))
            assert pools_of(record.context)[1] == other.pools()["denoise"]


class TestWhoIsExpected:
    async def test_pool_state_is_live_scaled_to_zero_or_unavailable(self) -> None:
        async with scheduling() as (scheduler, _):
            await scheduler.queue.declare("operator", DeclaredModels((CARD,), {DENOISE: 3}))
            await come(scheduler, WORKER, f"{ENCODE}@1")
            assert await scheduler.registry.unavailable_pools() == {CARD.name: [DECODE]}
            states = {pool: scheduler.registry.state(pool) for pool in (f"{ENCODE}@1", DENOISE, DECODE)}
            assert list(states.values()) == ["live", "scaled_to_zero", "unavailable"]
            assert list(scheduler.registry.pools({CARD.name: CARD})) == [DENOISE, f"{ENCODE}@1", DECODE]

    async def test_backpressure_of_a_scaled_to_zero_pool_uses_its_declared_slots(self) -> None:
        async with scheduling() as (scheduler, _):
            await scheduler.queue.declare("operator", DeclaredModels((CARD,), {DENOISE: 3}))
            dispatcher = Dispatcher(scheduler, [], StorageLocations("memory"))
            worker = msgspec.structs.replace(info(WORKER, ENCODE), slots=99)
            await dispatcher.answer(b"w", Register(worker, (CARD,)))
            for seed in range(20):
                await scheduler.submit(*asking(CARD, params(seed)))
            given = 0
            while (
                isinstance(granted := await dispatcher.answer(b"w", RequestTasks(1, None, 0.0)), LeasesGranted)
                and granted.leases
            ):
                (lease,) = granted.leases
                await dispatcher.answer(b"w", done(lease))
                given += 1
            assert given == AHEAD * 3 + 1

    async def test_declared_models_are_served_by_other_schedulers(self) -> None:
        async with scheduling() as (scheduler, clock):
            await scheduler.registry.declare([CARD])
            assert list(await Scheduler(scheduler.queue, clock=clock).registry.model_specs()) == [CARD.name]


async def test_pool_is_exact_while_exact_workers_are_live() -> None:
    async with scheduling(lease_ttl=5.0) as (scheduler, clock):
        registry = scheduler.registry
        for name, pool, outcome in (
            ("exact", f"{DENOISE}@1", {"batching": "exact"}),
            ("batched", f"{DENOISE}@2", {"batching": "batched"}),
            ("silent", f"{DENOISE}@3", {}),
            ("either", f"{DENOISE}@4", {"batching": "exact-or-batched"}),
        ):
            await scheduler.queue.register(msgspec.structs.replace(info(name, pool), numerics=outcome), [CARD])
        await registry.workers()
        assert [registry.is_exact(f"{DENOISE}@{number}") for number in (1, 2, 3, 4, 5)] == [True, *[False] * 4]
        await pass_by(scheduler, clock, 5.1)
        await registry.workers()
        assert not registry.is_exact(f"{DENOISE}@1")
