"""Which set of weights a worker should have: by the rule alone, under load for hours, and by what waits in a queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from tests.examples import examples
from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE
from tests.scheduler.test_dispatcher import submit
from tests.scheduler.test_scheduler import done, info, scheduling
from tools.redis_server import RedisServer
from unfuse.core.messages import (
    Heartbeat,
    HeartbeatReply,
    LeasesGranted,
    Register,
    RequestTasks,
    StorageLocations,
    WorkerInfo,
)
from unfuse.core.model_spec import ModelSpec
from unfuse.core.worker_status import WorkerStatus
from unfuse.queues.base import PoolStats, QueueBackend, QueueStats, RegisteredWorker
from unfuse.queues.memory import MemoryQueue
from unfuse.queues.redis import RedisQueue
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.model_swaps import LOADING_SHARE, ModelBacklog, ModelSwaps, choose_model, min_stay_s
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.registry import Registry
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock

SOME = ModelBacklog(waiting=1, oldest_s=1.0, left_s=100.0)
NOTHING = ModelBacklog()


def test_busy_model_stays_loaded_for_the_minimum_stay() -> None:
    lines = {"a": SOME, "b": SOME}
    assert choose_model("a", lines, 2.0, min_stay_s(2.0) - 0.1, 0.0) == "a"
    assert choose_model("a", lines, 2.0, min_stay_s(2.0), 0.0) == "b"


def test_idle_model_is_swapped_after_being_idle_for_one_load_time() -> None:
    lines = {"a": NOTHING, "b": ModelBacklog(waiting=1, left_s=0.1)}
    assert choose_model("a", lines, 2.0, 5.0, 1.9) == "a"
    assert choose_model("a", lines, 2.0, 5.0, 2.0) == "b"


def test_no_model_is_loaded_without_waiting_tasks() -> None:
    assert choose_model("a", {"a": NOTHING, "b": NOTHING}, 2.0, 1e6, 1e6) == "a"
    assert (
        choose_model("a", {"a": NOTHING, "b": ModelBacklog(left_s=9.0)}, 2.0, 1e6, 1e6) == "a"
    )  # it waits for other stages


def test_backlog_below_the_load_time_waits_at_most_one_minimum_stay() -> None:
    little = ModelBacklog(waiting=1, oldest_s=1.0, left_s=0.5)
    assert choose_model("a", {"a": SOME, "b": little}, 2.0, 100.0, 0.0) == "a"
    old = msgspec.structs.replace(little, oldest_s=min_stay_s(2.0))
    assert choose_model("a", {"a": SOME, "b": old}, 2.0, 100.0, 0.0) == "b"


def test_model_with_the_oldest_waiting_task_is_loaded_next() -> None:
    lines = {"a": SOME, "b": SOME, "c": msgspec.structs.replace(SOME, oldest_s=2.0, left_s=50.0)}
    assert choose_model("a", lines, 2.0, 100.0, 0.0) == "c"


def test_model_on_other_workers_is_loaded_again_only_for_a_large_backlog() -> None:
    much = ModelBacklog(waiting=9, oldest_s=1.0, left_s=200.0, others=1)
    shared = msgspec.structs.replace(SOME, others=1)
    assert choose_model("a", {"a": shared, "b": much}, 2.0, 100.0, 0.0) == "b"
    assert choose_model("a", {"a": SOME, "b": much}, 2.0, 100.0, 0.0) == "a"  # the last one
    assert choose_model("a", {"a": NOTHING, "b": much}, 2.0, 100.0, 50.0) == "b"  # which has nothing to do
    assert choose_model("a", {"a": shared, "b": msgspec.structs.replace(much, loading=True)}, 2.0, 100.0, 0.0) == "a"
    assert choose_model("a", {"a": shared, "b": msgspec.structs.replace(much, left_s=101.0)}, 2.0, 100.0, 0.0) == "a"


@dataclass
class World:
    """Workers that have one of some sets each, on a clock of their own: each set's tasks come at a rate."""

    load_s: float
    task_s: float
    rates: dict[str, float]
    workers: int = 1
    now: float = 0.0
    lost: float = 0.0
    swaps: int = 0
    queues: dict[str, deque[float]] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)

    def run(self, seconds: float) -> None:
        names = list(self.rates)
        self.queues = {name: deque() for name in names}
        self.waited, self.done = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
        due = dict.fromkeys(names, 0.0)
        held = [[names[0], 0.0, 0.0, 0.0] for _ in range(self.workers)]  # set, since, busy until, worked at
        step = min(self.task_s, self.load_s) / 2
        while self.now < seconds:
            for name, rate in self.rates.items():
                while rate and due[name] <= self.now:
                    self.queues[name].append(due[name])
                    due[name] += 1 / rate
            for worker in held:
                self._act(worker, [other for other in held if other is not worker])
            self.now += step

    def _act(self, worker: list, others: list[list]) -> None:  # type: ignore[type-arg]
        if worker[2] > self.now:
            return
        lines = {name: self._line(name, line, others) for name, line in self.queues.items()}
        own = self.queues[worker[0]]
        idle = self.now - max(worker[1], worker[3]) if not own else 0.0
        found = choose_model(worker[0], lines, self.load_s, self.now - worker[1], idle)
        if found != worker[0]:
            self.swaps, self.lost = self.swaps + 1, self.lost + self.load_s
            worker[:] = [found, self.now + self.load_s, self.now + self.load_s, self.now + self.load_s]
        elif own:
            self.waited[worker[0]] = max(self.waited[worker[0]], self.now - own.popleft())
            self.done[worker[0]] += 1
            worker[2] = worker[3] = self.now + self.task_s

    def _line(self, name: str, line: deque[float], others: list[list]) -> ModelBacklog:  # type: ignore[type-arg]
        has = [other for other in others if other[0] == name]
        return ModelBacklog(
            len(line),
            self.now - line[0] if line else 0.0,
            len(line) * self.task_s,
            len(has),
            any(other[1] > self.now for other in has),
        )


