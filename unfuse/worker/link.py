"""A worker's connection to its schedulers: registration, task requests, progress, output.

It uses one scheduler at a time, and the next one if that fails.
"""

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
    TaskCompleted,
    TaskFailed,
    TaskStopped,
    ToScheduler,
    ToWorker,
    UnknownWorker,
)
from unfuse.core.supervisor import Supervisor
from unfuse.core.task import MAX_DELTAS_PER_MESSAGE, Claim, Lease, OutputDeltas
from unfuse.wire.address import Trust, keys_for
from unfuse.wire.dealer import Dealer
from unfuse.worker.compute_messages import about
from unfuse.worker.objects import WorkerObjects

log = structlog.get_logger(__name__)

#: Seconds that a step's progress waits for that of other tasks, to be sent in the same message.
GATHER_S = 0.01

#: Seconds between two messages with new output. A task that ends does not wait for them.
APPEND_S = 0.05

#: Seconds until a message is repeated that the scheduler could not record.
PAUSE_S = 1.0

#: Seconds that a request for tasks waits at the scheduler.
WAIT_S = 20.0

#: A request for nothing: it replaces a request that waits at the scheduler.
WITHDRAW = RequestTasks(0, 0, 0.0)

#: Seconds after which a silent scheduler counts as gone, beside those that the message asks it to wait.
ANSWER_S = 10.0

#: Seconds after which a heartbeat without an answer counts as missed.
HEARTBEAT_TIMEOUT_S = 3.0

#: Number of missed heartbeats in a row after which the scheduler counts as gone.
MISSES = 2

#: The first and the longest pause, in seconds, after all schedulers failed.
RETRY_S, RETRY_MOST_S = 0.1, 2.0

#: Most seconds between two checks for orphaned objects.
TICK_S = 1.0


class ProgressReporter:
    """Sends the progress of tasks, many in one message.

    `on_lease_lost` is called with each claim whose lease is lost.
    """

    def __init__(
        self, link: SchedulerLink, background: Supervisor, on_lease_lost: Callable[[Claim], Awaitable[None]]
    ) -> None:
        self._link, self._background = link, background
        self._on_lease_lost = on_lease_lost
        self._steps: list[StepProgress] = []

    def add(self, progress: StepProgress) -> None:
        """Report this progress within GATHER_S."""
        self._steps.append(progress)
        if len(self._steps) == 1:
            self._background.start("reporting steps", self._flush_soon)

    def flush(self) -> None:
        """Send all collected progress now, before the next message."""
        steps, self._steps = self._steps, []
        if steps:
            self._background.start("reporting steps", partial(self._send, ReportProgress(tuple(steps))))

    async def _flush_soon(self) -> None:
        await asyncio.sleep(GATHER_S)
        self.flush()

    async def _send(self, message: ReportProgress) -> None:
        answer = await self._link.call(message)
        for claim in answer.ended_claims if isinstance(answer, HeartbeatReply) else ():
            await self._on_lease_lost(claim)


@dataclass(eq=False)
class _UnrecordedOutput:
    """The output pieces of a task that are not known to be recorded."""

    #: The number of the first of these pieces.
    offset: int

    #: The pieces, in order.
    pieces: list[bytes] = field(default_factory=list)

    #: Set when no piece is left.
    recorded: asyncio.Event = field(default_factory=asyncio.Event)


