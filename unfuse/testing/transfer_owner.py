"""The end of a transfer that serves: what the conformance suite asks of it, and one in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from typing_extensions import override

from unfuse.arena.arena import Arena
from unfuse.arena.objects import Extent
from unfuse.core.object_ref import CHUNK_BYTES, ObjectRef
from unfuse.core.request import new_request_id
from unfuse.stores.base import checksums_of
from unfuse.transfer.base import TransferEngine

if TYPE_CHECKING:
    from numpy.typing import NDArray

CAPACITY = 64 << 20
WITHIN_S = 60


class ServingEnd(Protocol):
    """The end that serves, in this process or another. Objects are of pattern bytes: `pattern(seed, nbytes)`."""

    def start(self) -> str:
        """Serve the arena (again); returns the address."""
        ...

    def stop(self) -> None:
        """Serve no more; the objects stay."""
        ...

    def put(self, seed: int, nbytes: int) -> ObjectRef:
        """A sealed object."""
        ...

    def begin(self, seed: int, nbytes: int) -> ObjectRef:
        """An object that is being written; its ref has no checksums."""
        ...

    def write(self, ref: ObjectRef, chunks: int) -> None:
        """Announce it, with so many chunks written."""
        ...

    def seal(self, ref: ObjectRef) -> None:
        """It is whole."""
        ...

    def abort(self, ref: ObjectRef) -> None:
        """It will never be."""
        ...

    def delete(self, ref: ObjectRef) -> None:
        """Give a sealed one up."""
        ...

    def used(self) -> int:
        """Bytes of the arena in use."""
        ...


class ArenaOwner(ServingEnd):
    """An owner of this process."""

    def __init__(self, open_engine: Callable[[], TransferEngine]) -> None:
        self._open = open_engine
        self._engine: TransferEngine | None = None
        self.arena = Arena(CAPACITY)
        self._extents: dict[str, tuple[Extent, NDArray[np.uint8]]] = {}

    @override
    def start(self) -> str:
        self._engine = self._open()
        return self._engine.serve(self.arena)

    @override
    def stop(self) -> None:
        if self._engine:
            self._engine.close()
        self._engine = None

    @override
    def put(self, seed: int, nbytes: int) -> ObjectRef:
        ref = self.begin(seed, nbytes)
        extent, data = self._extents[ref.id]
        self.arena.memory[extent.offset : extent.offset + nbytes] = data
        self.arena.seal(ref.id)
        return msgspec.structs.replace(ref, checksums=checksums_of(data))

    @override
    def begin(self, seed: int, nbytes: int) -> ObjectRef:
        extent = self.arena.create(nbytes, request := new_request_id())
        self._extents[extent.id] = extent, pattern(seed, nbytes)
        return ObjectRef(
            extent.id, "owner", "node", request, "s", 1, extent.generation, nbytes, (), (), extent.key, 0.0
        )

    @override
    def write(self, ref: ObjectRef, chunks: int) -> None:
        extent, data = self._extents[ref.id]
        end = min(chunks * CHUNK_BYTES, ref.nbytes)
        self.arena.memory[extent.offset : extent.offset + end] = data[:end]
        self.arena.announce(ref.id, checksums_of(data)[:chunks])

    @override
    def seal(self, ref: ObjectRef) -> None:
        self.arena.seal(ref.id)

    @override
    def abort(self, ref: ObjectRef) -> None:
        self.arena.abort(ref.id)

    @override
    def delete(self, ref: ObjectRef) -> None:
        self.arena.delete(ref.id)

    @override
    def used(self) -> int:
        return self.arena.usage().used


def pattern(seed: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes that no other seed has."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def soon(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait until something is so; AssertionError if it is never."""
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.005)
