"""Where the seconds of an attempt go: on the request's bill, or among those that were lost. Pure functions.

Every attempt is counted once. An attempt that completes is on the bill, and so is one that stops because its request is
over. An attempt that fails, is handed back, or whose worker is gone is lost: it costs the client nothing.
"""

from __future__ import annotations

from msgspec.structs import replace

from unfuse.core.messages import Stopped
from unfuse.core.request import (
    UNKNOWN_DEVICE,
    RequestContext,
    Running,
    StageState,
    Timings,
    Unreported,
    believable,
    newest,
)

MOST_UNREPORTED = 16  # attempts of one stage whose workers are still expected to report; older ones stay as they are

MOST_HAND_BACKS = 1000  # a report of an attempt whose number is higher by more than this is not believed


def bill(state: StageState, run: Running, *, is_final: bool = True) -> StageState:
    """Put an attempt on the bill. Unless this `is_final`, its worker may still report that it used more."""
    if run.attempt <= state.accounted:
        return state
    state = _counted(state, run, is_final, lost=False)
    return replace(state, timings=run.timings)


def lose(state: StageState, run: Running, *, is_final: bool = True) -> StageState:
    """Count an attempt as lost. Unless this `is_final`, its worker may still report that it used more."""
    if run.attempt <= state.accounted:
        return state
    return _lost(_counted(state, run, is_final, lost=True), run.timings.device, run.timings.device_s)


def not_begun(state: StageState, attempt: int) -> StageState:
    """Count an attempt that was handed back, or missed an input, before it began. It has used nothing."""
    if attempt <= state.accounted:
        return state
    return replace(state, accounted=attempt, unbegun=state.unbegun + 1)


def lose_output(state: StageState) -> StageState:
    """Count the attempt that completed a stage as lost, because its output is lost and the stage runs again."""
    return replace(_lost(state, state.timings.device, state.timings.device_s), timings=Timings())


def reported(context: RequestContext, stopped: Stopped, worker: str, wall: float) -> StageState | None:
    """Count what a worker says of an attempt that has ended. None if that is known already, or is not believed."""
    claim = stopped.claim
    state = context.stages.get(claim.stage)
    if state is None:
        return None
    timings = believable(stopped.timings, wall - context.created_at)
    known = state.unreported.get(claim.attempt)
    if known is not None:
        return _completed_report(state, claim.attempt, known, timings) if known.worker == worker else None
    if not state.accounted < claim.attempt <= max(state.attempt, state.accounted) + MOST_HAND_BACKS:
        return None
    # the attempt began after the transition that ended it was decided
    run = Running(claim.stage, claim.attempt, worker, 0.0, timings=timings)
    is_stopped = context.over and not state.timings.share_s and claim.attempt >= state.attempt
    return bill(state, run) if is_stopped else lose(state, run)


def _completed_report(state: StageState, attempt: int, known: Unreported, timings: Timings) -> StageState:
    state = replace(state, unreported={number: one for number, one in state.unreported.items() if number != attempt})
    timings = newest(known.timings, timings)
    if known.lost:
        return _lost(state, timings.device, timings.device_s - known.timings.device_s)
    return replace(state, timings=timings)


def _counted(state: StageState, run: Running, is_final: bool, *, lost: bool) -> StageState:
    unreported = dict(state.unreported)
    if not is_final:
        unreported[run.attempt] = Unreported(run.worker, run.timings, lost)
    newest_ones = dict(list(unreported.items())[-MOST_UNREPORTED:])
    steps = {"step": run.step, "steps": run.steps} if run.steps else {}
    return replace(state, accounted=run.attempt, begun=state.begun + 1, unreported=newest_ones, **steps)


def _lost(state: StageState, device: str, seconds: float) -> StageState:
    if seconds <= 0:
        return state
    device = device or UNKNOWN_DEVICE
    return replace(state, lost_s=state.lost_s | {device: state.lost_s.get(device, 0.0) + seconds})
