"""A worker and its schedulers, which come and go: real routers, desks and workers over one queue."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.worker import outside
from tools.addresses import a_worker, unix_address
from tools.asking import asking
from tools.cards import PICTURES
from unfuse.core.clock import SystemClock
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import ConfigError
from unfuse.core.messages import (
    Accepted,
    Heartbeat,
    HeartbeatReply,
    LeasesGranted,
    Register,
    Registered,
    Rejected,
    ReportProgress,
    RequestTasks,
    StorageLocations,
    TaskCompleted,
    TaskFailed,
    ToScheduler,
    ToWorker,
    TransferStats,
    WorkerInfo,
)
from unfuse.core.request import RequestRecord
from unfuse.models import find
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.chat_stream import output_stream
from unfuse.transfer.session import TransferCounters
from unfuse.wire.router import Router
from unfuse.worker.link import SchedulerLink
from unfuse.worker.remote_inputs import RemoteInputs
from unfuse.worker.worker import Worker

STEPS = 75  # one and a half seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        outside.install(patch)
        yield outside.model(tmp_path_factory.mktemp("model"))


class Town:
    """Several schedulers over one queue, and workers that know them all."""

    def __init__(self, model: Path) -> None:
        self.card = find(model).model_spec(str(model), model)
        self.offered = [(str(model), str(model), "auto")]
        self.results = f"disk:{model.parent}/results"
        self.queue = MemoryQueue(SystemClock())
        self.schedulers: list[Scheduler] = []
        self.routers: list[Router] = []
        self.workers: dict[asyncio.Task[None], Worker] = {}
        self.refuse_first: type | None = None
        self.heard: list[tuple[int, ToScheduler]] = []
        self.granted: dict[type, list[str]] = {RequestTasks: [], TaskCompleted: []}
        """The stages that workers were given, by what they had said."""

    async def open(self, address: str = "") -> Router:
        number = len(self.routers)
        scheduler = Scheduler(self.queue, specs=[self.card])
        dispatcher = Dispatcher(scheduler, self.offered, StorageLocations(self.results))

        async def answer(peer: bytes, message: ToScheduler) -> ToWorker | None:
            self.heard.append((number, message))
            if self.refuse_first and isinstance(message, self.refuse_first):
                self.refuse_first = None
                return Rejected("the scheduler failed on this message")
            try:
                reply = await dispatcher.answer(peer, message)
                if isinstance(reply, LeasesGranted):
                    self.granted[type(message)] += [lease.task.stage for lease in reply.leases]
                return reply
            except asyncio.CancelledError:  # with its process ends what it asked of the queue
                await dispatcher.handle_undelivered(peer, Accepted())
                raise

        await scheduler.start()
        self.schedulers.append(scheduler)
        self.routers.append(Router(address or unix_address(), answer, dispatcher.handle_undelivered))
        return self.routers[-1]

    async def kill(self, number: int) -> None:
        """As SIGKILL does to its process: its connections are cut, and it does nothing more."""
        await self.routers[number].close()
        await self.schedulers[number].close()

    def work(self, *schedulers: str, drain_timeout: float = 60.0) -> Worker:
        addresses = schedulers or tuple(router.address for router in self.routers)
        worker = Worker(a_worker(*addresses, arena=1 << 20, drain_timeout=drain_timeout))
        self.workers[asyncio.create_task(worker.run())] = worker
        return worker

    async def drained(self) -> None:
        for worker in self.workers.values():
            worker.drain()
        await asyncio.gather(*self.workers)

    async def submit(
        self, prompt: str = "hello", steps: int = STEPS, priority: int = 0, lora_id: str = "", **given: str | int
    ) -> str:
        params = {**self.card.defaults, "prompt": prompt, "seed": 1, "num_inference_steps": steps, **given}
        asked = asking(self.card, params, priority=priority, derived=DerivedFacts(lora_id=lora_id))
        return (await self.schedulers[-1].submit(*asked)).context.id

    async def until(self, request: str, *kinds: str) -> None:
        """Wait for an event of the request."""
        async for event in self.queue.watch(request):
            if event.type in kinds:
                return

    async def until_steps(self, request: str) -> None:
        """Wait until its denoising is under way."""
        async for event in self.queue.watch(request):
            if (event.type, event.stage) == ("progress", "denoise.0"):
                return

    async def over(self, request: str) -> RequestRecord:
        await self.until(request, "completed", "failed", "cancelled", "expired")
        return await self.queue.load(request)

    async def asked_for(self) -> str:
        """What a worker that has nothing to do would rather have."""
        while True:
            asks = [message for _, message in self.heard if isinstance(message, RequestTasks)]
            if asks[-1].slots == max(ask.slots for ask in asks):
                return asks[-1].affinity
            await asyncio.sleep(0.01)

    def said(self, number: int, kind: type) -> bool:
        return any(place == number and isinstance(message, kind) for place, message in self.heard)


@asynccontextmanager
async def town(model: Path, schedulers: int = 2) -> AsyncIterator[Town]:
    found = Town(model)
    for _ in range(schedulers):
        await found.open()
    try:
        yield found
    finally:
        for task in found.workers:
            task.cancel()
        await asyncio.gather(*found.workers, return_exceptions=True)
        for number in range(len(found.routers)):
            with suppress(Exception):
                await found.kill(number)
        await found.queue.close()


def untouched(record: RequestRecord) -> None:
    """It completed, and no stage of it was begun twice or charged."""
    assert record.context.status == "completed"
    assert {(state.attempt, state.failures, state.crashes) for state in record.context.stages.values()} == {(1, 0, 0)}


def uncharged(record: RequestRecord) -> None:
    """It completed, whatever had to be done again."""
    assert record.context.status == "completed"
    assert {(state.failures, state.crashes) for state in record.context.stages.values()} == {(0, 0)}


async def test_killed_scheduler_does_not_disturb_running_tasks(model: Path) -> None:
    async with town(model) as found:
        found.work()
        request = await found.submit()
        await found.until_steps(request)
        await found.kill(0)
        untouched(await found.over(request))
        assert found.said(1, TaskCompleted)
        untouched(await found.over(await found.submit(steps=2)))  # and it works on there
        await found.drained()


@pytest.mark.parametrize(("missing", "times"), [(TimeoutError, 1), (ConnectionError, 2)])
async def test_transfer_counters_are_resent_only_after_a_broken_connection(
    model: Path, monkeypatch: pytest.MonkeyPatch, missing: type[OSError], times: int
) -> None:
    """Given a heartbeat without an answer, then what it brought is told again if the connection broke: else it came."""
    once, told = SchedulerLink.once, list[dict[str, TransferStats]]()

    async def first_is_lost(self: SchedulerLink, message: ToScheduler, *timeout: float) -> ToWorker:
        answer = await once(self, message, *timeout)
        if isinstance(message, Heartbeat) and (message.transfers or told):
            told.append(message.transfers)
            if len(told) == 1:
                raise missing
        return answer

    counters = TransferCounters()
    counters.add("tcp", TransferStats(7))
    monkeypatch.setattr(RemoteInputs, "counters", counters)
    monkeypatch.setattr(SchedulerLink, "once", first_is_lost)
    async with town(model, 1) as found:
        found.work()
        while len(told) < 3:
            await asyncio.sleep(0.01)
        await found.drained()
    assert told[:3] == [*[{"tcp": TransferStats(7)}] * times, *[{}] * (3 - times)]


async def test_simultaneous_steps_are_reported_in_one_message(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given tasks that step at one time, then every step is published before its stage is over, and a cancelled task
    ends."""
    monkeypatch.setattr("unfuse.worker.link.GATHER_S", 0.1)
    async with town(model, 1) as found:
        found.work()
        requests = [await found.submit(f"number {n}", steps=12) for n in range(3)]
        cancelled = await found.submit("another", steps=1000)
        for request in requests:
            untouched(await found.over(request))
            events = [event async for event in found.queue.watch(request)]
            steps = [event.step for event in events if (event.type, event.stage) == ("progress", "denoise.0")]
            assert steps == [*range(1, 13)]
            kinds = [event.type for event in events if event.stage == "denoise.0"]
            assert kinds.index("stage_completed") > max(n for n, kind in enumerate(kinds) if kind == "progress")
        await found.schedulers[0].cancel(cancelled)
        await found.drained()
        together = [message for _, message in found.heard if isinstance(message, ReportProgress)]
        assert any(len({step.claim for step in message.progress}) > 1 for message in together)


