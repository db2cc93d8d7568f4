"""The step loop: decides what to do next, and carries it out. Every stage runs in it, stepped or not."""

from __future__ import annotations

import gc
import queue
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import structlog

from unfuse.core.errors import ResultsUnavailable
from unfuse.core.messages import (
    CachePrefix,
    CheckpointSaved,
    ExactBatchStats,
    Memory,
    StepProgress,
    TaskCompleted,
    TaskFailed,
    TaskStopped,
)
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Timings
from unfuse.core.task import Claim, OutputDeltas
from unfuse.core.text import TextStats
from unfuse.stages.base import EncodedMedia, ReportsTextStats, Stage
from unfuse.stores.results import ResultStore, part_name, parts_of
from unfuse.stores.tensor_store import TensorStore
from unfuse.worker import compute_messages as messages
from unfuse.worker.batches import Batches, InvarianceResults
from unfuse.worker.checkpoints import CheckpointPolicy, pack
from unfuse.worker.job import Job, JobFactory, announce, put, read_prefix_blocks, start_of, store_prefix_blocks, write
from unfuse.worker.ranks import Ranks

log = structlog.get_logger(__name__)

#: Least seconds between two progress messages of one task. Each message covers all steps since the last.
PROGRESS_INTERVAL_S = 0.1


class ReportResult(NamedTuple):
    """The outcome of reporting one task's step."""

    job: Job

    #: The error that reporting raised, or None. It fails this task only.
    error: Exception | None


