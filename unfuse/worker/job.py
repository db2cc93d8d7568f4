"""A task inside a compute process: its job, inputs and output."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import structlog

from unfuse.arena.limits import readable_bytes
from unfuse.core.errors import PermanentError, ProtocolError, ResultsUnavailable, TransientError
from unfuse.core.host_memory import available_memory
from unfuse.core.messages import CachePrefix, OutputAnnounced
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import declared_pool, prefix_key
from unfuse.core.request import ResultFile, Timings
from unfuse.core.retries import is_out_of_memory
from unfuse.core.task import Claim, Lease, OutputDeltas, check_deltas
from unfuse.stages.base import EncodedMedia, Stage, StageInput, StageOutput, StreamedInput, Tensors, need
from unfuse.stores.results import ResultStore
from unfuse.stores.tensor_store import HeldTensors, TensorStore, UnsealedObject
from unfuse.stores.tensors import numpy_over, torch_over
from unfuse.worker.checkpoints import unpack
from unfuse.worker.compute_messages import InputArrived, InputTaken, RunTask, TaskWaits, failure
from unfuse.worker.device_errors import task_error
from unfuse.worker.ranks import TaskStart

if TYPE_CHECKING:
    from torch import Tensor

log = structlog.get_logger(__name__)

#: Seconds that an output waits for room in a full arena. This process computes nothing meanwhile.
ROOM_S = 2.0


@dataclass(eq=False)
class Job:
    """A running task: its stage's state, and how far it is computed, saved and reported."""

    #: The lease of the task.
    lease: Lease

    #: The stage that computes the task. Tasks share it.
    stage: Stage

    #: Tasks of equal key may share a forward: pool, batch key, exact batch key.
    key: tuple[Hashable, ...]

    #: Closing it releases the inputs, and aborts an output that others read while it is written, unless it is sealed.
    opened: ExitStack

    #: The stage's state between two steps.
    state: Any

    #: Seconds that reading the inputs took.
    get_s: float

    #: Seconds of computing.
    run_s: float

    #: The task's share of `run_s`: the seconds of a forward are divided among its tasks.
    share_s: float

    #: Whether the task shares no forward any more, because a batch with it failed.
    runs_alone: bool = False

    #: Whether its next step is repeated, because the task ran out of memory in it alone.
    repeats_step: bool = False

    #: The step of the checkpoint that the task started from.
    resumed: int = 0

    #: Number of steps made since the start.
    steps: int = 0

    #: The number of the batch that computed its last step. Batches are numbered in order.
    turn: int = 0

    #: The number of tasks in its forwards, itself included, summed over its steps.
    batch_size_sum: int = 0

    #: The last step at which a save was tried, with or without success.
    saved: int = 0

    #: The last step that was saved: the next attempt can resume there.
    safe: int = 0

    #: Monotonic time of the last save, in seconds.
    saved_at: float = field(default_factory=time.monotonic)

    #: Seconds that saving took so far.
    save_s: float = 0.0

    #: Seconds spent in exchanges with other ranks.
    exchange_s: float = 0.0

    #: The last step whose progress was reported.
    reported: int = 0

    #: Monotonic time of the last progress report, in seconds.
    reported_at: float = field(default_factory=time.monotonic)

    #: Steps with a preview that is stored and not reported yet.
    previews: list[int] = field(default_factory=list)

    #: The number of the next output delta.
    next_delta: int = 0

    #: The last step whose video fragment is stored. None after one could not be stored: none can follow.
    last_fragment_step: int | None = 0

    #: Completed prefix blocks that are not stored yet: (key, digest, tensors), see `read_prefix_blocks`.
    prefix_blocks: list[tuple[str, str, Tensors]] = field(default_factory=list)

    #: The object into which steps write the output, so that others read it meanwhile. None if it is stored at the end.
    output: UnsealedObject | None = None

    def new_deltas(self) -> OutputDeltas | None:
        """Return the pieces that the last step added to the output, or None.

        Raises PermanentError if they are too large to be recorded.
        """
        pieces = tuple(self.stage.new_chunks(self.state))
        if not pieces:
            return None
        deltas = OutputDeltas(self.claim, self.next_delta, pieces)
        try:
            check_deltas([deltas])
        except ProtocolError as error:
            raise PermanentError(f"the output of stage {self.stage.kind} cannot be recorded: {error}") from error
        self.next_delta += len(pieces)
        return deltas

    @property
    def timings(self) -> Timings:
        """What the task has used so far."""
        return Timings(
            get_s=self.get_s,
            run_s=self.run_s,
            steps=self.steps,
            batch=self.batch_size_sum / max(1, self.steps),
            resumed=self.resumed,
            save_s=self.save_s,
            exchange_s=self.exchange_s,
            share_s=self.share_s,
        )

    @property
    def is_over(self) -> bool:
        """Whether all steps are done."""
        step, steps = self.stage.progress(self.state)
        return step == steps

    @property
    def claim(self) -> Claim:
        """The claim of the task's lease."""
        return self.lease.claim

    @property
    def priority(self) -> int:
        """The priority of the task."""
        return self.lease.task.priority


