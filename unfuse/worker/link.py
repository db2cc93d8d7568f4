"""A worker's connection to its schedulers: it talks to one of them, and to the next one if that one fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import structlog

from unfuse.core.messages import (
    AppendOutput,
    Heartbeat,
    HeartbeatReply,
    ReadOutput,
    RecordedOutput,
    Register,
    Registered,
    Rejected,
    ReportProgress,
    RequestTasks,
    StepProgress,
    ToScheduler,
    ToWorker,
    UnknownWorker,
)
from unfuse.core.supervisor import Supervisor
from unfuse.core.task import PIECES_AT_ONCE, Claim, Lease, OutputDeltas
from unfuse.wire.address import Trust, keys_for
from unfuse.wire.dealer import Dealer
from unfuse.worker.objects import WorkerObjects

log = structlog.get_logger(__name__)

GATHER_S = 0.01  # seconds that a step waits for steps of other tasks, to be sent in the same message


class ProgressReporter:
    """Sends the steps of tasks, many in one message. `ended` is called with a claim whose lease is lost."""

    def __init__(self, link: SchedulerLink, background: Supervisor, ended: Callable[[Claim], Awaitable[None]]) -> None:
        self._link, self._background, self._ended = link, background, ended
        self._steps: list[StepProgress] = []

    def add(self, progress: StepProgress) -> None:
        """Report this within GATHER_S."""
        self._steps.append(progress)
        if len(self._steps) == 1:
            self._background.once("reporting steps", self._soon)

    def flush(self) -> None:
        """Report now whatever waits, before the next message."""
        steps, self._steps = self._steps, []
        if steps:
            self._background.once("reporting steps", partial(self._send, ReportProgress(tuple(steps))))

    async def _soon(self) -> None:
        await asyncio.sleep(GATHER_S)
        self.flush()

    async def _send(self, message: ReportProgress) -> None:
        answer = await self._link.call(message)
        for claim in answer.ended if isinstance(answer, HeartbeatReply) else ():
            await self._ended(claim)


APPEND_S = 0.05  # seconds between two messages about what has grown; a task that ends does not wait for them
PAUSE_S = 1.0  # seconds until a message is repeated that the scheduler could not record


@dataclass(eq=False)
class _Growth:
    """The pieces of a task that are not known to be recorded, from number `offset` on. `recorded`: there are none."""

    offset: int
    pieces: list[bytes] = field(default_factory=list)
    recorded: asyncio.Event = field(default_factory=asyncio.Event)


class OutputRecorder:
    """Has the new output of tasks recorded, in one message after the other, so that pieces stay in order.

    `ended` is called with a claim for which nothing is recorded any more.
    """

    def __init__(self, link: SchedulerLink, background: Supervisor, ended: Callable[[Claim], Awaitable[None]]) -> None:
        self._link, self._background, self._ended = link, background, ended
        self._unrecorded: dict[Claim, _Growth] = {}
        self._hurry = asyncio.Event()
        self._sending = False

    def add(self, message: OutputDeltas) -> None:
        """Have these pieces recorded soon."""
        self._unrecorded.setdefault(message.claim, _Growth(message.offset)).pieces += message.pieces
        if not self._sending:
            self._sending = True
            self._background.once("recording what has grown", self._send)

    async def wait_until_recorded(self, claim: Claim) -> None:
        """Wait until all pieces of a task are recorded, or its lease is known to be lost."""
        if growth := self._unrecorded.get(claim):
            self._hurry.set()
            await growth.recorded.wait()

    async def read(self, lease: Lease) -> tuple[bytes, ...] | None:
        """Return the pieces that earlier attempts have made; None if the lease is lost."""
        found: list[bytes] = []
        while len(found) < lease.appended:
            match await self._link.call(ReadOutput(lease.claim, len(found))):
                case RecordedOutput(pieces) if pieces:
                    found += pieces
                case Rejected(lease_lost=False):
                    await asyncio.sleep(PAUSE_S)
                case _:
                    return None
        return tuple(found)

    async def _send(self) -> None:
        """Send messages until nothing is left: the first when tasks that stepped together have told of it."""
        try:
            await asyncio.sleep(GATHER_S)
            while self._unrecorded:
                self._hurry.clear()
                pause = APPEND_S if await self._record(self._some()) else PAUSE_S
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._hurry.wait()
        finally:
            self._sending = False

    def _some(self) -> list[OutputDeltas]:
        """As much as one message takes, of those first that have waited longest."""
        found, room = list[OutputDeltas](), PIECES_AT_ONCE
        for claim, growth in self._unrecorded.items():
            found += [OutputDeltas(claim, growth.offset, tuple(growth.pieces[:room]))] if room else []
            room -= min(room, len(growth.pieces))
        return found

    async def _record(self, grown: list[OutputDeltas]) -> bool:
        """Have these recorded; False if that failed, and may be tried again."""
        answer = await self._link.call(AppendOutput(tuple(grown)))
        if not isinstance(answer, HeartbeatReply):
            log.warning("what has grown is not recorded yet", answer=str(answer))
            return False
        for one in grown:
            growth = self._unrecorded.pop(one.claim)
            growth.offset += len(one.pieces)
            del growth.pieces[: len(one.pieces)]
            if growth.pieces and one.claim not in answer.ended:
                self._unrecorded[one.claim] = growth
            else:
                growth.recorded.set()
        for claim in answer.ended:
            await self._ended(claim)
        return True


WAIT_S = 20.0  # seconds that an Ask waits at the scheduler for tasks

WITHDRAW = RequestTasks(0, 0, 0.0)  # an Ask for nothing: it replaces an Ask that waits at the scheduler

ANSWER_S = 10.0  # seconds, beside those the message asks to wait, after which a silent scheduler counts as gone

BEAT_S = 3.0  # seconds after which a heartbeat without an answer counts as missed

MISSES = 2  # the number of missed heartbeats in a row after which the scheduler counts as gone

RETRY_S, RETRY_MOST_S = 0.1, 2.0  # the pause, in seconds, after all schedulers failed: the first, and the longest

TICK_S = 1.0


class TaskSlots:
    """The leases of a worker with so many `slots`, and such `resources`, for all tasks together.

    A task whose input is still written elsewhere takes its share of a resource, and no slot until that is whole. One
    that needs no resource takes a slot at once, or nothing would bound how many there are.
    """

    def __init__(self, slots: int, resources: Mapping[str, int]) -> None:
        self.slots, self.resources = slots, dict(resources)
        self.leases: dict[Claim, Lease] = {}
        self._arriving: set[Claim] = set()
        self._placed: set[Claim] = set()

    @property
    def arriving(self) -> int:
        """How many tasks wait for their inputs, which are still written, or on their way."""
        return len(self._arriving)

    def take(self, lease: Lease) -> None:
        """A task was leased to the worker."""
        self.leases[lease.claim] = lease
        if lease.task.planned.needs and not all(ref.whole for ref in lease.task.inputs):
            self._arriving.add(lease.claim)

    def arrived(self, claim: Claim) -> None:
        """All inputs of a task are here, or will not come."""
        self._arriving.discard(claim)

    def placed(self, claim: Claim) -> None:
        """A task has its room in the arena already, and writes there."""
        self._placed |= {claim} & self.leases.keys()

    def end(self, claim: Claim) -> Lease | None:
        """A task has ended; None if it was known to."""
        self._arriving.discard(claim)
        self._placed.discard(claim)
        return self.leases.pop(claim, None)

    def room(self, free: int | None, used: int) -> int | None:
        """Bytes that new outputs may take; None if the arena is empty, so that a task that is too large fails."""
        if free is None or (not used and not self.leases):
            return None
        unplaced = self.leases.keys() - self._placed
        return max(0, free - sum(self.leases[claim].task.planned.room for claim in unplaced))

    def ask(self, room: int | None, loaded: str, holds: str = "", after: str = "") -> RequestTasks:
        """The next Ask, of what it `holds`: for free slots, or one more urgent task; or one `after` a task's end."""
        held = [lease.task for lease in self.leases.values()]
        if any(task.alone for task in held):
            return WITHDRAW
        affinity = next((task.affinity for task in held if task.affinity), loaded)
        slots = self.slots - len(held) + len(self._arriving)
        above = None if slots > 0 else max(task.priority for task in held)
        taken = Counter[str]()
        for task in held:
            taken.update(task.planned.needs)
        amounts = {name: max(0, amount - taken[name]) for name, amount in self.resources.items()}
        return RequestTasks(1 if after else max(1, slots), room, WAIT_S, above, affinity, amounts, holds, after)


