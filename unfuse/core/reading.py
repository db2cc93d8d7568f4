"""Splits the text of an answer into reasoning, content and tool calls, by the model's formats."""

from __future__ import annotations

import msgspec

from unfuse.core.call_formats import CallFormat
from unfuse.core.reasoning import ReasoningFormat, ReasoningReader
from unfuse.core.tool_calls import CallReader, Part


class Reading(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to parse an answer.

    `calls` and `reasoning` are formats (None: not parsed). `functions` maps each offered function to the types of its
    parameters by name. `several` and `forced` are as in CallReader. `opened`: the prompt ends within reasoning.
    `reasoned`: it has reasoning of this turn, which is over. With `hidden`, reasoning is not sent to clients.
    """

    calls: CallFormat | None = None
    functions: dict[str, dict[str, str]] = {}
    several: bool = True
    forced: bool = False
    reasoning: ReasoningFormat | None = None
    opened: bool = False
    hidden: bool = False
    reasoned: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that may be special tokens of the model. They must be kept in the text, so that it can be parsed."""
        calls = self.calls.marks if self.calls else ()
        reasoning = (self.reasoning.begin, self.reasoning.end) if self.reasoning else ()
        return (*calls, *reasoning)


class AnswerReader:
    """Parses an answer incrementally. The parts do not depend on where the text is split."""

    def __init__(self, reading: Reading) -> None:
        self.reasoning = ReasoningReader(reading.reasoning, reading.opened) if reading.reasoning else None
        self._calls: CallReader | None = None
        if reading.calls:
            about = {"several": reading.several, "forced": reading.forced}
            self._calls = CallReader(reading.calls, reading.functions, **about)

    @property
    def over(self) -> bool:
        """Whether the answer is complete, so that further text is ignored."""
        return self._calls is not None and self._calls.over

    def feed(self, text: str) -> list[Part]:
        """Add text. Returns the parts that are certain now."""
        return self._read(self.reasoning.feed(text) if self.reasoning else [Part("content", text, text)])

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return the remaining parts at the end of the text. `cut`: the answer ran out of tokens."""
        parts = self._read(self.reasoning.finish(cut=cut)) if self.reasoning else []
        return parts + (self._calls.finish(cut=cut) if self._calls else [])

    def _read(self, parts: list[Part]) -> list[Part]:
        """Replace content by the parts that the call parser makes of it."""
        if self._calls is None:
            return parts
        found = list[Part]()
        for part in parts:
            found += self._calls.feed(part.raw) if part.kind == "content" else [part]
        return found
