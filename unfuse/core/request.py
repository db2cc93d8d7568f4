"""The whole state of a request. It is kept in the queue backend alone, and only lifecycle transitions change it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from hashlib import blake2b
from itertools import count
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from unfuse.core.card import ModelCard
from unfuse.core.derived import Derived
from unfuse.core.event import Event
from unfuse.core.media import IMAGE, VIDEO, Medium, medium_of
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import ExecutionPlan, Params
from unfuse.core.task import Claim, Task, TaskStatus

RequestStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
Awaiting = Literal["loading", "waking"]
"""The state of a request that waits for its model to be loaded, or for workers of a pool that slept."""

Waking = tuple[float, float]
"""When somebody began to wait for a pool that slept, and when its workers came (0: not yet), in Unix seconds."""

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


Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""Seconds that a worker reports. They are added up, so NaN, infinity and negative numbers are refused."""

_Steps = Annotated[int, Meta(ge=0, le=1 << 40)]

UNKNOWN_DEVICE = "unknown"  # the device of a worker that does not say what it is


class Timings(msgspec.Struct, frozen=True):
    """The seconds that a stage spent waiting in the queue, reading inputs, computing, and writing outputs.

    `steps` is how many steps it made, `batch` the average number of tasks in a forward. `resumed` steps were made by
    earlier attempts and not repeated. `save_s` is the time, between steps, that saving checkpoints took. `device` is
    cpu or the name of a GPU, of which the worker has so many `devices`. Of the seconds of computing, `exchange_s` were
    spent in exchanges with other ranks. `share_s` is the task's share of the seconds of computing: those of a forward
    are divided equally among the tasks in it.
    """

    queued_s: float = 0.0
    get_s: Seconds = 0.0
    run_s: Seconds = 0.0
    put_s: Seconds = 0.0
    steps: _Steps = 0
    batch: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    resumed: _Steps = 0
    save_s: Seconds = 0.0
    device: str = ""
    exchange_s: Seconds = 0.0
    devices: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    share_s: Seconds = 0.0

    @property
    def device_s(self) -> float:
        """The seconds of devices that are the task's own: its share, on each device."""
        return self.share_s * self.devices


FLAGGED_TYPE = "application/problem+json"
"""The content type of the placeholder for a picture or video that the model's safety checker flagged."""

MODERATION_BLOCKED = "moderation_blocked"
"""OpenAI's error code for a request whose results were all flagged."""


class ResultFile(msgspec.Struct, frozen=True):
    """One picture or video in the result store. `index` counts those of the request from 0, and sorts them there."""

    index: int
    content_type: str
    bytes: int
    sha256: str

    @property
    def flagged(self) -> bool:
        """Whether this is the placeholder for a flagged picture or video."""
        return self.content_type == FLAGGED_TYPE


class ErrorInfo(msgspec.Struct, frozen=True):
    """Why a request ended badly: a code for programs, a sentence for people, evidence for whoever debugs it."""

    code: str
    message: str
    stage: str = ""
    evidence: str = ""


class Unreported(msgspec.Struct, frozen=True):
    """An attempt that ended before its worker had reported what it used in all; `timings` are those known by then.

    A `lost` attempt costs nothing. The other ones are on the bill.
    """

    worker: str
    timings: Timings
    lost: bool


class StageState(msgspec.Struct, frozen=True):
    """The state of one stage of one request.

    `attempt` is the current or last attempt. `token` is that of the lease that completed the stage, to recognise a
    repeated commit. `queued_at` is Unix seconds. `failures`, `crashes` and `recomputes` have a budget each. `alone`:
    the task must run with no other, because several ran when a compute process died. `checkpoint` is the saved state
    after `checkpoint_step` steps. Earlier attempts got as far as the share `reached` of the stage, and held leases for
    `leased_s` seconds. It waits for what another request encodes, which it `follows`. `lost` is the id of the last
    output that was given up: nobody reads it any more, though its owner may still have it. Its pool `slept`.
    `failed_with` is the type of the last exception that no retry rule names, `failed_on` the worker where it was
    raised. The task is not leased to the worker in `avoids` while another one could run it.

    `timings` are those of the attempt that is on the bill. `lost_s` maps devices to the seconds that lost attempts used
    there. Attempts up to number `accounted` are on the bill or lost; of those in `unreported` the worker's last report
    may still come. `begun` of them had begun to run, `unbegun` were handed back before. The last one made `step` of
    `steps` steps.
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
    follows: str = ""
    lost: str = ""
    slept: Waking = (0.0, 0.0)
    failed_with: str = ""
    failed_on: str = ""
    avoids: str = ""
    lost_s: dict[str, float] = {}
    unreported: dict[int, Unreported] = {}
    accounted: int = 0
    begun: int = 0
    unbegun: int = 0
    step: int = 0
    steps: int = 0

    @property
    def sleeps(self) -> bool:
        """Whether it still waits for a pool to wake."""
        return self.slept[0] > 0 and not self.slept[1]


class Webhook(msgspec.Struct, frozen=True):
    """Whom to tell of a request's end: the address `url`; what it is told has links that begin with `base`.

    It `heard` of it, or was `given_up` after so many attempts. While it is `waiting`, the next one is not made before
    `next_at`, in Unix seconds. `reason`: why the last one failed.
    """

    url: str
    base: str = ""
    state: Literal["waiting", "heard", "given_up"] = "waiting"
    attempts: int = 0
    next_at: float = 0.0
    reason: str = ""


class RequestContext(msgspec.Struct, frozen=True):
    """The whole state of a request.

    `version` rises by one with every commit. `deadline` is seconds of the queue's clock; `created_at` and
    `completed_at` are Unix seconds. `fingerprint` is the hash of what the client sent: with one idempotency key, it
    tells a repeat from another request. `cost` is the predicted seconds of compute that admission counts. `order`
    sorts its tasks among those of their priority. A `dead` request is a dead letter: somebody should look at it.
    `asked` is the client's name for the model, if that is an alias. The leases along any chain of its stages may last
    for `limit_s` seconds in all (None: any time). With `ends_with_client` it is cancelled when its client disconnects.
    `makes` is the hash of what its results depend on beside its pools ("": they are not reused). The `webhook` is
    told of its end. The deadline has `moved` by so many seconds, since pools slept. A worker first took one of its
    tasks at the Unix time `started_at` (None: not yet). `hint` is what its client may want to
    know of it ("": nothing). `derived` is what the server found out about it.
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
    ends_with_client: bool = False
    makes: str = ""
    webhook: Webhook | None = None
    moved: float = 0.0
    started_at: float | None = None
    hint: str = ""
    derived: Derived = Derived()

    @property
    def over(self) -> bool:
        """Whether the request has ended: its status will not change any more."""
        return self.status in TERMINAL

    @property
    def unheard(self) -> bool:
        """Whether it is over, and its webhook has not heard of that yet."""
        return self.over and self.webhook is not None and self.webhook.state == "waiting"

    @property
    def spared(self) -> int:
        """How many prefix blocks others had made, so that its own stages began behind them: see `StageSpec.goes_on`."""
        ended = (self.stages.get(stage.name, StageState()) for stage in self.plan.stages if stage.prefixes)
        return sum(state.timings.resumed for state in ended)

    @property
    def has_attachments(self) -> bool:
        """Whether the result store has files of it beside its results: uploads, previews, fragments of a video."""
        return self.video or bool(self.derived.attachments) or bool(self.params.get("preview_every"))

    @property
    def medium(self) -> Medium:
        """The medium that it asks for, which its id tells."""
        return medium_of(self.id)

    @property
    def video(self) -> bool:
        """Whether it asks for a video. Queues can list these alone, for /v1/videos."""
        return self.id.startswith(VIDEO.prefix)


