"""Builds the Change of a transition and accounts for the device time of attempts.

It does no I/O and reads no clock.

Every attempt is accounted for once. It is billed if it completes, or stops because its request is over. It is lost, and
not billed, if it fails, is handed back, or loses its worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from unfuse.core.errors import IllegalMove
from unfuse.core.messages import TaskStopped
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import Params
from unfuse.core.request import (
    REQUEST_MOVES,
    UNKNOWN_DEVICE,
    Change,
    ErrorInfo,
    Event,
    EventType,
    RequestContext,
    RequestStatus,
    RunningStage,
    StageState,
    Timings,
    UnreportedAttempt,
    clamp_to_elapsed,
    merge_timings,
)
from unfuse.core.task import TASK_MOVES, Claim, Task, TaskStatus

#: Most attempts of one stage for which a last report of the worker is awaited. Older ones keep their known timings.
MAX_UNREPORTED = 16

#: A report on an attempt is ignored if its number exceeds the stage's current attempt by more than this.
MAX_TRACKED_HAND_BACKS = 1000


def account(state: StageState, run: RunningStage, *, is_billed: bool, is_final: bool) -> StageState:
    """Return the stage with the device time of an attempt billed or counted as lost.

    is_final: whether `run.timings` are complete. If not, a later report of its worker is awaited.
    """
    if run.attempt <= state.accounted_attempt:
        return state
    unreported = dict(state.unreported)
    if not is_final:
        unreported[run.attempt] = UnreportedAttempt(run.worker, run.timings, not is_billed)
    newest_attempts = dict(list(unreported.items())[-MAX_UNREPORTED:])

    steps = {"step": run.step, "steps": run.steps} if run.steps else {}
    state = replace(
        state,
        accounted_attempt=run.attempt,
        attempts_started=state.attempts_started + 1,
        unreported=newest_attempts,
        **steps,
    )
    if is_billed:
        return replace(state, timings=replace(run.timings, queued_s=state.timings.queued_s))
    return _with_lost_seconds(state, run.timings.device, run.timings.device_s)


def account_not_started(state: StageState, attempt: int) -> StageState:
    """Return the stage with an attempt counted that ended before it began, without device time."""
    if attempt <= state.accounted_attempt:
        return state
    return replace(state, accounted_attempt=attempt, attempts_not_started=state.attempts_not_started + 1)


def lose_output(state: StageState) -> StageState:
    """Return the stage with its completed attempt counted as lost, because its output is lost."""
    return replace(_with_lost_seconds(state, state.timings.device, state.timings.device_s), timings=Timings())


def account_report(context: RequestContext, stopped: TaskStopped, worker: str, wall: float) -> StageState | None:
    """Return the stage with a late report on an ended attempt accounted for, or None.

    None if the stage is unknown, or the attempt is another worker's, was reported before or is not plausible.
    """
    claim = stopped.claim
    state = context.stages.get(claim.stage)
    if state is None:
        return None
    timings = clamp_to_elapsed(stopped.timings, wall - context.created_at)
    known = state.unreported.get(claim.attempt)
    if known is not None and known.worker != worker:
        return None
    if known is not None:
        timings = merge_timings(known.timings, timings)
        unreported = {number: attempt for number, attempt in state.unreported.items() if number != claim.attempt}
        state = replace(state, unreported=unreported)
        # Reports repeat the total amount, so only the seconds beyond the known ones are added.
        if known.lost:
            return _with_lost_seconds(state, timings.device, timings.device_s - known.timings.device_s)
        return replace(state, timings=replace(timings, queued_s=state.timings.queued_s))
    if (
        not state.accounted_attempt
        < claim.attempt
        <= max(state.attempt, state.accounted_attempt) + MAX_TRACKED_HAND_BACKS
    ):
        return None

    # The attempt started after the transition that ended it was decided, so the stage does not list it.
    run = RunningStage(claim.stage, claim.attempt, worker, 0.0, timings=timings)
    is_billed = context.is_over and not state.timings.share_s and claim.attempt >= state.attempt
    return account(state, run, is_billed=is_billed, is_final=True)


def _with_lost_seconds(state: StageState, device: str, seconds: float) -> StageState:
    """Return the stage with these seconds of the device added to its lost ones."""
    if seconds <= 0:
        return state
    device = device or UNKNOWN_DEVICE
    return replace(state, lost_s=state.lost_s | {device: state.lost_s.get(device, 0.0) + seconds})


#: Kinds of errors that the retry policy counts for each stage.
Charge = Literal["failures", "crashes", "recomputes"]

#: The retry policy: number of charges of each kind that a stage survives. The next one fails its request.
BUDGETS: dict[Charge, int] = {"failures": 3, "crashes": 1, "recomputes": 3}

#: Error codes of requests that exceeded a budget.
CODES: dict[Charge, str] = {"failures": "stage_failed", "crashes": "compute_crashed", "recomputes": "object_lost"}


class ChangeBuilder:
    """Builds one Change of a request, step by step.

    Every move of a stage or of the request is checked against its table of legal moves. Attempts whose leases the
    change ends are accounted for.

    wall: the time, in Unix seconds.
    running: the leased stages of the request's record.
    """

    def __init__(self, context: RequestContext, wall: float, running: Sequence[RunningStage] = ()) -> None:
        self._before = context
        self._wall = wall
        self.running = running
        self.stages = dict(context.stages)
        self.error: ErrorInfo | None = None
        self.close: list[tuple[str, str]] = []
        self.push: list[Task] = []
        self.events: list[Event] = []

    def move_stage(self, stage: str, status: TaskStatus, **fields: Any) -> None:
        """Set a stage's status and these fields.

        Raises IllegalMove for a move that is not in TASK_MOVES.
        """
        state = self.stages[stage]
        _check(TASK_MOVES, f"stage {stage}", state.status, status)
        self.stages[stage] = replace(state, status=status, **fields)

    def publish(self, event: EventType, stage: str = "", message: str = "") -> None:
        """Add an event about the request, or about a stage in its present state."""
        state = self.stages.get(stage, StageState())
        self.events.append(Event(event, self._wall, stage, state.attempt, state.worker, message=message))

    def queue(self, stage: str, not_before: float = 0.0, queued_at: float | None = None) -> None:
        """Queue the next attempt at a stage whose inputs exist.

        not_before: earliest time of its lease, in seconds of the queue's clock.
        queued_at: Unix seconds; None: now.
        """
        # Hand-backs raise an attempt's number in the queue only, so the accounted one may be newer than the context's.
        attempt = max(self.stages[stage].attempt, self.stages[stage].accounted_attempt) + 1
        self.move_stage(stage, "queued", attempt=attempt, queued_at=self._wall if queued_at is None else queued_at)

        context = self._before
        planned = context.plan.stage(stage)
        outputs = [self.stages[name].output for name in planned.after]
        inputs = tuple(output for output in outputs if output is not None)
        params = context.request.params | planned.params
        self.push.append(
            Task(
                request=context.id,
                planned=planned,
                attempt=attempt,
                model=context.request.model,
                params=params,
                derived=planned.derived or context.request.derived,
                inputs=inputs,
                priority=context.delivery.priority,
                order=context.order,
                not_before=not_before,
                deadline=context.deadline,
                preferred_node=_nearest(inputs),
                affinity=_affinity(context, params),
                alone=self.stages[stage].alone,
                has_siblings=sum(other.kind == planned.kind for other in context.plan.stages) > 1,
                avoid_worker=self.stages[stage].avoid_worker,
            )
        )

    def complete_from_cache(self, stage: str, output: ObjectRef) -> None:
        """Complete a stage with a cached output.

        The stage keeps attempt 0, and the object's owner becomes its worker.
        """
        self.move_stage(stage, "done", output=output, worker=output.owner, shares_with_request="")
        self.publish("stage_completed", stage, "cached")

    def drop_output(self, stage: str, running: Collection[str] = ()) -> None:
        """Drop a stage's output, if it has one. Its readers wait for a new one.

        Queued and announced readers wait again. The output of an announced reader is dropped in the same way.

        running: names of readers that run already and may finish.
        """
        if self.stages[stage].output is None:
            return
        self.stages[stage] = replace(self.stages[stage], output=None)
        for reader in self._before.plan.consumers(stage):
            if self.stages[reader.name].status in ("queued", "announced") and reader.name not in running:
                self.drop_output(reader.name)
                for run in self.running:
                    if run.stage == reader.name:
                        self.account(run, is_billed=False)
                self.move_stage(reader.name, "waiting")
                self.close.append((self._before.id, reader.name))

    def queue_ready(self) -> None:
        """Queue every waiting stage whose inputs exist and that follows no other request's encoder."""
        for stage in self._before.plan.stages:
            state = self.stages[stage.name]
            if state.status == "waiting" and not state.shares_with_request and self.inputs_exist(stage.name):
                self.queue(stage.name)

    def inputs_exist(self, stage: str) -> bool:
        """Return whether all inputs of a stage are done or announced."""
        inputs = self._before.plan.stage(stage).after
        return all(self.stages[name].status in ("done", "announced") for name in inputs)

    def account(self, run: RunningStage, *, is_billed: bool, is_final: bool = False) -> None:
        """Account for an attempt as the function `account` does.

        Its device time is limited to the seconds since the request was accepted, since a worker may report any number.
        """
        run = replace(run, timings=clamp_to_elapsed(run.timings, self._wall - self._before.created_at))
        self.stages[run.stage] = account(self.stages[run.stage], run, is_billed=is_billed, is_final=is_final)

    def charge(self, charge: Charge, stage: str, message: str, evidence: str = "") -> ChangeBuilder:
        """Count an error of a stage against the budget of its kind.

        Beyond the budget, the request's error is set. Returns this builder.
        """
        count = getattr(self.stages[stage], charge) + 1
        self.stages[stage] = replace(self.stages[stage], **{charge: count})
        if count > BUDGETS[charge]:
            self.error = ErrorInfo(CODES[charge], f"{message} (failed {count} times)", stage, evidence)
        else:
            self.publish("retrying", stage, message)
        return self

    def retry(self, claim: Claim, not_before: float = 0.0) -> Change:
        """Queue the claimed stage again, or end the request if a budget is exceeded.

        If an input is being computed again, the stage waits for it.
        """
        if self.error is not None:
            return self.end_request("failed", self.error, claim, is_dead_letter=True)
        self.drop_output(claim.stage)
        if self.inputs_exist(claim.stage):
            self.queue(claim.stage, not_before)
        else:
            self.move_stage(claim.stage, "waiting")
        return self.build(claim)

    def end_request(
        self, status: RequestStatus, error: ErrorInfo | None = None, claim: Claim | None = None, **fields: Any
    ) -> Change:
        """Return the change that ends the request: it cancels unfinished stages and releases all objects."""
        event_types: dict[RequestStatus, EventType] = {"completed": "completed", "cancelled": "cancelled"}
        self.publish(event_types.get(status, "failed"), message=error.message if error else "")
        for run in self.running:
            if claim is None or run.stage != claim.stage:
                self.account(run, is_billed=True)
                state = self.stages[run.stage]
                max_progress = max(state.max_progress, run.step / run.steps if run.steps else 0.0)
                self.stages[run.stage] = replace(
                    state, attempt=run.attempt, worker=run.worker, max_progress=max_progress
                )
        leased_at = {run.stage: run.since for run in self.running}
        for name, state in self.stages.items():
            if state.status != "done":
                queued_until = leased_at.get(name, self._wall if state.status == "queued" else 0.0)
                queued_s = max(0.0, queued_until - state.queued_at)
                self.move_stage(name, "cancelled", timings=replace(state.timings, queued_s=queued_s))
            self.stages[name] = replace(self.stages[name], output=None, checkpoint=None)
        return self.build(claim, status, completed_at=self._wall, error=error, **fields)

    def build(self, claim: Claim | None, status: RequestStatus = "in_progress", **fields: Any) -> Change:
        """Return the change, with these fields of the context set. Raises IllegalMove."""
        if status != self._before.status:
            _check(REQUEST_MOVES, f"request {self._before.id}", self._before.status, status)
        context = self.context(self._before.version + 1, status=status, **fields)
        return Change(context, claim, tuple(self.close), tuple(self.push), tuple(self.events))

    def context(self, version: int, **fields: Any) -> RequestContext:
        """Return the new context, with this version and these fields."""
        started_at = self._before.started_at
        if started_at is None:
            started_at = min((run.since for run in self.running), default=None)
        return replace(self._before, version=version, stages=self.stages, started_at=started_at, **fields)


def _check(moves: dict[str, frozenset[str]], subject: str, status: str, new_status: str) -> None:
    """Raise IllegalMove unless the table allows the move."""
    if new_status not in moves[status]:
        raise IllegalMove(f"{subject} cannot change from {status} to {new_status}")


def _nearest(inputs: Sequence[ObjectRef]) -> str:
    """Return the node that stores most bytes of these objects."""
    nbytes: Counter[str] = Counter()
    for ref in inputs:
        nbytes[ref.node] += ref.nbytes
    return max(nbytes, key=nbytes.__getitem__, default="")


def _affinity(context: RequestContext, params: Params) -> str:
    """Return the affinity of tasks that can share a batch: model, size and LoRA adapter."""
    size = [params[name] for name in context.modality.size if name in params]
    return f"{context.request.model} {size} {context.request.derived.lora_id}".rstrip() if size else ""
