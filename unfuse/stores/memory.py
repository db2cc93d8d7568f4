"""Objects in this process's own memory: the plainest store, and the specification of the others."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from unfuse.arena.buddy import Usage
from unfuse.arena.objects import Extent, ObjectTable
from unfuse.core.errors import ArenaFull
from unfuse.core.object_ref import ObjectRef
from unfuse.stores.base import Draft, Hold, StorageBackend, StoreOptions


class _Heap:
    """Room that is one allocation of the operating system for each object."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._places = count()
        self._used = self._high_water = 0
        self.buffers: dict[int, NDArray[np.uint8]] = {}

    def allocate(self, nbytes: int) -> int:
        if nbytes > self._capacity - self._used:
            raise ArenaFull(nbytes, self._capacity - self._used, self._capacity)
        place = next(self._places)
        self.buffers[place] = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8, nbytes)
        self._used += nbytes
        self._high_water = max(self._high_water, self._used)
        return place

    def free(self, offset: int) -> None:
        self._used -= self.buffers.pop(offset).nbytes

    def usage(self) -> Usage:
        free = self._capacity - self._used
        return Usage(self._capacity, self._used, self._used, free, free, self._high_water)


class MemoryBackend(StorageBackend):
    """At most `capacity` bytes of objects, for threads of one process."""

    def __init__(self, capacity: int) -> None:
        self._heap = _Heap(capacity)
        self._objects = ObjectTable(self._heap)

    def create(self, nbytes: int, request: str) -> Draft:
        """See StorageBackend."""
        extent = self._objects.create(nbytes, request)
        return Draft(extent.id, extent.key, extent.generation, self._heap.buffers[extent.offset])

    def seal(self, id: str) -> None:
        """See StorageBackend."""
        self._objects.seal(id)

    def abort(self, id: str) -> None:
        """See StorageBackend."""
        self._objects.abort(id)

    def hold(self, ref: ObjectRef) -> Hold:
        """See StorageBackend."""
        extent = self._objects.hold(ref.id, ref.key, ref.generation, ref.nbytes)
        return Hold(self._heap.buffers[extent.offset], partial(self._objects.unhold, ref.id))

    def learn(self, peers: Mapping[str, tuple[str, str]]) -> None:
        """See StorageBackend: no other owner's memory can be reached."""

    def delete(self, ref: ObjectRef) -> None:
        """See StorageBackend."""
        self._objects.delete(ref.id)

    def release(self, request: str) -> None:
        """See StorageBackend."""
        self._objects.release(request)

    def holding(self) -> frozenset[str]:
        """See StorageBackend."""
        return self._objects.requests()

    def idle(self) -> list[Extent]:
        """See StorageBackend."""
        return self._objects.idle()

    def spill(self, ref: ObjectRef) -> None:
        """See StorageBackend."""
        self._objects.spill(ref.id)

    def usage(self) -> Usage:
        """See StorageBackend."""
        return self._objects.usage()

    def close(self) -> None:
        """See StorageBackend."""


def open_memory(options: StoreOptions) -> MemoryBackend:
    """A store of the given capacity; nobody else reaches it."""
    return MemoryBackend(options.capacity)
