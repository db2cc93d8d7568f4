"""Tasks, which queues store; leases on them; and the bounds of recorded output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import ProtocolError
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import Params, PlannedStage

TaskStatus = Literal["waiting", "queued", "leased", "announced", "done", "cancelled"]

TASK_MOVES: dict[str, frozenset[str]] = {
    "waiting": frozenset({"queued", "done", "cancelled"}),
    "queued": frozenset({"leased", "waiting", "cancelled"}),
    "leased": frozenset({"announced", "queued", "waiting", "done", "cancelled"}),
    "announced": frozenset({"leased", "queued", "waiting", "cancelled"}),
    "done": frozenset({"queued", "waiting"}),
    "cancelled": frozenset(),
}
"""Legal transitions of one stage of one request: old status → new statuses.

A stage leaves `done` only when its output was lost, and goes from `waiting` to `done` when the encoder cache has its
output. It returns to `waiting` when an input was lost. `announced` is a leased stage whose output is read while it is
written."""

SLOTS, ARENA = "slots", "arena"
"""The resources that every task needs: one slot of a worker, and bytes of its arena for the output."""

CACHED = "cache:"


def cache_owner_name(key: str, id: str) -> str:
    """Return the name under which the encoder cache retains object `id` for `key`."""
    return f"{CACHED}{key}:{id}"


class Task(msgspec.Struct, frozen=True):
    """One attempt at a planned stage of a request, as a queue stores it."""

    #: Id of the request.
    request: str
    #: The stage, as planned for the request.
    planned: PlannedStage
    #: Number of the attempt, from 1.
    attempt: int
    #: Name of the model.
    model: str
    #: The request's parameters, overridden by the stage's own.
    params: Params
    #: Outputs of the stages that this one reads.
    inputs: tuple[ObjectRef, ...] = ()
    #: Higher runs sooner.
    priority: int = 0
    #: Sort key among tasks of equal priority, computed once, when the request is queued. Queues sort by (−priority,
    #: order, arrival).
    order: float = 0.0
    #: Earliest start, in seconds of the queue's clock.
    not_before: float = 0.0
    #: When the request expires, in seconds of the queue's clock; None: it never expires.
    deadline: float | None = None
    #: The node that stores most bytes of the inputs. A worker on it is preferred.
    preferred_node: str = ""
    #: Tasks of equal affinity can share a forward or an adapter. A worker that runs one prefers the others.
    affinity: str = ""
    #: Whether no other task may run in the same compute process, because several ran when one died.
    alone: bool = False
    #: Whether the plan has more stages of this kind, such as one for each picture. Their reader reads all outputs.
    has_siblings: bool = False
    #: Id of a worker that does not get the task while another one could run it; "": any worker may.
    avoid_worker: str = ""
    #: Facts that the server derived from the request.
    derived: DerivedFacts = DerivedFacts()

    @property
    def stage(self) -> str:
        """The name of the stage."""
        return self.planned.name

    @property
    def key(self) -> tuple[str, str]:
        """The request and the stage, which identify a task over all its attempts."""
        return self.request, self.stage

    @property
    def resources(self) -> dict[str, int]:
        """How much it needs of each resource, by name."""
        return {**self.planned.needs, SLOTS: 1, ARENA: self.planned.output_size}


class Claim(msgspec.Struct, frozen=True):
    """A worker's proof that a task is leased to it.

    Every report on the task carries one.
    """

    #: Id of the request.
    request: str
    #: Name of the stage.
    stage: str
    #: Number of the attempt. A higher number supersedes all lower ones.
    attempt: int
    #: The lease token: 128 random bits.
    token: bytes

    @property
    def key(self) -> tuple[str, str]:
        """The key of its task."""
        return self.request, self.stage


class Lease(msgspec.Struct, frozen=True):
    """A timed claim of one worker on a task."""

    #: The leased task.
    task: Task
    #: Id of the worker.
    worker: str
    #: The lease token: 128 random bits.
    token: bytes
    #: When the lease expires, in seconds of the queue's clock, unless a heartbeat renews it.
    expires: float
    #: The checkpoint of an earlier attempt, to resume from, if one can be read.
    checkpoint: ObjectRef | None = None
    #: Number of output chunks that earlier attempts recorded. They stay, and the worker continues after them.
    recorded_deltas: int = 0
    #: The first prefix blocks of the task, from the prefix cache. The worker need not compute them again.
    prefix: tuple[ObjectRef, ...] = ()

    @property
    def input_objects(self) -> tuple[ObjectRef, ...]:
        """The objects that the worker reads: the task's inputs, the prefix blocks and the checkpoint."""
        checkpoints = () if self.checkpoint is None else (self.checkpoint,)
        return (*self.task.inputs, *self.prefix, *checkpoints)

    @property
    def claim(self) -> Claim:
        """The claim with which the worker reports on the task."""
        return Claim(self.task.request, self.task.stage, self.task.attempt, self.token)


MAX_DELTA_BYTES = 8192  # the most bytes of an output chunk
MAX_DELTAS = 1 << 20  # the most output chunks of a stage
MAX_DELTAS_PER_MESSAGE = 512  # the most output chunks in one call, and in one answer, so that they fit into a message


class OutputDeltas(msgspec.Struct, frozen=True, tag=True):
    """New output chunks of a running task, such as packed token deltas."""

    #: Claim of the task.
    claim: Claim
    #: Number of the first of these chunks, counted from 0 over the whole stage.
    offset: int
    #: The chunks, each of at most MAX_DELTA_BYTES.
    deltas: tuple[bytes, ...]


def check_deltas(appended: Sequence[OutputDeltas]) -> None:
    """Raise ProtocolError for too many or too large chunks, or a task that occurs twice.

    The bounds are MAX_DELTAS_PER_MESSAGE, MAX_DELTAS and MAX_DELTA_BYTES.
    """
    if sum(len(deltas.deltas) for deltas in appended) > MAX_DELTAS_PER_MESSAGE:
        raise ProtocolError(f"more than {MAX_DELTAS_PER_MESSAGE} output chunks in one call")
    if len({deltas.claim.key for deltas in appended}) < len(appended):
        raise ProtocolError("a task occurs twice in one call")

    for deltas in appended:
        if not 0 <= deltas.offset <= MAX_DELTAS - len(deltas.deltas):
            raise ProtocolError(f"output chunks from number {deltas.offset}: a stage has at most {MAX_DELTAS}")
        if (size := max(map(len, deltas.deltas), default=0)) > MAX_DELTA_BYTES:
            raise ProtocolError(f"an output chunk of {size} bytes exceeds the limit of {MAX_DELTA_BYTES} bytes")


def check_gap(deltas: OutputDeltas, recorded: int) -> None:
    """Raise ProtocolError if chunks are missing between the first `recorded` chunks and these."""
    if deltas.offset > recorded:
        stage = f"{deltas.claim.stage} of {deltas.claim.request}"
        raise ProtocolError(f"output chunks of {stage} from number {deltas.offset}, but only {recorded} are recorded")
