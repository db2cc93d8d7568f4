"""The memory behind an arena: allocated when objects need it, and given back when unused."""

from __future__ import annotations

import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec

from unfuse.core.errors import ArenaFull
from unfuse.core.host_memory import available_memory

#: Bytes of the smallest allocation: a page.
BLOCK = 4096

#: Bytes that are allocated and given back together.
EXTENT = 2 << 20

#: Seconds for which an empty extent is kept. Allocating it again costs three times as much as writing to it.
SPARE_S = 10.0

#: Bytes of an object from which its pages are populated before writing. Single page faults delay other processes less.
ENTERED_FROM = 256 << 10

#: MADV_POPULATE_WRITE, since Linux 5.14. On older kernels, pages are populated by page faults.
POPULATE_WRITE = 23


class MemoryUsage(msgspec.Struct, frozen=True):
    """How full a span is. All fields are bytes."""

    #: Size of the span.
    capacity: int

    #: Allocated bytes, rounded up to blocks.
    used: int

    #: Allocated bytes, as requested. `used` − `requested` is lost by rounding.
    requested: int

    #: Bytes that are not allocated: `capacity` − `used`.
    free: int

    #: The largest contiguous free part. The buddy allocator counts powers of two of blocks only.
    largest_free: int

    #: The most bytes that were ever used.
    high_water: int

    @property
    def fragmentation(self) -> float:
        """The share of the free bytes outside the largest contiguous free part.

        One allocation cannot use it. 0 if no byte is free.
        """
        return 1 - self.largest_free / self.free if self.free else 0.0