async def test_output_stream_survives_compute_and_scheduler_crashes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an output that is read while it grows, when the compute process is killed, and a scheduler, then a reader
    gets every piece once and in order, those of before from the process that died, and all are there at the end."""
    monkeypatch.setattr("unfuse.worker.link.APPEND_S", 0.2)
    async with town(model) as found:
        worker = found.work()
        request = await found.submit("speak", steps=60)
        stream = output_stream(found.queue, request, {"denoise.0": 0})
        said = [(await anext(stream))[1]]
        for pid in worker._executor.pids:
            os.kill(pid, signal.SIGKILL)
        said += [(await anext(stream))[1] for _ in range(20)]
        await found.kill(0)
        said += [piece async for _, piece in stream]
        assert [int(piece.split()[0]) for piece in said] == list(range(1, 61))
        makers = [piece.split()[1] for piece in said]
        assert len(set(makers)) == 2 and makers == sorted(makers, key=makers.index)
        assert {int(piece.split()[2]) for piece in said} == {0, makers.count(makers[0])}
        context = (await found.over(request)).context
        assert (context.status, context.stages["denoise.0"].crashes) == ("completed", 1)
        await found.drained()


async def test_next_stage_is_leased_in_the_reply_to_task_completed(model: Path) -> None:
    """Given two of them that both wait for work, then a request stays with the one that began it."""
    async with town(model, 1) as found:
        found.work()
        found.work()
        record = await found.over(await found.submit(steps=2))
        first, *others = [stage.name for stage in record.context.plan.stages]
        assert found.granted == {RequestTasks: [first], TaskCompleted: others}
        assert len({state.worker for state in record.context.stages.values()}) == 1


async def test_idle_worker_requests_tasks_for_its_loaded_adapter(model: Path) -> None:
    """Given a worker that ran a request with an adapter, and then one without, when it is idle, then it asks for tasks
    with that adapter; before, it asked for any."""
    async with town(model, 1) as found:
        found.work()
        size: dict[str, str | int] = {"width": 64, "height": 32}
        await found.over(await found.submit(steps=2, **size))
        assert await found.asked_for() == ""
        await found.over(await found.submit(steps=2, lora="ink", lora_id="f00", **size))
        assert await found.asked_for() == f"{found.card.name} [64, 32, 1] f00"
        await found.over(await found.submit(steps=2, **size))
        assert await found.asked_for() == f"{found.card.name} [64, 32, 1] f00"
        await found.drained()


async def test_restarted_scheduler_receives_work_done_in_the_meantime(model: Path) -> None:
    async with town(model, 1) as found:
        found.work()
        request = await found.submit(steps=20)
        await found.until_steps(request)
        address = found.routers[0].address
        await found.kill(0)
        await asyncio.sleep(0.5)  # it ends while nobody listens
        await found.open(address)
        untouched(await found.over(request))
        assert found.said(1, Register)
        await found.drained()


async def test_a_worker_waits_for_schedulers_that_start_after_it(model: Path) -> None:
    async with town(model, 1) as found:
        address = found.routers[0].address
        await found.kill(0)
        found.work(address)
        await asyncio.sleep(0.5)
        await found.open(address)
        untouched(await found.over(await found.submit(steps=2)))
        await found.drained()


async def test_rejected_task_outcome_is_resent_if_the_lease_is_not_lost(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unfuse.worker.worker.PAUSE_S", 0.05)
    async with town(model, 1) as found:
        found.refuse_first = TaskCompleted
        found.work()
        untouched(await found.over(await found.submit(steps=2)))
        assert found.refuse_first is None
        await found.drained()


async def test_poison_task_becomes_a_dead_letter_and_others_are_not_charged(model: Path) -> None:
    async with town(model, 1) as found:
        found.work()
        healthy = await found.submit()
        await found.until_steps(healthy)
        poison = await found.submit("later abort", steps=5, priority=1)  # it runs first, with the other one begun
        ended = (await found.over(poison)).context
        assert (ended.status, ended.is_dead_letter) == ("failed", True)
        state = ended.stages["denoise.0"]
        assert (state.alone, state.crashes) == (True, 2)
        crashes = [m for _, m in found.heard if isinstance(m, TaskFailed) and m.kind == "crash"]
        assert [m.had_companions for m in crashes if m.claim.request == poison] == [True, False, False]
        assert all("the last words of a stage" in m.evidence for m in crashes)
        uncharged(await found.over(healthy))
        await found.drained()


async def test_draining_worker_reports_to_the_remaining_scheduler(model: Path) -> None:
    async with town(model) as found:
        worker = found.work(drain_timeout=10.0)
        request = await found.submit()
        await found.until_steps(request)
        await found.kill(0)
        worker.drain()
        await asyncio.gather(*found.workers)
        found.workers.clear()
        state = (await found.queue.load(request)).context.stages["denoise.0"]
        assert (state.status, state.attempt) == ("done", 1)
        found.work()  # what the first one made left with it
        uncharged(await found.over(request))
        await found.drained()


async def test_task_over_the_drain_timeout_is_handed_back_uncharged(model: Path) -> None:
    async with town(model) as found:
        worker = found.work(drain_timeout=0.1)
        request = await found.submit()
        await found.until_steps(request)
        await found.kill(0)
        worker.drain()
        await asyncio.gather(*found.workers)
        found.workers.clear()
        assert any(isinstance(m, TaskFailed) and m.kind == "hand_back" for place, m in found.heard if place == 1)
        found.work()
        uncharged(await found.over(request))
        await found.drained()


async def test_worker_reports_why_it_is_unavailable(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a worker that was started before its only scheduler, then what it lacks is that one, then its weights until
    it is registered, then nothing, then the scheduler again; and that it leaves counts more than anything."""
    address, register, before = unix_address(), Worker._register, list[str]()

    async def observed(worker: Worker) -> None:
        before.append(worker.unavailable_reason)
        await register(worker)

    monkeypatch.setattr(Worker, "_register", observed)
    async with town(model, schedulers=0) as here:
        worker = here.work(address)
        await asyncio.sleep(0)
        assert worker.unavailable_reason == "no scheduler answers"
        await here.open(address)
        seen = set[str]()
        while worker.unavailable_reason:
            seen.add(worker.unavailable_reason)
            await asyncio.sleep(0.01)
        assert seen <= {"no scheduler answers", "the compute process is loading its models"} and len(seen) == 2
        assert before == ["the compute process is loading its models"]
        assert [member.info.pools != () for member in await here.queue.workers()] == [True]
        await here.kill(0)
        while not worker.unavailable_reason:
            await asyncio.sleep(0.01)
        assert worker.unavailable_reason == "no scheduler answers"
        worker.drain()
        assert worker.unavailable_reason == "the worker is draining"


