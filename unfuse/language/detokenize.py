"""Incremental detokenization: the text of an answer, up to its stop condition.

The cost of a token does not depend on the length of the text.
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
    """Turns token ids into text incrementally.

    A token may end within a character. Invalid UTF-8 becomes U+FFFD as soon as no later token can complete it. Special
    tokens are omitted, except those in `marks`. The state depends on the tokens alone, so a new detokenizer that is fed
    the same tokens continues the text.

    `marks`: the text of special tokens that are not omitted, by id.
    `first`: whether the tokens begin a text. Then the space that some tokenizers put before each text is omitted.
    """

    def __init__(self, tokenizer: ChatTokenizer, marks: Mapping[int, str] | None = None, *, first: bool = True) -> None:
        self._tokenizer = tokenizer
        self._first = first
        self._marks = marks or {}
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def add(self, id: int) -> str:
        """Return the text that is certain after this token."""
        if id in self._tokenizer.specials:
            return self._marks.get(id, "")
        piece = self._tokenizer.piece(id, self._first)
        self._first = False
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Return the remaining text at the end: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", True)


class StopStrings:
    """Ends a text before its first stop string.

    Text that may be the beginning of a stop string is held back until that is decided. The first stop string is the one
    that is complete first; of several that end at the same character, the longest. The result does not depend on where
    the text is split. Costs are linear in the length of the text, however long the strings are.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._matches = [_Match(string) for string in strings if string]
        self._stopped = False
        #: The stop string that ended the text; "" before.
        self.stopped_by = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Add text.

        Returns the text that may be sent now, and whether a stop string ended the text.
        Text after a stop string is dropped.
        """
        if self._stopped or not self._matches:
            return ("" if self._stopped else text), self._stopped

        # The text that was held back is the first `pending` characters of `string`.
        longest = self._longest_match()
        string, pending = longest.string, longest.length
        for count, char in enumerate(text, 1):
            complete = [match for match in self._matches if match.advance(char)]
            if complete:
                self._stopped = True
                self.stopped_by = max(complete, key=lambda match: match.length).string
                return _prefix(string, pending, text, pending + count - len(self.stopped_by)), True

        return _prefix(string, pending, text, pending + len(text) - self._longest_match().length), False

    def skip(self, text: str) -> str:
        """Return the text unchanged, without a search for stop strings."""
        return text

    def finish(self, *, cut: bool = False) -> str:
        """Return the text that was held back, at the end of the answer.

        `cut` makes no difference here.
        """
        match = self._longest_match() if self._matches and not self._stopped else None
        return match.string[: match.length] if match else ""

    def _longest_match(self) -> _Match:
        """Return the match whose beginning covers all text that is held back."""
        return max(self._matches, key=lambda match: match.length)


class _Match:
    """The incremental search for one string, after Knuth, Morris and Pratt.

    Its table covers only the longest beginning that has matched so far.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.length = 0  # of the longest beginning of `string` that the text ends with

        # For the first n characters of `string`: the length of the longest shorter beginning that they end with.
        self._borders = [0, 0]

    def advance(self, char: str) -> bool:
        """Add the text's next character. Returns whether the text ends with the string."""
        self.length = self._extend(self.length, char)
        if self.length == len(self._borders):
            self._borders.append(self._extend(self._borders[-1], char))
        return self.length == len(self.string)

    def _extend(self, length: int, char: str) -> int:
        """Return the new length of a match of this length after one more character."""
        while length and self.string[length] != char:
            length = self._borders[length]
        return length + (self.string[length] == char)


def _prefix(string: str, pending: int, text: str, count: int) -> str:
    """Return the first `count` characters of `string[:pending] + text`, without joining all of them."""
    return string[:count] if count <= pending else string[:pending] + text[: count - pending]


class ContentStopStrings:
    """Ends an answer before the first stop string in its content.

    Stop strings are not searched in its reasoning and its tool calls.

    Without parallel tool calls the text also stops after the first call.
    """

    def __init__(self, strings: Sequence[str], parsing: AnswerParsing) -> None:
        self._strings = strings
        self._stops = StopStrings(strings)
        self._reader = AnswerReader(parsing)

    @property
    def stopped_by(self) -> str:
        """The stop string that ended the content; "" if none did."""
        return self._stops.stopped_by

    def feed(self, text: str) -> tuple[str, bool]:
        """Add text.

        Returns the text that may be sent now, and whether the answer has stopped.
        The text contains all marks.
        """
        return self._add(self._reader.feed(text))

    def skip(self, text: str) -> str:
        """Add text without a search for stop strings. Returns the text that may be sent.

        The text contains all marks.
        """
        return "".join(part.raw for part in self._reader.feed(text))

    def finish(self, *, cut: bool = False) -> str:
        """Return the text that was held back, at the end of the answer.

        `cut`: it ran out of tokens.
        """
        text, stopped = self._add(self._reader.finish(cut=cut))
        return text if stopped else text + self._stops.finish()

    def _add(self, parts: Sequence[AnswerPart]) -> tuple[str, bool]:
        """Search the content of these parts for stop strings. Returns what `feed` returns."""
        output = ""
        for part in parts:
            if part.kind == "content":
                text, stopped = self._stops.feed(part.raw)
                output += text
                if stopped:
                    return output, True
            else:
                # Stop strings apply to content only, and none extends over reasoning or a tool call.
                output += self._stops.finish() + part.raw
                self._stops = StopStrings(self._strings)
        return output, self._reader.is_over