class CollectedInput:
    """Collects an object that arrives in chunks, in the memory of this rank.

    All `ranks` do so. Raises TransientError if the machine does not have enough memory for all of their copies.
    """

    def __init__(self, ref: ObjectRef, ranks: int = 1) -> None:
        if ranks * ref.nbytes > (free := available_memory()):
            available = f"only {readable_bytes(free)} is free"
            raise TransientError(f"an input needs {ranks} x {readable_bytes(ref.nbytes)} of memory, but {available}")
        self._ref = ref
        self._memory = np.empty(ref.nbytes, np.uint8)
        self._filled = 0

    def write(self, piece: Any) -> None:
        """Append the next bytes."""
        stop = self._filled + len(piece)
        self._memory[self._filled : stop] = piece
        self._filled = stop

    def drop(self) -> None:
        """Do nothing: the memory is freed with the tensors over it."""

    def tensors(self, *, as_torch: bool) -> dict[str, Any]:
        """Return the tensors over the received bytes, by name.

        They are torch tensors with `as_torch`, else numpy arrays. Raises ValueError if the object is malformed.
        """
        over = torch_over if as_torch else numpy_over
        return {meta.name: over(self._memory, meta) for meta in self._ref.tensors}


class JobFactory:
    """Makes the jobs of tasks on the stages of one compute process.

    For the parameters see StepLoop. `exact`: whether jobs get an exact batch key. `ranks`: the number of ranks.
    """

    def __init__(
        self,
        stages: Mapping[str, Stage],
        store: TensorStore,
        results: ResultStore,
        plain: Collection[str],
        exact: bool,
        ranks: int = 1,
    ) -> None:
        self._ranks = ranks
        self._stages, self._plain = stages, plain
        self._store, self._results = store, results
        self._exact = exact
        self._receiving: dict[Claim, dict[str, StreamedInput]] = {}

    def receive(self, arrived: InputArrived) -> InputTaken:
        """Receive the next bytes of an input, by the stage itself or into memory.

        The answer has the error if that failed. The bytes received so far then stay until `forget`, which all ranks
        call in the same round, so that the free memory stays equal on all of them.
        """
        task = arrived.lease.task
        claim = arrived.lease.claim
        ref = arrived.ref
        try:
            inputs = self._receiving.setdefault(claim, {})
            if ref.id not in inputs:
                stage, names = self._stages[declared_pool(task.planned.pool)], [meta.name for meta in ref.tensors]
                inputs[ref.id] = stage.receive(task.derived, task.priority, names) or CollectedInput(ref, self._ranks)
            inputs[ref.id].write(self._store.memory(arrived.offset, arrived.stop - arrived.start))
        except Exception as error:  # an error of one task must not end the process
            task_error(error)
            return InputTaken(claim, ref.id, str(error) or type(error).__name__)
        return InputTaken(claim, ref.id)

    @property
    def receives(self) -> bool:
        """Whether inputs of tasks that have not started are being received."""
        return bool(self._receiving)

    def forget_received(self, claim: Claim) -> None:
        """Forget the received inputs of a started task: its state has them now."""
        self._receiving.pop(claim, None)

    def drop_streamed(self, claim: Claim) -> None:
        """Drop the inputs of a task that its stage has received itself.

        The stage recomputes them. Inputs that were received into memory stay.
        """
        inputs = self._receiving.get(claim, {})
        for id in [id for id, receiver in inputs.items() if not isinstance(receiver, CollectedInput)]:
            inputs.pop(id).drop()

    def forget(self, claim: Claim) -> None:
        """Drop the received inputs of a task that will not start."""
        for receiver in self._receiving.pop(claim, {}).values():
            receiver.drop()

    def start(self, run: RunTask) -> Job:
        """Read the inputs of a task and return its job.

        Raises ResultsUnavailable if an upload cannot be read now, and any error of the inputs or the stage.
        """
        task = run.lease.task
        opened = ExitStack()
        prefix = list[HeldTensors]()
        try:
            began = time.monotonic()
            self._store.register_owners(run.peers)
            inputs = [
                opened.enter_context(self._store.get(ref, as_torch=self._as_torch(run.lease), reader=task.request))
                for ref in task.inputs
            ]
            collected, received = self._received_inputs(run.lease)
            tensors = {name: tensor for input_tensors in inputs for name, tensor in input_tensors.items()} | collected

            stage = self._stages[declared_pool(task.planned.pool)]
            uploads = {name: self._results.attached(task.request, name) for name in stage.uploads_of(task.derived)}
            prefix += self._read_prefix(run.lease)
            stage_input = StageInput(
                task.params,
                tensors,
                uploads,
                run.recorded,
                task.priority,
                tuple(map(dict, prefix)),
                received,
                bool(task.planned.extends_prefix_of) and not _is_narrowed(run.lease),
                task.derived,
            )
            return self._make_job(run, stage, stage_input, opened, get_s=time.monotonic() - began)
        except BaseException as error:
            opened.close()
            if is_out_of_memory(error):  # the task starts again; its stage computes what it had received itself
                self.drop_streamed(run.lease.claim)
            elif not isinstance(error, ResultsUnavailable):  # after which the task waits and starts again
                self.forget(run.lease.claim)
            raise
        finally:
            for block in prefix:  # the state has copied them, unlike the inputs, over which it may have arrays
                block.close()

    def _make_job(self, run: RunTask, stage: Stage, stage_input: StageInput, opened: ExitStack, get_s: float) -> Job:
        """Verify the inputs, make the state of a task, and return its job."""
        began = time.monotonic()
        stage.verify(stage_input)
        resumed_state = self._resume_state(stage, stage_input, run.lease)
        state = stage.start(stage_input) if resumed_state is None else resumed_state
        try:
            step, _ = stage.progress(state)
            key = run.lease.task.planned.pool, stage.batch_key(stage_input), self.exact_batch_key(stage, state)
        except BaseException:
            stage.release(state)
            raise
        started_s = time.monotonic() - began
        return Job(
            run.lease,
            stage,
            key,
            opened,
            state,
            get_s,
            run_s=started_s,
            share_s=started_s,
            resumed=step,
            saved=step,
            safe=step,
            reported=step,
            next_delta=len(run.recorded),
        )

    def _received_inputs(self, lease: Lease) -> tuple[dict[str, Any], StreamedInput | None]:
        """Return the tensors collected from chunks, and the input that the stage received itself."""
        receivers = self._receiving.get(lease.claim, {}).values()
        collected = [
            receiver.tensors(as_torch=self._as_torch(lease))
            for receiver in receivers
            if isinstance(receiver, CollectedInput)
        ]
        tensors = {name: tensor for receiver in collected for name, tensor in receiver.items()}
        return tensors, next((receiver for receiver in receivers if not isinstance(receiver, CollectedInput)), None)

    def _read_prefix(self, lease: Lease) -> Iterator[HeldTensors]:
        """Yield the prefix blocks that can be read, up to the first that cannot."""
        for ref in lease.prefix:
            try:
                yield self._store.get(ref, as_torch=self._as_torch(lease))
            except Exception as error:  # the stage recomputes a block that cannot be read
                log.info("prefix block not readable", request=lease.task.request, object=ref.id, reason=str(error))
                return

    def exact_batch_key(self, stage: Stage, state: Any) -> Hashable | None:
        """Return the exact batch key of a state; None: the task must run alone."""
        return stage.exact_batch_key(state) if self._exact else None

    def _resume_state(self, stage: Stage, stage_input: StageInput, lease: Lease) -> Any:
        """Return the state of the lease's checkpoint; None if there is none to read."""
        if lease.checkpoint is None:
            return None
        try:
            with self._store.get(lease.checkpoint, as_torch=self._as_torch(lease)) as tensors:
                return stage.resume(stage_input, unpack(tensors))
        except Exception as error:  # a bad checkpoint must not end the process
            task_error(error)
            task = lease.task
            log.warning(
                "cannot resume from the checkpoint, starting over",
                request=task.request,
                stage=task.stage,
                reason=str(error),
            )
            return None

    def _as_torch(self, lease: Lease) -> bool:
        return declared_pool(lease.task.planned.pool) not in self._plain


