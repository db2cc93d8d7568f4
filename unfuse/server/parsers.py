"""How answers are parsed: by what the operator has chosen, or else by the model's chat template."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from unfuse.core.call_formats import FORMATS, CallFormat
from unfuse.core.reading import Reading
from unfuse.core.reasoning import REASONING, ReasoningFormat, opened
from unfuse.core.tools import Tools

AUTO, NONE = "auto", "none"


class Parsers(msgspec.Struct, frozen=True):
    """The names of the parsers of tool calls and of reasoning."""

    tool_call: str = AUTO
    reasoning: str = AUTO

    def format_of_calls(self, usual: CallFormat) -> CallFormat:
        """The format of tool calls, where the template has the `usual` one."""
        return usual if self.tool_call == AUTO else FORMATS[self.tool_call]

    def format_of_reasoning(self, usual: ReasoningFormat | None) -> ReasoningFormat | None:
        """The format of reasoning, where the template has the `usual` one; None if it is not parsed."""
        return usual if self.reasoning == AUTO else REASONING.get(self.reasoning)


def reading_of(
    tools: Tools | None,
    calls: CallFormat,
    reasoning: ReasoningFormat | None,
    start: Callable[[], str],
    by_grammar: bool = False,
) -> Reading | None:
    """How an answer is read, which the template starts with `start`; None if it is plain text.

    Calls may be written `by_grammar`, and then are in the format that grammars write.
    """
    if tools is None and reasoning is None:
        return None
    reading = Reading()
    if tools:
        forced = tools.choice == "required"
        name = calls.as_written.name if by_grammar or forced else calls.name
        reading = Reading(name, tools.types, tools.several, forced)
    if reasoning:
        begins = opened(reasoning, start())
        reading = msgspec.structs.replace(reading, reasoning=reasoning.name, opened=begins)
    return reading
