"""Drives a worker's compute processes: starts them, sends them tasks, watches and restarts them."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from logging import ERROR, INFO
from math import exp
from pathlib import Path

import structlog
from typing_extensions import override

from unfuse.core.errors import ConfigError, DeviceUnusable, ProtocolError, TransientError
from unfuse.core.messages import (
    CachePrefix,
    CheckpointSaved,
    OutputAnnounced,
    StepProgress,
    TaskCompleted,
    TaskFailed,
    TaskStopped,
)
from unfuse.core.supervisor import Supervisor
from unfuse.core.task import Claim, Lease, OutputDeltas
from unfuse.core.worker_status import BatchInvarianceStats, WorkerStatus
from unfuse.transfer.base import ProcessPairs
from unfuse.worker.compute_messages import (
    CancelTask,
    DeviceFailed,
    FromCompute,
    InputArrived,
    InputTaken,
    LeaksFound,
    LoadModels,
    MemoryShortage,
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
from unfuse.worker.device_health import DeviceHealth
from unfuse.worker.remote_inputs import ENDED, InputStreams

log = structlog.get_logger(__name__)

#: Bytes of a memory page.
PAGE = os.sysconf("SC_PAGE_SIZE")

#: Time constant of the utilization's exponential mean, in seconds.
OVER_S = 15.0

#: Seconds before a failed restart is tried again, twice as long each time, up to the most.
RESTART_S, MOST_RESTART_S = 1.0, 60.0

#: The reason of a compute process that is killed to swap models. Its end is no error.
SWAPPED = "stopped to load another set of weights"

#: Number of failed restarts in a row after which the previous model is loaded again, or ranks are lost.
TRIED = 3

#: Seconds to wait for the last messages of the other ranks after one has ended.
LAST_MESSAGES_S = 0.25

#: Seconds between two checks of the compute processes.
WATCH_S = 0.5


class ComputePairs(ProcessPairs):
    """The parent's end of the transfer pairs: calls them in the compute process through `send`.

    Made on the event loop that `send` needs. Threads call the methods of ProcessPairs, the loop calls the other ones.
    A call returns only when the process has answered or is gone, since the process may write to the arena until then.
    """

    def __init__(self, send: Callable[[PairCall], Awaitable[bool]]) -> None:
        self._send, self._loop = send, asyncio.get_running_loop()
        self._waiting: dict[str, Future[int]] = {}

    @override
    def offer(self, pair: str, backend: str, host: str, patience_s: float) -> int:
        return self._call(PairCall("offer", pair, (backend, host, patience_s)))

    @override
    def join(self, pair: str, backend: str, host: str, patience_s: float, at: tuple[str, int]) -> None:
        self._call(PairCall("join", pair, (backend, host, patience_s, at)))

    @override
    def move(self, pair: str, start: int, stop: int) -> None:
        self._call(PairCall("move", pair, (start, stop)))

    @override
    def part(self, pair: str) -> None:
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._send_call(PairCall("part", pair)), self._loop)

    def finish_call(self, answer: PairDone) -> None:
        """Finish the call that the process has answered."""
        if future := self._waiting.pop(answer.pair, None):
            if answer.error:
                future.set_exception(ConnectionError(answer.error))
            else:
                future.set_result(answer.port)

    def fail_all(self) -> None:
        """Fail all calls: the process is gone, and its pairs with it."""
        while self._waiting:
            self._waiting.popitem()[1].set_exception(ConnectionError("the compute process ended"))

    def _call(self, message: PairCall) -> int:
        """Send a call and wait for its answer. Returns its port. Raises ConnectionError."""
        answer = Future[int]()
        asyncio.run_coroutine_threadsafe(self._send_call(message, answer), self._loop)
        return answer.result()

    async def _send_call(self, message: PairCall, answer: Future[int] | None = None) -> None:
        """Send a call; `answer` gets its answer, or the error if no process runs."""
        if answer:
            self._waiting[message.pair] = answer
        if not await self._send(message):
            self.finish_call(PairDone(message.pair, error="no compute process is running"))


class BusyShare:
    """Utilization: the share of the last seconds in which there were tasks to compute.

    It is an exponential mean with the time constant OVER_S.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        # The utilization at the last change, and its monotonic time in seconds.
        self._now, self._at = now, now()
        self._share, self._busy = 0.0, False

    def set_busy(self, busy: bool) -> None:
        """Record that there are tasks from now on, or none."""
        self._share = self.utilization
        self._at = self._now()
        self._busy = busy

    @property
    def utilization(self) -> float:
        """The utilization, from 0 to 1."""
        target = float(self._busy)
        return target + (self._share - target) * exp((self._at - self._now()) / OVER_S)


