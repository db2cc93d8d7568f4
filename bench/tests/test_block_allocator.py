"""The block allocator against a model that marks every block by hand."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bench.block_allocator import Blocks, gather, scatter
from unfuse.core.errors import ArenaFull

BLOCK = 16
lengths = st.integers(0, 60 * BLOCK)


def blocks_of(nbytes: int) -> int:
    return -(-nbytes // BLOCK)


class AgainstMarks(RuleBasedStateMachine):
    """Every byte of the span is free or has one owner; the model writes down which, and what it holds."""

    @initialize(blocks=st.integers(1, 100), rest=st.integers(0, BLOCK - 1))
    def start(self, blocks: int, rest: int) -> None:
        self.blocks = blocks
        self.space = Blocks(blocks * BLOCK + rest, BLOCK)
        self.memory = np.zeros(blocks * BLOCK, np.uint8)
        self.data: dict[int, np.ndarray] = {}
        self.most = self.writes = 0

    def taken(self) -> int:
        return sum(blocks_of(data.nbytes) for data in self.data.values())

    def write(self, handle: int, nbytes: int) -> None:
        self.writes += 1
        kept = self.data.get(handle, np.empty(0, np.uint8))
        runs = self.space.runs(handle)
        assert (gather(self.memory, runs)[: kept.nbytes] == kept).all(), "growing moved what was there"
        more = np.full(nbytes - kept.nbytes, self.writes % 251, np.uint8)
        self.data[handle] = np.concatenate([kept, more])
        scatter(self.memory, runs, self.data[handle])
        self.most = max(self.most, self.taken())

    @rule(nbytes=lengths)
    def allocate(self, nbytes: int) -> None:
        room = self.blocks - self.taken()
        try:
            handle = self.space.allocate(nbytes)
        except ArenaFull as full:
            assert blocks_of(nbytes) > room and full.free == room * BLOCK
            return
        assert blocks_of(nbytes) <= room and handle not in self.data
        self.write(handle, nbytes)

    @precondition(lambda self: self.data)
    @rule(data=st.data(), more=lengths)
    def grow(self, data: st.DataObject, more: int) -> None:
        handle = data.draw(st.sampled_from(sorted(self.data)))
        before = self.data[handle].nbytes
        needed = blocks_of(before + more) - blocks_of(before)
        try:
            self.space.grow(handle, before + more)
        except ArenaFull:
            assert needed > self.blocks - self.taken()
            return
        assert needed <= self.blocks - self.taken()
        self.write(handle, before + more)

    @precondition(lambda self: self.data)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.data)))
        self.space.free(handle)
        del self.data[handle]

    @invariant()
    def every_allocation_has_its_own_bytes(self) -> None:
        for handle, data in self.data.items():
            assert (gather(self.memory, self.space.runs(handle)) == data).all()

    @invariant()
    def counters_agree(self) -> None:
        usage = self.space.usage()
        assert usage.capacity == self.blocks * BLOCK
        assert usage.used == self.taken() * BLOCK
        assert usage.free == usage.largest_free == usage.capacity - usage.used
        assert usage.requested == sum(data.nbytes for data in self.data.values())
        assert usage.high_water == self.most * BLOCK

    def teardown(self) -> None:
        if not hasattr(self, "space"):
            return
        for handle in self.data:
            self.space.free(handle)
        assert self.space.usage().used == 0
        self.space.allocate(self.blocks * BLOCK)


TestAgainstMarks = AgainstMarks.TestCase
TestAgainstMarks.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_blocks_between_others_serve_one_allocation() -> None:
    space = Blocks(6 * BLOCK, BLOCK)
    handles = [space.allocate(BLOCK) for _ in range(6)]
    for handle in handles[::2]:
        space.free(handle)
    scattered = space.allocate(2 * BLOCK + 5)
    assert space.runs(scattered) == [(0, BLOCK), (2 * BLOCK, BLOCK), (4 * BLOCK, 5)]


def test_blocks_in_a_row_are_one_run_which_is_read_without_a_copy() -> None:
    space, memory = Blocks(6 * BLOCK, BLOCK), np.arange(6 * BLOCK, dtype=np.uint8)
    runs = space.runs(space.allocate(3 * BLOCK + 1))
    assert runs == [(0, 3 * BLOCK + 1)]
    assert np.shares_memory(gather(memory, runs), memory)


def test_an_allocation_without_bytes_takes_no_block_and_can_grow() -> None:
    space = Blocks(2 * BLOCK, BLOCK)
    handle = space.allocate(0)
    assert space.runs(handle) == [] and space.usage().used == 0
    assert gather(np.ones(2 * BLOCK, np.uint8), []).nbytes == 0
    space.grow(handle, 1)
    assert space.runs(handle) == [(0, 1)]


def test_growing_within_the_last_block_takes_none() -> None:
    space = Blocks(BLOCK, BLOCK)
    handle = space.allocate(1)
    space.grow(handle, BLOCK)
    assert (space.usage().used, space.usage().requested) == (BLOCK, BLOCK)


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    space = Blocks(4 * BLOCK, BLOCK)
    handle = space.allocate(2 * BLOCK)
    with pytest.raises(ArenaFull):
        space.grow(handle, 5 * BLOCK)
    with pytest.raises(ValueError, match="does not grow to 1"):
        space.grow(handle, 1)
    assert space.runs(handle) == [(0, 2 * BLOCK)] and space.usage().used == 2 * BLOCK
    space.free(handle)
    for verb in (space.free, space.runs, lambda handle: space.grow(handle, 99)):
        with pytest.raises(KeyError):
            verb(handle)


def test_only_data_that_fills_the_runs_is_written() -> None:
    memory = np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="3 bytes do not fill"):
        scatter(memory, [(0, 2), (4, 2)], np.ones(3, np.uint8))
    assert not memory.any()


@pytest.mark.parametrize("capacity, block", [(15, 16), (0, 1), (16, 0)])
def test_a_span_without_room_for_a_block_is_refused(capacity: int, block: int) -> None:
    with pytest.raises(ValueError, match="has no room for one block"):
        Blocks(capacity, block)


@given(nbytes=st.integers(1, 8 * BLOCK))
def test_waste_is_what_rounding_costs(nbytes: int) -> None:
    space = Blocks(8 * BLOCK, BLOCK)
    assert (space.usage().used, space.usage().requested, space.usage().fragmentation) == (0, 0, 0)
    space.allocate(nbytes)
    usage = space.usage()
    assert (usage.used, usage.requested, usage.fragmentation) == (blocks_of(nbytes) * BLOCK, nbytes, 0)
