"""Tool calling: the functions of a request, and the grammar of answers that call them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from unfuse.core.errors import InvalidParameter
from unfuse.core.parameters import printable
from unfuse.core.text import CallFormat
from unfuse.core.text_parameters import schema_text, strict_in, types_of
from unfuse.language.grammars import Grammar
from unfuse.language.structured_outputs import AnswerFormat

#: The most functions of a request.
MAX_TOOLS = 128

#: The most calls that a model may write in one answer.
MAX_CALLS = 16

#: The schema of a function's parameters if the request has none.
NO_PARAMETERS = {"type": "object", "additionalProperties": False}

#: The same for chat templates.
NO_PARAMETERS_IN_TEMPLATE = {"type": "object", "properties": {}}

#: The names that a function may have, as in MCP. OpenAI's API allows 64 characters, and no dot.
_NAME = re.compile("[a-zA-Z0-9_.-]{1,128}")

#: Whether a model may or must call a function.
Choice = Literal["auto", "required"]

#: Parameters that OpenAI has deprecated, with their replacements.
OLDER = {"functions": "tools", "function_call": "tool_choice"}


class Tools(msgspec.Struct, frozen=True):
    """A request's functions, and which of them the model may or must call."""

    #: All functions, as they were sent: objects with `type` and `function`.
    functions: tuple[dict[str, Any], ...]
    #: Whether the model may ("auto") or must ("required") call a function.
    choice: Choice = "auto"
    #: The names of the functions that may be called.
    names: tuple[str, ...] = ()
    #: Whether the model may write several calls in one answer.
    allows_several_calls: bool = True

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The functions that may be called."""
        return [tool["function"] for tool in self.functions if tool["function"]["name"] in self.names]

    @property
    def types(self) -> dict[str, dict[str, str]]:
        """The types of each callable function's parameters, by the function's name."""
        return {function["name"]: types_of(function.get("parameters")) for function in self.callable}

    @property
    def template_functions(self) -> list[dict[str, Any]]:
        """All functions for chat templates.

        A missing description or missing parameters are added, empty.
        """
        return [{**tool, "function": _complete(tool["function"])} for tool in self.functions]


def _complete(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function with an empty description and empty parameters where these are missing."""
    present = {key: value for key, value in function.items() if value is not None}
    defaults = {"description": "", "parameters": NO_PARAMETERS_IN_TEMPLATE}
    return {**present, **{key: value for key, value in defaults.items() if key not in present}}


def read_tools(fields: Mapping[str, Any]) -> Tools | None:
    """Return the tools of a request; None if it has none or disables them.

    Raises InvalidParameter.
    """
    for name, replacement in OLDER.items():
        if fields.get(name) is not None:
            raise InvalidParameter(f"{name} is deprecated: send {replacement} instead", name)

    functions, choice = fields.get("tools"), fields.get("tool_choice")
    if functions is None or functions == []:
        if choice not in (None, "none", "auto"):
            raise InvalidParameter("tool_choice needs tools: send tools, or leave it out", "tool_choice")
        return None

    if not isinstance(functions, list) or len(functions) > MAX_TOOLS:
        raise InvalidParameter(f"tools must be a list of at most {MAX_TOOLS} functions", "tools")

    tools = tuple(_read_function(value, f"tools[{number}]") for number, value in enumerate(functions))
    names = tuple(tool["function"]["name"] for tool in tools)
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise InvalidParameter(f"tools: two functions have the name {duplicate}", "tools")
    return _apply_choice(choice, Tools(tools, "auto", names, fields.get("parallel_tool_calls") is not False))


def _apply_choice(choice: object, tools: Tools) -> Tools | None:
    """Return the tools as restricted by `tool_choice`; None for "none"."""
    names = tools.names
    match choice:
        case "none":
            return None
        case None | "auto":
            return tools
        case "required":
            return replace(tools, choice="required")
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)} if (
            name in names
        ):
            return replace(tools, choice="required", names=(name,), allows_several_calls=False)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            return replace(tools, choice=mode, names=_allowed(allowed, names))
    choices = f"none, auto, required, allowed_tools, or a function by its name ({', '.join(names)[:200]})"
    raise InvalidParameter(f"tool_choice must be {choices}, not {printable(choice)}", "tool_choice")


