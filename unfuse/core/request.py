"""A request's whole state: one truth, kept in the queue backend, changed only by lifecycle transitions."""

from __future__ import annotations

import secrets
from typing import Literal

import msgspec

from unfuse.core.card import ModelCard
from unfuse.core.event import Event
from unfuse.core.media import IMAGE, VIDEO, Medium, medium_of
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import ExecutionPlan, Params
from unfuse.core.task import Claim, Task, TaskStatus

RequestStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
TERMINAL = frozenset({"completed", "failed", "cancelled", "expired"})

REQUEST_MOVES: dict[str, frozenset[str]] = {
    "queued": frozenset({"in_progress", "completed", "failed", "cancelled", "expired"}),
    "in_progress": frozenset({"completed", "failed", "cancelled", "expired"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
    "expired": frozenset(),
}
"""Legal moves of a request."""


class Timings(msgspec.Struct, frozen=True):
    """Where a stage's seconds went: waiting in the queue, reading inputs, computing, writing outputs.

    It computed in that many `steps`, with `batch` tasks in a forward on average. Earlier attempts had made `resumed`
    steps, which were not made again; saving the state now and then took `save_s` of the time between its steps.
    `device` is what it computed on, as its worker says it: cpu, or the name of a GPU.
    """

    queued_s: float = 0.0
    get_s: float = 0.0
    run_s: float = 0.0
    put_s: float = 0.0
    steps: int = 0
    batch: float = 0.0
    resumed: int = 0
    save_s: float = 0.0
    device: str = ""


class ResultFile(msgspec.Struct, frozen=True):
    """One picture or video in the result store. `index` is its place in the request; `bytes` its size."""

    index: int
    content_type: str
    bytes: int
    sha256: str


class ErrorInfo(msgspec.Struct, frozen=True):
    """Why a request ended badly: a code for programs, a sentence for people, evidence for whoever debugs it."""

    code: str
    message: str
    stage: str = ""
    evidence: str = ""


class StageState(msgspec.Struct, frozen=True):
    """What is known of one stage of one request.

    `attempt` is the current (or last) try; `token` is the one that completed it, so that a repeated commit is known.
    `queued_at` is Unix seconds; `failures`, `crashes` and `recomputes` are charged against separate budgets. One to be
    tried `alone` was among several when a compute process died. `checkpoint` is its state at `checkpoint_step`; earlier
    attempts had `reached` that share of it, and were leased for `leased_s` seconds.
    """

    status: TaskStatus = "waiting"
    attempt: int = 0
    token: bytes = b""
    worker: str = ""
    output: ObjectRef | None = None
    timings: Timings = Timings()
    queued_at: float = 0.0
    failures: int = 0
    crashes: int = 0
    recomputes: int = 0
    alone: bool = False
    checkpoint: ObjectRef | None = None
    checkpoint_step: int = 0
    reached: float = 0.0
    leased_s: float = 0.0


class RequestContext(msgspec.Struct, frozen=True):
    """The whole state of a request.

    `version` rises by one with every commit. `deadline` is seconds of the queue's clock; `created_at` and
    `completed_at` are Unix seconds. `fingerprint` is the hash of what the client sent, to tell a repeat from another
    request. `cost` is what it counts for in admission, in predicted seconds of compute; `order` is where its tasks
    stand among those of their priority; a `dead` one failed in a way that somebody should look at. `asked` is what the
    client calls the model, where that is another name. No chain of its stages may be leased for more than `limit_s`.
    """

    id: str
    model: str
    params: Params
    plan: ExecutionPlan
    stages: dict[str, StageState]
    tenant: str = "default"
    idempotency_key: str = ""
    fingerprint: str = ""
    status: RequestStatus = "queued"
    version: int = 0
    priority: int = 0
    deadline: float | None = None
    created_at: float = 0.0
    completed_at: float | None = None
    result: tuple[ResultFile, ...] = ()
    error: ErrorInfo | None = None
    metadata: dict[str, str] = {}
    cost: float = 0.0
    order: float = 0.0
    dead: bool = False
    asked: str = ""
    limit_s: float | None = None

    @property
    def over(self) -> bool:
        """Whether nothing will happen to it any more."""
        return self.status in TERMINAL

    @property
    def medium(self) -> Medium:
        """What it asks for, as its id tells."""
        return medium_of(self.id)

    @property
    def video(self) -> bool:
        """Whether it is one of /v1/videos: queues list these by themselves."""
        return self.id.startswith(VIDEO.prefix)


class Asked(msgspec.Struct, frozen=True):
    """What is asked for: checked parameters of a model, and `n` results of the seeds seed … seed + n − 1.

    `name` is what the client calls the model, where that is another name. `id` is the request's, drawn if there is
    none. Its stages may run for `limit_s` seconds (0: any).
    """

    card: ModelCard
    params: Params
    n: int = 1
    name: str = ""
    id: str = ""
    limit_s: float = 0.0


class Who(msgspec.Struct, frozen=True):
    """Who asks, and what tells whether it was asked before: a key of the client's own, the hash of what it sent."""

    tenant: str = "default"
    idempotency_key: str = ""
    fingerprint: str = ""


class Change(msgspec.Struct, frozen=True):
    """One transition, to be applied as a whole or not at all.

    `context` is the new state, whose version is one more than the one it was made from. `claim` is the lease that is
    closed by it, if a worker asked for it. `close` names further tasks whose leases end and whose places are given up.
    """

    context: RequestContext
    claim: Claim | None = None
    close: tuple[tuple[str, str], ...] = ()
    push: tuple[Task, ...] = ()
    events: tuple[Event, ...] = ()


class Running(msgspec.Struct, frozen=True):
    """A leased stage as the queue sees it; kept beside the context, outside its version. `since` is Unix seconds."""

    stage: str
    attempt: int
    worker: str
    since: float
    step: int = 0
    steps: int = 0


class Record(msgspec.Struct, frozen=True):
    """A stored request: its context, what runs of it now, and how many tasks are ahead of its first queued one."""

    context: RequestContext
    running: tuple[Running, ...] = ()
    position: int | None = None

    @property
    def status(self) -> RequestStatus:
        """The status to show: something that runs makes a request one in progress, whatever was last committed."""
        return "in_progress" if self.context.status == "queued" and self.running else self.context.status


def new_request_id(medium: Medium = IMAGE) -> str:
    """128 random bits with the prefix clients see."""
    return medium.prefix + secrets.token_hex(16)
