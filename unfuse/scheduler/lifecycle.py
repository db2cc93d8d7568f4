"""What happens next in a request: pure transitions, (context, what happened, when) → Change. No I/O, and no clock.

A leased stage is "queued" in its context, or "announced", since leases live beside contexts; that it was leased is
proven by the claim it is reported with, which the queue checks when the change is committed. `wall` is Unix seconds,
`queue_now` seconds of the queue's clock. Nothing here changes a context that is over: a report about it raises
LeaseLost, unless it repeats the one that completed its stage, and everything else is answered with None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from unfuse.core.errors import LeaseLost
from unfuse.core.event import Event
from unfuse.core.messages import REFUSED, Announced, Done, Failed, Saved, Stopped
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import ExecutionPlan, PlannedStage
from unfuse.core.request import (
    MODERATION_BLOCKED,
    Change,
    ErrorInfo,
    RequestContext,
    ResultFile,
    Running,
    StageState,
    Timings,
)
from unfuse.core.task import Claim, Lease, Task
from unfuse.core.usage import believable, newest
from unfuse.queues.base import EXACT
from unfuse.scheduler import accounting, waking
from unfuse.scheduler.draft import Draft

HasOther = Callable[[str, str], bool]
"""`(pool, worker) -> bool`: whether the pool has another live worker than this one."""

BEGUN = ("queued", "announced")  # what a stage that runs can be in its context
BLAMELESS = frozenset({"drain", "preempted", "full", "producer", "compute"})  # why a task may be handed back at will
ALL_FLAGGED = "the model's safety checker flagged all results: change the prompt, or try another seed"
GIVEN_UP = 3  # a task that so many workers get no more, because each handed it back again and again, is dead
WEIGHTS_CHANGED = "weights_changed"  # the error code of a request whose model's files have changed since loading
MODEL_FAILED = "model_failed"  # the error code of a request whose model was added and cannot be served
BACKOFF_S = 0.5  # wait before the first retry of a transient failure; each further one waits twice as long


def admitted(
    context: RequestContext,
    wall: float,
    cached: Mapping[str, ObjectRef] | None = None,
    leaders: Mapping[str, str] | None = None,
) -> Change:
    """The first tasks of a new request: every stage that reads nothing. The version stays as it is.

    Stages whose output is `cached`, by name, are done without having run. Those with `leaders` wait for these requests.
    """
    stages = {stage.name: StageState(follows=(leaders or {}).get(stage.name, "")) for stage in context.plan.stages}
    draft = Draft(msgspec.structs.replace(context, stages=stages), wall)
    draft.publish("queued")
    for name, output in (cached or {}).items():
        draft.take(name, output)
    draft.queue_ready()
    return Change(draft.context(version=context.version), push=tuple(draft.push), events=tuple(draft.events))


def reused(context: RequestContext, result: tuple[ResultFile, ...], wall: float) -> Change:
    """A new request that has these results: it is over, and nothing of it ran."""
    stages = {stage.name: StageState("done") for stage in context.plan.stages}
    over = msgspec.structs.replace(
        context, stages=stages, status="completed", result=result, created_at=wall, completed_at=wall
    )
    return Change(over, events=(Event("queued", wall), Event("completed", wall, message="reused")))


def followed(context: RequestContext, stage: str, output: ObjectRef | None, wall: float) -> Change | None:
    """A stage waits no longer for another request: it has the output now, or runs itself. None if it did not wait."""
    if context.over or not context.stages[stage].follows:
        return None
    draft = Draft(context, wall)
    draft.stages[stage] = msgspec.structs.replace(draft.stages[stage], follows="")
    if output is not None:
        draft.take(stage, output)
    draft.queue_ready()
    return draft.change(None, context.status)


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
    run = _attempt(claim, worker, done.timings, running)
    if not _as_declared(context.plan.stage(claim.stage), done, worker):
        draft.account(run, is_billed=False, is_final=True)
        message = f"worker {worker} brought something else than stage {claim.stage} makes: is its version ours?"
        draft.error = ErrorInfo("stage_failed", message, claim.stage)
        return draft.end("failed", claim)
    queued_at = draft.stages[claim.stage].queued_at
    queued_s = sum(max(0.0, run.since - queued_at) for run in running if run.stage == claim.stage)
    steps = done.timings.steps + done.timings.resumed or run.steps
    draft.account(msgspec.structs.replace(run, step=steps, steps=steps), is_billed=True, is_final=True)
    timings = msgspec.structs.replace(believable(run.timings, wall - context.created_at), queued_s=queued_s)
    draft.move(
        claim.stage, "done", output=done.output, token=claim.token, timings=timings, checkpoint=None, checkpoint_step=0
    )
    draft.publish("stage_completed", claim.stage)
    result = tuple(sorted((*context.result, *done.results), key=lambda file: file.index))
    if all(draft.stages[stage.name].status == "done" for stage in context.plan.stages if stage.final):
        if all(file.flagged for file in result):
            draft.error = ErrorInfo(MODERATION_BLOCKED, ALL_FLAGGED, claim.stage)
        return draft.end("failed" if draft.error else "completed", claim, result=result)
    draft.queue_ready()
    return draft.change(claim, result=result)


def saved(context: RequestContext, saved: Saved, worker: str, running: Sequence[Running] = ()) -> Change | None:
    """A running stage can be resumed from there; None if a later step of this attempt is known. Raises LeaseLost.

    A checkpoint of an earlier attempt that is further could not be read, or this one would have gone on from it.
    """
    claim, ref = saved.claim, saved.checkpoint
    state = _current(context, claim, worker, running)
    known = state.checkpoint
    if known is not None and known.attempt == claim.attempt and saved.step <= state.checkpoint_step:
        return None
    if not _made_by(ref, claim, worker):
        raise LeaseLost(f"worker {worker} brought a checkpoint of {claim.stage} that is not its own")
    stages = context.stages | {claim.stage: msgspec.structs.replace(state, checkpoint=ref, checkpoint_step=saved.step)}
    return Change(msgspec.structs.replace(context, version=context.version + 1, stages=stages))


def announced(
    context: RequestContext, news: Announced, worker: str, wall: float, running: Sequence[Running] = ()
) -> Change | None:
    """Queue what reads a running stage's output as it grows; its lease stays. None if known. Raises LeaseLost."""
    claim, ref = news.claim, news.output
    state = _current(context, claim, worker, running)
    if not held_by(worker, claim, running) or not _made_by(ref, claim, worker):
        raise LeaseLost(f"worker {worker} announced an output of {claim.stage} that is not its own")
    if state.output is not None and state.output.id == ref.id:
        return None
    draft = _claimed(context, claim, worker, wall)
    draft.running = running
    draft.withdraw(claim.stage)
    draft.move(claim.stage, "announced", output=ref)
    draft.queue_ready()
    return draft.change(None)


