"""The serving end of a transfer, as the conformance suite uses it."""

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

#: Bytes of the arena at each end.
CAPACITY = 64 << 20
#: Longest time of whatever the suite waits for, in seconds.
WITHIN_S = 60


class ServingEnd(Protocol):
    """The end that serves objects, in this process or another.

    The bytes of an object are `pattern(seed, nbytes)`.
    """

    def start(self) -> str:
        """Serve the arena, also after `stop`. Returns the address."""
        ...

    def stop(self) -> None:
        """Stop serving. The objects stay."""
        ...

    def put(self, seed: int, nbytes: int) -> ObjectRef:
        """Return a sealed object."""
        ...

    def start_output(self, seed: int, nbytes: int) -> ObjectRef:
        """Return an unsealed object, whose ref has no checksums."""
        ...

    def write(self, ref: ObjectRef, chunks: int) -> None:
        """Write the first `chunks` chunks of an unsealed object, and announce them."""
        ...

    def seal(self, ref: ObjectRef) -> None:
        """Seal an object."""
        ...

    def abort(self, ref: ObjectRef) -> None:
        """Abort an unsealed object."""
        ...

    def delete(self, ref: ObjectRef) -> None:
        """Delete a sealed object."""
        ...

    def used(self) -> int:
        """Return the bytes of the arena in use."""
        ...


class ArenaOwner(ServingEnd):
    """A serving end in this process."""

    def __init__(self, open_engine: Callable[[], TransferEngine]) -> None:
        self._open = open_engine
        self._engine: TransferEngine | None = None
        self.arena = Arena(CAPACITY)
        #: Extent and bytes of each object, by id.
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
        ref = self.start_output(seed, nbytes)
        extent, data = self._extents[ref.id]
        self.arena.memory[extent.offset : extent.offset + nbytes] = data
        self.arena.seal(ref.id)
        return msgspec.structs.replace(ref, checksums=checksums_of(data))

    @override
    def start_output(self, seed: int, nbytes: int) -> ObjectRef:
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
    """Return the pseudo-random bytes of a seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def soon(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait until a condition holds. Raises AssertionError(`otherwise`) after WITHIN_S."""
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.005)
