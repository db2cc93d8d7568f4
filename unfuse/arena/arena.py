"""The arena: memory for the objects of one worker, which other processes map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unfuse.arena.extents import BLOCK, ExtentAllocator, WritablePages
from unfuse.arena.limits import readable_bytes
from unfuse.arena.objects import Extent, ObjectTable
from unfuse.core.errors import ArenaFull, ConfigError
from unfuse.core.host_memory import available_memory

#: The name of the memory in /proc/PID/maps. No path leads to it.
MEMFD_NAME = "unfuse-arena"


class Arena(ObjectTable):
    """Shared memory of `capacity` bytes, in a file without a name.

    The capacity is rounded down to whole pages. Only objects use memory; free room does not. The kernel frees the
    memory when the last process that maps it has ended, however it ended. `fd` is for writers. `read_fd` is for
    readers, which cannot make a writable map of it. Raises ConfigError if there is not enough memory now.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < BLOCK:
            raise ConfigError(f"an arena of {capacity} bytes is too small: set --arena to at least {BLOCK} bytes")
        capacity -= capacity % BLOCK
        if capacity > (free := available_memory()):
            raise _too_large(capacity, free)
        try:
            self._extents = ExtentAllocator(capacity, MEMFD_NAME)
        except OSError as error:
            raise _too_large(capacity, free) from error
        super().__init__(self._extents)
        self.capacity, self.fd = capacity, self._extents.fd
        # Opened anew, because a duplicate of `fd` would be writable, too.
        self.read_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    @cached_property
    def _map(self) -> WritableMap:
        """The map for writing. Made at first use: only writers need it."""
        return WritableMap(self.fd)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The arena's bytes, for writing objects."""
        return self._map.bytes

    def writable(self, extent: Extent) -> NDArray[np.uint8]:
        """Return the bytes of an object that is being written here."""
        return self._map.object_bytes(extent, self.release_count)

    @cached_property
    def view(self) -> NDArray[np.uint8]:
        """The arena's bytes, for reading objects."""
        return map_bytes(self.read_fd)

    @property
    def used_bytes(self) -> int:
        """Bytes of the machine's memory that the arena uses."""
        with self._lock:
            return self._extents.used_bytes

    @property
    def release_count(self) -> int:
        """How often memory was given back."""
        return self._extents.release_count

    def on_trimmable(self, callback: Callable[[], object]) -> None:
        """Set the function that is called when `trim` has memory to give back.

        It is called from any thread and must not block.
        """
        self._extents.spared = callback

    def trim(self) -> float | None:
        """Give back memory that held no object for a while.

        Returns the seconds until more is due, or None if nothing is.
        """
        with self._lock:
            return self._extents.trim()

    def fill(self) -> None:
        """Allocate all of the memory now, and give none back. Raises ConfigError.

        Hardware that registers memory once needs this.
        """
        with self._lock:
            try:
                self._extents.fill()
            except ArenaFull as full:
                raise _too_large(self.capacity, full.free) from full

    def close(self) -> None:
        """Close the file.

        The kernel frees the memory when no process maps it any more: no reader, and no array over it.
        """
        os.close(self.fd)
        os.close(self.read_fd)


class WritableMap:
    """The whole of an arena's file in one process, for writing objects."""

    def __init__(self, fd: int) -> None:
        memory = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._pages, self.bytes = WritablePages(memory), np.frombuffer(memory, np.uint8)

    def object_bytes(self, extent: Extent, release_count: int) -> NDArray[np.uint8]:
        """Return the bytes of an object, with their pages populated.

        `release_count` is how often the arena had given memory back when the object was placed, or later.
        """
        self._pages.populate(extent.offset, extent.nbytes, release_count)
        return self.bytes[extent.offset : extent.offset + extent.nbytes]


def map_bytes(fd: int) -> NDArray[np.uint8]:
    """Map a whole file for reading.

    The map lasts as long as the array or any view of it.
    """
    return np.frombuffer(mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)


def _too_large(needed: int, free: int) -> ConfigError:
    """Return the error for an arena that is larger than the free memory."""
    return ConfigError(
        f"the arena needs {readable_bytes(needed)} but only {readable_bytes(free)} of memory is free: "
        "free memory, or start with a smaller --arena"
    )