def _allowed(allowed: list[Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the allowed tools.

    Raises InvalidParameter for a tool that is not in `names`.
    """
    allowed_names = list[str]()
    for tool in allowed:
        match tool:
            case {"type": "function", "function": {"name": str(name)}} if name in names:
                allowed_names.append(name)
            case {"type": "function", "name": str(name)} if name in names:
                allowed_names.append(name)
            case _:
                message = f"tool_choice: each allowed tool must be a function in tools, not {printable(tool)}"
                raise InvalidParameter(message, "tool_choice")
    if not allowed_names:
        raise InvalidParameter("tool_choice: at least one tool must be allowed", "tool_choice")
    return tuple(allowed_names)


def _read_function(value: Any, location: str) -> dict[str, Any]:
    """Return a tool as an object with `type` and `function`. Raises InvalidParameter.

    `location`: its path in the request, such as "tools[0]", for error messages.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        message = f"{location} is of type {kind[:40]}, which is not supported: send it as a tool of type function"
        raise InvalidParameter(message, "tools")
    if kind == "function" and "function" not in value and "name" in value:  # the form of the Responses API
        value = {"type": kind, "function": {key: item for key, item in value.items() if key != "type"}}

    function = value.get("function") if kind == "function" else None
    if not isinstance(function, dict):
        raise InvalidParameter(f"{location} must be an object of type function, with a function", "tools")

    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = "1 to 128 letters, digits, _, . or -"
        raise InvalidParameter(f"{location}.function.name must be {rule}, not {printable(name)}", "tools")
    if not isinstance(function.get("description"), str | None):
        raise InvalidParameter(f"{location}.function.description must be a text", "tools")
    if not isinstance(parameters, dict | None):
        raise InvalidParameter(f"{location}.function.parameters must be a JSON schema, an object", "tools")
    strict_in(function, "tools")
    return dict(value)


def grammar_of(
    answer: AnswerFormat | None, tools: Tools | None, call_format: CallFormat, relaxed: bool = False
) -> Grammar | None:
    """Return the grammar of an answer with these tools; None for free text.

    With an answer format and optional tools, the model writes either calls or an answer of the format. With
    optional tools, some of them strict, any text is allowed, but a call must follow the schema.

    `call_format`: the model's format of tool calls.
    `relaxed`: relaxes the schemas as in `schema_text`.
    Raises InvalidParameter.
    """
    if tools is None:
        return answer.grammar(relaxed) if answer else None
    if tools.choice == "required":
        return _lark("start: calls", *_calls(tools, call_format.as_written, relaxed))
    if answer is None:
        has_strict = any(function.get("strict") is True for function in tools.callable)
        return (
            _lark(*_free(call_format), *_calls(tools, call_format, relaxed))
            if has_strict and call_format.open and not call_format.written
            else None
        )
    if answer.kind != "json_schema":
        message = f"{answer.param} of type {answer.kind} does not allow tool calls: set tool_choice to none"
        raise InvalidParameter(message, answer.param)
    schema = answer.grammar(relaxed).text
    return _lark("start: calls | answer", f"answer: %json {schema}", *_calls(tools, call_format.as_written, relaxed))


def _lark(*rules: str) -> Grammar:
    """Return a grammar of these rules in Lark's notation."""
    return Grammar("lark", "\n".join(rules))


def _literal(text: str) -> str:
    """Return a text as a literal in Lark's notation; "" for ""."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _free(call_format: CallFormat) -> list[str]:
    """Return rules for any text in which a call must follow a call's mark."""
    mark = call_format.starts[0]
    return [
        "start: (text_and_mark rest)* TEXT",
        f"text_and_mark[lazy]: TEXT {_literal(mark)}",
        "TEXT: /(.|\\n)*/",
        f"rest: {_literal(call_format.open.removeprefix(mark))} body {_literal(call_format.close)}",
    ]


def _calls(tools: Tools, call_format: CallFormat, relaxed: bool) -> list[str]:
    """Return the grammar rules for `calls` and for the body of each function's call."""
    names = [f"body_{number}" for number in range(len(tools.callable))]
    further_bodies = (
        f" ({_literal(call_format.between)} body){{0,{MAX_CALLS - 1}}}"
        if tools.allows_several_calls and call_format.between
        else ""
    )
    rules = [
        f"calls: {_literal(call_format.open)} bodies {_literal(call_format.close)}",
        f"bodies: body{further_bodies}",
        f"body: {' | '.join(names)}",
    ]

    for name, function in zip(names, tools.callable, strict=True):
        head = _literal(call_format.head.replace("NAME", function["name"]))
        strict = function.get("strict") is True
        schema = function.get("parameters") or NO_PARAMETERS
        arguments = schema_text(schema, strict, "tools", relaxed)
        rules.append(f"{name}: {head} %json {arguments} {_literal(call_format.tail)}")
    return rules
