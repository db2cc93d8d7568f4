"""Reports the steps of tasks, and stores their previews and video fragments."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import structlog

from unfuse.core.messages import CachePrefix, StepProgress
from unfuse.core.task import OutputDeltas
from unfuse.stores.results import ResultStore, fragment_name, fragment_prefix
from unfuse.stores.tensor_store import TensorStore
from unfuse.worker.device_errors import task_error
from unfuse.worker.job import Job, store_prefix_blocks

log = structlog.get_logger(__name__)

#: Least seconds between two progress messages of one task. Each message covers all steps since the last message.
PROGRESS_INTERVAL_S = 0.1


class ReportResult(NamedTuple):
    """The outcome of reporting one task's step."""

    #: The task's job.
    job: Job

    #: The error that reporting raised, or None. It fails this task only.
    error: Exception | None


class StepReporter:
    """Sends new output and progress to the parent after each step, and stores prefix blocks.

    Other tasks start from the prefix blocks (prefix caching). The first rank `leads`: it also stores previews and
    video fragments for clients. With `overlap`, steps are reported in a second thread while the next step runs, for
    tasks whose stage allows it (`can_overlap`). A text that ends by a stop string is then detected one step late. That
    thread calls `starts_thread` first.
    """

    def __init__(
        self,
        store: TensorStore,
        results: ResultStore,
        send: Callable[[OutputDeltas | CachePrefix | StepProgress], object],
        leads: bool,
        overlap: bool,
        starts_thread: Callable[[], object] = lambda: None,
    ) -> None:
        self._store, self._results = store, results
        self._send, self._leads = send, leads
        self._thread = ThreadPoolExecutor(1, "step reporter", starts_thread) if overlap else None
        self._pending: Future[list[ReportResult]] | None = None

    def report(self, jobs: Sequence[Job]) -> list[ReportResult]:
        """Report one step of these jobs.

        Returns the results of jobs that were reported at once. `wait` returns those of overlapped jobs.
        """
        # A last step is reported at once, so that its task does not take part in another forward.
        overlapped = [job for job in jobs if self._thread and job.stage.can_overlap and not job.is_over]
        if self._thread and overlapped:
            self._pending = self._thread.submit(self._report_jobs, overlapped)
        return self._report_jobs([job for job in jobs if job not in overlapped])

    def report_files(self, job: Job, step: int, steps: int) -> None:
        """Store the preview and the video fragment of a step, and report the step.

        `step`: its number. `steps`: the total.
        """
        if step < steps and self._leads:
            store_preview(self._results, job, step)
            store_fragment(self._results, job, step)
        self._report_progress(job, step, steps)

    def wait(self) -> list[ReportResult]:
        """Wait for the second thread. Returns the new results of overlapped jobs."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else []

    def _report_jobs(self, jobs: Sequence[Job]) -> list[ReportResult]:
        return [ReportResult(job, self._report_job(job)) for job in jobs]

    def _report_job(self, job: Job) -> Exception | None:
        """Report one step of a job. Returns the error of this task, or None."""
        try:
            if deltas := job.new_deltas():
                self._send(deltas)
            for block in store_prefix_blocks(self._store, job):
                self._send(block)
            self.report_files(job, *job.stage.progress(job.state))
        except Exception as error:  # an error of one task must not end the process
            return error
        return None

    def _report_progress(self, job: Job, step: int, steps: int) -> None:
        """Send the job's progress, if its last step is done or PROGRESS_INTERVAL_S have passed."""
        now = time.monotonic()
        if step == steps or now - job.reported_at >= PROGRESS_INTERVAL_S:
            self._send(StepProgress(job.claim, step, steps, job.reported + 1, tuple(job.previews), job.share_s))
            job.reported, job.reported_at = step, now
            job.previews = []


def store_preview(results: ResultStore, job: Job, step: int) -> None:
    """Store a preview every `preview_every` steps, if the request has this parameter.

    Errors are only logged.
    """
    interval, task = job.lease.task.params.get("preview_every"), job.lease.task
    if not isinstance(interval, int) or interval < 1 or step % interval:
        return
    try:
        if media := job.stage.preview(job.state):
            results.attach(task.request, f"preview-{task.stage}-{step}", media.data, durable=False)
            job.previews.append(step)
    except Exception as error:
        reason = str(task_error(error))
        log.warning("preview not stored", request=task.request, stage=task.stage, step=step, reason=reason)


def store_fragment(results: ResultStore, job: Job, step: int) -> None:
    """Store the video fragment of a step before the step is reported.

    Errors are only logged. After a fragment that could not be stored, none is stored, because a gap would break the
    video.
    """
    task, data = job.lease.task, job.stage.video_fragment(job.state)
    if not data or job.last_fragment_step is None:
        return
    try:
        results.attach(task.request, fragment_name(task.attempt, step), data, durable=False)
        job.last_fragment_step = step
    except Exception as error:
        reason = str(task_error(error))
        log.warning("video fragment not stored", request=task.request, stage=task.stage, step=step, reason=reason)
        job.last_fragment_step = None


def delete_fragments(results: ResultStore, job: Job) -> None:
    """Delete the video fragments of a task that ends early. Errors are only logged.

    Its request may be over already, and its attachments deleted.
    """
    task = job.lease.task
    try:
        if job.last_fragment_step != 0:
            results.detach(task.request, fragment_prefix(task.attempt))
    except Exception as error:
        log.warning("video fragments not deleted", request=task.request, stage=task.stage, reason=str(error))
