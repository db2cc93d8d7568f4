"""Selection of the parsers of tool calls and reasoning: by the operator, or from the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from unfuse.core.errors import UsageError
from unfuse.core.reading import CallFormat, Reading, ReasoningFormat
from unfuse.language.answer_reader import BARE, CALL_FORMATS, REASONING_FORMATS, opened
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.language.tools import Tools

AUTO, NONE = "auto", "none"


class Parsers(msgspec.Struct, frozen=True):
    """The names of the parsers of tool calls and of reasoning, or "auto"."""

    tool_call: str = AUTO
    reasoning: str = AUTO

    @classmethod
    def chosen(cls, tool_call: str, reasoning: str) -> Parsers:
        """Return the parsers with these names. Raises ConfigError for an unknown name."""
        _require("--tool-call-parser", tool_call, (AUTO, *CALL_FORMATS))
        _require("--reasoning-parser", reasoning, (AUTO, NONE, *REASONING_FORMATS))
        return cls(tool_call, reasoning)

    def format_of_calls(self, usual: CallFormat) -> CallFormat:
        """Return the format of tool calls. `usual` is that of the chat template."""
        return usual if self.tool_call == AUTO else CALL_FORMATS[self.tool_call]

    def format_of_reasoning(self, usual: ReasoningFormat | None) -> ReasoningFormat | None:
        """Return the format of reasoning, or None. `usual` is that of the chat template."""
        return usual if self.reasoning == AUTO else REASONING_FORMATS.get(self.reasoning)


def _require(flag: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise UsageError(f"{flag} {name}: there is no such parser; choose one of {', '.join(known)}")


def without_special_tokens(format: CallFormat, tokenizer: ChatTokenizer) -> CallFormat:
    """Return the format with one that grammars can write: bare objects if its marks are special tokens."""
    how = format.as_written
    text = how.open + how.head + how.between + how.close
    special = (mark for id, mark in tokenizer.mark_ids(how.marks).items() if id in tokenizer.specials)
    return msgspec.structs.replace(format, written=BARE) if any(mark in text for mark in special) else format


def reading_of(
    tools: Tools | None,
    calls: CallFormat,
    reasoning: ReasoningFormat | None,
    start: Callable[[], str],
    by_grammar: bool = False,
    continues: bool = False,
) -> Reading | None:
    """Return how to parse an answer; None if it is plain text.

    `start` returns the text before the answer in its turn: the template's, or the message that the answer `continues`.
    With `by_grammar`, calls are written in the format of grammars.
    """
    if tools is None and reasoning is None:
        return None
    reading = Reading()
    if tools:
        forced = tools.choice == "required"
        format = calls.as_written if by_grammar or forced else calls
        reading = Reading(msgspec.structs.replace(format, written=None), tools.types, tools.several, forced)
    if reasoning:
        before = start()
        begun = opened(reasoning, before, continues=continues)
        reasoned = not begun and reasoning.end in before
        reading = msgspec.structs.replace(reading, reasoning=reasoning, opened=begun, reasoned=reasoned)
    return reading
