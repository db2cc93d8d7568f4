"""Formats of a chat's answer: how tool calls and reasoning are parsed, and which grammars can be enforced."""

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

GRAMMARS_AT_ONCE = 2  # how many grammars are compiled at one time; each may compute for some seconds
MAX_KNOWN = 1024  # the most grammars whose result is remembered

#: In the engine's error for a schema that nothing matches: no looser one is tried.
UNSATISFIABLE = "Unsatisfiable"


class OutputParsers(msgspec.Struct, frozen=True):
    """The names of the parsers of tool calls and of reasoning, or "auto". Raises UsageError for an unknown name."""

    tool_call: str = "auto"
    reasoning: str = "auto"

    def __post_init__(self) -> None:
        for flag, name, known in (
            ("--tool-call-parser", self.tool_call, ("auto", *CALL_FORMATS)),
            ("--reasoning-parser", self.reasoning, ("auto", "none", *REASONING_FORMATS)),
        ):
            if name not in known:
                raise UsageError(f"{flag} {name}: there is no such parser; choose one of {', '.join(known)}")

    def format_of_calls(self, usual: CallFormat) -> CallFormat:
        """Return the format of tool calls. `usual` is that of the chat template."""
        return usual if self.tool_call == "auto" else CALL_FORMATS[self.tool_call]

    def format_of_reasoning(self, usual: ReasoningFormat | None) -> ReasoningFormat | None:
        """Return the format of reasoning, or None. `usual` is that of the chat template."""
        return usual if self.reasoning == "auto" else REASONING_FORMATS.get(self.reasoning)


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
) -> AnswerParsing | None:
    """Return how to parse an answer; None if it is plain text.

    `start` returns the text before the answer in its turn: the template's, or the message that the answer `continues`.
    With `by_grammar`, calls are written in the format of grammars.
    """
    if tools is None and reasoning is None:
        return None
    reading = AnswerParsing()
    if tools:
        forced = tools.choice == "required"
        format = calls.as_written if by_grammar or forced else calls
        reading = AnswerParsing(msgspec.structs.replace(format, written=None), tools.types, tools.several, forced)
    if reasoning:
        before = start()
        begun = opened(reasoning, before, continues=continues)
        reasoned = not begun and reasoning.end in before
        reading = msgspec.structs.replace(reading, reasoning=reasoning, opened=begun, reasoned=reasoned)
    return reading


class GrammarChecker:
    """Compiles grammars, as workers will, in processes that are bounded; only requests that have one wait for that."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._grammars, self._limiter = Grammars(), CapacityLimiter(GRAMMARS_AT_ONCE)
        self._known = OrderedDict[str, str]()

    async def choose(self, grammars: Sequence[bytes], param: str) -> bytes:
        """Return the first of a request's packed grammars, the strictest first, that can be used.

        Raises InvalidParameter, naming `param`, if none can be used, or if nothing matches one of them.
        """
        whys = list[str]()
        for grammar in grammars:
            why = await self._refusal(grammar)
            if not why:
                return grammar
            whys.append(why)
            if UNSATISFIABLE in why:
                break
        raise InvalidParameter(f"{param} cannot be enforced: {whys[0]}", param)

    async def _refusal(self, grammar: bytes) -> str:
        """Return why a grammar cannot be used, or ""."""
        key = grammar_digest(grammar)
        if key not in self._known:
            self._metrics.grammars += 1
            try:
                why = await to_thread.run_sync(self._grammars.refusal, grammar, limiter=self._limiter)
            finally:
                self._metrics.grammars -= 1
            self._known[key] = why
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]
