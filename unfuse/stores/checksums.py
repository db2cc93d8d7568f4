"""Checksums of an object's bytes: xxh3-64 of each chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from unfuse.core.object_ref import chunk_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Checksums:
    """Computes the checksums of `memory` while it is filled from front to back, chunk by chunk."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._values: list[int] = []
        self.chunk = chunk_bytes(memory.nbytes)

    def filled(self, end: int) -> None:
        """Compute the checksums of all complete chunks; the first `end` bytes are written."""
        while (len(self._values) + 1) * self.chunk <= end:
            self._add()

    def finish(self) -> tuple[int, ...]:
        """All bytes are written: return the checksum of every chunk."""
        while len(self._values) * self.chunk < self._memory.nbytes:
            self._add()
        return tuple(self._values)

    def _add(self) -> None:
        start = len(self._values) * self.chunk
        self._values.append(xxhash.xxh3_64_intdigest(self._memory[start : start + self.chunk].data))


def checksums_of(memory: NDArray[np.uint8]) -> tuple[int, ...]:
    """The checksum of every chunk."""
    return Checksums(memory).finish()
