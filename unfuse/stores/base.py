"""The storage port: backends for the bytes of objects, below the tensor store.

A backend knows nothing of tensors: `tensor_store.py` is built on it. To check a new backend, run
`unfuse.testing.check_store` on it: the suite is the contract in executable form, and the memory backend is its
simplest implementation.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.arena.arena import Arena
from unfuse.arena.client import ArenaClient
from unfuse.arena.extents import MemoryUsage
from unfuse.arena.objects import Extent, ObjectTable
from unfuse.core.object_ref import ObjectRef, chunk_bytes
from unfuse.core.registry import resolve
from unfuse.stores import BACKENDS

#: Bytes that are written and then hashed before the next ones. So few of them are still in the core's own cache.
HASH_BYTES = 256 * 1024


class Checksums:
    """Computes the XXH3 checksum of each chunk while `memory` is filled."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._bytes, self._chunk = memory.data, chunk_bytes(memory.nbytes)
        self._hasher = xxhash.xxh3_64()
        self._hashed, self._next = 0, min(self._chunk, memory.nbytes)
        self._values: list[int] = []

    def filled(self, end: int, min_bytes: int = HASH_BYTES) -> None:
        """Hash the new ones of the first `end` bytes, filled from front to back.

        If there are fewer than `min_bytes` new bytes, a later call hashes them.
        """
        if end - self._hashed < min_bytes:
            return
        while self._hashed < end:
            stop = min(end, self._next)
            self._hasher.update(self._bytes[self._hashed : stop])
            self._hashed = stop
            if stop == self._next:
                self._values.append(self._hasher.intdigest())
                self._hasher.reset()
                self._next = min(stop + self._chunk, self._bytes.nbytes)

    @property
    def complete(self) -> tuple[int, ...]:
        """The checksums of the complete chunks."""
        return tuple(self._values)

    def finish(self) -> tuple[int, ...]:
        """Return the checksum of every chunk. All bytes are written."""
        self.filled(self._bytes.nbytes, 0)
        return tuple(self._values)


def checksums_of(memory: NDArray[np.uint8]) -> tuple[int, ...]:
    """Return the checksum of every chunk."""
    return Checksums(memory).finish()


#: Bytes of a store, and of its spilled objects, by default.
DEFAULT_CAPACITY = 256 * 1024 * 1024
SPILL_CAPACITY = 64 * DEFAULT_CAPACITY


class StoreOptions(msgspec.Struct, frozen=True):
    """The options of a backend."""

    #: The owner of the objects, as in their refs.
    owner: str

    #: Bytes of the store.
    capacity: int = DEFAULT_CAPACITY

    #: Address of the process whose memory the store writes into. Empty if it has its own.
    address: str = ""

    #: Proves the right to write at `address`.
    write_token: bytes = b""

    #: The URL that the store was opened by.
    url: str = ""

    #: Share of the fast part above which a store spills, from 0 to 1.
    threshold: float = 0.8

    #: Most bytes of spilled objects.
    spill_capacity: int = SPILL_CAPACITY

    #: Folder with the sockets of the other owners on this machine.
    run_dir: str = ""


class ObjectDraft(msgspec.Struct, frozen=True):
    """An object that is being written."""

    #: The object's id, for its ref.
    id: str

    #: Secret with which readers prove that they may read the object, for its ref.
    key: bytes

    #: Number that distinguishes the object from a later one in the same memory, for its ref.
    generation: int

    #: The bytes of the object, as a uint8 array.
    memory: Any


class ObjectHold:
    """A hold on a sealed object's bytes: they neither move nor change until `release`.

    The hold is released automatically when it and every array over its bytes are garbage.
    """

    def __init__(self, memory: NDArray[np.uint8], release: Callable[[], None]) -> None:
        self._memory = memory
        self._finalizer = weakref.finalize(self, release)
        self._finalizer.atexit = False  # when the process ends, nothing has to be released

    def bytes(self, *, writable: bool = False) -> NDArray[np.uint8]:
        """Return the bytes, as an array that keeps this hold.

        They must not be written. `writable` only sets the array's flag, which torch needs.
        """
        return np.asarray(_Region(self._memory, writable, self))

    @property
    def released(self) -> bool:
        """Whether the hold has ended."""
        return not self._finalizer.alive

    def release(self) -> None:
        """End the hold.

        Idempotent. Arrays over its bytes stay valid memory, but may then have the bytes of another object.
        """
        self._finalizer()


class _Region:
    """The base of an array: keeps the hold alive as long as the array exists."""

    def __init__(self, memory: NDArray[np.uint8], writable: bool, object_hold: ObjectHold) -> None:
        self._object_hold = object_hold
        self.__array_interface__ = {**memory.__array_interface__, "data": (memory.ctypes.data, not writable)}


