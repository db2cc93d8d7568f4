"""Tools: functions that a model may call, and how models write such calls, which are read and made here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from unfuse.core.errors import InvalidParameter
from unfuse.core.grammar import FORMAT, Grammar, asked_grammar, schema_text
from unfuse.core.parameters import printable

CALLS = "tool_calls"  # the parameter that says how a request's calls are written
MAX_TOOLS, MAX_CALLS = 128, 16  # the most functions of a request, and the most calls that a model may write at once
NOTHING = {"type": "object", "additionalProperties": False}  # the schema of a function's parameters that says none

_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")

Choice = Literal["none", "auto", "required"]


class CallFormat(msgspec.Struct, frozen=True):
    """How a model writes calls: `begin`, an object of a name and of arguments by this key, `end`; `between` several.

    Without a `begin`, an answer that is such an object is a call, and there is but one.
    """

    name: str
    begin: str
    end: str
    arguments: str
    between: str


FORMATS = {
    one.name: one
    for one in (
        CallFormat("tagged", "<tool_call>\n", "\n</tool_call>", "arguments", "\n"),
        CallFormat("bare", "", "", "parameters", ""),
    )
}
"""By name: what most models write, and ours; and what those write that were trained for bare objects."""


class Tools(msgspec.Struct, frozen=True):
    """A request's functions, as templates read them; whether any may or must be called, or only the one `named`."""

    functions: tuple[dict[str, Any], ...]
    choice: Choice = "auto"
    named: str = ""
    several: bool = True

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The functions that may be called."""
        return [one["function"] for one in self.functions if self.named in ("", one["function"]["name"])]


def read_tools(fields: Mapping[str, Any]) -> Tools | None:
    """What a request says of tools; None if it has none, or wants none. Raises InvalidParameter."""
    functions, choice = fields.get("tools"), fields.get("tool_choice")
    if functions is None or functions == []:
        if choice not in (None, "none", "auto"):
            raise InvalidParameter("tool_choice chooses among tools: send tools too", "tool_choice")
        return None
    if not isinstance(functions, list) or len(functions) > MAX_TOOLS:
        raise InvalidParameter(f"tools must be a list of at most {MAX_TOOLS} functions", "tools")
    tools = tuple(_function(one, f"tools[{number}]") for number, one in enumerate(functions))
    names = [one["function"]["name"] for one in tools]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise InvalidParameter(f"tools: two functions are called {double}", "tools")
    several = fields.get("parallel_tool_calls") is not False
    match choice:
        case "none":
            return None
        case None | "auto":
            return Tools(tools, "auto", several=several)
        case "required":
            return Tools(tools, "required", several=several)
        case {"type": "function", "function": {"name": str(name)}} if name in names:
            return Tools(tools, "required", name, several=False)
    known = f"none, auto, required, or a function by its name ({', '.join(names)[:200]})"
    raise InvalidParameter(f"tool_choice must be {known}, not {printable(choice)}", "tool_choice")


def _function(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict):
        raise InvalidParameter(f"{where} must be an object of type function, with a function", "tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = "1 to 64 letters, digits, _ or -"
        raise InvalidParameter(f"{where}.function.name must be {rule}, not {printable(name)}", "tools")
    if not isinstance(function.get("description"), str | None):
        raise InvalidParameter(f"{where}.function.description must be a text", "tools")
    if not isinstance(parameters, dict | None):
        raise InvalidParameter(f"{where}.function.parameters must be a JSON schema, an object", "tools")
    return dict(value)


def grammar_of(fields: Mapping[str, Any], tools: Tools | None, how: CallFormat) -> Grammar | None:
    """What an answer must be, by its `response_format` and its tools; None if it may be anything.

    A model that may call, and otherwise has to answer in some format, does either. One that may call, and has strict
    functions, is held to them once it begins a call. Raises InvalidParameter.
    """
    answer = asked_grammar(fields.get(FORMAT))
    if tools is None:
        return answer
    calls = _calls(tools, how)
    if tools.choice == "required":
        return _lark("start: calls", *calls)
    if answer is None:
        strict = any(function.get("strict") is True for function in tools.callable)
        return _lark(*_free(how), *calls) if strict and how.begin else None
    if answer.kind != "json_schema":
        message = f"{FORMAT} of type {answer.kind} leaves no room for calls: send tool_choice none too"
        raise InvalidParameter(message, FORMAT)
    return _lark("start: calls | answer", f"answer: %json {answer.text}", *calls)


def _lark(*rules: str) -> Grammar:
    return Grammar("lark", "\n".join(rules))


def _free(how: CallFormat) -> list[str]:
    """Rules by which any text may be written, and what follows the mark of a call is a call."""
    mark = how.begin.strip()
    return [
        "start: (text_and_mark rest)* TEXT",
        f"text_and_mark[lazy]: TEXT {json.dumps(mark)}",
        "TEXT: /(.|\\n)*/",
        f"rest: {json.dumps(how.begin.removeprefix(mark))} body {json.dumps(how.end)}",
    ]


def _calls(tools: Tools, how: CallFormat) -> list[str]:
    """Rules of `calls`, one or several, of a `call`, and of its `body`."""
    names = [f"body_{number}" for number in range(len(tools.callable))]
    more = f" ({json.dumps(how.between)} call){{0,{MAX_CALLS - 1}}}" if tools.several and how.begin else ""
    begin, end = (json.dumps(mark) if mark else "" for mark in (how.begin, how.end))
    rules = [f"calls: call{more}", f"call: {begin} body {end}", f"body: {' | '.join(names)}"]
    for name, function in zip(names, tools.callable, strict=True):
        head = f'{{"name": {json.dumps(function["name"])}, "{how.arguments}": '
        arguments = schema_text(function.get("parameters") or NOTHING, function.get("strict"), "tools")
        rules.append(f'{name}: {json.dumps(head)} %json {arguments} "}}"')
    return rules
