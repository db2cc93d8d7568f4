"""The text of an answer while its tokens are drawn: what of it may be shown, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from unfuse.core.text import Piece
from unfuse.stages.detokenize import Detokenizer, Pieces, Stops


class Tokenizer(Pieces, Protocol):
    """What decoding needs of a tokenizer: the ids that end a text, and the text of some."""

    stops: frozenset[int]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids."""


class Words:
    """The text of an answer, as far as it may be shown; it ends with a token or a text that stops it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], most: int) -> None:
        self._ends, self._detokenizer, self._stops = tokenizer.stops, Detokenizer(tokenizer), Stops(stops)
        self.most, self.made = most, list[Piece]()
        self.ended = ""  # why the answer is over: "stop" or "length"

    def add(self, token: int, logprob: float | None, top: tuple[tuple[int, str, float], ...]) -> Piece:
        """Add a token."""
        over = token in self._ends
        text, stopped = ("", False) if over else self._stops.feed(self._detokenizer.add(token))
        self.ended = "stop" if over or stopped else "length" if len(self.made) + 1 == self.most else ""
        if self.ended and not stopped:
            more, stopped = self._stops.feed(self._detokenizer.finish())
            text += more + ("" if stopped else self._stops.finish())
            self.ended = "stop" if stopped else self.ended
        self.made.append(Piece(token, text, logprob, top))
        return self.made[-1]
