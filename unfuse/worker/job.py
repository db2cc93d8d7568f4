"""A task inside a compute process: how it begins, what it knows while it runs, and how its output is stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog

from unfuse.arena.limits import available_memory, readable_bytes
from unfuse.core.errors import PermanentError, ProtocolError, ResultsUnavailable, TransientError
from unfuse.core.messages import CachePrefix, OutputAnnounced
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import declared, prefix_key
from unfuse.core.request import ResultFile, Timings
from unfuse.core.task import Claim, Lease, OutputDeltas, check_growth
from unfuse.stages.base import EncodedMedia, Stage, StageInput, StageOutput, StreamedInput, Tensors, need
from unfuse.stores.results import ResultStore
from unfuse.stores.tensor_store import HeldTensors, TensorStore, UnsealedObject
from unfuse.stores.tensors import numpy_over, torch_over
from unfuse.worker.checkpoints import unpack
from unfuse.worker.compute_messages import InputArrived, InputTaken, RunTask, TaskWaits, failure
from unfuse.worker.ranks import TaskStart

log = structlog.get_logger(__name__)

ROOM_S = 2.0  # seconds an output waits for room in a full arena; readers may free some, and nothing runs here meanwhile


@dataclass(eq=False)
class Job:
    """A task that runs. Tasks of equal `key` may share a forward. Times are monotonic seconds.

    `run_s` are seconds of computing, `share_s` its share of them: those of a forward are divided among its tasks.
    `resumed` is the step that it started from, `steps` how many it made since. `saved` and `reported` are the last
    steps that were saved, as far as that worked, and reported, at `saved_at` and `reported_at`. The next attempt can go
    on from step `safe`.
    """

    lease: Lease
    stage: Stage
    key: tuple[Hashable, ...]
    opened: ExitStack  # its inputs, and its output if others may read it meanwhile, until that is sealed
    state: Any
    get_s: float
    run_s: float
    share_s: float
    alone: bool = False
    resumed: int = 0
    steps: int = 0
    turn: int = 0  # when its last step was decided, in the order of such turns
    mates: int = 0  # the number of tasks in its forwards, itself included, summed over its steps
    saved: int = 0
    safe: int = 0
    saved_at: float = field(default_factory=time.monotonic)
    save_s: float = 0.0
    exchange_s: float = 0.0
    reported: int = 0
    reported_at: float = field(default_factory=time.monotonic)
    previews: list[int] = field(default_factory=list)
    grown: int = 0  # the number of the next piece of its output
    part: int | None = 0  # the last step whose part is stored; None after one could not be: none can follow
    prefix_blocks: list[tuple[str, str, Tensors]] = field(default_factory=list)  # see `read_prefix_blocks`
    output: UnsealedObject | None = (
        None  # what its output is written into while it runs, if others may read it meanwhile
    )

    def growth(self) -> OutputDeltas | None:
        """What the last step has added to its output, if anything; raises PermanentError where that is too much."""
        pieces = tuple(self.stage.grown(self.state))
        if not pieces:
            return None
        grown = OutputDeltas(self.claim, self.grown, pieces)
        try:
            check_growth([grown])
        except ProtocolError as error:
            raise PermanentError(f"stage {self.stage.kind} has grown by what cannot be recorded: {error}") from error
        self.grown += len(pieces)
        return grown

    @property
    def timings(self) -> Timings:
        """What it has used so far."""
        return Timings(
            get_s=self.get_s, run_s=self.run_s, steps=self.steps, batch=self.mates / max(1, self.steps),
            resumed=self.resumed, save_s=self.save_s, exchange_s=self.exchange_s, share_s=self.share_s,
        )  # fmt: skip

    @property
    def is_over(self) -> bool:
        """Whether all its steps are made."""
        step, steps = self.stage.progress(self.state)
        return step == steps

    @property
    def claim(self) -> Claim:
        """The claim of its lease."""
        return self.lease.claim

    @property
    def priority(self) -> int:
        """The priority of its task."""
        return self.lease.task.priority


class CollectedInput:
    """Takes an object from its front to its end, for this one of `ranks`, each of which has it.

    Raises TransientError where there is no memory for all of them.
    """

    def __init__(self, ref: ObjectRef, ranks: int = 1) -> None:
        if ranks * ref.nbytes > (free := available_memory()):
            has = f"{readable_bytes(free)} are free"
            raise TransientError(f"an input takes {ranks} x {readable_bytes(ref.nbytes)} of memory, and {has}")
        self._ref, self._memory, self._filled = ref, np.empty(ref.nbytes, np.uint8), 0

    def take(self, piece: Any) -> None:
        """Take the next bytes."""
        stop = self._filled + len(piece)
        self._memory[self._filled : stop] = piece
        self._filled = stop

    def drop(self) -> None:
        """It goes with whoever has its tensors."""

    def tensors(self, *, as_torch: bool) -> dict[str, Any]:
        """What has come, by name. Raises ValueError for what is no such object."""
        over = torch_over if as_torch else numpy_over
        return {meta.name: over(self._memory, meta) for meta in self._ref.tensors}


class JobFactory:
    """Makes jobs of tasks on the stages of one compute process; see StepLoop for what it is made with.

    `exact`: what else tasks must have in common to share a forward is asked. There are so many `ranks`.
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
        self._stages, self._store, self._results, self._plain, self._exact = stages, store, results, plain, exact
        self._receiving: dict[Claim, dict[str, StreamedInput]] = {}

    def receive(self, arrived: InputArrived) -> InputTaken:
        """Take what has come of an input, as its stage does, or else into memory; the answer says if that cannot be.

        Then what came stays until the task is forgotten, as it is on all ranks in the same turn.
        """
        task, claim, ref = arrived.lease.task, arrived.lease.claim, arrived.ref
        try:
            inputs = self._receiving.setdefault(claim, {})
            if ref.id not in inputs:
                stage, names = self._stages[declared(task.planned.pool)], [meta.name for meta in ref.tensors]
                inputs[ref.id] = stage.receive(task.derived, task.priority, names) or CollectedInput(ref, self._ranks)
            inputs[ref.id].take(self._store.at(arrived.offset, arrived.stop - arrived.start))
        except Exception as error:  # an error of one task must not end the process
            return InputTaken(claim, ref.id, str(error) or type(error).__name__)
        return InputTaken(claim, ref.id)

    @property
    def receives(self) -> bool:
        """Whether an input of a task that has not begun is here in part."""
        return bool(self._receiving)

    def begun(self, claim: Claim) -> None:
        """A task runs: its state has what came for it."""
        self._receiving.pop(claim, None)

    def drop_taken(self, claim: Claim) -> None:
        """Drop what the stage of a task has taken itself, which it makes again; what came into memory stays."""
        inputs = self._receiving.get(claim, {})
        for id in [id for id, one in inputs.items() if not isinstance(one, CollectedInput)]:
            inputs.pop(id).drop()

    def forget(self, claim: Claim) -> None:
        """Drop what has come for a task that will not begin, if anything has."""
        for receiving in self._receiving.pop(claim, {}).values():
            receiving.drop()

    def begin(self, run: RunTask) -> Job:
        """The job of a task. Raises ResultsUnavailable where an upload cannot be had now, and whatever is wrong."""
        task, opened, prefix = run.lease.task, ExitStack(), list[HeldTensors]()
        try:
            began = time.monotonic()
            self._store.learn(run.peers)
            inputs = [
                opened.enter_context(self._store.get(ref, as_torch=self._as_torch(run.lease), reader=task.request))
                for ref in task.inputs
            ]
            collected, received = self._came(run.lease)
            tensors = {name: tensor for held in inputs for name, tensor in held.items()} | collected
            stage = self._stages[declared(task.planned.pool)]
            uploads = {name: self._results.attached(task.request, name) for name in stage.uploads_of(task.derived)}
            prefix += self._prefix(run.lease)
            given = StageInput(
                task.params, tensors, uploads, run.recorded, task.priority,
                tuple(map(dict, prefix)), received, bool(task.planned.extends) and not _is_narrowed(run.lease),
                task.derived,
            )  # fmt: skip
            return self._job(run, stage, given, opened, get_s=time.monotonic() - began)
        except BaseException as error:
            opened.close()
            if not isinstance(error, ResultsUnavailable):  # with which it waits, and begins again
                self.forget(run.lease.claim)
            raise
        finally:
            for held in prefix:
                held.close()

    def _job(self, run: RunTask, stage: Stage, given: StageInput, opened: ExitStack, get_s: float) -> Job:
        """Make the state of a task, and a job of it; gives the state up if the stage fails behind that."""
        began = time.monotonic()
        stage.verify(given)
        resumed = self._resumed(stage, given, run.lease)
        state = stage.start(given) if resumed is None else resumed
        try:
            step, _ = stage.progress(state)
            key = run.lease.task.planned.pool, stage.batch_key(given), self.exact_batch_key(stage, state)
        except BaseException:
            stage.let_go(state)
            raise
        started_s = time.monotonic() - began
        return Job(
            run.lease, stage, key, opened, state, get_s, run_s=started_s, share_s=started_s,
            resumed=step, saved=step, safe=step, reported=step, grown=len(run.recorded),
        )  # fmt: skip

    def _came(self, lease: Lease) -> tuple[dict[str, Any], StreamedInput | None]:
        """What has come in pieces: tensors that were put together, and what the stage has taken itself."""
        came = self._receiving.get(lease.claim, {}).values()
        whole = [one.tensors(as_torch=self._as_torch(lease)) for one in came if isinstance(one, CollectedInput)]
        tensors = {name: tensor for one in whole for name, tensor in one.items()}
        return tensors, next((one for one in came if not isinstance(one, CollectedInput)), None)

    def _prefix(self, lease: Lease) -> Iterator[HeldTensors]:
        """What others have made of the same beginning, as far as it can be read."""
        for ref in lease.prefix:
            try:
                yield self._store.get(ref, as_torch=self._as_torch(lease))
            except Exception as error:  # what cannot be had is made again
                log.info("a prefix cannot be read", request=lease.task.request, object=ref.id, reason=str(error))
                return

    def exact_batch_key(self, stage: Stage, state: Any) -> Hashable | None:
        """What else tasks must have in common to share a forward, where bytes count; None: they never may."""
        return stage.exact_batch_key(state) if self._exact else None

    def _resumed(self, stage: Stage, given: StageInput, lease: Lease) -> Any:
        """The state that an earlier attempt saved; None if there is none, or if it cannot be read."""
        if lease.checkpoint is None:
            return None
        try:
            with self._store.get(lease.checkpoint, as_torch=self._as_torch(lease)) as held:
                return stage.resume(given, unpack(held))
        except Exception as error:  # a bad checkpoint must not end the process
            task = lease.task
            log.warning("cannot resume, starts again", request=task.request, stage=task.stage, reason=str(error))
            return None

    def _as_torch(self, lease: Lease) -> bool:
        return declared(lease.task.planned.pool) not in self._plain


