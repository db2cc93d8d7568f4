"""The memory backend: objects in this process's own memory, the specification of the others."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.arena.extents import MemoryUsage
from unfuse.arena.objects import ObjectTable
from unfuse.core.errors import ArenaFull
from unfuse.core.object_ref import ObjectRef
from unfuse.stores.base import ObjectDraft, ObjectHold, StoreOptions, TabledBackend


class _Heap:
    """An allocator that requests memory from the operating system for each object.

    An offset is only a number that identifies the object's memory.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._offsets = count()
        self._used = self._high_water = 0
        self.buffers: dict[int, NDArray[np.uint8]] = {}

    def allocate(self, nbytes: int) -> int:
        if nbytes > self._capacity - self._used:
            raise ArenaFull(nbytes, self._capacity - self._used, self._capacity)
        offset = next(self._offsets)
        self.buffers[offset] = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8, nbytes)
        self._used += nbytes
        self._high_water = max(self._high_water, self._used)
        return offset

    def free(self, offset: int) -> None:
        self._used -= self.buffers.pop(offset).nbytes

    def usage(self) -> MemoryUsage:
        free = self._capacity - self._used
        return MemoryUsage(self._capacity, self._used, self._used, free, free, self._high_water)


class MemoryBackend(TabledBackend):
    """At most `capacity` bytes of objects, for threads of one process."""

    def __init__(self, capacity: int) -> None:
        self._heap = _Heap(capacity)
        super().__init__(ObjectTable(self._heap))

    @override
    def create(self, nbytes: int, request: str) -> ObjectDraft:
        extent = self._objects.create(nbytes, request)
        return ObjectDraft(extent.id, extent.key, extent.generation, self._heap.buffers[extent.offset])

    @override
    def open(self, ref: ObjectRef) -> ObjectHold:
        extent = self._objects.hold(ref.id, ref.key, ref.generation, ref.nbytes)
        return ObjectHold(self._heap.buffers[extent.offset], partial(self._objects.unhold, ref.id))

    @override
    def register_owners(self, peers: Mapping[str, tuple[str, str]]) -> None:
        """Do nothing: no other owner's memory can be reached."""

    @override
    def close(self) -> None:
        pass


def open_memory(options: StoreOptions) -> MemoryBackend:
    """Open a backend of the given capacity for this process alone."""
    return MemoryBackend(options.capacity)
