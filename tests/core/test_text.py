"""Pieces of a text, as they are recorded."""

import pytest
from hypothesis import given, strategies as st

from tests.core.structs import of
from unfuse.core.codec import decode, encode
from unfuse.core.text import CHUNK, MOST_SHARED, TokenDelta, beginnings


@given(of(TokenDelta))
def test_a_piece_comes_back_as_it_was_written(piece: TokenDelta) -> None:
    assert decode(encode(piece), TokenDelta) == piece


def test_a_piece_without_logprobs_takes_few_bytes() -> None:
    assert len(encode(TokenDelta(49_000, " the"))) <= 13


def test_what_was_recorded_of_a_token_alone_can_be_read() -> None:
    assert decode(encode([7]), TokenDelta) == TokenDelta(7)


IDS = st.lists(st.integers(0, 3), max_size=40).map(lambda few: few * 60)


@given(IDS, IDS)
def test_beginnings_are_equal_as_far_as_whole_chunks_are(one: list[int], other: list[int]) -> None:
    """And none has the last token, behind which an answer begins."""
    both = beginnings(one), beginnings(other)
    for ids, found in zip((one, other), both, strict=True):
        assert len(found) == max(0, (len(ids) - 1) // CHUNK)
    for number, (mine, theirs) in enumerate(zip(*both, strict=False), 1):
        assert (mine == theirs) == (one[: number * CHUNK] == other[: number * CHUNK])


@pytest.mark.parametrize(("place", "equal"), [(0, 0), (CHUNK - 1, 0), (CHUNK, 1), (3 * CHUNK - 1, 2), (3 * CHUNK, 3)])
def test_beginnings_are_other_ones_from_where_something_else_is_shown(place: int, equal: int) -> None:
    """Given prompts of equal tokens, then what they show in one place counts from the chunk on in which that is, and
    not before."""
    ids = [1] * (4 * CHUNK)
    plain, one, other = (beginnings(ids, shown) for shown in ((), [(place, "a")], [(place, "b")]))
    for number, each in enumerate(zip(plain, one, other, strict=True)):
        assert len({*each}) == (1 if number < equal else 3)
    assert one == beginnings(ids, [(place, "a")])
    both = beginnings(ids, [(place, "a"), (place, "b")]), beginnings(ids, [(place, "ab")])
    assert [len({*each}) for each in zip(*both, strict=True)] == [1] * equal + [2] * (3 - equal)


def test_of_a_very_long_prompt_only_so_many_are_told() -> None:
    found = beginnings([1] * (CHUNK * (MOST_SHARED + 3)))
    assert len(found) == MOST_SHARED == len({*found})
    assert all(len(one) == 32 for one in found)
