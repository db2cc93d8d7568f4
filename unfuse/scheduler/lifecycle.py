"""The state machine of requests: pure functions from context and event to Change.

They do no I/O and read no clock.

Parameters that many functions have:
- `wall`: the time, in Unix seconds. `queue_now`: the time, in seconds of the queue's clock.
- `running`: the leased stages, as the request's record lists them.

Leases are stored beside contexts, so a leased stage has the status "queued" in its context, or "announced". The claim
of a report proves that its stage is leased; the queue checks it when the change is committed.

A context that is over never changes: a report about it raises LeaseLost, unless it repeats the one that completed its
stage. All other functions then return None.
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
from unfuse.core.plan import ExecutionPlan, PlannedStage, declared, readable_pool
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

#: `(pool, worker) -> bool`: whether the pool has another live worker than this one.
HasOther = Callable[[str, str], bool]

BEGUN = ("queued", "announced")  # the statuses that a leased stage can have in its context
BLAMELESS = frozenset({"drain", "preempted", "full", "producer", "compute"})  # reasons of hand-backs without a limit
ALL_FLAGGED = "the model's safety checker flagged all results: change the prompt, or try another seed"
GIVEN_UP = 3  # workers that may hand a task back too often before its request becomes a dead letter
WEIGHTS_CHANGED = "weights_changed"  # error code: the model's files have changed since they were loaded
MODEL_FAILED = "model_failed"  # error code: a model that was added while servers ran cannot be served
USUAL_WAKING_S = 300.0  # predicted seconds of a pool's first cold start: the chart's `coldStartSeconds`
BACKOFF_S = 0.5  # seconds before the first retry of a transient failure; they double with each further one


def admitted(
    context: RequestContext,
    wall: float,
    cached: Mapping[str, ObjectRef] | None = None,
    leaders: Mapping[str, str] | None = None,
) -> Change:
    """Queue a new request's tasks whose inputs exist, without a change of its version.

    cached: outputs from the encoder cache, by stage. These stages are done without running.
    leaders: requests that encode the same, by stage. These stages wait for their output.
    """
    stages = {stage.name: StageState(follows=(leaders or {}).get(stage.name, "")) for stage in context.plan.stages}
    builder = ChangeBuilder(replace(context, stages=stages), wall)
    builder.publish("queued")
    for name, output in (cached or {}).items():
        builder.take(name, output)
    builder.queue_ready()
    return Change(builder.context(version=context.version), push=tuple(builder.push), events=tuple(builder.events))


def reused(context: RequestContext, result: tuple[ResultFile, ...], wall: float) -> Change:
    """Complete a new request with the results of an equal one, without running any stage."""
    stages = {stage.name: StageState("done") for stage in context.plan.stages}
    done = replace(context, stages=stages, status="completed", result=result, created_at=wall, completed_at=wall)
    return Change(done, events=(Event("queued", wall), Event("completed", wall, message="reused")))


def followed(context: RequestContext, stage: str, output: ObjectRef | None, wall: float) -> Change | None:
    """End a stage's wait for an equal encode of another request.

    None if it did not wait. With an output, the stage is done. Without one (None), it runs itself.
    """
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
    """Complete a stage and queue its readers, or complete the request if nothing is left.

    An output other than the stage declares fails the request, and so do results that are all flagged. A repeated
    report changes nothing. Raises LeaseLost.
    """
    claim = done.claim
    state = context.stages.get(claim.stage)
    is_done = state is not None and (state.status, state.worker) == ("done", worker)
    if state and is_done and (state.attempt, state.token) == (claim.attempt, claim.token):
        return Change(context, claim)

    builder = _claimed(context, claim, worker, wall, running)
    run = _attempt(claim, worker, done.timings, running)
    if not _as_declared(context.plan.stage(claim.stage), done, worker):
        builder.account(run, is_billed=False, is_final=True)
        message = f"worker {worker} returned the wrong kind of output for stage {claim.stage}: check its version"
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
    """Record a checkpoint of a running stage.

    It replaces a checkpoint of an earlier attempt even if that has more steps: the attempt did not resume from it, so
    it could not be read. None if this attempt has a checkpoint of this step or a later one. Raises LeaseLost.
    """
    claim = saved.claim
    ref = saved.checkpoint
    state = _current(context, claim, worker, running)
    previous = state.checkpoint
    if previous is not None and previous.attempt == claim.attempt and saved.step <= state.checkpoint_step:
        return None
    if not _made_by(ref, claim, worker):
        raise LeaseLost(f"worker {worker} saved a checkpoint of {claim.stage} that another attempt created")
    stages = context.stages | {claim.stage: replace(state, checkpoint=ref, checkpoint_step=saved.step)}
    return Change(replace(context, version=context.version + 1, stages=stages))


def announced(
    context: RequestContext, news: OutputAnnounced, worker: str, wall: float, running: Sequence[RunningStage] = ()
) -> Change | None:
    """Queue the readers of an output that is still being written. The stage's lease stays.

    None if the output is announced already. Raises LeaseLost.
    """
    claim = news.claim
    ref = news.output
    state = _current(context, claim, worker, running)
    if not held_by(worker, claim, running) or not _made_by(ref, claim, worker):
        raise LeaseLost(f"worker {worker} announced an output of {claim.stage} that is not from its lease")
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
    """Withdraw the announced output of a running stage that is handed back.

    The device time of the attempt is lost. None if all that is recorded already.
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
    """Record when the first stage was leased, since leases may end without a change.

    None if the time is recorded, or no stage runs.
    """
    if context.over or context.started_at is not None or not running:
        return None
    return ChangeBuilder(context, 0.0, running).change(None, context.status)


