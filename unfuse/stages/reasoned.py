"""Grammars of answers with reasoning: they apply after the end of the reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from unfuse.core.text import Reading
from unfuse.language.answer_reader import ReasoningReader
from unfuse.language.detokenize import Detokenizer
from unfuse.stages.sequences import GrammarMatcher
from unfuse.stages.words import Tokenizer


class BehindReasoning:
    """Applies a constraint to the tokens after the reasoning. Within the reasoning every token is allowed.

    An answer without reasoning is constrained from its first token; only the mark that begins reasoning is allowed too.
    """

    def __init__(self, constraint: GrammarMatcher, reading: Reading, tokenizer: Tokenizer) -> None:
        format = reading.reasoning
        assert format
        self._constraint = constraint
        self._reader = ReasoningReader(format, reading.opened)
        self._detokenizer = Detokenizer(tokenizer, tokenizer.mark_ids(reading.marks))
        self._any = b"\xff" * (-(-tokenizer.size // 8))
        self._begin = tokenizer.mark_ids([format.begin]) if not reading.opened else {}
        self._read, self._reasoned = 0, 0

    @property
    def compiling(self) -> bool:
        """Whether its grammar is not compiled yet."""
        return self._constraint.compiling

    def begin(self, ids: Sequence[int]) -> None:
        """Start computing the tokens allowed after these ids in the background, if the reasoning is over."""
        if self._behind(ids):
            self._constraint.begin(ids[self._reasoned :])

    def waits(self, wait_s: float = 0.0) -> bool:
        """Whether that computation is overdue, after waiting up to `wait_s` seconds. Never within reasoning."""
        return not self._reasons and self._constraint.waits(wait_s)

    def allowed(self, ids: Sequence[int]) -> bytes | None:
        """Return a bit mask of the tokens allowed after these ids; None if overdue. Raises PermanentError."""
        if not self._behind(ids):
            return self._any
        mask = self._constraint.allowed(ids[self._reasoned :])
        return mask if ids or mask is None else _with(mask, self._begin)

    def close(self) -> None:
        """Release the constraint at the end of the text."""
        self._constraint.close()

    @property
    def _reasons(self) -> bool:
        return self._reader.state in ("opened", "inside")

    def _behind(self, ids: Sequence[int]) -> bool:
        """Whether the grammar applies after these ids. They must extend the ids of the previous call."""
        for id in ids[self._read :]:
            reasoned = self._reasons or id in self._begin
            self._reader.feed(self._detokenizer.add(id))
            self._read += 1
            if reasoned:
                self._reasoned = self._read
        return not self._reasons


def _with(mask: bytes, ids: dict[int, str]) -> bytes:
    """Return the mask with these ids allowed too."""
    bits = bytearray(mask)
    for id in ids:
        if id // 8 < len(bits):
            bits[id // 8] |= 1 << id % 8
    return bytes(bits)
