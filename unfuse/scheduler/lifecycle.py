"""The state machine of requests: pure functions from context and event to Change.

They do no I/O and read no clock.

Parameters that many functions have:
- `wall`: the time, in Unix seconds. `queue_now`: the time, in seconds of the queue's clock.
- `running`: the leased stages, as the request's record lists them.

Leases are stored beside contexts, so a leased stage has the status "queued" in its context, or "announced". The claim
of a report proves that its stage is leased; the queue checks it when the change is committed.

A context that is over never changes. A report about it raises LeaseLost, unless it repeats the report that completed
the stage. All other functions then return None.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec.structs import replace

from unfuse.core.errors import LeaseLost
from unfuse.core.messages import (
    CLIENT_ERROR,
    OUT_OF_MEMORY,
    CheckpointSaved,
    OutputAnnounced,
    TaskCompleted,
    TaskFailed,
    TaskStopped,
)
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import ExecutionPlan, PlannedStage
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
    clamp_to_elapsed,
    merge_timings,
)
from unfuse.core.task import Claim, Lease, Task
from unfuse.core.worker_status import ChangedFile
from unfuse.queues.base import MAX_SAFE_INTEGER
from unfuse.scheduler.change_builder import ChangeBuilder, account_not_started, account_report, lose_output
from unfuse.scheduler.cold_starts import record_cold_starts
from unfuse.scheduler.device_failures import retry_after_device_error

#: `(pool, worker) -> bool`: whether the pool has another live worker than this one.
HasOther = Callable[[str, str], bool]

LEASED_STATUSES = ("queued", "announced")  # the statuses that a leased stage can have in its context
UNLIMITED_HAND_BACKS = frozenset(
    {"drain", "preempted", "full", "producer", "compute"}
)  # reasons of hand-backs without a limit
ALL_FLAGGED = "the model's safety checker flagged all results: change the prompt, or try another seed"
MAX_HAND_BACK_WORKERS = 3  # workers that may hand a task back too often before its request becomes a dead letter
WEIGHTS_CHANGED = "weights_changed"  # error code: the model's files have changed since they were loaded
MODEL_FAILED = "model_failed"  # error code: a model that was added while servers ran cannot be served
REASON_CODES = {CLIENT_ERROR: "invalid_parameter", OUT_OF_MEMORY: "out_of_memory"}  # error codes, by a failure's reason
MEMORY_BACKOFF_S = 5.0  # seconds before a task gets a device again on which other processes use memory
BACKOFF_S = 0.5  # seconds before the first retry of a transient failure; they double with each further one


def admit(
    context: RequestContext,
    wall: float,
    cached: Mapping[str, ObjectRef] | None = None,
    leaders: Mapping[str, str] | None = None,
) -> Change:
    """Queue a new request's tasks whose inputs exist, without a change of its version.

    cached: outputs from the encoder cache, by stage. These stages are done without running.
    leaders: requests that encode the same, by stage. These stages wait for their output.
    """
    stages = {
        stage.name: StageState(shares_with_request=(leaders or {}).get(stage.name, "")) for stage in context.plan.stages
    }
    builder = ChangeBuilder(replace(context, stages=stages), wall)
    builder.publish("queued")
    for name, output in (cached or {}).items():
        builder.complete_from_cache(name, output)
    builder.queue_ready()
    return Change(builder.context(version=context.version), push=tuple(builder.push), events=tuple(builder.events))


def complete_from_results(context: RequestContext, result: tuple[ResultFile, ...], wall: float) -> Change:
    """Complete a new request with the results of an equal one, without running any stage."""
    stages = {stage.name: StageState("done") for stage in context.plan.stages}
    completed = replace(context, stages=stages, status="completed", result=result, created_at=wall, completed_at=wall)
    return Change(completed, events=(Event("queued", wall), Event("completed", wall, message="reused")))


def share_encoding(context: RequestContext, stage: str, output: ObjectRef | None, wall: float) -> Change | None:
    """End a stage's wait for an equal encode of another request.

    None if it did not wait. With an output, the stage is done. Without one (None), it runs itself.
    """
    if context.is_over or not context.stages[stage].shares_with_request:
        return None
    builder = ChangeBuilder(context, wall)
    builder.stages[stage] = replace(builder.stages[stage], shares_with_request="")
    if output is not None:
        builder.complete_from_cache(stage, output)
    builder.queue_ready()
    return builder.build(None, context.status)


def complete_stage(
    context: RequestContext, report: TaskCompleted, worker: str, wall: float, running: Sequence[RunningStage] = ()
) -> Change:
    """Complete a stage and queue its readers, or complete the request if nothing is left.

    The request fails if the output is not of the declared kind, or if the safety checker flagged all results. A
    repeated report changes nothing. Raises LeaseLost.
    """
    claim = report.claim
    state = context.stages.get(claim.stage)
    is_done = state is not None and (state.status, state.worker) == ("done", worker)
    if state and is_done and (state.attempt, state.token) == (claim.attempt, claim.token):
        return Change(context, claim)

    builder = _builder_for_claim(context, claim, worker, wall, running)
    run = _ending_attempt(claim, worker, report.timings, running)
    if not _is_as_declared(context.plan.stage(claim.stage), report, worker):
        builder.account(run, is_billed=False, is_final=True)
        message = f"worker {worker} returned the wrong kind of output for stage {claim.stage}: check its version"
        return builder.end_request("failed", ErrorInfo("stage_failed", message, claim.stage), claim)

    # Workers cannot measure how long a task was queued: it is the time until its lease began.
    queued_at = builder.stages[claim.stage].queued_at
    queued_s = sum(max(0.0, run.since - queued_at) for run in running if run.stage == claim.stage)
    steps = report.timings.steps + report.timings.resumed or run.steps
    builder.account(replace(run, step=steps, steps=steps), is_billed=True, is_final=True)
    timings = replace(clamp_to_elapsed(run.timings, wall - context.created_at), queued_s=queued_s)
    builder.move_stage(
        claim.stage,
        "done",
        output=report.output,
        token=claim.token,
        timings=timings,
        checkpoint=None,
        checkpoint_step=0,
        vae=report.vae,
    )
    builder.publish("stage_completed", claim.stage)

    result = tuple(sorted((*context.result, *report.results), key=lambda file: file.index))
    if all(builder.stages[stage.name].status == "done" for stage in context.plan.stages if stage.final):
        if all(file.flagged for file in result):
            error = ErrorInfo(MODERATION_BLOCKED, ALL_FLAGGED, claim.stage)
            return builder.end_request("failed", error, claim, result=result)
        return builder.end_request("completed", None, claim, result=result)
    builder.queue_ready()
    return builder.build(claim, result=result)


def save_checkpoint(
    context: RequestContext, saved: CheckpointSaved, worker: str, running: Sequence[RunningStage] = ()
) -> Change | None:
    """Record a checkpoint of a running stage.

    It replaces a checkpoint of an earlier attempt even if that has more steps: the attempt did not resume from it, so
    it could not be read. None if this attempt has a checkpoint of this step or a later one. Raises LeaseLost.
    """
    claim = saved.claim
    ref = saved.checkpoint
    state = _claimed_state(context, claim, worker, running)
    previous = state.checkpoint
    if previous is not None and previous.attempt == claim.attempt and saved.step <= state.checkpoint_step:
        return None
    if not _may_be_from(ref, claim, worker):
        raise LeaseLost(f"worker {worker} saved a checkpoint of {claim.stage} that another attempt created")
    stages = context.stages | {claim.stage: replace(state, checkpoint=ref, checkpoint_step=saved.step)}
    return Change(replace(context, version=context.version + 1, stages=stages))


def announce_output(
    context: RequestContext, announced: OutputAnnounced, worker: str, wall: float, running: Sequence[RunningStage] = ()
) -> Change | None:
    """Queue the readers of an output that is still being written. The stage's lease stays.

    None if the output is announced already. Raises LeaseLost.
    """
    claim = announced.claim
    ref = announced.output
    state = _claimed_state(context, claim, worker, running)
    if not is_held_by(worker, claim, running) or not _may_be_from(ref, claim, worker):
        raise LeaseLost(f"worker {worker} announced an output of {claim.stage} that is not from its lease")
    if state.output is not None and state.output.id == ref.id:
        return None
    builder = _builder_for_claim(context, claim, worker, wall)
    builder.running = running
    builder.drop_output(claim.stage)
    builder.move_stage(claim.stage, "announced", output=ref)
    builder.queue_ready()
    return builder.build(None)


def hand_back(
    context: RequestContext,
    claim: Claim,
    worker: str,
    wall: float,
    running: Sequence[RunningStage] = (),
    timings: Timings | None = None,
) -> Change | None:
    """Withdraw the announced output of a running stage that is handed back.

    The device time of the attempt is lost. None if the worker has no lease on the stage, or nothing is left to record.
    """
    state = context.stages.get(claim.stage)
    if state is None or context.is_over or not is_held_by(worker, claim, running):
        return None
    run = _ending_attempt(claim, worker, timings or Timings(), running)
    if state.status != "announced" and claim.attempt <= state.accounted_attempt:
        return None
    builder = ChangeBuilder(context, wall, running)
    _account_lost(builder, run)
    if state.status == "announced":
        builder.move_stage(claim.stage, "queued")
        builder.drop_output(claim.stage)
    return builder.build(None, context.status)


def record_start(context: RequestContext, running: Sequence[RunningStage]) -> Change | None:
    """Record when the first stage was leased, since leases may end without a change.

    None if the time is recorded, or no stage runs.
    """
    if context.is_over or context.started_at is not None or not running:
        return None
    return ChangeBuilder(context, 0.0, running).build(None, context.status)


def account_stopped(
    context: RequestContext, stopped: TaskStopped, worker: str, wall: float, running: Sequence[RunningStage] = ()
) -> Change | None:
    """Account for the device time of an attempt whose lease has ended.

    None if it is accounted for already, or if the attempt is `running`: then it is counted when it ends.
    """
    claim = stopped.claim
    if (claim.stage, claim.attempt) in {(run.stage, run.attempt) for run in running}:
        return None
    state = account_report(context, stopped, worker, wall)
    if state is None:
        return None
    stages = context.stages | {claim.stage: state}
    return Change(replace(context, version=context.version + 1, stages=stages))


def fail_stage(
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
    Readers of a lost object that run already continue, since they may have read the object before.

    has_other: whether another live worker could run the stage.
    Raises LeaseLost, and ValueError for a hand-back, which the queue handles.
    """
    claim, stage = failed.claim, failed.claim.stage
    builder = _builder_for_claim(context, claim, worker, wall, running)
    run = _ending_attempt(claim, worker, failed.timings, running)
    if failed.kind == "object_lost":
        _account_lost(builder, run)
    else:
        builder.account(run, is_billed=(failed.kind, failed.reason) == ("permanent", CLIENT_ERROR), is_final=True)
    match failed.kind:
        case "transient" if failed.error:
            return _retry_once(builder, failed, worker, has_other, queue_now)
        case "transient":
            backoff = BACKOFF_S * 2 ** builder.stages[stage].failures
            return builder.charge("failures", stage, failed.message, failed.evidence).retry(claim, queue_now + backoff)
        case "crash" if failed.had_companions and not builder.stages[stage].alone:
            builder.stages[stage] = replace(builder.stages[stage], alone=True)
            builder.publish("retrying", stage, failed.message)
            return builder.retry(claim)
        case "crash":
            return builder.charge("crashes", stage, failed.message, failed.evidence).retry(claim)
        case "device":
            return retry_after_device_error(builder, failed, worker, has_other)
        case "object_lost":
            return _recompute_lost_input(builder, failed, {run.stage for run in running})
        case "permanent":
            code = REASON_CODES.get(failed.reason, "stage_failed")
            return builder.end_request("failed", ErrorInfo(code, failed.message, stage, failed.evidence), claim)
    raise ValueError("a task is handed back to the queue, not failed")


