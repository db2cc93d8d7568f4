"""The whole state of a request, its events and its use of devices.

It is kept in the queue backend alone, and only lifecycle transitions change it.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.modalities import IMAGE, VIDEO, Modality, medium_of
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import ExecutionPlan, Params
from unfuse.core.task import Claim, Task, TaskStatus

EventType = Literal[
    "queued", "stage_started", "progress", "preview", "appended", "stage_completed", "retrying",
    "completed", "failed", "cancelled",
]  # fmt: skip
TERMINAL_EVENTS = frozenset({"completed", "failed", "cancelled"})


class Event(msgspec.Struct, frozen=True):
    """One entry of a request's history.

    `seq` counts from 1 within the request; the queue sets it (0 before that). `at` is Unix seconds. `step` and `steps`
    are set on progress; of a stage that is read while it grows, `step` counts the recorded pieces in `appended`.
    """

    type: EventType
    at: float = 0.0
    stage: str = ""
    attempt: int = 0
    worker: str = ""
    step: int = 0
    steps: int = 0
    message: str = ""
    seq: int = 0


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


class UnreportedAttempt(msgspec.Struct, frozen=True):
    """An attempt that ended before its worker had reported what it used in all; `timings` are those known by then.

    A `lost` attempt costs nothing. The other ones are on the bill.
    """

    worker: str
    timings: Timings
    lost: bool


class StageState(msgspec.Struct, frozen=True, omit_defaults=True):
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
    unreported: dict[int, UnreportedAttempt] = {}
    accounted: int = 0
    begun: int = 0
    unbegun: int = 0
    step: int = 0
    steps: int = 0

    @property
    def sleeps(self) -> bool:
        """Whether it still waits for a pool to wake."""
        return self.slept[0] > 0 and not self.slept[1]


class TenantLimits(msgspec.Struct, frozen=True):
    """How much a tenant may ask for: requests that are not over, and `rate` new ones in `per_s` seconds; 0 is any
    number. The new ones may come at once; then as many come anew as time passes.
    """

    concurrent: int = 0
    rate: int = 0
    per_s: int = 60


class GenerationRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client asked for: checked parameters of a model, and what the server found out about them."""

    #: "": the scheduler draws an id.
    id: str
    #: Name of the model.
    model: str
    params: Params
    #: Number of results. They have the seeds seed … seed + n − 1.
    n: int = 1
    #: The client's name for the model, if that is an alias.
    alias: str = ""
    #: Seconds that the leases along any chain of stages may last in all; None: any time.
    time_limit_s: float | None = None
    #: Hash of what the results depend on beside the pools that make them; "": they are not reused.
    result_cache_key: str = ""
    #: What the client may want to know of its request; "": nothing.
    hint: str = ""
    #: Facts that the server derived from the parameters and the uploads.
    derived: DerivedFacts = DerivedFacts()

    @property
    def requested_model(self) -> str:
        """The name by which the client asked for the model."""
        return self.alias or self.model