def _is_narrowed(lease: Lease) -> bool:
    """Whether an input was stored in fewer bits than it was made with."""
    return any(meta.wide for ref in lease.task.inputs for meta in ref.tensors)


def start_of(run: RunTask, begun: Job | Exception) -> TaskStart:
    """Whether this process can begin a task."""
    if isinstance(begun, Job):
        return begun.resumed
    claim = run.lease.claim
    return TaskWaits(claim) if isinstance(begun, ResultsUnavailable) else failure(claim, begun)


def announce(
    store: TensorStore, job: Job, encodings: Mapping[str, str], tell: Callable[[OutputAnnounced], object] | None
) -> None:
    """Have a task that begins write its output where others may read it meanwhile, and `tell` of it.

    It comes whole, at the end, if it is to be narrowed, if there is no room yet, and where nobody can be told. One of
    several is told of however small it is: who reads all of them begins with those that are there.
    """
    task, outline = job.lease.task, job.stage.outline(job.state)
    if not outline or tell is None or task.planned.final or encodings.get(task.planned.kind, "none") != "none":
        return
    with suppress(TransientError):
        job.output = store.begin(
            outline, request=task.request, stage=task.stage, attempt=task.attempt, small=task.several
        )
    if job.output:
        job.opened.callback(job.output.abort)
        job.stage.write_to(job.state, job.output)
        tell(OutputAnnounced(job.claim, job.output.ref))