def dead_letter_handed_back(
    context: RequestContext, stage: str, message: str, wall: float, running: Sequence[RunningStage] = ()
) -> Change | None:
    """Make a request a dead letter, as too many workers handed back a stage.

    These are MAX_HAND_BACK_WORKERS workers that each did so too often. None if the stage is not queued.
    """
    if context.is_over or context.stages[stage].status != "queued":
        return None
    reason = (
        f"{MAX_HAND_BACK_WORKERS} workers repeatedly handed back {stage} without starting it; "
        f"the last reason: {message}"
    )
    return ChangeBuilder(context, wall, running).end_request(
        "failed", ErrorInfo("handed_back", reason, stage), is_dead_letter=True
    )


def fail_unavailable(
    context: RequestContext,
    changed_file: Callable[[str], ChangedFile | None],
    wall: float,
    running: Sequence[RunningStage] = (),
) -> Change | None:
    """Fail a request that needs a pool which a changed model file left without workers.

    None for other requests. Running stages do not count, since they may complete.

    changed_file: returns the changed file that left a pool without workers, or None for other pools.
    """
    running_stages = {run.stage for run in running}
    pending = [] if context.is_over else [stage for stage in context.plan.stages if stage.name not in running_stages]
    for stage in pending:
        if context.stages[stage.name].status != "done" and (file := changed_file(stage.pool)) and file.compared:
            error = ErrorInfo(WEIGHTS_CHANGED, str(file), stage.name)
            return ChangeBuilder(context, wall, running).end_request("failed", error, is_dead_letter=True)
    return None


