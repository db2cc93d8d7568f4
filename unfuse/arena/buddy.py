"""A buddy allocator: gives out contiguous, aligned extents of one span of bytes, and merges freed ones."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from unfuse.core.errors import ArenaFull

BLOCK = 4096  # bytes of the smallest extent: a page


class Usage(msgspec.Struct, frozen=True):
    """How full a span is, in bytes. `used` − `requested` is lost by rounding; `high_water` is the most ever used."""

    capacity: int
    used: int
    requested: int
    free: int
    largest_free: int
    high_water: int

    @property
    def fragmentation(self) -> float:
        """The share of the free bytes that one allocation cannot use, because they are not contiguous."""
        return 1 - self.largest_free / self.free if self.free else 0.0


class Buddy:
    """Extents of `capacity` bytes in multiples of `block`; a capacity that is no multiple loses its rest.

    A power of two of blocks starts at a multiple of its size where there is such a place (Knowlton, 1965). Whatever
    else is asked for takes just the blocks it needs, of the first row of free ones that is long enough: rounded up to
    powers of two, up to half the span would be free and of no use. No lock: the caller has one.
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
        orders = range((blocks - 1).bit_length(), len(self._free)) if blocks.bit_count() == 1 else ()
        if (order := next((order for order in orders if self._free[order]), None)) is not None:
            start = min(self._free[order])  # low ones, so that memory behind the others may be given back
            self._free[order].remove(start)
            end = start + (1 << order)
        elif row := next((row for row in self._rows() if row[1] - row[0] >= blocks), None):
            start, end = row
            for free in self._free:
                free.difference_update([place for place in free if start <= place < end])
        else:
            raise ArenaFull(nbytes, (self._blocks - self._used) * self._block, self._blocks * self._block)
        self._put_back(start + blocks, end)
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
        """The present numbers."""
        largest = max((1 << order for order, free in enumerate(self._free) if free), default=0)
        return Usage(
            capacity=self._blocks * self._block,
            used=self._used * self._block,
            requested=self._requested,
            free=(self._blocks - self._used) * self._block,
            largest_free=largest * self._block,
            high_water=self._high_water * self._block,
        )

    def _rows(self) -> Iterator[tuple[int, int]]:
        """The longest rows of free blocks: the first block of each, and the block after its last."""
        first = end = 0
        for start, order in sorted((start, order) for order, free in enumerate(self._free) for start in free):
            if start != end:
                yield first, end
                first = start
            end = start + (1 << order)
        yield first, end

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