async def test_draining_worker_exits_without_any_scheduler(model: Path) -> None:
    async with town(model, 1) as found:
        worker = found.work(drain_timeout=0.1)
        await found.over(await found.submit(steps=1))
        request = await found.submit()
        await found.until_steps(request)
        await found.kill(0)
        worker.drain()
        await asyncio.gather(*found.workers)  # ends, without an error


async def test_worker_over_tcp_without_keys_raises_config_error(model: Path) -> None:
    with pytest.raises(ConfigError, match="copy worker.key from the scheduler"):
        Worker(a_worker(unix_address(), "tcp://127.0.0.1:1", arena=1 << 20))


# -- the link alone

HELLO = Register(WorkerInfo("worker-1", "node", "all", ("pool",), 1, "unix:@x", 1 << 20), (), b"s" * 16)


@asynccontextmanager
async def process() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    command = [sys.executable, str(Path(__file__).with_name("silent_scheduler.py")), unix_address()]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout
        yield child, (await child.stdout.readline()).decode().strip()
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()


class Here:
    """A scheduler of this process that only says that it lives."""

    def __init__(self) -> None:
        self.heard: list[ToScheduler] = []

    async def answer(self, _: bytes, message: ToScheduler) -> ToWorker:
        self.heard.append(message)
        match message:
            case Register():
                return Registered((), StorageLocations(""), 15.0, 1.0)
            case Heartbeat():
                return HeartbeatReply((), ("here",))
        return Accepted()

    async def undelivered(self, _: bytes, __: ToWorker) -> None:
        """It grants nothing."""


