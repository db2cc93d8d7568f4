"""The file behind an arena: it has no name, and readers cannot write to it."""

import mmap
import os
import resource

import pytest

from tests.descriptors import descriptors, settled
from unfuse.arena import arena as module
from unfuse.arena.arena import MEMFD_NAME, Arena
from unfuse.core.errors import ConfigError

MIB = 1 << 20


def test_empty_arena_uses_no_memory() -> None:
    arena = Arena(3 * MIB + 5)
    try:
        status = os.fstat(arena.fd)
        assert status.st_size == arena.capacity == arena.usage().capacity == 3 * MIB
        assert status.st_blocks == 0
        assert os.readlink(f"/proc/self/fd/{arena.fd}") == f"/memfd:{MEMFD_NAME} (deleted)"
    finally:
        arena.close()


def test_readers_have_a_read_only_map_of_written_data() -> None:
    arena = Arena(MIB)
    try:
        arena.memory[100:103] = (1, 2, 3)
        assert arena.view[99:104].tolist() == [0, 1, 2, 3, 0]
        with pytest.raises(ValueError, match="read-only"):
            arena.view[100] = 9
        with pytest.raises(PermissionError):
            mmap.mmap(arena.read_fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(arena.read_fd, b"x")
    finally:
        arena.close()


def test_arena_larger_than_free_memory_raises_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 1229 * MIB)
    settled()
    before = descriptors()
    with pytest.raises(ConfigError) as refused:
        Arena(2048 * MIB)
    assert str(refused.value) == (
        "the arena needs 2.0 GiB but only 1.2 GiB of memory is free: free memory, or start with a smaller --arena"
    )
    assert descriptors() <= before


def test_failed_memory_allocation_raises_config_error() -> None:
    settled()
    before = descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(ConfigError, match=r"needs 2\.0 MiB .* smaller --arena"):
            Arena(2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert descriptors() <= before


def test_arena_smaller_than_4096_bytes_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="at least 4096 bytes"):
        Arena(100)


def test_arrays_outlive_the_arena() -> None:
    arena = Arena(MIB)
    arena.memory[:4] = 7
    part = arena.view[:4]
    arena.close()
    del arena
    assert part.tolist() == [7, 7, 7, 7]