def handed_back(
    context: RequestContext,
    claim: Claim,
    worker: str,
    wall: float,
    running: Sequence[Running] = (),
    timings: Timings | None = None,
) -> Change | None:
    """A running stage is about to go back to its queue: what it has announced, if anything, comes to nothing.

    What the attempt has used is lost. None if that is recorded already.
    """
    state = context.stages.get(claim.stage)
    if state is None or context.over or not held_by(worker, claim, running):
        return None
    run = _attempt(claim, worker, timings or Timings(), running)
    if state.status != "announced" and claim.attempt <= state.accounted:
        return None
    draft = Draft(context, wall, running)
    _lose(draft, run)
    if state.status == "announced":
        draft.move(claim.stage, "queued")
        draft.withdraw(claim.stage)
    return draft.change(None, context.status)


def began(context: RequestContext, running: Sequence[Running]) -> Change | None:
    """Record when the first stage was leased, since leases may end without a change. None if that is known."""
    if context.over or context.started_at is not None or not running:
        return None
    return Draft(context, 0.0, running).change(None, context.status)


def stopped(
    context: RequestContext, stopped: Stopped, worker: str, wall: float, running: Sequence[Running] = ()
) -> Change | None:
    """A worker says what an attempt has used that holds its lease no longer. None if that is known already.

    An attempt that is `running` is counted when it ends.
    """
    claim = stopped.claim
    if (claim.stage, claim.attempt) in {(run.stage, run.attempt) for run in running}:
        return None
    state = accounting.reported(context, stopped, worker, wall)
    if state is None:
        return None
    stages = context.stages | {claim.stage: state}
    return Change(msgspec.structs.replace(context, version=context.version + 1, stages=stages))


