"""Pieces of a text, as they are recorded."""

from hypothesis import given

from tests.core.structs import of
from unfuse.core.codec import decode, encode
from unfuse.core.text import Piece


@given(of(Piece))
def test_a_piece_comes_back_as_it_was_written(piece: Piece) -> None:
    assert decode(encode(piece), Piece) == piece


def test_a_piece_without_logprobs_takes_few_bytes() -> None:
    assert len(encode(Piece(49_000, " the"))) <= 12


def test_what_was_recorded_of_a_token_alone_can_be_read() -> None:
    assert decode(encode([7]), Piece) == Piece(7)
