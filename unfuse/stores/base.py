"""The storage port: where the bytes of objects live. It knows nothing of tensors: `tensor_store.py` is built on it.

To check a new backend, run `unfuse.testing.check_store` on it: the suite is the contract in executable form, and the
memory backend is its simplest implementation.
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

PIECE = 256 * 1024  # bytes that are written and then hashed, before the next: a core still has them in its own cache


class Checksums:
    """Computes the checksums of `memory` while it is filled from front to back."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._bytes, self._chunk = memory.data, chunk_bytes(memory.nbytes)
        self._hasher = xxhash.xxh3_64()
        self._hashed, self._next = 0, min(self._chunk, memory.nbytes)
        self._values: list[int] = []

    def filled(self, end: int, least: int = PIECE) -> None:
        """The first `end` bytes are written: hash those that are new, if they are at least so many."""
        if end - self._hashed < least:
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
    def known(self) -> tuple[int, ...]:
        """Those of the chunks that are complete."""
        return tuple(self._values)

    def finish(self) -> tuple[int, ...]:
        """All bytes are written: return the checksum of every chunk."""
        self.filled(self._bytes.nbytes, 0)
        return tuple(self._values)


def checksums_of(memory: NDArray[np.uint8]) -> tuple[int, ...]:
    """The checksum of every chunk."""
    return Checksums(memory).finish()


DEFAULT_CAPACITY = 256 * 1024 * 1024
SPILL_CAPACITY = 64 * DEFAULT_CAPACITY


class StoreOptions(msgspec.Struct, frozen=True):
    """The options of a backend.

    `owner` is the owner of the objects in refs; `capacity` is bytes. With `address` and `write_token`, the store writes
    into memory that another process owns. `url` is the name that it was opened by. A store that spills begins when the
    share `threshold` of its fast part is used, and spills at most `spill_capacity` bytes. `run_dir` is the folder with
    the sockets of the other owners on this machine.
    """

    owner: str
    capacity: int = DEFAULT_CAPACITY
    address: str = ""
    write_token: bytes = b""
    url: str = ""
    threshold: float = 0.8
    spill_capacity: int = SPILL_CAPACITY
    run_dir: str = ""


class ObjectDraft(msgspec.Struct, frozen=True):
    """An object that is being written: `memory` is its bytes, the other fields go into its ref."""

    id: str
    key: bytes
    generation: int
    memory: Any


class ObjectHold:
    """The bytes of a sealed object. They neither move nor change until `release`.

    The hold releases itself when it, and every array over its bytes, is garbage.
    """

    def __init__(self, memory: NDArray[np.uint8], release: Callable[[], None]) -> None:
        self._memory = memory
        self._finalizer = weakref.finalize(self, release)
        self._finalizer.atexit = False

    def bytes(self, *, writable: bool = False) -> NDArray[np.uint8]:
        """The bytes, as an array that keeps this hold. Nobody may write; `writable` is a flag that torch insists on."""
        return np.asarray(_Region(self._memory, writable, self))

    @property
    def released(self) -> bool:
        """Whether it was ended."""
        return not self._finalizer.alive

    def release(self) -> None:
        """End the hold. Arrays over its bytes stay valid memory, but may show another object. Idempotent."""
        self._finalizer()


class _Region:
    """The base of an array: it keeps the hold alive as long as the array exists."""

    def __init__(self, memory: NDArray[np.uint8], writable: bool, hold: ObjectHold) -> None:
        self._hold = hold
        self.__array_interface__ = {**memory.__array_interface__, "data": (memory.ctypes.data, not writable)}


class StorageBackend(ABC):
    """Objects of one owner: written once, sealed, read by many, and freed when they are deleted and nobody holds them.

    Thread-safe. An object can be read only when it is sealed, and never changes then. An object that is aborted, or
    deleted and not held, frees its room. Other processes read at `address`, and must show `write_token` there to write;
    both are empty if no other process can reach the backend. `arena` is the memory for transfers, in the process that
    owns it. A `bounded` backend has no room but that memory's; one that `announces` lets objects be read while they are
    written.
    """

    address: str = ""
    write_token: bytes = b""
    arena: Arena | None = None
    bounded: bool = True
    announces: bool = False

    @abstractmethod
    def create(self, nbytes: int, request: str) -> ObjectDraft:
        """Allocate an object, to be filled and then sealed or aborted. Raises ArenaFull if there is no room now."""

    def reserve(self, nbytes: int, request: str) -> Extent:
        """Allocate room in `arena` for an object from another node. Raises ArenaFull."""
        assert self.arena
        return self.arena.create(nbytes, request)

    def at(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of the memory in which objects lie, whatever they are now."""
        raise NotImplementedError(f"{type(self).__name__} has no memory that others write")

    def announce(self, id: str, written: tuple[int, ...]) -> None:
        """Let an object be read while it is written; `written` has the checksums of all chunks that are complete.

        Raises ObjectLost if its request was released meanwhile.
        """
        raise NotImplementedError(f"{type(self).__name__} does not announce: {id} is read when it is whole")

    def is_whole(self, ref: ObjectRef) -> bool:
        """Whether an object that was announced, by this owner or another, is written to its end. Raises ObjectLost."""
        del ref
        return True

    @abstractmethod
    def seal(self, id: str) -> None:
        """Make an object readable. Raises ObjectLost, with its room freed, if its request was released meanwhile."""

    @abstractmethod
    def abort(self, id: str) -> None:
        """Drop an object that is not sealed."""

    @abstractmethod
    def hold(self, ref: ObjectRef) -> ObjectHold:
        """Hold an object, of this owner or another, to read it.

        Raises ObjectLost if it cannot be reached, is not sealed, or has another key, generation or length than the ref.
        """

    @abstractmethod
    def learn(self, peers: Mapping[str, tuple[str, str]]) -> None:
        """Learn where other owners are, as {owner: (node, address)}: their objects can be held from now on."""

    def reaches(self, owner: str) -> bool:
        """Whether another owner's memory can be mapped, at the address that was learned."""
        del owner
        return False

    @abstractmethod
    def delete(self, ref: ObjectRef) -> None:
        """Delete an object; those who hold it may read on. Idempotent. An object of another owner is not touched."""

    @abstractmethod
    def release(self, request: str) -> None:
        """Delete all objects of a request, also those that are being written. Idempotent."""

    @abstractmethod
    def holding(self) -> frozenset[str]:
        """Ids of the requests that this owner has objects of that are not deleted."""

    def idle(self) -> Sequence[Extent]:
        """Some sealed objects that nobody holds, the least recently used first: candidates for `spill`."""
        return ()

    def spill(self, ref: ObjectRef) -> None:
        """Free the room of an object that was copied elsewhere, unless somebody holds it.

        `holding` still has its request. Raises ObjectLost if it was deleted meanwhile.
        """
        self.delete(ref)

    @abstractmethod
    def usage(self) -> MemoryUsage:
        """How full it is."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. The store must not be used afterwards; arrays that it gave out stay valid."""


def open_backend(url: str, options: StoreOptions) -> StorageBackend:
    """Open the backend of that name or URL; "auto" is shared memory if the kernel has it. Raises ConfigError."""
    if url == "auto":
        url = "shared_memory" if hasattr(os, "memfd_create") else "memory"
    scheme = url.partition(":")[0]
    factory = resolve(BACKENDS, scheme if scheme in BACKENDS else url, "store")
    backend: StorageBackend = factory(msgspec.structs.replace(options, url=url))
    return backend


class TabledBackend(StorageBackend):
    """Objects in a table of this process, or by a connection to that of another one."""

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
    def holding(self) -> frozenset[str]:
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
