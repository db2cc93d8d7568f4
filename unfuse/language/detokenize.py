"""The text of an answer while its tokens are drawn: what of it may be shown, and where it ends.

Each token costs the same, however long the text is.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from unfuse.core.text import AnswerParsing, TokenBytes, TokenDelta, token_name
from unfuse.language.answer_reader import AnswerPart, AnswerReader

if TYPE_CHECKING:
    from unfuse.language.tokenizer import ChatTokenizer


class Detokenizer:
    """Turns tokens into text, one by one. Its state follows from the tokens: a new one that gets them all goes on.

    A token may be half a character. What is no UTF-8 becomes U+FFFD, as soon as no later token can repair it. Special
    tokens are left out, except those in `marks`, which maps ids to text. `first` is false for tokens that
    continue a text: the space with which some tokenizers begin each text is then kept.
    """

    def __init__(self, tokenizer: ChatTokenizer, marks: Mapping[int, str] | None = None, *, first: bool = True) -> None:
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


class StopStrings:
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


class ContentStopStrings:
    """Stop strings for a parsed answer: they apply to its content only, not to reasoning and tool calls.

    Without parallel tool calls the text also stops after the first call.
    """

    def __init__(self, strings: Sequence[str], reading: AnswerParsing) -> None:
        self._strings, self._stops, self._reader = strings, StopStrings(strings), AnswerReader(reading)

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

    def _add(self, parts: Sequence[AnswerPart]) -> tuple[str, bool]:
        shown = ""
        for part in parts:
            if part.kind == "content":
                text, stopped = self._stops.feed(part.raw)
                shown += text
                if stopped:
                    return shown, True
            else:
                shown += self._stops.finish() + part.raw
                self._stops = StopStrings(self._strings)
        return shown, self._reader.over


class StopConditions(msgspec.Struct, frozen=True):
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


class AnswerText:
    """The text of an answer as far as it may be sent. It has at most `most` tokens, and stops as `ending` says."""

    def __init__(
        self, tokenizer: ChatTokenizer, ending: StopConditions, most: int, reading: AnswerParsing | None = None
    ) -> None:
        self.ends = ending.stop_ids if ending.ignore_eos else tokenizer.stops | ending.stop_ids
        self.most, self.made = most, list[TokenDelta]()
        self.ended = ""  # why the answer is over: "stop" or "length"
        self.stop_reason: str | int | None = None
        self._tokenizer, self._ending, self._reading = tokenizer, ending, reading
        marks = tokenizer.mark_ids(reading.marks) if reading else {}
        if ending.shows_special:
            marks |= {id: tokenizer.piece(id).decode(errors="replace") for id in tokenizer.specials}
        self._detokenizer = Detokenizer(tokenizer, marks, first=not ending.continues)
        self._stops = ContentStopStrings(ending.stops, reading) if reading else StopStrings(ending.stops)
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

    def add(self, token: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> TokenDelta:
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
    ) -> TokenDelta:
        if logprob is None:
            return TokenDelta(token, text)
        if self.ended and (not stopped or self._ending.include):
            self._certain = len(self._starts) - (over and not self._shows(token))
        while self._certain < len(self._starts) and self._starts[self._certain] < self._shown:
            self._certain += 1
        data = tuple(self._tokenizer.piece(id) for id, _ in top)
        named = tuple((id, token_name(of), likely) for (id, likely), of in zip(top, data, strict=True))
        return TokenDelta(token, text, logprob, named, TokenBytes(self._tokenizer.piece(token), data, self._certain))
