"""What every worker may take, so that nothing piles up where it holds memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from graphlib import TopologicalSorter
from typing import Literal

import msgspec
from typing_extensions import override

from unfuse.core.messages import RequestTasks, WorkerInfo
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import declared
from unfuse.core.request import RequestContext
from unfuse.core.task import ARENA, SLOTS
from unfuse.queues.base import LeaseRequest, PoolOffer, RegisteredWorker
from unfuse.scheduler.observer import Observer


class InFlight(Observer):
    """The declared bytes of every request in flight, by pool, and which outputs of it were given up.

    Requests that others accepted, and what others gave up, are learned of later.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Counter[str]] = {}
        self._lost: dict[str, list[str]] = {}
        self._seen: set[str] = set()

    @override
    def announced(self, context: RequestContext) -> None:
        """A request is in flight, or still is."""
        self._seen.add(context.id)
        if context.id not in self._requests:
            sizes = self._requests[context.id] = Counter()
            for stage in context.plan.stages:
                sizes[declared(stage.pool)] += stage.room
        if lost := [state.lost for state in context.stages.values() if state.lost]:
            self._lost[context.id] = lost

    @override
    def ended(self, context: RequestContext) -> None:
        self._requests.pop(context.id, None)
        self._lost.pop(context.id, None)

    refused = ended

    def sweep(self) -> None:
        """All that are in flight were told of since the last time: the others have ended elsewhere."""
        self._requests = {request: sizes for request, sizes in self._requests.items() if request in self._seen}
        self._lost = {request: ids for request, ids in self._lost.items() if request in self._seen}
        self._seen = set()

    def largest(self, pools: Collection[str]) -> int:
        """The most that one request puts into these pools together."""
        names = {declared(pool) for pool in pools}
        return max((sum(sizes[name] for name in names) for sizes in self._requests.values()), default=0)

    def lost(self, requests: Iterable[str]) -> list[str]:
        """The ids of the outputs of these requests that were given up: who still has one need not keep it."""
        return [id for request in requests for id in self._lost.get(request, ())]


Dispatch = Literal["locality", "round_robin", "max_free_slots"]
"""Which task a worker is given, or which worker a task: by what is near and fits what runs; by turns; by free slots."""

RANKS: dict[Dispatch, Callable[[int, int], float]] = {
    "locality": lambda slots, free: float(slots - free),
    "round_robin": lambda slots, free: 0.0,
    "max_free_slots": lambda slots, free: -float(free),
}
"""Who goes first of those that wait, the lowest, by slots and free ones."""

AHEAD = 4  # tasks that may wait in a pool, for each slot of its workers, before those that feed it stop


class Backpressure(msgspec.Struct, frozen=True):
    """What the models' pipelines, and who serves them, mean for who takes what.

    By declared pool, `depth` is how far it is from the beginning, `behind` how many may wait in the pools that it
    feeds, `holding` are those whose tasks leave an object, and `draws` says what other resources its tasks draw on.
    Pools in `several`, by their full names, have more than one worker.
    """

    depth: dict[str, int]
    behind: dict[str, dict[str, int]]
    holding: frozenset[str]
    draws: dict[str, frozenset[str]] = {}
    several: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, cards: Iterable[ModelSpec], members: Iterable[RegisteredWorker], asleep: Mapping[str, int] | None = None
    ) -> Backpressure:
        """The flow through these models' pools, of which some are `asleep` and will have so many slots.

        Among pools that feed each other, only later ones hold back others.
        """
        depth: dict[str, int] = {}
        fed: defaultdict[str, set[str]] = defaultdict(set)
        draws: dict[str, frozenset[str]] = {}
        for card in cards:
            pools, producers = card.pools(), card.pipeline.producers()
            draws |= {pools[stage.name]: frozenset(stage.needs) for stage in card.pipeline.stages}
            before = {stage.name: {producers[name].name for name in stage.inputs} for stage in card.pipeline.stages}
            far: dict[str, int] = {}
            for name in TopologicalSorter(before).static_order():
                far[name] = max((far[other] + 1 for other in before[name]), default=0)
                depth[pools[name]] = max(far[name], depth.get(pools[name], 0))
                for other in before[name]:
                    fed[pools[other]].add(pools[name])
        slots: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for member in members:
            for pool in member.info.pools:
                slots[declared(pool)][pool] += member.info.slots
        behind = {
            pool: {
                manned: AHEAD * count
                for name in names
                if depth[name] > depth[pool]
                for manned, count in (slots[name] or {name: (asleep or {}).get(name, 0)}).items()
            }
            for pool, names in fed.items()
        }
        workers = Counter(pool for member in members for pool in member.info.pools)
        several = frozenset(pool for pool, count in workers.items() if count > 1)
        return cls(depth, behind, frozenset(fed), draws, several)

    def keep(self, worker: WorkerInfo, in_flight: InFlight) -> dict[str, int]:
        """What each of its pools that leave objects in its arena has to leave free there for later ones.

        That is their share: the last may fill the arena, and ends requests, which gives all of it back. And it is as
        much as any request in flight still puts there, or one that is large would wait for others that wait for it.
        """
        depth = {pool: self.depth.get(declared(pool), 0) for pool in worker.pools if declared(pool) in self.holding}
        levels = sorted(set(depth.values()), reverse=True)
        later = {level: [pool for pool in depth if depth[pool] > level] for level in levels}
        most = {level: in_flight.largest(pools) if pools else 0 for level, pools in later.items()}
        return {
            pool: max(worker.room * levels.index(level) // len(levels), most[level]) for pool, level in depth.items()
        }

    def wanted(
        self, worker: WorkerInfo, ask: RequestTasks, keep: Mapping[str, int], dispatch: Dispatch = "locality"
    ) -> LeaseRequest:
        """What a worker that asks may be given, where so many bytes have to stay free in its arena.

        Of a pool that others serve too it gets one task at a time, and those that hold fewer go before it: or it would
        hold what they could begin. Before it loads other weights it gets only what lies `after` what has just ended.
        """
        blind = ask.room is None and any(keep.values())  # of one task, how much room it takes does not matter
        slots, local = 1 if blind else min(ask.slots, worker.slots), dispatch == "locality"
        offers, ended = {}, self.depth.get(declared(ask.after), -1)
        for pool in worker.sets.get(ask.holds, ()) if worker.sets else worker.pools:
            arena = {} if ask.room is None else {ARENA: ask.room - keep.get(pool, 0)}
            name = declared(pool)
            if self.depth.get(name, 0) <= ended:
                continue
            others = {resource: ask.amounts.get(resource, 0) for resource in self.draws.get(name, ())}
            amounts = {SLOTS: min(slots, 1) if pool in self.several else slots} | arena | others
            offers[pool] = PoolOffer(amounts, self.depth.get(name, 0), self.behind.get(name, {}))
        return LeaseRequest(
            offers,
            ask.above,
            near=worker.node if local else "",
            affinity=ask.affinity if local else "",
            rank=RANKS[dispatch](worker.slots, min(ask.slots, worker.slots)) + local * ordinal(worker.node),
        )


def ordinal(node: str) -> float:
    """A share of a rank, by the number that the node's name ends in: who would be taken away first gets work last."""
    number = node.rpartition("-")[2]
    return min(int(number), 999) / 1000 if "-" in node and number.isdecimal() else 0.0