class StepReporter:
    """Sends new output and progress to the parent after each step, and stores prefix blocks for other tasks.

    The first rank `leads`: it also stores previews and parts of results for clients. With `overlap`, the work is done
    in a second thread while the next step runs, for tasks whose stage allows it (`can_overlap`). That a text has ended
    is then noticed one step late.
    """

    def __init__(
        self,
        store: TensorStore,
        results: ResultStore,
        send: Callable[[OutputDeltas | CachePrefix | StepProgress], object],
        leads: bool,
        overlap: bool,
    ) -> None:
        self._store, self._results, self._send, self._leads = store, results, send, leads
        self._thread = ThreadPoolExecutor(1, "step reporter") if overlap else None
        self._pending: Future[list[ReportResult]] | None = None

    def report(self, jobs: Sequence[Job]) -> list[ReportResult]:
        """Report one step of these jobs.

        Returns the results of jobs that were reported at once. `wait` returns those of overlapped jobs.
        """
        overlapped = [job for job in jobs if self._thread and job.stage.can_overlap and not job.is_over]
        if self._thread and overlapped:
            self._pending = self._thread.submit(self._report_jobs, overlapped)
        return self._report_jobs([job for job in jobs if job not in overlapped])

    def wait(self) -> list[ReportResult]:
        """Wait until all steps are reported. Returns the results that `report` did not."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else []

    def _report_jobs(self, jobs: Sequence[Job]) -> list[ReportResult]:
        return [ReportResult(job, self._report_job(job)) for job in jobs]

    def _report_job(self, job: Job) -> Exception | None:
        try:
            if grown := job.growth():
                self._send(grown)
            for block in store_prefix_blocks(self._store, job):
                self._send(block)
            step, steps = job.stage.progress(job.state)
            if step < steps and self._leads:
                store_preview(self._results, job, step)
                store_part(self._results, job, step)
            self._report_progress(job, step, steps)
        except Exception as error:  # an error of one task must not end the process
            return error
        return None

    def _report_progress(self, job: Job, step: int, steps: int) -> None:
        now = time.monotonic()
        if step == steps or now - job.reported_at >= PROGRESS_INTERVAL_S:
            self._send(StepProgress(job.claim, step, steps, job.reported + 1, tuple(job.previews), job.share_s))
            job.reported, job.reported_at, job.previews = step, now, []


def store_preview(results: ResultStore, job: Job, step: int) -> None:
    """Store a preview every `preview_every` steps, if the request asked for it. Errors are only logged."""
    every, task = job.lease.task.params.get("preview_every"), job.lease.task
    if not isinstance(every, int) or every < 1 or step % every:
        return
    try:
        if media := job.stage.preview(job.state):
            results.attach(task.request, f"preview-{task.stage}-{step}", media.data, durable=False)
            job.previews.append(step)
    except Exception as error:
        log.warning("no preview", request=task.request, stage=task.stage, step=step, reason=str(error))


def store_part(results: ResultStore, job: Job, step: int) -> None:
    """Store what a step added to a result, before the step is reported. Errors are only logged.

    After a part that could not be stored none is: it would not fit.
    """
    task, data = job.lease.task, job.stage.part(job.state)
    if not data or job.part is None:
        return
    try:
        results.attach(task.request, part_name(task.attempt, step), data, durable=False)
        job.part = step
    except Exception as error:
        log.warning("no more parts", request=task.request, stage=task.stage, step=step, reason=str(error))
        job.part = None


def delete_parts(results: ResultStore, job: Job) -> None:
    """Delete the parts of a task that ends early: its request may be over, and its attachments deleted already."""
    task = job.lease.task
    try:
        if job.part != 0:
            results.detach(task.request, parts_of(task.attempt))
    except Exception as error:
        log.warning("parts are left behind", request=task.request, stage=task.stage, reason=str(error))


PAUSE_S, MOST_PAUSE_S = 0.25, 2.0  # the first and longest pause, in seconds, of a task that waits for the result store

REPORT_S = 0.25  # the least seconds between two reports of a busy process

UNUSED = Timings()


def texts_of(stages: Iterable[Stage]) -> list[ReportsTextStats]:
    """Return what keeps the texts of these stages, each once."""
    return [*{id(texts): texts for stage in stages if (texts := stage.texts) is not None}.values()]


class ComputeLeakCheck:
    """Finds what a compute process without a task holds: keys and values, and inputs that are still mapped.

    With `frees`, it ends sequences that were left: no state exists that could use them. Ranks must not, since all of
    them have to have the same blocks, and one may not have what another one leaks. Inputs stay, because an array that
    is still used may lie there. `send` gets each leak once.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        store: TensorStore,
        send: Callable[[messages.LeaksFound], object],
        *,
        frees: bool,
    ) -> None:
        self._texts, self._store, self._send, self._frees = texts_of(stages), store, send, frees
        self._known = frozenset[tuple[int, str]]()

    def look(self) -> None:
        """Look for leaks. To be called only while the process has no task, and takes no input of one."""
        new = self._leftovers().keys() - self._known
        if not new:
            return

        gc.collect()  # what is garbage only waits to be freed
        leftovers = {key: found for key, found in self._leftovers().items() if key in new}
        for texts in self._texts if self._frees else ():
            texts.end_all()
        self._known = frozenset(self._leftovers())

        leaks = [
            messages.Leak(memory, key[1], nbytes, key not in self._known) for key, (memory, nbytes) in leftovers.items()
        ]
        if leaks:
            self._send(messages.LeaksFound(tuple(leaks)))

    def _leftovers(self) -> dict[tuple[int, str], tuple[Memory, int]]:
        """Memory and bytes of what is held now, by the number of the holder and a name."""
        found = dict[tuple[int, str], tuple[Memory, int]]()
        for number, texts in enumerate(self._texts):
            for name, nbytes in texts.leftovers().items():
                found[number, name] = "kv", nbytes
        for ref in self._store.held():
            found[-1, f"an input, object {ref.id} of {ref.request}, {ref.stage}"] = "arena", ref.nbytes
        return found