@settings(deadline=None, max_examples=20)
@given(
    load_s=st.floats(0.5, 4.0),
    task_s=st.floats(0.5, 4.0),
    overload=st.lists(st.floats(1.0, 5.0), min_size=2, max_size=4),
    workers=st.integers(1, 3),
)
def test_loading_share_is_bounded_and_every_model_is_served_under_overload(
    load_s: float, task_s: float, overload: list[float], workers: int
) -> None:
    """Given sets that each have more to do than all workers can, when hours pass, then loading took no more than its
    share of the workers' time, and each set was loaded again within the stays of the others."""
    world = World(load_s, task_s, {f"set-{n}": much * workers / task_s for n, much in enumerate(overload)}, workers)
    rounds = 6 * len(overload) * (min_stay_s(load_s) + load_s + task_s)
    world.run(rounds)
    assert world.lost <= LOADING_SHARE * rounds * workers + load_s * workers
    assert all(world.done.values())


def test_tenfold_overload_of_two_models_does_not_cause_thrashing() -> None:
    """Given two models with ten times what the worker can do, then a tenth of its time at the most goes to loading, and
    both have had the same share of the rest."""
    world = World(3.0, 1.0, {"a": 10.0, "b": 10.0})
    world.run(3600.0)
    assert 0.08 < world.lost / 3600.0 <= LOADING_SHARE
    assert abs(world.done["a"] - world.done["b"]) < 0.05 * world.done["a"]


def test_rare_model_waits_a_bounded_time_beside_a_busy_one() -> None:
    world = World(3.0, 1.0, {"a": 10.0, "b": 0.01})
    world.run(3600.0)
    assert world.done["b"] > 30
    assert world.waited["b"] < 2 * min_stay_s(3.0) + 2 * 3.0 + 1.0


SETS = {"first": (ENCODE, DECODE), "second": (DENOISE,)}


def worker(name: str = "worker-1", loaded: str = "first") -> WorkerInfo:
    status = WorkerStatus(loaded=loaded, load_s=1.0)
    return msgspec.structs.replace(info(name, ENCODE, DENOISE, DECODE), swappable_models=SETS, status=status)