def fail_unserved(
    context: RequestContext, reason: str, wall: float, running: Sequence[RunningStage] = ()
) -> Change | None:
    """Fail a request whose model cannot be served. None if it is over."""
    if context.is_over:
        return None
    error = ErrorInfo(MODEL_FAILED, f"the model cannot be served: {reason}")
    return ChangeBuilder(context, wall, running).end_request("failed", error, is_dead_letter=True)


def expire_lease(
    context: RequestContext, lease: Lease, wall: float, running: Sequence[RunningStage] = ()
) -> Change | None:
    """Charge a failure to a stage whose lease expired, and retry it at once.

    Beyond its budget of failures, the request fails. None if the stage was not leased.
    """
    claim = lease.claim
    try:
        builder = _builder_for_claim(context, claim, lease.worker, wall, running)
    except LeaseLost:
        return None
    builder.account(_ending_attempt(claim, lease.worker, Timings(), running), is_billed=False)
    message = f"worker {lease.worker} sent no heartbeats while it ran {claim.stage}"
    return builder.charge("failures", claim.stage, message).retry(claim)


def cancel(context: RequestContext, wall: float, running: Sequence[RunningStage] = ()) -> Change | None:
    """Cancel a request. None if it is over."""
    return None if context.is_over else ChangeBuilder(context, wall, running).end_request("cancelled")


