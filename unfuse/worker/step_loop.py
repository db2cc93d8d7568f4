"""The step loop: admit, pick, step, report, retire. Every stage runs in it, stepped or not."""

from __future__ import annotations

import queue
import time
import traceback
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from unfuse.core.errors import NotFound, ObjectLost, PermanentError, UnfuseError
from unfuse.core.messages import Done, Failed, FailureKind
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import ResultFile, Timings
from unfuse.core.task import Claim, Lease
from unfuse.stages.base import StageInput, StageOutput, SteppedStage
from unfuse.stores.results import ResultStore
from unfuse.stores.tensor_store import Held, TensorStore
from unfuse.worker.batcher import BatchSizes, out_of_memory
from unfuse.worker.channel import Cancel, FromCompute, Run, Stepped, Stopped

REPORT_S = 0.05
"""At most 20 progress messages a second; each lists the steps since the last."""

ROOM_S = 2.0
"""How long an output waits for room in a full arena: readers elsewhere may give some back, while nothing runs here."""

EVIDENCE_CHARS = 4000

ROOMIER = "serve with --vae tiled, --offload, or on a larger device"

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Job:
    """A task between admission and retirement. Tasks of equal `key` may share a forward. Seconds are monotonic."""

    lease: Lease
    stage: SteppedStage[Any]
    key: Hashable
    inputs: list[Held]
    state: Any
    get_s: float
    run_s: float
    alone: bool = False
    steps: int = 0
    mates: int = 0
    """Tasks in its forwards, itself included, summed over its steps."""
    reported: int = 0
    reported_at: float = field(default_factory=time.monotonic)
    previews: list[int] = field(default_factory=list)

    @property
    def claim(self) -> Claim:
        """What the worker shows for it."""
        return self.lease.claim


