"""What happens next in a request: pure transitions, (context, what happened, when) → Change. No I/O, and no clock.

A leased stage is "queued" in its context, since leases live beside contexts; that it was leased is proven by the claim
it is reported with, which the queue checks when the change is committed. `wall` is Unix seconds, `queue_now` seconds
of the queue's clock. Nothing here changes a context that is over: a report about it raises LeaseLost, unless it
repeats the one that completed its stage, and everything else is answered with None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from unfuse.core.errors import IllegalMove, LeaseLost
from unfuse.core.event import Event, EventType
from unfuse.core.messages import Done, Failed, Saved
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import Params, PlannedStage
from unfuse.core.request import REQUEST_MOVES, Change, ErrorInfo, RequestContext, RequestStatus, Running, StageState
from unfuse.core.task import TASK_MOVES, Claim, Lease, Task, TaskStatus
from unfuse.queues.base import EXACT

Charge = Literal["failures", "crashes", "recomputes"]

BUDGETS: dict[Charge, int] = {"failures": 3, "crashes": 1, "recomputes": 3}
"""Charges of each kind that a stage survives; the next one ends its request."""

CODES: dict[Charge, str] = {"failures": "stage_failed", "crashes": "compute_crashed", "recomputes": "object_lost"}
"""Error codes of requests that ended by a charge."""

BLAMELESS = frozenset({"drain", "preempted", "full", "producer", "compute"})
"""Why a task may be handed back any number of times."""

GIVEN_UP = 3
"""A task that so many workers get no more, because each handed it back again and again, is dead."""

BACKOFF_S = 0.5
"""Wait before the first retry of a transient failure; each further one waits twice as long."""


def admitted(context: RequestContext, wall: float, cached: Mapping[str, ObjectRef] | None = None) -> Change:
    """The first tasks of a new request: every stage that reads nothing. The version stays as it is.

    Stages whose output is `cached`, by name, are done without having run: at their attempt 0, on the object's owner.
    """
    stages = {stage.name: StageState() for stage in context.plan.stages}
    draft = _Draft(msgspec.structs.replace(context, stages=stages), wall)
    draft.publish("queued")
    for name, output in (cached or {}).items():
        draft.move(name, "done", output=output, worker=output.owner)
        draft.publish("stage_completed", name, "cached")
    draft.queue_ready()
    return Change(draft.context(version=context.version), push=tuple(draft.push), events=tuple(draft.events))


def completed(context: RequestContext, done: Done, worker: str, wall: float, running: Sequence[Running] = ()) -> Change:
    """A stage has made its output: queue what can run now, or complete the request with its last final stage.

    Anything but the output that the stage declares fails the request. `running` is the record's: it tells to whom the
    stage was leased, and when. Raises LeaseLost.
    """
    claim = done.claim
    state = context.stages.get(claim.stage)
    if state and (state.status, state.attempt, state.token, state.worker) == (
        "done", claim.attempt, claim.token, worker,
    ):  # fmt: skip
        return Change(context, claim)
    draft = _claimed(context, claim, worker, wall, running)
    if not _as_declared(context.plan.stage(claim.stage), done, worker):
        message = f"worker {worker} brought something else than stage {claim.stage} makes: is its version ours?"
        draft.error = ErrorInfo("stage_failed", message, claim.stage)
        return draft.end("failed", claim)
    queued_at = draft.stages[claim.stage].queued_at
    queued_s = sum(max(0.0, run.since - queued_at) for run in running if run.stage == claim.stage)
    timings = msgspec.structs.replace(done.timings, queued_s=queued_s)
    draft.move(
        claim.stage, "done", output=done.output, token=claim.token, timings=timings, checkpoint=None, checkpoint_step=0
    )
    draft.publish("stage_completed", claim.stage)
    result = tuple(sorted((*context.result, *done.results), key=lambda file: file.index))
    if all(draft.stages[stage.name].status == "done" for stage in context.plan.stages if stage.final):
        return draft.end("completed", claim, result=result)
    draft.queue_ready()
    return draft.change(claim, result=result)


def saved(context: RequestContext, saved: Saved, worker: str, running: Sequence[Running] = ()) -> Change | None:
    """A running stage can be resumed from there; None if a later step is known. Raises LeaseLost."""
    claim, ref = saved.claim, saved.checkpoint
    state = _current(context, claim, worker, running)
    if saved.step <= state.checkpoint_step and state.checkpoint is not None:
        return None
    if not _made_by(ref, claim, worker):
        raise LeaseLost(f"worker {worker} brought a checkpoint of {claim.stage} that is not its own")
    stages = context.stages | {claim.stage: msgspec.structs.replace(state, checkpoint=ref, checkpoint_step=saved.step)}
    return Change(msgspec.structs.replace(context, version=context.version + 1, stages=stages))


def failed(
    context: RequestContext, failed: Failed, worker: str, wall: float, queue_now: float, running: Sequence[Running] = ()
) -> Change:
    """A stage ended without outcome: try again what may succeed and is within its budget, else fail the request.

    A crash in company may have been another's doing: it is charged to nobody, and the stage is alone from then on.
    `running` is the record's: consumers of a lost object that run already are left alone, they may have read it.
    Raises LeaseLost, and ValueError for a hand-back, which is the queue's business.
    """
    claim, stage = failed.claim, failed.claim.stage
    draft = _claimed(context, claim, worker, wall, running)
    match failed.kind:
        case "transient":
            backoff = BACKOFF_S * 2 ** draft.stages[stage].failures
            return draft.charge("failures", stage, failed.message, failed.evidence).retry(claim, queue_now + backoff)
        case "crash" if failed.company and not draft.stages[stage].alone:
            draft.stages[stage] = msgspec.structs.replace(draft.stages[stage], alone=True)
            draft.publish("retrying", stage, failed.message)
            return draft.retry(claim)
        case "crash":
            return draft.charge("crashes", stage, failed.message, failed.evidence).retry(claim)
        case "object_lost":
            return _object_lost(draft, failed, {run.stage for run in running})
        case "permanent":
            draft.error = ErrorInfo("stage_failed", failed.message, stage, failed.evidence)
            return draft.end("failed", claim)
    raise ValueError("a task is handed back to the queue, not failed")


def turned_down(context: RequestContext, stage: str, message: str, wall: float) -> Change | None:
    """No worker is left to try a stage that several have handed back without a step. None if it is over, or done."""
    if context.over or context.stages[stage].status != "queued":
        return None
    draft = _Draft(context, wall)
    says = f"{GIVEN_UP} workers handed {stage} back again and again without beginning it; the last said: {message}"
    draft.error = ErrorInfo("handed_back", says, stage)
    return draft.end("failed", dead=True)


def expired_lease(context: RequestContext, lease: Lease, wall: float, running: Sequence[Running] = ()) -> Change | None:
    """A lease's time has passed: the stage is charged a failure and tried again at once. None if it was not held."""
    claim = lease.claim
    try:
        draft = _claimed(context, claim, lease.worker, wall, running)
    except LeaseLost:
        return None
    message = f"worker {lease.worker} was not heard of any more while it ran {claim.stage}"
    return draft.charge("failures", claim.stage, message).retry(claim)


