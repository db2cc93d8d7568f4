"""Who goes first, and to whom: each rule on a recorded mix of requests, by a clock that stands still by itself."""

from __future__ import annotations

import asyncio
import random
from statistics import fmean

import msgspec
import pytest

from tests.scheduler.model import CARD, DENOISE, params
from tests.scheduler.test_scheduler import done, info
from tools.asking import asking
from unfuse.core.messages import LeasesGranted, Register, RequestTasks, StorageLocations, TaskCompleted
from unfuse.core.plan import Pipeline
from unfuse.core.request import ResultFile, Timings
from unfuse.core.task import Lease
from unfuse.queues.base import QueueLimits
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.admission import NO_HURRY_S, PATIENCE, Order
from unfuse.scheduler.backpressure import Dispatch
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.stages import specs
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import lease_request

MAKE = msgspec.structs.replace(specs.DENOISE, name="make", components=("vae",), outputs=())
ONE_STAGE = msgspec.structs.replace(CARD, pipeline=Pipeline((MAKE,)))
POOL = frozenset(ONE_STAGE.pools().values())


class Asked(msgspec.Struct, frozen=True):
    """One line of a trace: when who asked for how many seconds of work, and how long it may take."""

    at: float
    seconds: int
    tenant: str = "default"
    patience: float | None = None


class Told(msgspec.Struct, frozen=True):
    """What became of it: when it was begun and done, seconds since the beginning of the trace."""

    asked: Asked
    began: float
    ended: float

    @property
    def wait(self) -> float:
        return self.began - self.asked.at

    @property
    def in_time(self) -> bool:
        return self.asked.patience is None or self.ended <= self.asked.at + self.asked.patience


def mix(count: int = 100) -> list[Asked]:
    """A little more than one machine can do, short and long, relaxed and in a hurry."""
    dice, at, trace = random.Random(4), 0.0, []
    for _ in range(count):
        at += dice.expovariate(1 / 3.0)
        seconds = dice.choice([1, 1, 1, 2, 4, 12])
        trace.append(Asked(at, seconds, dice.choice("ab"), seconds + dice.choice([5.0, 60.0, 400.0])))
    return trace


class Machine:
    """A scheduler in some order, and one worker that makes one second of a request a second."""

    def __init__(self, order: Order) -> None:
        self.clock = ManualClock()
        self.scheduler = Scheduler(
            MemoryQueue(self.clock), limits=QueueLimits(10**4, 10**4), clock=self.clock, order=order
        )
        self.asked: dict[str, Asked] = {}

    async def submit(self, asked: Asked) -> str:
        work = params() | {"width": 1, "height": 1, "num_inference_steps": asked.seconds}
        record = await self.scheduler.submit(*asking(ONE_STAGE, work, tenant=asked.tenant, timeout=asked.patience))
        self.asked[record.context.id] = asked
        return record.context.id

    async def lease(self) -> list[Lease]:
        return await self.scheduler.queue.lease("w", lease_request(*POOL), 1e6)

    async def finish(self, lease: Lease, seconds: float) -> None:
        files = (ResultFile(0, "image/png", 1, ""),)
        await self.scheduler.complete(TaskCompleted(lease.claim, None, files, Timings(run_s=seconds)), "w")

    async def run(self, trace: list[Asked]) -> list[Told]:
        """Live through a trace; what was told, in the order in which it was done. The model was measured before."""
        await self.submit(Asked(0.0, 1))
        await self.finish((await self.lease())[0], 1.0)
        start, coming, told = self.clock.now(), sorted(trace, key=lambda asked: asked.at), []

        async def until(at: float) -> None:
            while coming and coming[0].at <= at:
                self.clock.advance(max(0.0, start + coming[0].at - self.clock.now()))
                await self.submit(coming.pop(0))
            self.clock.advance(max(0.0, start + at - self.clock.now()))

        while len(told) < len(trace):
            if not (leases := await self.lease()):
                await until(coming[0].at)
                continue
            began, asked = self.clock.now() - start, self.asked[leases[0].task.request]
            await until(began + asked.seconds)
            await self.finish(leases[0], float(asked.seconds))
            told.append(Told(asked, began, began + asked.seconds))
        await self.scheduler.close()
        return told


async def test_fifo_is_the_order_of_arrival() -> None:
    told = await Machine("fifo").run(mix())
    assert [one.asked for one in told] == mix()


async def test_edf_misses_less_than_half_of_the_deadlines_that_fifo_misses() -> None:
    fifo, edf = await Machine("fifo").run(mix()), await Machine("edf").run(mix())
    assert 2 * sum(not one.in_time for one in edf) < sum(not one.in_time for one in fifo)


async def test_shortest_has_lower_mean_wait_than_fifo() -> None:
    fifo, shortest = await Machine("fifo").run(mix()), await Machine("shortest").run(mix())
    assert fmean(one.wait for one in shortest) < 0.7 * fmean(one.wait for one in fifo)


async def test_fair_order_shares_time_equally_between_busy_tenants() -> None:
    """One asks for much at once, in large pieces; the other for as much, in small ones."""
    trace = [Asked(0.0, 8, "large") for _ in range(15)] + [Asked(1.0, 1, "small") for _ in range(120)]
    told = await Machine("fair").run(trace)
    for moment in range(20, 220, 20):
        done = [one for one in told if one.ended <= moment]
        shares = [sum(one.asked.seconds for one in done if one.asked.tenant == name) for name in ("large", "small")]
        assert abs(shares[0] - shares[1]) <= 16
    fifo = await Machine("fifo").run(trace)
    assert all(one.asked.tenant == "large" for one in fifo[:15])