def _is_narrowed(lease: Lease) -> bool:
    """Whether an input is stored in fewer bits than its stage computed."""
    return any(meta.is_wide for ref in lease.task.inputs for meta in ref.tensors)


def start_result(run: RunTask, outcome: Job | Exception) -> TaskStart:
    """Return how a task starts on this rank: at which step, or why not.

    `outcome`: the task's job, or the error of its start.
    """
    if isinstance(outcome, Job):
        return outcome.resumed
    claim = run.lease.claim
    return TaskWaits(claim) if isinstance(outcome, ResultsUnavailable) else failure(claim, outcome)


def announce(
    store: TensorStore, job: Job, encodings: Mapping[str, str], send: Callable[[OutputAnnounced], object] | None
) -> None:
    """Make a task's output readable while it is written, and send the announcement.

    The output is stored only at the task's end if it is final, if it is narrowed, if the arena has no room for it yet,
    or if `send` is None. A small output is announced only if its reader also reads the outputs of sibling tasks,
    because the reader can start with the first of them.
    """
    task, outline = job.lease.task, job.stage.outline(job.state)
    if not outline or send is None or task.planned.final or encodings.get(task.planned.kind, "none") != "none":
        return
    with suppress(TransientError):  # no room: the output is stored at the task's end, when there may be some
        job.output = store.start_output(
            outline, request=task.request, stage=task.stage, attempt=task.attempt, small=task.has_siblings
        )
    if job.output:
        job.opened.callback(job.output.abort)
        job.stage.write_to(job.state, job.output)
        send(OutputAnnounced(job.claim, job.output.ref))


