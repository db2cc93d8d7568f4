"""Workers that use devices, and schedulers that hear of it: whatever happens, each second is counted once."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec
from hypothesis import strategies as st
from typing_extensions import override

from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE, params
from tests.scheduler.test_scheduler import done, info
from tools.asking import asking
from unfuse.core.messages import (
    CLIENT_ERROR,
    HeartbeatReply,
    LeasesGranted,
    Register,
    ReportProgress,
    RequestTasks,
    StepProgress,
    StorageLocations,
    TaskCompleted,
    TaskFailed,
    TaskStopped,
    UnknownWorker,
)
from unfuse.core.request import RequestContext, Timings
from unfuse.core.task import Claim, Lease
from unfuse.core.worker_status import RankTimes, WorkerStatus
from unfuse.queues.base import QueueBackend, RequestFilter
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock

Act = Literal[
    "submit",
    "ask",
    "compute",
    "complete",
    "fail",
    "refuse",
    "crash",
    "hand back",
    "lose an input",
    "lose a lease",
    "kill",
    "cancel",
    "time out",
    "disconnect",
    "notice",
    "repeat",
    "move",
    "restart",
]
OFTEN: dict[Act, int] = {"submit": 2, "ask": 8, "compute": 12, "complete": 6, "notice": 4, "lose an input": 2}
ACTS: list[Act] = [act for act in get_args(Act) for _ in range(OFTEN.get(act, 1))]
ENDS: tuple[Act, ...] = ("complete", "fail", "refuse", "crash", "hand back", "lose an input", "notice")

seeds, lengths = st.integers(0, 2**32), st.integers(60, 160)
"""What a history is drawn from, and of how many acts it is."""


class Ledger(Observer):
    """What the schedulers tell of bills and losses, added up."""

    def __init__(self) -> None:
        self.billed_s = self.lost_s = 0.0

    @override
    def on_ended(self, context: RequestContext) -> None:
        for state in context.stages.values():
            self.billed_s += state.timings.share_s * state.timings.devices

    @override
    def on_billed(self, context: RequestContext, seconds: Mapping[str, float]) -> None:
        self.billed_s += sum(seconds.values())

    @override
    def on_lost_device_time(self, context: RequestContext, seconds: Mapping[str, float]) -> None:
        self.lost_s += sum(seconds.values())


class Fleet:
    """Three workers, the third on two devices, and two schedulers that share requests.

    `used` is what each attempt has used in truth, `known` the part of it that a scheduler was told while the attempt
    held its lease. Of a worker that was killed nobody can know more.
    """

    def __init__(self, queues: Sequence[QueueBackend], clock: ManualClock) -> None:
        self.clock, self.ledger = clock, Ledger()
        self.devices = {"worker-0": 1, "worker-1": 1, "worker-2": 2}
        self.at = dict.fromkeys(self.devices, 0)
        self.used: dict[Claim, float] = {}
        self.known: defaultdict[Claim, float] = defaultdict(float)
        self.leases: dict[Claim, Lease] = {}
        self.running: dict[Claim, Lease] = {}
        self.said: list[tuple[str, TaskCompleted | TaskFailed | TaskStopped]] = []
        self.requests: list[str] = []
        self.open(queues)

    def open(self, queues: Sequence[QueueBackend]) -> None:
        """Start the schedulers over these queues."""
        self.schedulers = [Scheduler(queue, specs=[CARD], clock=self.clock) for queue in queues]
        for scheduler in self.schedulers:
            scheduler.observers.add(self.ledger)
        self.dispatchers = [Dispatcher(one, [], StorageLocations("disk:/r")) for one in self.schedulers]

    async def close(self) -> None:
        for scheduler in self.schedulers:
            await scheduler.close()

    async def say(
        self, worker: str, message: RequestTasks | ReportProgress | TaskCompleted | TaskFailed | TaskStopped
    ) -> object:
        """Send a message to the scheduler that the worker talks to."""
        dispatcher = self.dispatchers[self.at[worker]]
        answer = await dispatcher.answer(worker.encode(), message)
        if isinstance(answer, UnknownWorker):
            ranks = (RankTimes(),) * self.devices[worker] if self.devices[worker] > 1 else ()
            about = msgspec.structs.replace(
                info(worker, ENCODE, DENOISE, DECODE), device="cpu", slots=2, status=WorkerStatus(ranks=ranks)
            )
            await dispatcher.answer(worker.encode(), Register(about, (CARD,), worker.encode()))
            answer = await dispatcher.answer(worker.encode(), message)
        return answer

    async def live(self, seed: int, length: int) -> None:
        """Have so many random acts happen, then let everything come to its end and add up."""
        rng = random.Random(seed)
        await self.act("submit", 1, 1)
        for _ in range(length):
            await self.act(rng.choice(ACTS), rng.randrange(12), rng.randint(1, 16))
        await self.settle()
        await self.check()

    async def act(self, act: Act, which: int, eighths: int) -> None:
        """Have something happen, if there is what it can happen to."""
        worker, running = f"worker-{which % 3}", list(self.running.values())
        match act:
            case "ask":
                await self.ask(worker, 2)
            case "move":
                self.at[worker] = (self.at[worker] + 1) % len(self.dispatchers)
            case "kill":
                await self.kill(worker)
            case "compute" if running:
                await self.compute(running[which % len(running)], eighths / 8, tell=which % 3 > 0)
            case "repeat" if self.said:
                await self.say(*self.said[which % len(self.said)])
            case "restart":
                await self.restart()
            case _ if act in ENDS and running:
                await self.end(act, running[which % len(running)])
            case _:
                await self.happen(act, which)

    async def happen(self, act: Act, which: int) -> None:
        """Have something happen that no worker does."""
        scheduler = self.schedulers[which % len(self.schedulers)]
        if act == "submit":
            record = await scheduler.submit(*asking(CARD, params(), n=1 + which % 2, cancel_on_disconnect=True))
            self.requests.append(record.context.id)
        elif act == "lose a lease" and self.leases:
            await scheduler.maintenance.expire_lease(list(self.leases.values())[which % len(self.leases)])
        elif self.requests:
            request = self.requests[which % len(self.requests)]
            if act == "cancel":
                await scheduler.cancel(request)
            elif act == "time out":
                await scheduler.maintenance.expire_deadline(request)
            elif act == "disconnect":
                await scheduler.client_disconnected(request)

    async def restart(self) -> None:
        """Start the schedulers again, where that is something else than going on."""

    async def ask(self, worker: str, slots: int) -> list[Lease]:
        """Have a worker ask for tasks."""
        granted = await self.say(worker, RequestTasks(slots, None, 0.0))
        assert isinstance(granted, LeasesGranted)
        for lease in granted.leases:
            self.leases[lease.claim] = self.running[lease.claim] = lease
            self.used[lease.claim] = 0.0
        return list(granted.leases)

    async def compute(self, lease: Lease, seconds: float, tell: bool) -> None:
        claim = lease.claim
        self.clock.advance(seconds)
        self.used[claim] += seconds
        if tell:
            step = StepProgress(claim, 1, 3, 1, share_s=self.used[claim])
            if await self.say(lease.worker, ReportProgress((step,))) == HeartbeatReply((), ()):
                self.known[claim] = self.used[claim]

    async def end(self, act: Act, lease: Lease) -> None:
        """Have a worker report the end of an attempt."""
        claim, timings = lease.claim, Timings(share_s=self.used[lease.claim], steps=3)
        lost = lease.task.inputs[0].id if lease.task.inputs else ""
        ends: dict[Act, TaskCompleted | TaskFailed | TaskStopped] = {
            "complete": msgspec.structs.replace(done(lease), timings=timings),
            "fail": TaskFailed(claim, "transient", "no", timings=timings),
            "refuse": TaskFailed(claim, "permanent", "no", reason=CLIENT_ERROR, timings=timings),
            "crash": TaskFailed(claim, "crash", "bang", had_companions=True, timings=timings),
            "hand back": TaskFailed(claim, "hand_back", "leaves", reason="compute", timings=timings),
            "lose an input": TaskFailed(claim, "object_lost", "gone", object_id=lost, timings=timings),
            "notice": TaskStopped(claim, timings),
        }
        if act == "lose an input" and not lost:
            return
        message = ends[act]
        if isinstance(message, TaskCompleted) and message.output:
            message = msgspec.structs.replace(
                message, output=msgspec.structs.replace(message.output, owner=lease.worker)
            )
        if act == "notice" and await self.holds(lease):
            return  # a worker drops a task when its lease is lost
        del self.running[claim]
        self.said.append((lease.worker, message))
        await self.say(lease.worker, message)

    async def holds(self, lease: Lease) -> bool:
        return await self.schedulers[0].queue.progress(lease.claim, ())

    async def kill(self, worker: str) -> None:
        """A worker dies: all that was known of its attempts is what it had reported."""
        for lease in [lease for lease in self.running.values() if lease.worker == worker]:
            del self.running[lease.claim]
            self.used[lease.claim] = self.known[lease.claim]
            await self.schedulers[0].maintenance.expire_lease(lease)

    async def settle(self) -> None:
        """End all requests, and have every worker that lives say its last word of each attempt, twice."""
        for request in self.requests:
            await self.schedulers[0].cancel(request)
        for lease in list(self.running.values()):
            await self.end("notice", lease)
        for worker, message in list(self.said):
            await self.say(worker, message)

    async def check(self) -> None:
        """Every second is on a bill, or lost, once."""
        contexts = [record.context for record in await self.schedulers[0].queue.list(RequestFilter(), limit=1000)]
        states = [state for context in contexts for state in context.stages.values()]
        billed = sum(state.timings.share_s * state.timings.devices for state in states)
        lost = sum(sum(state.lost_s.values()) for state in states)
        assert billed + lost == sum(
            seconds * self.devices[self.leases[claim].worker] for claim, seconds in self.used.items()
        )
        assert (self.ledger.billed_s, self.ledger.lost_s) == (billed, lost)