@asynccontextmanager
async def linked(
    ahead: int,
) -> AsyncIterator[tuple[SchedulerLink, list[asyncio.subprocess.Process], Here, asyncio.Event]]:
    """A link to so many processes, and then to `Here`."""
    async with AsyncExitStack() as stack:
        others = [await stack.enter_async_context(process()) for _ in range(ahead)]
        here = Here()
        router = Router(unix_address(), here.answer, here.undelivered)
        stack.push_async_callback(router.close)
        renewed = asyncio.Event()
        link = SchedulerLink([*(address for _, address in others), router.address], None, renewed.set)
        stack.push_async_callback(link.close)
        yield link, [child for child, _ in others], here, renewed


async def beat(link: SchedulerLink) -> HeartbeatReply:
    """A heartbeat as a worker has it: said anew until it is answered."""
    while True:
        with suppress(OSError):
            answer = await link.once(Heartbeat(), 3.0)
            assert isinstance(answer, HeartbeatReply)
            return answer


async def test_link_fails_over_at_once_from_killed_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.worker.link.ANSWER_S", 10_000.0)  # no answer is overdue in this test
    async with linked(2) as (link, (first, second), here, renewed):
        await link.register(HELLO)
        renewed.clear()
        assert await beat(link) == HeartbeatReply((), ())
        second.kill()
        first.kill()
        assert await link.call(Heartbeat()) == HeartbeatReply((), ("here",))
        assert here.heard[0] == HELLO
        assert renewed.is_set()


