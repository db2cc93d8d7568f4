"""Encodes the files of steps in a second thread, while the next steps are computed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from unfuse.stages.base import StageOutput
from unfuse.worker.job import Job

#: Most steps of one task whose files are not encoded yet. Its next step waits then, since each holds pixels in memory.
MAX_UNENCODED = 2


class EncodedStep(NamedTuple):
    """A step whose files are encoded, or whose encoding failed."""

    #: The task's job.
    job: Job

    #: Seconds that encoding and storing took.
    seconds: float

    #: The output of the task, if the step was its last one.
    output: StageOutput | None = None

    #: The error, or None. It fails this task only.
    error: Exception | None = None


class EncoderThread:
    """Encodes and reports steps in the order in which they were computed.

    A task with steps that are not encoded is not over, so it keeps its slot. `report` stores and reports what a step
    added, by its number and the total. `wake` is called after each step. The thread calls `starts_thread` first.
    """

    def __init__(
        self,
        report: Callable[[Job, int, int], object],
        wake: Callable[[], object],
        starts_thread: Callable[[], object],
    ) -> None:
        self._report = report
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, "encoder", starts_thread)
        self._steps: dict[Job, deque[Future[EncodedStep]]] = {}

    def submit(self, job: Job) -> None:
        """Encode the step that a job has just made."""
        step, steps = job.stage.progress(job.state)
        future = self._thread.submit(self._encode, job, step, steps)
        self._steps.setdefault(job, deque()).append(future)
        future.add_done_callback(lambda _: self._wake())

    def can_step(self, job: Job) -> bool:
        """Whether the next step of a job may be computed now.

        It may not if the job has none, or if too many of its steps are not encoded yet.
        """
        return not job.stage.encodes or (not job.is_over and len(self._steps.get(job, ())) < MAX_UNENCODED)

    def finished(self) -> list[EncodedStep]:
        """Return the steps that were encoded since the last call, in order."""
        encoded = list[EncodedStep]()
        for job, steps in [*self._steps.items()]:
            while steps and steps[0].done():
                encoded.append(steps.popleft().result())
            if not steps:
                del self._steps[job]
        return encoded

    def cancel(self, job: Job) -> None:
        """Encode no more steps of a job. Waits for the one that is being encoded."""
        steps = self._steps.pop(job, ())
        wait([step for step in steps if not step.cancel()])

    def _encode(self, job: Job, step: int, steps: int) -> EncodedStep:
        began = time.monotonic()
        try:
            self._report(job, step, steps)
            output = job.stage.finish(job.state) if step == steps else None
        except Exception as error:  # an error of one task must not end the process
            return EncodedStep(job, time.monotonic() - began, error=error)
        return EncodedStep(job, time.monotonic() - began, output)