def disconnect_client(context: RequestContext, wall: float, running: Sequence[RunningStage] = ()) -> Change | None:
    """Cancel a disconnected client's request if it has `cancel_on_disconnect`, else return None."""
    if context.is_over or not context.caller.cancel_on_disconnect:
        return None
    error = ErrorInfo("cancelled", "its client disconnected")
    return ChangeBuilder(context, wall, running).end_request("cancelled", error)


def clear_dead_letter(context: RequestContext) -> Change | None:
    """Clear the dead-letter mark of a request. None if it has none."""
    return (
        Change(replace(context, version=context.version + 1, is_dead_letter=False)) if context.is_dead_letter else None
    )


def set_order(change: Change, waiting_pool: Callable[[str], str]) -> Change:
    """Return the change with its tasks moved to the pools where they should wait.

    waiting_pool: returns the pool to wait in for the pool of a task.

    Tasks that change their pool lose their checkpoint, since workers of another pool compute other bytes.
    """
    pools = {task.stage: pool for task in change.push if (pool := waiting_pool(task.planned.pool)) != task.planned.pool}
    if not pools:
        return change
    context = change.context
    states = {name: replace(context.stages[name], checkpoint=None, checkpoint_step=0) for name in pools}
    context = replace(context, plan=context.plan.with_pools(pools), stages=context.stages | states)
    push = tuple(_with_planned_stage(task, context.plan) for task in change.push)
    return replace(change, context=context, push=push)


