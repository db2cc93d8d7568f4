"""The memory behind an arena: taken from the machine when objects need it, and given back some time after the last."""

from __future__ import annotations

import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from unfuse.arena.buddy import Buddy, Usage
from unfuse.arena.limits import available_memory
from unfuse.core.errors import ArenaFull

EXTENT = 2 << 20  # bytes that are taken and given back together
SPARE_S = 10.0  # seconds for which an empty extent is kept: taking it again costs three times what writing to it does
ENTERED_FROM = 256 << 10  # bytes of an object whose pages are entered before writing; single faults cost others less
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14: where it is unknown, pages are entered by faults


class Extents:
    """The room of an arena, of which only EXTENTs that hold objects, or lately did, take memory.

    An extent is allocated for real before an object is placed in it, so that no write ever fails for want of memory.
    `fd` is a file without a name. `spared` is called when there is something for `trim`, and not again until that
    returned None. No lock: the caller has one.
    """

    def __init__(self, capacity: int, name: str, now: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError if the file cannot be so long."""
        self._buddy, self._capacity, self._now = Buddy(capacity), capacity, now
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

    def usage(self) -> Usage:
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


class Pages:
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
