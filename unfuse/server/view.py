"""A request as clients see it."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec.structs import asdict

from unfuse.core.media import seconds_of
from unfuse.core.plan import PlannedStage
from unfuse.core.request import Record, RequestContext, ResultFile, Running
from unfuse.core.usage import billed_seconds
from unfuse.server.prices import FREE, Prices


def request_object(
    record: Record,
    base_url: str,
    eta: float | None = None,
    *,
    evidence: bool = False,
    prices: Prices = FREE,
    sign: Callable[[str], str] = str,
    wall: float = math.inf,
) -> dict[str, object]:
    """Return the request object. Times are Unix seconds, `eta` is seconds from now, which is `wall`.

    Links to results are `base_url` followed by their path as returned by `sign`.

    Its error comes with the stage and the `evidence` (a log's last lines) where one request is asked for by its id, and
    for dead ones; lists leave that out.
    """
    context, error = record.context, record.context.error
    request, webhook = context.request, context.webhook
    current = record.running[-1] if record.running else None
    running = {run.stage: run for run in record.running}
    step, steps = _steps(record)
    return {
        "id": context.id,
        "object": "request",
        "model": request.requested_model,
        "medium": context.medium.name,
        "prompt": request.params.get("prompt"),
        "params": {
            **{name: value for name, value in request.params.items() if name != "prompt"},
            **request.derived.values(),
        },
        "tenant": context.caller.tenant,
        "priority": context.delivery.priority,
        "status": record.status,
        "state": record.status,
        "stage": current.stage if current else None,
        "step": step,
        "steps": steps,
        "progress": progress(record),
        "queue_position": record.position,
        "eta_s": None if eta is None else round(eta, 3),
        "seed": request.params.get("seed"),
        "cost": _cost(record, prices, wall),
        "created_at": round(context.created_at, 3),
        "started_at": _started(record),
        "completed_at": None if context.completed_at is None else round(context.completed_at, 3),
        "attempts": _attempts(record),
        "stages": [_stage(context, planned, running.get(planned.name)) for planned in context.plan.stages],
        "result": [_result(file, base_url + sign(result_path(context, file.index))) for file in context.result],
        "error": error and {name: text for name, text in asdict(error).items() if name != "evidence" or evidence},
        "hint": request.hint or None,
        "metadata": context.delivery.metadata,
        "webhook": {
            "url": context.delivery.webhook,
            "state": webhook.state,
            "attempts": webhook.attempts,
            "reason": webhook.reason,
        }
        if context.delivery.webhook
        else None,
    }


def video_object(record: Record) -> dict[str, object]:
    """The request as a video of OpenAI's shape, which has four statuses: one that was ended without result failed."""
    context, status = record.context, record.status
    request, params = context.request, context.request.params
    frames, fps = params["num_frames"], params["fps"]
    error = context.error and {"code": context.error.code, "message": context.error.message}
    if status == "cancelled" and error is None:
        error = {"code": "cancelled", "message": "the request was cancelled"}
    return {
        "id": context.id,
        "object": "video",
        "created_at": int(context.created_at),
        "completed_at": None if context.completed_at is None else int(context.completed_at),
        "model": request.requested_model,
        "status": "failed" if status in ("cancelled", "expired") else status,
        "progress": progress(record),
        "prompt": params["prompt"],
        "seconds": seconds_of(float(frames or 0), float(fps or 1)),
        "size": size_of(context),
        "error": error,
        **{name: params[name] for name in ("num_frames", "fps", "seed", "output_format")},
        "metadata": context.delivery.metadata,
        **({"hint": request.hint} if request.hint else {}),
    }


def size_of(context: RequestContext) -> str:
    """Width and height in pixels, as they are asked for."""
    params = context.request.params
    return f"{params['width']}x{params['height']}"


def result_path(context: RequestContext, index: int) -> str:
    """Return the path of one result of a request."""
    return f"/v1/requests/{context.id}/result/{index}"


def progress(record: Record) -> int:
    """Percent of the predicted seconds that are behind it; 100 only at the end.

    It never falls: predictions are those of when it was accepted, and what an attempt reached counts for the next ones.
    """
    context = record.context
    if context.status == "completed":
        return 100
    parts = {name: 1.0 if state.status == "done" else state.reached for name, state in context.stages.items()}
    for run in record.running:
        parts[run.stage] = max(parts[run.stage], run.step / run.steps if run.steps else 0.0)
    costs = {stage.name: stage.cost or 1.0 for stage in context.plan.stages}
    behind = sum(costs[name] * part for name, part in parts.items())
    return min(99, int(100 * behind / sum(costs.values())))


def _result(file: ResultFile, url: str) -> dict[str, object]:
    flagged = {"flagged": True} if file.flagged else {}
    return {"url": url, "content_type": file.content_type, "bytes": file.bytes} | flagged


def _cost(record: Record, prices: Prices, wall: float) -> dict[str, object]:
    """Seconds of devices: predicted when it was accepted, and used so far, as its workers have reported."""
    used = billed_seconds(record.context, record.running, wall)
    money = prices.money(used)
    return {
        "predicted_s": round(record.context.cost, 3),
        "device_s": {name: round(seconds, 3) for name, seconds in used.items()},
        "money": None if money is None else round(money, 6),
    }


def _started(record: Record) -> float | None:
    """When a worker first took one of its tasks, in Unix seconds; None while it waits, or if all was cached."""
    begun = record.context.started_at
    if begun is None:
        begun = min((run.since for run in record.running), default=None)
    return None if begun is None else round(begun, 3)


def _steps(record: Record) -> tuple[int, int]:
    """The steps of the stage that runs; of a request of which none does, those of the stage that has most."""
    if record.running:
        return record.running[-1].step, record.running[-1].steps
    known = [(state.step, state.steps) for state in record.context.stages.values()]
    return max(known, key=lambda pair: pair[1], default=(0, 0))


def _attempts(record: Record) -> int:
    """How often the stage was begun that was begun most often.

    An attempt that was handed back before it began does not count. One whose lease ended with its scheduler does.
    """
    attempts = {name: state.attempt if state.status == "done" else 0 for name, state in record.context.stages.items()}
    attempts |= {run.stage: run.attempt for run in record.running}
    return max(
        (max(state.begun, attempts[name] - state.unbegun) for name, state in record.context.stages.items()), default=0
    )


def _stage(context: RequestContext, planned: PlannedStage, run: Running | None) -> dict[str, object]:
    state = context.stages[planned.name]
    return {
        "name": planned.name,
        "pool": planned.pool,
        "status": "leased" if run else state.status,
        "worker": run.worker if run else state.worker,
        "attempt": run.attempt if run else state.attempt,
        "cached": state.status == "done" and not state.attempt,
        **{name: getattr(state, name) for name in ("failures", "crashes", "recomputes")},
        **{name: _short(value) for name, value in asdict(run.timings if run else state.timings).items()},
    }


def _short(value: object) -> object:
    return round(value, 6) if isinstance(value, float) else value