class Caller(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who sent a request."""

    tenant: str = "default"
    #: With the tenant, it identifies a repeat of the same call; "": each call is a new request.
    idempotency_key: str = ""
    #: Hash of what the client sent. With one idempotency key, it tells a repeat from another request.
    fingerprint: str = ""
    #: Whether the request is cancelled when its client disconnects.
    cancel_on_disconnect: bool = False
    #: How much the tenant may ask for.
    allowance: TenantLimits = TenantLimits()
    #: The address at which the client reached the gateway. Links in webhooks begin with it.
    base_url: str = ""


class Delivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a client wants a request handled, whatever it asks for."""

    response_format: Literal["b64_json", "url"] = "b64_json"
    stream: bool = False
    priority: int = 0
    #: Seconds after which the request expires; None: it does not.
    timeout: float | None = None
    metadata: dict[str, str] = {}
    #: Whether encoder outputs may be shared with other requests, in both directions.
    cache: bool = True
    #: The address to call when the request is over; "": none.
    webhook: str = ""


class WebhookDelivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far the call of a request's webhook has come."""

    state: Literal["waiting", "heard", "given_up"] = "waiting"
    attempts: int = 0
    #: The earliest time of the next attempt, in Unix seconds.
    next_at: float = 0.0
    #: Why the last attempt failed.
    reason: str = ""


class RequestContext(msgspec.Struct, frozen=True, omit_defaults=True):
    """The whole state of a request: the request, its caller, its plan and its progress."""

    request: GenerationRequest
    caller: Caller
    delivery: Delivery
    plan: ExecutionPlan
    #: The state of each stage of the plan, by name.
    stages: dict[str, StageState]
    status: RequestStatus = "queued"
    #: Number of changes that were committed.
    version: int = 0
    #: Seconds of the queue's clock; None: it never expires.
    deadline: float | None = None
    #: Seconds by which the deadline was moved because pools slept.
    moved: float = 0.0
    #: Predicted seconds of compute, which admission counts.
    cost: float = 0.0
    #: Sorts its tasks among those of their priority.
    order: float = 0.0
    #: Unix seconds.
    created_at: float = 0.0
    #: When a worker first took one of its tasks, in Unix seconds; None: not yet.
    started_at: float | None = None
    #: Unix seconds; None: it is not over.
    completed_at: float | None = None
    result: tuple[ResultFile, ...] = ()
    error: ErrorInfo | None = None
    #: Whether it is a dead letter: somebody should look at it.
    dead: bool = False
    webhook: WebhookDelivery = WebhookDelivery()

    @property
    def id(self) -> str:
        """The id of the request."""
        return self.request.id

    @property
    def over(self) -> bool:
        """Whether the request has ended: its status will not change any more."""
        return self.status in TERMINAL

    @property
    def unheard(self) -> bool:
        """Whether it is over, and its webhook has not heard of that yet."""
        return self.over and bool(self.delivery.webhook) and self.webhook.state == "waiting"

    @property
    def spared(self) -> int:
        """How many prefix blocks others had made, so that its own stages began behind them: see `StageSpec.goes_on`."""
        ended = (self.stages.get(stage.name, StageState()) for stage in self.plan.stages if stage.prefixes)
        return sum(state.timings.resumed for state in ended)

    @property
    def has_attachments(self) -> bool:
        """Whether the result store has files of it beside its results: uploads, previews, fragments of a video."""
        request = self.request
        return self.video or bool(request.derived.attachments) or bool(request.params.get("preview_every"))

    @property
    def medium(self) -> Modality:
        """The medium that it asks for, which its id tells."""
        return medium_of(self.id)

    @property
    def video(self) -> bool:
        """Whether it asks for a video. Queues can list these alone, for /v1/videos."""
        return self.id.startswith(VIDEO.prefix)


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


class RunningStage(msgspec.Struct, frozen=True):
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


class RequestRecord(msgspec.Struct, frozen=True):
    """A stored request: its context, its running stages, and how many tasks are ahead of its first queued one.

    `number` is its place in the order of arrival: about the microsecond, since 1970, at which it came.
    """

    context: RequestContext
    running: tuple[RunningStage, ...] = ()
    position: int | None = None
    number: int = 0

    @property
    def status(self) -> RequestStatus:
        """The status to show. A queued request is in progress as soon as one of its stages runs."""
        return "in_progress" if self.context.status == "queued" and self.running else self.context.status


def new_request_id(medium: Modality = IMAGE) -> str:
    """A new id: the medium's prefix and 128 random bits."""
    return medium.prefix + secrets.token_hex(16)


def request_ids(medium: Modality = IMAGE, after: str = "") -> Iterator[str]:
    """New ids, of which any will do. Those that follow from the request `after` are the same each time."""
    for number in count():
        text = f"{after}/{number}" if number else after
        yield medium.prefix + blake2b(text.encode(), digest_size=16).hexdigest() if after else new_request_id(medium)


DeviceSeconds = dict[str, float]
"""Seconds by the name of the device."""


def billed_seconds(
    context: RequestContext, running: Sequence[RunningStage] = (), wall: float = math.inf
) -> DeviceSeconds:
    """Return the seconds on a request's bill, those of its `running` attempts so far included.

    A running attempt counts for no longer than it has run at the Unix time `wall`.
    """
    ended = [state.timings for state in context.stages.values()]
    return _sums([*ended, *(believable(run.timings, wall - run.since) for run in running)])


def lost_seconds(context: RequestContext) -> DeviceSeconds:
    """Return the seconds that lost attempts at a request have used. They cost nothing."""
    found: DeviceSeconds = defaultdict(float)
    for state in context.stages.values():
        for device, seconds in state.lost_s.items():
            found[device] += seconds
    return dict(found)


def increase(before: Mapping[str, float], after: Mapping[str, float]) -> DeviceSeconds:
    """Return by how much the seconds of each device have grown."""
    return {name: more for name, seconds in after.items() if (more := seconds - before.get(name, 0.0)) > 0}


def believable(timings: Timings, elapsed_s: float) -> Timings:
    """Limit a task's share of computing to the seconds that have passed.

    Negative seconds mean that the clock was set back. Then there is nothing to compare with.
    """
    if elapsed_s < 0 or timings.share_s <= elapsed_s:
        return timings
    return msgspec.structs.replace(timings, share_s=elapsed_s)


def newest(known: Timings, reported: Timings) -> Timings:
    """Return what was reported of an attempt last. The seconds that it has used only grow."""
    of = reported if reported.device else known
    share_s = max(known.share_s, reported.share_s)
    return msgspec.structs.replace(reported, share_s=share_s, device=of.device, devices=of.devices)


def _sums(attempts: Iterable[Timings]) -> DeviceSeconds:
    found: DeviceSeconds = defaultdict(float)
    for timings in attempts:
        if timings.device_s:
            found[timings.device or UNKNOWN_DEVICE] += timings.device_s
    return dict(found)