class Heard(Observer):
    def __init__(self) -> None:
        self.swaps: list[tuple[str, float]] = []

    def on_swapped(self, holds: str, seconds: float) -> None:
        self.swaps.append((holds, seconds))


@asynccontextmanager
async def dispatching() -> AsyncIterator[tuple[Dispatcher, ManualClock, Heard]]:
    async with scheduling(lease_ttl=500.0) as (scheduler, clock):
        heard = Heard()
        scheduler.observers.add(heard)
        dispatcher = Dispatcher(scheduler, [(CARD.name, CARD.source, "auto")], StorageLocations("disk:/results"))
        await dispatcher.answer(b"peer", Register(worker(), (CARD,)))
        yield dispatcher, clock, heard


async def beaten(dispatcher: Dispatcher, loaded: str, target: str = "") -> str:
    status = WorkerStatus(loaded=loaded, load_s=1.0, target=target)
    pulse = await dispatcher.answer(b"peer", Heartbeat(status=status))
    assert isinstance(pulse, HeartbeatReply)
    return pulse.swap_to


async def test_worker_leases_tasks_of_its_loaded_model_and_swaps_to_waiting_ones() -> None:
    async with dispatching() as (dispatcher, clock, heard):
        request = await submit(dispatcher)
        assert await dispatcher.answer(b"peer", RequestTasks(4, None, 0.0, loaded_model="second")) == LeasesGranted(
            (), {}
        )
        assert not await beaten(dispatcher, "second")
        clock.advance(2.0)
        record = await dispatcher.scheduler.queue.load(request)
        assert dispatcher.scheduler.awaited_condition(record) == ("loading", 1.0)
        assert await beaten(dispatcher, "second") == "first"
        assert await beaten(dispatcher, "second") == "first"  # while what runs ends
        assert await beaten(dispatcher, "") == "first"
        assert not heard.swaps
        assert not await beaten(dispatcher, "first")
        assert heard.swaps == [("first", 1.0)]
        assert dispatcher.scheduler.model_swaps.until_loaded(ENCODE) is None
        assert (
            dispatcher.scheduler.model_swaps.until_loaded(DENOISE) == 1.0 + 1.0
        )  # as long as it may be idle, and to load
        granted = await dispatcher.answer(b"peer", RequestTasks(4, None, 0.0, loaded_model="first"))
        assert isinstance(granted, LeasesGranted)
        assert [lease.task.planned.pool for lease in granted.leases] == [ENCODE]


async def test_failed_model_load_is_retried_later() -> None:
    async with dispatching() as (dispatcher, clock, heard):
        await submit(dispatcher)
        await beaten(dispatcher, "second")
        clock.advance(2.0)
        assert await beaten(dispatcher, "second") == "first"
        await beaten(dispatcher, "")
        assert not await beaten(dispatcher, "second")
        assert heard.swaps == [("second", 1.0)]
        clock.advance(2.0)
        assert await beaten(dispatcher, "second") == "first"


async def test_active_worker_is_not_swapped_as_idle() -> None:
    async with dispatching() as (dispatcher, clock, _):
        await submit(dispatcher)
        await beaten(dispatcher, "second")
        for _ in range(4):
            clock.advance(0.9)
            dispatcher.scheduler.model_swaps.note_activity("worker-1")
            assert not await beaten(dispatcher, "second")


async def test_heartbeat_announces_the_next_model_one_load_time_ahead() -> None:
    """Given a worker whose set has work and has not stayed for long, when another set has waited long enough, then it
    is told of that one a load before it is to load it, and not before."""
    async with dispatching() as (dispatcher, clock, _):
        await submit(dispatcher)
        clock.advance(2.0)
        told: list[tuple[str, str]] = []
        for _ in range(11):
            dispatcher.scheduler.model_swaps.note_activity("worker-1")
            pulse = await dispatcher.answer(b"peer", Heartbeat(status=WorkerStatus(loaded="second", load_s=1.0)))
            assert isinstance(pulse, HeartbeatReply)
            told.append((pulse.swap_to, pulse.swap_next))
            clock.advance(1.0)
        assert told == [("", "")] * 8 + [("", "first"), ("first", "first"), ("first", "")]


