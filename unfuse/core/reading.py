"""How the text of an answer is read: reasoning, content and calls of tools, by the formats of its model."""

from __future__ import annotations

import msgspec

from unfuse.core.call_formats import CallFormat
from unfuse.core.reasoning import ReasoningFormat, ReasoningReader
from unfuse.core.tool_calls import CallReader, Part

READING = "reading"
"""The parameter of a request that has its Reading as JSON. Requests whose answers are plain text have none."""


class Reading(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is read out of an answer.

    `calls` and `reasoning` are formats (None: none is read). `functions` may be called, and have the types of
    their parameters by name. `several` and `forced` are as in CallReader. `opened`: the prompt ends within reasoning.
    With `hidden`, clients are told of no reasoning.
    """

    calls: CallFormat | None = None
    functions: dict[str, dict[str, str]] = {}
    several: bool = True
    forced: bool = False
    reasoning: ReasoningFormat | None = None
    opened: bool = False
    hidden: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the model, and have to be read."""
        calls = self.calls.marks if self.calls else ()
        reasoning = (self.reasoning.begin, self.reasoning.end) if self.reasoning else ()
        return (*calls, *reasoning)


def reading_in(params: object) -> Reading | None:
    """The Reading in the parameter of a request, or None."""
    return msgspec.json.decode(params, type=Reading) if isinstance(params, str) else None


class AnswerReader:
    """Reads an answer that comes in pieces, however it is cut."""

    def __init__(self, reading: Reading) -> None:
        self.reasoning = ReasoningReader(reading.reasoning, reading.opened) if reading.reasoning else None
        self._calls: CallReader | None = None
        if reading.calls:
            about = {"several": reading.several, "forced": reading.forced}
            self._calls = CallReader(reading.calls, reading.functions, **about)

    @property
    def over(self) -> bool:
        """Whether nothing that follows is read."""
        return self._calls is not None and self._calls.over

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        return self._read(self.reasoning.feed(text) if self.reasoning else [Part("content", text, text)])

    def finish(self, *, cut: bool = False) -> list[Part]:
        """What was held back, when no text follows, because the answer was `cut` at its longest or has ended."""
        parts = self._read(self.reasoning.finish(cut=cut)) if self.reasoning else []
        return parts + (self._calls.finish(cut=cut) if self._calls else [])

    def _read(self, parts: list[Part]) -> list[Part]:
        """Calls in the content among these parts."""
        if self._calls is None:
            return parts
        found = list[Part]()
        for part in parts:
            found += self._calls.feed(part.raw) if part.kind == "content" else [part]
        return found
