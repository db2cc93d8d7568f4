"""Paged keys and values against a plain model: who has which place, and what was written there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from tests.examples import examples
from unfuse.core.errors import TransientError
from unfuse.language.paged_kv import KvSequence, KvUsage, NoKvBlocks, PagedKvCache

BLOCK, LAYERS, HEADS, WIDTH = 4, 2, 2, 3


def room(blocks: int) -> PagedKvCache:
    return PagedKvCache(LAYERS, HEADS, WIDTH, blocks * BLOCK, BLOCK)


def grown(kv: PagedKvCache, *lengths: int) -> list[KvSequence]:
    sequences = [kv.sequence() for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        sequence.extend(length)
    return sequences


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


class AgainstLists(RuleBasedStateMachine):
    """The model keeps what was written of each sequence: one number a token, from which all its values follow."""

    @initialize(blocks=st.integers(1, 24), rest=st.integers(0, BLOCK - 1))
    def start(self, blocks: int, rest: int) -> None:
        self.blocks = blocks
        self.kv = PagedKvCache(LAYERS, HEADS, WIDTH, blocks * BLOCK + rest, BLOCK)
        self.held: dict[KvSequence, list[int]] = {}
        self.written = 0

    def values(self, numbers: list[int], layer: int) -> Tensor:
        scale = torch.arange(1, HEADS * WIDTH + 1).view(HEADS, 1, WIDTH)
        return (torch.tensor(numbers).view(1, -1, 1) * scale + layer).float()

    def free(self) -> int:
        return self.blocks - sum(blocks_of(len(numbers)) for numbers in self.held.values())

    def drawn(self, data: st.DataObject) -> KvSequence:
        return data.draw(st.sampled_from([*self.held]))

    @rule()
    def begin(self) -> None:
        self.held[self.kv.sequence()] = []

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.integers(0, 8 * BLOCK))
    def grow(self, data: st.DataObject, more: int) -> None:
        sequence = self.drawn(data)
        numbers, spans = self.held[sequence], sequence.spans()
        wanted = blocks_of(len(numbers) + more) - blocks_of(len(numbers))
        if wanted > self.free():
            with pytest.raises(NoKvBlocks):
                sequence.extend(more)
            assert sequence.spans() == spans
            return
        sequence.extend(more)
        new = [*range(self.written, self.written + more)]
        for layer in range(LAYERS):
            keys = self.values(new, layer)
            sequence.write(layer, keys, -keys, len(numbers))
        self.written += more
        numbers += new

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), over=st.integers(1, 6 * BLOCK))
    def write_again(self, data: st.DataObject, over: int) -> None:
        sequence = data.draw(st.sampled_from([one for one, numbers in self.held.items() if numbers]))
        numbers = self.held[sequence]
        start = data.draw(st.integers(0, len(numbers) - 1))
        new = [*range(self.written, self.written + min(over, len(numbers) - start))]
        for layer in range(LAYERS):
            keys = self.values(new, layer)
            sequence.write(layer, keys, -keys, start)
        self.written += len(new)
        numbers[start : start + len(new)] = new

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self.drawn(data)
        kept = data.draw(st.integers(0, len(self.held[sequence])))
        sequence.truncate(kept)
        del self.held[sequence][kept:]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), forget=st.booleans())
    def give_back(self, data: st.DataObject, forget: bool) -> None:
        sequence = self.drawn(data)
        sequence.free()
        self.held[sequence] = []
        if forget:
            del self.held[sequence]

    @invariant()
    def nobody_shares_a_block(self) -> None:
        taken = [
            block
            for sequence in self.held
            for block in {place // BLOCK for span in sequence.spans() for place in range(*span)}
        ]
        assert len(taken) == len({*taken}) and {*taken} <= {*range(self.blocks)}
        for sequence in self.held:
            places = [place for span in sequence.spans() for place in range(*span)]
            assert sequence.block_numbers() == [place // BLOCK for place in places[::BLOCK]]

    @invariant()
    def every_sequence_holds_what_was_written(self) -> None:
        for sequence, numbers in self.held.items():
            assert sequence.length == len(numbers)
            for layer in range(LAYERS):
                keys, values = sequence.read(layer)
                assert torch.equal(keys, self.values(numbers, layer)) and torch.equal(values, -keys)

    @invariant()
    def the_numbers_add_up(self) -> None:
        used = self.blocks - self.free()
        usage = self.kv.usage()
        assert usage == KvUsage(self.blocks, used)
        assert usage.free == self.free()


TestAgainstLists = AgainstLists.TestCase
TestAgainstLists.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)


def test_sequence_grows_in_place_while_next_block_is_free() -> None:
    kv = room(8)
    (sequence,) = grown(kv, 1)
    keys = kv.keys[0].data_ptr()

    for _ in range(5 * BLOCK):
        sequence.extend(1)

    assert sequence.spans() == [(0, 5 * BLOCK + 1)]
    assert sequence.read(0)[0].data_ptr() == keys, "one run is read in place"


def test_new_sequence_is_placed_to_leave_most_space_for_growth() -> None:
    kv = room(16)

    first, second, third = grown(kv, BLOCK, BLOCK, BLOCK)

    assert first.spans() == [(0, BLOCK)]
    assert second.spans() == [(8 * BLOCK, 9 * BLOCK)], "half of what is left is for the first"
    first.free()
    (fourth,) = grown(kv, BLOCK)
    assert fourth.spans() == [(0, BLOCK)] != third.spans(), "nobody grows into a gap before which nobody lies"


def test_sequence_is_contiguous_if_free_run_is_large_enough() -> None:
    kv = room(16)
    first, second = grown(kv, 6 * BLOCK, BLOCK)

    (third,) = grown(kv, 5 * BLOCK)

    assert [len(one.spans()) for one in (first, second, third)] == [1, 1, 1]


def test_adjacent_freed_blocks_are_coalesced() -> None:
    kv = room(8)
    before, first, second, third = grown(kv, *[2 * BLOCK] * 4)

    for sequence in (first, third, second):
        sequence.free()
    (long,) = grown(kv, 6 * BLOCK)

    assert (len(before.spans()), len(long.spans())) == (1, 1)


def test_sequence_continues_in_another_run_if_next_block_is_used() -> None:
    kv = room(4)
    first, second = grown(kv, BLOCK, BLOCK)
    first.extend(2 * BLOCK)

    assert sum(stop - start for start, stop in first.spans()) == 3 * BLOCK and len(first.spans()) == 2
    with pytest.raises(NoKvBlocks, match=r"4 more tokens \(0 of 4 blocks of 4 are free\)"):
        second.extend(1)
    assert second.length == BLOCK
    assert issubclass(NoKvBlocks, TransientError)
    first.truncate(2 * BLOCK + 1)
    first.extend(BLOCK - 1)
    with pytest.raises(NoKvBlocks):
        second.extend(1)
    first.truncate(2 * BLOCK)
    second.extend(1)


def test_ranges_are_read_and_written_across_runs() -> None:
    kv = room(4)
    first, _ = grown(kv, BLOCK, BLOCK)
    first.extend(2 * BLOCK)
    keys = torch.randn(HEADS, 3 * BLOCK, WIDTH)

    first.write(1, keys[:, :5], -keys[:, :5])
    first.write(1, keys[:, 5:], -keys[:, 5:], 5)

    assert len(first.spans()) == 2
    assert torch.equal(first.read(1)[0], keys) and torch.equal(first.read(1)[1], -keys)
    assert torch.equal(first.read(1, 3, 11)[0], keys[:, 3:11])
    assert first.read(1, 3, 3)[0].shape == (HEADS, 0, WIDTH)


def test_out_of_range_access_raises_value_error() -> None:
    kv = room(4)
    (sequence,) = grown(kv, 5)
    more = torch.zeros(HEADS, 4, WIDTH)

    for wrong in (
        lambda: sequence.write(0, more, more, 2),
        lambda: sequence.read(0, 2, 6),
        lambda: sequence.truncate(6),
        lambda: sequence.truncate(-1),
        lambda: sequence.extend(-1),
        lambda: PagedKvCache(1, 1, 1, BLOCK - 1, BLOCK),
    ):
        with pytest.raises(ValueError):
            wrong()
    assert sequence.length == 5
