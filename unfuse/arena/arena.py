"""The arena: memory for the objects of one worker, which other processes map."""

from __future__ import annotations

import mmap
import os
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from unfuse.arena.buddy import BLOCK, Buddy
from unfuse.arena.limits import available_memory, readable_bytes
from unfuse.arena.objects import ObjectTable
from unfuse.core.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MEMFD_NAME = "unfuse-arena"
"""The name of the memory in /proc/PID/maps; no path leads to it."""


class Arena(ObjectTable):
    """`capacity` bytes (rounded down to whole pages) that exist from the start, in a file without a name.

    The kernel takes them back when the last process that maps them is gone, however it went. `fd` is for writers and
    `read_fd` for readers: no writable map can be made of it.
    Raises ConfigError when there is not that much memory.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < BLOCK:
            raise ConfigError(f"an arena of {capacity} bytes is too small: give --arena at least {BLOCK} bytes")
        capacity -= capacity % BLOCK
        if capacity > (free := available_memory()):
            raise _too_large(capacity, free)
        super().__init__(Buddy(capacity))
        self.capacity = capacity
        self.fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, capacity)
        except OSError as error:
            os.close(self.fd)
            raise _too_large(capacity, free) from error
        self.read_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    @cached_property
    def memory(self) -> NDArray[np.uint8]:
        """The arena's bytes, for writing objects. Mapped at first use: a parent whose child writes needs no map."""
        return map_bytes(self.fd, writable=True)

    @cached_property
    def view(self) -> NDArray[np.uint8]:
        """The arena's bytes, for reading objects."""
        return map_bytes(self.read_fd, writable=False)

    def close(self) -> None:
        """Close the file. The kernel frees the memory when this arena, its readers and all arrays over it are gone."""
        os.close(self.fd)
        os.close(self.read_fd)


def map_bytes(fd: int, *, writable: bool, populate: bool = True) -> NDArray[np.uint8]:
    """Map a whole file; the map lasts as long as the array or any view of it.

    With `populate` pages are entered at once (40 ms a GiB): faults would make their first use several times slower.
    """
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return np.frombuffer(mmap.mmap(fd, 0, flags, prot), np.uint8)


def _too_large(needed: int, free: int) -> ConfigError:
    return ConfigError(
        f"the arena needs {readable_bytes(needed)} but only {readable_bytes(free)} of memory is free: "
        "stop something, or start with a smaller --arena"
    )
