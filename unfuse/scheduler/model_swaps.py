"""Which set of weights a worker should have loaded, where it has several and one fits at a time."""

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

LOADING_SHARE = 0.1
"""The most of a worker's time that goes to loading while it always has something to do: a set stays for so long."""


class ModelBacklog(msgspec.Struct, frozen=True):
    """What a set has to do: tasks that wait, seconds of the oldest, predicted seconds in all; and who else has it."""

    waiting: int = 0
    oldest_s: float = 0.0
    left_s: float = 0.0
    others: int = 0
    loading: bool = False


def stay(load_s: float) -> float:
    """Seconds that a set which took so long to load stays, while there is something to do."""
    return load_s * (1 - LOADING_SHARE) / LOADING_SHARE


def next_set(held: str, lines: Mapping[str, ModelBacklog], load_s: float, stayed_s: float, idle_s: float) -> str:
    """The set that a worker should have, which has had `held` for so long, and nothing to do for `idle_s`.

    It stays, unless it had nothing to do for as long as loading takes. Then what nobody else has is next, the longest
    wait first, once it is worth the loading or has waited for a stay. What others have gets one worker more if each of
    them has more to do than each of those that are left, who may not be none with something to do.
    """
    is_idle = idle_s >= load_s
    if not is_idle and stayed_s < stay(load_s):
        return held
    own = lines[held]
    waits = {name: line for name, line in lines.items() if name != held and line.waiting}
    found = [
        name for name, line in waits.items()
        if not line.others and (is_idle or line.left_s >= load_s or line.oldest_s >= stay(load_s))
    ] or [
        name for name, line in waits.items()
        if line.others and not line.loading and (is_idle or own.others)
        and line.left_s / line.others > load_s + (0.0 if is_idle else own.left_s / own.others)
    ]  # fmt: skip
    return max(found, key=lambda name: waits[name].oldest_s, default=held)


@dataclass(eq=False, slots=True)
class _WorkerModels:
    """What a worker has, since when, when it last had something to do; what it is to load, and whether it was told."""

    name: str
    since: float
    worked_at: float
    going: str = ""
    told: bool = False


class ModelSwaps:
    """The sets of the workers that one scheduler hears, decided at their heartbeats by what waits in the queue.

    Where a worker goes is in the registry before it is decided once more and told. So of two schedulers that decide at
    one time the later one at least knows of the other's, and if both do, the worker with the lower id goes.
    """

    def __init__(self, queue: QueueBackend, registry: Registry, clock: Clock, observers: Observers[Observer]) -> None:
        self._queue, self._registry, self._clock, self._observers = queue, registry, clock, observers
        self._held: dict[str, _WorkerModels] = {}
        self._took: dict[str, float] = {}

    def worked(self, worker: str) -> None:
        """A worker has something to do."""
        if held := self._held.get(worker):
            held.worked_at = self._clock.now()

    def heard(self, worker: WorkerInfo) -> WorkerInfo:
        """The worker as others have to know it: with where it goes. One that could not load that is back with the set
        before.
        """
        if not worker.sets:
            return worker
        now, held, status = self._clock.now(), self._held.get(worker.id), worker.status
        if held and status.loaded not in (held.name, ""):
            self._observers.tell(Observer.swapped, status.loaded, status.load_s)
        if held is None or status.loaded not in (held.name, ""):
            held = self._held[worker.id] = _WorkerModels(status.loaded, now, now)
            self._took[status.loaded] = status.load_s
        held.name = status.loaded
        if status.target:
            held.going, held.told = status.target, True
        self._registry.known[worker.id] = worker = _with_target(worker, held.going)
        return worker

    async def next(self, worker: WorkerInfo, works: bool) -> tuple[str, str]:
        """The set that a worker, which was `heard` and has tasks if it `works`, should load in the place of its own,
        and the one that it would have to if it had stayed for another load; "" for none.
        """
        held, soon = self._held.get(worker.id), ""
        if held is None:
            return "", ""
        held.worked_at = self._clock.now() if works else held.worked_at
        for _ in range(2 if worker.status.loaded and not held.told else 0):
            load, soon, rivals = await self._decided(worker, held)
            if load == held.going:
                held.told = bool(load)
                break
            if held.going and worker.id < min(rivals, default=""):
                break  # the others give way, or have loaded soon
            held.going = load
            await self._queue.hello(_with_target(worker, load))
        return held.going if held.told else "", soon

    async def _decided(self, worker: WorkerInfo, held: _WorkerModels) -> tuple[str, str, list[str]]:
        """What `next` says of a worker as things stand, and the ids of those that go somewhere."""
        stats = (await self._queue.stats(worker.pools)).pools
        others = [member.info for member in await self._registry.workers() if member.info.id != worker.id]
        self._held = {one.id: self._held[one.id] for one in (*others, worker) if one.id in self._held}
        lines = {name: self._line(worker, name, stats, others) for name in worker.sets}
        load_s, now = max(self._took.get(name, worker.status.load_s) for name in worker.sets), self._clock.now()
        stayed_s, idle_s = now - held.since, now - max(held.since, held.worked_at)
        found = [next_set(held.name, lines, load_s, at, idle_s) for at in (stayed_s, stayed_s + load_s)]
        load, soon = ("" if name == held.name else name for name in found)
        return load, soon, [other.id for other in others if other.status.target]

    def until_loaded(self, pool: str) -> float | None:
        """Predicted seconds until somebody has loaded what serves a pool; None where somebody has, or nobody could."""
        able = [worker for worker in self._registry.known.values() if pool in worker.pools]
        if not able or any(pool in worker.open for worker in able):
            return None
        return min(self._wait(worker, pool) for worker in able)

    def _line(
        self, worker: WorkerInfo, name: str, stats: Mapping[str, PoolStats], others: Sequence[WorkerInfo]
    ) -> ModelBacklog:
        """What waits for a set and not for what the worker has already."""
        own = {*worker.sets[name]}
        lines = [stats[pool] for pool in own - {*worker.open} or own if pool in stats]
        going = [other.status.target for other in others]
        has = sum(own <= {*other.open} for other in others if not other.status.target)
        waiting, left_s = sum(line.waiting for line in lines), sum(line.left_s for line in lines)
        oldest_s = max((line.oldest_s for line in lines), default=0.0)
        return ModelBacklog(waiting, oldest_s, left_s, has + going.count(name), name in going)

    def _wait(self, worker: WorkerInfo, pool: str) -> float:
        now, held = self._clock.now(), self._held.get(worker.id)
        load_s = min(self._took.get(name, worker.status.load_s) for name, pools in worker.sets.items() if pool in pools)
        if held is None or held.going:
            return load_s
        idle_until = max(held.since, held.worked_at) + load_s
        return load_s + max(0.0, min(held.since + stay(load_s), idle_until) - now)


def _with_target(worker: WorkerInfo, target: str) -> WorkerInfo:
    """Return the worker as one that loads this set next."""
    return replace(worker, status=replace(worker.status, target=target))