def on_host(tensors: Tensors) -> Tensors:
    """Return tensors in host memory.

    Those of a GPU are copied together, to pinned memory, so that the host waits once and not for each.
    """
    devices = {name: getattr(tensor, "device", None) for name, tensor in tensors.items()}
    on_device = [name for name, device in devices.items() if getattr(device, "type", "cpu") != "cpu"]
    if not on_device:
        return tensors
    from unfuse.stages.device_copies import HostCopy  # imported here because other processes do without torch

    copies = HostCopy(*[cast("Tensor", tensors[name]) for name in on_device]).read()
    return {**tensors, **dict(zip(on_device, copies, strict=True))}


def store_output(store: TensorStore, job: Job, output: StageOutput, encodings: Mapping[str, str]) -> ObjectRef | None:
    """Store a task's output tensors, narrowed by the stage kind's entry in `encodings`.

    An output that was written during the steps is completed and sealed. Returns None for a final stage, which has no
    tensors.
    """
    task = job.lease.task
    if job.output:
        job.output.fill(on_host(output.tensors))
        return job.output.finish()
    if task.planned.final:
        return None
    encoding = encodings.get(task.planned.kind, "none")
    return store.put(
        on_host(output.tensors),
        request=task.request,
        stage=task.stage,
        attempt=task.attempt,
        wait=ROOM_S,
        encoding=encoding,
    )


def read_prefix_blocks(job: Job) -> list[tuple[str, str, Tensors]]:
    """Return the prefix blocks that the last step completed, as (key, digest, copied tensors).

    The digest is empty if the key is one of the task's own `prefixes`. The tensors do not change with later steps. A
    block that cannot be read is left out, with all later ones.
    """
    task, blocks = job.lease.task, list[tuple[str, str, Tensors]]()
    try:
        for block in job.stage.prefix_blocks(job.state):
            if block.number < len(task.planned.prefixes):
                blocks.append((task.planned.prefixes[block.number], "", block.copy()))
            elif task.planned.extends_prefix_of:
                blocks.append((prefix_key(task.planned.extends_prefix_of, block.digest), block.digest, block.copy()))
    except Exception as error:  # the task continues, as on every other rank; other tasks recompute a missing block
        task_error(error)
        log.info("prefix block not cached", request=task.request, stage=task.stage, reason=str(error))
    return blocks


def store_prefix_blocks(store: TensorStore, job: Job) -> Iterator[CachePrefix]:
    """Store the blocks of `read_prefix_blocks` for other tasks (prefix caching).

    Yields a message for each block. A block that cannot be stored is left out, with all later ones.
    """
    task, blocks = job.lease.task, job.prefix_blocks
    job.prefix_blocks = []
    for key, digest, tensors in blocks:
        try:
            ref = store.put(on_host(tensors), request=task.request, stage=task.stage, attempt=task.attempt)
        except Exception as error:  # for the same reasons as in `read_prefix_blocks`
            task_error(error)
            log.info("prefix block not cached", request=task.request, stage=task.stage, reason=str(error))
            return
        yield CachePrefix(job.claim, key, ref, digest)


def write(results: ResultStore, job: Job, media: Sequence[EncodedMedia]) -> tuple[ResultFile, ...]:
    """Store the result files of a final stage, numbered from the task's `index` parameter on.

    Raises ResultsUnavailable if the result store cannot be written now.
    """
    task = job.lease.task
    first_index = 0 if task.params.get("index") is None else need(task.params, "index", int)
    return tuple(
        results.put(task.request, index, file.content_type, file.data) for index, file in enumerate(media, first_index)
    )
