"""Predicts costs of requests, in seconds of compute, from time models fitted to measurements."""

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
from unfuse.core.paths import create_private_folder, open_private
from unfuse.core.plan import ExecutionPlan, declared_pool
from unfuse.core.request import ColdStart, RequestContext, RequestRecord
from unfuse.scheduler.observer import Observer

log = structlog.get_logger(__name__)

#: Measurements of one amount of work: the number of each within its model, and its seconds.
Times = list[tuple[int, float]]

Array = NDArray[np.float64]

#: Amounts of work that a model stores, the latest ones, and the number of the newest times of each.
SIZES, EACH = 64, 8

#: Factor on the weight of a measurement with each newer one.
DECAY = 0.98

#: The index of the main coefficient (c). Every other coefficient has a penalty. The penalty is larger where its feature
#: is harder to distinguish from the main one, so that the main one explains the times.
MAIN = 2
#: The weight of a penalty, in measurements, if the feature grows FAR + 1 times as much as the main one.
SIMPLE = 0.05
#: See SIMPLE.
FAR = 3.0

#: Relative errors of this size count as usual, however well the other measurements fit.
SPREAD = 0.1

#: Number of times that a fit is repeated with new weights.
ROUNDS = 3


class TimeModel:
    """Predicts the seconds of work from its forwards and its size.

    The prediction is a + forwards × (b + c × size + d × size²), with no coefficient below 0, so more work never has a
    lower prediction. The square stands for attention. A single measurement, or several of one size, are scaled in
    proportion, by c.

    The fit uses the median of each amount of work, so that frequent amounts do not displace others. It minimizes
    relative errors by non-negative least squares (Lawson and Hanson 1974; with four coefficients, every support can be
    tried), with repeated weights by Cauchy's function (Holland and Welsch 1977). The first round takes errors relative
    to the measured seconds: a cold start takes 20 times the usual time, and nothing takes a twentieth.

    measurements: those of an earlier process, by work.
    """

    def __init__(self, measurements: Iterable[tuple[Work, Times]] = ()) -> None:
        self.times: dict[Work, Times] = dict(measurements)
        #: Numbers of all measurements, and of those since the last fit.
        self._seen = self._unfitted = max((number for times in self.times.values() for number, _ in times), default=0)
        self._coefficients = [0.0] * 4

    def add(self, work: Work, seconds: float) -> None:
        """Add a measurement of more than 0 seconds."""
        self._seen += 1
        self._unfitted += 1
        self.times[work] = [*self.times.pop(work, ()), (self._seen, seconds)][-EACH:]
        if len(self.times) > SIZES:
            del self.times[next(iter(self.times))]

    def seconds(self, work: Work) -> float:
        """Return the predicted seconds of this work. There must be a measurement.

        Fits again if more than an eighth of all measurements are newer than the last fit.
        """
        if self._unfitted > self._seen // 8:
            self.fit()
        products = (
            coefficient * feature for coefficient, feature in zip(self._coefficients, _features(work), strict=True)
        )
        return sum(products)

    def fit(self) -> None:
        """Fit the model to new measurements, if there are any. Takes about a millisecond."""
        if self._unfitted <= 0:
            return
        features = np.array([_features(work) for work in self.times])
        medians = np.array([median_low(seconds for _, seconds in times) for times in self.times.values()])
        ages = np.array([sum(DECAY ** (self._seen - number) for number, _ in times) for times in self.times.values()])

        predicted = medians
        weights = ages
        for _ in range(ROUNDS):
            coefficients = _fit(features / predicted[:, None], medians / predicted, weights)
            predicted = features @ coefficients
            errors = np.abs(medians / predicted - 1)
            weights = ages / (1 + (errors / (2 * max(SPREAD, np.median(errors)))) ** 2)
        self._unfitted = 0
        self._coefficients = [float(coefficient) for coefficient in coefficients]


def _features(work: Work) -> list[float]:
    """Return the features of this work: the factors of the four coefficients."""
    forwards, size = work
    return [1.0, forwards, forwards * size, forwards * size * size]


def _fit(rows: Array, targets: Array, weights: Array) -> Array:
    """Return the non-negative coefficients with the least weighted squared errors and penalties.

    rows: (measurements, 4) features. targets, weights: (measurements,).
    """
    max_features = rows.max(0)  # scales each feature to 1
    rows = rows / max_features
    ratios = rows / rows[:, [MAIN]]
    penalties = SIMPLE * np.maximum(1, FAR / np.maximum(ratios.max(0) / ratios.min(0) - 1, 1e-3)) ** 2
    penalties[MAIN] = 1e-12  # nearly 0, but the equations stay solvable

    normal_matrix, normal_vector = (rows.T * weights) @ rows + np.diag(penalties), rows.T @ (weights * targets)
    best = np.zeros(4)
    for support in (list(subset) for size in range(1, 5) for subset in combinations(range(4), size)):
        candidate = np.zeros(4)
        candidate[support] = np.linalg.solve(normal_matrix[np.ix_(support, support)], normal_vector[support])
        # Of the solutions with some coefficients at 0, the best non-negative one explains most.
        if candidate.min() >= 0 and normal_vector @ candidate > normal_vector @ best:
            best = candidate
    coefficients: Array = best / max_features
    return coefficients


