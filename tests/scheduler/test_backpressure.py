"""What workers may take, so that a backlog waits where it holds no memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE, PIPELINE, params
from tests.scheduler.test_scheduler import info
from tools.asking import asking
from unfuse.core.errors import Overloaded
from unfuse.core.messages import (
    Accepted,
    Heartbeat,
    HeartbeatReply,
    LeasesGranted,
    Register,
    RequestTasks,
    StorageLocations,
    TaskCompleted,
    ToScheduler,
    ToWorker,
)
from unfuse.core.modalities import OutputSize
from unfuse.core.model_spec import ModelSpec
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import Pipeline, StageSpec
from unfuse.core.request import ResultFile, Timings
from unfuse.core.task import Lease
from unfuse.queues.base import QueueLimits, RegisteredWorker
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.backpressure import AHEAD, Backpressure, InFlight, ordinal
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock
from unfuse.testing.virtual_time import VirtualClock, in_virtual_time

MIB = 1 << 20
ARENA = 256 * MIB
ROOMS = (OutputSize(6 * MIB), OutputSize(20 * MIB), OutputSize())
"""Of an encoding, latents, and nothing: 42 encodings, or 12 latents, fill an arena."""

BIG = msgspec.structs.replace(
    CARD,
    pipeline=Pipeline(
        tuple(msgspec.structs.replace(s, output_size=room) for s, room in zip(PIPELINE.stages, ROOMS, strict=True))
    ),
)


def member(identity: str, *pools: str, slots: int = 1) -> RegisteredWorker:
    return RegisteredWorker(msgspec.structs.replace(info(identity, *pools), slots=slots, arena_bytes=ARENA), (), 0.0)


@in_virtual_time
async def test_idle_worker_with_the_lowest_pod_ordinal_is_served_first() -> None:
    """Given pods of one StatefulSet that all wait, the last one for longest, then each task goes to the lowest that is
    free, whatever holds fewer tasks first, and where taking turns is asked for nothing of that is so."""
    for dispatch, served in (
        ("locality", ["pod-2", "pod-10", "pod-11"]),
        ("round_robin", ["pod-11", "pod-10", "pod-2"]),
    ):
        clock = VirtualClock()
        scheduler = Scheduler(MemoryQueue(clock), specs=[CARD], clock=clock)
        dispatcher, asks = Dispatcher(scheduler, [], StorageLocations("memory"), dispatch=dispatch), {}  # type: ignore[arg-type]
        for name in ("pod-11", "pod-10", "pod-2"):
            worker = msgspec.structs.replace(info(name, ENCODE), node=name)
            await dispatcher.answer(name.encode(), Register(worker, (CARD,)))
            asks[name] = asyncio.create_task(dispatcher.answer(name.encode(), RequestTasks(1, None, 5.0)))
            await asyncio.sleep(0.01)
        found = []
        for seed in range(3):
            await scheduler.submit(*asking(CARD, params(seed)))
            done, _ = await asyncio.wait(asks.values(), return_when=asyncio.FIRST_COMPLETED)
            found += [name for name in [*asks] if asks[name] in done and asks.pop(name)]
        assert found == served
        await scheduler.close()


def test_node_ordinal_ranks_below_one_task_and_is_zero_without_a_number() -> None:
    assert [ordinal(name) for name in ("0123", "node-a", "u-dit-0", "u-dit-7")] == [0.0, 0.0, 0.0, 0.007]
    assert ordinal("u-dit-5000") < 1


class TestWhatAWorkerMayTake:
    def test_pool_is_blocked_by_four_queued_tasks_per_slot_of_the_next_pool(self) -> None:
        members = [member("e", ENCODE), member("d", DENOISE, slots=2), member("a", DENOISE, DECODE, slots=3)]
        flow = Backpressure.of([CARD], members)
        offers = [flow.lease_request(member.info, RequestTasks(1, None, 0.0), {}).pools for member in members]
        assert offers[0][ENCODE].backpressure == {DENOISE: AHEAD * 5}
        assert {pool: offer.backpressure for pool, offer in offers[2].items()} == {
            DENOISE: {DECODE: AHEAD * 3},
            DECODE: {},
        }

    def test_later_pools_are_offered_first_and_earlier_ones_reserve_arena(self) -> None:
        everything = member("a", ENCODE, DENOISE, DECODE)
        flow = Backpressure.of([CARD], [everything])
        keep = flow.reserved_bytes(everything.info, InFlight())
        assert keep == {ENCODE: ARENA // 2, DENOISE: 0}
        offers = flow.lease_request(everything.info, RequestTasks(1, ARENA, 0.0), keep).pools
        assert {pool: offer.stage_depth for pool, offer in offers.items()} == {ENCODE: 0, DENOISE: 1, DECODE: 2}
        assert {pool: offer.amounts["arena"] for pool, offer in offers.items()} == {
            ENCODE: ARENA - ARENA // 2,
            DENOISE: ARENA,
            DECODE: ARENA,
        }

    def test_only_later_pools_are_offered_before_a_model_swap(self) -> None:
        everything = member("a", ENCODE, DENOISE, DECODE)
        flow = Backpressure.of([CARD], [everything])
        for ended, offered in ((ENCODE, {DENOISE, DECODE}), (f"{DENOISE}@1a2b", {DECODE}), (DECODE, set())):
            assert (
                flow.lease_request(everything.info, RequestTasks(1, None, 0.0, after_pool=ended), {}).pools.keys()
                == offered
            )

    def test_worker_resources_are_offered_only_to_pools_that_need_them(self) -> None:
        stages = tuple(
            msgspec.structs.replace(stage, needs={"kv": OutputSize(fixed=3)} if stage.kind == "denoise" else {})
            for stage in CARD.pipeline.stages
        )
        card = msgspec.structs.replace(CARD, pipeline=Pipeline(stages))
        everything = member("a", ENCODE, DENOISE)
        ask = RequestTasks(1, None, 0.0, amounts={"kv": 7, "other": 9})
        assert {
            pool: offer.amounts
            for pool, offer in Backpressure.of([card], []).lease_request(everything.info, ask, {}).pools.items()
        } == {ENCODE: {"slots": 1}, DENOISE: {"slots": 1, "kv": 7}}
        without = Backpressure.of([card], []).lease_request(everything.info, RequestTasks(1, None, 0.0), {})
        assert without.pools[DENOISE].amounts == {"slots": 1, "kv": 0}

    def test_single_pool_worker_reserves_no_arena(self) -> None:
        encoder = member("e", ENCODE)
        assert Backpressure.of([CARD], [encoder]).reserved_bytes(encoder.info, InFlight()) == {ENCODE: 0}

    def test_cyclic_pools_do_not_block_each_other(self) -> None:
        def card(*components: str) -> ModelSpec:
            stages = tuple(
                StageSpec(f"s{n}", "denoise", (name,), (f"v{n - 1}",) if n else (), (f"v{n}",))
                for n, name in enumerate(components)
            )
            names = dict.fromkeys("xy", "")
            return msgspec.structs.replace(CARD, pipeline=Pipeline(stages), weights={n: n for n in names}, dtypes=names)

        x, y = "denoise::x:", "denoise::y:"
        flow = Backpressure.of([card("x", "y"), card("y", "x", "x")], [member("a", x, y)])
        assert flow.depth == {x: 2, y: 1}
        assert flow.later_depths == {x: {}, y: {x: AHEAD}}

    def test_lease_rank_follows_the_dispatch_policy(self) -> None:
        worker = member("a", DENOISE, slots=4).info
        flow, ask = Backpressure.of([CARD], []), RequestTasks(3, None, 0.0, affinity="size")
        told = {
            name: flow.lease_request(worker, ask, {}, name) for name in ("locality", "round_robin", "max_free_slots")
        }
        assert {name: (wanted.preferred_node, wanted.affinity, wanted.rank) for name, wanted in told.items()} == {
            "locality": ("node-1", "size", 1.001),
            "round_robin": ("", "", 0.0),
            "max_free_slots": ("", "", -3.0),
        }

    def test_shared_pool_offers_one_slot_and_ranks_less_loaded_workers_first(
        self,
    ) -> None:
        both, alone = member("a", ENCODE, DENOISE, slots=9), member("b", DENOISE, slots=9)
        flow = Backpressure.of([CARD], [both, alone])
        offers = flow.lease_request(both.info, RequestTasks(9, None, 0.0), {}).pools
        assert {pool: offer.amounts["slots"] for pool, offer in offers.items()} == {ENCODE: 9, DENOISE: 1}
        ranks = [flow.lease_request(alone.info, RequestTasks(free, None, 0.0), {}).rank for free in (9, 8, 3)]
        assert ranks == sorted(ranks) and len({*ranks}) == 3


class Worker:
    """A worker with an arena that is counted, not held. It does one task after the other, its slots full if it can."""

    def __init__(self, dispatcher: Dispatcher, name: str, *pools: str) -> None:
        self.dispatcher, self.peer = dispatcher, name.encode()
        self.info = msgspec.structs.replace(info(name, *pools), slots=2, arena_bytes=ARENA)
        self.active: list[Lease] = []
        self.objects: dict[str, int] = {}
        self.peak = 0

    async def say(self, message: ToScheduler) -> ToWorker:
        answer = await self.dispatcher.answer(self.peer, message)
        assert answer is not None
        return answer

    def used(self) -> int:
        return sum(self.objects.values())

    async def take_part(self) -> bool:
        """Ask, do one task, beat; whether there was anything to do."""
        reserved = sum(lease.task.planned.output_size for lease in self.active)
        room = ARENA - self.used() - reserved if self.objects or self.active else None
        granted = await self.say(RequestTasks(self.info.slots - len(self.active), room, 0.0))
        assert isinstance(granted, LeasesGranted)
        self.active += granted.leases
        if self.active:
            await self.finish(self.active.pop(0))
        pulse = await self.say(Heartbeat(tuple(lease.claim for lease in self.active), tuple(self.objects)))
        assert isinstance(pulse, HeartbeatReply)
        assert pulse.ended_claims == ()
        for request in pulse.ended_requests:
            del self.objects[request]
        return bool(granted.leases or self.active or pulse.ended_requests)

    async def finish(self, lease: Lease) -> None:
        task, output, results = lease.task, None, ()
        if task.planned.final:
            results = (ResultFile(int(str(task.params["index"])), "image/png", 1, ""),)
        else:
            output = ObjectRef(
                f"{task.stage}@{task.attempt}",
                self.info.id,
                self.info.node,
                task.request,
                task.stage,
                task.attempt,
                1,
                task.planned.output_size,
                (),
                (),
                b"",
                0.0,
            )
            self.objects[task.request] = self.objects.get(task.request, 0) + task.planned.output_size
            self.peak = max(self.peak, self.used())
            assert self.peak <= ARENA
        assert await self.say(TaskCompleted(lease.claim, output, results, Timings())) == Accepted()


async def serve(workers: Sequence[tuple[str, ...]], requests: int) -> list[Worker]:
    """Have workers of these pools do that many requests, every tenth for three pictures, all queued before."""
    clock = ManualClock()
    scheduler = Scheduler(MemoryQueue(clock), limits=QueueLimits(10**4, 10**4), clock=clock, specs=[BIG])
    dispatcher = Dispatcher(scheduler, [], StorageLocations(""))
    here = [Worker(dispatcher, f"worker-{n}", *pools) for n, pools in enumerate(workers)]
    for worker in here:
        await worker.say(Register(worker.info, (BIG,)))
    ids = [
        (await scheduler.submit(*asking(BIG, params(), n=1 if number % 10 else 3))).context.id
        for number in range(requests)
    ]
    idle = 0
    while idle < 3:
        worked = [await worker.take_part() for worker in here]
        idle = 0 if any(worked) else idle + 1
    contexts = [(await scheduler.queue.load(request)).context for request in ids]
    assert {context.status for context in contexts} == {"completed"}
    assert {state.attempt for context in contexts for state in context.stages.values()} == {1}
    assert [worker.used() for worker in here] == [0] * len(here)
    return here


@pytest.mark.parametrize(
    "workers",
    [
        [(ENCODE, DENOISE, DECODE)],
        [(ENCODE,), (DENOISE,), (DECODE,)],
        [(ENCODE, DENOISE), (DENOISE, DECODE), (ENCODE, DENOISE, DECODE)],
    ],
    ids=["one for all", "one each", "some of each"],
)
async def test_thousand_requests_complete_in_arenas_with_space_for_a_dozen(workers: list[tuple[str, ...]]) -> None:
    here = await serve(workers, 1000 if len(workers[0]) != 2 else 300)
    if len(workers) == 3 and workers[0] == (ENCODE,):
        ahead = (AHEAD + 2) * 2 * 2 * ROOMS[0].fixed
        assert here[0].peak <= ahead < 1000 * ROOMS[0].fixed


LARGE = msgspec.structs.replace(
    BIG,
    pipeline=Pipeline(
        tuple(
            msgspec.structs.replace(s, output_size=room)
            for s, room in zip(PIPELINE.stages, (OutputSize(20 * MIB), OutputSize(0, MIB), OutputSize()), strict=True)
        )
    ),
)
"""Latents of it take a MiB a pixel: of 220 pixels nearly a whole arena."""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("urgent", [0, 5])
async def test_large_requests_complete_in_a_shared_arena_among_small_ones(workers: int, urgent: int) -> None:
    """Given many small requests and some that need more than half of an arena, then all of them complete: what has to
    stay free for the large ones is not filled with encodings that wait behind them."""
    clock = ManualClock()
    scheduler = Scheduler(MemoryQueue(clock), limits=QueueLimits(10**4, 10**4), clock=clock, specs=[LARGE])
    dispatcher = Dispatcher(scheduler, [], StorageLocations(""))
    here = [Worker(dispatcher, f"worker-{n}", ENCODE, DENOISE, DECODE) for n in range(workers)]
    for worker in here:
        await worker.say(Register(worker.info, (LARGE,)))
    ids = []
    for number in range(120):
        size = {7: 220, 3: 150}.get(number % 10, 10)
        record = await scheduler.submit(
            *asking(LARGE, params(width=size, height=1), priority=urgent * (size > 10 and number % 20 < 10))
        )
        ids.append(record.context.id)
        for worker in here if number > 20 else ():
            await worker.take_part()
    idle = 0
    while idle < 3:
        worked = [await worker.take_part() for worker in here]
        idle = 0 if any(worked) else idle + 1
    assert {(await scheduler.queue.load(request)).context.status for request in ids} == {"completed"}


@in_virtual_time
async def test_waiting_lease_request_ends_if_the_arena_reserve_grows() -> None:
    """Given a worker that waits with room for encodings, when a request comes whose latents take most of the arena,
    then the worker asks anew, and leaves that free."""
    clock = ManualClock()
    scheduler = Scheduler(MemoryQueue(clock), limits=QueueLimits(10**4, 10**4), clock=clock, specs=[LARGE])
    dispatcher = Dispatcher(scheduler, [], StorageLocations(""))
    worker = Worker(dispatcher, "worker", ENCODE, DENOISE, DECODE)
    await worker.say(Register(worker.info, (LARGE,)))
    waiting = asyncio.create_task(worker.say(RequestTasks(1, 200 * MIB, 10.0)))
    await asyncio.sleep(0.01)  # of virtual time: until all that there is waits
    await scheduler.submit(*asking(LARGE, params(width=220, height=1)))
    assert await waiting == LeasesGranted((), {})
    waiting = asyncio.create_task(worker.say(RequestTasks(1, 240 * MIB, 10.0)))
    granted = await waiting
    assert isinstance(granted, LeasesGranted) and [lease.task.stage for lease in granted.leases] == ["text_encode"]


async def test_rejected_and_ended_requests_are_not_counted_as_in_flight() -> None:
    """Given room for one request, when a larger one is refused and the first one ends, then only that was in flight."""
    scheduler = Scheduler(MemoryQueue(ManualClock()), limits=QueueLimits(max_active=1))
    first = await scheduler.submit(*asking(CARD, params()))
    small = scheduler.in_flight.largest([ENCODE, DENOISE])
    with pytest.raises(Overloaded):
        await scheduler.submit(*asking(CARD, params(width=640)))
    assert scheduler.in_flight.largest([ENCODE, DENOISE]) == small > 0
    await scheduler.cancel(first.context.id)
    assert scheduler.in_flight.largest([ENCODE, DENOISE]) == 0


async def test_unseen_in_flight_request_is_forgotten_at_the_second_sweep() -> None:
    record = await Scheduler(MemoryQueue(ManualClock())).submit(*asking(CARD, params()))
    in_flight = InFlight()
    in_flight.on_announced(record.context)
    in_flight.sweep()
    assert in_flight.largest([ENCODE]) > 0
    in_flight.sweep()
    assert in_flight.largest([ENCODE]) == 0
