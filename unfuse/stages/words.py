"""The text of an answer while its tokens are drawn: what of it may be shown, and where it ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from unfuse.core.reading import AnswerReader, Reading
from unfuse.core.text import Piece
from unfuse.core.tool_calls import Part
from unfuse.stages.detokenize import Detokenizer, Pieces, Stops


class Tokenizer(Pieces, Protocol):
    """What decoding needs of a tokenizer: the ids that end a text, the text of some, and how many ids there may be."""

    stops: frozenset[int]
    size: int

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids."""

    def mark_ids(self, marks: Iterable[str]) -> dict[int, str]:
        """Those of these texts that are one token, by id."""


class StopsOfContent:
    """Stop strings for an answer that is parsed: they end its content, and are no matter in reasoning and calls.

    The text also stops behind the only call that a request has room for.
    """

    def __init__(self, strings: Sequence[str], reading: Reading) -> None:
        self._strings, self._stops, self._reader = strings, Stops(strings), AnswerReader(reading)

    def feed(self, text: str) -> tuple[str, bool]:
        """(what may be shown now, whether the text has stopped), with all marks."""
        return self._add(self._reader.feed(text))

    def finish(self, *, cut: bool = False) -> str:
        """What was held back, when no text follows."""
        text, stopped = self._add(self._reader.finish(cut=cut))
        return text if stopped else text + self._stops.finish()

    def _add(self, parts: Sequence[Part]) -> tuple[str, bool]:
        shown = ""
        for part in parts:
            if part.kind == "content":
                text, stopped = self._stops.feed(part.raw)
                shown += text
                if stopped:
                    return shown, True
            else:
                shown += self._stops.finish() + part.raw
                self._stops = Stops(self._strings)
        return shown, self._reader.over


class Words:
    """The text of an answer, as far as it may be shown; it ends with a token or a text that stops it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], most: int, reading: Reading | None = None) -> None:
        marks = tokenizer.mark_ids(reading.marks) if reading else {}
        self._ends, self._detokenizer = tokenizer.stops, Detokenizer(tokenizer, marks)
        self._stops = StopsOfContent(stops, reading) if reading else Stops(stops)
        self.most, self.made = most, list[Piece]()
        self.ended = ""  # why the answer is over: "stop" or "length"

    def add(self, token: int, logprob: float | None, top: tuple[tuple[int, str, float], ...]) -> Piece:
        """Add a token."""
        over = token in self._ends
        text, stopped = ("", False) if over else self._stops.feed(self._detokenizer.add(token))
        self.ended = "stop" if over or stopped else "length" if len(self.made) + 1 == self.most else ""
        if self.ended and not stopped:
            more, stopped = self._stops.feed(self._detokenizer.finish())
            text += more + ("" if stopped else self._stops.finish(cut=self.ended == "length"))
            self.ended = "stop" if stopped else self.ended
        self.made.append(Piece(token, text, logprob, top))
        return self.made[-1]