async def test_started_request_completes_before_a_swap_and_no_other_starts() -> None:
    """Given two requests for a set of all stages and one task that runs, when that ends after the worker was told to
    load another set, then it gets the next stage, and not the first one of the other request."""
    async with scheduling(lease_ttl=500.0) as (scheduler, _):
        dispatcher = Dispatcher(scheduler, [(CARD.name, CARD.source, "auto")], StorageLocations("disk:/results"))
        sets = {"first": (ENCODE, DENOISE, DECODE), "second": ()}
        everything = msgspec.structs.replace(worker(), swappable_models=sets)
        await dispatcher.answer(b"peer", Register(everything, (CARD,)))
        first, _ = [await submit(dispatcher) for _ in range(2)]
        granted = await dispatcher.answer(b"peer", RequestTasks(1, None, 0.0, loaded_model="first"))
        for stage in ("text_encode", "denoise", "vae_decode"):
            assert isinstance(granted, LeasesGranted)
            (lease,) = granted.leases
            assert (lease.claim.request, lease.claim.stage.partition(".")[0]) == (first, stage)
            ask = RequestTasks(1, None, 0.0, loaded_model="first", after_pool=lease.task.planned.pool)
            granted = await dispatcher.answer(b"peer", msgspec.structs.replace(done(lease), next_request=ask))
        assert granted == LeasesGranted((), {})


class Interleaved(MemoryQueue):
    """A queue between whose calls others come as often as `pauses` say, one after the other."""

    pauses: Iterator[int] = iter(())

    async def register(self, worker: WorkerInfo, cards: Sequence[ModelSpec] = ()) -> None:
        await self._pause()
        await super().register(worker, cards)
        await self._pause()

    async def workers(self) -> Sequence[RegisteredWorker]:
        await self._pause()
        found = await super().workers()
        await self._pause()
        return found

    async def _pause(self) -> None:
        for _ in range(next(self.pauses, 0)):
            await asyncio.sleep(0)


@dataclass
class Several:
    """A scheduler and a worker for each of these queues, which are one. All workers have denoising loaded, and clocks
    that go together."""

    queues: Sequence[QueueBackend]
    clock: ManualClock
    each: list[Dispatcher] = field(default_factory=list)
    holds: list[str] = field(default_factory=list)

    async def begin(self) -> None:
        for number, queue in enumerate(self.queues):
            scheduler = Scheduler(queue, specs=[CARD], clock=self.clock, lease_ttl=500.0)
            await scheduler.start()
            self.each.append(
                Dispatcher(scheduler, [(CARD.name, CARD.source, "auto")], StorageLocations("disk:/results"))
            )
            await self.each[-1].answer(b"peer", Register(worker(f"worker-{number}"), (CARD,)))
            self.holds.append("second")
        await self.beat()

    async def beat(self) -> list[str]:
        """What each worker is told to load at a heartbeat of all at one time; who is told has no weights then."""
        both = zip(self.each, self.holds, strict=True)
        told = await asyncio.gather(*(beaten(dispatcher, holds) for dispatcher, holds in both))
        self.holds = ["" if load else holds for load, holds in zip(told, self.holds, strict=True)]
        return list(told)

    async def end(self) -> None:
        for dispatcher in self.each:
            await dispatcher.scheduler.close()


async def leave_one(several: Several) -> None:
    """What waits for encoding, and then for denoising too, has one of the workers leave for it, and only one."""
    request = await submit(several.each[0])
    several.clock.advance(2.0)
    told = [load for _ in range(4) for load in await several.beat() if load]
    assert told[:1] == ["first"], "somebody goes, after a few heartbeats at the latest"
    assert sorted(several.holds) == sorted(["", *["second"] * (len(several.holds) - 1)])
    away = several.holds.index("")
    several.holds[away] = "first"
    await several.beat()
    granted = await several.each[away].answer(b"peer", RequestTasks(1, None, 0.0, loaded_model="first"))
    assert isinstance(granted, LeasesGranted)
    (lease,) = granted.leases
    assert lease.claim.request == request
    await several.each[away].answer(b"peer", done(lease))
    for _ in range(20):
        several.clock.advance(1.0)
        for at, dispatcher in enumerate(several.each):
            dispatcher.scheduler.model_swaps.note_activity(f"worker-{at}")
        await several.beat()
    assert several.holds.count("second") >= 1, "who has what denoising waits for stays"
    await several.end()


