"""Back-pressure between pools: limits on leases, so that later stages keep up.

The limits also leave room in arenas for later stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from graphlib import TopologicalSorter
from typing import Literal

import msgspec
from typing_extensions import override

from unfuse.core.messages import RequestTasks, WorkerInfo
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import declared_pool
from unfuse.core.request import RequestContext
from unfuse.core.task import ARENA, SLOTS
from unfuse.queues.base import LeaseRequest, PoolOffer, RegisteredWorker
from unfuse.scheduler.observer import Observer


class InFlight(Observer):
    """The declared output bytes of active requests by pool, and their lost outputs.

    Requests and losses that other schedulers recorded are added at the next review of the queue.
    """

    def __init__(self) -> None:
        #: By request, its declared output bytes in each declared pool.
        self._requests: dict[str, Counter[str]] = {}
        #: By request, the ids of its lost outputs.
        self._lost: dict[str, list[str]] = {}
        #: Requests that were announced since the last `sweep`.
        self._seen: set[str] = set()

    @override
    def on_announced(self, context: RequestContext) -> None:
        """Add an active request, or update its lost outputs."""
        self._seen.add(context.id)
        if context.id not in self._requests:
            sizes = self._requests[context.id] = Counter()
            for stage in context.plan.stages:
                sizes[declared_pool(stage.pool)] += stage.output_size
        if lost := [state.lost_output_id for state in context.stages.values() if state.lost_output_id]:
            self._lost[context.id] = lost

    @override
    def on_ended(self, context: RequestContext) -> None:
        self._requests.pop(context.id, None)
        self._lost.pop(context.id, None)

    on_refused = on_ended

    def sweep(self) -> None:
        """Drop requests that were not announced since the last sweep: another scheduler ended them."""
        self._requests = {request: sizes for request, sizes in self._requests.items() if request in self._seen}
        self._lost = {request: ids for request, ids in self._lost.items() if request in self._seen}
        self._seen = set()

    def largest(self, pools: Collection[str]) -> int:
        """Return the most bytes that one active request puts into these pools together."""
        names = {declared_pool(pool) for pool in pools}
        return max((sum(sizes[name] for name in names) for sizes in self._requests.values()), default=0)

    def lost_outputs(self, requests: Iterable[str]) -> list[str]:
        """Return the ids of these requests' lost outputs. Their owners may free them."""
        return [id for request in requests for id in self._lost.get(request, ())]


#: How tasks and workers are matched. "locality": by inputs on the worker's node and by the affinity of its tasks.
#: "round_robin": the worker that waits longest. "max_free_slots": the worker with most free slots.
Dispatch = Literal["locality", "round_robin", "max_free_slots"]

#: The rank of a waiting worker, from its numbers of slots and of free slots. The lowest rank is served first.
RANKS: dict[Dispatch, Callable[[int, int], float]] = {
    "locality": lambda slots, free: float(slots - free),
    "round_robin": lambda slots, free: 0.0,
    "max_free_slots": lambda slots, free: -float(free),
}

#: Tasks that may wait in a pool for each slot of its workers. With more, the pools that feed it get no leases.
AHEAD = 4


