"""Model swapping: decides which model a worker loads, where one fits at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from unfuse.core.clock import Clock
from unfuse.core.messages import WorkerInfo
from unfuse.core.supervisor import Observers
from unfuse.queues.base import PoolStats, QueueBackend
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.registry import Registry

#: Largest share of a busy worker's time that is spent on loading. It sets how long a model stays loaded.
LOADING_SHARE = 0.1


class ModelBacklog(msgspec.Struct, frozen=True):
    """The tasks that wait for one model, and the other workers that serve it."""

    #: Number of waiting tasks.
    waiting: int = 0
    #: Age of the oldest waiting task, in seconds.
    oldest_s: float = 0.0
    #: Predicted seconds of compute of the waiting tasks together.
    left_s: float = 0.0
    #: Number of other workers that have the model loaded or load it.
    others: int = 0
    #: Whether another worker loads the model now.
    loading: bool = False


def min_stay_s(load_s: float) -> float:
    """Return the least seconds for which a busy worker keeps a loaded model.

    load_s: seconds that loading the model takes.
    """
    return load_s * (1 - LOADING_SHARE) / LOADING_SHARE


def choose_model(
    loaded: str, backlogs: Mapping[str, ModelBacklog], load_s: float, stayed_s: float, idle_s: float
) -> str:
    """Return the model that a worker should have: `loaded`, or one to swap to.

    A worker keeps its model for `min_stay_s` seconds, unless it is idle: without a task for `load_s` seconds. Then:

    1. A model that no other worker has is next, if it is worth loading: its backlog takes longer than loading, its
       oldest task has waited for `min_stay_s` seconds, or this worker is idle.
    2. Otherwise, a model that other workers have is next, if each of them has a larger backlog than each remaining
       worker of `loaded`. The difference must exceed the seconds of loading. A busy worker keeps its model if no other
       worker has it.

    Among several such models, the one with the oldest waiting task is next.

    backlogs: the backlog of each model of the worker, by name.
    load_s: seconds that loading takes.
    stayed_s: seconds since `loaded` was loaded.
    idle_s: seconds since the worker last had a task.
    """
    is_idle = idle_s >= load_s
    if not is_idle and stayed_s < min_stay_s(load_s):
        return loaded

    loaded_backlog = backlogs[loaded]
    candidates = {name: backlog for name, backlog in backlogs.items() if name != loaded and backlog.waiting}

    def is_worth_loading(backlog: ModelBacklog) -> bool:
        return is_idle or backlog.left_s >= load_s or backlog.oldest_s >= min_stay_s(load_s)

    def needs_more_workers(backlog: ModelBacklog) -> bool:
        if backlog.loading or not (is_idle or loaded_backlog.others):
            return False
        remaining_s = 0.0 if is_idle else loaded_backlog.left_s / loaded_backlog.others
        return backlog.left_s / backlog.others > load_s + remaining_s

    unserved = [name for name, backlog in candidates.items() if not backlog.others and is_worth_loading(backlog)]
    overloaded = [name for name, backlog in candidates.items() if backlog.others and needs_more_workers(backlog)]
    return max(unserved or overloaded, key=lambda name: candidates[name].oldest_s, default=loaded)


@dataclass(eq=False, slots=True)
class _WorkerModel:
    """The loaded model of a worker, and its swap."""

    #: Name of the loaded model. Empty while another one loads.
    name: str

    #: When it was loaded, by the clock.
    loaded_at: float

    #: When the worker last had a task, by the clock.
    worked_at: float

    #: The model to load next. Empty if none is.
    target: str = ""

    #: Whether the worker is ordered to load the target. The order is repeated until the worker has loaded it.
    is_ordered: bool = False


class ModelSwaps:
    """Decides on model swaps of one scheduler's workers at their heartbeats, by the backlogs.

    A decision is written to the registry first. The worker is ordered to swap only if a second decision agrees. So of
    two schedulers that decide at one time, at least the later one reads the other's decision. If both read it, the
    worker with the lower id swaps.
    """

    def __init__(self, queue: QueueBackend, registry: Registry, clock: Clock, observers: Observers[Observer]) -> None:
        self._queue = queue
        self._registry = registry
        self._clock = clock
        self._observers = observers
        #: By worker, its loaded model.
        self._workers: dict[str, _WorkerModel] = {}
        #: By model, the seconds that it took to load.
        self._load_s: dict[str, float] = {}

    def note_activity(self, worker: str) -> None:
        """Note that a worker has tasks now."""
        if model := self._workers.get(worker):
            model.worked_at = self._clock.now()

    def on_heartbeat(self, worker: WorkerInfo) -> WorkerInfo:
        """Record a heartbeat, and return the worker with its swap target, to be registered.

        A worker that failed to load its target reports the model that it had before.
        """
        if not worker.swappable_models:
            return worker
        now = self._clock.now()
        model = self._workers.get(worker.id)
        status = worker.status
        if model and status.loaded not in (model.name, ""):
            self._observers.notify(Observer.on_swapped, status.loaded, status.load_s)
        if model is None or status.loaded not in (model.name, ""):
            model = self._workers[worker.id] = _WorkerModel(status.loaded, now, now)
            self._load_s[status.loaded] = status.load_s
        model.name = status.loaded
        if status.target:
            model.target = status.target
            model.is_ordered = True
        self._registry.known_workers[worker.id] = worker = _with_target(worker, model.target)
        return worker

    async def decide_swap(self, worker: WorkerInfo, is_busy: bool) -> tuple[str, str]:
        """Return the model that a worker should load now, and the likely next one.

        Each is "" if there is none. The likely next one is the decision if the present model had been loaded longer, by
        the seconds of loading. The worker reads its files in advance.

        worker: as `on_heartbeat` returned it. is_busy: whether it has tasks.
        """
        model = self._workers.get(worker.id)
        likely_next = ""
        if model is None:
            return "", ""
        model.worked_at = self._clock.now() if is_busy else model.worked_at
        for _ in range(2 if worker.status.loaded and not model.is_ordered else 0):
            to_load, likely_next, swapping_ids = await self._decide(worker, model)
            if to_load == model.target:
                model.is_ordered = bool(to_load)
                break
            if model.target and worker.id < min(swapping_ids, default=""):
                break  # keep the registered target: the others withdraw theirs, or will have loaded them soon
            model.target = to_load
            await self._queue.register(_with_target(worker, to_load))
        return model.target if model.is_ordered else "", likely_next

    async def _decide(self, worker: WorkerInfo, model: _WorkerModel) -> tuple[str, str, list[str]]:
        """Return the models of `decide_swap` by current backlogs, and the ids of other swapping workers."""
        stats = (await self._queue.stats(worker.pools)).pools
        others = [member.info for member in await self._registry.workers() if member.info.id != worker.id]
        self._workers = {info.id: self._workers[info.id] for info in (*others, worker) if info.id in self._workers}
        backlogs = {name: self._backlog(worker, name, stats, others) for name in worker.swappable_models}
        load_s = max(self._load_s.get(name, worker.status.load_s) for name in worker.swappable_models)
        now = self._clock.now()
        stayed_s = now - model.loaded_at
        idle_s = now - max(model.loaded_at, model.worked_at)
        choices = [
            choose_model(model.name, backlogs, load_s, seconds_loaded, idle_s)
            for seconds_loaded in (stayed_s, stayed_s + load_s)
        ]
        to_load, likely_next = ("" if name == model.name else name for name in choices)
        return to_load, likely_next, [other.id for other in others if other.status.target]

    def until_loaded(self, pool: str) -> float | None:
        """Return the predicted seconds until a worker has loaded the model of a pool.

        None if a worker has loaded it, or no worker serves the pool.
        """
        workers = [worker for worker in self._registry.known_workers.values() if pool in worker.pools]
        if not workers or any(pool in worker.available_pools for worker in workers):
            return None
        return min(self._predict_load(worker, pool) for worker in workers)

    def _backlog(
        self, worker: WorkerInfo, name: str, stats: Mapping[str, PoolStats], others: Sequence[WorkerInfo]
    ) -> ModelBacklog:
        """Return the backlog of a model, without pools that the worker's loaded model serves too.

        If the loaded model serves all pools of the model, all of them count.
        """
        pools = {*worker.swappable_models[name]}
        pool_stats = [stats[pool] for pool in pools - {*worker.available_pools} or pools if pool in stats]
        targets = [other.status.target for other in others]
        loaded_count = sum(pools <= {*other.available_pools} for other in others if not other.status.target)
        return ModelBacklog(
            waiting=sum(pool.waiting for pool in pool_stats),
            oldest_s=max((pool.oldest_s for pool in pool_stats), default=0.0),
            left_s=sum(pool.left_s for pool in pool_stats),
            others=loaded_count + targets.count(name),
            loading=name in targets,
        )

    def _predict_load(self, worker: WorkerInfo, pool: str) -> float:
        """Return the predicted seconds until a worker has loaded the model of a pool."""
        now = self._clock.now()
        model = self._workers.get(worker.id)
        models = [name for name, pools in worker.swappable_models.items() if pool in pools]
        load_s = min(self._load_s.get(name, worker.status.load_s) for name in models)
        if model is None or model.target:
            return load_s
        idle_until = max(model.loaded_at, model.worked_at) + load_s
        return load_s + max(0.0, min(model.loaded_at + min_stay_s(load_s), idle_until) - now)


def _with_target(worker: WorkerInfo, target: str) -> WorkerInfo:
    """Return the worker with this model as the one to load next."""
    return replace(worker, status=replace(worker.status, target=target))