class StopConditions(msgspec.Struct, frozen=True):
    """The stop conditions of an answer, except its maximum length.

    `continues` and `keep_special` control how tokens become text.
    """

    #: Stop strings.
    stops: tuple[str, ...] = ()
    #: Token ids that end the answer, in addition to the model's end-of-text tokens.
    stop_ids: frozenset[int] = frozenset()
    #: Whether the model's end-of-text tokens do not end the answer.
    ignore_eos: bool = False
    #: The number of tokens in which stop strings are ignored. Sampling excludes end tokens there (`min_tokens`).
    min_tokens: int = 0
    #: Whether the stop string, or the token in `stop_ids`, is part of the answer.
    include: bool = False
    #: Whether the answer continues a text in the prompt.
    continues: bool = False
    #: Whether special tokens are part of the text.
    keep_special: bool = False


class AnswerText:
    """The text of an answer while its tokens are generated, and why it ended.

    `conditions`: the stop conditions.
    `max_tokens`: the maximum length in tokens.
    `parsing`: how the answer is parsed. With None, all of it is content.
    """

    #: The token ids that end the answer.
    end_ids: frozenset[int]
    #: The maximum length in tokens.
    max_tokens: int
    #: The deltas so far, one per token.
    deltas: list[TokenDelta]
    #: Why the answer ended: "stop" or "length"; "" before.
    finish_reason: str
    #: The stop string or stop token that ended the answer. None for the model's end-of-text tokens.
    stop_reason: str | int | None

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        conditions: StopConditions,
        max_tokens: int,
        parsing: AnswerParsing | None = None,
    ) -> None:
        self.end_ids = conditions.stop_ids if conditions.ignore_eos else tokenizer.stops | conditions.stop_ids
        self.max_tokens = max_tokens
        self.deltas = []
        self.finish_reason = ""
        self.stop_reason = None

        self._tokenizer = tokenizer
        self._conditions = conditions
        self._parsing = parsing
        marks = tokenizer.mark_ids(parsing.marks) if parsing else {}
        if conditions.keep_special:
            marks |= {id: tokenizer.piece(id).decode(errors="replace") for id in tokenizer.specials}
        self._detokenizer = Detokenizer(tokenizer, marks, first=not conditions.continues)
        self._stops = ContentStopStrings(conditions.stops, parsing) if parsing else StopStrings(conditions.stops)

        self._starts = list[int]()  # for each token, the length of the text before it
        self._length = 0  # of the text of all tokens
        self._sent_length = 0  # of the text in all deltas
        self._final_tokens = 0  # how many of the first tokens have final text

    @property
    def has_reasoning(self) -> bool:
        """Whether the answer has reasoning in its turn.

        Chat templates omit reasoning from later turns.
        """
        parsing = self._parsing
        if parsing is None or parsing.reasoning is None:
            return False
        text = "".join(delta.text for delta in self.deltas)
        has_marks = any(mark in text for mark in (parsing.reasoning.start_mark, parsing.reasoning.end_mark))
        return has_marks or parsing.starts_in_reasoning or parsing.has_reasoning

    def add(self, token: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> TokenDelta:
        """Add a token, and return the new text that may be sent.

        `logprob`: the token's logprob, or None if not requested.
        `top`: (id, logprob) of the likeliest tokens, if requested.
        """
        is_end_token = token in self.end_ids
        self._starts.append(self._length)
        is_hidden = is_end_token and not self._is_included(token)
        text, stopped = ("", False) if is_hidden else self._feed(self._detokenizer.add(token))

        self.finish_reason = (
            "stop" if is_end_token or stopped else "length" if len(self._starts) == self.max_tokens else ""
        )

        # The text that was held back for later tokens is certain now, and may complete a stop string.
        if self.finish_reason and not stopped:
            remaining, stopped = self._feed(self._detokenizer.finish())
            text += remaining + ("" if stopped else self._stops.finish(cut=self.finish_reason == "length"))
            self.finish_reason = "stop" if stopped else self.finish_reason

        if stopped:
            self.stop_reason = self._stops.stopped_by or None
            text += self._stops.stopped_by if self._conditions.include else ""
        elif is_end_token and token in self._conditions.stop_ids and token not in self._tokenizer.stops:
            self.stop_reason = token

        self._sent_length += len(text)
        self.deltas.append(self._delta(token, text, logprob, top, is_end_token=is_end_token, stopped=stopped))
        return self.deltas[-1]

    def _is_included(self, token: int) -> bool:
        """Return whether this token, which ends the answer, is part of it."""
        return self._conditions.include and token in self._conditions.stop_ids

    def _feed(self, text: str) -> tuple[str, bool]:
        """Add text.

        Returns the text that may be sent, and whether a stop string ended it.
        Stop strings are ignored in the first `min_tokens` tokens.
        """
        self._length += len(text)
        if len(self._starts) <= self._conditions.min_tokens:
            return self._stops.skip(text), False
        return self._stops.feed(text)

    def _delta(
        self,
        token: int,
        text: str,
        logprob: float | None,
        top: tuple[tuple[int, float], ...],
        *,
        is_end_token: bool,
        stopped: bool,
    ) -> TokenDelta:
        """Return the delta of a token, with its logprobs if requested."""
        if logprob is None:
            return TokenDelta(token, text)
        if self.finish_reason and (not stopped or self._conditions.include):
            self._final_tokens = len(self._starts) - (is_end_token and not self._is_included(token))
        while self._final_tokens < len(self._starts) and self._starts[self._final_tokens] < self._sent_length:
            self._final_tokens += 1

        top_bytes = tuple(self._tokenizer.piece(id) for id, _ in top)
        top_logprobs = tuple(
            (id, token_name(token_bytes), value) for (id, value), token_bytes in zip(top, top_bytes, strict=True)
        )
        return TokenDelta(
            token, text, logprob, top_logprobs, TokenBytes(self._tokenizer.piece(token), top_bytes, self._final_tokens)
        )