class StatusReporter:
    """Sends the status of a compute process when it has changed.

    `sharing` is what batches found, and `device_memory` returns bytes of a GPU. Language stages are reported by the
    first of several ranks alone, since all have the same blocks.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        sharing: Mapping[str, ExactBatchStats],
        ranks: Ranks,
        device_memory: Callable[[], int],
        send: Callable[[messages.RankStatus], object],
    ) -> None:
        self._texts = texts_of(stages) if ranks.leads else []
        self._sharing, self._ranks, self._device_memory, self._send = sharing, ranks, device_memory, send
        self._last, self._reported_at = messages.RankStatus(), 0.0

    def report(self, *, busy: bool) -> None:
        """Report now if the process is about to wait, else at most every REPORT_S seconds."""
        now = time.monotonic()
        if busy and now - self._reported_at < REPORT_S:
            return
        status = messages.RankStatus(
            time=self._ranks.time,
            device_memory=self._device_memory(),
            texts=sum((texts.load() for texts in self._texts), TextStats()) if self._texts else None,
            retracted=sum(texts.retracted for texts in self._texts),
            batch_invariance=dict(self._sharing),
        )
        if status != self._last:
            self._send(status)
        self._last, self._reported_at = status, now


@dataclass(eq=False)
class _Parked:
    """A task that waits for the result store: what to call again, at which monotonic time, and the last pause.

    `timings` say what it has used.
    """

    again: Callable[[], None]
    at: float
    pause: float
    timings: Timings


class StepLoop:
    """Runs tasks on the stages of one compute process.

    `stages` is by declared pool; stages of `plain` pools get numpy arrays, the others torch tensors. Up to `batch`
    tasks share a forward (0: as is usual). `encodings` maps a stage kind to how its outputs are narrowed. Tasks of the
    highest priority go first, pools in turns, each in order of arrival; the others pause and keep their state. A
    cancelled task is dropped between two steps. `policy` says when states are saved, so that another worker can resume
    them; a task that pauses is saved too. A task whose result cannot be stored, because the result store is full, waits
    while others go on.

    With `exactness`, a task gets the bytes that it has alone: it shares a forward only where comparing shows that.

    `overlapped`: where a stage can go on before it is told of what it made, its next step is made meanwhile.

    Of several `ranks` the first one decides, stores and reports; the others carry out the same turns. `device_memory`
    returns the bytes that the process holds on a GPU.
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
        device_memory: Callable[[], int] = lambda: 0,
    ) -> None:
        self._ranks = ranks or Ranks()
        self._intake = JobFactory(stages, store, results, plain, exactness is not None, self._ranks.size)
        self._encodings, self._policy = encodings or {}, policy or CheckpointPolicy()
        self._store, self._results, self._inbox = store, results, inbox
        self._send = send if self._ranks.leads else bool  # the first rank reports for all
        self._leaks = ComputeLeakCheck(stages.values(), store, send, frees=self._ranks.size == 1)
        self._batches = Batches(batch, exactness, self._ranks)
        self._status = StatusReporter(stages.values(), self._batches.sharing, self._ranks, device_memory, send)
        self._reporter = StepReporter(store, results, self._send, self._ranks.leads, overlapped)
        self._answer = send  # also of a rank that does not report
        self._arrived: dict[Claim, messages.RunTask] = {}
        self._pieces: dict[tuple[Claim, str], messages.InputArrived] = {}  # of inputs that come, to be taken in a turn
        self._jobs: dict[Claim, Job] = {}
        self._parked: dict[Claim, _Parked] = {}
        self._to_save, self._saving = set[Claim](), set[Claim]()  # what is to be saved, then dropped, and what was just

    def run(self) -> None:
        """Run tasks until the process ends."""
        while True:
            if not (self._jobs or self._arrived or self._intake.receives):
                self._leaks.look()
            self._status.report(busy=bool(self._jobs))
            turn = self.decide() if self._ranks.leads else self._told()
            self._ranks.tell(turn)
            self.carry_out(turn)

    def _told(self) -> messages.StepPlan:
        """The next turn that the first rank has decided."""
        while not isinstance(message := self._inbox.get(), messages.StepPlan):
            self._take(message)
        return message

    def decide(self) -> messages.StepPlan:
        """Decide the next turn; waits for a message if there is nothing to do.

        New messages get a turn of their own, before the next step, because a new task may be the most urgent one. Tasks
        that are to be dropped if they can be saved are saved in one turn, and dropped in the next one.
        """
        safe = [messages.CancelTask(claim) for claim in self._saving if self._is_safe(claim)]
        self._saving = set()
        dropped = (*safe, *self._hear())
        again = tuple(claim for claim, parked in self._parked.items() if parked.at <= time.monotonic())
        pieces = tuple(self._pieces)
        if dropped or self._arrived or again:
            return messages.StepPlan(dropped, tuple(self._arrived), again, receive=pieces)
        if self._to_save:
            self._saving, self._to_save = self._to_save, set()
            return messages.StepPlan(save=tuple(self._saving), receive=pieces)
        if not self._jobs:
            return messages.StepPlan(receive=pieces)
        batch, how = self._batches.pick(self._jobs.values())
        saved = [job for job in self._jobs.values() if self._is_due(job, batch[0].priority)]
        save, step = tuple(job.claim for job in saved), tuple(job.claim for job in batch)
        return messages.StepPlan(save=save, step=step, how=how, receive=pieces)

    def carry_out(self, turn: messages.StepPlan) -> None:
        """Carry a turn out. Tasks that have ended since it was decided are skipped.

        Where the loop is overlapped, a step is made while it is told what the one before has made of tasks; all of that
        is told before anything but a step. A task that turns out to be over has made a step too many, which is dropped.
        """
        for piece in turn.receive:
            self._answer(self._intake.receive(self._pieces.pop(piece)))
        if turn.changes:
            self._end(self._reporter.wait())
        self._begin([self._arrived.pop(claim) for claim in turn.admit])
        for cancel in turn.drop:
            self._drop(cancel)
        for claim in turn.again:
            self._try_again(claim)
        for job in [self._jobs[claim] for claim in turn.save if claim in self._jobs]:
            self._keep(job)
        if batch := [self._jobs[claim] for claim in turn.step if claim in self._jobs]:
            computed = self._batches.compute(batch, turn.how)
            self._end(self._reporter.wait())
            going = [job for job, made in computed if job.claim in self._jobs and self._goes_on(job, made)]
            self._end(self._reporter.report(going))

    def _hear(self) -> tuple[messages.CancelTask, ...]:
        """Take all messages; waits for one if there is nothing to do. Returns the cancellations."""
        cancels = []
        if not self._jobs:
            due = min((parked.at for parked in self._parked.values()), default=None)
            with suppress(queue.Empty):
                timeout = None if due is None else max(0.0, due - time.monotonic())
                cancels += self._take(self._inbox.get(timeout=timeout))
        while not self._inbox.empty():
            cancels += self._take(self._inbox.get())
        return tuple(cancels)

    def _take(self, message: messages.ForLoop) -> list[messages.CancelTask]:
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

    def _begin(self, runs: Sequence[messages.RunTask]) -> None:
        """Begin tasks, as far as every rank can: what one of them cannot begin ends everywhere, or waits."""
        begun = [self._begun(run) for run in runs]
        starts = self._ranks.agree([start_of(run, own) for run, own in zip(runs, begun, strict=True)])
        for run, own, start in zip(runs, begun, starts, strict=True):
            claim = run.lease.claim
            if isinstance(own, Job) and start == own.resumed:
                self._intake.begun(claim)
                self._jobs[claim] = own
                announce(self._store, own, self._encodings, self._send if self._ranks.leads else None)
                continue
            if isinstance(own, Job):
                self._let_go(own)
            if isinstance(start, TaskFailed):
                self._intake.forget(claim)
                self._send(start)
                continue
            if self._ranks.size > 1:  # another rank may have given up what it had taken
                self._intake.drop_taken(claim)
            if isinstance(start, messages.TaskWaits):
                self._park(claim, own, partial(self._begin, [run]))
            else:  # not every rank could read the state that was saved
                lease = msgspec.structs.replace(run.lease, checkpoint=None, prefix=())
                self._begin([msgspec.structs.replace(run, lease=lease)])

    def _begun(self, run: messages.RunTask) -> Job | Exception:
        self._send(StepProgress(run.lease.claim, 0, 0, 0))
        try:
            return self._intake.begin(run)
        except Exception as error:  # an error of one task must not end the process
            return error

    def _park(self, claim: Claim, error: object, again: Callable[[], None], timings: Timings = UNUSED) -> None:
        """Let a task wait for the result store. Waits is sent at every try, so that the parent sees progress."""
        before = self._parked.get(claim)
        if before is None:
            log.warning(
                "waits for the result store",
                **messages.about(claim),
                reason=str(getattr(error, "__cause__", None) or error),
            )
        pause = min(MOST_PAUSE_S, 2 * before.pause) if before else PAUSE_S
        self._parked[claim] = _Parked(again, time.monotonic() + pause, pause, timings)
        self._send(messages.TaskWaits(claim))

    def _try_again(self, claim: Claim) -> None:
        """Try a task again whose pause is over. If it must wait again, that parks it anew."""
        parked = self._parked.get(claim)
        if parked is None:
            return
        try:
            parked.again()
        except Exception as error:  # an error of one task must not end the process
            self._send(messages.failure(claim, error, parked.timings))
        if self._parked[claim] is parked:
            del self._parked[claim]

    def _is_due(self, job: Job, priority: int) -> bool:
        """Whether to save a job's state now: it waits for one of that priority, or the policy says so."""
        step, steps = job.stage.progress(job.state)
        left_s = (steps - step) * job.run_s / max(1, job.steps)
        return step > job.saved and (
            job.priority < priority or self._policy.due(step - job.saved, time.monotonic() - job.saved_at, left_s)
        )

    def _is_safe(self, claim: Claim) -> bool:
        """Whether the next attempt at a task that runs need not make any step of it again."""
        job = self._jobs.get(claim)
        return job is not None and job.stage.progress(job.state)[0] == job.safe

    def _goes_on(self, job: Job, made: Any) -> bool:
        """Whether a task has gone on from what a step made of it."""
        try:
            if isinstance(made, Exception):
                raise made
            job.state = job.stage.advance(job.state, made)
            job.key = *job.key[:-1], self._intake.exact_batch_key(job.stage, job.state)
            job.prefix_blocks = read_prefix_blocks(job) if self._ranks.leads else []
        except Exception as error:  # an error of one task must not end the process
            self._fail(job, error)
            return False
        return True

    def _end(self, reported: Sequence[ReportResult]) -> None:
        """Finish the tasks whose last step was reported, and fail those whose report raised."""
        for job, error in reported:
            try:
                if error:
                    raise error
                if job.is_over:
                    self._retire(job)
            except Exception as error:  # an error of one task must not end the process
                self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        self._jobs.pop(job.claim, None)
        self._let_go(job)
        self._send(messages.failure(job.claim, error, job.timings))

    def _let_go(self, job: Job) -> None:
        job.opened.close()
        job.stage.let_go(job.state)

    def _keep(self, job: Job) -> None:
        """Save a job's state, if it has made a step since the last time. An error is only logged."""
        (step, _), task, began = job.stage.progress(job.state), job.lease.task, time.monotonic()
        if step == job.saved or self._policy.never or not self._ranks.leads:
            return
        try:
            checkpoint = job.stage.save(job.state)
            if checkpoint:
                ref = self._store.put(pack(checkpoint), request=task.request, stage=task.stage, attempt=task.attempt)
                self._send(CheckpointSaved(job.claim, ref, step))
                job.safe = step
                self._policy.took(time.monotonic() - began)
        except Exception as error:  # an error of one task must not end the process
            log.warning("not saved", request=task.request, stage=task.stage, step=step, reason=str(error))
        job.saved, job.saved_at = step, time.monotonic()
        job.save_s += job.saved_at - began

    def _retire(self, job: Job) -> None:
        """Store the task's output, then report it as done, so that a reported output can always be read."""
        if not self._ranks.leads:
            self._let_go(job)
            del self._jobs[job.claim]
            return
        began = time.monotonic()
        output = job.stage.finish(job.state)
        finished = time.monotonic()
        job.run_s += finished - began
        job.share_s += finished - began
        ref = put(self._store, job, output, self._encodings)
        self._let_go(job)
        del self._jobs[job.claim]
        self._deliver(job, ref, output.media, finished)

    def _deliver(self, job: Job, ref: ObjectRef | None, media: Sequence[EncodedMedia], finished: float) -> None:
        try:
            results = write(self._results, job, media)
        except ResultsUnavailable as error:
            job.state = None
            self._park(job.claim, error, partial(self._deliver, job, ref, media, finished), job.timings)
            return
        timings = msgspec.structs.replace(job.timings, put_s=time.monotonic() - finished)
        self._send(TaskCompleted(job.claim, ref, results, timings))

    def _drop(self, message: messages.CancelTask) -> None:
        self._intake.forget(message.claim)
        if job := self._jobs.pop(message.claim, None):
            if message.save:
                self._keep(job)
            if self._ranks.leads:
                delete_parts(self._results, job)
            self._let_go(job)
            self._send(TaskStopped(message.claim, job.timings))
        elif parked := self._parked.pop(message.claim, None):
            self._send(TaskStopped(message.claim, parked.timings))
