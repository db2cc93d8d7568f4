"""The whole state of a request: its context, stages, events and device seconds.

The queue backend holds the only copy. Only the transitions in `scheduler/lifecycle.py` change it.
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
from unfuse.core.modalities import IMAGE, VIDEO, Modality, modality_of
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import ExecutionPlan, Params
from unfuse.core.task import Claim, Task, TaskStatus

EventType = Literal[
    "queued",
    "stage_started",
    "progress",
    "preview",
    "appended",
    "stage_completed",
    "retrying",
    "completed",
    "failed",
    "cancelled",
]
TERMINAL_EVENTS = frozenset({"completed", "failed", "cancelled"})


class Event(msgspec.Struct, frozen=True):
    """One entry of a request's history, which clients read as an event stream."""

    #: What happened.
    type: EventType
    #: When it happened, in Unix seconds.
    at: float = 0.0
    #: Name of the stage; "": the event is about the whole request.
    stage: str = ""
    #: Number of the stage's attempt; 0: the event is about no single attempt.
    attempt: int = 0
    #: Id of the worker that runs the stage.
    worker: str = ""
    #: Steps that are done, for `progress`. For `appended`, the number of recorded output chunks.
    step: int = 0
    #: Number of steps of the stage, for `progress`.
    steps: int = 0
    #: Details for people, such as an error; "": none.
    message: str = ""
    #: Number of the event within its request, from 1. The queue sets it; 0 before that.
    seq: int = 0


RequestStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
WaitReason = Literal["loading", "cold_start"]
"""Why a request waits: for a model swap to load its model, or for a pool that was scaled to zero to get workers."""

ColdStart = tuple[float, float]
"""One cold start of a pool that was scaled to zero, in Unix seconds: (wait began, workers came). 0: not yet."""

TERMINAL = frozenset({"completed", "failed", "cancelled", "expired"})

