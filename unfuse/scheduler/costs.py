"""What requests cost, in seconds of compute: a time model of each pool, fitted to what was measured."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import combinations
from math import prod
from pathlib import Path
from statistics import fmean, median_low
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
import numpy as np
import structlog
from msgspec import Meta
from msgspec.structs import replace
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.core.clock import Clock, SystemClock
from unfuse.core.messages import WorkerInfo
from unfuse.core.modalities import Work
from unfuse.core.plan import ExecutionPlan, declared
from unfuse.core.request import RequestContext, RequestRecord, Waking
from unfuse.scheduler.observer import Observer

Times = list[tuple[int, float]]  # which measurement of its model each was, and the seconds

Array = NDArray[np.float64]

SIZES, EACH = 64, 8  # amounts of work that are remembered, the latest ones, and how many of the newest times of each
FORGET = 0.98  # what a measurement weighs after each newer one

MAIN, SIMPLE, FAR = 2, 0.05, 3.0
"""Every part but the main one has a penalty of so much of a measurement, if it grows FAR + 1 times as much as the main
one over what was measured. Where the two are harder to tell apart it is larger, and the main one explains it."""

SPREAD = 0.1  # relative errors of this size are usual, however well the others fit
ROUNDS = 3  # how often a fit is weighed again


class TimeModel:
    """Seconds are a + forwards × (b + c × size + d × size²), no part below 0: more work is never predicted to be less.

    Attention is what grows with the square. A single measurement, or many of one size, are scaled in proportion, by c.
    Fitted are the medians of each amount of work, so that frequent ones do not displace what is known of others, by
    their relative errors under non-negative least squares (Lawson and Hanson 1974; of four parts, every support can be
    tried), weighed again by Cauchy's function (Holland and Welsch 1977). The first weights are of the measured seconds:
    a cold start takes 20 times what is usual, and nothing a twentieth.
    """

    def __init__(self, known: Iterable[tuple[Work, Times]] = ()) -> None:
        self.times: dict[Work, Times] = dict(known)
        self._seen = self._news = max((number for times in self.times.values() for number, _ in times), default=0)
        self._parts = [0.0] * 4

    def add(self, work: Work, seconds: float) -> None:
        """Take in a measurement, of more than 0 seconds."""
        self._seen, self._news = self._seen + 1, self._news + 1
        self.times[work] = [*self.times.pop(work, ()), (self._seen, seconds)][-EACH:]
        if len(self.times) > SIZES:
            del self.times[next(iter(self.times))]

    def seconds(self, work: Work) -> float:
        """Predicted seconds, once anything was measured; at most an eighth of all measurements is not yet taken in."""
        if self._news > self._seen // 8:
            self.fit()
        return sum(part * feature for part, feature in zip(self._parts, _features(work), strict=True))

    def fit(self) -> None:
        """Take in what was measured since the last fit: about a millisecond, if there is anything."""
        if self._news <= 0:
            return
        features = np.array([_features(work) for work in self.times])
        found = np.array([median_low(seconds for _, seconds in times) for times in self.times.values()])
        ages = np.array([sum(FORGET ** (self._seen - number) for number, _ in one) for one in self.times.values()])
        usual, weights = found, ages
        for _ in range(ROUNDS):
            parts = _fit(features / usual[:, None], found / usual, weights)
            usual = features @ parts
            off = np.abs(found / usual - 1)
            weights = ages / (1 + (off / (2 * max(SPREAD, np.median(off)))) ** 2)
        self._news, self._parts = 0, [float(part) for part in parts]


def _features(work: Work) -> list[float]:
    forwards, size = work
    return [1.0, forwards, forwards * size, forwards * size * size]


def _fit(rows: Array, shares: Array, weights: Array) -> Array:
    """The parts, none below 0, with the least squared errors of these shares, and penalties."""
    tops = rows.max(0)
    rows = rows / tops
    ratios = rows / rows[:, [MAIN]]
    penalties = SIMPLE * np.maximum(1, FAR / np.maximum(ratios.max(0) / ratios.min(0) - 1, 1e-3)) ** 2
    penalties[MAIN] = 1e-12
    a, b = (rows.T * weights) @ rows + np.diag(penalties), rows.T @ (weights * shares)
    best = np.zeros(4)
    for support in (list(some) for size in range(1, 5) for some in combinations(range(4), size)):
        found = np.zeros(4)
        found[support] = np.linalg.solve(a[np.ix_(support, support)], b[support])
        if found.min() >= 0 and b @ found > b @ best:  # of those within bounds, the best one explains most
            best = found
    parts: Array = best / tops
    return parts


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

    def __init__(
        self,
        saved: Path | None = None,
        clock: Clock | None = None,
        workers: Mapping[str, WorkerInfo] = MappingProxyType({}),
    ) -> None:
        self._workers, self._clock = workers, clock or SystemClock()
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
            timings, worker = state.timings, self._workers.get(state.worker)
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

    def eta(self, record: RequestRecord) -> float | None:
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
            devices = [worker.device for worker in self._workers.values() if pool in worker.pools]
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


def last_waking(known: Waking | None, waking: Waking) -> Waking:
    """The last waking of a pool, after another request has told of the part of it that it waited for."""
    if known is None or waking[0] >= known[1]:
        return waking
    return known if waking[1] <= known[0] else (min(known[0], waking[0]), max(known[1], waking[1]))
