"""The memory behind an arena: taken from the machine when objects need it, and given back some time after the last."""

from __future__ import annotations

import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec

from unfuse.arena.limits import available_memory
from unfuse.core.errors import ArenaFull

BLOCK = 4096  # bytes of the smallest extent: a page


class MemoryUsage(msgspec.Struct, frozen=True):
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


class BuddyAllocator:
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

    def usage(self) -> MemoryUsage:
        """The present numbers."""
        largest = max((1 << order for order, free in enumerate(self._free) if free), default=0)
        return MemoryUsage(
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


EXTENT = 2 << 20  # bytes that are taken and given back together
SPARE_S = 10.0  # seconds for which an empty extent is kept: taking it again costs three times what writing to it does
ENTERED_FROM = 256 << 10  # bytes of an object whose pages are entered before writing; single faults cost others less
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14: where it is unknown, pages are entered by faults


class ExtentAllocator:
    """The room of an arena, of which only EXTENTs that hold objects, or lately did, take memory.

    An extent is allocated for real before an object is placed in it, so that no write ever fails for want of memory.
    `fd` is a file without a name. `spared` is called when there is something for `trim`, and not again until that
    returned None. No lock: the caller has one.
    """

    def __init__(self, capacity: int, name: str, now: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError if the file cannot be so long."""
        self._buddy, self._capacity, self._now = BuddyAllocator(capacity), capacity, now
        self._placed: dict[int, int] = {}
        self._objects = Counter[int]()
        self._spare: dict[int, float] = {}
        self._is_whole = self._trims = False
        self.spared: Callable[[], object] = bool
        self.given_back = 0  # how often extents were given back: maps of those are empty again
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, capacity)
        except OSError:
            os.close(self.fd)
            raise

    @property
    def held(self) -> int:
        """Bytes that it takes from the machine."""
        return self._capacity if self._is_whole else (len(self._objects) + len(self._spare)) * EXTENT

    def allocate(self, nbytes: int) -> int:
        """Return the offset of `nbytes` bytes that exist. Raises ArenaFull if there is no such room, or no memory."""
        offset = self._buddy.allocate(nbytes)
        extents = extents_of(offset, nbytes)
        try:
            self._take([extent for extent in extents if extent not in self._objects and extent not in self._spare])
        except ArenaFull:
            self._buddy.free(offset)
            raise
        self._placed[offset] = nbytes
        for extent in extents:
            self._spare.pop(extent, None)
            self._objects[extent] += 1
        return offset

    def free(self, offset: int) -> None:
        """Take back what `allocate` returned. Raises KeyError for any other offset."""
        self._buddy.free(offset)
        for extent in extents_of(offset, self._placed.pop(offset)):
            self._objects[extent] -= 1
            if not self._objects[extent]:
                del self._objects[extent]
                if not self._is_whole:
                    self._spare[extent] = self._now()
        if self._spare and not self._trims:
            self._trims = True
            self.spared()

    def usage(self) -> MemoryUsage:
        """The present numbers of the room."""
        return self._buddy.usage()

    def trim(self) -> float | None:
        """Give back what held no object for SPARE_S. Returns seconds until more is due, None if nothing is."""
        over = self._now() - SPARE_S
        due = [extent for extent, since in self._spare.items() if since <= over]
        for first, last in rows(due):
            start, stop = first * EXTENT, min((last + 1) * EXTENT, self._capacity)
            with mmap.mmap(self.fd, stop - start, mmap.MAP_SHARED, offset=start) as part:
                part.madvise(mmap.MADV_REMOVE)
        for extent in due:
            del self._spare[extent]
        self.given_back += bool(due)
        rest = next((since - over for since in self._spare.values()), None)
        self._trims = rest is not None
        return rest

    def fill(self) -> None:
        """Take all memory now, and give none back. Raises ArenaFull if there is not that much."""
        missing = {*range(-(-self._capacity // EXTENT))} - {*self._objects, *self._spare}
        self._take(sorted(missing))
        self._is_whole, self._spare = True, {}

    def _take(self, extents: list[int]) -> None:
        if not extents or self._is_whole:
            return
        needed, free = len(extents) * EXTENT, available_memory()
        try:
            if needed > free:
                raise MemoryError
            for first, last in rows(extents):
                start, stop = first * EXTENT, min((last + 1) * EXTENT, self._capacity)
                os.posix_fallocate(self.fd, start, stop - start)
        except (OSError, MemoryError) as error:
            no_memory = "the machine has no memory", "stop something there, or start workers with a smaller --arena"
            raise ArenaFull(needed, free, self._capacity, *no_memory) from error


class WritablePages:
    """Which extents one process has in its map for writing, so that writing to them meets no faults."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._given_back, self._entered = memory, 0, set[int]()

    def enter(self, offset: int, nbytes: int, given_back: int) -> None:
        """Enter the pages of an object, which exist. `given_back` is what the arena's says after that was placed."""
        if given_back != self._given_back:
            self._given_back, self._entered = given_back, set()
        missing = [extent for extent in extents_of(offset, nbytes) if extent not in self._entered]
        if nbytes < ENTERED_FROM or not missing:
            return
        for first, last in rows(missing):
            start, stop = first * EXTENT, min((last + 1) * EXTENT, len(self._memory))
            try:
                self._memory.madvise(POPULATE_WRITE, start, stop - start)
            except OSError:  # an older kernel
                return
        self._entered.update(missing)


def extents_of(offset: int, nbytes: int) -> range:
    """The numbers of the extents in which an object lies, one without bytes too."""
    return range(offset // EXTENT, -(-(offset + max(1, nbytes)) // EXTENT))


def rows(extents: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The first and last of each row of adjacent ones."""
    ordered = sorted(extents)
    known = {*ordered}
    firsts = [extent for extent in ordered if extent - 1 not in known]
    return zip(firsts, [extent for extent in ordered if extent + 1 not in known], strict=True)
