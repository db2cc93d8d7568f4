"""How an answer is parsed: the formats of reasoning and tool calls in a model's text."""

from __future__ import annotations

from typing import Literal

import msgspec

Syntax = Literal["json", "tags", "named", "listed", "python"]
"""What follows a start mark: a JSON object; tags; a name and then arguments; a list of objects or a name; Python."""

SEPARATOR = "<｜tool▁sep｜>"
"""The mark between the function's name and its arguments in `named` calls."""


class CallFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tool-call format. The first group of fields is for parsing, the second for grammars that enforce a call.

    A call begins after one of the marks `starts`. A line that begins with one of the characters in `bare` may also be
    a call. `ends` are marks that may follow a call and are not part of the content. `inner` are marks within a call.

    A grammar writes `open`, then calls separated by `between`, then `close`. A call is `head` with NAME replaced, the
    arguments as JSON, then `tail`. If `written` is set, grammars use that format instead.
    """

    name: str
    syntax: Syntax
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: str = ""
    inner: tuple[str, ...] = ()

    open: str = ""
    head: str = '{"name": "NAME", "arguments": '
    tail: str = "}"
    between: str = ""
    close: str = ""
    written: CallFormat | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks. They may be special tokens of the model, and are never content."""
        return (*self.starts, *self.ends, *self.inner)

    @property
    def as_written(self) -> CallFormat:
        """The format that grammars write."""
        return self.written or self


class ReasoningFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The marks around reasoning. `name` is that of vLLM's parser. `always`: reasoning may start without `begin`."""

    name: str
    begin: str = "<think>"
    end: str = "</think>"
    always: bool = False


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
