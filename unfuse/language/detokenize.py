"""Text out of tokens while they are drawn: what is certain of it, and where it stops. Both cost the same a token."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol


class TokenVocabulary(Protocol):
    """What is needed of a tokenizer: the bytes that a token stands for, and which tokens are never shown."""

    @property
    def specials(self) -> Collection[int]:
        """Tokens that are no text."""

    def piece(self, id: int, first: bool = False) -> bytes:
        """The bytes of a token, which is perhaps the first one of its text."""


class Detokenizer:
    """Turns tokens into text, one by one. Its state follows from the tokens: a new one that gets them all goes on.

    A token may be half a character. What is no UTF-8 becomes U+FFFD, as soon as no later token can repair it. Special
    tokens are left out, except those in `marks`, which maps ids to text. `first` is false for tokens that
    continue a text: the space with which some tokenizers begin each text is then kept.
    """

    def __init__(
        self, tokenizer: TokenVocabulary, marks: Mapping[int, str] | None = None, *, first: bool = True
    ) -> None:
        self._tokenizer, self._first, self._marks = tokenizer, first, marks or {}
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def add(self, id: int) -> str:
        """The text that becomes certain with this token."""
        if id in self._tokenizer.specials:
            return self._marks.get(id, "")
        piece = self._tokenizer.piece(id, self._first)
        self._first = False
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What is left when no token follows: U+FFFD for a character that is incomplete."""
        return self._decoder.decode(b"", True)


class Stops:
    """Ends a text before the first stop string. What may be the beginning of one is held back until that is decided.

    The first is the one that is complete first; of several that end there, the longest. Where pieces of text begin and
    end makes no difference. Costs are linear in the text, however long the strings are.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._matches = [_Match(string) for string in strings if string]
        self._stopped = False
        self.stopped_by = ""  # the stop string that ended the text

    def feed(self, text: str) -> tuple[str, bool]:
        """(what may be shown now, whether the text has stopped): what follows a stop is never shown."""
        if self._stopped or not self._matches:
            return ("" if self._stopped else text), self._stopped
        before = self._held()
        held, had = before.string, before.length
        for read, char in enumerate(text, 1):
            ended = [match for match in self._matches if match.goes_on(char)]
            if ended:
                self._stopped = True
                self.stopped_by = max(ended, key=lambda match: match.length).string
                return _cut(held, had, text, had + read - len(self.stopped_by)), True
        return _cut(held, had, text, had + len(text) - self._held().length), False

    def skip(self, text: str) -> str:
        """Add text without looking for stop strings. Returns the text that may be sent: all of it."""
        return text

    def finish(self, *, cut: bool = False) -> str:
        """Return the text that was held back, at the end of the answer. `cut` makes no difference here."""
        held = self._held() if self._matches and not self._stopped else None
        return held.string[: held.length] if held else ""

    def _held(self) -> _Match:
        return max(self._matches, key=lambda match: match.length)


class _Match:
    """How much of a string's beginning ends a text (Knuth, Morris, Pratt). Its table goes as far as has matched."""

    def __init__(self, string: str) -> None:
        self.string, self.length = string, 0
        self._borders = [0, 0]  # of the first n characters: how many begin and end them, all of them apart

    def goes_on(self, char: str) -> bool:
        """Take the next character; whether the string is complete."""
        self.length = self._extended(self.length, char)
        if self.length == len(self._borders):
            self._borders.append(self._extended(self._borders[-1], char))
        return self.length == len(self.string)

    def _extended(self, length: int, char: str) -> int:
        while length and self.string[length] != char:
            length = self._borders[length]
        return length + (self.string[length] == char)


def _cut(held: str, had: int, text: str, count: int) -> str:
    """The first `count` characters of `held[:had] + text`, at the cost of those alone."""
    return held[:count] if count <= had else held[:had] + text[: count - had]