def failed(
    context: RequestContext,
    failed: Failed,
    worker: str,
    wall: float,
    queue_now: float,
    running: Sequence[Running] = (),
    has_other: bool = False,
) -> Change:
    """A stage ended without outcome: try again what may succeed and is within its budget, else fail the request.

    A crash in company may have been another's doing: it is charged to nobody, and the stage is alone from then on.
    `running` is the record's: consumers of a lost object that run already are left alone, they may have read it.
    `has_other` says whether another worker could run the stage. Raises LeaseLost, and ValueError for a hand-back, which
    the queue handles.
    """
    claim, stage = failed.claim, failed.claim.stage
    draft = _claimed(context, claim, worker, wall, running)
    run, is_refused = _attempt(claim, worker, failed.timings, running), failed.reason == REFUSED
    if failed.kind == "object_lost":
        _lose(draft, run)
    else:
        draft.account(run, is_billed=failed.kind == "permanent" and is_refused, is_final=True)
    match failed.kind:
        case "transient" if failed.error:
            return _unknown_error(draft, failed, worker, has_other)
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
            code = "invalid_parameter" if failed.reason == REFUSED else "stage_failed"
            draft.error = ErrorInfo(code, failed.message, stage, failed.evidence)
            return draft.end("failed", claim)
    raise ValueError("a task is handed back to the queue, not failed")


def turned_down(
    context: RequestContext, stage: str, message: str, wall: float, running: Sequence[Running] = ()
) -> Change | None:
    """No worker is left to try a stage that several have handed back without a step. None if it is over, or done."""
    if context.over or context.stages[stage].status != "queued":
        return None
    draft = Draft(context, wall, running)
    says = f"{GIVEN_UP} workers handed {stage} back again and again without beginning it; the last said: {message}"
    draft.error = ErrorInfo("handed_back", says, stage)
    return draft.end("failed", dead=True)


def unavailable(
    context: RequestContext, changed: Callable[[str], str], wall: float, running: Sequence[Running] = ()
) -> Change | None:
    """Fail a request that needs a pool without workers, if a changed model file is the reason. None otherwise.

    `changed` returns that reason for a pool, "" for any other reason. Running stages do not count: they may complete.
    """
    runs = {run.stage for run in running}
    left = [] if context.over else [stage for stage in context.plan.stages if stage.name not in runs]
    for stage in left:
        if context.stages[stage.name].status != "done" and (reason := changed(stage.pool)):
            draft = Draft(context, wall, running)
            draft.error = ErrorInfo(WEIGHTS_CHANGED, reason, stage.name)
            return draft.end("failed", dead=True)
    return None


def unserved(context: RequestContext, reason: str, wall: float, running: Sequence[Running] = ()) -> Change | None:
    """Fail a request whose model cannot be served, for this reason. None if it is over."""
    if context.over:
        return None
    draft = Draft(context, wall, running)
    draft.error = ErrorInfo(MODEL_FAILED, f"the model cannot be served: {reason}")
    return draft.end("failed", dead=True)


def expired_lease(context: RequestContext, lease: Lease, wall: float, running: Sequence[Running] = ()) -> Change | None:
    """A lease's time has passed: the stage is charged a failure and tried again at once. None if it was not held."""
    claim = lease.claim
    try:
        draft = _claimed(context, claim, lease.worker, wall, running)
    except LeaseLost:
        return None
    draft.account(_attempt(claim, lease.worker, Timings(), running), is_billed=False)
    message = f"worker {lease.worker} was not heard of any more while it ran {claim.stage}"
    return draft.charge("failures", claim.stage, message).retry(claim)


def cancelled(context: RequestContext, wall: float, running: Sequence[Running] = ()) -> Change | None:
    """The client wants no more of it. None if it is over."""
    return None if context.over else Draft(context, wall, running).end("cancelled")


def client_disconnected(context: RequestContext, wall: float, running: Sequence[Running] = ()) -> Change | None:
    """Cancel a request whose client disconnected. None if it is over, or does not end with its client."""
    if context.over or not context.caller.cancel_on_disconnect:
        return None
    draft = Draft(context, wall, running)
    draft.error = ErrorInfo("cancelled", "its client disconnected")
    return draft.end("cancelled")


def timed_out(
    context: RequestContext,
    wall: float,
    queue_now: float = math.inf,
    wake_limit: float = 0.0,
    running: Sequence[Running] = (),
) -> Change | None:
    """Its deadline has passed. None if it is over, or its deadline was moved, or moves: it waits for a pool to wake."""
    if context.over or (waking.due(context, wake_limit) or queue_now) > queue_now:
        return None
    draft = Draft(context, wall, running)
    asleep = [stage.pool for stage in context.plan.stages if context.stages[stage.name].sleeps]
    why = f"; {asleep[0]} slept, and was not awake within the {wake_limit:.0f} s of --wake-limit" if asleep else ""
    draft.error = ErrorInfo("expired", f"the request was not complete at its deadline: allow it more time{why}")
    return draft.end("expired")