def put(store: TensorStore, job: Job, output: StageOutput, encodings: Mapping[str, str]) -> ObjectRef | None:
    """Store tensors, narrowed as `encodings` says for the kind of the stage; None for a final stage, which has none.

    What was written where others read it is only sealed.
    """
    task = job.lease.task
    if job.output:
        job.output.fill(output.tensors)
        return job.output.finish()
    if task.planned.final:
        return None
    encoding = encodings.get(task.planned.kind, "none")
    return store.put(
        output.tensors, request=task.request, stage=task.stage, attempt=task.attempt, wait=ROOM_S, encoding=encoding
    )


def read_prefix_blocks(job: Job) -> list[tuple[str, str, Tensors]]:
    """Return the prefix blocks that the last step completed, each with its key, its digest and copies of its tensors.

    The digest is empty if the key is one of the task's own `prefixes`. The state may change afterwards. A block that
    cannot be read is left out, with those behind it.
    """
    task, found = job.lease.task, list[tuple[str, str, Tensors]]()
    try:
        for block in job.stage.prefix_blocks(job.state):
            if block.number < len(task.planned.prefixes):
                found.append((task.planned.prefixes[block.number], "", block.read()))
            elif task.planned.extends:
                found.append((prefix_key(task.planned.extends, block.digest), block.digest, block.read()))
    except Exception as error:  # the task itself goes on, on every rank: others compute what they do not find
        log.info("not kept", request=task.request, stage=task.stage, reason=str(error))
    return found


def store_prefix_blocks(store: TensorStore, job: Job) -> Iterator[CachePrefix]:
    """Store what `read_prefix_blocks` has read. A block that cannot be stored is left out, with those behind it."""
    task, blocks = job.lease.task, job.prefix_blocks
    job.prefix_blocks = []
    for key, digest, tensors in blocks:
        try:
            ref = store.put(tensors, request=task.request, stage=task.stage, attempt=task.attempt)
        except Exception as error:  # as above
            log.info("not kept", request=task.request, stage=task.stage, reason=str(error))
            return
        yield CachePrefix(job.claim, key, ref, digest)


def write(results: ResultStore, job: Job, media: Sequence[EncodedMedia]) -> tuple[ResultFile, ...]:
    """Store files, from the index of the task's picture on. Raises ResultsUnavailable where they cannot be now."""
    task = job.lease.task
    first = 0 if task.params.get("index") is None else need(task.params, "index", int)
    return tuple(results.put(task.request, at, one.content_type, one.data) for at, one in enumerate(media, first))