REQUEST_MOVES: dict[str, frozenset[str]] = {
    "queued": frozenset({"in_progress", "completed", "failed", "cancelled", "expired"}),
    "in_progress": frozenset({"completed", "failed", "cancelled", "expired"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
    "expired": frozenset(),
}
"""Legal transitions of a request's status: old status → new statuses."""


Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""Seconds that a worker reports. They are added up, so NaN, infinity and negative numbers are refused."""

_Steps = Annotated[int, Meta(ge=0, le=1 << 40)]

UNKNOWN_DEVICE = "unknown"  # billed as the device of a worker that reports none


class Timings(msgspec.Struct, frozen=True):
    """Where the time of one stage went, and its share of the devices."""

    #: Seconds in the queue.
    queued_s: float = 0.0
    #: Seconds of reading inputs.
    get_s: Seconds = 0.0
    #: Seconds of computing.
    run_s: Seconds = 0.0
    #: Seconds of writing outputs.
    put_s: Seconds = 0.0
    #: Number of steps that it computed.
    steps: _Steps = 0
    #: Average number of tasks in one of its forwards.
    batch: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    #: Number of steps that earlier attempts computed and this one did not repeat.
    resumed: _Steps = 0
    #: Seconds of saving checkpoints between steps.
    save_s: Seconds = 0.0
    #: "cpu", or the name of the GPU; "": the worker did not report it.
    device: str = ""
    #: Seconds, out of `run_s`, of exchanges with other ranks.
    exchange_s: Seconds = 0.0
    #: Number of devices of the worker.
    devices: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    #: The task's share of the seconds of computing. Tasks in one forward share its seconds equally.
    share_s: Seconds = 0.0

    @property
    def device_s(self) -> float:
        """The device seconds of the task: its share, times the number of devices."""
        return self.share_s * self.devices


FLAGGED_TYPE = "application/problem+json"
"""The content type of the placeholder for a picture or video that the model's safety checker flagged."""

MODERATION_BLOCKED = "moderation_blocked"
"""OpenAI's error code for a request whose results were all flagged."""


class ResultFile(msgspec.Struct, frozen=True):
    """One result file, such as a picture or a video, in the result store."""

    #: Number of the result within its request, from 0. Results are sorted by it.
    index: int
    #: Media type, such as image/png; FLAGGED_TYPE: it is a placeholder.
    content_type: str
    #: Size in bytes.
    bytes: int
    #: Hash of the bytes, as hex.
    sha256: str

    @property
    def flagged(self) -> bool:
        """Whether this is the placeholder for a flagged picture or video."""
        return self.content_type == FLAGGED_TYPE


class ErrorInfo(msgspec.Struct, frozen=True):
    """Why a request failed, expired or was cancelled."""

    #: Error code, for programs.
    code: str
    #: One sentence, for people.
    message: str
    #: Name of the stage that failed; "": no single stage did.
    stage: str = ""
    #: Details for debugging, such as a traceback.
    evidence: str = ""


class UnreportedAttempt(msgspec.Struct, frozen=True):
    """An attempt that ended before its worker reported the total device time."""

    #: Id of the worker.
    worker: str
    #: The usage that is known so far.
    timings: Timings
    #: Whether the attempt was lost, and is therefore not billed. All other attempts are billed.
    lost: bool


class DeviceFailure(msgspec.Struct, frozen=True):
    """A device error that ended a compute process while a task ran alone in it."""

    #: The device and its worker, for people.
    device: str
    #: Whether the device had completed another task of the pool since its failure before this one.
    had_worked: bool = False


class StageState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one stage of one request."""

    #: Status of its task (see TASK_MOVES).
    status: TaskStatus = "waiting"
    #: Number of the current or last attempt.
    attempt: int = 0
    #: Token of the lease that completed the stage. It identifies a repeated commit.
    token: bytes = b""
    #: Id of the worker of the current or last attempt.
    worker: str = ""
    #: The output, complete or announced; None: there is none, as for a last stage.
    output: ObjectRef | None = None
    #: Usage of the attempt that is billed.
    timings: Timings = Timings()
    #: When its task was last queued, in Unix seconds.
    queued_at: float = 0.0
    #: Failed attempts, out of the stage's retry budget.
    failures: int = 0
    #: Crashes of the compute process, out of a budget of their own.
    crashes: int = 0
    #: Repeats because an output was lost, out of a budget of their own.
    recomputes: int = 0
    #: Device errors that ended a compute process while the task ran alone in it.
    device_failures: tuple[DeviceFailure, ...] = ()
    #: Whether the task must run alone, because it was one of several when a compute process died.
    alone: bool = False
    #: The saved state after `checkpoint_step` steps.
    checkpoint: ObjectRef | None = None
    #: Number of steps that `checkpoint` covers.
    checkpoint_step: int = 0
    #: Largest share of the stage that an earlier attempt completed, from 0 to 1.
    max_progress: float = 0.0
    #: Seconds for which earlier attempts were leased.
    leased_s: float = 0.0
    #: Id of the request that computes the same encoder output, for which this stage waits.
    shares_with_request: str = ""
    #: Id of the last output that was lost. No task reads it any more, but its owner may still store it.
    lost_output_id: str = ""
    #: The last cold start of its pool.
    cold_start: ColdStart = (0.0, 0.0)
    #: Type of the last exception that no retry rule names.
    failed_with: str = ""
    #: Id of the worker that raised it.
    failed_on: str = ""
    #: Id of a worker that does not get the task while another worker could run it.
    avoid_worker: str = ""
    #: Device seconds of lost attempts, by device.
    lost_s: dict[str, float] = {}
    #: By attempt, the accounted attempts whose worker's last report may still arrive.
    unreported: dict[int, UnreportedAttempt] = {}
    #: Every attempt up to this number is accounted for: billed, or lost.
    accounted_attempt: int = 0
    #: Number of accounted attempts that began to run.
    attempts_started: int = 0
    #: Number of accounted attempts that ended before they began to run.
    attempts_not_started: int = 0
    #: Steps that the last accounted attempt computed, out of `steps`.
    step: int = 0
    #: Number of steps of the stage, as that attempt reported it; 0: it reported none.
    steps: int = 0
    #: "tiled": the VAE encoded or decoded in tiles, because the memory of the device was too small.
    vae: Literal["", "tiled"] = ""

    @property
    def waits_for_cold_start(self) -> bool:
        """Whether the stage waits for its pool, which is scaled to zero, to get workers."""
        return self.cold_start[0] > 0 and not self.cold_start[1]


class TenantLimits(msgspec.Struct, frozen=True):
    """Admission limits of one tenant. 0 means no limit."""

    #: The most requests that are not over.
    concurrent: int = 0
    #: The most new requests in `per_s` seconds. It is a token bucket: all of them may arrive at once.
    rate: int = 0
    #: Seconds in which `rate` new requests are allowed.
    per_s: int = 60


class GenerationRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A client's request: a model, checked parameters, and the facts derived from them."""

    #: Id of the request; "": the scheduler draws one.
    id: str
    #: Name of the model.
    model: str
    #: Checked parameters, as the stages read them.
    params: Params
    #: Number of results. They have the seeds seed … seed + n − 1.
    n: int = 1
    #: The client's name for the model, if that is an alias.
    alias: str = ""
    #: The most seconds for which the stages of one chain may be leased in all; None: no limit.
    time_limit_s: float | None = None
    #: Key in the result cache: a hash of everything that results depend on, except the pools; "": no
    #: result is reused.
    result_cache_key: str = ""
    #: Advice to the client, such as words of the prompt that the model was not trained on; "": none.
    hint: str = ""
    #: Facts that the server derived from the parameters and the uploads.
    derived: DerivedFacts = DerivedFacts()

    @property
    def requested_model(self) -> str:
        """The model name in the client's request: the alias, if it used one."""
        return self.alias or self.model


class Caller(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who sent a request: the tenant, its limits, and its idempotency key."""

    #: Name of the tenant to which the API key belongs.
    tenant: str = "default"
    #: With the tenant, it identifies a repeat of the same call; "": each call is a new request.
    idempotency_key: str = ""
    #: Hash of the client's body. It distinguishes a repeat from another request with the same idempotency key.
    fingerprint: str = ""
    #: Whether the request is cancelled when its client disconnects.
    cancel_on_disconnect: bool = False
    #: The tenant's admission limits.
    limits: TenantLimits = TenantLimits()
    #: The address at which the client reached the gateway. Links in webhooks begin with it.
    base_url: str = ""


class Delivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """Options of a request that do not change its results: priority, timeout, webhook, caching."""

    #: Whether the response has the pictures themselves, as base64, or links to them.
    response_format: Literal["b64_json", "url"] = "b64_json"
    #: Whether the response is a stream of server-sent events.
    stream: bool = False
    #: Tasks of a request with a higher priority are leased first.
    priority: int = 0
    #: Seconds after which the request expires; None: it does not.
    timeout: float | None = None
    #: Strings of the client, which are returned with the request.
    metadata: dict[str, str] = {}
    #: Whether encoder outputs may be shared with other requests, in both directions.
    cache: bool = True
    #: The address to call when the request is over; "": none.
    webhook: str = ""


class WebhookDelivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """The progress of a request's webhook delivery."""

    #: "delivered": the receiver accepted it. "given_up": no further attempt follows.
    state: Literal["waiting", "delivered", "given_up"] = "waiting"
    #: Number of attempts so far.
    attempts: int = 0
    #: The earliest time of the next attempt, in Unix seconds.
    next_at: float = 0.0
    #: Why the last attempt failed.
    reason: str = ""


class RequestContext(msgspec.Struct, frozen=True, omit_defaults=True):
    """The whole state of a request: the request, its caller, its plan and its progress."""

    #: What the client requested.
    request: GenerationRequest
    #: Who requested it.
    caller: Caller
    #: Its options that do not change the results.
    delivery: Delivery
    #: Its stages, compiled from the model's pipeline.
    plan: ExecutionPlan
    #: The state of each stage of the plan, by name.
    stages: dict[str, StageState]
    #: Committed status (see REQUEST_MOVES). `RequestRecord.status` is the one to show.
    status: RequestStatus = "queued"
    #: Number of changes that were committed.
    version: int = 0
    #: When the request expires, in seconds of the queue's clock; None: it never expires.
    deadline: float | None = None
    #: Seconds by which the deadline was moved because of cold starts of pools that were scaled to zero.
    deadline_extension_s: float = 0.0
    #: Predicted seconds of compute. Admission control adds them up.
    cost: float = 0.0
    #: Sort key of its tasks among those of equal priority. The lowest is leased first.
    order: float = 0.0
    #: When it was accepted, in Unix seconds.
    created_at: float = 0.0
    #: When one of its tasks was first leased, in Unix seconds; None: not yet.
    started_at: float | None = None
    #: When it was over, in Unix seconds; None: it is not over.
    completed_at: float | None = None
    #: The result files; empty until the request is completed.
    result: tuple[ResultFile, ...] = ()
    #: Why it failed, expired or was cancelled; None: it did not.
    error: ErrorInfo | None = None
    #: Whether it is a dead letter: somebody should look at it.
    is_dead_letter: bool = False
    #: Progress of its webhook, if it has one (`Delivery.webhook`).
    webhook: WebhookDelivery = WebhookDelivery()

    @property
    def id(self) -> str:
        """The id of the request."""
        return self.request.id

    @property
    def is_over(self) -> bool:
        """Whether the request has ended: its status will not change any more."""
        return self.status in TERMINAL

    @property
    def webhook_pending(self) -> bool:
        """Whether the request is over and its webhook is not delivered yet."""
        return self.is_over and bool(self.delivery.webhook) and self.webhook.state == "waiting"

    @property
    def cached_prefix_blocks(self) -> int:
        """The number of prefix blocks that its stages took from the prefix cache (`StageSpec.prefix_cached`)."""
        prefix_stages = (self.stages.get(stage.name, StageState()) for stage in self.plan.stages if stage.prefixes)
        return sum(state.timings.resumed for state in prefix_stages)

    @property
    def has_attachments(self) -> bool:
        """Whether the result store may hold attachments of it: uploads, previews, video fragments."""
        request = self.request
        return self.video or bool(request.derived.attachments) or bool(request.params.get("preview_every"))

    @property
    def modality(self) -> Modality:
        """The modality of its results. The prefix of its id encodes it."""
        return modality_of(self.id)

    @property
    def video(self) -> bool:
        """Whether it generates a video. Queues can list these requests alone, for /v1/videos."""
        return self.id.startswith(VIDEO.prefix)


class Change(msgspec.Struct, frozen=True):
    """One transition of a request. A queue applies all of it or nothing."""

    #: The new state. Its version is one more than that of the state that it replaces.
    context: RequestContext
    #: The claim of the worker that caused the transition, if one did. The commit closes its lease.
    claim: Claim | None = None
    #: Keys of further tasks, which leave the queue or lose their lease.
    close: tuple[tuple[str, str], ...] = ()
    #: Tasks to queue.
    push: tuple[Task, ...] = ()
    #: Events to publish.
    events: tuple[Event, ...] = ()


class RunningStage(msgspec.Struct, frozen=True):
    """A leased stage, with its progress.

    It is not part of the context: it changes without a new version.
    """

    #: Name of the stage.
    stage: str
    #: Number of the attempt.
    attempt: int
    #: Id of the worker.
    worker: str
    #: When it was leased, in Unix seconds.
    since: float
    #: Steps that are done, out of `steps`.
    step: int = 0
    #: Number of steps of the stage; 0: not reported yet.
    steps: int = 0
    #: Seconds of the lease, when the record was read, that count toward time limits: see `TaskQueue.sweep_expired`.
    ran_s: float = 0.0
    #: Usage of the attempt so far, as its worker last reported it.
    timings: Timings = Timings()


class RequestRecord(msgspec.Struct, frozen=True):
    """A stored request: its context, and the parts that change without a new version."""

    #: The state that changes only with a new version.
    context: RequestContext
    #: The stages that are leased now.
    running: tuple[RunningStage, ...] = ()
    #: Number of tasks ahead of its first queued task; None: no task is queued.
    position: int | None = None
    #: Its place in the order of arrival: about the microsecond, since 1970, at which it arrived.
    number: int = 0

    @property
    def status(self) -> RequestStatus:
        """The status to show.

        A queued request is in progress as soon as one of its stages runs.
        """
        return "in_progress" if self.context.status == "queued" and self.running else self.context.status


def new_request_id(modality: Modality = IMAGE) -> str:
    """Return a new request id: the modality's prefix and 128 random bits as hex."""
    return modality.prefix + secrets.token_hex(16)


def request_ids(modality: Modality = IMAGE, after: str = "") -> Iterator[str]:
    """Yield new request ids without end; the caller may use any of them.

    Without `after` they are random. The ids after request `after` are the same in each call, so that a repeated
    submission creates no second request.
    """
    for number in count():
        text = f"{after}/{number}" if number else after
        yield (
            modality.prefix + blake2b(text.encode(), digest_size=16).hexdigest() if after else new_request_id(modality)
        )


DeviceSeconds = dict[str, float]
"""Device seconds, by the name of the device."""


def billed_seconds(
    context: RequestContext, running: Sequence[RunningStage] = (), wall: float = math.inf
) -> DeviceSeconds:
    """Return the device seconds on a request's bill, those of `running` attempts included.

    A running attempt counts for no longer than it has run at the Unix time `wall`.
    """
    ended_attempts = [state.timings for state in context.stages.values()]
    return _sums([*ended_attempts, *(clamp_to_elapsed(run.timings, wall - run.since) for run in running)])


def lost_seconds(context: RequestContext) -> DeviceSeconds:
    """Return the device seconds of the request's lost attempts. They are not billed."""
    totals: DeviceSeconds = defaultdict(float)
    for state in context.stages.values():
        for device, seconds in state.lost_s.items():
            totals[device] += seconds
    return dict(totals)


def device_seconds_since(before: Mapping[str, float], after: Mapping[str, float]) -> DeviceSeconds:
    """Return, by device, the device seconds in `after` that are not in `before`.

    Devices without any are left out.
    """
    return {name: increase for name, seconds in after.items() if (increase := seconds - before.get(name, 0.0)) > 0}


def clamp_to_elapsed(timings: Timings, elapsed_s: float) -> Timings:
    """Limit a task's reported share of computing to the seconds that have passed.

    A negative `elapsed_s` means that the clock was set back: then there is nothing to compare with, and no limit.
    """
    if elapsed_s < 0 or timings.share_s <= elapsed_s:
        return timings
    return msgspec.structs.replace(timings, share_s=elapsed_s)


def merge_timings(previous: Timings, reported: Timings) -> Timings:
    """Return the last report of an attempt, with the largest `share_s` of both reports."""
    device_source = reported if reported.device else previous
    share_s = max(previous.share_s, reported.share_s)
    return msgspec.structs.replace(
        reported, share_s=share_s, device=device_source.device, devices=device_source.devices
    )


def _sums(attempts: Iterable[Timings]) -> DeviceSeconds:
    """Add up the device seconds of several attempts."""
    totals: DeviceSeconds = defaultdict(float)
    for timings in attempts:
        if timings.device_s:
            totals[timings.device or UNKNOWN_DEVICE] += timings.device_s
    return dict(totals)
