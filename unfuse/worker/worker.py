"""The parent process of a worker: requests tasks, renews leases, reports how tasks ended.

It owns the worker's arena. It computes nothing and does not import torch, so messages never wait for compute.
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

from unfuse.core.errors import UnfuseError
from unfuse.core.messages import (
    CachePrefix,
    CheckpointSaved,
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
)
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import StageSelector, pool_with_numerics, roles_of
from unfuse.core.supervisor import StopBudget, Supervisor
from unfuse.core.task import Claim, Lease, OutputDeltas
from unfuse.core.worker_status import WorkerStatus
from unfuse.stores.results import copies_here
from unfuse.stores.tensor_store import TensorStore
from unfuse.transfer.base import TransferEngine
from unfuse.worker.checkpoints import CheckpointWriter
from unfuse.worker.compute_messages import ADAPTER_FOLDER, CANNOT_RUN, LeaksFound, ModelsLoaded, about, unfetched
from unfuse.worker.executor import Executor
from unfuse.worker.heartbeats import Heartbeats
from unfuse.worker.link import (
    WITHDRAW,
    OutputRecorder,
    ProgressReporter,
    SchedulerLink,
    TaskSlots,
    free_when_orphaned,
    log_outcome,
)
from unfuse.worker.loaded_models import AdapterFetcher, ModelSwapper, WeightFiles, pool_of
from unfuse.worker.objects import WorkerObjects
from unfuse.worker.registration import WorkerOptions, decide_served, loads_by_rank, names_of, swappable_sets

log = structlog.get_logger(__name__)

#: The least seconds between two heartbeats.
HEARTBEAT_PAUSE_S = 0.02

#: Seconds that a stopping worker waits for one answer. Its last messages together get up to three times that.
STOP_REPLY_S = 1.0

#: The shares of the drain timeout for saving and handing back unfinished tasks, and for the last messages.
SAVING, LAST = 0.25, 0.1

#: Why a draining worker hands back a task.
WORKER_STOPS = "the worker stopped before the task was done"

#: Seconds to wait after the scheduler refused a message.
PAUSE_S = 1.0

#: Number of heartbeats without an answer after which a draining worker no longer waits for the scheduler.
UNANSWERED_HEARTBEATS = 3


class Worker:
    """One worker, from registration through heartbeats and leases to its drain.

    - `engines`: the transfer engines by name. The worker closes them.
    - `forks(folders, swaps)`: returns a socket to a fork server for the models in these folders, or None. `swaps` says
      whether the worker swaps models.
    """

    def __init__(
        self,
        options: WorkerOptions,
        engines: Mapping[str, TransferEngine] | None = None,
        forks: Callable[[Sequence[str], bool], socket.socket | None] | None = None,
    ) -> None:
        self._options = options
        self._engines, self._forks = engines or {}, forks
        self._id, self._secret = f"{options.role}-{secrets.token_hex(6)}", secrets.token_bytes(16)
        self._choice = StageSelector(roles_of(options.role), options.components)
        self._changed, self._draining = asyncio.Event(), asyncio.Event()
        self._idle, self._released = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._budget = StopBudget(options.drain_timeout)  # `drain` starts it anew
        self._link = SchedulerLink(options.schedulers, options.trusted_keys, self._changed.set)
        self._background, self._opened = Supervisor(), AsyncExitStack()
        self._progress = ProgressReporter(self._link, self._background, self._cancel)
        self._outputs = OutputRecorder(self._link, self._background, self._cancel)
        self._joined = self._scheduler_stops = False
        self._requests_with_report = False  # whether a report in flight carries a request for tasks
        self._reporting = 0  # number of tasks whose end is not reported yet
        self._request_id = 0  # number of the last request for tasks, which replaces all earlier ones
        self._affinity = ""  # of the last task with a LoRA adapter

    async def run(self) -> None:
        """Serve until drained. Raises ConfigError if the worker cannot start, TransientError if ranks are lost."""
        serving = asyncio.create_task(self._serve())
        drained = asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait({drained, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            await self._shut_down()
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
    def unavailable_reason(self) -> str:
        """Why the worker accepts no tasks now; "" if it accepts them."""
        if self.draining:
            return "the worker is draining"
        if not self._link.connected:
            return "no scheduler answers"
        if not (self._joined and self._executor.ready):
            return str((self._joined and self._executor.health.fault) or "the compute process is loading its models")
        return "; ".join(sorted({str(file) for file in self._weights.changed.values()}))

    def drain(self) -> None:
        """Accept no new tasks and let `run` return within the drain timeout.

        Running tasks are finished, or saved and handed back.
        """
        if not self.draining:
            self._budget = StopBudget(self._options.drain_timeout)
        self._draining.set()

    def stop_now(self) -> None:
        """Hand back running tasks at once, then let `run` return."""
        self.drain()
        self._budget.hurry.set()

    async def _serve(self) -> None:
        options = self._options
        await self._join()
        self._background.start_loop("running the compute processes", self._executor.serve)
        self._background.start_loop("sending heartbeats", self._send_heartbeat)
        self._background.start_loop("watching model files", self._watch_files)
        watch = partial(free_when_orphaned, self._link, self._objects, lambda: bool(self._active), options.orphan_s)
        self._background.start_loop("watching for schedulers", watch)
        await asyncio.gather(self._background.repeat("requesting tasks", self._pull), self._executor.lost)

    async def _join(self) -> None:
        """Get the models from the scheduler, load the stages, and register the pools."""
        options = self._options
        info = WorkerInfo(self._id, options.node, options.role, (), options.slots, "", 0, os.getpid())
        registered = await self._link.register(Register(info, secret=self._secret))
        self._beat_s, locations = registered.heartbeat_s, registered.storage
        self._served = served = await asyncio.to_thread(decide_served, registered, options, self._choice)
        sets = swappable_sets(served, options)
        self._slots = TaskSlots(served.slots, options.resources)
        self._active = self._slots.leases
        self._weights = await asyncio.to_thread(
            WeightFiles, served.models, served.specs, self._choice, served.states, swaps_models=bool(sets)
        )
        store = await asyncio.to_thread(
            TensorStore.create,
            locations.store,
            owner=self._id,
            node=options.node,
            capacity=options.arena,
            threshold=locations.threshold,
            spill_capacity=locations.spill_capacity,
            durable=locations.durable,
            copies=copies_here(locations),
            run_dir=options.run_dir,
        )
        self._swapper = ModelSwapper(sets, loads_by_rank(served, self._choice, options, store, locations), served.specs)
        rank_loads, limits = self._swapper.loads(self._swapper.loaded_model), (options.stall_s, options.memory_limit)
        fork_server = self._forks and self._forks([folder for _, folder, _ in served.models], len(sets) > 1)
        self._executor = Executor(rank_loads, self._handle_message, *limits, fork_server, options.buffer)
        self._objects = await asyncio.to_thread(
            WorkerObjects, store, locations, self._engines, options.transfer, self._executor.replies
        )
        self._heartbeats = Heartbeats(self._link, self._executor, self._objects, self._active, self._beat_s)
        self._opened.push_async_callback(self._objects.close)
        self._opened.push_async_callback(self._executor.close)
        self._checkpoints = CheckpointWriter(self._objects, self._link)
        self._adapter_fetcher = AdapterFetcher(self._link, locations.adapters, Path(options.data_dir, ADAPTER_FOLDER))
        self._started = await self._executor.start()
        self._record_loaded(self._started)
        for engine in self._engines.values():
            engine.use(self._executor.pairs, self._started.device)
        await asyncio.to_thread(self._weights.refresh)  # files may have changed while they were loaded
        await self._register()
        self._joined = True
        names = names_of(served, self._started.numerics)
        log.info("ready", role=options.role, worker=self._id, **names, pulled_at=self._objects.copies.served_at)

    async def _register(self) -> None:
        """Register the worker's pools, except those whose model files have changed."""
        options, objects = self._options, self._objects
        changed, numerics = self._weights.changed, self._started.numerics
        info = WorkerInfo(
            self._id,
            options.node,
            options.role,
            tuple(pool_with_numerics(pool, numerics) for pool in self._served.pools if pool not in changed),
            self._served.slots,
            objects.store.address,
            objects.capacity,
            os.getpid(),
            engines=objects.copies.served_at,
            device=self._started.device,
            devices=self._executor.health.devices,
            resources=self._slots.resources,
            numerics=numerics,
            swappable_models=self._swapper.pools_of_sets(numerics, changed),
            changed=changed,
            status=self._status(),
        )
        await self._link.register(Register(info, self._served.specs, self._secret))

    def _status(self) -> WorkerStatus:
        usage, swapper = self._objects.usage(), self._swapper
        return replace(
            self._executor.status,
            arena_used=usage.used,
            arena_high_water=usage.high_water,
            arena_fragmentation=usage.fragmentation,
            waiting_for_inputs=self._slots.arriving,
            loaded=swapper.loaded_model,
            load_s=swapper.load_s,
            target=swapper.target_model,
        )

    async def _watch_files(self) -> None:
        """Check the loaded model files once a heartbeat, and withdraw the pools of changed files.

        Pools are served again if the bytes turn out to be the same.
        """
        await asyncio.sleep(self._beat_s)
        await self._withdraw_changed()
        if not all(file.compared for file in self._weights.changed.values()):
            await asyncio.to_thread(self._weights.compare)

    async def _withdraw_changed(self) -> None:
        """Register again if changed files alter which pools can be served."""
        if await asyncio.to_thread(self._weights.refresh):
            await self._register()
            self._changed.set()

    async def _resume_requests(self) -> None:
        """Request tasks again after compute has restarted, except for pools whose files have changed."""
        await self._withdraw_changed()
        self._changed.set()

    def _record_loaded(self, started: ModelsLoaded) -> None:
        self._swapper.loaded(self._executor)
        self._weights.left_out = started.changed_pools
        self._slots.resources = {**self._options.resources, **started.resources}

    async def _pull(self) -> None:
        """Request tasks after each change, as when a task started or ended."""
        await self._changed.wait()
        self._changed.clear()
        if not self.draining and not self._requests_with_report:
            self._request_id += 1
            self._background.start(
                "requesting tasks", partial(self._send_request, self._request_id, self._next_request())
            )

    def _next_request(self, ended_pool: str = "") -> RequestTasks:
        """Return the next request for tasks; WITHDRAW if no task can run now.

        `ended_pool` is the pool of a task that has just completed. While a model swap is pending, only a follow-up task
        of that task is requested.
        """
        after_pool = ended_pool if self._swapper.target_model else ""
        if not self._executor.ready or self._swapper.target_model and not after_pool:
            return WITHDRAW
        if self._weights.changed.keys() >= set(self._served.pools):
            return WITHDRAW  # the scheduler would answer a request without pools immediately, in a loop
        output_room = self._slots.free_bytes(self._objects.free, self._objects.usage().used)
        return self._slots.next_request(output_room, self._affinity, self._swapper.loaded_model, after_pool)

    async def _send_request(self, request_id: int, request: RequestTasks) -> None:
        """Send one request for tasks, which replaces older ones, and start the leased tasks."""
        answer = None
        with suppress(OSError):  # the next request replaces this one
            answer = await self._link.once(request)
        match answer:
            case LeasesGranted():
                await self._start_leased(answer)
            case Rejected():
                log.warning("the scheduler refused a request for tasks", reason=answer.message)
                await asyncio.sleep(PAUSE_S)
        if request_id == self._request_id and request is not WITHDRAW:
            self._changed.set()

    async def _start_leased(self, granted: LeasesGranted) -> None:
        """Start the leased tasks, or hand them back at once if the worker is draining."""
        for lease in granted.leases:
            self._slots.add(lease)
            self._affinity = lease.task.affinity if lease.task.derived.lora_id else self._affinity
            self._idle.clear()
            self._checkpoints.start_task(lease)
            if self.draining:
                await self._end(TaskFailed(lease.claim, "hand_back", "the worker is draining", reason="drain"))
            else:
                self._background.start("starting a task", partial(self._run, lease, granted))

    async def _run(self, lease: Lease, granted: LeasesGranted) -> None:
        """Fetch the inputs that cannot be mapped, then run the task in the compute process."""
        try:
            await self._adapter_fetcher.fetch(lease)
            local_lease, recorded_output = (
                await self._objects.copies.fetch(lease, granted),
                await self._outputs.read(lease),
            )
        except Exception as error:  # any error must end the task, or it would be lost
            await self._executor.replies.drop(lease.claim)
            await self._end(unfetched(lease.claim, error, self._executor.ready))
            if not isinstance(error, UnfuseError):
                raise
            return
        self._slots.arrived(lease.claim)
        can_run = (
            self._executor.ready and self._swapper.is_loaded(lease) and pool_of(lease) not in self._weights.left_out
        )
        if local_lease and recorded_output is not None and can_run:
            await self._executor.run(local_lease, granted.peers, recorded_output)
            return
        await self._executor.replies.drop(lease.claim)
        if local_lease is None or recorded_output is None:
            await self._end(TaskStopped(lease.claim))
        else:
            await self._end(TaskFailed(lease.claim, "hand_back", CANNOT_RUN, reason="compute"))

    async def _announce(self, announcement: OutputAnnounced) -> None:
        """Announce that an output can be read while it is written.

        If a stage of this worker reads the output, it is not announced: that request continues when the task completes.
        """
        lease = self._active.get(announcement.claim)
        if lease and pool_of(lease) not in self._served.local_inputs:
            await self._link.call(announcement)

    async def _handle_message(
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
        """Handle a message of the compute process.

        Reports to the scheduler are sent in the background, so that compute never waits for the scheduler's answers.
        """
        match message:
            case ModelsLoaded():
                self._record_loaded(message)
                self._background.start("requesting tasks", self._resume_requests)
            case StepProgress(step=0):
                log.debug("task began", **about(message.claim))
            case StepProgress():
                self._progress.add(message)
            case CheckpointSaved():
                self._background.start("recording a checkpoint", partial(self._checkpoints.save, message))
            case CachePrefix():
                self._background.start(
                    "recording a prefix block", partial(self._checkpoints.record_prefix_block, message)
                )
            case OutputAnnounced():
                self._slots.mark_reserved(message.claim)
                self._background.start("announcing an output", partial(self._announce, message))
            case OutputDeltas():
                self._outputs.add(message)
            case LeaksFound():
                self._heartbeats.record_leaks(message.leaks)
            case _:
                self._progress.flush()
                self._background.start("reporting the end of a task", partial(self._end, message))

    async def _cancel(self, claim: Claim, save: bool = False, *, if_saved: bool = False) -> None:
        """Stop fetching a task's inputs, or drop it as `Executor.cancel` does."""
        if not self._objects.copies.cancel(claim):
            await self._executor.cancel(claim, save, if_saved=if_saved)

    async def _end(self, message: TaskStopped | TaskCompleted | TaskFailed) -> None:
        """Wait until the task's output is recorded, free its slot, then report its end."""
        self._reporting += 1
        try:
            if isinstance(message, TaskCompleted):
                message = await self._unless_overwritten(message)
            await self._outputs.wait_until_recorded(message.claim)
            await self._report_end(message, self._slots.remove(message.claim))
        finally:
            self._reporting -= 1
            if not self._active and not self._reporting:
                self._idle.set()

    async def _unless_overwritten(self, message: TaskCompleted) -> TaskCompleted | TaskFailed:
        """Return the task's result, or a hand-back if its weights changed in place.

        Mapped weights change with their file, so the result may come from other weights. While a modified file is not
        compared yet, this waits.
        """
        while lease := self._active.get(message.claim):
            file = await asyncio.to_thread(self._weights.overwritten, pool_of(lease))
            if file is None:
                break
            if file.compared:
                return TaskFailed(message.claim, "hand_back", str(file), reason="compute", timings=message.timings)
            await asyncio.sleep(self._beat_s)
        return message

    async def _report_end(self, message: TaskStopped | TaskCompleted | TaskFailed, lease: Lease | None) -> None:
        """Report the end of a task, with the next request for tasks."""
        if isinstance(message, TaskStopped) and self.draining:
            message = TaskFailed(message.claim, "hand_back", WORKER_STOPS, reason="drain", timings=message.timings)
        if isinstance(message, TaskFailed):
            await self._checkpoints.wait_until_saved()  # the next attempt resumes from there
        if isinstance(message, TaskCompleted) and lease and lease.task.planned.extends_prefix_of:
            await self._checkpoints.wait_until_shared(message.claim)  # blocks are refused once the request is over
        if lease:
            message = self._objects.end_task(lease, message, pool_of(lease) in self._served.local_inputs)
        log_outcome(message)
        if not self._executor.ready:  # or the waiting request would get a task at once, perhaps this one again
            await self._link.call(WITHDRAW)

        requests_later = self.draining or (self._requests_with_report and not self._swapper.target_model)
        if requests_now := isinstance(message, TaskCompleted) and not requests_later:
            self._requests_with_report = True
            self._request_id += 1
            with self._background.log_errors("requesting tasks"):
                message = replace(message, next_request=self._next_request(lease.task.planned.pool if lease else ""))
        self._changed.set()
        try:
            recorded = await self._send_end(message)
        finally:
            if requests_now:
                self._requests_with_report = False
                self._changed.set()
        if recorded and lease and isinstance(message, TaskCompleted) and not message.vae:  # tiles are not cached
            self._objects.retain(lease.task.planned.cache_key, message.output)
        await self._checkpoints.end_task(message.claim, recorded and isinstance(message, TaskCompleted))

    async def _send_end(self, message: TaskStopped | TaskCompleted | TaskFailed) -> bool:
        """Send the end of a task. Returns False if the scheduler does not record it.

        Of a dropped task only the device time is recorded, so its end is not sent if it has used none.
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
            await self._start_leased(answer)
        return True

    async def _send_heartbeat(self) -> None:
        """Send one heartbeat and apply the reply."""
        await asyncio.sleep(HEARTBEAT_PAUSE_S)
        if reply := await self._heartbeats.send(self._status(), idle=self._idle.is_set()):
            await self._apply_reply(reply)

    async def _apply_reply(self, reply: HeartbeatReply) -> None:
        """Apply the reply to a heartbeat: swap models, cancel tasks, free objects."""
        if reply.swap_to:
            withdraw = partial(self._link.call, WITHDRAW)
            swap = partial(self._swapper.swap_to, reply.swap_to, self._executor, withdraw, self._idle)
            self._background.start("swapping models", swap)
        if reply.swap_next:
            self._background.start("prefetching weights", partial(self._swapper.read_ahead, reply.swap_next))
        for claim in reply.ended_claims:
            await self._cancel(claim)
        self._scheduler_stops = reply.is_stopping and len(self._options.schedulers) == 1
        if reply.ended_requests or reply.is_stopping:
            await self._objects.release(reply.ended_requests)
            self._changed.set()
            self._released.set()
        if self._objects.drop(reply.lost_objects):
            self._changed.set()

    async def _shut_down(self) -> None:
        """Drain within the stop budget: hand over tasks and objects, then unregister."""
        budget = self._budget
        active = self._active if self._joined else {}
        log.info("draining", running=len(active))
        await budget.limited_to(STOP_REPLY_S, self._link.call(WITHDRAW))
        if self._joined:
            await self._hand_over()
        unfinished = (TaskFailed(claim, "hand_back", WORKER_STOPS, reason="drain") for claim in active)
        last_messages: list[ToScheduler] = [*unfinished, Unregister()]
        timeout_s = (
            STOP_REPLY_S if budget.hurry.is_set() else max(STOP_REPLY_S, min(3 * STOP_REPLY_S, budget.remaining() / 2))
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for message in last_messages:
                    await self._link.call(message, STOP_REPLY_S)

    async def _hand_over(self) -> None:
        """Save and hand back running tasks; wait until others have read this worker's objects."""
        budget = self._budget
        inputs = [(claim.request, ref) for claim, lease in self._active.items() for ref in lease.task.inputs]
        if (
            self._objects.outlasts
        ):  # otherwise the checkpoints end with this worker, and tasks should finish if they can
            await self._save_all(if_saved=True)
        for reserve in (SAVING * budget.seconds, LAST * budget.seconds):
            await budget.limited_to(budget.remaining(reserve), self._wait_until_unneeded(inputs))
            await self._save_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_REPLY_S / 2):
                while self._reporting:
                    await asyncio.sleep(HEARTBEAT_PAUSE_S)

    async def _save_all(self, *, if_saved: bool = False) -> None:
        """Save and hand back running tasks; with `if_saved`, only those that can be saved."""
        self._checkpoints.stops = True
        for claim in list(self._active):  # a copy, because tasks end meanwhile
            await self._cancel(claim, save=True, if_saved=if_saved)

    async def _wait_until_unneeded(self, inputs: Sequence[tuple[str, ObjectRef]]) -> None:
        """Wait until no task runs and no reader needs objects that exist only here.

        Objects are copied if copies outlast this worker. `inputs` are (request, ref) of objects that running tasks
        read. The wait ends if no scheduler answers, or if the scheduler stops, because it leases no more readers then.
        """
        objects, answers_before = self._objects, -1
        await objects.copy_all(inputs)
        await self._idle.wait()
        await objects.wait_until_copied()
        await objects.copy_all(())
        while objects.needed() and answers_before != self._link.last_answer and not self._scheduler_stops:
            answers_before = self._link.last_answer
            self._released.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(UNANSWERED_HEARTBEATS * self._beat_s):
                    await self._released.wait()