def _with_planned_stage(task: Task, plan: ExecutionPlan) -> Task:
    """Return the task with the plan's stage, except for `output_size`, which may have been learned."""
    planned = replace(plan.stage(task.stage), output_size=task.planned.output_size)
    return replace(task, planned=planned)


def requeue_waiting(
    context: RequestContext,
    waiting_pool: Callable[[str], str],
    wall: float,
    running: Sequence[RunningStage] = (),
    scaled_to_zero: Collection[str] = (),
    cold_start_limit: float = 0.0,
    has_other: HasOther = lambda _pool, _worker: True,
) -> Change | None:
    """Queue waiting tasks again that no live worker would lease, or whose order changed.

    Three kinds of tasks are queued again, as the same attempt: those whose `waiting_pool` is another pool, those whose
    order moved with the deadline after a cold start, and those that avoid the only worker left. Running tasks do not
    change. New and ended waits for cold starts are recorded. None if nothing changed.
    """
    states = context.stages
    leased = {run.stage for run in running}
    updated = record_cold_starts(context, scaled_to_zero, wall, cold_start_limit)
    queued = [stage for stage in context.plan.stages if states[stage.name].status == "queued"]
    moved = [stage for stage in queued if waiting_pool(stage.pool) != stage.pool or updated.order != context.order]
    stuck = {
        stage.name for stage in queued if (id := states[stage.name].avoid_worker) and not has_other(stage.pool, id)
    }
    requeued = [stage.name for stage in queued if stage.name not in leased and (stage in moved or stage.name in stuck)]
    if context.is_over or (updated is context and not requeued):
        return None

    builder = ChangeBuilder(updated, wall)
    for name in requeued:
        state = states[name]
        # `queue` raises the attempt by 1. It is lowered first, because the task was not tried.
        builder.move_stage(
            name, "waiting", attempt=state.attempt - 1, avoid_worker="" if name in stuck else state.avoid_worker
        )
        builder.queue(name, queued_at=state.queued_at)
    return set_order(builder.build(None, context.status), waiting_pool)


def is_held_by(worker: str, claim: Claim, running: Sequence[RunningStage]) -> bool:
    """Return whether the record's running stages show this claim's attempt leased to this worker."""
    return any((run.stage, run.attempt, run.worker) == (claim.stage, claim.attempt, worker) for run in running)


def _builder_for_claim(
    context: RequestContext, claim: Claim, worker: str, wall: float, running: Sequence[RunningStage] = ()
) -> ChangeBuilder:
    """Return a builder with the claimed stage marked as leased. Raises LeaseLost as `_claimed_state` does."""
    state = _claimed_state(context, claim, worker, running)
    builder = ChangeBuilder(context, wall, running)
    runs = [run for run in running if run.stage == claim.stage]
    max_progress = max([state.max_progress, *(run.step / run.steps for run in runs if run.steps)])
    leased_s = state.leased_s + sum(run.ran_s for run in runs)
    builder.move_stage(
        claim.stage, "leased", attempt=claim.attempt, worker=worker, max_progress=max_progress, leased_s=leased_s
    )
    return builder


def _ending_attempt(claim: Claim, worker: str, timings: Timings, running: Sequence[RunningStage]) -> RunningStage:
    """Return an attempt that ends, with the newer timings of its report and its record."""
    recorded = [run for run in running if (run.stage, run.attempt) == (claim.stage, claim.attempt)]
    run = recorded[0] if recorded else RunningStage(claim.stage, claim.attempt, worker, 0.0)
    return replace(run, timings=merge_timings(run.timings, timings))