class StepLoop:
    """Runs tasks on the stages of one compute process.

    `stages` is by pool; those of `plain` pools get numpy arrays, the others torch tensors. Up to `batch` tasks share a
    forward. What stages of a kind put has its encoding, if any. Tasks of the highest priority go first, in
    order of arrival; others step aside, their state put by. One that stops being wanted is dropped between two steps.
    """

    def __init__(
        self,
        stages: Mapping[str, SteppedStage[Any]],
        store: TensorStore,
        results: ResultStore,
        inbox: queue.SimpleQueue[Run | Cancel],
        send: Callable[[FromCompute], None],
        batch: int = 1,
        plain: Collection[str] = (),
        encodings: Mapping[str, str] | None = None,
    ) -> None:
        self._encodings = encodings or {}
        self._stages, self._store, self._results, self._plain = stages, store, results, plain
        self._inbox, self._send = inbox, send
        self._sizes = BatchSizes(batch)
        self._jobs: dict[Claim, Job] = {}

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Take what came in, waiting for it when there is nothing else to do; then one step of the most urgent."""
        self._admit()
        if self._jobs:
            self._advance(self._pick())

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
        task, claim = run.lease.task, run.lease.claim
        self._send(Stepped(claim, 0, 0, 0))
        inputs: list[Held] = []
        try:
            began = time.monotonic()
            self._store.learn(run.peers)
            for ref in task.inputs:
                inputs.append(self._store.get(ref, as_torch=task.pool not in self._plain))
            tensors = {name: tensor for held in inputs for name, tensor in held.items()}
            stage = self._stages[task.pool]
            uploads = {name: self._results.attached(task.request, name) for name in stage.uploads}
            given = StageInput(task.params, tensors, uploads)
            got = time.monotonic()
            stage.verify(given)
            state = stage.start(given)
            key = task.pool, stage.batch_key(task.params)
            self._jobs[claim] = Job(run.lease, stage, key, inputs, state, got - began, time.monotonic() - got)
        except Exception as error:  # the process must survive what one task brings
            _close(inputs)
            self._send(_failure(claim, error))

    def _pick(self) -> list[Job]:
        """The task that goes first, and those of its priority that may share its forward, in order of arrival."""
        first = max(self._jobs.values(), key=lambda job: job.lease.task.priority)
        if first.alone:
            return [first]
        of_its_kind = first.key, first.lease.task.priority, False
        mates = [job for job in self._jobs.values() if (job.key, job.lease.task.priority, job.alone) == of_its_kind]
        return mates[: self._sizes.size(first.key)]

    def _advance(self, batch: list[Job]) -> None:
        """One step of these tasks; what cannot be done together is tried in smaller company."""
        began = time.monotonic()
        try:
            stepped = batch[0].stage.step([job.state for job in batch])
        except Exception as error:  # the process must survive what one task brings
            self._fall_apart(batch, error)
            return
        seconds = time.monotonic() - began
        self._sizes.measured(batch[0].key, len(batch), seconds)
        for job, state in zip(batch, stepped, strict=True):
            job.run_s, job.steps, job.mates = job.run_s + seconds, job.steps + 1, job.mates + len(batch)
            self._settle(job, state)

    def _fall_apart(self, batch: list[Job], error: Exception) -> None:
        if len(batch) == 1:
            self._fail(batch[0], error)
        elif out_of_memory(error):
            self._sizes.too_large(batch[0].key, len(batch))
        else:
            for job in batch:
                job.alone = True

    def _settle(self, job: Job, state: Any) -> None:
        """Tell of a step that was made, and retire what is done."""
        try:
            if isinstance(state, Exception):
                raise state
            job.state = state
            step, steps = job.stage.progress(state)
            if step < steps:
                self._preview(job, step)
            self._report(job, step, steps)
            if step == steps:
                self._retire(job)
        except Exception as error:  # the process must survive what one task brings
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        self._jobs.pop(job.claim, None)
        _close(job.inputs)
        self._send(_failure(job.claim, error))

    def _preview(self, job: Job, step: int) -> None:
        """Attach a small picture of every so many steps, for a request that asked; one that fails costs no result."""
        every, task = job.lease.task.params.get("preview_every"), job.lease.task
        if not isinstance(every, int) or every < 1 or step % every:
            return
        try:
            if media := job.stage.preview(job.state):
                self._results.attach(task.request, f"preview-{task.stage}-{step}", media.data, durable=False)
                job.previews.append(step)
        except Exception as error:  # a picture of the way is not worth the end of it
            log.warning("no preview", request=task.request, stage=task.stage, step=step, reason=str(error))

    def _report(self, job: Job, step: int, steps: int) -> None:
        now = time.monotonic()
        if step == steps or now - job.reported_at >= REPORT_S:
            self._send(Stepped(job.claim, step, steps, job.reported + 1, tuple(job.previews)))
            job.reported, job.reported_at, job.previews = step, now, []

    def _retire(self, job: Job) -> None:
        """Store what the task made, then say so: a completion that was announced is always there to be read."""
        began = time.monotonic()
        output = job.stage.finish(job.state)
        finished = time.monotonic()
        ref = self._put(job, output)
        results = self._write(job, output)
        _close(job.inputs)
        del self._jobs[job.claim]
        timings = Timings(
            get_s=job.get_s, run_s=job.run_s + finished - began, put_s=time.monotonic() - finished,
            steps=job.steps, batch=job.mates / job.steps, whole=job.stage.progress(job.state)[1],
        )  # fmt: skip
        self._send(Done(job.claim, ref, results, timings))

    def _put(self, job: Job, output: StageOutput) -> ObjectRef | None:
        if job.lease.task.final:
            return None
        task = job.lease.task
        encoding = self._encodings.get(task.kind, "none")
        return self._store.put(
            output.tensors, request=task.request, stage=task.stage, attempt=task.attempt, wait=ROOM_S, encoding=encoding
        )

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
    elif isinstance(error, PermanentError | NotFound) or out_of_memory(error):
        kind = "permanent"
    message = str(error) if isinstance(error, UnfuseError) else f"{type(error).__name__}: {error}"
    if out_of_memory(error):
        message = f"the device has not the memory for this request: {message}; ask for less, or {ROOMIER}"
    evidence = "".join(traceback.format_exception(error))[-EVIDENCE_CHARS:]
    return Failed(claim, kind, _sendable(message), _sendable(evidence), object_id)


def _sendable(text: str) -> str:
    """The text without what UTF-8 cannot hold, such as the escapes of undecodable file names."""
    return text.encode(errors="replace").decode()