class SchedulerLink:
    """The connection to one of these schedulers, in turn. The worker calls `hello` once; the link repeats it.

    It never gives up: a message that gets no answer is sent to the next scheduler, or to the same one again, so any
    message may arrive twice. `renewed` is called after each Welcome, since that scheduler knows no earlier Ask.
    """

    def __init__(self, addresses: Sequence[str], trust: Trust, renewed: Callable[[], None]) -> None:
        for address in addresses:
            keys_for(address, trust)
        self._addresses, self._trust, self._renewed = list(addresses), trust, renewed
        self._dealer = Dealer(self._addresses[0], trust)
        self._hello: Register
        self._welcome: Registered | None = None
        self._lock = asyncio.Lock()
        self._tried = 0
        self._missed = 0
        self.heard = 0  # how many answers have come, from all schedulers

    @property
    def connected(self) -> bool:
        """Whether a scheduler has welcomed the worker, and is not known to be gone."""
        return self._welcome is not None

    async def hello(self, hello: Register) -> Registered:
        """Introduce the worker to this scheduler, and keep the message for all later ones."""
        self._hello, self._welcome = hello, None
        _, welcome = await self._connected()
        return welcome

    async def call(self, message: ToScheduler, timeout: float = ANSWER_S) -> ToWorker:
        """Send a message again and again until a scheduler answers within `timeout` seconds; returns the answer."""
        while True:
            with suppress(OSError):
                return await self.once(message, timeout)

    async def once(self, message: ToScheduler, timeout: float = ANSWER_S) -> ToWorker:
        """Send a message once; returns the answer, within `timeout` seconds plus those that the message asks to wait.

        Raises TimeoutError or ConnectionError if there is none: then the next call may go to another scheduler.
        """
        dealer, _ = await self._connected()
        try:
            answer = await dealer.call(message, timeout + (message.wait if isinstance(message, RequestTasks) else 0))
        except TimeoutError:
            self._missed += 1 if isinstance(message, Heartbeat) else MISSES
            if self._missed >= MISSES:
                await self._leave(dealer, "it does not answer")
            raise
        except ConnectionError as error:
            await self._leave(dealer, str(error))
            raise
        self._missed = 0
        self.heard += 1
        if isinstance(answer, UnknownWorker):
            if dealer is self._dealer:
                self._welcome = None
            raise ConnectionError("it was restarted")
        return answer

    async def close(self) -> None:
        """Close the connection."""
        await self._dealer.close(linger=1.0)

    async def _connected(self) -> tuple[Dealer, Registered]:
        """The connection to a scheduler that has answered Hello, and its Welcome."""
        async with self._lock:
            while self._welcome is None:
                try:
                    answer = await self._dealer.call(self._hello, BEAT_S * MISSES)
                except OSError as error:
                    await self._next(str(error) or "it does not answer")
                    continue
                if not isinstance(answer, Registered):
                    await self._next(f"it did not welcome this worker: {answer}")
                    continue
                self._welcome = answer
                self._tried = self._missed = 0
                self.heard += 1
                self._renewed()
            return self._dealer, self._welcome

    async def _leave(self, dealer: Dealer, reason: str) -> None:
        """Connect to the next scheduler, unless another call has done so already."""
        async with self._lock:
            if dealer is self._dealer:
                await self._next(reason)

    async def _next(self, reason: str) -> None:
        left = self._dealer.address
        if self._tried < len(self._addresses):
            what = "the scheduler is gone" if self.heard else "the scheduler does not answer yet: waiting for it"
            log.warning(what, scheduler=left, reason=reason)
        self._welcome, self._missed = None, 0
        self._tried += 1
        rounds, more = divmod(self._tried, len(self._addresses))
        await self._dealer.close()
        if not more:
            await asyncio.sleep(min(RETRY_S * rounds, RETRY_MOST_S))
        following = self._addresses.index(left) + 1
        self._dealer = Dealer(self._addresses[following % len(self._addresses)], self._trust)


async def free_when_orphaned(
    link: SchedulerLink,
    objects: WorkerObjects,
    busy: Callable[[], bool],
    orphan_s: float,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Free `objects` when no scheduler has answered for `orphan_s` seconds and no task runs.

    Time is counted in ticks of sleep, so that neither a clock that jumps, nor a process that was stopped for an hour,
    makes an orphan.
    """
    tick, alone, heard = min(TICK_S, orphan_s / 4), 0.0, link.heard
    while True:
        await sleep(tick)
        alone = alone + tick if link.heard == heard else 0.0
        heard = link.heard
        if alone >= orphan_s and not busy() and (held := objects.holding()):
            log.warning("no scheduler answers, freeing what is held for it", requests=len(held), seconds=alone)
            await objects.abandon()
