"""The request object and the video object of the API; prices of devices."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import asdict

from unfuse.core.errors import UsageError
from unfuse.core.modalities import seconds_of
from unfuse.core.plan import PlannedStage, readable_pool
from unfuse.core.registry import nearest_name
from unfuse.core.request import UNKNOWN_DEVICE, RequestContext, RequestRecord, ResultFile, RunningStage, billed_seconds

#: Kinds of devices that can have a price. A device with any other name is a GPU, and of the kind cuda.
DEVICE_KINDS = ("cpu", "cuda", "xpu", "mps")

_PRICE = re.compile(r"([a-z]+)=([0-9]{1,9}(?:\.[0-9]{1,9})?)/h")


class Prices:
    """Prices of device time by kind of device, each `KIND=AMOUNT/h`, in any one currency.

    Raises UsageError for a price of another form or of an unknown kind.
    """

    def __init__(self, entries: Sequence[str] = ()) -> None:
        self._by_kind: dict[str, float] = {}
        for entry in entries:
            if not (match := _PRICE.fullmatch(entry)):
                raise UsageError(f"--price {entry}: write KIND=AMOUNT/h, like cuda=1.20/h")
            kind, amount = match.groups()
            if kind not in DEVICE_KINDS:
                nearest = nearest_name(kind, DEVICE_KINDS, 0.5)
                hint = f"did you mean {nearest}?" if nearest else f"kinds are {', '.join(DEVICE_KINDS)}"
                raise UsageError(f"--price {entry}: unknown device kind {kind}; {hint}")
            self._by_kind[kind] = float(amount)

    def unused_kinds(self, devices: Sequence[str]) -> list[str]:
        """Return the kinds that have a price, but no device among these."""
        return sorted(self._by_kind.keys() - {device.partition(":")[0] for device in devices})

    def money(self, device_seconds: Mapping[str, float]) -> float | None:
        """Return the cost of device seconds by device, or None if no prices are set.

        Devices of kinds without a price cost nothing.
        """
        if not self._by_kind:
            return None
        return sum(
            self._by_kind.get(kind_of(device), 0.0) * seconds / 3600 for device, seconds in device_seconds.items()
        )


FREE = Prices()  # no prices


def kind_of(device: str) -> str:
    """Return the kind of a device by the name that its worker reports.

    The kind of an unknown device is UNKNOWN_DEVICE.
    """
    kind = device.partition(":")[0]
    return kind if kind in (*DEVICE_KINDS, UNKNOWN_DEVICE) else "cuda"


def request_object(
    record: RequestRecord,
    base_url: str,
    eta: float | None = None,
    *,
    evidence: bool = False,
    prices: Prices = FREE,
    sign: Callable[[str], str] = str,
    wall: float = math.inf,
) -> dict[str, object]:
    """Return the request object of a record, as JSON types. Times are Unix seconds.

    base_url: the beginning of links to results.
    eta: predicted seconds until the request is over; None if unknown.
    evidence: whether the error includes its evidence, the last lines of a log. Lists leave it out.
    prices: the prices for its cost.
    sign: returns the path of a link with a signature.
    wall: the time now in Unix seconds, for the cost of running stages.
    """
    context = record.context
    error = context.error
    request = context.request
    webhook = context.webhook
    current = record.running[-1] if record.running else None
    running = {run.stage: run for run in record.running}
    step, steps = _steps(record)
    started_at = context.started_at
    if started_at is None:
        started_at = min((run.since for run in record.running), default=None)
    return {
        "id": context.id,
        "object": "request",
        "model": request.requested_model,
        "modality": context.modality.name,
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
        "eta_s": _rounded(eta),
        "seed": request.params.get("seed"),
        "cost": _cost(record, prices, wall),
        "created_at": round(context.created_at, 3),
        "started_at": _rounded(started_at),
        "completed_at": _rounded(context.completed_at),
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


def video_object(record: RequestRecord) -> dict[str, object]:
    """Return the video object of a request, in OpenAI's format.

    OpenAI has four statuses: a request that was cancelled or expired is `failed`.
    """
    context = record.context
    status = record.status
    request = context.request
    params = request.params
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
    """Return the requested size, as WIDTHxHEIGHT in pixels."""
    params = context.request.params
    return f"{params['width']}x{params['height']}"


def result_path(context: RequestContext, index: int) -> str:
    """Return the path of one result of a request."""
    return f"/v1/requests/{context.id}/result/{index}"


def progress(record: RequestRecord) -> int:
    """Return the progress of a request, as percent of its predicted seconds.

    It is 100 only when the request is completed. It never falls: the predictions are those at acceptance, and a new
    attempt of a stage counts for at least as much as an earlier one reached.
    """
    context = record.context
    if context.status == "completed":
        return 100

    fractions = {name: 1.0 if state.status == "done" else state.max_progress for name, state in context.stages.items()}
    for run in record.running:
        fractions[run.stage] = max(fractions[run.stage], run.step / run.steps if run.steps else 0.0)
    costs = {stage.name: stage.cost or 1.0 for stage in context.plan.stages}
    completed_cost = sum(costs[name] * fraction for name, fraction in fractions.items())
    return min(99, int(100 * completed_cost / sum(costs.values())))


def _cost(record: RequestRecord, prices: Prices, wall: float) -> dict[str, object]:
    """Return the predicted and the used device seconds, and their price.

    The prediction is that at acceptance. The use is as the workers have reported it so far.
    """
    used = billed_seconds(record.context, record.running, wall)
    return {
        "predicted_s": round(record.context.cost, 3),
        "device_s": {name: round(seconds, 3) for name, seconds in used.items()},
        "money": _rounded(prices.money(used), 6),
    }


def _result(file: ResultFile, url: str) -> dict[str, object]:
    flagged = {"flagged": True} if file.flagged else {}
    return {"url": url, "content_type": file.content_type, "bytes": file.bytes} | flagged


def _rounded(number: float | None, digits: int = 3) -> float | None:
    return None if number is None else round(number, digits)


def _steps(record: RequestRecord) -> tuple[int, int]:
    """Return the step and the number of steps of the running stage.

    If no stage runs, it is the stage with the most steps.
    """
    if record.running:
        return record.running[-1].step, record.running[-1].steps
    steps = [(state.step, state.steps) for state in record.context.stages.values()]
    return max(steps, key=lambda pair: pair[1], default=(0, 0))


def _attempts(record: RequestRecord) -> int:
    """Return the largest number of attempts that any stage has begun.

    An attempt whose lease was returned before it began does not count. An attempt whose lease ended with its scheduler
    does.
    """
    attempts = {name: state.attempt if state.status == "done" else 0 for name, state in record.context.stages.items()}
    attempts |= {run.stage: run.attempt for run in record.running}
    return max(
        (
            max(state.attempts_started, attempts[name] - state.attempts_not_started)
            for name, state in record.context.stages.items()
        ),
        default=0,
    )


def _stage(context: RequestContext, planned: PlannedStage, run: RunningStage | None) -> dict[str, object]:
    """Return the entry of one stage in the request object.

    `run` is its current attempt, if it runs.
    """
    state = context.stages[planned.name]
    return {
        "name": planned.name,
        "pool": readable_pool(planned.pool),
        "status": "leased" if run else state.status,
        "worker": run.worker if run else state.worker,
        "attempt": run.attempt if run else state.attempt,
        "cached": state.status == "done" and not state.attempt,
        **{name: getattr(state, name) for name in ("failures", "crashes", "recomputes")},
        "vae": state.vae or None,
        "device_failures": len(state.device_failures),
        **{
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in asdict(run.timings if run else state.timings).items()
        },
    }
