"""What requests cost, in seconds of compute, as learned from those that completed."""

from __future__ import annotations

from collections import deque
from math import prod

from unfuse.core.plan import Params, PlannedStage
from unfuse.core.request import Record, RequestContext

UNMEASURED_S = 1e-7
"""Seconds per pixel × frame × step of a model that never completed a request here: 3 s for 28 steps of 1024 × 1024."""

NEWEST = 0.1
"""Weight of the newest measurement in the running average."""

RECENT_S, REMEMBERED = 60.0, 64
"""How far back, in seconds and in requests, the pace of completions is looked at."""

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class Costs:
    """Running averages of seconds per pixel × frame × step, by model and stage kind, and the pace of late."""

    def __init__(self) -> None:
        self._rates: dict[str, dict[str, float]] = {}
        self._ended: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)

    def learn(self, context: RequestContext) -> None:
        """Take in what a completed request took. Who shared a forward counts their part, what was cached nothing."""
        rates = self._rates.setdefault(context.model, {})
        for stage in (stage for stage in context.plan.stages if context.stages[stage.name].attempt):
            timings = context.stages[stage.name].timings
            rate = timings.run_s / max(1.0, timings.batch) / _work(context.params)
            known = rates.setdefault(stage.kind, rate)
            rates[stage.kind] = known + NEWEST * (rate - known)

    def ended(self, context: RequestContext, now: float) -> None:
        """A request made room at this time of a monotonic clock."""
        self._ended.append((now, context.cost))

    def of(self, context: RequestContext) -> float:
        """Predicted seconds of compute of all its stages."""
        if context.model not in self._rates:
            finals = sum(stage.final for stage in context.plan.stages)
            return UNMEASURED_S * _work(context.params) * finals
        return sum(self._stage(context, stage) for stage in context.plan.stages)

    def until_room(self, cost: float, now: float) -> float:
        """Seconds after which there is presumably room for a request that was refused, by the pace of late."""
        pace, usual = self._pace(now, cost)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, pace * max(1.0, cost / usual if usual else 1.0)))

    def eta(self, record: Record, now: float) -> float | None:
        """Predicted seconds until it is over: those of its own stages, behind what is ahead. None if nobody knows."""
        context = record.context
        if context.over or context.model not in self._rates:
            return None
        parts = {run.stage: run.step / run.steps for run in record.running if run.steps}
        left = [stage for stage in context.plan.stages if context.stages[stage.name].status != "done"]
        own = sum(self._stage(context, stage) * (1.0 - parts.get(stage.name, 0.0)) for stage in left)
        return own + self._pace(now, self.of(context))[0] * (record.position or 0)

    def _pace(self, now: float, otherwise: float) -> tuple[float, float]:
        """Seconds from one end of a request to the next, and what these requests cost on average."""
        recent = [(at, cost) for at, cost in self._ended if at > now - RECENT_S]
        if not recent:
            return otherwise, otherwise
        return (now - recent[0][0]) / len(recent), sum(cost for _, cost in recent) / len(recent)

    def _stage(self, context: RequestContext, stage: PlannedStage) -> float:
        return self._rates[context.model].get(stage.kind, 0.0) * _work(context.params)


def _work(params: Params) -> float:
    sizes = (params.get(name) for name in ("width", "height", "num_frames", "num_inference_steps"))
    return prod(size if isinstance(size, int) and size > 0 else 1 for size in sizes)
