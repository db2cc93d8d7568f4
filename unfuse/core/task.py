"""Tasks, which queues hold, and leases, which are timed claims on them."""

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
"""Legal moves of one stage of one request. A stage leaves `done` only when its output was lost, and goes from `waiting`
to `done` when the encoder cache has its output. It returns to `waiting` when an input was lost. `announced` is a leased
stage whose output is read while it is written."""

SLOTS, ARENA = "slots", "arena"  # what every task needs: a slot of a worker, and bytes of its arena for the output

CACHED = "cache:"


def cached_as(key: str, id: str) -> str:
    """The name of the hold that keeps object `id` for the encoder cache under `key`."""
    return f"{CACHED}{key}:{id}"


class Task(msgspec.Struct, frozen=True):
    """One attempt at a planned stage of a request, with a read-only view of what it needs.

    `params` are the request's with those of the stage, `derived` is what the server found out about the request.
    `order` is computed once, at push: a queue hands out by (−priority, order, arrival). `not_before` and `deadline` are
    seconds of the queue's clock. Two preferences: `near` is the node that holds most bytes of its inputs; tasks of
    equal `affinity` can share a forward, or an adapter. A task to run `alone` must not run beside another in one
    compute process, because several ran when one died. Of a task that is one of `several`, other stages make the same
    of something else, and whoever reads one reads all. It is not leased to the worker in `avoids` ("": to any).
    """

    request: str
    planned: PlannedStage
    attempt: int
    model: str
    params: Params
    inputs: tuple[ObjectRef, ...] = ()
    priority: int = 0
    order: float = 0.0
    not_before: float = 0.0
    deadline: float | None = None
    near: str = ""
    affinity: str = ""
    alone: bool = False
    several: bool = False
    avoids: str = ""
    derived: DerivedFacts = DerivedFacts()

    @property
    def stage(self) -> str:
        """The name of the stage."""
        return self.planned.name

    @property
    def key(self) -> tuple[str, str]:
        """The request and the stage: they identify a task over all its attempts."""
        return self.request, self.stage

    @property
    def resources(self) -> dict[str, int]:
        """How much it takes of each resource, by name."""
        return {**self.planned.needs, SLOTS: 1, ARENA: self.planned.room}


class Claim(msgspec.Struct, frozen=True):
    """What a worker shows to report on a task. The attempt orders; the token, 128 random bits, proves the claim."""

    request: str
    stage: str
    attempt: int
    token: bytes

    @property
    def key(self) -> tuple[str, str]:
        """The key of its task."""
        return self.request, self.stage


class Lease(msgspec.Struct, frozen=True):
    """A timed claim on a task. `expires` is seconds of the queue's clock.

    If an earlier attempt left a `checkpoint` that can be read, the worker resumes from it. Of what the stage makes, so
    many pieces are `appended` already: they stay, and the worker goes on behind them. `prefix` is what others have made
    of the first of the task's `prefixes`, as far as it can be read: it need not be made again.
    """

    task: Task
    worker: str
    token: bytes
    expires: float
    checkpoint: ObjectRef | None = None
    appended: int = 0
    prefix: tuple[ObjectRef, ...] = ()

    @property
    def reads(self) -> tuple[ObjectRef, ...]:
        """The objects that the worker reads: the task's inputs, the prefix, and the checkpoint if there is one."""
        saved = () if self.checkpoint is None else (self.checkpoint,)
        return (*self.task.inputs, *self.prefix, *saved)

    @property
    def claim(self) -> Claim:
        """What the worker that holds the lease shows."""
        return Claim(self.task.request, self.task.stage, self.task.attempt, self.token)


PIECE_BYTES = 8192  # the most bytes of a piece
MOST_PIECES = 1 << 20  # the most pieces of a stage
PIECES_AT_ONCE = 512  # the most pieces in one call, and in one answer: all of them fit into a message


class OutputDeltas(msgspec.Struct, frozen=True, tag=True):
    """Pieces of what the task under a claim makes, from number `offset` on; the first of all is number 0."""

    claim: Claim
    offset: int
    pieces: tuple[bytes, ...]


def check_growth(grown: Sequence[OutputDeltas]) -> None:
    """Raise ProtocolError for what no queue records in one call: see the bounds above. A task is in it once."""
    if sum(len(one.pieces) for one in grown) > PIECES_AT_ONCE:
        raise ProtocolError(f"more than {PIECES_AT_ONCE} pieces at once")
    if len({one.claim.key for one in grown}) < len(grown):
        raise ProtocolError("two parts of one task at once")
    for one in grown:
        if not 0 <= one.offset <= MOST_PIECES - len(one.pieces):
            raise ProtocolError(f"pieces from number {one.offset} on: a stage has up to {MOST_PIECES}")
        if (size := max(map(len, one.pieces), default=0)) > PIECE_BYTES:
            raise ProtocolError(f"a piece of {size} bytes: up to {PIECE_BYTES} are recorded")


def check_gap(grown: OutputDeltas, recorded: int) -> None:
    """Raise ProtocolError if pieces are missing between the `recorded` ones and these."""
    if grown.offset > recorded:
        stage = f"{grown.claim.stage} of {grown.claim.request}"
        raise ProtocolError(f"pieces of {stage} from number {grown.offset} on, but only {recorded} are recorded")
