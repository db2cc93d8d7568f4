"""Output formats of chats: parsers of tool calls and reasoning, and the check of grammars."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
from anyio import CapacityLimiter, to_thread

from unfuse.core.errors import InvalidParameter, UsageError
from unfuse.core.text import AnswerParsing, CallFormat, ReasoningFormat
from unfuse.language.answer_reader import BARE, CALL_FORMATS, REASONING_FORMATS, opened
from unfuse.language.grammars import Grammars, grammar_digest
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.language.tools import Tools
from unfuse.server.metrics import Metrics

#: How many grammars are compiled at one time. Each may compute for some seconds.
GRAMMARS_AT_ONCE = 2

#: The most grammars whose result is cached.
MAX_CACHED_GRAMMARS = 1024

#: A word in the grammar engine's error for a schema that nothing matches. Then no less strict grammar is tried.
UNSATISFIABLE = "Unsatisfiable"


class OutputParsers(msgspec.Struct, frozen=True):
    """The names of the parsers of tool calls and of reasoning, or "auto".

    Raises UsageError for an unknown name.
    """

    #: A name in CALL_FORMATS, or "auto" for the format of the model's chat template.
    tool_call: str = "auto"
    #: A name in REASONING_FORMATS, "auto" for the format of the chat template, or "none" to parse no reasoning.
    reasoning: str = "auto"

    def __post_init__(self) -> None:
        for flag, name, parsers in (
            ("--tool-call-parser", self.tool_call, ("auto", *CALL_FORMATS)),
            ("--reasoning-parser", self.reasoning, ("auto", "none", *REASONING_FORMATS)),
        ):
            if name not in parsers:
                raise UsageError(f"{flag} {name}: there is no such parser; choose one of {', '.join(parsers)}")

    def format_of_calls(self, template_format: CallFormat) -> CallFormat:
        """Return the format of tool calls. "auto" is `template_format`, that of the chat template."""
        return template_format if self.tool_call == "auto" else CALL_FORMATS[self.tool_call]

    def format_of_reasoning(self, template_format: ReasoningFormat | None) -> ReasoningFormat | None:
        """Return the format of reasoning, or None. "auto" is `template_format`, that of the chat template."""
        return template_format if self.reasoning == "auto" else REASONING_FORMATS.get(self.reasoning)


def without_special_tokens(format: CallFormat, tokenizer: ChatTokenizer) -> CallFormat:
    """Return the format of tool calls in a form that a grammar can write.

    Grammars cannot write special tokens. If the format has any, calls are written as bare JSON objects.
    """
    written_format = format.as_written
    text = written_format.open + written_format.head + written_format.between + written_format.close
    special_marks = (mark for id, mark in tokenizer.mark_ids(written_format.marks).items() if id in tokenizer.specials)
    return msgspec.structs.replace(format, written=BARE) if any(mark in text for mark in special_marks) else format


def parsing_of(
    tools: Tools | None,
    call_format: CallFormat,
    reasoning_format: ReasoningFormat | None,
    start_of_answer: Callable[[], str],
    by_grammar: bool = False,
    continues: bool = False,
) -> AnswerParsing | None:
    """Return how to parse an answer; None if it is plain text.

    tools, call_format: the offered tools, and the format of tool calls.
    reasoning_format: the format of reasoning; None if it is not parsed.
    start_of_answer: returns the text of the turn before the answer: the template's, or the message that is continued.
    by_grammar: whether a grammar forces the format of the answer. Then calls have the format that grammars write.
    continues: whether the answer continues the last message.
    """
    if tools is None and reasoning_format is None:
        return None

    parsing = AnswerParsing()
    if tools:
        forced = tools.choice == "required"
        format = call_format.as_written if by_grammar or forced else call_format
        parsing = AnswerParsing(
            msgspec.structs.replace(format, written=None), tools.types, tools.allows_several_calls, forced
        )
    if reasoning_format:
        text_before = start_of_answer()
        is_open = opened(reasoning_format, text_before, continues=continues)
        has_reasoning = not is_open and reasoning_format.end_mark in text_before
        parsing = msgspec.structs.replace(
            parsing, reasoning=reasoning_format, starts_in_reasoning=is_open, has_reasoning=has_reasoning
        )
    return parsing


class GrammarChecker:
    """Checks that grammars can be enforced, by compiling them as workers do, in limited processes.

    Only requests with a grammar wait for that. Results are cached.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._grammars = Grammars()
        self._limiter = CapacityLimiter(GRAMMARS_AT_ONCE)
        self._refusals = OrderedDict[str, str]()  # why a grammar cannot be used ("": it can), by its digest

    async def choose(self, grammars: Sequence[bytes], param: str) -> bytes:
        """Return the first of a request's packed grammars, the strictest first, that can be used.

        Raises InvalidParameter, naming `param`, if none can be used, or if nothing matches one of them.
        """
        refusals = list[str]()
        for grammar in grammars:
            refusal = await self._refusal(grammar)
            if not refusal:
                return grammar
            refusals.append(refusal)
            if UNSATISFIABLE in refusal:
                break
        raise InvalidParameter(f"{param} cannot be enforced: {refusals[0]}", param)

    async def _refusal(self, grammar: bytes) -> str:
        """Return why a grammar cannot be used, or ""."""
        key = grammar_digest(grammar)
        if key not in self._refusals:
            self._metrics.grammars += 1
            try:
                refusal = await to_thread.run_sync(self._grammars.refusal, grammar, limiter=self._limiter)
            finally:
                self._metrics.grammars -= 1
            self._refusals[key] = refusal
            if len(self._refusals) > MAX_CACHED_GRAMMARS:
                self._refusals.popitem(last=False)
        self._refusals.move_to_end(key)
        return self._refusals[key]