@given(pauses=st.lists(st.integers(0, 5), max_size=60), workers=st.integers(2, 3))
@settings(deadline=None, max_examples=examples(20))
def test_concurrent_swap_decisions_swap_exactly_one_worker(pauses: list[int], workers: int) -> None:
    """Given workers with the same set, each at a scheduler of its own over one queue, when another set has something to
    do, then one of them is told to load it, whatever each scheduler does between two calls of the other."""

    async def decide() -> None:
        clock = ManualClock()
        queue = Interleaved(clock)
        several = Several([queue] * workers, clock)
        await several.begin()
        queue.pauses = iter(pauses)
        await leave_one(several)
        await queue.close()

    asyncio.run(decide())


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


async def test_concurrent_swap_decisions_over_redis_swap_exactly_one_worker(redis: RedisServer) -> None:
    for _ in range(5):
        redis.client.flushall()
        clock = ManualClock()
        queues = [RedisQueue.open(redis.url, clock) for _ in range(2)]
        several = Several(queues, clock)
        await several.begin()
        await leave_one(several)
        for queue in queues:
            await queue.close()


class Filled(MemoryQueue):
    """A queue that has as much to do as is said."""

    lines: dict[str, PoolStats]

    async def stats(self, pools: Sequence[str]) -> QueueStats:
        return QueueStats(1, self.lines)


async def test_worker_due_to_swap_does_not_count_as_serving_its_old_model() -> None:
    """Given two workers that denoise, one of which was told to encode, when decoding has far more to do, then the other
    one stays: it is the last that denoises."""
    clock = ManualClock()
    lines = {ENCODE: PoolStats(1, 500.0, 1.0), DENOISE: PoolStats(1, 1.0, 5.0), DECODE: PoolStats(9, 1.0, 500.0)}
    queue = Filled(clock)
    queue.lines = lines
    async with scheduling(lease_ttl=500.0) as (scheduler, _):
        swaps = ModelSwaps(queue, Registry(queue, 500.0), clock, scheduler.observers)
        able = info("w-0", ENCODE, DENOISE, DECODE)
        status = WorkerStatus(loaded=DENOISE, load_s=1.0)
        able = msgspec.structs.replace(able, swappable_models={pool: (pool,) for pool in able.pools}, status=status)
        decodes = msgspec.structs.replace(able, id="w-2", status=WorkerStatus(loaded=DECODE, load_s=1.0))
        two = [able, msgspec.structs.replace(able, id="w-1")]
        for one in (*two, decodes):
            await queue.register(swaps.on_heartbeat(one))
        clock.advance(min_stay_s(1.0))
        assert [(await swaps.decide_swap(one, True))[0] for one in two] == [ENCODE, ""]
        await queue.register(two[0])  # which stays after all, since nothing is there to encode
        lines[ENCODE] = PoolStats()
        assert (await swaps.decide_swap(two[1], True))[0] == DECODE


async def test_swap_target_of_a_worker_survives_the_death_of_its_scheduler() -> None:
    """Given a worker that was told to load another set and still ends what runs, when its scheduler has died and it
    comes to another one, then that and all others know where it goes; and not of one that was never told."""
    clock = ManualClock()
    several = Several([MemoryQueue(clock)] * 2, clock)
    await several.begin()
    await submit(several.each[0])
    clock.advance(2.0)
    alone, other = several.each
    assert await beaten(alone, "second") == "first"
    await other.answer(b"moved", Register(worker("worker-0"), (CARD,)))
    pulse = await other.answer(b"moved", Heartbeat(status=WorkerStatus(loaded="second", load_s=1.0, target="first")))
    assert isinstance(pulse, HeartbeatReply)
    assert pulse.swap_to == "first"
    assert await beaten(other, "second") == ""
    never_told = worker("worker-0", "second")
    await other.answer(b"moved", Register(never_told, (CARD,)))
    assert await beaten(other, "second") == "first"
    await several.end()