def overran(context: RequestContext, wall: float, running: Sequence[Running] = ()) -> Change | None:
    """Its stages were leased for longer than it may take. None if they were not, or it is over.

    Time in queues does not count, nor do stages that ran side by side twice: it is the longest chain that does. Nor do
    gaps in which no scheduler worked, and steps of clocks: see `TaskQueue.expired`.
    """
    if context.over or context.request.time_limit_s is None:
        return None
    spent: dict[str, float] = {}
    for stage in context.plan.stages:  # in an order in which they could run
        now = sum(run.ran_s for run in running if run.stage == stage.name)
        behind = max((spent[name] for name in stage.after), default=0.0)
        spent[stage.name] = behind + context.stages[stage.name].leased_s + now
    if max(spent.values()) <= context.request.time_limit_s:
        return None
    draft = Draft(context, wall, running)
    took = f"its stages ran for longer than the {context.request.time_limit_s:.0f} s that it may take"
    draft.error = ErrorInfo("expired", f"{took}: ask for less, or have the server's limit raised")
    return draft.end("expired")


def retried(context: RequestContext) -> Change | None:
    """Somebody has looked at a dead request. None if it is dead no more."""
    return Change(msgspec.structs.replace(context, version=context.version + 1, dead=False)) if context.dead else None


def placed(change: Change, home: Callable[[str], str]) -> Change:
    """The change with what it queues in the pools where that is at `home` now.

    Workers of another pool make other bytes: nothing of what an earlier attempt left is gone on from there.
    """
    pools = {task.stage: pool for task in change.push if (pool := home(task.planned.pool)) != task.planned.pool}
    if not pools:
        return change
    replace, context = msgspec.structs.replace, change.context
    fresh = {name: replace(context.stages[name], checkpoint=None, checkpoint_step=0) for name in pools}
    context = replace(context, plan=context.plan.moved(pools), stages=context.stages | fresh)
    push = tuple(_replanned(task, context.plan) for task in change.push)
    return replace(change, context=context, push=push)


def _replanned(task: Task, plan: ExecutionPlan) -> Task:
    """The task as the plan has its stage now; its room may have been learned."""
    planned = msgspec.structs.replace(plan.stage(task.stage), room=task.planned.room)
    return msgspec.structs.replace(task, planned=planned)


def moved(
    context: RequestContext, home: Callable[[str], str], wall: float, running: Sequence[Running] = (),
    asleep: Collection[str] = (), wake_limit: float = 0.0, has_other: HasOther = lambda _pool, _worker: True,
) -> Change | None:  # fmt: skip
    """Tasks that wait in vain go where they are at home, as the attempt that they are; so do those whose place moved
    with the deadline, because a pool slept, and those that avoid the only worker that is left. None if there are no
    such tasks.

    What runs is left alone.
    """
    states = context.stages
    leased, awaits = {run.stage for run in running}, waking.waiting(context, asleep, wall, wake_limit)
    waiting = [stage for stage in context.plan.stages if context.stages[stage.name].status == "queued"]
    moves = [stage for stage in waiting if home(stage.pool) != stage.pool or awaits.order != context.order]
    alone = {stage.name for stage in waiting if (id := states[stage.name].avoids) and not has_other(stage.pool, id)}
    strays = [stage.name for stage in waiting if stage.name not in leased and (stage in moves or stage.name in alone)]
    if context.over or (awaits is context and not strays):
        return None
    draft = Draft(awaits, wall)
    for name in strays:
        before = context.stages[name]
        draft.move(name, "waiting", attempt=before.attempt - 1, avoids="" if name in alone else before.avoids)
        draft.queue(name, queued_at=before.queued_at)
    return placed(draft.change(None, context.status), home)


def held_by(worker: str, claim: Claim, running: Sequence[Running]) -> bool:
    """Whether a task is leased to that worker, by what its record says runs."""
    return any((run.stage, run.attempt, run.worker) == (claim.stage, claim.attempt, worker) for run in running)


def _claimed(context: RequestContext, claim: Claim, worker: str, wall: float, running: Sequence[Running] = ()) -> Draft:
    """A draft whose claimed stage is leased, as its claim says. Raises LeaseLost where that cannot be."""
    state = _current(context, claim, worker, running)
    draft = Draft(context, wall, running)
    own = [run for run in running if run.stage == claim.stage]
    reached = max([state.reached, *(run.step / run.steps for run in own if run.steps)])
    leased_s = state.leased_s + sum(run.ran_s for run in own)
    draft.move(claim.stage, "leased", attempt=claim.attempt, worker=worker, reached=reached, leased_s=leased_s)
    return draft


