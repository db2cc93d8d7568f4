"""Checksums of an object's bytes: xxh3-64 of each chunk."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from unfuse.core.object_ref import chunk_bytes

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
