"""A block allocator: an allocation is a list of equal blocks from anywhere, so no room is lost between allocations."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from unfuse.arena.extents import MemoryUsage
from unfuse.core.errors import ArenaFull

Runs: TypeAlias = Sequence[tuple[int, int]]
"""The places of an allocation's bytes, in order: (offset, nbytes) of each row of adjacent blocks."""


class Blocks:
    """Allocations of `capacity` bytes in blocks of `block` bytes (say, tokens x width x bytes of an element).

    An allocation takes the blocks that its actual length needs, wherever they are free, and may grow. A capacity that
    is no multiple of the block loses its rest. No lock: the caller has one. (Kwon et al., 2023: paged attention.)
    """

    def __init__(self, capacity: int, block: int) -> None:
        if block < 1 or capacity < block:
            raise ValueError(f"a span of {capacity} bytes has no room for one block of {block}")
        self._block, self._blocks = block, capacity // block
        self._free = list(range(self._blocks))
        self._taken: dict[int, list[int]] = {}
        self._requested: dict[int, int] = {}
        self._handles = count()
        self._high_water = 0

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` bytes in free blocks. Returns a handle. Raises ArenaFull, with nothing allocated."""
        handle = next(self._handles)
        self._extend(handle, [], nbytes)
        return handle

    def grow(self, handle: int, nbytes: int) -> None:
        """Make an allocation `nbytes` long in all; what it has stays where it is. Raises ArenaFull, nothing changed.

        Raises KeyError for a handle that is not taken, ValueError for a length it has outgrown.
        """
        if nbytes < self._requested[handle]:
            raise ValueError(f"an allocation of {self._requested[handle]} bytes does not grow to {nbytes}")
        self._extend(handle, self._taken[handle], nbytes)

    def free(self, handle: int) -> None:
        """Take every block of an allocation back. Raises KeyError for a handle that is not taken."""
        del self._requested[handle]
        for block in self._taken.pop(handle):
            heappush(self._free, block)

    def runs(self, handle: int) -> Runs:
        """Where an allocation's bytes lie. Raises KeyError for a handle that is not taken."""
        runs: list[tuple[int, int]] = []
        left = self._requested[handle]
        for block in self._taken[handle]:
            offset, nbytes = block * self._block, min(self._block, left)
            if runs and sum(runs[-1]) == offset:
                offset, before = runs.pop()
                runs.append((offset, before + nbytes))
            else:
                runs.append((offset, nbytes))
            left -= nbytes
        return runs

    def usage(self) -> MemoryUsage:
        """The present numbers. Any free block can serve any allocation, so all free bytes count as one piece."""
        free = len(self._free) * self._block
        return MemoryUsage(
            capacity=self._blocks * self._block,
            used=self._blocks * self._block - free,
            requested=sum(self._requested.values()),
            free=free,
            largest_free=free,
            high_water=self._high_water * self._block,
        )

    def _extend(self, handle: int, blocks: list[int], nbytes: int) -> None:
        more = -(-nbytes // self._block) - len(blocks)
        if more > len(self._free):
            raise ArenaFull(more * self._block, len(self._free) * self._block, self._blocks * self._block)
        self._taken[handle] = [*blocks, *(heappop(self._free) for _ in range(more))]
        self._requested[handle] = nbytes
        self._high_water = max(self._high_water, self._blocks - len(self._free))


def gather(memory: NDArray[np.uint8], runs: Runs) -> NDArray[np.uint8]:
    """The bytes that lie in `runs` of `memory`, one after another: a view where they are one run, else a copy."""
    parts = [memory[offset : offset + nbytes] for offset, nbytes in runs]
    return parts[0] if len(parts) == 1 else np.concatenate([memory[:0], *parts])


def scatter(memory: NDArray[np.uint8], runs: Runs, data: NDArray[np.uint8]) -> None:
    """Write `data` into `runs` of `memory`, which must be as long together. Raises ValueError if they are not."""
    if sum(nbytes for _, nbytes in runs) != data.nbytes:
        raise ValueError(f"{data.nbytes} bytes do not fill runs of {[nbytes for _, nbytes in runs]}")
    start = 0
    for offset, nbytes in runs:
        memory[offset : offset + nbytes] = data[start : start + nbytes]
        start += nbytes