class StorageBackend(ABC):
    """Objects of one owner: written once, sealed, read by many, and freed after deletion.

    Thread-safe. An object can be read only when it is sealed, and never changes then. Its room is freed when it is
    aborted, or when it is deleted and its last hold has ended.
    """

    #: Where other processes read. Empty if no other process can reach the backend.
    address: str = ""

    #: Other processes must show this token at `address` to write. Empty if none can.
    write_token: bytes = b""

    #: The memory for transfers, in the process that owns it.
    arena: Arena | None = None

    #: Whether the backend's room is only that of its memory. If not, it stores objects elsewhere too.
    bounded: bool = True

    #: Whether objects can be read while they are written.
    announces: bool = False

    @abstractmethod
    def create(self, nbytes: int, request: str) -> ObjectDraft:
        """Allocate an object, to be filled and then sealed or aborted. Raises ArenaFull."""

    def reserve(self, nbytes: int, request: str) -> Extent:
        """Allocate room in `arena` for an object from another node. Raises ArenaFull."""
        assert self.arena
        return self.arena.create(nbytes, request)

    def memory(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes of the objects' memory, with their present content."""
        raise NotImplementedError(f"{type(self).__name__} does not give access to its memory")

    def announce(self, id: str, checksums: tuple[int, ...]) -> None:
        """Let an object be read while it is written.

        `checksums` are those of all complete chunks. Raises ObjectLost if the object's request was released meanwhile.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot announce object {id}: its objects are readable only when complete"
        )

    def is_whole(self, ref: ObjectRef) -> bool:
        """Whether an announced object, of any owner, is completely written. Raises ObjectLost."""
        del ref
        return True

    @abstractmethod
    def seal(self, id: str) -> None:
        """Make an object readable.

        Raises ObjectLost, with its room freed, if its request was released meanwhile.
        """

    @abstractmethod
    def abort(self, id: str) -> None:
        """Drop an object that is not sealed."""

    @abstractmethod
    def open(self, ref: ObjectRef) -> ObjectHold:
        """Return a hold on an object, of any owner, to read it.

        Raises ObjectLost if the object cannot be reached, is not sealed, or has another key, generation or length
        than the ref.
        """

    @abstractmethod
    def register_owners(self, peers: Mapping[str, tuple[str, str]]) -> None:
        """Register the addresses of other owners, as {owner: (node, address)}.

        Their objects can be read from now on.
        """

    def reaches(self, owner: str) -> bool:
        """Whether another owner's memory can be mapped, at its registered address."""
        del owner
        return False

    @abstractmethod
    def delete(self, ref: ObjectRef) -> None:
        """Delete an object of this owner. Idempotent. Existing holds stay valid.

        An object of another owner is not touched.
        """

    @abstractmethod
    def release(self, request: str) -> None:
        """Delete all objects of a request, also unsealed ones. Idempotent."""

    @abstractmethod
    def stored_requests(self) -> frozenset[str]:
        """Return the ids of the requests with objects of this owner that are not deleted."""

    def idle(self) -> Sequence[Extent]:
        """Return sealed objects without a hold, least recently used first: candidates for `spill`."""
        return ()

    def spill(self, ref: ObjectRef) -> None:
        """Free the room of an object that was copied elsewhere, unless it is held.

        `stored_requests` still has its request. Raises ObjectLost if it was deleted meanwhile.
        """
        self.delete(ref)

    @abstractmethod
    def usage(self) -> MemoryUsage:
        """Return how full the backend is."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. The store must not be used afterwards.

        Arrays that it returned stay valid.
        """


def open_backend(url: str, options: StoreOptions) -> StorageBackend:
    """Open the backend of that name or URL. Raises ConfigError.

    "auto" is shared memory if the kernel has it, else the process's own memory.
    """
    if url == "auto":
        url = "shared_memory" if hasattr(os, "memfd_create") else "memory"
    scheme = url.partition(":")[0]
    factory = resolve(BACKENDS, scheme if scheme in BACKENDS else url, "store")
    backend: StorageBackend = factory(msgspec.structs.replace(options, url=url))
    return backend


class TabledBackend(StorageBackend):
    """A backend with an object table, of this process or another one."""

    def __init__(self, table: ObjectTable | ArenaClient) -> None:
        self._objects = table

    @override
    def seal(self, id: str) -> None:
        self._objects.seal(id)

    @override
    def abort(self, id: str) -> None:
        self._objects.abort(id)

    @override
    def delete(self, ref: ObjectRef) -> None:
        self._objects.delete(ref.id)

    @override
    def release(self, request: str) -> None:
        self._objects.release(request)

    @override
    def stored_requests(self) -> frozenset[str]:
        return self._objects.requests()

    @override
    def idle(self) -> list[Extent]:
        return self._objects.idle()

    @override
    def spill(self, ref: ObjectRef) -> None:
        self._objects.spill(ref.id)

    @override
    def usage(self) -> MemoryUsage:
        return self._objects.usage()