class Backpressure(msgspec.Struct, frozen=True):
    """The back-pressure between the pools of all served models."""

    #: By declared pool, the longest distance from a first stage of a pipeline.
    depth: dict[str, int]
    #: By declared pool, the later pools that it feeds, with the most tasks that may wait there.
    later_depths: dict[str, dict[str, int]]
    #: Declared pools whose tasks leave an object in the arena.
    pools_with_outputs: frozenset[str]
    #: By declared pool, the further resources that its tasks use.
    resource_amounts: dict[str, frozenset[str]] = {}
    #: Pools, by their full names, with more than one worker.
    several: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        specs: Iterable[ModelSpec],
        members: Iterable[RegisteredWorker],
        scaled_to_zero: Mapping[str, int] | None = None,
    ) -> Backpressure:
        """Return the back-pressure between the pools of these models, as these workers serve them.

        If two pools feed each other, only the deeper one can hold back the other.

        scaled_to_zero: declared pools that are scaled to zero, with the slots that their workers will have.
        """
        depths: dict[str, int] = {}
        readers_of: defaultdict[str, set[str]] = defaultdict(set)
        resources: dict[str, frozenset[str]] = {}
        for spec in specs:
            pools = spec.pools()
            producers = spec.pipeline.producers()
            resources |= {pools[stage.name]: frozenset(stage.needs) for stage in spec.pipeline.stages}
            inputs = {stage.name: {producers[name].name for name in stage.inputs} for stage in spec.pipeline.stages}

            distances: dict[str, int] = {}
            for name in TopologicalSorter(inputs).static_order():
                distances[name] = max((distances[producer] + 1 for producer in inputs[name]), default=0)
                depths[pools[name]] = max(distances[name], depths.get(pools[name], 0))
                for producer in inputs[name]:
                    readers_of[pools[producer]].add(pools[name])

        slots: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for member in members:
            for pool in member.info.pools:
                slots[declared_pool(pool)][pool] += member.info.slots

        # A pool that is scaled to zero counts with its future slots, so that the stages before it continue.
        later_depths = {
            pool: {
                live_pool: AHEAD * count
                for reader in readers
                if depths[reader] > depths[pool]
                for live_pool, count in (slots[reader] or {reader: (scaled_to_zero or {}).get(reader, 0)}).items()
            }
            for pool, readers in readers_of.items()
        }
        workers = Counter(pool for member in members for pool in member.info.pools)
        several_workers = frozenset(pool for pool, count in workers.items() if count > 1)
        return cls(depths, later_depths, frozenset(readers_of), resources, several_workers)

    def reserved_bytes(self, worker: WorkerInfo, in_flight: InFlight) -> dict[str, int]:
        """Return the arena bytes that each pool must leave free for the worker's later pools.

        Each depth has an equal share of the arena, and a pool leaves the shares of all deeper pools free. The deepest
        pool may fill the arena: it ends requests, which frees all their objects. A pool also leaves at least the bytes
        that the largest active request puts into the deeper pools. Otherwise requests could wait for each other.

        Only pools whose tasks leave an object are included.
        """
        depths = {
            pool: self.depth.get(declared_pool(pool), 0)
            for pool in worker.pools
            if declared_pool(pool) in self.pools_with_outputs
        }
        levels = sorted(set(depths.values()), reverse=True)
        later_pools = {level: [pool for pool in depths if depths[pool] > level] for level in levels}
        largest = {level: in_flight.largest(pools) if pools else 0 for level, pools in later_pools.items()}
        return {
            pool: max(worker.arena_bytes * levels.index(level) // len(levels), largest[level])
            for pool, level in depths.items()
        }

    def lease_request(
        self,
        worker: WorkerInfo,
        request: RequestTasks,
        reserved_bytes: Mapping[str, int],
        dispatch: Dispatch = "locality",
    ) -> LeaseRequest:
        """Return the lease request for a worker that requests tasks.

        From a pool with several workers, one task is leased at a time, and workers with fewer tasks are served first,
        so that no worker queues tasks that another one could start. Before a model swap (`request.after_pool` is set),
        only pools after that one are included.

        reserved_bytes: arena bytes to leave free, by pool, as the method `reserved_bytes` returns them.
        """
        # A worker that reports no free bytes cannot leave any free, so it gets one task, of any size.
        is_unbounded = request.free_arena_bytes is None and any(reserved_bytes.values())
        slots = 1 if is_unbounded else min(request.slots, worker.slots)
        is_local = dispatch == "locality"
        last_depth = self.depth.get(declared_pool(request.after_pool), -1)

        offers = {}
        for pool in worker.swappable_models.get(request.loaded_model, ()) if worker.swappable_models else worker.pools:
            name = declared_pool(pool)
            if self.depth.get(name, 0) <= last_depth:
                continue
            arena = (
                {}
                if request.free_arena_bytes is None
                else {ARENA: request.free_arena_bytes - reserved_bytes.get(pool, 0)}
            )
            resources = {resource: request.amounts.get(resource, 0) for resource in self.resource_amounts.get(name, ())}
            amounts = {SLOTS: min(slots, 1) if pool in self.several else slots} | arena | resources
            offers[pool] = PoolOffer(amounts, self.depth.get(name, 0), self.later_depths.get(name, {}))

        return LeaseRequest(
            offers,
            request.min_priority,
            preferred_node=worker.node if is_local else "",
            affinity=request.affinity if is_local else "",
            rank=RANKS[dispatch](worker.slots, min(request.slots, worker.slots)) + is_local * ordinal(worker.node),
        )


def ordinal(node: str) -> float:
    """Return a fraction below 1, from the number at the end of a node's name.

    It grows with the number and is added to a worker's rank. So the last pods of a StatefulSet, which a scale-down
    removes first, get tasks last. It is 0.0 for a name without a number.
    """
    number = node.rpartition("-")[2]
    return min(int(number), 999) / 1000 if "-" in node and number.isdecimal() else 0.0
