"""The storage port: where the bytes of objects live. It knows nothing of tensors; `tensor_store.py` is the face.

Whoever writes a backend runs `unfuse.testing.check_store` on it: the suite is the contract in executable form,
and the memory backend its plainest reading.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from unfuse.arena.arena import Arena
from unfuse.arena.buddy import Usage
from unfuse.arena.objects import Extent
from unfuse.core.object_ref import ObjectRef
from unfuse.core.registry import resolve
from unfuse.stores import BACKENDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFAULT_CAPACITY = 256 * 1024 * 1024
SPILL_CAPACITY = 64 * DEFAULT_CAPACITY


class StoreOptions(msgspec.Struct, frozen=True):
    """What a backend is opened with.

    `owner` names the objects' owner in refs; `capacity` is bytes. With `address` and `write_token` the store puts into
    memory that another process owns. `url` is the name it was opened by. A store that spills does so above the share
    `threshold` of its fast part, into at most `spill_capacity` bytes. `run_dir` is the folder in which the processes of
    this machine meet.
    """

    owner: str
    capacity: int = DEFAULT_CAPACITY
    address: str = ""
    write_token: bytes = b""
    url: str = ""
    threshold: float = 0.8
    spill_capacity: int = SPILL_CAPACITY
    run_dir: str = ""


class Draft(msgspec.Struct, frozen=True):
    """An object while it is written: `memory` is its bytes, the rest goes into its ref."""

    id: str
    key: bytes
    generation: int
    memory: Any


class Hold:
    """The bytes of a sealed object, which stay what and where they are until `release`.

    It is released by itself when neither it nor an array that lies in it exists any more.
    """

    def __init__(self, memory: NDArray[np.uint8], release: Callable[[], None]) -> None:
        self._memory = memory
        self._finalizer = weakref.finalize(self, release)
        self._finalizer.atexit = False

    def bytes(self, *, writable: bool = False) -> NDArray[np.uint8]:
        """The bytes, as an array that keeps this hold. `writable` only says so, for torch: nobody may write."""
        return np.asarray(_Region(self._memory, writable, self))

    def release(self) -> None:
        """Let go; arrays that lie in it stay valid memory, but may show another object. Again: no effect."""
        self._finalizer()


class _Region:
    """An array's base that keeps a hold alive beside the memory."""

    def __init__(self, memory: NDArray[np.uint8], writable: bool, hold: Hold) -> None:
        self._hold = hold
        self.__array_interface__ = {**memory.__array_interface__, "data": (memory.ctypes.data, not writable)}


class StorageBackend(ABC):
    """Objects of one owner: written once, sealed, read by many, deleted when the last reader lets go.

    Thread-safe. What is not sealed cannot be read; what is sealed never changes. Room comes back when an object is
    aborted, or deleted and not held. `address` is where other processes reach the objects, and `write_token` what they
    must show there to put their own; both are empty for a backend that no other process reaches. `arena` is where
    transfers begin and end, in the process that owns one. All that is put lies in memory where it is `bounded`.
    """

    address: str = ""
    write_token: bytes = b""
    arena: Arena | None = None
    bounded: bool = True

    @abstractmethod
    def create(self, nbytes: int, request: str) -> Draft:
        """Make room for an object, to be filled and then sealed or aborted. Raises ArenaFull when there is none now."""

    def reserve(self, nbytes: int, request: str) -> Extent:
        """Room in `arena` for an object from elsewhere, as `create` finds it. Raises ArenaFull."""
        assert self.arena
        return self.arena.create(nbytes, request)

    @abstractmethod
    def seal(self, id: str) -> None:
        """Make an object readable. Raises ObjectLost if its request was released meanwhile (the room is free then)."""

    @abstractmethod
    def abort(self, id: str) -> None:
        """Give up an object that is not sealed."""

    @abstractmethod
    def hold(self, ref: ObjectRef) -> Hold:
        """Read an object, of this owner or another.

        Raises ObjectLost unless it can be reached and is sealed, with the ref's key, generation and length.
        """

    @abstractmethod
    def learn(self, peers: Mapping[str, tuple[str, str]]) -> None:
        """Where other owners are, as {owner: (node, address)}: their objects can be held from now on."""

    def reaches(self, owner: str) -> bool:
        """Whether another owner, where it was said to be, is read from without its bytes being brought here."""
        del owner
        return False

    @abstractmethod
    def delete(self, ref: ObjectRef) -> None:
        """Let nobody new hold the object. Idempotent; an object of another owner is left alone."""

    @abstractmethod
    def release(self, request: str) -> None:
        """Delete all objects of a request, those being written included. Idempotent."""

    @abstractmethod
    def holding(self) -> frozenset[str]:
        """Ids of the requests that this owner has objects of (deleted ones not counted)."""

    def idle(self) -> Sequence[Extent]:
        """Some sealed objects of this owner that nobody holds, least recently used first: those `spill` may move."""
        return ()

    def spill(self, ref: ObjectRef) -> None:
        """Free the room of an object that is kept elsewhere now, unless somebody holds it.

        Its request still counts as held. Raises ObjectLost if it was given up meanwhile.
        """
        self.delete(ref)

    @abstractmethod
    def usage(self) -> Usage:
        """How full it is."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; the store is not used afterwards, arrays got from it may be."""


def open_backend(url: str, options: StoreOptions) -> StorageBackend:
    """The backend of that name, or at that URL; "auto" is shared memory where the kernel has it. Raises ConfigError."""
    if url == "auto":
        url = "shared_memory" if hasattr(os, "memfd_create") else "memory"
    scheme = url.partition(":")[0]
    factory = resolve(BACKENDS, scheme if scheme in BACKENDS else url, "store")
    backend: StorageBackend = factory(msgspec.structs.replace(options, url=url))
    return backend
