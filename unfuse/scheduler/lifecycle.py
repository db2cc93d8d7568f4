"""What happens next in a request: pure transitions, (context, what happened, when) → Change. No I/O, and no clock.

A leased stage is "queued" in its context, or "announced", since leases live beside contexts; that it was leased is
proven by the claim it is reported with, which the queue checks when the change is committed. `wall` is Unix seconds,
`queue_now` seconds of the queue's clock. Nothing here changes a context that is over: a report about it raises
LeaseLost, unless it repeats the one that completed its stage, and everything else is answered with None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec.structs import replace

from unfuse.core.errors import LeaseLost
from unfuse.core.messages import (
    REFUSED,
    ChangedFile,
    CheckpointSaved,
    OutputAnnounced,
    TaskCompleted,
    TaskFailed,
    TaskStopped,
)
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import ExecutionPlan, PlannedStage, declared
from unfuse.core.request import (
    MODERATION_BLOCKED,
    Change,
    ErrorInfo,
    Event,
    RequestContext,
    ResultFile,
    RunningStage,
    StageState,
    Timings,
    Waking,
    believable,
    newest,
)
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import EXACT
from unfuse.scheduler.change_builder import ChangeBuilder, account_not_begun, account_report, lose_output

HasOther = Callable[[str, str], bool]
"""`(pool, worker) -> bool`: whether the pool has another live worker than this one."""

BEGUN = ("queued", "announced")  # what a stage that runs can be in its context
BLAMELESS = frozenset({"drain", "preempted", "full", "producer", "compute"})  # why a task may be handed back at will
ALL_FLAGGED = "the model's safety checker flagged all results: change the prompt, or try another seed"
GIVEN_UP = 3  # a task that so many workers get no more, because each handed it back again and again, is dead
WEIGHTS_CHANGED = "weights_changed"  # the error code of a request whose model's files have changed since loading
MODEL_FAILED = "model_failed"  # the error code of a request whose model was added and cannot be served
USUAL_WAKING_S = 300.0  # seconds that waking a pool is said to take before it was seen: the chart's `coldStartSeconds`
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
    builder = ChangeBuilder(replace(context, stages=stages), wall)
    builder.publish("queued")
    for name, output in (cached or {}).items():
        builder.take(name, output)
    builder.queue_ready()
    return Change(builder.context(version=context.version), push=tuple(builder.push), events=tuple(builder.events))


def reused(context: RequestContext, result: tuple[ResultFile, ...], wall: float) -> Change:
    """A new request that has these results: it is over, and nothing of it ran."""
    stages = {stage.name: StageState("done") for stage in context.plan.stages}
    over = replace(context, stages=stages, status="completed", result=result, created_at=wall, completed_at=wall)
    return Change(over, events=(Event("queued", wall), Event("completed", wall, message="reused")))


def followed(context: RequestContext, stage: str, output: ObjectRef | None, wall: float) -> Change | None:
    """A stage waits no longer for another request: it has the output now, or runs itself. None if it did not wait."""
    if context.over or not context.stages[stage].follows:
        return None
    builder = ChangeBuilder(context, wall)
    builder.stages[stage] = replace(builder.stages[stage], follows="")
    if output is not None:
        builder.take(stage, output)
    builder.queue_ready()
    return builder.change(None, context.status)


def completed(
    context: RequestContext, done: TaskCompleted, worker: str, wall: float, running: Sequence[RunningStage] = ()
) -> Change:
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
    builder = _claimed(context, claim, worker, wall, running)
    run = _attempt(claim, worker, done.timings, running)
    if not _as_declared(context.plan.stage(claim.stage), done, worker):
        builder.account(run, is_billed=False, is_final=True)
        message = f"worker {worker} brought something else than stage {claim.stage} makes: is its version ours?"
        return builder.end("failed", ErrorInfo("stage_failed", message, claim.stage), claim)
    queued_at = builder.stages[claim.stage].queued_at
    queued_s = sum(max(0.0, run.since - queued_at) for run in running if run.stage == claim.stage)
    steps = done.timings.steps + done.timings.resumed or run.steps
    builder.account(replace(run, step=steps, steps=steps), is_billed=True, is_final=True)
    timings = replace(believable(run.timings, wall - context.created_at), queued_s=queued_s)
    builder.move(
        claim.stage, "done", output=done.output, token=claim.token, timings=timings, checkpoint=None, checkpoint_step=0
    )
    builder.publish("stage_completed", claim.stage)
    result = tuple(sorted((*context.result, *done.results), key=lambda file: file.index))
    if all(builder.stages[stage.name].status == "done" for stage in context.plan.stages if stage.final):
        if all(file.flagged for file in result):
            error = ErrorInfo(MODERATION_BLOCKED, ALL_FLAGGED, claim.stage)
            return builder.end("failed", error, claim, result=result)
        return builder.end("completed", None, claim, result=result)
    builder.queue_ready()
    return builder.change(claim, result=result)


def saved(
    context: RequestContext, saved: CheckpointSaved, worker: str, running: Sequence[RunningStage] = ()
) -> Change | None:
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
    stages = context.stages | {claim.stage: replace(state, checkpoint=ref, checkpoint_step=saved.step)}
    return Change(replace(context, version=context.version + 1, stages=stages))


def announced(
    context: RequestContext, news: OutputAnnounced, worker: str, wall: float, running: Sequence[RunningStage] = ()
) -> Change | None:
    """Queue what reads a running stage's output as it grows; its lease stays. None if known. Raises LeaseLost."""
    claim, ref = news.claim, news.output
    state = _current(context, claim, worker, running)
    if not held_by(worker, claim, running) or not _made_by(ref, claim, worker):
        raise LeaseLost(f"worker {worker} announced an output of {claim.stage} that is not its own")
    if state.output is not None and state.output.id == ref.id:
        return None
    builder = _claimed(context, claim, worker, wall)
    builder.running = running
    builder.withdraw(claim.stage)
    builder.move(claim.stage, "announced", output=ref)
    builder.queue_ready()
    return builder.change(None)