class Asked(msgspec.Struct, frozen=True):
    """What is asked for: checked parameters of a model, and `n` results with the seeds seed … seed + n − 1.

    `name` is the client's name for the model, if that is an alias. `id` is the id of the request ("": one is drawn).
    The leases along any chain of its stages may last for `limit_s` seconds in all (0: any time). `makes` is the hash of
    what the results depend on beside the pools that make them ("": nobody else is given them). `begins` are the digests
    of the beginnings that it may have in common with others, the shortest first. `hint` is what its client may want to
    know. `derived` is what the server found out about the request.
    """

    card: ModelCard
    params: Params
    n: int = 1
    name: str = ""
    id: str = ""
    limit_s: float = 0.0
    makes: str = ""
    begins: tuple[str, ...] = ()
    hint: str = ""
    derived: Derived = Derived()


class Allowance(msgspec.Struct, frozen=True):
    """How much a tenant may ask for: requests that are not over, and `rate` new ones in `per_s` seconds; 0 is any
    number. The new ones may come at once; then as many come anew as time passes.
    """

    concurrent: int = 0
    rate: int = 0
    per_s: int = 60


class Who(msgspec.Struct, frozen=True):
    """Who asks, and how to recognise a repeat: the client's idempotency key, and the hash of what it sent.

    `ends_with_client`: the request is cancelled when its client disconnects. The tenant has this `allowance`.
    It reached the gateway at the address `base`.
    """

    tenant: str = "default"
    idempotency_key: str = ""
    fingerprint: str = ""
    ends_with_client: bool = False
    allowance: Allowance = Allowance()
    base: str = ""


class Change(msgspec.Struct, frozen=True):
    """One transition of a request. A queue applies all of it or nothing.

    `context` is the new state; its version is one more than that of the state it was made from. `claim` is that of the
    worker who caused the transition, if one did: it closes this lease. `close` has the keys of further tasks, which
    are removed from the queue or lose their lease. `push` has the tasks to queue, `events` those to publish.
    """

    context: RequestContext
    claim: Claim | None = None
    close: tuple[tuple[str, str], ...] = ()
    push: tuple[Task, ...] = ()
    events: tuple[Event, ...] = ()


class Running(msgspec.Struct, frozen=True):
    """A leased stage. It is not part of the context: it changes without a new version.

    `since` is Unix seconds. `ran_s` is how long it had been leased when the record was read, in seconds for which time
    limits count: see `TaskQueue.expired`. `timings` say what the attempt has used so far, as its worker reported last.
    """

    stage: str
    attempt: int
    worker: str
    since: float
    step: int = 0
    steps: int = 0
    ran_s: float = 0.0
    timings: Timings = Timings()


class Record(msgspec.Struct, frozen=True):
    """A stored request: its context, its running stages, and how many tasks are ahead of its first queued one.

    `number` is its place in the order of arrival: about the microsecond, since 1970, at which it came.
    """

    context: RequestContext
    running: tuple[Running, ...] = ()
    position: int | None = None
    number: int = 0

    @property
    def status(self) -> RequestStatus:
        """The status to show. A queued request is in progress as soon as one of its stages runs."""
        return "in_progress" if self.context.status == "queued" and self.running else self.context.status


def new_request_id(medium: Medium = IMAGE) -> str:
    """A new id: the medium's prefix and 128 random bits."""
    return medium.prefix + secrets.token_hex(16)


def request_ids(medium: Medium = IMAGE, after: str = "") -> Iterator[str]:
    """New ids, of which any will do. Those that follow from the request `after` are the same each time."""
    for number in count():
        text = f"{after}/{number}" if number else after
        yield medium.prefix + blake2b(text.encode(), digest_size=16).hexdigest() if after else new_request_id(medium)
