"""Messages with calls of tools and their results, as chat templates read them; also as those that know no tools do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from unfuse.core.errors import InvalidParameter
from unfuse.language.answer_formats import CALL_FORMATS

OURS = CALL_FORMATS["hermes"]  # the format of calls for templates without tools

ASKS = """You may call functions to help with what the user asks. These are the functions, as JSON:
<tools>
{tools}
</tools>

For each call, answer with a JSON object of the function's name and its arguments between these tags:
{begin}{{"name": <function-name>, "arguments": <arguments-as-json-object>}}{end}"""
"""What a model is told of tools if its template cannot."""


def with_calls(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, knows: bool
) -> list[Mapping[str, Any]]:
    """Messages with calls as objects, or all as text, and `tools` in the first. Raises InvalidParameter."""
    told = [_told(message, number, knows) for number, message in enumerate(messages)]
    if not tools or knows or not told:
        return told
    asks = ASKS.format(tools="\n".join(json.dumps(tool) for tool in tools), begin=OURS.open, end=OURS.close)
    first = told[0] if told and isinstance(told[0], Mapping) and told[0].get("role") == "system" else None
    if first is None:
        return [{"role": "system", "content": asks}, *told]
    if not isinstance(first.get("content"), str):
        return [
            {"role": "system", "content": [*(first.get("content") or []), {"type": "text", "text": f"\n\n{asks}"}]},
            *told[1:],
        ]
    return [{**first, "content": f"{first['content']}\n\n{asks}"}, *told[1:]]


def with_properties(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the tools with an empty `properties` if it is missing, for templates that iterate over it."""
    return [_with_properties(tool) for tool in tools]


def _with_properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(parameters, Mapping):
        return tool
    said = {key: value for key, value in parameters.items() if value is not None}
    return {**tool, "function": {**function, "parameters": {"type": "object", "properties": {}, **said}}}


def result_as_user(message: Any, number: int) -> Any:
    """Return a tool's result as a user message; other messages unchanged."""
    if not isinstance(message, Mapping) or message.get("role") != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{_text(message, number)}\n</tool_response>"}


def _told(message: Any, number: int, knows: bool) -> Any:
    """One message; what is no message is left to who reads it."""
    if not isinstance(message, Mapping):
        return message
    if message.get("role") == "tool" and not knows:
        return result_as_user(message, number)
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list):
        raise InvalidParameter(f"messages[{number}].tool_calls must be a list of calls", "messages")
    read = [_call(call, f"messages[{number}].tool_calls[{place}]") for place, call in enumerate(calls)]
    if knows:
        return {
            "content": "",
            **{key: value for key, value in message.items() if value is not None},
            "tool_calls": read,
        }
    written = OURS.open + OURS.between.join(json.dumps(call["function"]) for call in read) + OURS.close
    said = _text(message, number) if message.get("content") else ""
    reasoning = {key: message[key] for key in ("reasoning_content",) if message.get(key)}
    return {"role": "assistant", **reasoning, "content": "\n".join(part for part in (said, written) if part)}


def _call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidParameter(f"{where} must be an object with a function that has a name", "messages")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"{where}.function.arguments must be JSON", "messages") from error
    if not isinstance(arguments, dict):
        raise InvalidParameter(f"{where}.function.arguments must be a JSON object", "messages")
    return {**value, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _text(message: Mapping[str, Any], number: int) -> str:
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = (
        [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        if isinstance(parts, list)
        else [None]
    )
    if not all(isinstance(text, str) for text in texts):
        raise InvalidParameter(f"messages[{number}].content must be text here", "messages")
    return "".join(str(text) for text in texts)
