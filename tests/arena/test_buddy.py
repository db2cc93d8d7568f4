"""The allocator against a model that marks every block by hand."""

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.examples import examples
from unfuse.arena.extents import BuddyAllocator
from unfuse.core.errors import ArenaFull

BLOCK = 16


class AgainstBlocks(RuleBasedStateMachine):
    """Every block is free or belongs to one extent; the model knows which."""

    @initialize(blocks=st.integers(1, 200), rest=st.integers(0, BLOCK - 1))
    def start(self, blocks: int, rest: int) -> None:
        self.blocks = blocks
        self.buddy = BuddyAllocator(blocks * BLOCK + rest, BLOCK)
        self.owner: list[int | None] = [None] * blocks
        self.sizes: dict[int, int] = {}
        self.most = 0

    def free_in_a_row(self, length: int) -> bool:
        """Whether so many blocks side by side are free."""
        starts = range(self.blocks - length + 1)
        return any(all(owner is None for owner in self.owner[start : start + length]) for start in starts)

    @rule(nbytes=st.integers(0, 220 * BLOCK))
    def allocate(self, nbytes: int) -> None:
        length = max(1, -(-nbytes // BLOCK))
        fits = self.free_in_a_row(length)
        try:
            offset = self.buddy.allocate(nbytes)
        except ArenaFull as full:
            assert not fits
            assert (full.needed, full.free) == (nbytes, self.owner.count(None) * BLOCK)
            return
        assert fits
        start, rest = divmod(offset, BLOCK)
        assert rest == 0 and start + length <= self.blocks
        assert self.owner[start : start + length] == [None] * length, "two extents overlap"
        self.owner[start : start + length] = [offset] * length
        self.sizes[offset] = nbytes
        self.most = max(self.most, self.blocks - self.owner.count(None))

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.sizes)))
        self.buddy.free(offset)
        del self.sizes[offset]
        self.owner = [None if owner == offset else owner for owner in self.owner]

    @invariant()
    def counters_agree(self) -> None:
        usage = self.buddy.usage()
        free = self.owner.count(None)
        assert usage.capacity == self.blocks * BLOCK
        assert usage.used + usage.free == usage.capacity
        assert usage.free == free * BLOCK
        assert usage.requested == sum(self.sizes.values()) <= usage.used
        assert usage.high_water == self.most * BLOCK
        largest = usage.largest_free // BLOCK
        assert largest == 0 or self.free_in_a_row(largest)
        size = max(1, 2 * largest)
        starts = range(0, self.blocks - size + 1, size)
        assert all(set(self.owner[start : start + size]) != {None} for start in starts)

    def teardown(self) -> None:
        if not hasattr(self, "buddy"):
            return
        for offset in list(self.sizes):
            self.buddy.free(offset)
        fresh = BuddyAllocator(self.blocks * BLOCK, BLOCK).usage()
        assert self.buddy.usage().free == fresh.capacity
        assert self.buddy.usage().largest_free == fresh.largest_free, "what came back did not merge"


TestAgainstBlocks = AgainstBlocks.TestCase
TestAgainstBlocks.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)


@given(blocks=st.integers(1, 300))
def test_single_block_extents_fill_the_whole_capacity(blocks: int) -> None:
    buddy = BuddyAllocator(blocks * BLOCK, BLOCK)
    offsets = {buddy.allocate(1) for _ in range(blocks)}
    assert offsets == set(range(0, blocks * BLOCK, BLOCK))
    with pytest.raises(ArenaFull):
        buddy.allocate(0)


def test_extent_allocates_only_the_blocks_for_its_size() -> None:
    buddy = BuddyAllocator(8 * BLOCK, BLOCK)
    buddy.allocate(5 * BLOCK)
    assert buddy.usage().used == 5 * BLOCK
    buddy.allocate(2 * BLOCK)
    buddy.allocate(1)
    assert (buddy.usage().free, buddy.usage().requested) == (0, 7 * BLOCK + 1)


def test_extents_just_over_a_power_of_two_waste_no_blocks() -> None:
    buddy = BuddyAllocator(64 * BLOCK, BLOCK)
    offsets = [buddy.allocate(9 * BLOCK) for _ in range(7)]
    assert buddy.usage().free == BLOCK
    buddy.free(offsets[3])
    buddy.allocate(9 * BLOCK)


def test_double_free_raises_key_error() -> None:
    buddy = BuddyAllocator(4 * BLOCK, BLOCK)
    offset = buddy.allocate(1)
    buddy.free(offset)
    with pytest.raises(KeyError):
        buddy.free(offset)


def test_span_smaller_than_one_block_raises_value_error() -> None:
    with pytest.raises(ValueError, match="15 bytes"):
        BuddyAllocator(15, BLOCK)


def test_usage_reports_fragmentation_and_requested_bytes() -> None:
    buddy = BuddyAllocator(8 * BLOCK, BLOCK)
    offsets = [buddy.allocate(BLOCK // 2) for _ in range(8)]
    for offset in sorted(offsets)[::2]:
        buddy.free(offset)
    usage = buddy.usage()
    assert (usage.used, usage.requested, usage.fragmentation) == (4 * BLOCK, 2 * BLOCK, 0.75)
