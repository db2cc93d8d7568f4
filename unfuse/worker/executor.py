"""Drives a worker's compute processes: starts them, gives them tasks, watches them, and restarts them."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from logging import ERROR, INFO
from math import exp
from pathlib import Path

import structlog
from typing_extensions import override

from unfuse.core.errors import ConfigError, ProtocolError, TransientError
from unfuse.core.messages import (
    CachePrefix,
    CheckpointSaved,
    ExactBatchStats,
    FailureKind,
    OutputAnnounced,
    StepProgress,
    TaskCompleted,
    TaskFailed,
    TaskStopped,
    WorkerStatus,
)
from unfuse.core.supervisor import Supervisor
from unfuse.core.task import Claim, Lease, OutputDeltas
from unfuse.transfer.base import ProcessPairs
from unfuse.worker.compute_messages import (
    CancelTask,
    FromCompute,
    InputArrived,
    InputTaken,
    LeaksFound,
    LoadModels,
    ModelsLoaded,
    PairCall,
    PairDone,
    RankStatus,
    RunTask,
    StepPlan,
    TaskWaits,
    ToCompute,
)
from unfuse.worker.compute_process import ComputeProcess
from unfuse.worker.remote_inputs import ENDED, InputStreams

log = structlog.get_logger(__name__)

PAGE = os.sysconf("SC_PAGE_SIZE")

OVER_S = 15.0  # seconds over which utilization is a mean; what lies longer back counts ever less

RESTART_S = 1.0  # seconds before a restart that failed is tried again

SWAPPED = "another set of weights is loaded in its place"

TRIED = 3  # so many restarts in turn may fail before ranks are lost, or the set of weights before is loaded again

WATCH_S = 0.5  # seconds between two checks of compute processes that have tasks


class ComputePairs(ProcessPairs):
    """The parent's end: asks the compute process, through `send`, and waits for its answers.

    Made on the event loop that `send` needs; threads call the methods of Pairs, and the loop the other ones. A call
    ends only when the process has answered or is gone: until then it may write to the arena.
    """

    def __init__(self, send: Callable[[PairCall], Awaitable[bool]]) -> None:
        self._send, self._loop = send, asyncio.get_running_loop()
        self._waiting: dict[str, Future[int]] = {}

    @override
    def offer(self, pair: str, backend: str, host: str, patience_s: float) -> int:
        return self._ask(PairCall("offer", pair, (backend, host, patience_s)))

    @override
    def join(self, pair: str, backend: str, host: str, patience_s: float, at: tuple[str, int]) -> None:
        self._ask(PairCall("join", pair, (backend, host, patience_s, at)))

    @override
    def move(self, pair: str, start: int, stop: int) -> None:
        self._ask(PairCall("move", pair, (start, stop)))

    @override
    def part(self, pair: str) -> None:
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._tell(PairCall("part", pair)), self._loop)

    def heard(self, answer: PairDone) -> None:
        """The process has answered."""
        if waiting := self._waiting.pop(answer.pair, None):
            if answer.error:
                waiting.set_exception(ConnectionError(answer.error))
            else:
                waiting.set_result(answer.port)

    def lost(self) -> None:
        """The process is gone, and its pairs are."""
        while self._waiting:
            self._waiting.popitem()[1].set_exception(ConnectionError("the compute process ended"))

    def _ask(self, message: PairCall) -> int:
        """Returns the port of the answer. Raises ConnectionError."""
        answer = Future[int]()
        asyncio.run_coroutine_threadsafe(self._tell(message, answer), self._loop)
        return answer.result()

    async def _tell(self, message: PairCall, answer: Future[int] | None = None) -> None:
        if answer:
            self._waiting[message.pair] = answer
        if not await self._send(message):
            self.heard(PairDone(message.pair, error="no compute process runs"))


class BusyShare:
    """The share of the last seconds in which there were tasks to compute."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._at = now, now()
        self._share, self._busy = 0.0, False

    def tell(self, busy: bool) -> None:
        """From now on there are tasks, or none."""
        self._share, self._at, self._busy = self.share, self._now(), busy

    @property
    def share(self) -> float:
        """From 0 to 1."""
        target = float(self._busy)
        return target + (self._share - target) * exp((self._at - self._now()) / OVER_S)


