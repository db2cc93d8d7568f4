"""A model's chat template: from messages to the text of a prompt, in Jinja's sandbox and within bounds."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from unfuse.core.errors import ConfigError, InvalidParameter
from unfuse.language.messages import TEXT_PARTS

MAX_CHARACTERS = 32 * 1024 * 1024  # the longest prompt a template may make
MAX_S = 5.0  # seconds of computing that it may take for that

_deadline = ContextVar[float]("deadline", default=float("inf"))
Message = Mapping[str, Any]


class TooMuch(TemplateError):
    """A template takes too long, or renders too long a prompt."""


class _Generation(Extension):
    """{% generation %} marks what training looks at; here it is a block like any."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for templates, whose every loop and call looks at the clock.

    So none goes on for ever, even one without output. The clock is that of this thread's computing: a machine under
    load fails no prompt. A template belongs to a model, which is trusted not to use up memory on purpose.
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals.pop("lipsum")  # it makes as much text as it is told to, in a loop of its own
        self.globals |= {"raise_exception": _raise, "_on": _on}
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            on = nodes.Call(nodes.Name("_on", "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(on).set_lineno(loop.lineno))
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        if time.thread_time() > _deadline.get():
            raise TooMuch("it takes too long")
        return super().call(__context, __obj, *args, **kwargs)


class ChatTemplate:
    """A template. `source` names it in errors. Raises ConfigError for one that is not valid.

    It may take `seconds` of computing and make a prompt of `characters`.
    """

    def __init__(self, text: str, source: str, characters: int = MAX_CHARACTERS, seconds: float = MAX_S) -> None:
        self._characters, self._seconds, self.text = characters, seconds, text
        try:
            self._template = _Sandbox().from_string(text)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template of {source} is not valid: {error}") from error

    def prompt(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The text of a prompt. Raises InvalidParameter for messages that the template refuses, or fails on."""
        token = _deadline.set(time.thread_time() + self._seconds)
        made, length = [], 0
        try:
            told = [_with_arguments(message) for message in messages]
            for part in self._template.generate({**variables, "messages": told}):
                made.append(part)
                length += len(part)
                if length > self._characters:
                    raise TooMuch(f"it makes more than {self._characters} characters")
        except Exception as error:  # whatever somebody else's template raises
            reason = str(error) or type(error).__name__
            raise InvalidParameter(
                f"messages: the model's chat template fails on them: {reason}", "messages"
            ) from error
        finally:
            _deadline.reset(token)
        return "".join(made)


class Arguments(dict[str, Any]):
    """Arguments of a call, which become JSON if a template converts them to text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return f"{self}{other}"

    def __radd__(self, other: str) -> str:
        return f"{other}{self}"


def _with_arguments(message: Message) -> Message:
    """Return a message with the arguments of its calls as `Arguments`."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [_call(call) for call in calls]}


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": Arguments(function["arguments"])}}


def plain(messages: Sequence[Message], shows: Collection[str] = ()) -> list[dict[str, Any]]:
    """Messages as templates read them: content as one text, and no key without a value.

    Content with parts of a type in `shows` stays a list. Raises InvalidParameter for what is no message, and for
    content that is nothing of that, naming it.
    """
    if not messages:
        raise InvalidParameter("messages: at least one is needed", "messages")
    made = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidParameter(f"messages[{number}] must be an object with a role", "messages")
        if message.get("content") is None and message["role"] != "assistant":
            raise InvalidParameter(f"messages[{number}] of role {message['role'][:40]} needs a content", "messages")
        content = {"content": _content(message["content"], number, shows)} if "content" in message else {}
        made.append({key: value for key, value in {**message, **content}.items() if value is not None})
    return made


def text_alone(message: Message) -> Message:
    """Return a message with only the text parts of its content."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    return {
        **message,
        "content": [part for part in content if isinstance(part, Mapping) and part.get("type") == "text"],
    }


def _content(content: Any, number: int, shows: Collection[str]) -> str | list[Any] | None:
    if content is None:
        return None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list | tuple):
        raise InvalidParameter(f"messages[{number}].content must be a text or a list of parts", "messages")
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind in shows:
            continue
        if kind not in TEXT_PARTS:
            shown = str(kind)[:40]
            raise InvalidParameter(
                f"messages[{number}].content: parts of type {shown} are not read, only text", "messages"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidParameter(f"messages[{number}].content: a part of type text needs a text", "messages")
    texts = [part["text"] for part in parts if part["type"] in TEXT_PARTS]
    if len(texts) == len(parts):
        return "".join(texts)
    return [{**part, "type": "text"} if part["type"] in TEXT_PARTS else part for part in parts]


def _on() -> None:
    """Go on: called by each turn of a loop, so that `call` looks at the clock."""


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own filter would write it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
