"""Which rank holds which blocks."""

from __future__ import annotations

from hypothesis import given, strategies as st

from unfuse.parallel.spreading import rank_by_block


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.data())
def test_each_rank_owns_contiguous_blocks(sizes: list[int], data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, len(sizes)))
    holders = rank_by_block(sizes, ranks)
    assert len(holders) == len(sizes)
    assert holders == sorted(holders)
    assert {*holders} == {*range(ranks)}


@given(st.lists(st.integers(90, 110), min_size=8, max_size=60), st.integers(2, 4))
def test_blocks_of_similar_size_are_balanced_across_ranks(sizes: list[int], ranks: int) -> None:
    holders = rank_by_block(sizes, ranks)
    held = [sum(size for size, holder in zip(sizes, holders, strict=True) if holder == rank) for rank in range(ranks)]
    assert max(held) - min(held) <= 2 * max(sizes)


def test_blocks_are_balanced_by_their_bytes() -> None:
    """As many double blocks as in FLUX, of twice the bytes of its single ones."""
    holders = rank_by_block([2] * 19 + [1] * 38, 2)
    assert holders.count(0) == 19
