"""The memory of KV caches: what weights and activations leave on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from unfuse.planning.component_memory import KV_CACHE, ComponentMemory
from unfuse.planning.placement import Device, PlacedWorker, WorkerPlan, left_bytes, memories, taken_bytes

#: The share of the memory that is left on a GPU which KV caches get. The rest is for larger requests than the default.
SHARE = 0.9


def with_kv_caches(
    placed: Sequence[PlacedWorker], plan: WorkerPlan, devices: Sequence[Device]
) -> tuple[PlacedWorker, ...]:
    """Return the workers with KV caches of the size that each gets.

    On a GPU, the caches of all models on it share what the workers leave, equally. On CPUs, and for workers that load
    one model at a time, they have the least size: room for the longest text.
    """
    if plan.max_loaded_models == "1":
        return tuple(placed)
    caches = Counter(name for worker in placed if not worker.on_cpu for name in worker.devices for _ in _caches(worker))
    left = left_bytes(taken_bytes(placed, plan), devices)
    # of the memories that a device uses, the one with most caches
    users = {name: 0 for name in left}
    for memory in memories(devices):
        for name in memory.devices:
            users[name] = max(users[name], sum(caches[user] for user in memory.devices))
    shares = {name: int(left[name] * SHARE) // users[name] for name in caches}

    def resize(worker: PlacedWorker, part: ComponentMemory) -> ComponentMemory:
        """Return the cache with its size on each rank."""
        if part.component != KV_CACHE or worker.on_cpu:
            return part
        # all ranks have caches of one size
        size = plan.kv // len(worker.devices) or part.bytes + min(shares[name] for name in worker.devices)
        return replace(part, bytes=size)

    return tuple(replace(worker, parts=tuple(resize(worker, part) for part in worker.parts)) for worker in placed)


def kv_option(worker: PlacedWorker, plan: WorkerPlan) -> int:
    """Return the bytes of each model's KV cache in a worker, for all ranks together.

    0: the worker chooses by the memory that is free when it loads the model.
    """
    sizes = [part.bytes for part in _caches(worker)]
    if worker.on_cpu or plan.max_loaded_models == "1" or not sizes:
        return 0
    # the option is one number for all models of the worker
    return min(sizes) * len(worker.devices)


def _caches(worker: PlacedWorker) -> list[ComponentMemory]:
    """Return the KV caches of a worker."""
    return [part for part in worker.parts if part.component == KV_CACHE]
