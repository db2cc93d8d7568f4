"""Report the output and progress of each step, optionally while the next step runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import structlog

from unfuse.core.growth import Grown
from unfuse.core.messages import Keep, Progress
from unfuse.stores.results import ResultStore, part_name, parts_of
from unfuse.stores.tensor_store import TensorStore
from unfuse.worker.job import Job, store_prefix_blocks

#: Least seconds between two progress messages of one task. Each message covers all steps since the last.
PROGRESS_INTERVAL_S = 0.1

log = structlog.get_logger(__name__)


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
        send: Callable[[Grown | Keep | Progress], object],
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
            self._send(Progress(job.claim, step, steps, job.reported + 1, tuple(job.previews), job.share_s))
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