#: Seconds per pixel × frame × forward of a stage that was never measured: 3 s for 28 forwards of 1024 × 1024.
UNMEASURED_S = 1e-7

#: Most ids of requests that are stored so that none is learned from twice.
LEARNED = 1024

#: Most pools with a stored model, those learned last. Each version of a library creates new pools.
POOLS = 256

#: The completion rate covers the requests that ended in the last RECENT_S seconds, at most MAX_RECENT of them.
RECENT_S, MAX_RECENT = 60.0, 64

#: Bounds of the seconds that a refused client is asked to wait.
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0

#: Seconds outside these bounds are ignored as not measured.
LEAST_S, MOST_S = 1e-9, 1e9

Some = Annotated[float, Meta(ge=LEAST_S, le=1e12)]


class _Saved(msgspec.Struct):
    """The content of the file of measured costs."""

    version: Literal[1]
    #: Ids of the requests that were learned from.
    learned: list[str]
    #: By pool and device, the measurements of each amount of work.
    times: dict[str, dict[str, list[tuple[tuple[Some, Some], Annotated[list[tuple[int, Some]], Meta(min_length=1)]]]]]
    #: By declared pool, its last cold start.
    woken: dict[str, ColdStart]


class Costs(Observer):
    """Predicts costs by one time model per pool and device, and the rate of completions.

    path: the file of measured costs, or None. A file that cannot be read is logged and replaced.
    workers: registered workers by id, for the devices on which a stage ran or may run.
    """

    def __init__(
        self,
        path: Path | None = None,
        clock: Clock | None = None,
        workers: Mapping[str, WorkerInfo] = MappingProxyType({}),
    ) -> None:
        self._workers = workers
        self._clock = clock or SystemClock()
        self._path = path
        #: Whether the file has all that was learned.
        self._is_saved, self._save_failed = True, False
        #: Time models by pool and device.
        self._models: dict[str, dict[str, TimeModel]] = {}
        #: Ids of requests, in order; a dict as an ordered set.
        self._learned: dict[str, None] = {}
        #: Time and cost of each request that ended lately.
        self._ended: deque[tuple[float, float]] = deque(maxlen=MAX_RECENT)
        #: The last cold start of each declared pool.
        self.cold_starts: dict[str, ColdStart] = {}

        if path and path.exists():
            try:
                stored = msgspec.json.decode(path.read_bytes(), type=_Saved)
            except (OSError, msgspec.MsgspecError) as error:
                log.warning("saved stage costs cannot be read, learning again", file=str(path), reason=str(error))
                return
            self._learned = dict.fromkeys(stored.learned)
            self.cold_starts = stored.woken
            for pool, devices in stored.times.items():
                self._models[pool] = {device: TimeModel(times) for device, times in devices.items()}

    async def update_models(self) -> None:
        """Fit all models, and write the file if anything was learned.

        The file is replaced atomically. If it cannot be written, the next call tries again.
        """
        for model in (model for devices in self._models.values() for model in devices.values()):
            model.fit()
        if self._path and not self._is_saved:
            self._is_saved = True  # set before the write, during which further requests may be learned from
            times = {
                pool: {device: list(model.times.items()) for device, model in devices.items()}
                for pool, devices in self._models.items()
            }
            data = msgspec.json.encode(_Saved(1, list(self._learned), times, self.cold_starts))
            try:
                await asyncio.to_thread(_write, self._path, data)
            except OSError as error:
                self._is_saved = False  # the next call tries again
                if not self._save_failed:
                    log.warning("stage costs cannot be saved", file=str(self._path), reason=str(error))
                self._save_failed = True
            else:
                self._save_failed = False

    def learn(self, context: RequestContext) -> None:
        """Learn from the timings of a completed request. Each request is learned from once.

        A batched stage counts with its share of the batch, a cached one not at all. A resumed stage counts with the
        forwards of its last attempt only.
        """
        if context.id in self._learned:
            return
        self._learned[context.id] = None
        self._is_saved = False
        if len(self._learned) > LEARNED:
            del self._learned[next(iter(self._learned))]

        for stage in context.plan.stages:
            state = context.stages[stage.name]
            declared = declared_pool(stage.pool)
            if state.cold_start[1]:
                self.cold_starts[declared] = last_cold_start(self.cold_starts.get(declared), state.cold_start)

            timings = state.timings
            seconds = timings.run_s / max(1.0, timings.batch)
            if all(stage.work) and state.attempt and LEAST_S <= seconds <= MOST_S:
                forwards, size = stage.work
                has_steps = timings.steps > 0 <= timings.resumed
                computed_share = timings.steps / (timings.steps + timings.resumed) if has_steps else 1.0
                devices = self._models[stage.pool] = self._models.pop(stage.pool, {})  # moved to the end, as the newest
                if len(self._models) > POOLS:
                    del self._models[next(iter(self._models))]
                worker = self._workers.get(state.worker)
                device = timings.device or (worker.device if worker else "")
                devices.setdefault(device, TimeModel()).add((forwards * computed_share, size), seconds)

    @override
    def on_ended(self, context: RequestContext) -> None:
        self._ended.append((self._clock.now(), context.cost))
        if context.status == "completed":
            self.learn(context)

    def with_cost(self, context: RequestContext) -> RequestContext:
        """Return the request with predicted seconds of compute, of each stage and in all."""
        stages = tuple(
            replace(stage, cost=self.seconds(stage.pool, stage.work) or UNMEASURED_S * prod(stage.work))
            for stage in context.plan.stages
        )
        return replace(context, plan=ExecutionPlan(stages), cost=sum(stage.cost for stage in stages))

    def is_measured(self, context: RequestContext) -> bool:
        """Return whether the pool of each stage was measured, so that the prediction is meaningful."""
        return all(self.seconds(stage.pool, stage.work) is not None for stage in context.plan.stages)

    def seconds_until_admitted(self, cost: float) -> float:
        """Return the seconds after which a refused request of this cost should be sent again.

        They follow from the recent rate of completions.
        """
        interval_s, mean_cost = self._completion_rate(cost)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, interval_s * max(1.0, cost / mean_cost if mean_cost else 1.0)))

    def eta(self, record: RequestRecord) -> float | None:
        """Return the predicted seconds until a request ends: its own stages and the queue ahead.

        None if it has ended, or if the pool of a remaining stage was never measured.
        """
        context = record.context
        compute_s = 0.0
        if context.is_over:
            return None
        progress = {run.stage: run.step / run.steps for run in record.running if run.steps}
        for stage in context.plan.stages:
            if context.stages[stage.name].status != "done":
                seconds = self.seconds(stage.pool, stage.work)
                if seconds is None:
                    return None
                compute_s += seconds * (1.0 - progress.get(stage.name, 0.0))
        interval_s, _ = self._completion_rate(context.cost)
        return compute_s + interval_s * (record.position or 0)

    def _completion_rate(self, default: float) -> tuple[float, float]:
        """Return the mean seconds between recent ends of requests, and the mean cost of these.

        Both are `default` if none ended.
        """
        now = self._clock.now()
        recent = [(at, cost) for at, cost in self._ended if at > now - RECENT_S]
        if not recent:
            return default, default
        return (now - recent[0][0]) / len(recent), sum(cost for _, cost in recent) / len(recent)

    def seconds(self, pool: str, work: Work) -> float | None:
        """Return the predicted seconds of this work in a pool. None if nothing was measured.

        It is the mean over the pool's workers with a measured device. If there is no such worker, it is the mean over
        the pool's measured devices. If the pool was never measured, it is the mean over all pools that can replace it.
        """
        models = self._models.get(pool)
        if not models:
            other_models = (
                models
                for other_pool, models in self._models.items()
                if declared_pool(other_pool) == declared_pool(pool)
            )
            measured = [model for models in other_models for model in models.values()]
        else:
            devices = [worker.device for worker in self._workers.values() if pool in worker.pools]
            measured = [models[name] for name in devices if name in models] or list(models.values())
        return fmean(model.seconds(work) for model in measured) if measured else None


def _write(path: Path, data: bytes) -> None:
    """Replace a file atomically. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        create_private_folder(path.parent)
        with open(temporary, "wb", opener=open_private) as file:
            file.write(data)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def last_cold_start(last: ColdStart | None, cold_start: ColdStart) -> ColdStart:
    """Return a pool's last cold start, given one more that a request waited for.

    Overlapping ones are merged, since each request only knows the part that it waited for.

    last: the pool's last cold start so far. cold_start: the start and the end of the request's wait.
    """
    if last is None or cold_start[0] >= last[1]:
        return cold_start
    return last if cold_start[1] <= last[0] else (min(last[0], cold_start[0]), max(last[1], cold_start[1]))
