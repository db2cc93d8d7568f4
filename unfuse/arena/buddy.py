"""A buddy allocator: cuts contiguous, aligned extents out of one span of bytes, and merges what comes back."""

from __future__ import annotations

import msgspec

from unfuse.core.errors import ArenaFull

BLOCK = 4096
"""Bytes of the smallest extent: a page."""


class Usage(msgspec.Struct, frozen=True):
    """How full a span is, in bytes. `used` − `requested` is what rounding costs; `high_water` is the most ever used."""

    capacity: int
    used: int
    requested: int
    free: int
    largest_free: int
    high_water: int

    @property
    def occupancy(self) -> float:
        """The share of the span that is taken."""
        return self.used / self.capacity

    @property
    def waste(self) -> float:
        """The share of what is taken that nobody asked for: rounding, inside of allocations."""
        return 1 - self.requested / self.used if self.used else 0.0

    @property
    def fragmentation(self) -> float:
        """The share of what is free that one allocation cannot have: gaps, between allocations."""
        return 1 - self.largest_free / self.free if self.free else 0.0


class Buddy:
    """Extents of `capacity` bytes in multiples of `block`; a capacity that is no multiple loses its rest.

    An extent starts at a multiple of its size rounded up to a power of two, but takes only the blocks it needs: what is
    left of the power of two stays free. No lock: the caller has one. (Knowlton, 1965; Linux's alloc_pages_exact.)
    """

    def __init__(self, capacity: int, block: int = BLOCK) -> None:
        self._block = block
        self._blocks = capacity // block
        if not self._blocks:
            raise ValueError(f"a span of {capacity} bytes has no room for one block of {block}")
        self._free: list[set[int]] = [set() for _ in range(self._blocks.bit_length())]
        self._taken: dict[int, tuple[int, int]] = {}
        self._used = self._requested = self._high_water = 0
        self._put_back(0, self._blocks)

    def allocate(self, nbytes: int) -> int:
        """Return the offset of `nbytes` free bytes, now taken. Raises ArenaFull if there are not that many in a row."""
        blocks = max(1, -(-nbytes // self._block))
        order = (blocks - 1).bit_length()
        found = next((k for k in range(order, len(self._free)) if self._free[k]), None)
        if found is None:
            raise ArenaFull(nbytes, (self._blocks - self._used) * self._block, self._blocks * self._block)
        start = self._free[found].pop()
        self._put_back(start + blocks, start + (1 << found))
        self._taken[start] = blocks, nbytes
        self._used += blocks
        self._requested += nbytes
        self._high_water = max(self._high_water, self._used)
        return start * self._block

    def free(self, offset: int) -> None:
        """Take back an extent by the offset `allocate` returned. Raises KeyError for any other."""
        start = offset // self._block
        blocks, nbytes = self._taken.pop(start)
        self._used -= blocks
        self._requested -= nbytes
        self._put_back(start, start + blocks)

    def usage(self) -> Usage:
        """The counters now."""
        largest = max((1 << order for order, free in enumerate(self._free) if free), default=0)
        return Usage(
            capacity=self._blocks * self._block,
            used=self._used * self._block,
            requested=self._requested,
            free=(self._blocks - self._used) * self._block,
            largest_free=largest * self._block,
            high_water=self._high_water * self._block,
        )

    def _put_back(self, start: int, end: int) -> None:
        while start < end:
            order = (end - start).bit_length() - 1
            if start:
                order = min(order, (start & -start).bit_length() - 1)
            self._merge(start, order)
            start += 1 << order

    def _merge(self, start: int, order: int) -> None:
        while (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self._free[order].add(start)