class OutputRecorder:
    """Has the scheduler record new output of tasks, in one message after the other.

    So pieces stay in order. `on_lease_lost` is called with each claim for which the scheduler records nothing any more.
    """

    def __init__(
        self, link: SchedulerLink, background: Supervisor, on_lease_lost: Callable[[Claim], Awaitable[None]]
    ) -> None:
        self._link, self._background = link, background
        self._on_lease_lost = on_lease_lost
        self._unrecorded: dict[Claim, _UnrecordedOutput] = {}
        self._hurry = asyncio.Event()  # set while a task that has ended waits for its last pieces
        self._sending = False

    def add(self, message: OutputDeltas) -> None:
        """Have these pieces recorded soon."""
        self._unrecorded.setdefault(message.claim, _UnrecordedOutput(message.offset)).pieces += message.deltas
        if not self._sending:
            self._sending = True
            self._background.start("recording new output", self._send)

    async def wait_until_recorded(self, claim: Claim) -> None:
        """Wait until all pieces of a task are recorded, or its lease is lost."""
        if unrecorded := self._unrecorded.get(claim):
            self._hurry.set()
            await unrecorded.recorded.wait()

    async def read(self, lease: Lease) -> tuple[bytes, ...] | None:
        """Return the pieces that earlier attempts recorded; None if the lease is lost."""
        recorded: list[bytes] = []
        while len(recorded) < lease.recorded_deltas:
            match await self._link.call(ReadOutput(lease.claim, len(recorded))):
                case RecordedOutput(pieces) if pieces:
                    recorded += pieces
                case Rejected(lease_lost=False):
                    await asyncio.sleep(PAUSE_S)
                case _:
                    return None
        return tuple(recorded)

    async def _send(self) -> None:
        """Send messages until all pieces are recorded.

        The first message waits GATHER_S for the pieces of other tasks of the same step.
        """
        try:
            await asyncio.sleep(GATHER_S)
            while self._unrecorded:
                self._hurry.clear()
                pause = APPEND_S if await self._record(self._next_batch()) else PAUSE_S
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._hurry.wait()
        finally:
            self._sending = False

    def _next_batch(self) -> list[OutputDeltas]:
        """Return as many pieces as one message can have, those that have waited longest first."""
        deltas, room = list[OutputDeltas](), MAX_DELTAS_PER_MESSAGE
        for claim, unrecorded in self._unrecorded.items():
            deltas += [OutputDeltas(claim, unrecorded.offset, tuple(unrecorded.pieces[:room]))] if room else []
            room -= min(room, len(unrecorded.pieces))
        return deltas

    async def _record(self, deltas: list[OutputDeltas]) -> bool:
        """Have the scheduler record these pieces.

        Returns False if that failed and may be tried again.
        """
        answer = await self._link.call(AppendOutput(tuple(deltas)))
        if not isinstance(answer, HeartbeatReply):
            log.warning("the scheduler did not record new output, retrying", answer=str(answer))
            return False
        for delta in deltas:
            # A task with further pieces moves to the end, so that no task waits for ever behind a busy one.
            unrecorded = self._unrecorded.pop(delta.claim)
            unrecorded.offset += len(delta.deltas)
            del unrecorded.pieces[: len(delta.deltas)]
            if unrecorded.pieces and delta.claim not in answer.ended_claims:
                self._unrecorded[delta.claim] = unrecorded
            else:
                unrecorded.recorded.set()
        for claim in answer.ended_claims:
            await self._on_lease_lost(claim)
        return True


class TaskSlots:
    """The leases of a worker, and the slots and resources that its tasks use.

    A task whose input is still being written elsewhere uses its share of a resource, and no slot until the input is
    complete. A task that needs no resource uses a slot at once, or nothing would limit the number of such tasks.
    """

    def __init__(self, slots: int, resources: Mapping[str, int]) -> None:
        self.slots, self.resources = slots, dict(resources)
        self.leases: dict[Claim, Lease] = {}
        self._arriving: set[Claim] = set()
        self._placed: set[Claim] = set()  # tasks whose output has its place in the arena

    @property
    def arriving(self) -> int:
        """The number of tasks whose inputs are still being written or transferred."""
        return len(self._arriving)

    def add(self, lease: Lease) -> None:
        """Add a task that was leased to the worker."""
        self.leases[lease.claim] = lease
        if lease.task.planned.needs and not all(ref.is_whole for ref in lease.task.inputs):
            self._arriving.add(lease.claim)

    def arrived(self, claim: Claim) -> None:
        """Record that all inputs of a task are here, or will not come."""
        self._arriving.discard(claim)

    def mark_reserved(self, claim: Claim) -> None:
        """Record that a task has reserved the room of its output in the arena."""
        self._placed |= {claim} & self.leases.keys()

    def remove(self, claim: Claim) -> Lease | None:
        """Free the slot of a task that has ended.

        Returns the task's lease, or None if the slot was free already.
        """
        self._arriving.discard(claim)
        self._placed.discard(claim)
        return self.leases.pop(claim, None)

    def free_bytes(self, free: int | None, used: int) -> int | None:
        """Return the bytes that new outputs may use; None means any number.

        - `free`: the free bytes of the arena; None for a store without a fixed size.
        - `used`: the used bytes of the arena. If it is empty, any task is requested: one that is too large must fail,
          since waiting for room would not help it.
        """
        if free is None or (not used and not self.leases):
            return None
        unplaced = self.leases.keys() - self._placed
        return max(0, free - sum(self.leases[claim].task.planned.output_size for claim in unplaced))

    def next_request(
        self, output_room: int | None, adapter_affinity: str, loaded_model: str = "", after_pool: str = ""
    ) -> RequestTasks:
        """Return the next request: for the free slots, or for one more urgent task.

        - `output_room`: bytes that new outputs may use; None means any number.
        - `adapter_affinity`: affinity of the last task with a LoRA adapter, which is still loaded.
        - `loaded_model`: the loaded set of weights.
        - `after_pool`: if set, only one follow-up task of a task of this pool is requested.
        """
        tasks = [lease.task for lease in self.leases.values()]
        if any(task.alone for task in tasks):
            return WITHDRAW

        affinity = next((task.affinity for task in tasks if task.affinity), adapter_affinity)
        slots = self.slots - len(tasks) + len(self._arriving)
        min_priority = None if slots > 0 else max(task.priority for task in tasks)
        used = Counter[str]()
        for task in tasks:
            used.update(task.planned.needs)
        amounts = {name: max(0, amount - used[name]) for name, amount in self.resources.items()}
        return RequestTasks(
            1 if after_pool else max(1, slots),
            output_room,
            WAIT_S,
            min_priority,
            affinity,
            amounts,
            loaded_model,
            after_pool,
        )


