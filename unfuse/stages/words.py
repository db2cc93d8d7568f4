"""The text of an answer while its tokens are drawn: what of it may be shown, and where it ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from unfuse.core.text import Piece, Reading, TokenBytes, token_name
from unfuse.language.answer_reader import AnswerReader
from unfuse.language.detokenize import Detokenizer, Stops, TokenVocabulary
from unfuse.language.tool_calls import Part


class Tokenizer(TokenVocabulary, Protocol):
    """The interface of the tokenizer that decoding needs. `stops` are the ids that end a text; `size` bounds ids."""

    stops: frozenset[int]
    size: int

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids."""

    def mark_ids(self, marks: Iterable[str]) -> dict[int, str]:
        """Return the marks that are a single token, by id."""


class StopsOfContent:
    """Stop strings for a parsed answer: they apply to its content only, not to reasoning and tool calls.

    Without parallel tool calls the text also stops after the first call.
    """

    def __init__(self, strings: Sequence[str], reading: Reading) -> None:
        self._strings, self._stops, self._reader = strings, Stops(strings), AnswerReader(reading)

    @property
    def stopped_by(self) -> str:
        """The stop string that ended the content; "" if none did."""
        return self._stops.stopped_by

    def feed(self, text: str) -> tuple[str, bool]:
        """Add text. Returns the text that may be sent now, with all marks, and whether the answer has stopped."""
        return self._add(self._reader.feed(text))

    def skip(self, text: str) -> str:
        """Add text without looking for stop strings. Returns the text that may be sent now, with all marks."""
        return "".join(part.raw for part in self._reader.feed(text))

    def finish(self, *, cut: bool = False) -> str:
        """Return the text that was held back, at the end of the answer. `cut`: it ran out of tokens."""
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


class Ending(msgspec.Struct, frozen=True):
    """The stop conditions of an answer: stop strings, the token ids `stop_ids`, and the model's end-of-text tokens.

    With `ignore_eos` the end-of-text tokens do not stop it. An answer of fewer than `least` tokens only stops at its
    maximum length. With `include` the stop string, or the token in `stop_ids`, is part of the answer. `continues`: the
    answer continues a text in the prompt. `shows_special`: special tokens are kept as text.
    """

    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    least: int = 0
    include: bool = False
    continues: bool = False
    shows_special: bool = False


class Words:
    """The text of an answer as far as it may be sent. It has at most `most` tokens, and stops as `ending` says."""

    def __init__(self, tokenizer: Tokenizer, ending: Ending, most: int, reading: Reading | None = None) -> None:
        self.ends = ending.stop_ids if ending.ignore_eos else tokenizer.stops | ending.stop_ids
        self.most, self.made = most, list[Piece]()
        self.ended = ""  # why the answer is over: "stop" or "length"
        self.stop_reason: str | int | None = None
        self._tokenizer, self._ending, self._reading = tokenizer, ending, reading
        marks = tokenizer.mark_ids(reading.marks) if reading else {}
        if ending.shows_special:
            marks |= {id: tokenizer.piece(id).decode(errors="replace") for id in tokenizer.specials}
        self._detokenizer = Detokenizer(tokenizer, marks, first=not ending.continues)
        self._stops = StopsOfContent(ending.stops, reading) if reading else Stops(ending.stops)
        self._starts = list[int]()  # for each token, the length of the text before it
        self._length, self._shown, self._certain = 0, 0, 0

    @property
    def has_reasoning(self) -> bool:
        """Whether the turn of the answer has reasoning, which chat templates leave out of later turns."""
        reading = self._reading
        if reading is None or reading.reasoning is None:
            return False
        text = "".join(piece.text for piece in self.made)
        marked = any(mark in text for mark in (reading.reasoning.begin, reading.reasoning.end))
        return marked or reading.opened or reading.reasoned

    def add(self, token: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> Piece:
        """Add a token, with its logprob and (id, logprob) of the likeliest ones, if these are asked for."""
        over = token in self.ends
        self._starts.append(self._length)
        text, stopped = ("", False) if over and not self._shows(token) else self._feed(self._detokenizer.add(token))
        self.ended = "stop" if over or stopped else "length" if len(self._starts) == self.most else ""
        if self.ended and not stopped:
            more, stopped = self._feed(self._detokenizer.finish())
            text += more + ("" if stopped else self._stops.finish(cut=self.ended == "length"))
            self.ended = "stop" if stopped else self.ended
        if stopped:
            self.stop_reason = self._stops.stopped_by or None
            text += self._stops.stopped_by if self._ending.include else ""
        elif over and token in self._ending.stop_ids and token not in self._tokenizer.stops:
            self.stop_reason = token
        self._shown += len(text)
        self.made.append(self._piece(token, text, logprob, top, over=over, stopped=stopped))
        return self.made[-1]

    def _shows(self, token: int) -> bool:
        return self._ending.include and token in self._ending.stop_ids

    def _feed(self, text: str) -> tuple[str, bool]:
        """Add text. Returns the text that may be sent, and whether a stop string ended it (not before `least`)."""
        self._length += len(text)
        if len(self._starts) <= self._ending.least:
            return self._stops.skip(text), False
        return self._stops.feed(text)

    def _piece(
        self,
        token: int,
        text: str,
        logprob: float | None,
        top: tuple[tuple[int, float], ...],
        *,
        over: bool,
        stopped: bool,
    ) -> Piece:
        if logprob is None:
            return Piece(token, text)
        if self.ended and (not stopped or self._ending.include):
            self._certain = len(self._starts) - (over and not self._shows(token))
        while self._certain < len(self._starts) and self._starts[self._certain] < self._shown:
            self._certain += 1
        data = tuple(self._tokenizer.piece(id) for id, _ in top)
        named = tuple((id, token_name(of), likely) for (id, likely), of in zip(top, data, strict=True))
        return Piece(token, text, logprob, named, TokenBytes(self._tokenizer.piece(token), data, self._certain))