def stopped(
    context: RequestContext, stopped: TaskStopped, worker: str, wall: float, running: Sequence[RunningStage] = ()
) -> Change | None:
    """Account for the device time of an attempt whose lease has ended.

    None if that was done, or the attempt is `running`: then it is counted when it ends.
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
    """Apply the retry policy: retry a failed stage within its budgets, else fail the request.

    A crash beside other tasks may be caused by any of them. It is not charged, and the stage runs alone from then on.
    Readers of a lost object that run already continue, since they may have read it.

    has_other: whether another live worker could run the stage.

    Raises LeaseLost, and ValueError for a hand-back, which the queue handles.
    """
    claim = failed.claim
    stage = claim.stage
    builder = _claimed(context, claim, worker, wall, running)
    run = _attempt(claim, worker, failed.timings, running)
    is_refused = failed.reason == REFUSED
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
    """Make a request a dead letter after GIVEN_UP workers handed back one of its stages.

    None if the stage is not queued.
    """
    if context.over or context.stages[stage].status != "queued":
        return None
    reason = f"{GIVEN_UP} workers repeatedly handed back {stage} without starting it; the last reason: {message}"
    return ChangeBuilder(context, wall, running).end("failed", ErrorInfo("handed_back", reason, stage), dead=True)


def unavailable(
    context: RequestContext,
    changed: Callable[[str], ChangedFile | None],
    wall: float,
    running: Sequence[RunningStage] = (),
) -> Change | None:
    """Fail a request that needs a pool which a changed model file left without workers.

    None for other requests. Running stages do not count: they may complete. `changed` returns the file of such a pool.
    """
    leased = {run.stage for run in running}
    pending = [] if context.over else [stage for stage in context.plan.stages if stage.name not in leased]
    for stage in pending:
        if context.stages[stage.name].status != "done" and (file := changed(stage.pool)) and file.compared:
            error = ErrorInfo(WEIGHTS_CHANGED, str(file), stage.name)
            return ChangeBuilder(context, wall, running).end("failed", error, dead=True)
    return None


def unserved(context: RequestContext, reason: str, wall: float, running: Sequence[RunningStage] = ()) -> Change | None:
    """Fail a request whose model cannot be served. None if it is over."""
    if context.over:
        return None
    error = ErrorInfo(MODEL_FAILED, f"the model cannot be served: {reason}")
    return ChangeBuilder(context, wall, running).end("failed", error, dead=True)


def expired_lease(
    context: RequestContext, lease: Lease, wall: float, running: Sequence[RunningStage] = ()
) -> Change | None:
    """Charge a failure to a stage whose lease expired, and retry it at once.

    Beyond its budget of failures, the request fails. None if the stage was not leased.
    """
    claim = lease.claim
    try:
        builder = _claimed(context, claim, lease.worker, wall, running)
    except LeaseLost:
        return None
    builder.account(_attempt(claim, lease.worker, Timings(), running), is_billed=False)
    message = f"worker {lease.worker} sent no heartbeats while it ran {claim.stage}"
    return builder.charge("failures", claim.stage, message).retry(claim)


def cancelled(context: RequestContext, wall: float, running: Sequence[RunningStage] = ()) -> Change | None:
    """Cancel a request. None if it is over."""
    return None if context.over else ChangeBuilder(context, wall, running).end("cancelled")


def client_disconnected(context: RequestContext, wall: float, running: Sequence[RunningStage] = ()) -> Change | None:
    """Cancel a disconnected client's request if it has `cancel_on_disconnect`, else return None."""
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
    """Expire a request at its deadline, or return None before its `latest_end`."""
    if context.over or (latest_end(context, wake_limit) or queue_now) > queue_now:
        return None
    asleep = [readable_pool(stage.pool) for stage in context.plan.stages if context.stages[stage.name].sleeps]
    why = f"; {asleep[0]} was scaled to zero, and not ready in the {wake_limit:.0f} s of --wake-limit" if asleep else ""
    error = ErrorInfo("expired", f"the request did not complete before its deadline: increase its timeout{why}")
    return ChangeBuilder(context, wall, running).end("expired", error)