class BuddyAllocator:
    """Allocates parts of `capacity` bytes in multiples of `block`.

    Bytes behind the last whole block are not used. An allocation of a power of two of blocks starts at a multiple of
    its size if there is space (Knowlton, 1965). Any other allocation takes just the blocks that it needs, from
    the first row of free blocks that is long enough. Rounded up to powers of two, it could leave half of the span free
    and unusable. Not thread-safe: the caller has a lock.
    """

    def __init__(self, capacity: int, block: int = BLOCK) -> None:
        self._block = block
        self._blocks = capacity // block
        if not self._blocks:
            raise ValueError(f"a span of {capacity} bytes has no room for one block of {block}")
        self._free: list[set[int]] = [set() for _ in range(self._blocks.bit_length())]
        self._allocated: dict[int, tuple[int, int]] = {}
        self._used = 0
        self._requested = 0
        self._high_water = 0
        self._put_back(0, self._blocks)

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` contiguous bytes. Returns their offset. Raises ArenaFull."""
        blocks = max(1, -(-nbytes // self._block))
        orders = range((blocks - 1).bit_length(), len(self._free)) if blocks.bit_count() == 1 else ()
        if (order := next((order for order in orders if self._free[order]), None)) is not None:
            start = min(self._free[order])  # a low place, so that the memory behind it can be given back
            self._free[order].remove(start)
            end = start + (1 << order)
        elif row := next((row for row in self._rows() if row[1] - row[0] >= blocks), None):
            start, end = row
            for free in self._free:
                free.difference_update([block for block in free if start <= block < end])
        else:
            raise ArenaFull(nbytes, (self._blocks - self._used) * self._block, self._blocks * self._block)

        self._put_back(start + blocks, end)
        self._allocated[start] = blocks, nbytes
        self._used += blocks
        self._requested += nbytes
        self._high_water = max(self._high_water, self._used)
        return start * self._block

    def free(self, offset: int) -> None:
        """Free an allocation by its offset. Raises KeyError for any other offset."""
        start = offset // self._block
        blocks, nbytes = self._allocated.pop(start)
        self._used -= blocks
        self._requested -= nbytes
        self._put_back(start, start + blocks)

    def usage(self) -> MemoryUsage:
        """Return how full the span is.

        `largest_free` is the largest power of two of blocks.
        """
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
        """Yield the rows of free blocks, as (first block, block after the last)."""
        first = end = 0
        for start, order in sorted((start, order) for order, free in enumerate(self._free) for start in free):
            if start != end:
                yield first, end
                first = start
            end = start + (1 << order)
        yield first, end

    def _put_back(self, start: int, end: int) -> None:
        """Add a row of blocks to the free ones, as powers of two."""
        while start < end:
            order = (end - start).bit_length() - 1
            if start:  # 0 is a multiple of every size
                order = min(order, (start & -start).bit_length() - 1)
            self._merge(start, order)
            start += 1 << order

    def _merge(self, start: int, order: int) -> None:
        """Add 2^`order` free blocks from `start` on, merged with their free buddies."""
        while (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self._free[order].add(start)


class ExtentAllocator:
    """The memory of an arena. Only extents that contain objects, or did lately, use memory.

    The kernel allocates an extent before an object is placed in it, so that no write ever fails for lack of memory.
    `fd` is a file without a name. `spared` is called when `trim` has extents to give back, and not again until `trim`
    has returned None. Not thread-safe: the caller has a lock.
    """

    def __init__(self, capacity: int, name: str, now: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError if the file cannot be so long."""
        self._buddy, self._capacity = BuddyAllocator(capacity), capacity
        self._now = now
        self._placed: dict[int, int] = {}  # bytes of each object, by offset
        self._objects = Counter[int]()  # number of objects in each extent
        self._spare: dict[int, float] = {}  # empty extents, with the monotonic time since when
        self._is_whole = self._is_trim_pending = False

        #: Called when `trim` has extents to give back. `bool` does nothing.
        self.spared: Callable[[], object] = bool

        #: How often extents were given back. Existing maps then lack their pages, which must be populated anew.
        self.release_count = 0

        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, capacity)
        except OSError:
            os.close(self.fd)
            raise

    @property
    def used_bytes(self) -> int:
        """Bytes of the machine's memory that the arena uses."""
        return self._capacity if self._is_whole else (len(self._objects) + len(self._spare)) * EXTENT

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` bytes of memory. Returns their offset. Raises ArenaFull.

        ArenaFull means that there is no contiguous room, or no memory.
        """
        offset = self._buddy.allocate(nbytes)
        extents = extents_of(offset, nbytes)
        try:
            self._allocate_extents(
                [extent for extent in extents if extent not in self._objects and extent not in self._spare]
            )
        except ArenaFull:
            self._buddy.free(offset)
            raise
        self._placed[offset] = nbytes
        for extent in extents:
            self._spare.pop(extent, None)
            self._objects[extent] += 1
        return offset

    def free(self, offset: int) -> None:
        """Free an allocation by its offset. Raises KeyError for any other offset."""
        self._buddy.free(offset)
        for extent in extents_of(offset, self._placed.pop(offset)):
            self._objects[extent] -= 1
            if not self._objects[extent]:
                del self._objects[extent]
                if not self._is_whole:
                    self._spare[extent] = self._now()
        if self._spare and not self._is_trim_pending:
            self._is_trim_pending = True
            self.spared()

    def usage(self) -> MemoryUsage:
        """Return how full the room is."""
        return self._buddy.usage()

    def trim(self) -> float | None:
        """Give back extents that held no object for SPARE_S.

        Returns the seconds until more is due, or None if nothing is.
        """
        cutoff = self._now() - SPARE_S
        due = [extent for extent, since in self._spare.items() if since <= cutoff]
        for first, last in rows(due):
            start, stop = first * EXTENT, min((last + 1) * EXTENT, self._capacity)
            with mmap.mmap(self.fd, stop - start, mmap.MAP_SHARED, offset=start) as part:
                part.madvise(mmap.MADV_REMOVE)
        for extent in due:
            del self._spare[extent]
        self.release_count += bool(due)

        delay = next((since - cutoff for since in self._spare.values()), None)  # the first is empty longest
        self._is_trim_pending = delay is not None
        return delay

    def fill(self) -> None:
        """Allocate all memory now, and give none back. Raises ArenaFull."""
        missing = {*range(-(-self._capacity // EXTENT))} - {*self._objects, *self._spare}
        self._allocate_extents(sorted(missing))
        self._is_whole, self._spare = True, {}

    def _allocate_extents(self, extents: list[int]) -> None:
        """Allocate these extents from the machine. Raises ArenaFull."""
        if not extents or self._is_whole:
            return
        needed, free = len(extents) * EXTENT, available_memory()
        # Compared first: the kernel might swap or kill a process instead of refusing the allocation.
        try:
            if needed > free:
                raise MemoryError
            for first, last in rows(extents):
                start, stop = first * EXTENT, min((last + 1) * EXTENT, self._capacity)
                os.posix_fallocate(self.fd, start, stop - start)
        except (OSError, MemoryError) as error:
            no_memory = "the machine has no memory", "free memory there, or start workers with a smaller --arena"
            raise ArenaFull(needed, free, self._capacity, *no_memory) from error


class WritablePages:
    """The extents of a process's writable map whose pages are populated.

    Writing to a populated page causes no page fault.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._release_count, self._populated = 0, set[int]()

    def populate(self, offset: int, nbytes: int, release_count: int) -> None:
        """Populate the pages of an object, unless it is small. The file has them already.

        `release_count` is the arena's number after the object was placed.
        """
        if release_count != self._release_count:
            self._release_count, self._populated = release_count, set()
        missing = [extent for extent in extents_of(offset, nbytes) if extent not in self._populated]
        if nbytes < ENTERED_FROM or not missing:
            return
        for first, last in rows(missing):
            start, stop = first * EXTENT, min((last + 1) * EXTENT, len(self._memory))
            try:
                self._memory.madvise(POPULATE_WRITE, start, stop - start)
            except OSError:  # an older kernel
                return
        self._populated.update(missing)


def extents_of(offset: int, nbytes: int) -> range:
    """Return the numbers of an object's extents. An object without bytes has one, too."""
    return range(offset // EXTENT, -(-(offset + max(1, nbytes)) // EXTENT))


def rows(extents: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Return the first and last of each row of adjacent numbers."""
    ordered = sorted(extents)
    numbers = {*ordered}
    firsts = [extent for extent in ordered if extent - 1 not in numbers]
    return zip(firsts, [extent for extent in ordered if extent + 1 not in numbers], strict=True)
