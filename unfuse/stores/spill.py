"""The spill backend: moves unused objects from a fast to a slow backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from threading import Lock
from time import time
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.arena.extents import MemoryUsage
from unfuse.arena.objects import Extent
from unfuse.core.errors import ArenaFull, ConfigError, NotFound, ObjectLost, TransientError
from unfuse.core.object_ref import ObjectRef
from unfuse.stores.base import ObjectDraft, ObjectHold, StorageBackend, StoreOptions, open_backend
from unfuse.stores.keyed import KeyedBackend, open_keyed

#: Seconds after which a spilled object is deleted at the next start: its owner has ended by then.
SPILLED_S = 24 * 3600

Allocated = TypeVar("Allocated")


class SpillBackend(StorageBackend):
    """Puts objects into `fast`, and offloads idle ones to `slow` above a threshold.

    The threshold is the share `options.threshold` of `fast`. The least recently used idle objects are moved first.
    Readers of this machine read a spilled object from `slow`, verified. For a transfer to another node, the owner loads
    the object into its arena again, unverified, because the reader verifies it.
    """

    bounded = False

    def __init__(self, fast: StorageBackend, slow: KeyedBackend, options: StoreOptions) -> None:
        self._fast, self._slow = fast, slow
        self._options = options
        self.address, self.write_token = fast.address, fast.write_token
        self.arena = fast.arena
        self.announces = fast.announces
        self._recall_lock = Lock()
        if self.arena:
            self.arena.recall = self._recall

    @override
    def create(self, nbytes: int, request: str) -> ObjectDraft:
        """Allocate an object. Raises TransientError if there is no room and the slow store fails."""
        return self._allocate(nbytes, partial(self._fast.create, nbytes, request))

    @override
    def reserve(self, nbytes: int, request: str) -> Extent:
        assert self.arena
        return self._allocate(nbytes, partial(self.arena.create, nbytes, request))

    @override
    def memory(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return self._fast.memory(offset, nbytes)

    @override
    def announce(self, id: str, checksums: tuple[int, ...]) -> None:
        self._fast.announce(id, checksums)

    @override
    def is_whole(self, ref: ObjectRef) -> bool:
        return self._fast.is_whole(ref)

    @override
    def seal(self, id: str) -> None:
        self._fast.seal(id)

    @override
    def abort(self, id: str) -> None:
        self._fast.abort(id)

    @override
    def open(self, ref: ObjectRef) -> ObjectHold:
        try:
            return self._fast.open(ref)
        except ObjectLost:
            return self._slow.open(ref)

    @override
    def register_owners(self, peers: Mapping[str, tuple[str, str]]) -> None:
        self._fast.register_owners(peers)

    @override
    def reaches(self, owner: str) -> bool:
        return self._fast.reaches(owner)

    @override
    def delete(self, ref: ObjectRef) -> None:
        self._fast.delete(ref)
        self._slow.delete(ref)

    @override
    def release(self, request: str) -> None:
        """Release the request in both stores.

        The fast one is first; otherwise, an object that is being spilled could remain.
        """
        self._fast.release(request)
        self._slow.release(request)

    @override
    def stored_requests(self) -> frozenset[str]:
        return self._fast.stored_requests() | self._slow.stored_requests()

    @override
    def usage(self) -> MemoryUsage:
        """Return the sums of both stores."""
        fast, slow = (msgspec.structs.astuple(store.usage()) for store in (self._fast, self._slow))
        return MemoryUsage(*map(sum, zip(fast, slow, strict=True)))

    @override
    def close(self) -> None:
        """Close both stores. The owner also deletes the objects spilled from its arena."""
        if self.arena:
            self.arena.recall = None
        self._fast.close()
        if not self._options.address:
            with suppress(TransientError):
                self._slow.clear()
        self._slow.close()

    def _allocate(self, nbytes: int, allocate: Callable[[], Allocated]) -> Allocated:
        """Spill until `allocate` finds room, and return its result."""
        usage, idle = self._fast.usage(), self._idle()
        excess = usage.used + nbytes - self._options.threshold * usage.capacity
        with suppress(TransientError):  # a slow store that fails matters only when the fast one is full
            while excess > 0 and (spilled := self._spill_next(idle)):
                excess -= spilled
        while True:
            try:
                return allocate()
            except ArenaFull:
                if nbytes > usage.capacity or not self._spill_next(idle):
                    raise

    def _idle(self) -> Iterator[Extent]:
        """Yield idle objects, least recently used first."""
        yield from self._fast.idle()  # a generator, because `idle` is slow and often not needed

    def _spill_next(self, idle: Iterator[Extent]) -> int:
        """Spill the next of the `idle` objects that still exists.

        Returns its size in bytes, at least 1, or 0 if no object is left.
        """
        for extent in idle:
            with suppress(ObjectLost):  # it was released meanwhile
                self._spill_object(extent)
                return max(extent.nbytes, 1)
        return 0

    def _spill_object(self, extent: Extent) -> None:
        """Copy an object to the slow store and free it in the fast one.

        Raises ObjectLost if it was released.
        """
        id, nbytes = extent.id, extent.nbytes
        ref = ObjectRef(
            id, self._options.owner, "", extent.request, "", 0, extent.generation, nbytes, (), (), extent.key, 0.0
        )
        object_hold = self._fast.open(ref)
        self._slow.store(ref, object_hold.bytes())
        object_hold.release()
        try:
            self._fast.spill(ref)
        except ObjectLost:  # released meanwhile, and nothing else would delete the copy
            self._slow.delete(ref)
            raise

    def _recall(self, extent: Extent) -> Extent:
        """Load a spilled object into the arena and hold it.

        Raises ArenaFull while there is no room.
        """
        arena = self.arena
        assert arena

        def fill(offset: int) -> None:
            self._slow.load(extent, arena.memory[offset : offset + extent.nbytes])

        with self._recall_lock:
            with suppress(ObjectLost):  # another caller may have loaded it meanwhile
                return arena.hold(extent.id, extent.key, extent.generation, extent.nbytes)
            try:
                return self._allocate(extent.nbytes, partial(arena.restore, extent.id, fill))
            except (ArenaFull, ObjectLost):
                raise
            except (NotFound, TransientError) as error:
                raise ObjectLost(f"object {extent.id} is lost: {error}", extent.id) from error


def open_spill(options: StoreOptions) -> SpillBackend:
    """Open `spill:FAST+SLOW`, for example `spill:auto+disk:/scratch`. Raises ConfigError."""
    fast, _, slow = options.url.removeprefix("spill:").partition("+")
    if not slow or not 0 < options.threshold <= 1:
        raise ConfigError(
            f"{options.url!r}: use spill:FAST+SLOW, like spill:auto+disk:/scratch, and a threshold of at most 1"
        )
    slow_backend = open_keyed(
        msgspec.structs.replace(options, url=slow, capacity=options.spill_capacity), "increase spill.capacity"
    )
    if not options.address:
        slow_backend.forget(time() - SPILLED_S)
    return SpillBackend(open_backend(fast, options), slow_backend, options)