def await_waking(context: RequestContext, asleep: Collection[str], wall: float, limit_s: float = 0.0) -> RequestContext:
    """Return the request with its stages' cold starts recorded, or itself if nothing changed.

    The deadline moves by the longest cold start that has ended, up to `limit_s`; with an order by deadline, the order
    moves too. A stage that waits for a second cold start moves them only by the seconds beyond the first one.

    asleep: declared pools that are scaled to zero.
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
    waits_s = (state.slept[1] - state.slept[0] for state in stages.values() if state.slept[1])
    more_s = max(0.0, min(limit_s, max(waits_s, default=0.0)) - context.moved)
    order = context.order + more_s if context.order == context.deadline else context.order
    deadline = context.deadline and context.deadline + more_s
    return replace(context, stages=stages, deadline=deadline, order=order, moved=context.moved + more_s)


def latest_end(context: RequestContext, limit_s: float) -> float | None:
    """Return the deadline (queue clock), plus the rest of `limit_s` during a cold start."""
    waits = any(state.sleeps for state in context.stages.values())
    return context.deadline and context.deadline + (max(0.0, limit_s - context.moved) if waits else 0.0)


def seconds_until_awake(context: RequestContext, took: Mapping[str, Waking], wall: float) -> float | None:
    """Return the predicted seconds until the request's last cold start ends, or None.

    None if it waits for no cold start. took: the last cold start of each declared pool.
    """
    remaining_s: list[float] = []
    for stage in () if context.over else context.plan.stages:
        if (state := context.stages[stage.name]).sleeps:
            started, ended = took.get(declared(stage.pool), (0.0, USUAL_WAKING_S))
            remaining_s.append(max(0.0, state.slept[0] + ended - started - wall))
    return max(remaining_s, default=None)


def overran(context: RequestContext, wall: float, running: Sequence[RunningStage] = ()) -> Change | None:
    """Expire a request whose stages were leased for longer than its time limit.

    The longest chain of stages counts, so that parallel stages count once. Not counted are the time in queues, gaps
    without a scheduler, and clock changes: see `TaskQueue.expired`. None if the limit is not exceeded.
    """
    if context.over or context.request.time_limit_s is None:
        return None
    chain_s: dict[str, float] = {}  # by stage, the leased seconds of the longest chain that ends with it
    for stage in context.plan.stages:  # inputs come before their readers
        running_s = sum(run.ran_s for run in running if run.stage == stage.name)
        inputs_s = max((chain_s[name] for name in stage.after), default=0.0)
        chain_s[stage.name] = inputs_s + context.stages[stage.name].leased_s + running_s
    if max(chain_s.values()) <= context.request.time_limit_s:
        return None
    reason = f"the stages of the request ran for more than its limit of {context.request.time_limit_s:.0f} s"
    error = ErrorInfo("expired", f"{reason}: request less, or increase the server's time limit")
    return ChangeBuilder(context, wall, running).end("expired", error)


def retried(context: RequestContext) -> Change | None:
    """Clear the dead-letter mark of a request. None if it has none."""
    return Change(replace(context, version=context.version + 1, dead=False)) if context.dead else None


def placed(change: Change, home: Callable[[str], str]) -> Change:
    """Return the change with its tasks queued in the pools that `home` returns for theirs.

    Tasks that change their pool lose their checkpoint, since workers of another pool compute other bytes.
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
    """Return the task with the plan's stage, except for `room`, which may have been learned."""
    planned = replace(plan.stage(task.stage), room=task.planned.room)
    return replace(task, planned=planned)


def moved(
    context: RequestContext,
    home: Callable[[str], str],
    wall: float,
    running: Sequence[RunningStage] = (),
    asleep: Collection[str] = (),
    wake_limit: float = 0.0,
    has_other: HasOther = lambda _pool, _worker: True,
) -> Change | None:
    """Queue waiting tasks again that no live worker would lease, or whose order changed.

    Three kinds of tasks are queued again, as the same attempt: those whose `home` is another pool, those whose order
    moved with the deadline after a cold start, and those that avoid the only worker left. Running tasks do not change.
    New and ended waits for cold starts are recorded. None if nothing changed.
    """
    states = context.stages
    leased = {run.stage for run in running}
    awaiting = await_waking(context, asleep, wall, wake_limit)
    queued = [stage for stage in context.plan.stages if states[stage.name].status == "queued"]
    moves = [stage for stage in queued if home(stage.pool) != stage.pool or awaiting.order != context.order]
    alone = {stage.name for stage in queued if (id := states[stage.name].avoids) and not has_other(stage.pool, id)}
    requeued = [stage.name for stage in queued if stage.name not in leased and (stage in moves or stage.name in alone)]
    if context.over or (awaiting is context and not requeued):
        return None

    builder = ChangeBuilder(awaiting, wall)
    for name in requeued:
        before = states[name]
        builder.move(name, "waiting", attempt=before.attempt - 1, avoids="" if name in alone else before.avoids)
        builder.queue(name, queued_at=before.queued_at)
    return placed(builder.change(None, context.status), home)


