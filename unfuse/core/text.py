"""What decoding adds to a text: tokens, and what became certain with each."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec


def packed(ids: Sequence[int]) -> bytes:
    """Ids as 32-bit numbers, least byte first."""
    return array("I", ids).tobytes()


def unpacked(data: bytes) -> list[int]:
    """The ids in what `packed` made."""
    return array("I", data).tolist()


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A token that was drawn, and the text that became certain with it: none while a character is incomplete.

    `logprob` is the natural logarithm of its probability; `top` has (id, text, logprob) of the most likely tokens, the
    likeliest first. Both are there only if they were asked for.
    """

    id: int
    text: str = ""
    logprob: float | None = None
    top: tuple[tuple[int, str, float], ...] = ()


class Answer(msgspec.Struct, frozen=True):
    """A whole answer: its text, why it ended ("stop" or "length"), and its tokens."""

    text: str
    finish_reason: str
    pieces: list[Piece]
