"""Tasks and leases: what a queue holds, and a timed claim on it."""

from __future__ import annotations

from typing import Literal

import msgspec

from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import Params

TaskStatus = Literal["waiting", "queued", "leased", "announced", "done", "cancelled"]

TASK_MOVES: dict[str, frozenset[str]] = {
    "waiting": frozenset({"queued", "done", "cancelled"}),
    "queued": frozenset({"leased", "waiting", "cancelled"}),
    "leased": frozenset({"announced", "queued", "waiting", "done", "cancelled"}),
    "announced": frozenset({"queued", "waiting", "done", "cancelled"}),
    "done": frozenset({"queued", "waiting"}),
    "cancelled": frozenset(),
}
"""Legal moves of one stage of one request. `done` is left only when its output was lost, and reached at once where the
encoder cache has it; `waiting` is reached again when an input was lost. `announced` is reserved for a stage whose
output may be read while it is written: nothing makes this move yet."""

SLOTS, ARENA = "slots", "arena"
"""The resources that every task needs: a slot of a worker, and bytes of its arena for what is made."""

CACHED = "cache:"


def cached_as(key: str, id: str) -> str:
    """The name by which its owner holds an object for the encoder cache, beside that of its request."""
    return f"{CACHED}{key}:{id}"


class Task(msgspec.Struct, frozen=True):
    """One stage of one request, with a read-only view of what it needs.

    `order` is computed once, at push: a queue hands out by (−priority, order, arrival). `not_before` and `deadline` are
    seconds of the queue's clock; `room` is the predicted bytes of the output, `needs` what it takes of other resources
    that workers name. `near` is the node that holds most bytes
    of its inputs, `affinity` what tasks have in common that it would share a forward, or an adapter, with: preferences.
    One that is to run `alone` was among several when a compute process died: no other may be begun beside it.
    `cache` is the key under which other requests find its output, "" if none is to.
    """

    request: str
    stage: str
    attempt: int
    pool: str
    kind: str
    model: str
    params: Params
    inputs: tuple[ObjectRef, ...] = ()
    room: int = 0
    final: bool = False
    priority: int = 0
    order: float = 0.0
    not_before: float = 0.0
    deadline: float | None = None
    near: str = ""
    affinity: str = ""
    alone: bool = False
    cache: str = ""
    needs: dict[str, int] = {}

    @property
    def key(self) -> tuple[str, str]:
        """What a task is, whatever its attempt."""
        return self.request, self.stage

    @property
    def resources(self) -> dict[str, int]:
        """What it takes of every resource."""
        return {**self.needs, SLOTS: 1, ARENA: self.room}


class Claim(msgspec.Struct, frozen=True):
    """What a worker shows to speak for a task: the attempt orders, the token (128 random bits) fences."""

    request: str
    stage: str
    attempt: int
    token: bytes

    @property
    def key(self) -> tuple[str, str]:
        """The task it is about."""
        return self.request, self.stage


class Lease(msgspec.Struct, frozen=True):
    """A timed claim on a task. `expires` is seconds of the queue's clock.

    An earlier attempt may have left a checkpoint: whoever runs the task goes on from there, if it can be had.
    """

    task: Task
    worker: str
    token: bytes
    expires: float
    checkpoint: ObjectRef | None = None

    @property
    def reads(self) -> tuple[ObjectRef, ...]:
        """The task's inputs, and the checkpoint if there is one."""
        return self.task.inputs if self.checkpoint is None else (*self.task.inputs, self.checkpoint)

    @property
    def claim(self) -> Claim:
        """What its holder shows."""
        return Claim(self.task.request, self.task.stage, self.task.attempt, self.token)
