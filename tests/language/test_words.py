"""Where answers end, and which of their tokens are certain, with a tokenizer of one byte a token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from unfuse.core.text import TokenDelta
from unfuse.language.detokenize import AnswerText, StopConditions

EOS, SPECIAL = 256, 257


class Bytes:
    """A tokenizer of bytes, with an end token and one that is no text."""

    stops = frozenset({EOS})
    specials = frozenset({EOS, SPECIAL})

    def piece(self, id: int, first: bool = False) -> bytes:
        return bytes([id]) if id < EOS else f"<{id}>".encode()

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id for id in ids if id < EOS).decode(errors="replace")


def told(ids: Sequence[int], ending: StopConditions, most: int = 99) -> tuple[AnswerText, list[TokenDelta]]:
    words = AnswerText(Bytes(), ending, most)
    pieces = []
    for id in ids:
        pieces.append(words.add(id, -1.0, ((id, -1.0), (EOS, -9.0))))
        if words.finish_reason:
            break
    return words, pieces


def ended(
    text: str, ending: StopConditions, more: Sequence[int] = (), most: int = 99
) -> tuple[str, str, str | int | None, int]:
    """The text of an answer, why it ended, by what, and how many tokens are certain."""
    words, pieces = told([*text.encode(), *more], ending, most)
    assert pieces[-1].token_bytes
    return (
        "".join(piece.text for piece in pieces),
        words.finish_reason,
        words.stop_reason,
        pieces[-1].token_bytes.final_tokens,
    )


@pytest.mark.parametrize(
    ("ending", "more", "most", "means"),
    [
        (StopConditions(), [EOS], 99, ("abcd", "stop", None, 4)),
        (StopConditions(), [], 4, ("abcd", "length", None, 4)),
        (StopConditions(("cd",)), [], 99, ("ab", "stop", "cd", 2)),
        (StopConditions(("cd",), include=True), [], 99, ("abcd", "stop", "cd", 4)),
        (StopConditions(("bx", "cx")), [EOS], 99, ("abcd", "stop", None, 4)),
        (StopConditions(("dx",)), [EOS], 99, ("abcd", "stop", None, 4)),
        (StopConditions(("dx",)), [], 4, ("abcd", "length", None, 4)),
        (StopConditions(stop_ids=frozenset(b"c")), [], 99, ("ab", "stop", 99, 2)),
        (StopConditions(stop_ids=frozenset(b"c"), include=True), [], 99, ("abc", "stop", 99, 3)),
        (StopConditions(stop_ids=frozenset({SPECIAL}), include=True), [SPECIAL], 99, ("abcd", "stop", SPECIAL, 5)),
        (StopConditions(stop_ids=frozenset({EOS})), [EOS], 99, ("abcd", "stop", None, 4)),
        (StopConditions(ignore_eos=True), [EOS, EOS], 6, ("abcd", "length", None, 6)),
        (StopConditions(ignore_eos=True, stop_ids=frozenset(b"d")), [EOS], 99, ("abc", "stop", 100, 3)),
        (StopConditions(("b", "d"), min_tokens=2), [], 99, ("abc", "stop", "d", 3)),
        (StopConditions(("cd",), min_tokens=3), [EOS], 99, ("abcd", "stop", None, 4)),
    ],
)
def test_completion_ends_at_the_first_stop_condition(
    ending: StopConditions, more: list[int], most: int, means: tuple[object, ...]
) -> None:
    assert ended("abcd", ending, more, most) == means


def test_token_is_final_once_its_text_is_emitted() -> None:
    """Given half a character, and what may begin a stop text, then their tokens wait for the text."""
    _, pieces = told([*"a😀b".encode(), *b"xyxz", EOS], StopConditions(("xyz",)))
    counts = [piece.token_bytes.final_tokens for piece in pieces if piece.token_bytes]
    assert counts == [1, 1, 1, 1, 5, 6, 6, 6, 8, 10, 10]
    assert [piece.text for piece in pieces][4:6] == ["😀", "b"]


def test_logprob_tokens_have_their_own_bytes_and_names() -> None:
    _, pieces = told([*"é".encode(), SPECIAL, EOS], StopConditions())
    own = [piece.token_bytes for piece in pieces if piece.token_bytes]
    assert [one.data for one in own] == [b"\xc3", b"\xa9", b"<257>", b"<256>"]
    assert [piece.top[0][1] for piece in pieces] == ["\\xc3", "\\xa9", "<257>", "<256>"]
    assert own[0].top == (b"\xc3", b"<256>")


def test_token_bytes_are_omitted_without_logprobs() -> None:
    assert AnswerText(Bytes(), StopConditions(), 9).add(97, None, ()) == TokenDelta(97, "a")


class Spoken(Bytes):
    """A tokenizer as SentencePiece's: the space that a text begins with is none of its own."""

    def piece(self, id: int, first: bool = False) -> bytes:
        piece = super().piece(id)
        return piece.removeprefix(b" ") if first else piece


@pytest.mark.row("C5:continue_final_message")
@pytest.mark.parametrize(("continues", "text"), [(False, "b"), (True, " b")])
def test_continued_message_preserves_leading_space(continues: bool, text: str) -> None:
    words = AnswerText(Spoken(), StopConditions(continues=continues), 2)
    assert "".join(words.add(id, None, ()).text for id in b" b") == text


def test_special_tokens_are_emitted_only_on_request() -> None:
    shown = StopConditions(keep_special=True)
    assert ended("ab", shown, [SPECIAL, EOS]) == ("ab<257>", "stop", None, 3)
    assert ended("ab", StopConditions(), [SPECIAL, EOS]) == ("ab", "stop", None, 3)