def cancelled(context: RequestContext, wall: float) -> Change | None:
    """The client wants no more of it. None if it is over."""
    return None if context.over else _Draft(context, wall).end("cancelled")


def timed_out(context: RequestContext, wall: float) -> Change | None:
    """Its deadline has passed. None if it is over."""
    if context.over:
        return None
    draft = _Draft(context, wall)
    draft.error = ErrorInfo("expired", "the request was not complete at its deadline: allow it more time")
    return draft.end("expired")


def overran(context: RequestContext, wall: float, running: Sequence[Running] = ()) -> Change | None:
    """Its stages were leased for longer than it may take. None if they were not, or it is over.

    Time in queues does not count, nor do stages that ran side by side twice: it is the longest chain that does.
    """
    if context.over or context.limit_s is None:
        return None
    spent: dict[str, float] = {}
    for stage in context.plan.stages:  # in an order in which they could run
        now = sum(max(0.0, wall - run.since) for run in running if run.stage == stage.name)
        behind = max((spent[name] for name in stage.after), default=0.0)
        spent[stage.name] = behind + context.stages[stage.name].leased_s + now
    if max(spent.values()) <= context.limit_s:
        return None
    draft = _Draft(context, wall)
    took = f"its stages ran for longer than the {context.limit_s:.0f} s that it may take"
    draft.error = ErrorInfo("expired", f"{took}: ask for less, or have the server's limit raised")
    return draft.end("expired")


def retried(context: RequestContext) -> Change | None:
    """Somebody has looked at a dead request. None if it is dead no more."""
    return Change(msgspec.structs.replace(context, version=context.version + 1, dead=False)) if context.dead else None


