"""Grammars of answers that begin with reasoning: they hold from where that ends."""

from __future__ import annotations

from collections.abc import Sequence

from unfuse.core.reading import Reading
from unfuse.core.reasoning import ReasoningReader
from unfuse.stages.detokenize import Detokenizer
from unfuse.stages.sequences import Constraint
from unfuse.stages.words import Tokenizer


class BehindReasoning:
    """A constraint of what follows reasoning. Before the end of that, any token may follow.

    An answer that may begin with reasoning, and does not, is constrained from its first token.
    """

    def __init__(self, constraint: Constraint, reading: Reading, tokenizer: Tokenizer) -> None:
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
        """Have it found out, meanwhile, what may follow these ids, if they are behind the reasoning."""
        if self._behind(ids):
            self._constraint.begin(ids[self._reasoned :])

    def waits(self, wait_s: float = 0.0) -> bool:
        """Whether that is overdue, also after so many seconds: never within reasoning."""
        return not self._reasons and self._constraint.waits(wait_s)

    def allowed(self, ids: Sequence[int]) -> bytes | None:
        """A bit for each token, set if it may follow these ids; None if that is overdue. Raises PermanentError."""
        if not self._behind(ids):
            return self._any
        mask = self._constraint.allowed(ids[self._reasoned :])
        return mask if ids or mask is None else _with(mask, self._begin)

    def close(self) -> None:
        """The text is over."""
        self._constraint.close()

    @property
    def _reasons(self) -> bool:
        return self._reader.state in ("opened", "inside")

    def _behind(self, ids: Sequence[int]) -> bool:
        """Whether the grammar holds for what follows these ids, which go on from those of the call before."""
        for id in ids[self._read :]:
            reasoned = self._reasons or id in self._begin
            self._reader.feed(self._detokenizer.add(id))
            self._read += 1
            if reasoned:
                self._reasoned = self._read
        return not self._reasons


def _with(mask: bytes, ids: dict[int, str]) -> bytes:
    """A mask that these ids are added to."""
    bits = bytearray(mask)
    for id in ids:
        if id // 8 < len(bits):
            bits[id // 8] |= 1 << id % 8
    return bytes(bits)