def handed_back(
    context: RequestContext,
    claim: Claim,
    worker: str,
    wall: float,
    running: Sequence[RunningStage] = (),
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
    builder = ChangeBuilder(context, wall, running)
    _lose(builder, run)
    if state.status == "announced":
        builder.move(claim.stage, "queued")
        builder.withdraw(claim.stage)
    return builder.change(None, context.status)


def began(context: RequestContext, running: Sequence[RunningStage]) -> Change | None:
    """Record when the first stage was leased, since leases may end without a change. None if that is known."""
    if context.over or context.started_at is not None or not running:
        return None
    return ChangeBuilder(context, 0.0, running).change(None, context.status)


def stopped(
    context: RequestContext, stopped: TaskStopped, worker: str, wall: float, running: Sequence[RunningStage] = ()
) -> Change | None:
    """A worker says what an attempt has used that holds its lease no longer. None if that is known already.

    An attempt that is `running` is counted when it ends.
    """
    claim = stopped.claim
    if (claim.stage, claim.attempt) in {(run.stage, run.attempt) for run in running}:
        return None
    state = account_report(context, stopped, worker, wall)
    if state is None:
        return None
    stages = context.stages | {claim.stage: state}
    return Change(replace(context, version=context.version + 1, stages=stages))


def failed(
    context: RequestContext,
    failed: TaskFailed,
    worker: str,
    wall: float,
    queue_now: float,
    running: Sequence[RunningStage] = (),
    has_other: bool = False,
) -> Change:
    """A stage ended without outcome: try again what may succeed and is within its budget, else fail the request.

    A crash in company may have been another's doing: it is charged to nobody, and the stage is alone from then on.
    `running` is the record's: consumers of a lost object that run already are left alone, they may have read it.
    `has_other` says whether another worker could run the stage. Raises LeaseLost, and ValueError for a hand-back, which
    the queue handles.
    """
    claim, stage = failed.claim, failed.claim.stage
    builder = _claimed(context, claim, worker, wall, running)
    run, is_refused = _attempt(claim, worker, failed.timings, running), failed.reason == REFUSED
    if failed.kind == "object_lost":
        _lose(builder, run)
    else:
        builder.account(run, is_billed=failed.kind == "permanent" and is_refused, is_final=True)
    match failed.kind:
        case "transient" if failed.error:
            return _unknown_error(builder, failed, worker, has_other)
        case "transient":
            backoff = BACKOFF_S * 2 ** builder.stages[stage].failures
            return builder.charge("failures", stage, failed.message, failed.evidence).retry(claim, queue_now + backoff)
        case "crash" if failed.company and not builder.stages[stage].alone:
            builder.stages[stage] = replace(builder.stages[stage], alone=True)
            builder.publish("retrying", stage, failed.message)
            return builder.retry(claim)
        case "crash":
            return builder.charge("crashes", stage, failed.message, failed.evidence).retry(claim)
        case "object_lost":
            return _object_lost(builder, failed, {run.stage for run in running})
        case "permanent":
            code = "invalid_parameter" if failed.reason == REFUSED else "stage_failed"
            return builder.end("failed", ErrorInfo(code, failed.message, stage, failed.evidence), claim)
    raise ValueError("a task is handed back to the queue, not failed")


def turned_down(
    context: RequestContext, stage: str, message: str, wall: float, running: Sequence[RunningStage] = ()
) -> Change | None:
    """No worker is left to try a stage that several have handed back without a step. None if it is over, or done."""
    if context.over or context.stages[stage].status != "queued":
        return None
    says = f"{GIVEN_UP} workers handed {stage} back again and again without beginning it; the last said: {message}"
    return ChangeBuilder(context, wall, running).end("failed", ErrorInfo("handed_back", says, stage), dead=True)


def unavailable(
    context: RequestContext,
    changed: Callable[[str], ChangedFile | None],
    wall: float,
    running: Sequence[RunningStage] = (),
) -> Change | None:
    """Fail a request that needs a pool without workers, if a changed model file is the reason. None otherwise.

    `changed` returns the file because of which a pool has no workers. Running stages do not count: they may complete.
    """
    runs = {run.stage for run in running}
    left = [] if context.over else [stage for stage in context.plan.stages if stage.name not in runs]
    for stage in left:
        if context.stages[stage.name].status != "done" and (file := changed(stage.pool)) and file.compared:
            error = ErrorInfo(WEIGHTS_CHANGED, str(file), stage.name)
            return ChangeBuilder(context, wall, running).end("failed", error, dead=True)
    return None


def unserved(context: RequestContext, reason: str, wall: float, running: Sequence[RunningStage] = ()) -> Change | None:
    """Fail a request whose model cannot be served, for this reason. None if it is over."""
    if context.over:
        return None
    error = ErrorInfo(MODEL_FAILED, f"the model cannot be served: {reason}")
    return ChangeBuilder(context, wall, running).end("failed", error, dead=True)


def expired_lease(
    context: RequestContext, lease: Lease, wall: float, running: Sequence[RunningStage] = ()
) -> Change | None:
    """A lease's time has passed: the stage is charged a failure and tried again at once. None if it was not held."""
    claim = lease.claim
    try:
        builder = _claimed(context, claim, lease.worker, wall, running)
    except LeaseLost:
        return None
    builder.account(_attempt(claim, lease.worker, Timings(), running), is_billed=False)
    message = f"worker {lease.worker} was not heard of any more while it ran {claim.stage}"
    return builder.charge("failures", claim.stage, message).retry(claim)


def cancelled(context: RequestContext, wall: float, running: Sequence[RunningStage] = ()) -> Change | None:
    """The client wants no more of it. None if it is over."""
    return None if context.over else ChangeBuilder(context, wall, running).end("cancelled")


def client_disconnected(context: RequestContext, wall: float, running: Sequence[RunningStage] = ()) -> Change | None:
    """Cancel a request whose client disconnected. None if it is over, or does not end with its client."""
    if context.over or not context.caller.cancel_on_disconnect:
        return None
    error = ErrorInfo("cancelled", "its client disconnected")
    return ChangeBuilder(context, wall, running).end("cancelled", error)


def timed_out(
    context: RequestContext,
    wall: float,
    queue_now: float = math.inf,
    wake_limit: float = 0.0,
    running: Sequence[RunningStage] = (),
) -> Change | None:
    """Its deadline has passed. None if it is over, or its deadline was moved, or moves: it waits for a pool to wake."""
    if context.over or (latest_end(context, wake_limit) or queue_now) > queue_now:
        return None
    asleep = [stage.pool for stage in context.plan.stages if context.stages[stage.name].sleeps]
    why = f"; {asleep[0]} slept, and was not awake within the {wake_limit:.0f} s of --wake-limit" if asleep else ""
    error = ErrorInfo("expired", f"the request was not complete at its deadline: allow it more time{why}")
    return ChangeBuilder(context, wall, running).end("expired", error)


def await_waking(context: RequestContext, asleep: Collection[str], wall: float, limit_s: float = 0.0) -> RequestContext:
    """The request with the stages that wait for a pool which sleeps marked so; itself if they are.

    Its deadline moves by the longest that a stage has waited for one that is awake now, up to the limit; so does its
    place in line, where that is its deadline. A stage that waits once more moves it by what is longer than before.
    """
    changed: dict[str, StageState] = {}
    for stage in () if context.over else context.plan.stages:
        state = context.stages[stage.name]
        sleeps = state.status != "done" and declared(stage.pool) in asleep
        if sleeps != state.sleeps:
            changed[stage.name] = replace(state, slept=(wall, 0.0) if sleeps else (state.slept[0], wall))
    if not changed:
        return context
    stages = context.stages | changed
    slept = (state.slept[1] - state.slept[0] for state in stages.values() if state.slept[1])
    more = max(0.0, min(limit_s, max(slept, default=0.0)) - context.moved)
    order = context.order + more if context.order == context.deadline else context.order
    deadline = context.deadline and context.deadline + more
    return replace(context, stages=stages, deadline=deadline, order=order, moved=context.moved + more)


def latest_end(context: RequestContext, limit_s: float) -> float | None:
    """When a request ends at the latest, as things stand: its deadline moves on while it waits. None if it has none."""
    waits = any(state.sleeps for state in context.stages.values())
    return context.deadline and context.deadline + (max(0.0, limit_s - context.moved) if waits else 0.0)


def seconds_until_awake(context: RequestContext, took: Mapping[str, Waking], wall: float) -> float | None:
    """Predicted seconds until the pools that a request waits for are awake, by what that `took`; None if for none."""
    left: list[float] = []
    for stage in () if context.over else context.plan.stages:
        if (state := context.stages[stage.name]).sleeps:
            began, ended = took.get(declared(stage.pool), (0.0, USUAL_WAKING_S))
            left.append(max(0.0, state.slept[0] + ended - began - wall))
    return max(left, default=None)


def overran(context: RequestContext, wall: float, running: Sequence[RunningStage] = ()) -> Change | None:
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
    took = f"its stages ran for longer than the {context.request.time_limit_s:.0f} s that it may take"
    error = ErrorInfo("expired", f"{took}: ask for less, or have the server's limit raised")
    return ChangeBuilder(context, wall, running).end("expired", error)


def retried(context: RequestContext) -> Change | None:
    """Somebody has looked at a dead request. None if it is dead no more."""
    return Change(replace(context, version=context.version + 1, dead=False)) if context.dead else None


def placed(change: Change, home: Callable[[str], str]) -> Change:
    """The change with what it queues in the pools where that is at `home` now.

    Workers of another pool make other bytes: nothing of what an earlier attempt left is gone on from there.
    """
    pools = {task.stage: pool for task in change.push if (pool := home(task.planned.pool)) != task.planned.pool}
    if not pools:
        return change
    context = change.context
    fresh = {name: replace(context.stages[name], checkpoint=None, checkpoint_step=0) for name in pools}
    context = replace(context, plan=context.plan.moved(pools), stages=context.stages | fresh)
    push = tuple(_replanned(task, context.plan) for task in change.push)
    return replace(change, context=context, push=push)


def _replanned(task: Task, plan: ExecutionPlan) -> Task:
    """The task as the plan has its stage now; its room may have been learned."""
    planned = replace(plan.stage(task.stage), room=task.planned.room)
    return replace(task, planned=planned)


def moved(
    context: RequestContext, home: Callable[[str], str], wall: float, running: Sequence[RunningStage] = (),
    asleep: Collection[str] = (), wake_limit: float = 0.0, has_other: HasOther = lambda _pool, _worker: True,
) -> Change | None:  # fmt: skip
    """Tasks that wait in vain go where they are at home, as the attempt that they are; so do those whose place moved
    with the deadline, because a pool slept, and those that avoid the only worker that is left. None if there are no
    such tasks.

    What runs is left alone.
    """
    states = context.stages
    leased, awaits = {run.stage for run in running}, await_waking(context, asleep, wall, wake_limit)
    waiting = [stage for stage in context.plan.stages if context.stages[stage.name].status == "queued"]
    moves = [stage for stage in waiting if home(stage.pool) != stage.pool or awaits.order != context.order]
    alone = {stage.name for stage in waiting if (id := states[stage.name].avoids) and not has_other(stage.pool, id)}
    strays = [stage.name for stage in waiting if stage.name not in leased and (stage in moves or stage.name in alone)]
    if context.over or (awaits is context and not strays):
        return None
    builder = ChangeBuilder(awaits, wall)
    for name in strays:
        before = context.stages[name]
        builder.move(name, "waiting", attempt=before.attempt - 1, avoids="" if name in alone else before.avoids)
        builder.queue(name, queued_at=before.queued_at)
    return placed(builder.change(None, context.status), home)


def held_by(worker: str, claim: Claim, running: Sequence[RunningStage]) -> bool:
    """Whether a task is leased to that worker, by what its record says runs."""
    return any((run.stage, run.attempt, run.worker) == (claim.stage, claim.attempt, worker) for run in running)


def _claimed(
    context: RequestContext, claim: Claim, worker: str, wall: float, running: Sequence[RunningStage] = ()
) -> ChangeBuilder:
    """A builder whose claimed stage is leased, as its claim says. Raises LeaseLost where that cannot be."""
    state = _current(context, claim, worker, running)
    builder = ChangeBuilder(context, wall, running)
    own = [run for run in running if run.stage == claim.stage]
    reached = max([state.reached, *(run.step / run.steps for run in own if run.steps)])
    leased_s = state.leased_s + sum(run.ran_s for run in own)
    builder.move(claim.stage, "leased", attempt=claim.attempt, worker=worker, reached=reached, leased_s=leased_s)
    return builder


def _attempt(claim: Claim, worker: str, timings: Timings, running: Sequence[RunningStage]) -> RunningStage:
    """An attempt that ends, with the `timings` that its worker reports; the record may know of more, or of nothing."""
    known = [run for run in running if (run.stage, run.attempt) == (claim.stage, claim.attempt)]
    run = known[0] if known else RunningStage(claim.stage, claim.attempt, worker, 0.0)
    return replace(run, timings=newest(run.timings, timings))


def _lose(builder: ChangeBuilder, run: RunningStage) -> None:
    """Count an attempt as lost, or as one that did not begin."""
    if run.step > 0 or run.timings.device_s > 0:
        builder.account(run, is_billed=False, is_final=True)
    else:
        builder.stages[run.stage] = account_not_begun(builder.stages[run.stage], run.attempt)


def _current(context: RequestContext, claim: Claim, worker: str, running: Sequence[RunningStage]) -> StageState:
    """The state of a stage that may be leased, as its claim says. Raises LeaseLost where that cannot be."""
    state = context.stages.get(claim.stage)
    if context.over or state is None or state.status not in BEGUN or claim.attempt < state.attempt:
        raise LeaseLost(f"attempt {claim.attempt} of {claim.stage} of {context.id} is not current: drop what it made")
    if any(run.stage == claim.stage for run in running) and not held_by(worker, claim, running):
        raise LeaseLost(f"stage {claim.stage} of {context.id} is not leased to {worker}: drop what it made")
    return state


def _object_lost(builder: ChangeBuilder, failed: TaskFailed, running: set[str]) -> Change:
    """Make a lost input again: its stage runs again once its own inputs exist, and those who would read it wait.

    One that is only announced is announced no more: its maker goes on with it, or will be found dead. A ref that is not
    the current output of any input changes no producer: the stage only gets the current refs. If no input was made
    again since it was queued, it is charged itself, so that a stage which keeps naming objects nobody knows comes to an
    end too.
    """
    before, consumer = builder.context(0), failed.claim.stage
    inputs = {name: before.stages[name] for name in before.plan.stage(consumer).after}
    lost = next((name for name, state in inputs.items() if state.output and state.output.id == failed.object_id), None)
    queued_at = before.stages[consumer].queued_at
    is_announced = lost is not None and inputs[lost].status == "announced"
    made_since = any(state.status != "done" or state.queued_at > queued_at for state in inputs.values())
    if is_announced or (lost is None and made_since):
        builder.publish("retrying", consumer, failed.message)
    else:
        builder.charge("recomputes", lost or consumer, failed.message, failed.evidence)
    if builder.error is not None:
        return builder.end("failed", builder.error, failed.claim, dead=True)
    builder.withdraw(consumer)
    builder.move(consumer, "waiting")
    if lost is not None and is_announced:
        builder.move(lost, "queued")
        builder.withdraw(lost)
    elif lost is not None:
        builder.stages[lost] = lose_output(builder.stages[lost])
        builder.move(lost, "waiting", token=b"", reached=1.0, lost=failed.object_id)
        builder.withdraw(lost, running)
    builder.queue_ready()
    return builder.change(failed.claim)


def _unknown_error(builder: ChangeBuilder, failed: TaskFailed, worker: str, has_other: bool) -> Change:
    """Retry a stage, on another worker if there is one, unless it failed with the same type of exception before."""
    stage = failed.claim.stage
    state = builder.stages[stage]
    if state.failed_with == failed.error:
        message = f"failed twice, on {state.failed_on} and {worker}: {failed.message}"
        error = ErrorInfo("model_error", message, stage, failed.evidence)
        return builder.end("failed", error, failed.claim, dead=True)
    avoids = worker if has_other else ""
    builder.stages[stage] = replace(state, failed_with=failed.error, failed_on=worker, avoids=avoids)
    return builder.charge("failures", stage, failed.message, failed.evidence).retry(failed.claim)


def _as_declared(stage: PlannedStage, done: TaskCompleted, worker: str) -> bool:
    """Whether a final stage brought results, and any other one the object that this worker made in this attempt."""
    if stage.final:
        return bool(done.results) and done.output is None
    return not done.results and done.output is not None and _made_by(done.output, done.claim, worker)


def _made_by(ref: ObjectRef, claim: Claim, worker: str) -> bool:
    """Whether an object is one that this attempt at this stage can have made."""
    made = ref.request, ref.stage, ref.attempt, ref.owner
    return 0 <= ref.nbytes <= EXACT and made == (claim.request, claim.stage, claim.attempt, worker)