class _Draft:
    """A change in the making. Every move of a stage or of the request is checked against its table."""

    def __init__(self, context: RequestContext, wall: float) -> None:
        self._before = context
        self._wall = wall
        self.stages = dict(context.stages)
        self.error: ErrorInfo | None = None
        self.close: list[tuple[str, str]] = []
        self.push: list[Task] = []
        self.events: list[Event] = []

    def move(self, stage: str, status: TaskStatus, **fields: Any) -> None:
        """Give a stage another status, and other fields with it."""
        state = self.stages[stage]
        _check(TASK_MOVES, f"stage {stage}", state.status, status)
        self.stages[stage] = msgspec.structs.replace(state, status=status, **fields)

    def publish(self, event: EventType, stage: str = "", message: str = "") -> None:
        state = self.stages.get(stage, StageState())
        self.events.append(Event(event, self._wall, stage, state.attempt, state.worker, message=message))

    def queue(self, stage: str, not_before: float = 0.0) -> None:
        """Make a task of a stage whose inputs exist, under its next attempt."""
        attempt = self.stages[stage].attempt + 1
        self.move(stage, "queued", attempt=attempt, queued_at=self._wall)
        request, planned = self._before, self._before.plan.stage(stage)
        outputs = [self.stages[name].output for name in planned.after]
        inputs = tuple(output for output in outputs if output is not None)
        params = request.params | planned.params
        self.push.append(
            Task(
                request=request.id,
                stage=stage,
                attempt=attempt,
                pool=planned.pool,
                kind=planned.kind,
                model=request.model,
                params=params,
                inputs=inputs,
                room=planned.room,
                needs=planned.needs,
                final=planned.final,
                priority=request.priority,
                order=request.order,
                not_before=not_before,
                deadline=request.deadline,
                near=_nearest(inputs),
                affinity=_affinity(request.model, params),
                alone=self.stages[stage].alone,
                cache=planned.cache,
            )
        )

    def queue_ready(self) -> None:
        """Queue every waiting stage whose inputs all exist."""
        for stage in self._before.plan.stages:
            if self.stages[stage.name].status == "waiting" and self.inputs_exist(stage.name):
                self.queue(stage.name)

    def inputs_exist(self, stage: str) -> bool:
        return all(self.stages[name].status == "done" for name in self._before.plan.stage(stage).after)

    def charge(self, charge: Charge, stage: str, message: str, evidence: str = "") -> _Draft:
        """Count what went wrong; beyond the budget it becomes the request's error."""
        count = getattr(self.stages[stage], charge) + 1
        self.stages[stage] = msgspec.structs.replace(self.stages[stage], **{charge: count})
        if count > BUDGETS[charge]:
            self.error = ErrorInfo(CODES[charge], f"{message} (given up after {count} times)", stage, evidence)
        else:
            self.publish("retrying", stage, message)
        return self

    def retry(self, claim: Claim, not_before: float = 0.0) -> Change:
        """Queue the claimed stage again, unless a charge was one too many. It waits for an input that is made again."""
        if self.error is not None:
            return self.end("failed", claim, dead=True)
        if self.inputs_exist(claim.stage):
            self.queue(claim.stage, not_before)
        else:
            self.move(claim.stage, "waiting")
        return self.change(claim)

    def end(self, status: RequestStatus, claim: Claim | None = None, **fields: Any) -> Change:
        """The request is over: nothing of it will run, and no object of it is needed."""
        event: dict[RequestStatus, EventType] = {"completed": "completed", "cancelled": "cancelled"}
        self.publish(event.get(status, "failed"), message=self.error.message if self.error else "")
        for name, state in self.stages.items():
            if state.status != "done":
                self.move(name, "cancelled")
            self.stages[name] = msgspec.structs.replace(self.stages[name], output=None, checkpoint=None)
        return self.change(claim, status, completed_at=self._wall, error=self.error, **fields)

    def change(self, claim: Claim | None, status: RequestStatus = "in_progress", **fields: Any) -> Change:
        if status != self._before.status:
            _check(REQUEST_MOVES, f"request {self._before.id}", self._before.status, status)
        context = self.context(self._before.version + 1, status=status, **fields)
        return Change(context, claim, tuple(self.close), tuple(self.push), tuple(self.events))

    def context(self, version: int, **fields: Any) -> RequestContext:
        return msgspec.structs.replace(self._before, version=version, stages=self.stages, **fields)