def held_by(worker: str, claim: Claim, running: Sequence[RunningStage]) -> bool:
    """Return whether the record's running stages show this claim's attempt leased to this worker."""
    return any((run.stage, run.attempt, run.worker) == (claim.stage, claim.attempt, worker) for run in running)


def _claimed(
    context: RequestContext, claim: Claim, worker: str, wall: float, running: Sequence[RunningStage] = ()
) -> ChangeBuilder:
    """Return a builder with the claimed stage marked as leased. Raises LeaseLost as `_current` does."""
    state = _current(context, claim, worker, running)
    builder = ChangeBuilder(context, wall, running)
    runs = [run for run in running if run.stage == claim.stage]
    reached = max([state.reached, *(run.step / run.steps for run in runs if run.steps)])
    leased_s = state.leased_s + sum(run.ran_s for run in runs)
    builder.move(claim.stage, "leased", attempt=claim.attempt, worker=worker, reached=reached, leased_s=leased_s)
    return builder


def _attempt(claim: Claim, worker: str, timings: Timings, running: Sequence[RunningStage]) -> RunningStage:
    """Return an ending attempt with the newest timings of its report and of the record."""
    recorded = [run for run in running if (run.stage, run.attempt) == (claim.stage, claim.attempt)]
    run = recorded[0] if recorded else RunningStage(claim.stage, claim.attempt, worker, 0.0)
    return replace(run, timings=newest(run.timings, timings))


def _lose(builder: ChangeBuilder, run: RunningStage) -> None:
    """Account for an attempt as lost, or as not begun if it did no work."""
    if run.step > 0 or run.timings.device_s > 0:
        builder.account(run, is_billed=False, is_final=True)
    else:
        builder.stages[run.stage] = account_not_begun(builder.stages[run.stage], run.attempt)


def _current(context: RequestContext, claim: Claim, worker: str, running: Sequence[RunningStage]) -> StageState:
    """Return the claimed stage's state. Raises LeaseLost if it cannot be leased under this claim."""
    state = context.stages.get(claim.stage)
    if context.over or state is None or state.status not in BEGUN or claim.attempt < state.attempt:
        raise LeaseLost(f"attempt {claim.attempt} of {claim.stage} of {context.id} is not current: discard its output")
    if any(run.stage == claim.stage for run in running) and not held_by(worker, claim, running):
        raise LeaseLost(f"stage {claim.stage} of {context.id} is not leased to {worker}: discard its output")
    return state


def _object_lost(builder: ChangeBuilder, failed: TaskFailed, running: set[str]) -> Change:
    """Run the producer of a lost input again, and let its readers wait.

    - A lost input that is only announced is withdrawn. Its producer still runs, or its lease will expire.
    - An object that is not the current output of any input changes no producer: the consumer is queued again with the
      current refs. Unless an input was computed again since the consumer was queued, the consumer is charged, so that
      a stage that always names unknown objects fails in the end.
    """
    before = builder.context(0)
    consumer = failed.claim.stage
    inputs = {name: before.stages[name] for name in before.plan.stage(consumer).after}
    lost = next((name for name, state in inputs.items() if state.output and state.output.id == failed.object_id), None)
    queued_at = before.stages[consumer].queued_at
    is_announced = lost is not None and inputs[lost].status == "announced"
    is_recomputed = any(state.status != "done" or state.queued_at > queued_at for state in inputs.values())
    if is_announced or (lost is None and is_recomputed):
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
    """Retry a stage, preferably elsewhere, or fail its request if the exception type repeats."""
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
    """Return whether a final stage has results, or another stage an output of this attempt."""
    if stage.final:
        return bool(done.results) and done.output is None
    return not done.results and done.output is not None and _made_by(done.output, done.claim, worker)


def _made_by(ref: ObjectRef, claim: Claim, worker: str) -> bool:
    """Return whether this attempt on this worker can have created the object."""
    origin = ref.request, ref.stage, ref.attempt, ref.owner
    return 0 <= ref.nbytes <= EXACT and origin == (claim.request, claim.stage, claim.attempt, worker)