def resident(pids: Iterable[int]) -> int:
    """Bytes of host memory that these processes have; what several map counts in each."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return total


Report = Callable[
    [
        ModelsLoaded
        | StepProgress
        | CheckpointSaved
        | OutputAnnounced
        | OutputDeltas
        | CachePrefix
        | LeaksFound
        | TaskStopped
        | TaskCompleted
        | TaskFailed
    ],
    Awaitable[None],
]


class Executor:
    """The compute processes that run a worker's stages together, behind `run` and `cancel`.

    All processes get the tasks; the first one decides the turns, which are passed on to the others here, and answers
    for all. When one dies, all are ended and started again. `report` is called with everything that happens to a task,
    with Ready after a restart, and with the leaks that any process finds. Tasks that a dead process had begun are
    reported as crashed, others as handed back.
    A process is killed if the first one has tasks and sends nothing for `stall_s` seconds, if its own memory exceeds
    `memory_limit` bytes (0: any) then, or if it is one of several and stopped. A task that must run alone waits here
    until nothing else runs, and later tasks wait for its end. Processes are forked where there is a `fork_server`.
    """

    def __init__(
        self,
        loads: Sequence[LoadModels],
        report: Report,
        stall_s: float = 600.0,
        memory_limit: int = 0,
        fork_server: socket.socket | None = None,
        buffer: int = 0,
    ) -> None:
        self._report, self._stall_s, self._memory_limit = report, stall_s, memory_limit
        self._background, self._run_dir = Supervisor(), next((load.run_dir for load in loads), "")
        self._processes = [ComputeProcess(load, self._background, fork_server) for load in loads]
        self._waiting: dict[Claim, RunTask] = {}
        self._given: dict[Claim, RunTask] = {}
        self._begun: set[Claim] = set()
        self._unwritten: set[Claim] = set()
        self._heard_at = 0.0
        self._watching: asyncio.Task[None] | None = None
        self.ready = False
        self._busy = BusyShare()
        self._statuses = [RankStatus()] * len(loads)
        self._batch_invariance: dict[str, ExactBatchStats] = {}  # of earlier processes too
        self.retracted = 0  # texts whose KV was given up and that no heartbeat has reported yet
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set to a TransientError when ranks did not start again a few times in turn, as when a device is gone."""
        self._before: list[LoadModels] = []
        self.pairs = ComputePairs(self._send_if_ready)  # moves bytes of the arena, in the first process
        self.passing = InputStreams(buffer, self._send_if_ready, len(loads))
        """Passes on inputs that are longer than the `buffer`."""

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run."""
        return [process.pid for process in self._processes if process.pid]

    @property
    def loaded(self) -> tuple[str, float]:
        """The set of weights that the processes have, and the seconds that loading it took."""
        return self._processes[0].load.holds, max(process.load_s for process in self._processes)

    @property
    def status(self) -> WorkerStatus:
        """The status of the compute processes. The first one reports for all what all have in common."""
        first = self._statuses[0]
        return WorkerStatus(
            memory=first.device_memory or resident(self.pids),
            utilization=self._busy.share,
            waiting_for_results=len(self._unwritten),
            ranks=tuple(rank.time for rank in self._statuses) if len(self._statuses) > 1 else (),
            texts=first.texts,
            batch_invariance=self._batch_invariance,
        )

    async def start(self) -> ModelsLoaded:
        """Start and load all processes. Returns the Ready of the first. Raises ConfigError if one cannot load."""
        self._watching = self._watching or self._background.forever("watching compute", self._watch)
        meeting = Path(self._run_dir, f".ranks.{secrets.token_hex(8)}")
        starting = [asyncio.create_task(process.start(str(meeting))) for process in self._processes]
        try:
            found = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self._end()
            raise
        finally:
            meeting.unlink(missing_ok=True)
        self.ready = True
        return found[0]

    async def serve(self) -> None:
        """Report what the first process sends, for ever; when one dies, report that and restart all."""
        while True:
            dead = await self._pump()
            self.ready = False
            await self._restart_after(dead)
            log.info("starting compute again")
            await self._report(await self._start_again())

    async def _start_again(self) -> ModelsLoaded:
        """Restart processes that have loaded before; try again until that succeeds, or ranks are `lost`."""
        failures = 0
        while True:
            try:
                return await self.start()
            except ConfigError as error:
                failures += 1
                log.error("compute did not start", reason=str(error))
                if failures == TRIED and self._before:
                    self._reload(self._before)
                if failures == TRIED and len(self._processes) > 1 and not self.lost.done():
                    self.lost.set_exception(TransientError(f"its ranks cannot be started again: {error}"))
                await asyncio.sleep(RESTART_S)

    def swap(self, loads: Sequence[LoadModels]) -> None:
        """Load other weights while nothing runs, or these again where they cannot be loaded; Ready is reported then."""
        self.ready, self._before = False, [process.load for process in self._processes]
        self._reload(loads)
        for process in self._processes:
            process.kill(SWAPPED)

    def _reload(self, loads: Sequence[LoadModels]) -> None:
        for process, load in zip(self._processes, loads, strict=True):
            process.load = load

    async def run(self, lease: Lease, peers: Mapping[str, tuple[str, str]], recorded: tuple[bytes, ...] = ()) -> None:
        """Give a leased task to the processes, with what is `recorded` of its output; its end is reported.

        It is handed back if a process that had taken an input of it is gone.
        """
        if not self.passing.begins(lease.claim):
            await self._report(
                TaskFailed(lease.claim, "hand_back", f"{ENDED}, and its inputs with it", reason="compute")
            )
            return
        self._waiting[lease.claim] = RunTask(lease, dict(peers), recorded)
        await self._feed()

    async def cancel(self, claim: Claim, save: bool = False, *, if_saved: bool = False) -> None:
        """Drop a task at its next step. Stopped is reported unless it ends first; with `save`, also Saved.

        With `if_saved`, it goes on where its state cannot be saved.
        """
        if self._waiting.pop(claim, None):
            await self._report(TaskStopped(claim))
            await self._feed()
        elif claim in self._given:
            await self._processes[0].send(CancelTask(claim, save, if_saved))

    async def close(self) -> None:
        """End the processes at once."""
        self.ready = False
        if self._watching:
            self._watching.cancel()
        await self._end()
        self.passing.close()

    async def _end(self) -> None:
        await asyncio.gather(*(process.close() for process in self._processes))
        self.pairs.lost()
        self.passing.lost()

    async def _send_if_ready(self, message: InputArrived | CancelTask | PairCall) -> bool:
        """Send all processes a piece of an input, or the first one anything else. Returns whether they answer."""
        if self.ready:
            await self._send(message, self._processes if isinstance(message, InputArrived) else self._processes[:1])
        return self.ready

    async def _send(self, message: ToCompute, processes: Sequence[ComputeProcess]) -> None:
        for process in processes:
            await process.send(message)

    async def _feed(self) -> None:
        """Give the processes all tasks that may run now, in order of arrival."""
        for claim, run in list(self._waiting.items()):
            alone = run.lease.task.alone or any(given.lease.task.alone for given in self._given.values())
            if not self.pids or (alone and self._given):
                return
            self._heard_at = self._heard_at if self._given else time.monotonic()
            self._given[claim] = self._waiting.pop(claim)
            self._busy.tell(True)
            await self._send(run, self._processes)

    async def _pump(self) -> ComputeProcess:
        """Handle messages until a process has ended. Returns that process."""
        listening = [asyncio.create_task(self._listen(process)) for process in self._processes]
        try:
            done, _ = await asyncio.wait(listening, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)

    async def _listen(self, process: ComputeProcess) -> ComputeProcess:
        """Handle what a process sends until it ends. Of tasks, the first one reports for all."""
        rank = self._processes.index(process)
        while True:
            try:
                message = await process.receive()
            except EOFError:
                return process
            except ProtocolError as error:
                process.kill(f"killed, because it sent something that is not a message: {error}")
                return process
            if rank == 0:
                self._heard_at = time.monotonic()
            match message:
                case RankStatus():
                    self.retracted += message.retracted - self._statuses[rank].retracted
                    self._batch_invariance |= message.batch_invariance
                    self._statuses[rank] = message
                case LeaksFound():
                    await self._report(message)
                case InputTaken():
                    self.passing.heard(message)
                case _ if rank == 0:
                    await self._take(message)

    async def _take(self, message: FromCompute) -> None:
        match message:
            case StepPlan():
                await self._send(message, self._processes[1:])
            case TaskWaits():
                self._unwritten |= {message.claim} & self._given.keys()
            case StepProgress():
                self._unwritten.discard(message.claim)
                if message.claim in self._given:
                    self._begun.add(message.claim)
                    await self._report(message)
            case CheckpointSaved() | OutputAnnounced() | OutputDeltas() | CachePrefix():
                await self._report(message)
            case PairDone():
                self.pairs.heard(message)
            case TaskFailed(kind="crash"):  # killing the process reports this task and all others that it had begun
                self._processes[0].kill(f"killed, because its device failed: {message.message}")
            case TaskStopped() | TaskCompleted() | TaskFailed():
                self._begun.discard(message.claim)
                self._unwritten.discard(message.claim)
                if self._given.pop(message.claim, None):
                    self._busy.tell(bool(self._given))
                    await self._report(message)
                    await self._feed()

    async def _watch(self) -> None:
        """Kill processes that make no progress, or take too much memory."""
        slept = time.monotonic()
        await asyncio.sleep(WATCH_S)
        self._heard_at += max(0.0, time.monotonic() - slept - WATCH_S)  # time in which this process was stopped
        for process in self._processes:
            busy = self._stalled() or process.excess(self._memory_limit) if self._given else ""
            if reason := process.halted(WATCH_S) or busy:
                process.kill(reason)

    def _stalled(self) -> str:
        if time.monotonic() - self._heard_at <= self._stall_s:
            return ""
        return f"killed, because it made no progress for {self._stall_s:g} s (--stall-s allows more)"

    async def _restart_after(self, dead: ComputeProcess) -> None:
        """End the other processes, and report the tasks that ended with them."""
        words = await dead.last_words()
        await self._end()
        # Device memory is known anew once the next processes have loaded.
        self._statuses = [RankStatus(device_memory=rank.device_memory) for rank in self._statuses]
        log.log(INFO if words == SWAPPED else ERROR, "compute process died", reason=words, begun=len(self._begun))
        claims, begun = [*self._given, *self._waiting], self._begun
        self._given, self._waiting, self._begun, self._unwritten = {}, {}, set(), set()
        self._busy.tell(False)
        message, evidence = f"the compute process died: {words}", f"{words}\n{dead.log}".strip()
        for claim in claims:
            crashed = claim in begun
            kind: FailureKind = "crash" if crashed else "hand_back"
            reason = "" if crashed else "compute"
            company = crashed and len(begun) > 1
            await self._report(TaskFailed(claim, kind, message, evidence, company=company, reason=reason))