def _check(moves: dict[str, frozenset[str]], what: str, old: str, new: str) -> None:
    if new not in moves[old]:
        raise IllegalMove(f"{what} cannot go from {old} to {new}")


def held_by(worker: str, claim: Claim, running: Sequence[Running]) -> bool:
    """Whether a task is leased to that worker, by what its record says runs."""
    return any((run.stage, run.attempt, run.worker) == (claim.stage, claim.attempt, worker) for run in running)


def _claimed(
    context: RequestContext, claim: Claim, worker: str, wall: float, running: Sequence[Running] = ()
) -> _Draft:
    """A draft whose claimed stage is leased, as its claim says. Raises LeaseLost where that cannot be."""
    state = _current(context, claim, worker, running)
    draft = _Draft(context, wall)
    own = [run for run in running if run.stage == claim.stage]
    reached = max([state.reached, *(run.step / run.steps for run in own if run.steps)])
    leased_s = state.leased_s + sum(max(0.0, wall - run.since) for run in own)
    draft.move(claim.stage, "leased", attempt=claim.attempt, worker=worker, reached=reached, leased_s=leased_s)
    return draft


def _current(context: RequestContext, claim: Claim, worker: str, running: Sequence[Running]) -> StageState:
    """The state of a stage that may be leased, as its claim says. Raises LeaseLost where that cannot be."""
    state = context.stages.get(claim.stage)
    if context.over or state is None or state.status != "queued" or claim.attempt < state.attempt:
        raise LeaseLost(f"attempt {claim.attempt} of {claim.stage} of {context.id} is not current: drop what it made")
    if any(run.stage == claim.stage for run in running) and not held_by(worker, claim, running):
        raise LeaseLost(f"stage {claim.stage} of {context.id} is not leased to {worker}: drop what it made")
    return state


def _object_lost(draft: _Draft, failed: Failed, running: set[str]) -> Change:
    """Make a lost input again: its stage runs again once its own inputs exist, and those who would read it wait.

    A ref that is not the current output of any input changes no producer: the stage only gets the current refs. If no
    input was made again since it was queued, it is charged itself, so that a stage which keeps naming objects nobody
    knows comes to an end too.
    """
    before, consumer = draft.context(0), failed.claim.stage
    inputs = {name: before.stages[name] for name in before.plan.stage(consumer).after}
    lost = next((name for name, state in inputs.items() if state.output and state.output.id == failed.object_id), None)
    queued_at = before.stages[consumer].queued_at
    if lost is None and any(state.status != "done" or state.queued_at > queued_at for state in inputs.values()):
        draft.publish("retrying", consumer, failed.message)
    else:
        draft.charge("recomputes", lost or consumer, failed.message, failed.evidence)
    if draft.error is not None:
        return draft.end("failed", failed.claim, dead=True)
    draft.move(consumer, "waiting")
    if lost is not None:
        draft.move(lost, "waiting", output=None, token=b"", reached=1.0)
        for reader in before.plan.consumers(lost):
            if draft.stages[reader.name].status == "queued" and reader.name not in running:
                draft.move(reader.name, "waiting")
                draft.close.append((before.id, reader.name))
    draft.queue_ready()
    return draft.change(failed.claim)


def _as_declared(stage: PlannedStage, done: Done, worker: str) -> bool:
    """Whether a final stage brought results, and any other one the object that this worker made in this attempt."""
    if stage.final:
        return bool(done.results) and done.output is None
    return not done.results and done.output is not None and _made_by(done.output, done.claim, worker)


def _made_by(ref: ObjectRef, claim: Claim, worker: str) -> bool:
    """Whether an object is one that this attempt at this stage can have made."""
    made = ref.request, ref.stage, ref.attempt, ref.owner
    return 0 <= ref.nbytes <= EXACT and made == (claim.request, claim.stage, claim.attempt, worker)


def _nearest(inputs: Sequence[ObjectRef]) -> str:
    """The node that holds most bytes of these objects."""
    held: Counter[str] = Counter()
    for ref in inputs:
        held[ref.node] += ref.nbytes
    return max(held, key=held.__getitem__, default="")


def _affinity(model: str, params: Params) -> str:
    """What tasks have in common that may share a forward: the model, the size of what is made, the adapter."""
    size = [params[name] for name in ("width", "height", "num_frames") if name in params]
    return f"{model} {size} {params.get('lora_id', '')}".rstrip() if size else ""