async def test_link_logs_that_it_is_connected_again_and_that_its_models_are_not_offered() -> None:
    """A worker whose models are not served any more gets no tasks, although it is healthy."""
    async with linked(1) as (link, (first,), _, _):
        with capture_logs() as logs:
            await link.register(HELLO)
            await link.register(replace(HELLO, model_specs=(PICTURES,)))
            first.kill()
            assert await link.call(Heartbeat()) == HeartbeatReply((), ("here",))
        lost, *_, again, warning = logs
        assert lost["event"] == "lost the connection to the scheduler"
        assert (again["event"], again["log_level"]) == ("connected to the scheduler again", "info")
        assert warning["event"].startswith("the scheduler offers none of this worker's models, so the worker gets no")
        assert (warning["models"], warning["offered"]) == ([PICTURES.name], [])


async def test_calls_in_flight_are_resent_to_the_next_scheduler() -> None:
    async with linked(1) as (link, (first,), here, _):
        await link.register(HELLO)
        first.send_signal(signal.SIGSTOP)  # it hears, and answers no more
        calls = [
            asyncio.create_task(link.call(Heartbeat(stored_requests=(str(number),)), 10_000.0)) for number in range(20)
        ]
        await asyncio.sleep(0.1)
        assert not any(call.done() for call in calls)
        first.kill()
        assert await asyncio.gather(*calls) == [HeartbeatReply((), ("here",))] * 20
        assert {message.stored_requests[0] for message in here.heard if isinstance(message, Heartbeat)} == {
            str(number) for number in range(20)
        }
        assert sum(isinstance(message, Register) for message in here.heard) == 1


async def test_link_fails_over_after_two_missed_heartbeats() -> None:
    async with linked(1) as (link, (first,), here, _):
        await link.register(HELLO)
        first.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await link.once(Heartbeat(), 0.2)
        assert not here.heard  # one is no more than a pause
        with pytest.raises(TimeoutError):
            await link.once(Heartbeat(), 0.2)
        assert await beat(link) == HeartbeatReply((), ("here",))
        first.send_signal(signal.SIGCONT)


async def test_missed_heartbeat_count_resets_with_the_next_reply() -> None:
    async with linked(1) as (link, (first,), here, _):
        await link.register(HELLO)
        for _ in range(3):
            first.send_signal(signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                await link.once(Heartbeat(), 0.1)
            first.send_signal(signal.SIGCONT)
            assert await link.once(Heartbeat(), 60.0) == HeartbeatReply((), ())
        assert not here.heard
