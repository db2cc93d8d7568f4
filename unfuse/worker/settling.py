"""Tells of what steps have made: at once, or beside the next step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from unfuse.core.growth import Grown
from unfuse.core.messages import Keep, Progress
from unfuse.stores.results import ResultStore
from unfuse.stores.tensor_store import TensorStore
from unfuse.worker.outputs import store_portions
from unfuse.worker.shown import show_part, show_preview
from unfuse.worker.turn import Job

REPORT_S = 0.1  # the least seconds between two progress messages of a task; each has all steps since the last
Told = list[tuple[Job, Exception | None]]  # tasks that were told what their steps made, and the errors


class Settling:
    """Sends what tasks have grown by, and that they made a step; stores their portions for other tasks, and shows
    clients previews and parts, where it `leads`.

    `beside`: in a thread of its own, while the next step is computed, of tasks whose stage can go on before that.
    What it finds out in the meantime, such as that a text is over, counts when it has been waited for.
    """

    def __init__(
        self,
        store: TensorStore,
        results: ResultStore,
        send: Callable[[Grown | Keep | Progress], object],
        leads: bool,
        beside: bool,
    ) -> None:
        self._store, self._results, self._send, self._leads = store, results, send, leads
        self._thread = ThreadPoolExecutor(1, "settling") if beside else None
        self._under_way: Future[Told] | None = None

    def begin(self, jobs: Sequence[Job]) -> Told:
        """Tell of a step of these tasks. Returns those of which it is told already."""
        later = [job for job in jobs if self._thread and job.stage.can_overlap and not job.is_over]
        if self._thread and later:
            self._under_way = self._thread.submit(self._tell_all, later)
        return self._tell_all([job for job in jobs if job not in later])

    def rest(self) -> Told:
        """Wait until all is told. Returns the tasks that `begin` has not."""
        under_way, self._under_way = self._under_way, None
        return under_way.result() if under_way else []

    def _tell_all(self, jobs: Sequence[Job]) -> Told:
        return [(job, self._tell(job)) for job in jobs]

    def _tell(self, job: Job) -> Exception | None:
        try:
            if grown := job.growth():
                self._send(grown)
            for kept in store_portions(self._store, job):
                self._send(kept)
            step, steps = job.stage.progress(job.state)
            if step < steps and self._leads:
                show_preview(self._results, job, step)
                show_part(self._results, job, step)
            self._report(job, step, steps)
        except Exception as error:  # an error of one task must not end the process
            return error
        return None

    def _report(self, job: Job, step: int, steps: int) -> None:
        now = time.monotonic()
        if step == steps or now - job.reported_at >= REPORT_S:
            self._send(Progress(job.claim, step, steps, job.reported + 1, tuple(job.previews), job.share_s))
            job.reported, job.reported_at, job.previews = step, now, []