def resident(pids: Iterable[int]) -> int:
    """Return the bytes of host memory that these processes use.

    Memory shared by several counts in each.
    """
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return total


#: Called with each event of the compute processes.
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
    """The compute processes that run a worker's stages together, one for each rank.

    All processes get all tasks. The first rank decides the step plans, which the executor passes on to the others, and
    reports for all. When one process dies, all are ended and started again. Tasks that the first rank had started are
    reported as crashed, the others as handed back. After a device error, `health` decides when they start again.

    All processes are killed if there are tasks and the first rank sends nothing for `stall_s` seconds. A process is
    killed if its own memory exceeds `memory_limit` bytes (0: any) while there are tasks, or if it is one of several
    ranks and stays stopped. A task that must run alone waits until no other task runs, and later tasks wait for its
    end.

    - `loads`: what each rank loads.
    - `report`: called with all events of tasks, with ModelsLoaded after a restart, and with the leaks of any process.
    - `fork_server`: forks the processes, if there is one.
    - `buffer`: inputs of longer prompts, in tokens, are received in chunks; see InputStreams.
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
        self._report = report
        self._stall_s, self._memory_limit = stall_s, memory_limit
        self._background, self._run_dir = Supervisor(), next((load.run_dir for load in loads), "")
        self._processes = [ComputeProcess(load, self._background, fork_server) for load in loads]
        self._waiting: dict[Claim, RunTask] = {}  # tasks that the processes have not got yet
        self._sent: dict[Claim, RunTask] = {}
        self._started: set[Claim] = set()  # sent tasks that the first rank has begun
        self._waiting_for_results: set[Claim] = set()
        self._progress_at = 0.0  # monotonic time of the first rank's last message, in seconds
        self._watching: asyncio.Task[None] | None = None

        #: Whether the processes have loaded their models and accept tasks.
        self.ready = False

        #: Whether the devices of the processes are healthy.
        self.health = DeviceHealth()
        self._device_failed: DeviceFailed | None = None  # why the processes end, if a device failed

        self._busy = BusyShare()
        self._statuses = [RankStatus()] * len(loads)
        self._batch_invariance: dict[str, BatchInvarianceStats] = {}  # of earlier processes too
        self._previous_loads: list[LoadModels] = []

        #: Number of retracted texts that no heartbeat has reported yet.
        self.retracted = 0

        #: Set to a TransientError when ranks failed to restart TRIED times in a row, as when a device is gone.
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        #: Moves bytes of the arena, in the first process.
        self.pairs = ComputePairs(self._send_if_ready)

        #: Streams inputs of prompts that are longer than the `buffer` into the processes.
        self.replies = InputStreams(buffer, self._send_if_ready, len(loads))

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that were started last. Empty before the first start."""
        return [process.pid for process in self._processes if process.pid]

    @property
    def loaded(self) -> tuple[str, float]:
        """The loaded set of weights, and the seconds in which the slowest rank loaded it."""
        return self._processes[0].load.loaded_model, max(process.load_s for process in self._processes)

    @property
    def status(self) -> WorkerStatus:
        """The status of the compute processes.

        It is that of the first rank, with the times of each rank.
        """
        first = self._statuses[0]
        return WorkerStatus(
            memory=first.device_memory or resident(self.pids),
            utilization=self._busy.utilization,
            waiting_for_results=len(self._waiting_for_results),
            ranks=tuple(rank.time for rank in self._statuses) if len(self._statuses) > 1 else (),
            texts=first.texts,
            batch_invariance=self._batch_invariance,
            device_fault=self.health.fault,
        )

    async def start(self) -> ModelsLoaded:
        """Start all processes and load their models. Returns the ModelsLoaded of the first rank.

        Raises ConfigError if one cannot load.
        """
        self._watching = self._watching or self._background.start_loop("watching the compute processes", self._watch)
        rendezvous = Path(self._run_dir, f".ranks.{secrets.token_hex(8)}")
        starting = [asyncio.create_task(process.start(str(rendezvous))) for process in self._processes]
        try:
            loaded = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self._end()
            raise
        finally:
            rendezvous.unlink(missing_ok=True)
        self.health.record_started([models.device_id for models in loaded])
        self.ready = True
        return loaded[0]

    async def serve(self) -> None:
        """Report the messages of the processes, until cancelled.

        When a process dies, its tasks are reported, and all processes are restarted.
        """
        while True:
            dead = await self._wait_for_end()
            self.ready = False
            await self._report_death(dead)
            log.info("restarting the compute process")
            await self._report(await self._restart())

    async def _restart(self) -> ModelsLoaded:
        """Restart processes that have loaded before, until that succeeds or ranks are `lost`."""
        failures = 0
        while True:
            await self.health.pause()
            try:
                return await self.start()
            except ConfigError as error:
                failures += 1
                log.error("the compute process did not start", reason=str(error))
                if isinstance(error, DeviceUnusable):
                    self.health.record_unusable(error)

                # A set that cannot be loaded, such as after a swap, must not keep the worker from serving the old one.
                # If ranks cannot restart at all, a device may be lost: the launcher then tries fewer of them.
                if failures == TRIED and self._previous_loads:
                    self._reload(self._previous_loads)
                if failures == TRIED and len(self._processes) > 1 and not self.lost.done():
                    self.lost.set_exception(TransientError(f"the ranks cannot be restarted: {error}"))
                # Each try loads models again: memory that another program uses may be missing for hours.
                await asyncio.sleep(min(MOST_RESTART_S, RESTART_S * 2.0 ** min(failures - 1, 16)))

    def swap(self, loads: Sequence[LoadModels]) -> None:
        """Swap models: load other weights while no task runs. ModelsLoaded is reported afterwards.

        If these weights cannot be loaded, the previous ones are loaded again.
        """
        self.ready, self._previous_loads = False, [process.load for process in self._processes]
        self._reload(loads)
        for process in self._processes:
            process.kill(SWAPPED)

    def _reload(self, loads: Sequence[LoadModels]) -> None:
        for process, load in zip(self._processes, loads, strict=True):
            process.load = load

    async def run(self, lease: Lease, peers: Mapping[str, tuple[str, str]], recorded: tuple[bytes, ...] = ()) -> None:
        """Send a leased task to the processes. Its end is reported.

        - `peers`: (node, arena address) of the owners of its inputs, by worker id.
        - `recorded`: the recorded pieces of its output.

        The task is handed back if the processes have restarted since they received its streamed inputs.
        """
        if not self.replies.is_received(lease.claim):
            await self._report(
                TaskFailed(
                    lease.claim, "hand_back", f"{ENDED}, which had received inputs of the task", reason="compute"
                )
            )
            return
        self._waiting[lease.claim] = RunTask(lease, dict(peers), recorded)
        await self._send_runnable()

    async def cancel(self, claim: Claim, save: bool = False, *, if_saved: bool = False) -> None:
        """Drop a task at its next step. TaskStopped is reported unless the task ends first.

        With `save`, CheckpointSaved is reported before. With `if_saved`, the task continues if its state cannot be
        saved.
        """
        if self._waiting.pop(claim, None):
            await self._report(TaskStopped(claim))
            await self._send_runnable()
        elif claim in self._sent:
            await self._processes[0].send(CancelTask(claim, save, if_saved))

    async def close(self) -> None:
        """End the processes at once."""
        self.ready = False
        if self._watching:
            self._watching.cancel()
        await self._end()
        self.replies.close()

    async def _end(self) -> None:
        """End the processes, and fail the transfers that need them."""
        await asyncio.gather(*(process.close() for process in self._processes))
        self.pairs.fail_all()
        self.replies.fail_all()

    async def _send_if_ready(self, message: InputArrived | CancelTask | PairCall) -> bool:
        """Send an input chunk to all processes, or another message to the first.

        Returns whether the processes are ready.
        """
        if self.ready:
            await self._send(message, self._processes if isinstance(message, InputArrived) else self._processes[:1])
        return self.ready

    async def _send(self, message: ToCompute, processes: Sequence[ComputeProcess]) -> None:
        for process in processes:
            await process.send(message)

    async def _send_runnable(self) -> None:
        """Send the processes all tasks that may run now, in order of arrival."""
        for claim, run in list(self._waiting.items()):
            alone = run.lease.task.alone or any(sent.lease.task.alone for sent in self._sent.values())
            if not self.pids or (alone and self._sent):
                return
            # An idle process sends nothing, so the stall time counts from the first task.
            self._progress_at = self._progress_at if self._sent else time.monotonic()
            self._sent[claim] = self._waiting.pop(claim)
            self._busy.set_busy(True)
            await self._send(run, self._processes)

    async def _wait_for_end(self) -> ComputeProcess:
        """Handle messages until a process has ended. Returns that process."""
        listening = [asyncio.create_task(self._handle_messages(process)) for process in self._processes]
        try:
            done, others = await asyncio.wait(listening, return_when=asyncio.FIRST_COMPLETED)
            if others:  # this process may have ended because the device of another rank failed
                await asyncio.wait(others, timeout=LAST_MESSAGES_S)
            return next(iter(done)).result()
        finally:
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)

    async def _handle_messages(self, process: ComputeProcess) -> ComputeProcess:
        """Handle the messages of a process until it ends.

        Only the first rank reports on tasks.
        """
        rank = self._processes.index(process)
        while True:
            try:
                message = await process.receive()
            except EOFError:
                return process
            except ProtocolError as error:
                process.kill(f"killed, because it sent an invalid message: {error}")
                return process
            if rank == 0:
                self._progress_at = time.monotonic()
            match message:
                case RankStatus():
                    self.retracted += message.retracted - self._statuses[rank].retracted
                    self._batch_invariance |= message.batch_invariance
                    self._statuses[rank] = message
                case LeaksFound():
                    await self._report(message)
                case InputTaken():
                    self.replies.record_answer(message)
                case DeviceFailed() | MemoryShortage():
                    self._record_device_error(message, process)
                case _ if rank == 0:
                    await self._handle_message(message)

    def _record_device_error(self, error: DeviceFailed | MemoryShortage, process: ComputeProcess) -> None:
        """Count a device error, and kill a process whose device failed."""
        if isinstance(error, MemoryShortage):
            self.health.record_shortage(error)
        else:
            self._device_failed = self._device_failed or error
            process.kill("its device failed")

    async def _handle_message(self, message: FromCompute) -> None:
        """Handle a message of the first rank."""
        match message:
            case StepPlan():
                await self._send(message, self._processes[1:])
            case TaskWaits():
                self._waiting_for_results |= {message.claim} & self._sent.keys()
            case StepProgress():
                self._waiting_for_results.discard(message.claim)
                if message.claim in self._sent:
                    self._started.add(message.claim)
                    await self._report(message)
            case CheckpointSaved() | OutputAnnounced() | OutputDeltas() | CachePrefix():
                await self._report(message)
            case PairDone():
                self.pairs.finish_call(message)
            case TaskStopped() | TaskCompleted() | TaskFailed():
                self._started.discard(message.claim)
                self._waiting_for_results.discard(message.claim)
                if run := self._sent.pop(message.claim, None):
                    if isinstance(message, TaskCompleted):
                        self.health.record_completed(run.lease.task.planned.pool)
                    self._busy.set_busy(bool(self._sent))
                    await self._report(message)
                    await self._send_runnable()

    async def _watch(self) -> None:
        """Kill processes that make no progress or use too much memory."""
        sleep_began = time.monotonic()
        await asyncio.sleep(WATCH_S)
        self._progress_at += max(
            0.0, time.monotonic() - sleep_began - WATCH_S
        )  # time in which this process was stopped
        for process in self._processes:
            excess = self._stalled() or process.memory_excess(self._memory_limit) if self._sent else ""
            if reason := process.halted(WATCH_S) or excess:
                process.kill(reason)

    def _stalled(self) -> str:
        """Return the reason to kill processes without progress for too long, else ""."""
        if time.monotonic() - self._progress_at <= self._stall_s:
            return ""
        return f"killed, because it made no progress for {self._stall_s:g} s (limit: --stall-s)"

    async def _report_death(self, dead: ComputeProcess) -> None:
        """End the other processes, and report the tasks that ended with them."""
        cause = await dead.last_words()
        await self._end()

        # Times and counts start at zero again. Device memory stays until the next processes report theirs.
        self._statuses = [RankStatus(device_memory=rank.device_memory) for rank in self._statuses]
        log.log(INFO if cause == SWAPPED else ERROR, "compute process died", reason=cause, begun=len(self._started))
        runs, started = self._sent | self._waiting, self._started
        self._sent = {}
        self._waiting = {}
        self._started = set()
        self._waiting_for_results = set()
        self._busy.set_busy(False)

        message, evidence = f"the compute process died: {cause}", f"{cause}\n{dead.log}".strip()
        failure = partial(TaskFailed, kind="crash", message=message, evidence=evidence)
        if failed := self._device_failed:
            self._device_failed = None
            failure = self.health.record_failure(failed, [runs[claim].lease.task for claim in started])
        for claim in runs:
            if claim in started:  # with others that had begun, one of these may be to blame
                await self._report(failure(claim, had_companions=len(started) > 1))
            else:
                await self._report(TaskFailed(claim, "hand_back", message, evidence, reason="compute"))
