"""The step loop: admit, pick, step, report, retire. Every stage runs in it, stepped or not."""

from __future__ import annotations

import queue
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unfuse.core.errors import ObjectLost, PermanentError, UnfuseError
from unfuse.core.messages import Done, Failed, FailureKind
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import ResultFile, Timings
from unfuse.core.task import Claim, Lease
from unfuse.stages.base import StageInput, StageOutput, SteppedStage
from unfuse.stores.results import ResultStore
from unfuse.stores.tensor_store import Held, TensorStore
from unfuse.worker.channel import Cancel, FromCompute, Run, Stepped, Stopped

REPORT_S = 0.05
"""At most 20 progress messages a second; each lists the steps since the last."""

EVIDENCE_CHARS = 4000


@dataclass
class Job:
    """A task between admission and retirement. Seconds are monotonic."""

    lease: Lease
    stage: SteppedStage[Any]
    inputs: list[Held]
    state: Any
    get_s: float
    run_s: float
    reported: int = 0
    reported_at: float = field(default_factory=time.monotonic)

    @property
    def claim(self) -> Claim:
        """What the worker shows for it."""
        return self.lease.claim


class StepLoop:
    """Runs tasks on the stages of one compute process.

    `stages` is by pool. Tasks of the highest priority go first, then in order of arrival; one that stops being wanted
    is dropped between two steps.
    """

    def __init__(
        self,
        stages: Mapping[str, SteppedStage[Any]],
        store: TensorStore,
        results: ResultStore,
        inbox: queue.SimpleQueue[Run | Cancel],
        send: Callable[[FromCompute], None],
    ) -> None:
        self._stages, self._store, self._results = stages, store, results
        self._inbox, self._send = inbox, send
        self._jobs: dict[Claim, Job] = {}

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Take what came in, waiting for it when there is nothing else to do; then one step of the most urgent task."""
        self._admit()
        if self._jobs:
            self._advance(max(self._jobs.values(), key=lambda job: job.lease.task.priority))

    def _admit(self) -> None:
        """Take every message that is there; wait for one only when there is nothing to do."""
        if not self._jobs:
            self._take(self._inbox.get())
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, message: Run | Cancel) -> None:
        if isinstance(message, Run):
            self._start(message)
        else:
            self._drop(message.claim)

    def _start(self, run: Run) -> None:
        lease = run.lease
        self._send(Stepped(lease.claim, 0, 0, 0))
        inputs: list[Held] = []
        try:
            began = time.monotonic()
            self._store.learn(run.peers)
            for ref in lease.task.inputs:
                inputs.append(self._store.get(ref, as_torch=True))
            tensors = {name: tensor for held in inputs for name, tensor in held.items()}
            task = StageInput(lease.task.params, tensors)
            stage = self._stages[lease.task.pool]
            got = time.monotonic()
            stage.verify(task)
            state = stage.start(task)
            self._jobs[lease.claim] = Job(lease, stage, inputs, state, got - began, time.monotonic() - got)
        except Exception as error:  # the process must survive what one task brings
            _close(inputs)
            self._send(_failure(lease.claim, error))

    def _advance(self, job: Job) -> None:
        try:
            began = time.monotonic()
            (job.state,) = job.stage.step([job.state])
            job.run_s += time.monotonic() - began
            step, steps = job.stage.progress(job.state)
            self._report(job, step, steps)
            if step == steps:
                self._retire(job)
        except Exception as error:  # the process must survive what one task brings
            self._jobs.pop(job.claim, None)
            _close(job.inputs)
            self._send(_failure(job.claim, error))

    def _report(self, job: Job, step: int, steps: int) -> None:
        now = time.monotonic()
        if step == steps or now - job.reported_at >= REPORT_S:
            self._send(Stepped(job.claim, step, steps, job.reported + 1))
            job.reported, job.reported_at = step, now

    def _retire(self, job: Job) -> None:
        """Store what the task made, then say so: a completion that was announced is always there to be read."""
        began = time.monotonic()
        output = job.stage.finish(job.state)
        finished = time.monotonic()
        ref = self._put(job, output)
        results = self._write(job, output)
        _close(job.inputs)
        del self._jobs[job.claim]
        timings = Timings(get_s=job.get_s, run_s=job.run_s + finished - began, put_s=time.monotonic() - finished)
        self._send(Done(job.claim, ref, results, timings))

    def _put(self, job: Job, output: StageOutput) -> ObjectRef | None:
        if job.lease.task.final:
            return None
        task = job.lease.task
        return self._store.put(output.tensors, request=task.request, stage=task.stage, attempt=task.attempt)

    def _write(self, job: Job, output: StageOutput) -> tuple[ResultFile, ...]:
        task = job.lease.task
        first = task.params.get("index") or 0
        if not isinstance(first, int):
            raise PermanentError(f"stage {task.stage} was given the picture index {first!r}")
        return tuple(
            self._results.put(task.request, first + offset, media.content_type, media.data)
            for offset, media in enumerate(output.media)
        )

    def _drop(self, claim: Claim) -> None:
        if job := self._jobs.pop(claim, None):
            _close(job.inputs)
            self._send(Stopped(claim))


def _close(inputs: list[Held]) -> None:
    for held in inputs:
        held.close()


def _failure(claim: Claim, error: Exception) -> Failed:
    kind: FailureKind = "transient"
    object_id = ""
    if isinstance(error, ObjectLost):
        kind, object_id = "object_lost", error.object_id
    elif isinstance(error, PermanentError):
        kind = "permanent"
    message = str(error) if isinstance(error, UnfuseError) else f"{type(error).__name__}: {error}"
    evidence = "".join(traceback.format_exception(error))[-EVIDENCE_CHARS:]
    return Failed(claim, kind, _sendable(message), _sendable(evidence), object_id)


def _sendable(text: str) -> str:
    """The text without what UTF-8 cannot hold, such as the escapes of undecodable file names."""
    return text.encode(errors="replace").decode()
