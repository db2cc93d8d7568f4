"""Text while it grows, beside what the whole bytes and the whole text say."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, strategies as st

from unfuse.language.detokenize import Detokenizer, StopStrings

NEVER_SHOWN = 999


class Table:
    """A tokenizer that is a list of bytes; as some do, it begins a text without the space of its first token."""

    specials = frozenset({NEVER_SHOWN})

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces, self.asked = pieces, 0

    def piece(self, id: int, first: bool = False) -> bytes:
        self.asked += 1
        return self.pieces[id].removeprefix(b" ") if first else self.pieces[id]


def cut_up(text: bytes, lengths: Sequence[int]) -> list[bytes]:
    """The bytes in pieces of these lengths, and the rest."""
    pieces, at = [], 0
    for length in lengths:
        pieces.append(text[at : at + length])
        at += length
    return [*pieces, text[at:]]


def shown(pieces: Sequence[bytes]) -> list[str]:
    """What each token shows, and what the end of the text does."""
    detokenizer = Detokenizer(Table([b"", *pieces]))
    return [*map(detokenizer.add, range(len(pieces) + 1)), detokenizer.finish()]


@given(st.text(), st.lists(st.integers(0, 5), max_size=30))
def test_characters_appear_with_the_token_that_completes_them(text: str, lengths: list[int]) -> None:
    pieces = cut_up(text.encode(), lengths)

    made = shown(pieces)

    whole = b""
    for count, piece in enumerate(pieces, 2):
        whole += piece
        assert "".join(made[:count]) == whole.decode(errors="ignore")
    assert "".join(made) == text


@given(st.lists(st.binary(max_size=4) | st.sampled_from([b"\xf0\x9f", b"\x98\x80", b"\xe2\x82", b"\xff"])))
def test_invalid_bytes_are_replaced_as_in_the_whole_text(pieces: list[bytes]) -> None:
    assert "".join(shown(pieces)) == b"".join(pieces).decode(errors="replace")


def test_incomplete_character_is_emitted_only_at_the_end() -> None:
    assert shown([b"a\xe2", b"\x82", b"\xac", b"\xf0\x9f"]) == ["", "a", "", "€", "", "\ufffd"]


def test_invalid_byte_is_replaced_immediately() -> None:
    assert shown([b"\xff", b"\xe2", b"b"]) == ["", "\ufffd", "", "\ufffdb", ""]


def test_special_tokens_are_skipped_and_leading_space_is_stripped() -> None:
    detokenizer = Detokenizer(Table([b" a", b" b"]))
    assert [detokenizer.add(id) for id in (NEVER_SHOWN, 0, NEVER_SHOWN, 1)] == ["", "a", "", " b"]


def test_new_detokenizer_resumes_after_the_same_tokens() -> None:
    table = Table([b"\xf0\x9f", b"\x98", b"\x80!"])
    one, other = Detokenizer(table), Detokenizer(table)
    one.add(0), one.add(1)
    for id in (0, 1):
        other.add(id)
    assert one.add(2) == other.add(2) == "😀!"


def test_each_token_is_looked_up_once() -> None:
    table = Table([b"\xff"] * 900)
    detokenizer = Detokenizer(table)
    for id in range(900):
        detokenizer.add(id)
    assert table.asked == 900


def ended(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop string that is complete first, the longest of those; None without any."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return None


def certain(text: str, stops: Sequence[str]) -> str:
    """The text without what may be the beginning of a stop string."""
    held = [size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
    return text[: len(text) - max(held, default=0)]


few = st.text("ab", max_size=40)
strings = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


@given(few, strings, st.lists(st.integers(0, 4), max_size=40))
def test_text_is_emitted_up_to_first_stop_string_as_soon_as_certain(
    text: str, stops: list[str], lengths: list[int]
) -> None:
    watch, made, read = StopStrings(stops), "", ""
    for piece in (part.decode() for part in cut_up(text.encode(), lengths)):
        now, stopped = watch.feed(piece)
        made, read = made + now, read + piece
        end = ended(read, stops)
        assert stopped == (end is not None)
        assert made == (certain(read, stops) if end is None else end)

    end = ended(text, stops)
    assert made + watch.finish() == (text if end is None else end)


def test_stop_string_is_found_in_all_short_texts() -> None:
    """So that a string is found wherever it begins inside what looked like its own beginning."""
    texts = ["".join(letters) for size in range(1, 9) for letters in product("ab", repeat=size)]
    for stop in (text for text in texts if 2 < len(text) < 6):
        for text in texts:
            watch, end = StopStrings([stop]), ended(text, [stop])
            assert watch.feed(text)[0] == (certain(text, [stop]) if end is None else end), (text, stop)


@given(few, strings)
def test_stop_strings_do_not_depend_on_chunk_boundaries(text: str, stops: list[str]) -> None:
    whole, by_letters = StopStrings(stops), StopStrings(stops)
    at_once, stopped = whole.feed(text)
    letters = [by_letters.feed(letter) for letter in text]
    assert at_once == "".join(part for part, _ in letters)
    assert stopped == any(end for _, end in letters)
    assert whole.finish() == by_letters.finish()


@pytest.mark.parametrize(
    ("stops", "parts", "shows"),
    [
        (["</s>"], ["a<", "/", "s", ">b"], ["a", "", "", ""]),
        (["</s>"], ["a<", "/t"], ["a", "</t"]),
        (["abcd", "bc"], ["xab", "cd"], ["x", "a"]),
        (["ab", "b"], ["a", "b"], ["", ""]),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""]),
        ([], ["a", "b"], ["a", "b"]),
        (["", "x"], ["a", "x"], ["a", ""]),
    ],
)
def test_each_chunk_emits_the_text_that_is_certain(stops: list[str], parts: list[str], shows: list[str]) -> None:
    watch = StopStrings(stops)
    assert [watch.feed(part)[0] for part in parts] == shows


def test_no_text_is_emitted_after_a_stop_string() -> None:
    watch = StopStrings(["."])
    assert watch.feed("a.b") == ("a", True)
    assert watch.feed("c") == ("", True)
    assert watch.finish() == ""


def test_megabyte_stop_strings_are_matched_in_linear_time() -> None:
    """By anything that goes back in the text, or copies what is held, this takes hours."""
    stops = ["a" * 1_000_000 + end for end in "bcd"]
    watch = StopStrings(stops)
    made = [watch.feed("aaaa") for _ in range(100_000)]
    assert made[-1] == ("", False)
    assert watch.feed("x") == ("a" * 400_000 + "x", False)
