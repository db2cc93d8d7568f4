"""What clients are shown of a task on its way: previews, and parts of a result that can be read while it grows.

Both are attachments. None of it may fail the task: errors are only logged.
"""

from __future__ import annotations

import structlog

from unfuse.stores.results import ResultStore, part_name, parts_of
from unfuse.worker.turn import Job

log = structlog.get_logger(__name__)


def show_preview(results: ResultStore, job: Job, step: int) -> None:
    """Store a preview every `preview_every` steps, if the request asked for it."""
    every, task = job.lease.task.params.get("preview_every"), job.lease.task
    if not isinstance(every, int) or every < 1 or step % every:
        return
    try:
        if media := job.stage.preview(job.state):
            results.attach(task.request, f"preview-{task.stage}-{step}", media.data, durable=False)
            job.previews.append(step)
    except Exception as error:
        log.warning("no preview", request=task.request, stage=task.stage, step=step, reason=str(error))


def show_part(results: ResultStore, job: Job, step: int) -> None:
    """Store what a step added, before that is told; not behind a part that could not be stored: it would not fit."""
    task, data = job.lease.task, job.stage.part(job.state)
    if not data or job.part is None:
        return
    try:
        results.attach(task.request, part_name(task.attempt, step), data, durable=False)
        job.part = step
    except Exception as error:
        log.warning("no more parts", request=task.request, stage=task.stage, step=step, reason=str(error))
        job.part = None


def withdraw_parts(results: ResultStore, job: Job) -> None:
    """Delete the parts of a task that ends early: its request may be over, and what it left deleted already."""
    task = job.lease.task
    try:
        if job.part != 0:
            results.detach(task.request, parts_of(task.attempt))
    except Exception as error:
        log.warning("parts are left behind", request=task.request, stage=task.stage, reason=str(error))
