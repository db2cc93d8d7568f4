"""The step loop: decides the next step plan and carries it out, with continuous batching.

Every stage runs in it: denoising, prefill, decode, and stages of a single step. In each round, `StepLoop.decide`
returns a `StepPlan` of plain data on the first rank, and `carry_out` executes it in the same way on every rank.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import structlog

from unfuse.core.compute_device import ComputeDevice
from unfuse.core.errors import ResultsUnavailable
from unfuse.core.messages import (
    CheckpointSaved,
    StepProgress,
    TaskCompleted,
    TaskFailed,
    TaskStopped,
)
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Timings
from unfuse.core.retries import is_out_of_memory
from unfuse.core.task import Claim
from unfuse.stages.base import Stage, StageOutput
from unfuse.stores.results import ResultStore
from unfuse.stores.tensor_store import TensorStore
from unfuse.worker import compute_messages as messages
from unfuse.worker.batch_invariance import InvarianceResults
from unfuse.worker.batch_memory import BatchMemory
from unfuse.worker.batch_sizes import BatchSizesFile
from unfuse.worker.batches import Batches
from unfuse.worker.checkpoints import CheckpointPolicy, pack
from unfuse.worker.device_errors import task_error
from unfuse.worker.encoder_thread import EncodedStep, EncoderThread
from unfuse.worker.job import (
    Job,
    JobFactory,
    announce,
    read_prefix_blocks,
    start_result,
    store_output,
    write,
)
from unfuse.worker.memory_ladder import MemoryLadder
from unfuse.worker.ranks import Ranks
from unfuse.worker.status_reporter import ComputeLeakCheck, StatusReporter
from unfuse.worker.step_reporter import ReportResult, StepReporter, delete_fragments

log = structlog.get_logger(__name__)

#: The first and the longest pause, in seconds, of a task that waits for the result store.
PAUSE_S, MOST_PAUSE_S = 0.25, 2.0

#: The timings of a task that has computed nothing yet.
UNUSED = Timings()


@dataclass(eq=False)
class _Parked:
    """A task that waits for the result store."""

    #: Called at the next try. It starts the task, or stores its results.
    again: Callable[[], None]

    #: Monotonic time of the next try, in seconds.
    at: float

    #: The last pause, in seconds.
    pause: float

    #: What the task has used so far.
    timings: Timings


class StepLoop:
    """Runs tasks on the stages of one compute process, with continuous batching.

    Tasks of the highest priority go first, pools in rotation, each in order of arrival. The others pause and keep their
    state. A cancelled task is dropped between two steps. A task whose result cannot be stored, because the result store
    is full, waits while others continue.

    - `stages`: stages by declared pool. Those of `plain` pools get numpy arrays, the others torch tensors.
    - `batch`: most tasks that share a forward; 0 means the default.
    - `encodings`: how the outputs of a stage kind are narrowed, by kind.
    - `policy`: when checkpoints are saved, so that another worker can resume a task. A paused task is saved too.
    - `exactness`: with it, a task gets the bytes that it has alone (batch invariance). It shares a forward only if
      comparisons have found no difference.
    - `ranks`: the first rank decides, stores and reports. The others carry out the same step plans.
    - `overlapped`: the next step is computed while the last one is reported, where the stage allows it. Files are
      encoded while the next steps are computed in any case.
    - `device`: the device that the stages compute on.
    - `sizes_file`: the batch sizes that earlier processes measured.
    """

    def __init__(
        self,
        stages: Mapping[str, Stage],
        store: TensorStore,
        results: ResultStore,
        inbox: queue.SimpleQueue[messages.ForLoop],
        send: Callable[[messages.FromCompute], object],
        batch: int = 1,
        plain: Collection[str] = (),
        encodings: Mapping[str, str] | None = None,
        policy: CheckpointPolicy | None = None,
        exactness: InvarianceResults | None = None,
        ranks: Ranks | None = None,
        overlapped: bool = False,
        device: ComputeDevice | None = None,
        sizes_file: BatchSizesFile | None = None,
    ) -> None:
        device = device or ComputeDevice()
        self._ranks = ranks or Ranks()
        self._factory = JobFactory(stages, store, results, plain, exactness is not None, self._ranks.size)
        self._encodings, self._policy = encodings or {}, policy or CheckpointPolicy()
        self._store, self._results = store, results
        self._inbox = inbox
        self._send = send if self._ranks.leads else bool  # the first rank reports for all
        self._leaks = ComputeLeakCheck(stages.values(), store, send, frees=self._ranks.size == 1)
        self._memory_ladder = MemoryLadder(device, self._send)
        self._batches = Batches(
            batch, exactness, self._ranks, device.synchronize, self._memory_ladder, BatchMemory(device), sizes_file
        )
        self._status = StatusReporter(stages.values(), self._batches.sharing, self._ranks, device.reserved_bytes, send)
        self._reporter = StepReporter(store, results, self._send, self._ranks.leads, overlapped, device.select)
        self._encoder = EncoderThread(
            self._reporter.report_files, lambda: inbox.put(messages.StepEncoded()), device.select
        )
        self._answer = send  # every rank answers InputArrived, since its chunk's place is free after all answers

        self._arrived: dict[Claim, messages.RunTask] = {}  # tasks that no step plan has admitted yet
        self._pieces: dict[tuple[Claim, str], messages.InputArrived] = {}  # arrived, to be received with a step plan
        self._jobs: dict[Claim, Job] = {}
        self._parked: dict[Claim, _Parked] = {}
        self._failed_encodings: list[messages.CancelTask] = []  # tasks that other ranks must drop
        # Tasks to save and then drop, and those of them that the last step plan saved.
        self._to_save, self._saving = set[Claim](), set[Claim]()
        # Stages of which a task has ended since the allocator's cache was last considered.
        self._ended_stages = set[Stage]()

    def run(self) -> None:
        """Run tasks until the process ends. Raises the error that made the device unusable."""
        while True:
            if not (self._jobs or self._arrived or self._factory.receives):
                self._leaks.check()
            self._status.report(busy=bool(self._jobs))
            plan = self.decide() if self._ranks.leads else self._receive_plan()
            self._ranks.send_plan(plan)
            self.carry_out(plan)

    def _receive_plan(self) -> messages.StepPlan:
        """Return the first rank's next step plan, and store the messages before it."""
        self._give_back_cache()
        while not isinstance(message := self._inbox.get(), messages.StepPlan):
            self._collect(message)
        return message

    def decide(self) -> messages.StepPlan:
        """Return the next step plan. If there is nothing to do, wait for a message.

        New tasks and cancellations get a plan of their own, before the next step, because a new task may be the most
        urgent one. Tasks that are dropped only if they can be saved are saved in one plan and dropped in the next: only
        the first rank can tell whether saving has worked.
        """
        self._give_back_cache()
        encoded = self._encoder.finished()
        self._finish_encoded(encoded)
        own_cancels = [messages.CancelTask(claim) for claim in self._saving if self._is_safe(claim)]
        own_cancels += self._failed_encodings
        self._saving, self._failed_encodings = set(), []
        has_work = bool(encoded or own_cancels or self._to_save or self._ready_jobs())
        cancels = (*own_cancels, *self._collect_messages(waits=not has_work))
        due = tuple(claim for claim, parked in self._parked.items() if parked.at <= time.monotonic())
        pieces = tuple(self._pieces)
        if cancels or self._arrived or due:
            return messages.StepPlan(cancels, tuple(self._arrived), due, receive=pieces)

        if self._to_save:
            self._saving, self._to_save = self._to_save, set()
            return messages.StepPlan(save=tuple(self._saving), receive=pieces)
        if not (ready := self._ready_jobs()):
            return messages.StepPlan(receive=pieces)

        batch, mode = self._batches.pick(ready)
        saved = [job for job in self._jobs.values() if self._is_due(job, batch[0].priority)]
        save, step = tuple(job.claim for job in saved), tuple(job.claim for job in batch)
        return messages.StepPlan(save=save, step=step, batch_mode=mode, receive=pieces)

    def _give_back_cache(self) -> None:
        """Return the cache of a stage whose last task has ended, for other processes."""
        idle_stages = self._ended_stages - {job.stage for job in self._jobs.values()}
        self._ended_stages -= idle_stages
        if idle_stages:
            self._memory_ladder.give_back()

    def carry_out(self, plan: messages.StepPlan) -> None:
        """Carry out a step plan. Tasks that have ended since it was decided are skipped.

        In an overlapped loop, a step is computed while the last one is reported. A plan that does more than a step
        waits for the reports first.
        """
        for piece in plan.receive:
            self._answer(self._factory.receive(self._pieces.pop(piece)))

        if plan.changes:
            self._finish_reported(self._reporter.wait())
        self._start_tasks([self._arrived.pop(claim) for claim in plan.admit])
        for cancel in plan.drop:
            self._drop(cancel)
        for claim in plan.retry:
            self._try_again(claim)
        for job in [self._jobs[claim] for claim in plan.save if claim in self._jobs]:
            self._save_checkpoint(job)

        if batch := [self._jobs[claim] for claim in plan.step if claim in self._jobs]:
            computed = self._batches.compute(batch, plan.batch_mode)

            # A report may have shown that a task is over. The step that it has just made is dropped then.
            self._finish_reported(self._reporter.wait())
            advanced = [job for job, result in computed if job.claim in self._jobs and self._advance(job, result)]
            self._finish_reported(self._reporter.report([job for job in advanced if not self._encode(job)]))

    def _encode(self, job: Job) -> bool:
        """Encode the files of a step, and report it, if this rank does so.

        Returns whether it does.
        """
        if job.stage.encodes and self._ranks.leads:
            self._encoder.submit(job)
            return True
        job.stage.discard_frames(job.state)
        return False

    def _ready_jobs(self) -> list[Job]:
        """Return the jobs whose next step may be computed now: the others are being encoded."""
        return [job for job in self._jobs.values() if self._encoder.can_step(job)]

    def _collect_messages(self, *, waits: bool) -> tuple[messages.CancelTask, ...]:
        """Collect all messages, with `waits` at least one. Returns the cancellations."""
        cancels = []
        if waits:
            next_try_at = min((parked.at for parked in self._parked.values()), default=None)
            with suppress(queue.Empty):
                timeout = None if next_try_at is None else max(0.0, next_try_at - time.monotonic())
                cancels += self._collect(self._inbox.get(timeout=timeout))
        while not self._inbox.empty():
            cancels += self._collect(self._inbox.get())
        return tuple(cancels)

    def _collect(self, message: messages.ForLoop) -> list[messages.CancelTask]:
        """Store a message until the next step plan. Returns it if it is a cancellation."""
        match message:
            case messages.RunTask():
                self._arrived[message.lease.claim] = message
            case messages.InputArrived():
                self._pieces[message.lease.claim, message.ref.id] = message
            case messages.CancelTask(if_saved=True):
                self._to_save.add(message.claim)
            case messages.CancelTask():
                return [message]
        return []

    def _start_tasks(self, runs: Sequence[messages.RunTask]) -> None:
        """Start tasks. A task that one rank cannot start ends or waits on all ranks."""
        jobs = [self._start_task(run) for run in runs]
        starts = self._ranks.receive_plan([start_result(run, job) for run, job in zip(runs, jobs, strict=True)])
        for run, job, start in zip(runs, jobs, starts, strict=True):
            claim = run.lease.claim
            if isinstance(job, Job) and start == job.resumed:
                self._factory.forget_received(claim)
                self._jobs[claim] = job
                announce(self._store, job, self._encodings, self._send if self._ranks.leads else None)
                continue
            if isinstance(job, Job):
                self._release(job)
            if isinstance(start, TaskFailed):
                self._factory.forget(claim)
                self._send(start)
                continue
            if self._ranks.size > 1:  # another rank may have dropped the input that it had received
                self._factory.drop_streamed(claim)
            if isinstance(start, messages.TaskWaits):
                error = job if isinstance(job, Exception) else None
                self._park(claim, error, partial(self._start_tasks, [run]))
            else:  # not every rank could read the checkpoint
                lease = msgspec.structs.replace(run.lease, checkpoint=None, prefix=())
                self._start_tasks([msgspec.structs.replace(run, lease=lease)])

    def _start_task(self, run: messages.RunTask) -> Job | Exception:
        """Start a task on this rank. Returns its job, or the error."""
        self._send(StepProgress(run.lease.claim, 0, 0, 0))
        try:
            return self._memory_ladder.repeat(run.lease.task, partial(self._factory.start, run))
        except Exception as error:  # an error of one task must not end the process
            return task_error(error)

    def _park(
        self, claim: Claim, error: Exception | None, again: Callable[[], None], timings: Timings = UNUSED
    ) -> None:
        """Let a task wait for the result store. Each try sends TaskWaits as progress.

        `error` says why, None if only another rank has to wait. `again` is called at the next try. The pause doubles
        with each try.
        """
        previous = self._parked.get(claim)
        if previous is None:
            log.warning(
                "a task waits for the result store",
                **messages.about(claim),
                reason=str(getattr(error, "__cause__", None) or error) if error else "another rank waits for it",
            )
        pause = min(MOST_PAUSE_S, 2 * previous.pause) if previous else PAUSE_S
        self._parked[claim] = _Parked(again, time.monotonic() + pause, pause, timings)
        self._send(messages.TaskWaits(claim))

    def _try_again(self, claim: Claim) -> None:
        """Try a parked task again.

        If it must wait once more, the try has replaced its entry in `_parked`.
        """
        parked = self._parked.get(claim)
        if parked is None:
            return
        try:
            parked.again()
        except Exception as error:  # an error of one task must not end the process
            self._send(messages.failure(claim, task_error(error), parked.timings))
        if self._parked[claim] is parked:
            del self._parked[claim]

    def _is_due(self, job: Job, priority: int) -> bool:
        """Return whether to save a checkpoint now.

        It is due by the policy, and if a task of a higher `priority` makes the next step, but only after a new step.
        """
        step, steps = job.stage.progress(job.state)
        remaining_s = (steps - step) * job.run_s / max(1, job.steps)
        return step > job.saved and (
            job.priority < priority
            or self._policy.is_due(step - job.saved, time.monotonic() - job.saved_at, remaining_s)
        )

    def _is_safe(self, claim: Claim) -> bool:
        """Whether the next attempt at a running task would repeat no step."""
        job = self._jobs.get(claim)
        return job is not None and job.stage.progress(job.state)[0] == job.safe

    def _advance(self, job: Job, result: Any) -> bool:
        """Advance a job by its step's result. On an error, fail it and return False."""
        try:
            if isinstance(result, Exception):
                raise result
            job.state = job.stage.advance(job.state, result)
            job.key = *job.key[:-1], self._factory.exact_batch_key(job.stage, job.state)
            job.prefix_blocks = read_prefix_blocks(job) if self._ranks.leads else []
        except Exception as error:  # an error of one task must not end the process
            self._fail(job, error)
            return False
        return True

    def _finish_reported(self, reported: Sequence[ReportResult]) -> None:
        """Finish the tasks whose last step was reported, and fail those whose report raised."""
        for job, report_error in reported:
            try:
                if report_error:
                    raise report_error
                if job.is_over:
                    self._finish_task(job)
            except Exception as error:  # an error of one task must not end the process
                self._fail(job, error)

    def _finish_encoded(self, encoded: Sequence[EncodedStep]) -> None:
        """Finish the tasks whose last step is encoded.

        Those whose encoding failed fail on all ranks.
        """
        for job, seconds, output, encoding_error in encoded:
            if self._jobs.get(job.claim) is not job:  # an earlier step has failed
                continue
            job.run_s += seconds
            try:
                if encoding_error:
                    raise encoding_error
                if output:
                    self._store_output(job, output, time.monotonic())
            except Exception as error:  # an error of one task must not end the process
                self._fail(job, error)
                self._failed_encodings += [messages.CancelTask(job.claim)] * (self._ranks.size > 1)

    def _fail(self, job: Job, error: Exception) -> None:
        self._jobs.pop(job.claim, None)
        self._release(job)
        if is_out_of_memory(error):
            error = self._memory_ladder.explain(job.lease.task, error)
        self._send(messages.failure(job.claim, task_error(error), job.timings))

    def _release(self, job: Job) -> None:
        """Release a job's inputs and its stage's state.

        Waits for a step that is being encoded.
        """
        self._encoder.cancel(job)
        self._ended_stages.add(job.stage)
        job.opened.close()
        job.stage.release(job.state)

    def _save_checkpoint(self, job: Job) -> None:
        """Save a checkpoint if there are new steps. Errors are only logged."""
        step, _ = job.stage.progress(job.state)
        task, began = job.lease.task, time.monotonic()
        if step == job.saved or self._policy.never or not self._ranks.leads:
            return
        try:
            checkpoint = job.stage.save(job.state)
            if checkpoint:
                ref = self._store.put(pack(checkpoint), request=task.request, stage=task.stage, attempt=task.attempt)
                self._send(CheckpointSaved(job.claim, ref, step))
                job.safe = step
                self._policy.record_cost(time.monotonic() - began)
        except Exception as error:  # an error of one task must not end the process
            reason = str(task_error(error))
            log.warning("checkpoint not saved", request=task.request, stage=task.stage, step=step, reason=reason)
        job.saved, job.saved_at = step, time.monotonic()
        job.save_s += job.saved_at - began

    def _finish_task(self, job: Job) -> None:
        """Store the task's output and results. Other ranks than the first only release it."""
        if not self._ranks.leads:
            self._release(job)
            del self._jobs[job.claim]
            return
        began = time.monotonic()
        output = job.stage.finish(job.state)
        finished = time.monotonic()
        job.run_s += finished - began
        job.share_s += finished - began
        self._store_output(job, output, finished)

    def _store_output(self, job: Job, output: StageOutput, finished: float) -> None:
        """Store the output and the results of a task that has finished."""
        ref = store_output(self._store, job, output, self._encodings)
        self._release(job)
        del self._jobs[job.claim]
        self._store_results(job, ref, StageOutput(media=output.media, vae=output.vae), finished)

    def _store_results(self, job: Job, ref: ObjectRef | None, output: StageOutput, finished: float) -> None:
        """Store result files and report the task as completed.

        The task waits if the result store is unavailable. Its output is stored already, so a try repeats only this.
        """
        try:
            results = write(self._results, job, output.media)
        except ResultsUnavailable as error:
            job.state = None  # it was released: the task needs no device memory while it waits
            self._park(job.claim, error, partial(self._store_results, job, ref, output, finished), job.timings)
            return
        timings = msgspec.structs.replace(job.timings, put_s=time.monotonic() - finished)
        self._send(TaskCompleted(job.claim, ref, results, timings, vae=output.vae))

    def _drop(self, message: messages.CancelTask) -> None:
        """Drop a task, after a checkpoint if the cancellation requests one."""
        self._factory.forget(message.claim)
        if job := self._jobs.pop(message.claim, None):
            if message.save:
                self._save_checkpoint(job)
            self._release(job)
            if self._ranks.leads:
                delete_fragments(self._results, job)
            self._send(TaskStopped(message.claim, job.timings))
        elif parked := self._parked.pop(message.claim, None):
            self._send(TaskStopped(message.claim, parked.timings))
