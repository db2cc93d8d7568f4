"""A worker's parent process: registers, asks for tasks, renews leases, holds memory, and reports how tasks ended.

It computes nothing and does not import torch, so messages never wait for compute.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import structlog
from msgspec.structs import replace

from unfuse.core.errors import NotFound, ObjectLost, PermanentError, UnfuseError
from unfuse.core.messages import (
    CachePrefix,
    CheckpointSaved,
    Heartbeat,
    HeartbeatReply,
    LeasesGranted,
    OutputAnnounced,
    Register,
    Rejected,
    RequestTasks,
    StepProgress,
    TaskCompleted,
    TaskFailed,
    TaskStopped,
    ToScheduler,
    Unregister,
    WorkerInfo,
    WorkerStatus,
)
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import StageSelector, declared, manned, roles_of
from unfuse.core.supervisor import StopBudget, Supervisor
from unfuse.core.task import Claim, Lease, OutputDeltas
from unfuse.stores.results import copies_here
from unfuse.stores.tensor_store import TensorStore
from unfuse.transfer.base import TransferEngine
from unfuse.worker.checkpoints import CheckpointWriter
from unfuse.worker.compute_messages import KEPT_LORAS, LeaksFound, ModelsLoaded, about, failure, sendable
from unfuse.worker.executor import Executor
from unfuse.worker.link import (
    BEAT_S,
    WITHDRAW,
    OutputRecorder,
    ProgressReporter,
    SchedulerLink,
    TaskSlots,
    free_when_orphaned,
)
from unfuse.worker.loaded_models import AdapterFetcher, ModelSwapper, WeightFiles
from unfuse.worker.objects import WorkerLeakCheck, WorkerObjects
from unfuse.worker.registration import WorkerOptions, decide_served, loads_of, sets_of

BEAT_PAUSE_S = 0.02  # the least seconds between two heartbeats
LEAVE_S = 1.0  # seconds that a leaving worker waits for one answer; up to three times that for its last messages
SAVING, LAST = 0.25, 0.1
"""The shares of the drain timeout for saving and handing back tasks that are not finished, and for the end."""

LEAVES = "the worker leaves before it is done"

CANNOT_RUN = "the worker cannot run it now"

PAUSE_S = 1.0  # seconds to wait after a message was refused

SILENT_BEATS = 3  # how many beats without an answer mean that no scheduler is there to wait for

log = structlog.get_logger(__name__)


class Worker:
    """One worker, from registration to end. Closes its transfer `engines`; `forks` gives a socket to a fork server for
    models in these folders, if there is one, or is to be for who swaps.
    """

    def __init__(
        self,
        options: WorkerOptions,
        engines: Mapping[str, TransferEngine] | None = None,
        forks: Callable[[Sequence[str], bool], socket.socket | None] | None = None,
    ) -> None:
        self._options, self._engines, self._forks = options, engines or {}, forks
        self._id, self._secret = f"{options.role}-{secrets.token_hex(6)}", secrets.token_bytes(16)
        self._choice = StageSelector(roles_of(options.role), options.components)
        self._changed, self._draining = asyncio.Event(), asyncio.Event()
        self._idle, self._released = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._budget = StopBudget(options.drain_timeout)  # of the stop, from its begin on
        self._link = SchedulerLink(options.schedulers, options.trust, self._changed.set)
        self._background, self._opened = Supervisor(), AsyncExitStack()
        self._progress = ProgressReporter(self._link, self._background, self._cancel)
        self._outputs = OutputRecorder(self._link, self._background, self._cancel)
        self._leaks = WorkerLeakCheck()
        self._joined = self._scheduler_stops = self._asks_with_outcome = False
        self._reporting, self._newest_ask, self._affinity = 0, 0, ""
        self._ended = set[Claim]()  # tasks that compute is still to drop

    async def run(self) -> None:
        """Serve until drained. Raises ConfigError if it cannot start."""
        serving = asyncio.create_task(self._serve())
        drained = asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait({drained, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            await self._leave()
        finally:
            for task in (drained, serving):
                task.cancel()
            await asyncio.gather(drained, serving, return_exceptions=True)
            await self._background.close()
            await self._opened.aclose()
            await self._link.close()

    @property
    def draining(self) -> bool:
        """Whether `drain` was called."""
        return self._draining.is_set()

    @property
    def lacking(self) -> str:
        """Why it takes no tasks now; "" if it does."""
        if self.draining:
            return "the worker is about to leave"
        if not self._link.connected:
            return "no scheduler answers"
        if not (self._joined and self._executor.ready):
            return "compute is not ready: models load"
        return "; ".join(sorted({str(file) for file in self._weights.changed.values()}))

    def drain(self) -> None:
        """Take no new tasks, save those that run, or finish them, then let `run` return: within the drain timeout."""
        if not self.draining:
            self._budget = StopBudget(self._options.drain_timeout)
        self._draining.set()

    def hurry(self) -> None:
        """Hand back at once what runs, then let `run` return."""
        self.drain()
        self._budget.hurry.set()

    async def _serve(self) -> None:
        options = self._options
        await self._join()
        self._background.forever("running compute", self._executor.serve)
        self._background.forever("sending heartbeats", self._beat)
        self._background.forever("watching model files", self._watch_files)
        orphan = partial(free_when_orphaned, self._link, self._objects, lambda: bool(self._active), options.orphan_s)
        self._background.forever("watching for schedulers", orphan)
        await asyncio.gather(self._background.repeat("asking for work", self._pull), self._executor.lost)

    async def _join(self) -> None:
        """Ask the scheduler what to serve, load it, and register with its pools."""
        options = self._options
        info = WorkerInfo(self._id, options.node, options.role, (), options.slots, "", 0, os.getpid())
        welcome = await self._link.hello(Register(info, secret=self._secret))
        self._beat_s, places = welcome.beat, welcome.places
        self._served = served = await asyncio.to_thread(decide_served, welcome, options, self._choice)
        sets = sets_of(served, options)
        self._holding = TaskSlots(served.slots, options.resources)
        self._active = self._holding.leases
        self._weights = await asyncio.to_thread(
            WeightFiles, served.models, served.cards, self._choice, served.states, in_turns=bool(sets)
        )
        store = await asyncio.to_thread(
            TensorStore.create, places.store, owner=self._id, node=options.node, capacity=options.arena,
            threshold=places.threshold, spill_capacity=places.spill_capacity, durable=places.durable,
            copies=copies_here(places), run_dir=options.run_dir,
        )  # fmt: skip
        self._swapping = ModelSwapper(sets, loads_of(served, self._choice, options, store, places), served.cards)
        loads, watch = self._swapping.loads(self._swapping.holds), (options.stall_s, options.memory_limit)
        fork_server = self._forks and self._forks([folder for _, folder, _ in served.models], len(sets) > 1)
        self._executor = Executor(loads, self._hear, *watch, fork_server, options.buffer)
        self._objects = await asyncio.to_thread(
            WorkerObjects, store, places, self._engines, options.transfer, self._executor.passing
        )
        self._opened.push_async_callback(self._objects.close)
        self._opened.push_async_callback(self._executor.close)
        self._saved_states = CheckpointWriter(self._objects, self._link)
        self._borrowing = AdapterFetcher(self._link, places.loras, Path(options.data_dir, KEPT_LORAS))
        self._started = await self._executor.start()
        self._has_loaded(self._started)
        for engine in self._engines.values():
            engine.use(self._executor.pairs, self._started.device)
        await asyncio.to_thread(self._weights.look)  # files may have changed while they were loaded
        await self._register()
        self._joined = True
        models = [card.name for card in served.cards]
        log.info("ready", role=options.role, worker=self._id, models=models, pulled_at=self._objects.copies.served_at)

    async def _register(self) -> None:
        """Register the pools that the worker serves: all except those whose files have changed."""
        options, objects, changed, outcome = self._options, self._objects, self._weights.changed, self._started.outcome
        info = WorkerInfo(
            self._id, options.node, options.role,
            tuple(manned(pool, outcome) for pool in self._served.pools if pool not in changed),
            self._served.slots, objects.store.address, objects.capacity, os.getpid(), engines=objects.copies.served_at,
            device=self._started.device, resources=self._holding.resources, outcome=outcome,
            sets=self._swapping.pools_of_sets(outcome, changed), changed=changed, status=self._status(),
        )  # fmt: skip
        await self._link.hello(Register(info, self._served.cards, self._secret))

    def _status(self) -> WorkerStatus:
        usage, swapping = self._objects.usage(), self._swapping
        return replace(
            self._executor.status,
            arena_used=usage.used,
            arena_high_water=usage.high_water,
            arena_fragmentation=usage.fragmentation,
            waiting_for_inputs=self._holding.arriving,
            loaded=swapping.holds,
            load_s=swapping.load_s,
            target=swapping.going,
        )

    async def _watch_files(self) -> None:
        """Check the loaded files once a heartbeat, and withdraw the pools of changed files.

        Pools are served again if the bytes turn out to be the same.
        """
        await asyncio.sleep(self._beat_s)
        await self._withdraw_changed()
        if not all(file.compared for file in self._weights.changed.values()):
            await asyncio.to_thread(self._weights.compare)

    async def _withdraw_changed(self) -> None:
        """Register again if changed files alter the set of pools that can be served."""
        if await asyncio.to_thread(self._weights.look):
            await self._register()
            self._changed.set()

    async def _go_on(self) -> None:
        """Ask for work again after compute has restarted, except for pools whose files have changed."""
        await self._withdraw_changed()
        self._changed.set()

    def _has_loaded(self, started: ModelsLoaded) -> None:
        self._swapping.loaded(self._executor)
        self._weights.left_out = started.left_out
        self._holding.resources = {**self._options.resources, **started.resources}

    async def _pull(self) -> None:
        """Ask for tasks whenever something has changed: a task began or ended, room was freed, an Ask was answered."""
        await self._changed.wait()
        self._changed.clear()
        if not self.draining and not self._asks_with_outcome:
            self._newest_ask += 1
            self._background.once("asking for work", partial(self._ask, self._newest_ask, self._wanted()))

    def _wanted(self, ended: str = "") -> RequestTasks:
        """The next Ask, when a task of that pool has `ended` well; for nothing where nothing can run."""
        after = ended if self._swapping.going else ""
        if not self._executor.ready or self._swapping.going and not after:
            return WITHDRAW
        if self._weights.changed.keys() >= set(self._served.pools):
            return WITHDRAW  # the scheduler would answer an Ask without pools immediately, in a loop
        room = self._holding.room(self._objects.free, self._objects.usage().used)
        return self._holding.ask(room, self._affinity, self._swapping.holds, after)

    async def _ask(self, number: int, ask: RequestTasks) -> None:
        """Send one Ask and take what it brings. A newer Ask makes the scheduler answer an older one with nothing."""
        answer = None
        with suppress(OSError):  # the next Ask replaces this one
            answer = await self._link.once(ask)
        match answer:
            case LeasesGranted():
                await self._take(answer)
            case Rejected():
                log.warning("the scheduler refused an Ask", reason=answer.message)
                await asyncio.sleep(PAUSE_S)
        if number == self._newest_ask and ask is not WITHDRAW:
            self._changed.set()

    async def _take(self, granted: LeasesGranted) -> None:
        for lease in granted.leases:
            self._holding.take(lease)
            self._affinity = lease.task.affinity if lease.task.derived.lora_id else self._affinity
            self._idle.clear()
            self._saved_states.begin(lease)
            if self.draining:
                await self._end(TaskFailed(lease.claim, "hand_back", "the worker is about to leave", reason="drain"))
            else:
                self._background.once("beginning a task", partial(self._run, lease, granted))

    async def _run(self, lease: Lease, granted: LeasesGranted) -> None:
        """Fetch inputs that cannot be mapped, then have compute run the task."""
        try:
            await self._borrowing.bring(lease)
            brought, recorded = await self._objects.copies.bring(lease, granted), await self._outputs.read(lease)
        except Exception as error:  # any error must end the task, or it would be lost
            await self._executor.passing.drop(lease.claim)
            await self._end(unfetched(lease.claim, error, self._executor.ready))
            if not isinstance(error, UnfuseError):
                raise
            return
        self._holding.arrived(lease.claim)
        can_run = self._executor.ready and self._swapping.fits(lease) and pool_of(lease) not in self._weights.left_out
        if brought and recorded is not None and can_run:
            await self._executor.run(brought, granted.peers, recorded)
            return
        await self._executor.passing.drop(lease.claim)
        if brought is None or recorded is None:
            await self._end(TaskStopped(lease.claim))
        else:
            await self._end(TaskFailed(lease.claim, "hand_back", CANNOT_RUN, reason="compute"))

    async def _announce(self, news: OutputAnnounced) -> None:
        """Have an output read while it is written, unless what reads it runs here: there it would gain nothing."""
        lease = self._active.get(news.claim)
        if lease and pool_of(lease) not in self._served.read_here:
            await self._link.call(news)

    async def _hear(
        self,
        message: ModelsLoaded
        | StepProgress
        | CheckpointSaved
        | OutputAnnounced
        | OutputDeltas
        | CachePrefix
        | LeaksFound
        | TaskStopped
        | TaskCompleted
        | TaskFailed,
    ) -> None:
        """Handle a message of compute. The scheduler is not waited for here, so that compute is never held up."""
        match message:
            case ModelsLoaded():
                self._has_loaded(message)
                self._background.once("asking for work", self._go_on)
            case StepProgress(step=0):
                log.debug("task began", **about(message.claim))
            case StepProgress():
                self._progress.add(message)
            case CheckpointSaved():
                self._background.once("recording what a task has so far", partial(self._saved_states.save, message))
            case CachePrefix():
                self._background.once("recording what a task has so far", partial(self._saved_states.share, message))
            case OutputAnnounced():
                self._holding.placed(message.claim)
                self._background.once("announcing an output", partial(self._announce, message))
            case OutputDeltas():
                self._outputs.add(message)
            case LeaksFound():
                self._leaks.found(message.leaks)
            case _:
                self._progress.flush()
                self._background.once("reporting the end of a task", partial(self._end, message))

    async def _cancel(self, claim: Claim, save: bool = False, *, if_saved: bool = False) -> None:
        if not self._objects.copies.cancel(claim):
            await self._executor.cancel(claim, save, if_saved=if_saved)

    async def _end(self, message: TaskStopped | TaskCompleted | TaskFailed) -> None:
        """Have all recorded that it grew, free the task's slot, then report its end until that is recorded."""
        self._reporting += 1
        try:
            if isinstance(message, TaskCompleted):
                message = await self._unless_overwritten(message)
            await self._outputs.wait_until_recorded(message.claim)
            await self._report_end(message, self._holding.end(message.claim))
        finally:
            self._reporting -= 1
            if not self._active and not self._reporting:
                self._idle.set()

    async def _unless_overwritten(self, message: TaskCompleted) -> TaskCompleted | TaskFailed:
        """Return the result of a task, or hand the task back if its weights, which may be mapped, changed in place."""
        while lease := self._active.get(message.claim):
            file = await asyncio.to_thread(self._weights.overwritten, pool_of(lease))
            if file is None:
                break
            if file.compared:
                return TaskFailed(message.claim, "hand_back", str(file), reason="compute", timings=message.timings)
            await asyncio.sleep(self._beat_s)
        return message

    async def _report_end(self, message: TaskStopped | TaskCompleted | TaskFailed, lease: Lease | None) -> None:
        if isinstance(message, TaskStopped) and self.draining:
            message = TaskFailed(message.claim, "hand_back", LEAVES, reason="drain", timings=message.timings)
        if isinstance(message, TaskFailed):
            await self._saved_states.wait_until_saved()  # the next attempt resumes from there
        if isinstance(message, TaskCompleted) and lease and lease.task.planned.extends:
            await self._saved_states.wait_until_shared(message.claim)  # none is taken any more once the request is over
        if lease:
            message = self._objects.end_task(lease, message, pool_of(lease) in self._served.read_here)
        log_outcome(message)
        if not self._executor.ready:
            await self._link.call(WITHDRAW)
        waits = self.draining or (self._asks_with_outcome and not self._swapping.going)
        if asks := isinstance(message, TaskCompleted) and not waits:
            self._asks_with_outcome = True
            self._newest_ask += 1
            with self._background.besides("asking for work"):
                message = replace(message, ask=self._wanted(lease.task.planned.pool if lease else ""))
        self._changed.set()
        try:
            recorded = await self._send_end(message)
        finally:
            if asks:
                self._asks_with_outcome = False
                self._changed.set()
        if recorded and lease and isinstance(message, TaskCompleted):
            self._objects.share(lease.task.planned.cache, message.output)
        await self._saved_states.end(message.claim, recorded and isinstance(message, TaskCompleted))

    async def _send_end(self, message: TaskStopped | TaskCompleted | TaskFailed) -> bool:
        """Send the end of a task until it is recorded (True), or the lease is known to be lost (False).

        A task that was dropped and has used nothing is not reported.
        """
        if isinstance(message, TaskStopped) and not message.timings.share_s:
            return False
        while isinstance(answer := await self._link.call(message), Rejected):
            if answer.lease_lost or isinstance(message, TaskStopped):
                if isinstance(message, TaskCompleted) and message.output:
                    await self._objects.delete(message.output)
                    self._changed.set()
                return False
            log.warning("the scheduler refused a report", reason=answer.message, **about(message.claim))
            await asyncio.sleep(PAUSE_S)
        if isinstance(answer, LeasesGranted):
            await self._take(answer)
        return True

    async def _beat(self) -> None:
        """Send one heartbeat and handle the answer, which comes when there is news or the next one is due."""
        await asyncio.sleep(BEAT_PAUSE_S)
        objects, executor = self._objects, self._executor
        self._leaks.look(objects, idle=self._idle.is_set() and executor.ready)
        beat = Heartbeat(
            claims=tuple(self._active.keys() - self._ended),
            holding=tuple(objects.holding()),
            wait=self._beat_s,
            status=self._status(),
            moved=objects.copies.counters.take(),
            retracted=executor.retracted,
            leaked=self._leaks.take(),
        )
        executor.retracted = 0
        try:
            pulse = await self._link.once(beat, BEAT_S)
        except TimeoutError:
            return  # a scheduler that answers late counts what it was told, and one that is gone counts nothing
        except OSError:
            objects.copies.counters.put_back(beat.moved)
            self._leaks.put_back(beat.leaked)
            executor.retracted += beat.retracted
            return
        if isinstance(pulse, HeartbeatReply):
            await self._obey(pulse)
        else:
            await asyncio.sleep(self._beat_s)

    async def _obey(self, pulse: HeartbeatReply) -> None:
        """Do what the answer to a heartbeat asks for."""
        if pulse.load:
            withdraw = partial(self._link.call, WITHDRAW)
            swap = partial(self._swapping.to, pulse.load, self._executor, withdraw, self._idle)
            self._background.once("swapping what is loaded", swap)
        if pulse.soon:
            self._background.once("reading weights ahead", partial(self._swapping.ahead, pulse.soon))
        self._ended = (self._ended | set(pulse.ended)) & self._active.keys()
        for claim in pulse.ended:
            await self._cancel(claim)
        self._scheduler_stops = pulse.stops and len(self._options.schedulers) == 1
        if pulse.over or pulse.stops:
            await self._objects.release(pulse.over)
            self._changed.set()
            self._released.set()
        if self._objects.drop(pulse.lost):
            self._changed.set()

    async def _leave(self) -> None:
        """Stop within the budget: hand back what runs, let others read what lies here, and sign off."""
        budget = self._budget
        active = self._active if self._joined else {}
        log.info("draining", running=len(active))
        await budget.within(LEAVE_S, self._link.call(WITHDRAW))
        if self._joined:
            await self._hand_over()
        unfinished = (TaskFailed(claim, "hand_back", LEAVES, reason="drain") for claim in active)
        last: list[ToScheduler] = [*unfinished, Unregister()]
        most = LEAVE_S if budget.hurry.is_set() else max(LEAVE_S, min(3 * LEAVE_S, budget.left() / 2))
        with suppress(TimeoutError):
            async with asyncio.timeout(most):
                for message in last:
                    await self._link.call(message, LEAVE_S)

    async def _hand_over(self) -> None:
        """Save what runs, hand it back, and wait until others have read what lies here, within the budget."""
        budget = self._budget
        inputs = [(claim.request, ref) for claim, lease in self._active.items() for ref in lease.task.inputs]
        if self._objects.outlasts:
            await self._save_all(if_saved=True)
        for reserve in (SAVING * budget.seconds, LAST * budget.seconds):
            await budget.within(budget.left(reserve), self._finish(inputs))
            await self._save_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S / 2):
                while self._reporting:
                    await asyncio.sleep(BEAT_PAUSE_S)

    async def _save_all(self, *, if_saved: bool = False) -> None:
        """Have what runs handed back at its next step, from its state then; or, `if_saved`, what can be saved."""
        self._saved_states.stops = True
        for claim in list(self._active):  # a copy, because tasks end meanwhile
            await self._cancel(claim, save=True, if_saved=if_saved)

    async def _finish(self, inputs: Sequence[tuple[str, ObjectRef]]) -> None:
        """Wait until nothing runs, and nobody needs what lies here alone: copy that where it outlasts this worker.

        Nobody says so where no scheduler answers; one that stops gives nobody a task that would read it.
        """
        objects, heard = self._objects, -1
        await objects.copy_all(inputs)
        await self._idle.wait()
        await objects.wait_until_copied()
        await objects.copy_all(())
        while objects.needed() and heard != self._link.heard and not self._scheduler_stops:
            heard = self._link.heard
            self._released.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENT_BEATS * self._beat_s):
                    await self._released.wait()


def pool_of(lease: Lease) -> str:
    """The declared pool of a leased task."""
    return declared(lease.task.planned.pool)


def unfetched(claim: Claim, error: Exception, ready: bool) -> TaskFailed:
    """The report for a task whose inputs did not come; it is no fault of it if compute is not `ready`."""
    if isinstance(error, ObjectLost | PermanentError | NotFound):
        return failure(claim, error)
    if not ready:
        return TaskFailed(claim, "hand_back", CANNOT_RUN, reason="compute")
    return TaskFailed(claim, "transient", sendable(f"an input cannot be fetched: {error}"))


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