def _account_lost(builder: ChangeBuilder, run: RunningStage) -> None:
    """Account for an attempt as lost, or as not begun if it did no work."""
    if run.step > 0 or run.timings.device_s > 0:
        builder.account(run, is_billed=False, is_final=True)
    else:
        builder.stages[run.stage] = account_not_started(builder.stages[run.stage], run.attempt)


def _claimed_state(context: RequestContext, claim: Claim, worker: str, running: Sequence[RunningStage]) -> StageState:
    """Return the claimed stage's state. Raises LeaseLost if this claim cannot be current."""
    state = context.stages.get(claim.stage)
    if context.is_over or state is None or state.status not in LEASED_STATUSES or claim.attempt < state.attempt:
        raise LeaseLost(f"attempt {claim.attempt} of {claim.stage} of {context.id} is not current: discard its output")
    if any(run.stage == claim.stage for run in running) and not is_held_by(worker, claim, running):
        raise LeaseLost(f"stage {claim.stage} of {context.id} is not leased to {worker}: discard its output")
    return state


def _recompute_lost_input(builder: ChangeBuilder, failed: TaskFailed, running: set[str]) -> Change:
    """Run the producer of a lost input again, and let its readers wait.

    - A lost input that is only announced is withdrawn. Its producer still runs, or its lease will expire.
    - If the object is not the current output of any input, no producer changes: the consumer is queued again with the
      current refs. It is charged, unless an input was computed again since it was queued. So a stage that always names
      unknown objects fails in the end.
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
        return builder.end_request("failed", builder.error, failed.claim, is_dead_letter=True)

    builder.drop_output(consumer)
    builder.move_stage(consumer, "waiting")
    if lost is not None and is_announced:
        builder.move_stage(lost, "queued")
        builder.drop_output(lost)
    elif lost is not None:
        builder.stages[lost] = lose_output(builder.stages[lost])
        builder.move_stage(lost, "waiting", token=b"", max_progress=1.0, lost_output_id=failed.object_id)
        builder.drop_output(lost, running)
    builder.queue_ready()
    return builder.build(failed.claim)


def _retry_once(builder: ChangeBuilder, failed: TaskFailed, worker: str, has_other: bool, queue_now: float) -> Change:
    """Retry a stage, preferably elsewhere, or fail its request if the exception type repeats.

    A device that lacked memory gets the stage again after MEMORY_BACKOFF_S, when other processes may use less of it.
    """
    stage = failed.claim.stage
    state = builder.stages[stage]
    if state.failed_with == failed.error:
        message = f"failed twice, on {state.failed_on} and {worker}: {failed.message}"
        error = ErrorInfo(REASON_CODES.get(failed.reason, "model_error"), message, stage, failed.evidence)
        return builder.end_request("failed", error, failed.claim, is_dead_letter=True)
    avoid_worker = worker if has_other else ""
    builder.stages[stage] = replace(state, failed_with=failed.error, failed_on=worker, avoid_worker=avoid_worker)
    not_before = queue_now + MEMORY_BACKOFF_S if failed.reason == OUT_OF_MEMORY and not has_other else 0.0
    return builder.charge("failures", stage, failed.message, failed.evidence).retry(failed.claim, not_before)


def _is_as_declared(stage: PlannedStage, report: TaskCompleted, worker: str) -> bool:
    """Return whether a final stage has results, or another stage an output of this attempt."""
    if stage.final:
        return bool(report.results) and report.output is None
    return not report.results and report.output is not None and _may_be_from(report.output, report.claim, worker)


def _may_be_from(ref: ObjectRef, claim: Claim, worker: str) -> bool:
    """Return whether this attempt on this worker can have created the object."""
    origin = ref.request, ref.stage, ref.attempt, ref.owner
    return 0 <= ref.nbytes <= MAX_SAFE_INTEGER and origin == (claim.request, claim.stage, claim.attempt, worker)