class SchedulerLink:
    """The connection to one scheduler at a time.

    The worker calls `register` once. After that, the link repeats the registration at each scheduler that it connects
    to, and calls `on_registered` each time, since a new scheduler does not have the worker's request for tasks.

    A message without an answer is sent again, to the next scheduler or to the same one, without limit. So any message
    may arrive twice.
    """

    def __init__(self, addresses: Sequence[str], trust: Trust, on_registered: Callable[[], None]) -> None:
        for address in addresses:
            keys_for(address, trust)  # raises ConfigError now rather than when this scheduler is used
        self._addresses, self._trust = list(addresses), trust
        self._on_registered = on_registered
        self._dealer = Dealer(self._addresses[0], trust)
        self._registration: Register
        self._registered: Registered | None = None
        self._lock = asyncio.Lock()
        self._tried = 0  # number of schedulers tried since the last registration
        self._missed = 0  # number of heartbeats in a row without an answer
        self._was_lost = False  # whether a registered connection was lost since the last registration

        #: Number of answers so far, from all schedulers.
        self.last_answer = 0

    @property
    def connected(self) -> bool:
        """Whether a scheduler has registered the worker and is not known to be gone."""
        return self._registered is not None

    async def register(self, registration: Register) -> Registered:
        """Register the worker with the present scheduler. Returns the scheduler's answer.

        The link repeats this registration at each later scheduler.
        """
        self._registration, self._registered = registration, None
        _, registered = await self._connected()
        return registered

    async def call(self, message: ToScheduler, timeout: float = ANSWER_S) -> ToWorker:
        """Send a message, again and again, until a scheduler answers. Returns the answer.

        `timeout`: the seconds of each try, see `once`.
        """
        while True:
            with suppress(OSError):
                return await self.once(message, timeout)

    async def once(self, message: ToScheduler, timeout: float = ANSWER_S) -> ToWorker:
        """Send a message once. Returns the answer.

        It must come within `timeout` seconds plus those that the message asks the scheduler to wait. Raises
        TimeoutError or ConnectionError if there is none: then the next call may use another scheduler.
        """
        dealer, _ = await self._connected()
        try:
            answer = await dealer.call(message, timeout + (message.wait if isinstance(message, RequestTasks) else 0))
        except TimeoutError:
            # A heartbeat has a short timeout, so that one alone may be late. Other messages have a long one.
            self._missed += 1 if isinstance(message, Heartbeat) else MISSES
            if self._missed >= MISSES:
                await self._switch_from(dealer, "the scheduler does not answer")
            raise
        except ConnectionError as error:
            await self._switch_from(dealer, str(error))
            raise
        self._missed = 0
        self.last_answer += 1
        if isinstance(answer, UnknownWorker):
            if dealer is self._dealer:  # otherwise another call has already replaced the connection
                self._registered, self._was_lost = None, True
            raise ConnectionError("the scheduler was restarted")
        return answer

    async def close(self) -> None:
        """Close the connection."""
        await self._dealer.close(linger=1.0)

    async def _connected(self) -> tuple[Dealer, Registered]:
        """Return the connection to a scheduler that has registered the worker, and the registration's answer."""
        async with self._lock:
            while self._registered is None:
                try:
                    answer = await self._dealer.call(self._registration, HEARTBEAT_TIMEOUT_S * MISSES)
                except OSError as error:
                    await self._switch(str(error) or "the scheduler does not answer")
                    continue
                if not isinstance(answer, Registered):
                    await self._switch(f"the scheduler did not register this worker: {answer}")
                    continue
                if self._was_lost:
                    self._log_return(answer)
                self._registered, self._was_lost = answer, False
                self._tried = self._missed = 0
                self.last_answer += 1
                self._on_registered()
            return self._dealer, self._registered

    def _log_return(self, answer: Registered) -> None:
        """Log that a scheduler has registered the worker again.

        It also logs a warning if that scheduler offers none of the worker's models. Then only requests of other servers
        with the same queue can use the worker.
        """
        log.info("connected to the scheduler again", scheduler=self._dealer.address)
        models = {spec.name for spec in self._registration.model_specs}
        if models and models.isdisjoint(name for name, *_ in answer.models):
            log.warning(
                "the scheduler offers none of this worker's models, so the worker gets no tasks, unless another server "
                "has the same queue: restart the worker to load the offered models",
                models=sorted(models),
                offered=sorted(name for name, *_ in answer.models),
            )

    async def _switch_from(self, dealer: Dealer, reason: str) -> None:
        """Connect to the next scheduler, unless another call has done so already."""
        async with self._lock:
            if dealer is self._dealer:
                await self._switch(reason)

    async def _switch(self, reason: str) -> None:
        """Close the connection, pause after a round of all schedulers, and use the next one."""
        address = self._dealer.address
        if self._tried < len(self._addresses):
            event = "lost the connection to the scheduler" if self.last_answer else "waiting for the scheduler"
            log.warning(event, scheduler=address, reason=reason)
        self._was_lost = self._was_lost or self._registered is not None
        self._registered, self._missed = None, 0
        self._tried += 1
        rounds, tried_in_round = divmod(self._tried, len(self._addresses))
        await self._dealer.close()
        if not tried_in_round:
            await asyncio.sleep(min(RETRY_S * rounds, RETRY_MOST_S))
        next_index = self._addresses.index(address) + 1
        self._dealer = Dealer(self._addresses[next_index % len(self._addresses)], self._trust)