async def test_fair_order_serves_a_light_tenant_ahead_of_a_backlog() -> None:
    trace = [Asked(0.0, 2, "greedy") for _ in range(100)] + [Asked(10.0 * n, 1, "modest") for n in range(1, 15)]
    told = await Machine("fair").run(trace)
    running, next_one = 2.0, 2.0
    assert max(one.wait for one in told if one.asked.tenant == "modest") <= running + next_one


async def test_shortest_order_does_not_starve_long_requests() -> None:
    """A long one among short ones that never stop coming: it is passed for as long as is said, and no longer."""
    trace = [Asked(0.0, 10)] + [Asked(float(n) / 2, 1) for n in range(600)]
    (long,) = [one for one in await Machine("shortest").run(trace) if one.asked.seconds == 10]
    assert 0 < long.wait <= 2 * 10 * PATIENCE + 1
    passed = [one for one in trace if one.seconds == 1 and one.at <= 9 * PATIENCE]
    assert long.wait <= len(passed) + 1


async def test_edf_order_does_not_starve_requests_without_a_deadline() -> None:
    """What has no deadline goes behind deadlines of the next day, before those of later ones."""
    machine = Machine("edf")
    relaxed = await machine.submit(Asked(0.0, 1))
    sooner = await machine.submit(Asked(0.0, 1, patience=NO_HURRY_S - 1))
    machine.clock.advance(NO_HURRY_S)
    later = await machine.submit(Asked(0.0, 1, patience=1.0))
    order = [(await machine.lease())[0].task.request for _ in range(3)]
    assert order == [sooner, relaxed, later]
    await machine.scheduler.close()


@pytest.mark.parametrize("order", ["fifo", "edf", "shortest", "fair"])
async def test_priority_precedes_the_configured_order(order: Order) -> None:
    machine = Machine(order)
    for priority in (0, 5, 0):
        await machine.scheduler.submit(*asking(ONE_STAGE, params(), priority=priority, timeout=50.0 + priority))
    assert [(await machine.lease())[0].task.priority for _ in range(3)] == [5, 0, 0]
    await machine.scheduler.close()


async def settle() -> None:
    """Let everything go on until it waits."""
    for _ in range(50):
        await asyncio.sleep(0)


class RemoteWaiters:
    """Two workers of one pool on two nodes, whose Asks wait while tasks come one by one."""

    def __init__(self, dispatch: Dispatch) -> None:
        clock = ManualClock()
        self.scheduler = Scheduler(MemoryQueue(clock), clock=clock)
        self.dispatcher = Dispatcher(self.scheduler, [], StorageLocations(""), dispatch=dispatch)

    async def join(self, name: str, slots: int) -> None:
        worker = msgspec.structs.replace(info(name, DENOISE), node=f"node of {name}", slots=slots)
        await self.dispatcher.answer(name.encode(), Register(worker, (CARD,)))

    def ask(self, name: str, slots: int) -> asyncio.Task[list[Lease]]:
        async def asking() -> list[Lease]:
            granted = await self.dispatcher.answer(name.encode(), RequestTasks(slots, None, 20.0))
            assert isinstance(granted, LeasesGranted)
            return list(granted.leases)

        return asyncio.create_task(asking())

    async def encoded(self, node: str = "node-1") -> str:
        """A request whose next task is ready for denoising, its input on that node."""
        request = (await self.scheduler.submit(*asking(CARD, params()))).context.id
        (lease,) = await self.scheduler.queue.lease("e", lease_request(*(set(CARD.pools().values()) - {DENOISE})), 60.0)
        report = done(lease)
        assert report.output is not None
        output = msgspec.structs.replace(report.output, owner="e", node=node, nbytes=9)
        await self.scheduler.complete(msgspec.structs.replace(report, output=output), "e")
        return request


@pytest.mark.parametrize(
    "dispatch, served",
    [("round_robin", ["few", "many", "few", "many"]), ("max_free_slots", ["many", "many", "many", "few"])],
)
async def test_waiting_workers_are_served_round_robin_or_by_free_slots(dispatch: Dispatch, served: list[str]) -> None:
    waiting = RemoteWaiters(dispatch)
    free = {"few": 1, "many": 4}
    asks = {}
    for name, slots in free.items():
        await waiting.join(name, 4)
        asks[name] = waiting.ask(name, slots)
        await settle()
    by = []
    for _ in served:
        await waiting.encoded()
        await asyncio.wait(asks.values(), return_when=asyncio.FIRST_COMPLETED)
        (name,) = [name for name, ask in asks.items() if ask.done()]
        by.append(name)
        free[name] -= name == "many"
        asks[name] = waiting.ask(name, free[name])
        await settle()
    for name in free:
        waiting.dispatcher._drop_peer(name.encode())
    await asyncio.wait(asks.values())
    assert by == served


async def test_locality_leases_tasks_to_the_node_of_their_inputs() -> None:
    waiting = RemoteWaiters("locality")
    for name in ("a", "b"):
        await waiting.join(name, 2)
    lies = [await waiting.encoded(f"node of {name}") for name in "abba"]
    for name, nearby in (("b", lies[1:3]), ("a", [lies[0], lies[3]])):
        given = [*await waiting.ask(name, 2), *await waiting.ask(name, 1)]
        assert [lease.task.request for lease in given] == nearby
