"""A chat's messages as templates read them: earlier ones leniently, with calls of tools, and ever simpler.

A client cannot repair what a model or a tool wrote.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unfuse.core.errors import InvalidParameter
from unfuse.language.answer_reader import CALL_FORMATS

Message = Mapping[str, Any]

SHOWN_PARTS = ("image_url", "video_url", "video", "image")
"""Types of content parts with a picture or video. They are handled as in new messages."""

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of text parts, of chat completions and of the Responses API."""


def read_leniently(messages: Sequence[Any], *, knows_developer: bool) -> list[Any]:
    """Return the messages in the form that templates expect. Values that are not messages stay unchanged.

    Unless the template handles the role `developer` (`knows_developer`), it becomes `system`.
    """
    return [_read(message, knows_developer) for message in messages]


def _read(message: Any, knows_developer: bool) -> Any:
    if not isinstance(message, Mapping):
        return message
    match message.get("role"):
        case "developer" if not knows_developer:
            return {**message, "role": "system"}
        case "assistant":
            return _assistant(message)
        case "tool" | "function":
            return {**message, "role": "tool", "content": _result(message.get("content"))}
    return message


def _assistant(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return an assistant message with text content, and with arguments of calls as objects."""
    read = {key: value for key, value in message.items() if key not in ("tool_calls", "function_call")}
    calls = message.get("tool_calls")
    if not calls and isinstance(message.get("function_call"), Mapping):
        calls = [{"type": "function", "function": message["function_call"]}]
    if isinstance(calls, list):
        calls = [call for one in calls if (call := _call(one)) is not None]
    if calls:
        read["tool_calls"] = calls
    content = message.get("content")
    if isinstance(content, list):
        content = [part for one in content if (part := _part(one)) is not None]
    elif isinstance(content, str):
        content = _whole(content)
    if not content and isinstance(message.get("refusal"), str):
        content = _whole(message["refusal"])
    if content is None and not calls:
        content = ""
    return {**read, "content": content, "reasoning_content": _reasoning(message)}


def _reasoning(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning of an assistant message, from `reasoning_content` or `reasoning`."""
    said = (message.get(name) for name in ("reasoning_content", "reasoning"))
    return next((_whole(text) for text in said if isinstance(text, str)), None)


def _part(part: Any) -> dict[str, Any] | None:
    """Return a part of an assistant message's content; None for an ignored part, such as reasoning."""
    if isinstance(part, str):
        return {"type": "text", "text": _whole(part)}
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if kind in SHOWN_PARTS:
        return dict(part)
    text = part.get("refusal") if kind == "refusal" else part.get("text") if kind in TEXT_PARTS else None
    return {"type": "text", "text": _whole(text)} if isinstance(text, str) else None


def _result(content: Any) -> Any:
    """Return a tool's result as text or parts. Other values are written as JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _whole(content)
    if isinstance(content, list):
        return [_result_part(part) for part in content]
    return json.dumps(content, ensure_ascii=False)


def _result_part(part: Any) -> Any:
    """Return a part of a tool's result. Strings become text parts, other values JSON in a text part."""
    if isinstance(part, Mapping) and part.get("type") in (*TEXT_PARTS, *SHOWN_PARTS, "input_image"):
        return part
    return {"type": "text", "text": _whole(part) if isinstance(part, str) else json.dumps(part, ensure_ascii=False)}


def _call(call: Any) -> dict[str, Any] | None:
    """Return a tool call with the name and the arguments, as an object, of its function; None if it names none."""
    if not isinstance(call, Mapping):
        return None
    function, custom = call.get("function"), call.get("custom")
    if isinstance(custom, Mapping):
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    about = {key: value for key, value in call.items() if key != "custom"}
    read = {"name": function["name"], "arguments": _arguments(function.get("arguments"))}
    return {**about, "type": "function", "function": read}


def _arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call; empty if they were truncated or are not an object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _whole(text: str) -> str:
    """Return the text with U+FFFD for lone surrogates, which a truncated stream may leave."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def simpler_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield simpler and simpler forms of messages, for templates that refuse the original.

    First, each assistant message has one call. Then there is one system message, then roles alternate, and finally the
    system message is part of the user's.
    """
    found = simplified(messages)
    yield found
    for simplify in (systems_first, _taking_turns, system_in_user):
        found = simplify(found)
        yield found


def systems_first(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with all system messages joined into one at the beginning."""
    systems = [message for message in messages if message.get("role") == "system"]
    others = [message for message in messages if message.get("role") != "system"]
    return [*([functools.reduce(_joined, systems)] if systems else []), *others]


def system_in_user(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the leading system message moved to the beginning of the first user message."""
    if not messages or messages[0].get("role") != "system":
        return [*messages]
    system, *others = messages
    place = next((place for place, message in enumerate(others) if message.get("role") == "user"), None)
    if place is None:
        return [{**system, "role": "user"}, *others]
    return [*others[:place], {**_joined(system, others[place]), "role": "user"}, *others[place + 1 :]]


def _taking_turns(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with consecutive user messages joined."""
    found = list[Message]()
    for message in messages:
        if found and found[-1].get("role") == message.get("role") == "user":
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    return found


def _joined(one: Message, other: Message) -> Message:
    """Return the first message with the content of both."""
    first, second = one.get("content") or "", other.get("content") or ""
    if isinstance(first, str) and isinstance(second, str):
        return {**one, "content": "\n\n".join(text for text in (first, second) if text)}
    return {**one, "content": [*_parts(first), *_parts("\n\n"), *_parts(second)]}


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else [*content]


def simplified(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages for a template that allows one call per message and no consecutive assistant messages.

    An assistant message with several calls becomes several messages, each followed by the result of its call.
    Consecutive assistant messages without calls are joined.
    """
    found = list[Mapping[str, Any]]()
    left = [*messages]
    while left:
        message = left.pop(0)
        calls = message.get("tool_calls") or []
        if len(calls) > 1:
            results = list(itertools.takewhile(lambda one: one.get("role") == "tool", left))
            del left[: len(results)]
            found += _one_by_one(message, calls, results)
        elif found and _joins(found[-1]) and _joins(message):
            content = "\n\n".join(part for part in (found[-1]["content"], message["content"]) if part)
            found[-1] = {**found[-1], "content": content}
        else:
            found.append(message)
    return found


def _joins(message: Mapping[str, Any]) -> bool:
    is_text = isinstance(message.get("content"), str) and not message.get("tool_calls")
    return message.get("role") == "assistant" and is_text


def _one_by_one(
    message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return one assistant message per call, each followed by its results. Results without a call come last."""
    found, left = list[Mapping[str, Any]](), [*results]
    for place, call in enumerate(calls):
        found.append({**message, "tool_calls": [call], **({"content": ""} if place else {})})
        own = [one for one in left if one.get("tool_call_id") == call.get("id")]
        found += own
        left = [one for one in left if one not in own]
    return found + left


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
    system: Message = {"role": "system", "content": asks}
    if not isinstance(told[0], Mapping) or told[0].get("role") != "system":
        return [system, *told]
    content = told[0].get("content")
    if isinstance(content, str):
        return [{**told[0], "content": f"{content}\n\n{asks}"}, *told[1:]]
    return [{**system, "content": [*(content or []), *_parts(f"\n\n{asks}")]}, *told[1:]]


def with_properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool with an empty `properties` if it is missing, for templates that iterate over it."""
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
    """Read one message; a value that is no message is returned unchanged."""
    if not isinstance(message, Mapping):
        return message
    if message.get("role") == "tool" and not knows:
        return result_as_user(message, number)
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    read = [call for one in calls if (call := _call(one))] if isinstance(calls, list) else []
    if not isinstance(calls, list) or len(read) < len(calls):
        raise InvalidParameter(f"messages[{number}].tool_calls must be a list of calls of functions", "messages")
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


def _text(message: Mapping[str, Any], number: int) -> str:
    content = message.get("content") or ""
    parts = _parts(content) if isinstance(content, str | list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidParameter(f"messages[{number}].content must be text here", "messages")
    return "".join(str(text) for text in texts)