async def free_when_orphaned(
    link: SchedulerLink,
    objects: WorkerObjects,
    busy: Callable[[], bool],
    orphan_s: float,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Free `objects` when no scheduler has answered for `orphan_s` seconds and no task runs.

    Time is counted in ticks of `sleep`, so neither a clock that jumps nor a process that was stopped for an hour frees
    objects. `busy` returns whether a task runs.
    """
    tick_s = min(TICK_S, orphan_s / 4)
    silent_s = 0.0
    answers = link.last_answer
    while True:
        await sleep(tick_s)
        silent_s = silent_s + tick_s if link.last_answer == answers else 0.0
        answers = link.last_answer
        if silent_s >= orphan_s and not busy() and (requests := objects.stored_requests()):
            log.warning(
                "no scheduler answers, freeing the objects of its requests", requests=len(requests), seconds=silent_s
            )
            await objects.abandon()


def log_outcome(message: TaskStopped | TaskCompleted | TaskFailed) -> None:
    """Log how a task ended."""
    match message:
        case TaskCompleted():
            log.debug("task done", run_s=message.timings.run_s, **about(message.claim))
        case TaskFailed(reason="drain"):
            log.info("task handed back", reason=message.message, **about(message.claim))
        case TaskFailed():
            log.warning("task failed", kind=message.kind, reason=message.message, **about(message.claim))
        case TaskStopped():
            log.info("task stopped", run_s=message.timings.run_s, **about(message.claim))
