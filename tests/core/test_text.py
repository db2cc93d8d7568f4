"""Pieces of a text, as they are recorded."""

import pytest
from hypothesis import given, strategies as st

from tests.core.structs import of
from unfuse.core.codec import decode, encode
from unfuse.core.text import MAX_PREFIX_BLOCKS, PREFILL_CHUNK_TOKENS, TokenDelta, prefix_digests


@given(of(TokenDelta))
def test_token_delta_round_trips(piece: TokenDelta) -> None:
    assert decode(encode(piece), TokenDelta) == piece


def test_token_delta_without_logprobs_encodes_to_few_bytes() -> None:
    assert len(encode(TokenDelta(49_000, " the"))) <= 13


def test_token_delta_decodes_from_a_token_id_alone() -> None:
    assert decode(encode([7]), TokenDelta) == TokenDelta(7)


IDS = st.lists(st.integers(0, 3), max_size=40).map(lambda few: few * 60)


@given(IDS, IDS)
def test_prefix_digests_are_equal_for_equal_whole_chunks(one: list[int], other: list[int]) -> None:
    """And none has the last token, behind which an answer begins."""
    both = prefix_digests(one), prefix_digests(other)
    for ids, found in zip((one, other), both, strict=True):
        assert len(found) == max(0, (len(ids) - 1) // PREFILL_CHUNK_TOKENS)
    for number, (mine, theirs) in enumerate(zip(*both, strict=False), 1):
        assert (mine == theirs) == (one[: number * PREFILL_CHUNK_TOKENS] == other[: number * PREFILL_CHUNK_TOKENS])


@pytest.mark.parametrize(
    ("place", "equal"),
    [
        (0, 0),
        (PREFILL_CHUNK_TOKENS - 1, 0),
        (PREFILL_CHUNK_TOKENS, 1),
        (3 * PREFILL_CHUNK_TOKENS - 1, 2),
        (3 * PREFILL_CHUNK_TOKENS, 3),
    ],
)
def test_prefix_digests_differ_from_the_chunk_with_different_media(place: int, equal: int) -> None:
    """Given prompts of equal tokens, then what they show in one place counts from the chunk on in which that is, and
    not before."""
    ids = [1] * (4 * PREFILL_CHUNK_TOKENS)
    plain, one, other = (prefix_digests(ids, shown) for shown in ((), [(place, "a")], [(place, "b")]))
    for number, each in enumerate(zip(plain, one, other, strict=True)):
        assert len({*each}) == (1 if number < equal else 3)
    assert one == prefix_digests(ids, [(place, "a")])
    both = prefix_digests(ids, [(place, "a"), (place, "b")]), prefix_digests(ids, [(place, "ab")])
    assert [len({*each}) for each in zip(*both, strict=True)] == [1] * equal + [2] * (3 - equal)


def test_prefix_digests_of_a_long_prompt_are_limited() -> None:
    found = prefix_digests([1] * (PREFILL_CHUNK_TOKENS * (MAX_PREFIX_BLOCKS + 3)))
    assert len(found) == MAX_PREFIX_BLOCKS == len({*found})
    assert all(len(one) == 32 for one in found)
