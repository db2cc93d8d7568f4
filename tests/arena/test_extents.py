"""Memory is taken when objects need it, kept a while, given back; and never read or written where it is not."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from unfuse.arena import extents as module
from unfuse.arena.arena import Arena
from unfuse.arena.client import ArenaClient
from unfuse.arena.extents import EXTENT, SPARE_S, ExtentAllocator, WritablePages
from unfuse.arena.server import ArenaServer
from unfuse.core.errors import ArenaFull, ConfigError

MIB = 1 << 20


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def taken(fd: int) -> int:
    """The bytes that the kernel has for the file."""
    return os.fstat(fd).st_blocks * 512


def test_memory_follows_live_objects_and_is_released_after_spare_time() -> None:
    clock = Time()
    extents = ExtentAllocator(64 * MIB, "x", clock)
    assert taken(extents.fd) == extents.used_bytes == 0
    small, large = extents.allocate(5), extents.allocate(5 * MIB)
    assert taken(extents.fd) == extents.used_bytes
    assert 5 * MIB <= extents.used_bytes <= 5 * MIB + 2 * EXTENT

    extents.free(large)
    clock.now += SPARE_S / 2
    assert extents.trim() == pytest.approx(SPARE_S / 2)
    assert taken(extents.fd) >= 5 * MIB
    assert extents.allocate(5 * MIB) == large  # taken again meanwhile
    clock.now += SPARE_S
    assert extents.trim() is None
    assert extents.release_count == 0

    extents.free(large)
    extents.free(small)
    clock.now += SPARE_S
    assert extents.trim() is None
    assert taken(extents.fd) == extents.used_bytes == 0
    assert extents.release_count == 1
    os.close(extents.fd)


def test_spared_callback_is_called_once_for_spare_extents() -> None:
    called = []
    extents = ExtentAllocator(64 * MIB, "x")
    extents.spared = lambda: called.append(1)
    first, second = extents.allocate(EXTENT), extents.allocate(EXTENT)
    assert called == []
    extents.free(first)
    extents.free(second)
    assert called == [1]
    os.close(extents.fd)


def test_spared_callback_is_called_again_only_after_a_full_trim() -> None:
    clock, called = Time(), []
    extents = ExtentAllocator(64 * MIB, "x", clock)
    extents.spared = lambda: called.append(1)
    for _ in range(3):
        extents.free(extents.allocate(EXTENT))
    assert called == [1]
    clock.now += SPARE_S
    assert extents.trim() is None
    extents.free(extents.allocate(EXTENT))
    assert called == [1, 1]
    os.close(extents.fd)


def test_allocation_beyond_machine_memory_raises_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    extents = ExtentAllocator(64 * MIB, "x")
    monkeypatch.setattr(module, "available_memory", lambda: 3 * MIB)
    kept = extents.allocate(MIB)
    before = extents.usage()
    with pytest.raises(ArenaFull, match="the machine has no memory .* smaller --arena"):
        extents.allocate(8 * MIB)
    assert (extents.usage().used, extents.used_bytes) == (before.used, EXTENT)
    monkeypatch.setattr(module, "available_memory", lambda: 1 << 40)
    extents.free(extents.allocate(8 * MIB))
    extents.free(kept)
    os.close(extents.fd)


def test_filled_arena_stays_fully_allocated() -> None:
    arena = Arena(5 * MIB)  # no multiple of an extent
    object = arena.create(MIB, "r")
    arena.fill()
    assert taken(arena.fd) == arena.used_bytes == 5 * MIB
    arena.abort(object.id)
    assert arena.trim() is None
    arena.abort(arena.create(5 * MIB, "r").id)
    arena.fill()
    assert taken(arena.fd) == arena.used_bytes == 5 * MIB
    arena.close()


def test_fill_beyond_machine_memory_raises_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(64 * MIB)
    monkeypatch.setattr(module, "available_memory", lambda: 3 * MIB)
    with pytest.raises(ConfigError, match=r"needs 64\.0 MiB but only 3\.0 MiB .* smaller --arena"):
        arena.fill()
    arena.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9 * MIB), st.floats(0, SPARE_S)), max_size=40))
def test_allocated_memory_is_that_of_live_and_recently_freed_objects(steps: list[tuple[bool, int, float]]) -> None:
    """Whatever comes and goes: as much is held as the extents of live objects, and of those that were lately freed."""
    clock = Time()
    extents = ExtentAllocator(24 * MIB, "x", clock)
    live: dict[int, int] = {}
    last: dict[int, float] = {}
    try:
        for frees, nbytes, pause in steps:
            clock.now += pause
            if frees and live:
                offset = [*live][nbytes % len(live)]
                last |= dict.fromkeys(places(offset, live.pop(offset)), clock.now)
                extents.free(offset)
            else:
                try:
                    live[extents.allocate(nbytes)] = nbytes
                except ArenaFull:
                    assert extents.usage().largest_free < nbytes or extents.usage().free < 24 * MIB
            extents.trim()
            needed = {place for offset, size in live.items() for place in places(offset, size)}
            lately = {place for place, since in last.items() if clock.now - since < SPARE_S}
            assert taken(extents.fd) == extents.used_bytes == len(needed | lately) * EXTENT
    finally:
        os.close(extents.fd)


def places(offset: int, nbytes: int) -> set[int]:
    """The extents that an object touches, byte by byte."""
    return {byte // EXTENT for byte in (*range(offset, offset + nbytes, 4096), offset + max(0, nbytes - 1))}


def test_writable_pages_are_populated_once_until_memory_is_released() -> None:
    clock = Time()
    extents = ExtentAllocator(16 * MIB, "x", clock)
    memory = mmap.mmap(extents.fd, 0)
    pages, calls = WritablePages(Counting(memory)), Counting.calls  # type: ignore[arg-type]
    offset = extents.allocate(3 * MIB)
    pages.populate(offset, 3 * MIB, extents.release_count)
    pages.populate(offset, 3 * MIB, extents.release_count)
    assert calls == [(module.POPULATE_WRITE, 0, 2 * EXTENT)]
    extents.free(offset)
    clock.now += SPARE_S
    extents.trim()
    offset = extents.allocate(3 * MIB)
    pages.populate(offset, 3 * MIB, extents.release_count)
    assert len(calls) == 2
    pages.populate(extents.allocate(4096), 4096, extents.release_count)  # not worth a call
    assert len(calls) == 2
    os.close(extents.fd)


class Counting:
    """A map that tells what it was advised."""

    calls: list[tuple[int, int, int]] = []  # noqa: RUF012

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def __len__(self) -> int:
        return len(self._memory)

    def madvise(self, option: int, start: int, length: int) -> None:
        self.calls.append((option, start, length))
        self._memory.madvise(option, start, length)


def test_writes_work_without_madv_populate_write_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POPULATE_WRITE", 9999)
    arena = Arena(8 * MIB)
    object = arena.create(3 * MIB, "r")
    arena.writable(object)[:] = 7
    assert (arena.view[object.offset : object.offset + object.nbytes] == 7).all()
    arena.close()


def test_extents_spare_before_the_server_starts_are_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPARE_S", 0.05)
    arena = Arena(64 * MIB)
    arena.abort(arena.create(20 * MIB, "r").id)
    server = ArenaServer(arena, b"token", tmp_path, "w")
    until = time.monotonic() + 60
    while arena.used_bytes and time.monotonic() < until:
        time.sleep(0.01)
    assert arena.used_bytes == 0
    server.close()
    arena.close()


def test_served_arena_releases_unused_memory_and_allocates_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the sockets: a writer's map is right after its memory has gone and come back."""
    monkeypatch.setattr(module, "SPARE_S", 0.05)
    arena = Arena(64 * MIB)
    server = ArenaServer(arena, b"token", tmp_path, "w")
    client = ArenaClient(server.address, b"token")
    for round in range(3):
        object = client.create(20 * MIB, "r")
        client.writable(object)[:] = round + 1
        client.seal(object.id)
        assert arena.used_bytes >= 20 * MIB
        held = client.hold(object.id, object.key, object.generation, object.nbytes)
        found = client.view[held.offset : held.offset + held.nbytes]
        arena.release("r")  # by the owner itself: no message wakes the server
        time.sleep(0.2)
        assert np.array_equal(found[:: 1 << 16], np.full(len(found[:: 1 << 16]), round + 1, np.uint8))
        client.unhold(object.id)
        until = time.monotonic() + 60
        while arena.used_bytes and time.monotonic() < until:
            time.sleep(0.01)
        assert taken(arena.fd) == arena.used_bytes == 0
    client.close()
    server.close()
    arena.close()
