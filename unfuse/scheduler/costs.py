"""What requests cost, in seconds of compute, as learned from those that completed."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

import msgspec
import structlog
from msgspec import Meta
from msgspec.structs import replace
from typing_extensions import override

from unfuse.core.clock import Clock, SystemClock
from unfuse.core.media import Work
from unfuse.core.messages import WorkerInfo
from unfuse.core.plan import ExecutionPlan, declared
from unfuse.core.request import Record, RequestContext, Waking
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.time_model import TimeModel
from unfuse.scheduler.waking import last_waking

UNMEASURED_S = 1e-7  # seconds per pixel × frame × forward of a stage that never ran here: 3 s for 28 of 1024 × 1024
LEARNED = 1024  # the last so many requests that were learned from are known by their ids: none teaches twice
POOLS = 256  # the pools of which something is known, those learned of last: each version of a library makes new ones
RECENT_S, REMEMBERED = 60.0, 64  # how far back, in seconds and in requests, the pace of completions is looked at

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0

LEAST_S, MOST_S = 1e-9, 1e9  # what is outside was not measured

Some = Annotated[float, Meta(ge=LEAST_S, le=1e12)]

log = structlog.get_logger(__name__)


class _Saved(msgspec.Struct):
    """The file: ids of requests, what was measured by pool and device, the last waking of each declared pool."""

    version: Literal[1]
    learned: list[str]
    times: dict[str, dict[str, list[tuple[tuple[Some, Some], Annotated[list[tuple[int, Some]], Meta(min_length=1)]]]]]
    woken: dict[str, Waking]


class Costs(Observer):
    """A time model for each pool and each device it was computed on, and the pace of late.

    `workers` are the registered ones, by id: they tell what device a stage ran on, and which it may run on. What was
    learned is kept in the file `saved`, if any; one that cannot be read is told of, and replaced.
    """

    def __init__(self, saved: Path | None = None, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.workers: Mapping[str, WorkerInfo] = {}
        self._path, self._is_saved = saved, True
        self._models: dict[str, dict[str, TimeModel]] = {}
        self._learned: dict[str, None] = {}
        self._ended: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self.woken: dict[str, Waking] = {}
        if saved and saved.exists():
            try:
                found = msgspec.json.decode(saved.read_bytes(), type=_Saved)
            except (OSError, msgspec.MsgspecError) as error:
                log.warning("what stages take has to be learned again", file=str(saved), reason=str(error))
                return
            self._learned, self.woken = dict.fromkeys(found.learned), found.woken
            for pool, devices in found.times.items():
                self._models[pool] = {device: TimeModel(times) for device, times in devices.items()}

    async def settle(self) -> None:
        """Fit and write what was learned since the last time; a reader finds the old file or the new one."""
        for model in (model for devices in self._models.values() for model in devices.values()):
            model.fit()
        if self._path and not self._is_saved:
            self._is_saved = True
            models = self._models.items()
            times = {pool: {name: list(each.times.items()) for name, each in of.items()} for pool, of in models}
            data = msgspec.json.encode(_Saved(1, list(self._learned), times, self.woken))
            await asyncio.to_thread(_write, self._path, data)

    def learn(self, context: RequestContext) -> None:
        """Take in what a completed request took. Who shared a forward counts their part, what was cached nothing.

        Where a stage was resumed, its last attempt tells of as many forwards as it made itself.
        """
        if context.id in self._learned:
            return
        self._learned[context.id], self._is_saved = None, False
        if len(self._learned) > LEARNED:
            del self._learned[next(iter(self._learned))]
        for stage in context.plan.stages:
            state, name = context.stages[stage.name], declared(stage.pool)
            if state.slept[1]:
                self.woken[name] = last_waking(self.woken.get(name), state.slept)
            timings, worker = state.timings, self.workers.get(state.worker)
            seconds = timings.run_s / max(1.0, timings.batch)
            if all(stage.work) and state.attempt and LEAST_S <= seconds <= MOST_S:
                forwards, size = stage.work
                made = (
                    timings.steps / (timings.steps + timings.resumed) if timings.steps > 0 <= timings.resumed else 1.0
                )
                devices = self._models[stage.pool] = self._models.pop(stage.pool, {})
                if len(self._models) > POOLS:
                    del self._models[next(iter(self._models))]
                device = timings.device or (worker.device if worker else "")
                devices.setdefault(device, TimeModel()).add((forwards * made, size), seconds)

    @override
    def ended(self, context: RequestContext) -> None:
        self._ended.append((self._clock.now(), context.cost))
        if context.status == "completed":
            self.learn(context)

    def priced(self, context: RequestContext) -> RequestContext:
        """The request with predicted seconds of compute, of each of its stages and in all."""
        stages = tuple(
            replace(stage, cost=self.seconds(stage.pool, stage.work) or UNMEASURED_S * prod(stage.work))
            for stage in context.plan.stages
        )
        return replace(context, plan=ExecutionPlan(stages), cost=sum(stage.cost for stage in stages))

    def known(self, context: RequestContext) -> bool:
        """Whether each stage of a request was measured before, so that what is predicted for it means something."""
        return all(self.seconds(stage.pool, stage.work) is not None for stage in context.plan.stages)

    def until_room(self, cost: float) -> float:
        """Seconds after which there is presumably room for a request that was refused, by the pace of late."""
        pace, usual = self._pace(cost)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, pace * max(1.0, cost / usual if usual else 1.0)))

    def eta(self, record: Record) -> float | None:
        """Predicted seconds until it is over: those of its own stages, behind what is ahead. None if nobody knows."""
        context, own = record.context, 0.0
        if context.over:
            return None
        parts = {run.stage: run.step / run.steps for run in record.running if run.steps}
        for stage in context.plan.stages:
            if context.stages[stage.name].status != "done":
                seconds = self.seconds(stage.pool, stage.work)
                if seconds is None:
                    return None
                own += seconds * (1.0 - parts.get(stage.name, 0.0))
        return own + self._pace(context.cost)[0] * (record.position or 0)

    def _pace(self, otherwise: float) -> tuple[float, float]:
        """Seconds from one end of a request to the next, and what these requests cost on average."""
        now = self._clock.now()
        recent = [(at, cost) for at, cost in self._ended if at > now - RECENT_S]
        if not recent:
            return otherwise, otherwise
        return (now - recent[0][0]) / len(recent), sum(cost for _, cost in recent) / len(recent)

    def seconds(self, pool: str, work: Work) -> float | None:
        """The mean over the pool's workers, each of which may get it, as far as their devices were measured.

        With none of these, over the devices that were; for a pool that was not, over those that could serve in its
        place. None where nothing was.
        """
        models = self._models.get(pool)
        if not models:
            others = (models for other, models in self._models.items() if declared(other) == declared(pool))
            measured = [model for models in others for model in models.values()]
        else:
            devices = [worker.device for worker in self.workers.values() if pool in worker.pools]
            measured = [models[name] for name in devices if name in models] or list(models.values())
        return fmean(model.seconds(work) for model in measured) if measured else None


def _write(path: Path, data: bytes) -> None:
    """Replace a file, as a whole."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        log.warning("what stages take could not be kept", file=str(path), reason=str(error))