def _attempt(claim: Claim, worker: str, timings: Timings, running: Sequence[Running]) -> Running:
    """An attempt that ends, with the `timings` that its worker reports; the record may know of more, or of nothing."""
    known = [run for run in running if (run.stage, run.attempt) == (claim.stage, claim.attempt)]
    run = known[0] if known else Running(claim.stage, claim.attempt, worker, 0.0)
    return msgspec.structs.replace(run, timings=newest(run.timings, timings))


def _lose(draft: Draft, run: Running) -> None:
    """Count an attempt as lost, or as one that did not begin."""
    if run.step > 0 or run.timings.device_s > 0:
        draft.account(run, is_billed=False, is_final=True)
    else:
        draft.stages[run.stage] = accounting.not_begun(draft.stages[run.stage], run.attempt)


def _current(context: RequestContext, claim: Claim, worker: str, running: Sequence[Running]) -> StageState:
    """The state of a stage that may be leased, as its claim says. Raises LeaseLost where that cannot be."""
    state = context.stages.get(claim.stage)
    if context.over or state is None or state.status not in BEGUN or claim.attempt < state.attempt:
        raise LeaseLost(f"attempt {claim.attempt} of {claim.stage} of {context.id} is not current: drop what it made")
    if any(run.stage == claim.stage for run in running) and not held_by(worker, claim, running):
        raise LeaseLost(f"stage {claim.stage} of {context.id} is not leased to {worker}: drop what it made")
    return state


def _object_lost(draft: Draft, failed: Failed, running: set[str]) -> Change:
    """Make a lost input again: its stage runs again once its own inputs exist, and those who would read it wait.

    One that is only announced is announced no more: its maker goes on with it, or will be found dead. A ref that is not
    the current output of any input changes no producer: the stage only gets the current refs. If no input was made
    again since it was queued, it is charged itself, so that a stage which keeps naming objects nobody knows comes to an
    end too.
    """
    before, consumer = draft.context(0), failed.claim.stage
    inputs = {name: before.stages[name] for name in before.plan.stage(consumer).after}
    lost = next((name for name, state in inputs.items() if state.output and state.output.id == failed.object_id), None)
    queued_at = before.stages[consumer].queued_at
    is_announced = lost is not None and inputs[lost].status == "announced"
    made_since = any(state.status != "done" or state.queued_at > queued_at for state in inputs.values())
    if is_announced or (lost is None and made_since):
        draft.publish("retrying", consumer, failed.message)
    else:
        draft.charge("recomputes", lost or consumer, failed.message, failed.evidence)
    if draft.error is not None:
        return draft.end("failed", failed.claim, dead=True)
    draft.withdraw(consumer)
    draft.move(consumer, "waiting")
    if lost is not None and is_announced:
        draft.move(lost, "queued")
        draft.withdraw(lost)
    elif lost is not None:
        draft.stages[lost] = accounting.lose_output(draft.stages[lost])
        draft.move(lost, "waiting", token=b"", reached=1.0, lost=failed.object_id)
        draft.withdraw(lost, running)
    draft.queue_ready()
    return draft.change(failed.claim)


def _unknown_error(draft: Draft, failed: Failed, worker: str, has_other: bool) -> Change:
    """Retry a stage, on another worker if there is one, unless it failed with the same type of exception before."""
    stage = failed.claim.stage
    state = draft.stages[stage]
    if state.failed_with == failed.error:
        message = f"failed twice, on {state.failed_on} and {worker}: {failed.message}"
        draft.error = ErrorInfo("model_error", message, stage, failed.evidence)
        return draft.end("failed", failed.claim, dead=True)
    avoids = worker if has_other else ""
    draft.stages[stage] = msgspec.structs.replace(state, failed_with=failed.error, failed_on=worker, avoids=avoids)
    return draft.charge("failures", stage, failed.message, failed.evidence).retry(failed.claim)


def _as_declared(stage: PlannedStage, done: Done, worker: str) -> bool:
    """Whether a final stage brought results, and any other one the object that this worker made in this attempt."""
    if stage.final:
        return bool(done.results) and done.output is None
    return not done.results and done.output is not None and _made_by(done.output, done.claim, worker)


def _made_by(ref: ObjectRef, claim: Claim, worker: str) -> bool:
    """Whether an object is one that this attempt at this stage can have made."""
    made = ref.request, ref.stage, ref.attempt, ref.owner
    return 0 <= ref.nbytes <= EXACT and made == (claim.request, claim.stage, claim.attempt, worker)
