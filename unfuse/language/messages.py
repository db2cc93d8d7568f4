"""Adapt a chat's messages to what its template accepts.

Earlier messages are read leniently, because a client cannot repair what a model or a tool wrote. Tool calls are
converted for templates with and without tools. If a template refuses the messages, simpler forms are tried.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unfuse.core.errors import InvalidParameter
from unfuse.language.answer_reader import CALL_FORMATS

#: A chat message: an object with a role, a content and more.
Message = Mapping[str, Any]

#: Types of content parts with a picture or video. They stay as they are, and are read later like those of new messages.
MEDIA_PARTS = ("image_url", "video_url", "video", "image")

#: Types of text parts, of chat completions and of the Responses API.
TEXT_PARTS = ("text", "input_text", "output_text")


def read_leniently(messages: Sequence[Any], *, knows_developer: bool) -> list[Any]:
    """Return earlier messages in the form that templates expect.

    Values that are not messages stay unchanged. The role `developer` becomes `system`, unless `knows_developer` says
    that the template handles it.
    """
    return [_read_message(message, knows_developer) for message in messages]


def _read_message(message: Any, knows_developer: bool) -> Any:
    """Return a message in the form that templates expect."""
    if not isinstance(message, Mapping):
        return message
    match message.get("role"):
        case "developer" if not knows_developer:
            return {**message, "role": "system"}
        case "assistant":
            return _read_assistant(message)
        case "tool" | "function":
            return {**message, "role": "tool", "content": _read_result(message.get("content"))}
    return message


def _read_assistant(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return an assistant message with text content, and with arguments of calls as objects."""
    converted = {key: value for key, value in message.items() if key not in ("tool_calls", "function_call")}
    calls = message.get("tool_calls")
    if not calls and isinstance(message.get("function_call"), Mapping):
        calls = [{"type": "function", "function": message["function_call"]}]
    if isinstance(calls, list):
        calls = [call for value in calls if (call := _read_call(value)) is not None]
    if calls:
        converted["tool_calls"] = calls

    content = message.get("content")
    if isinstance(content, list):
        content = [part for value in content if (part := _read_part(value)) is not None]
    elif isinstance(content, str):
        content = _replace_surrogates(content)
    if not content and isinstance(message.get("refusal"), str):
        content = _replace_surrogates(message["refusal"])
    if content is None and not calls:
        content = ""
    return {**converted, "content": content, "reasoning_content": _read_reasoning(message)}


def _read_reasoning(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning of an assistant message, from `reasoning_content` or `reasoning`."""
    values = (message.get(name) for name in ("reasoning_content", "reasoning"))
    return next((_replace_surrogates(text) for text in values if isinstance(text, str)), None)


def _read_part(part: Any) -> dict[str, Any] | None:
    """Return a part of an assistant message's content; None for a part to ignore.

    Reasoning, for example, is ignored.
    """
    if isinstance(part, str):
        return {"type": "text", "text": _replace_surrogates(part)}
    if not isinstance(part, Mapping):
        return None

    kind = part.get("type")
    if kind in MEDIA_PARTS:
        return dict(part)
    text = part.get("refusal") if kind == "refusal" else part.get("text") if kind in TEXT_PARTS else None
    return {"type": "text", "text": _replace_surrogates(text)} if isinstance(text, str) else None


def _read_result(content: Any) -> Any:
    """Return a tool's result as text or parts. Other values are written as JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _replace_surrogates(content)
    if isinstance(content, list):
        return [_read_result_part(part) for part in content]
    return json.dumps(content, ensure_ascii=False)


def _read_result_part(part: Any) -> Any:
    """Return a part of a tool's result.

    Strings become text parts, other values JSON in a text part.
    """
    if isinstance(part, Mapping) and part.get("type") in (*TEXT_PARTS, *MEDIA_PARTS, "input_image"):
        return part
    return {
        "type": "text",
        "text": _replace_surrogates(part) if isinstance(part, str) else json.dumps(part, ensure_ascii=False),
    }


def _read_call(call: Any) -> dict[str, Any] | None:
    """Return a tool call with its function's name and arguments, as an object.

    None if it does not name a function.
    """
    if not isinstance(call, Mapping):
        return None
    function, custom = call.get("function"), call.get("custom")
    if isinstance(custom, Mapping):
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None

    others = {key: value for key, value in call.items() if key != "custom"}
    converted = {"name": function["name"], "arguments": _read_arguments(function.get("arguments"))}
    return {**others, "type": "function", "function": converted}


def _read_arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call; empty if truncated or not an object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _replace_surrogates(text: str) -> str:
    """Return the text with U+FFFD for lone surrogates, which a truncated stream may leave."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def simpler_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield simpler and simpler forms of messages, for templates that refuse the original.

    First, each assistant message has one call. Then there is one system message, then roles alternate, and finally the
    system message is part of the user's.
    """
    simpler = simplified(messages)
    yield simpler
    for simplify in (systems_first, _join_user_messages, system_in_user):
        simpler = simplify(simpler)
        yield simpler


def systems_first(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with all system messages joined at the beginning."""
    systems = [message for message in messages if message.get("role") == "system"]
    others = [message for message in messages if message.get("role") != "system"]
    return [*([functools.reduce(_join, systems)] if systems else []), *others]


def system_in_user(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the leading system message in the first user message."""
    if not messages or messages[0].get("role") != "system":
        return [*messages]
    system, *others = messages
    index = next((index for index, message in enumerate(others) if message.get("role") == "user"), None)
    if index is None:
        return [{**system, "role": "user"}, *others]
    return [*others[:index], {**_join(system, others[index]), "role": "user"}, *others[index + 1 :]]


def _join_user_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with consecutive user messages joined."""
    joined = list[Message]()
    for message in messages:
        if joined and joined[-1].get("role") == message.get("role") == "user":
            joined[-1] = _join(joined[-1], message)
        else:
            joined.append(message)
    return joined


def _join(first: Message, second: Message) -> Message:
    """Return the first message with the content of both."""
    first_content = first.get("content") or ""
    second_content = second.get("content") or ""
    if isinstance(first_content, str) and isinstance(second_content, str):
        return {**first, "content": "\n\n".join(text for text in (first_content, second_content) if text)}
    return {**first, "content": [*_parts(first_content), *_parts("\n\n"), *_parts(second_content)]}


def _parts(content: Any) -> list[Any]:
    """Return a message's content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else [*content]


def simplified(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with one call per message and no consecutive assistant messages.

    An assistant message with several calls becomes several messages, each followed by the result of its call.
    Consecutive assistant messages without calls are joined.
    """
    simpler = list[Mapping[str, Any]]()
    remaining = [*messages]
    while remaining:
        message = remaining.pop(0)
        calls = message.get("tool_calls") or []
        if len(calls) > 1:
            results = list(itertools.takewhile(lambda other: other.get("role") == "tool", remaining))
            del remaining[: len(results)]
            simpler += _split_calls(message, calls, results)
        elif simpler and _is_plain_answer(simpler[-1]) and _is_plain_answer(message):
            content = "\n\n".join(part for part in (simpler[-1]["content"], message["content"]) if part)
            simpler[-1] = {**simpler[-1], "content": content}
        else:
            simpler.append(message)
    return simpler


def _is_plain_answer(message: Mapping[str, Any]) -> bool:
    """Return whether this is an assistant message of text, without calls."""
    is_text = isinstance(message.get("content"), str) and not message.get("tool_calls")
    return message.get("role") == "assistant" and is_text


def _split_calls(
    message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return one assistant message per call, each followed by its results.

    Results without a call come last.
    """
    separate = list[Mapping[str, Any]]()
    remaining = [*results]
    for index, call in enumerate(calls):
        # The text of the message belongs to the first call.
        separate.append({**message, "tool_calls": [call], **({"content": ""} if index else {})})
        call_results = [result for result in remaining if result.get("tool_call_id") == call.get("id")]
        separate += call_results
        remaining = [result for result in remaining if result not in call_results]
    return separate + remaining


#: The format of calls for templates that do not support tools.
PLAIN_FORMAT = CALL_FORMATS["hermes"]

#: The instruction in the system message for templates that do not support tools.
CALL_INSTRUCTIONS = """You may call functions to help with what the user asks. These are the functions, as JSON:
<tools>
{tools}
</tools>

For each call, answer with a JSON object of the function's name and its arguments between these tags:
{begin}{{"name": <function-name>, "arguments": <arguments-as-json-object>}}{end}"""


def with_calls(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, supports_tools: bool
) -> list[Mapping[str, Any]]:
    """Return the messages with tool calls in the form that the template supports.

    If the template supports tools, the calls become objects. Otherwise calls and their results become text,
    and the system message describes the tools. Raises InvalidParameter for malformed calls.
    """
    adapted = [_adapt_calls(message, number, supports_tools) for number, message in enumerate(messages)]
    if not tools or supports_tools or not adapted:
        return adapted

    instruction = CALL_INSTRUCTIONS.format(
        tools="\n".join(json.dumps(tool) for tool in tools), begin=PLAIN_FORMAT.open, end=PLAIN_FORMAT.close
    )

    system: Message = {"role": "system", "content": instruction}
    if not isinstance(adapted[0], Mapping) or adapted[0].get("role") != "system":
        return [system, *adapted]
    content = adapted[0].get("content")
    if isinstance(content, str):
        return [{**adapted[0], "content": f"{content}\n\n{instruction}"}, *adapted[1:]]
    return [{**system, "content": [*(content or []), *_parts(f"\n\n{instruction}")]}, *adapted[1:]]


def with_properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool with an empty `properties` if it has none.

    Some templates iterate over `properties`.
    """
    function = tool.get("function")
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(parameters, Mapping):
        return tool
    present = {key: value for key, value in parameters.items() if value is not None}
    return {**tool, "function": {**function, "parameters": {"type": "object", "properties": {}, **present}}}


def result_as_user(message: Any, number: int) -> Any:
    """Return a tool's result as a user message; other messages unchanged."""
    if not isinstance(message, Mapping) or message.get("role") != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{_text(message, number)}\n</tool_response>"}


def _adapt_calls(message: Any, number: int, supports_tools: bool) -> Any:
    """Return message `number` with its calls as objects, or as text.

    They become text unless the template supports tools. A value that is not a message stays unchanged.
    Raises InvalidParameter for malformed calls.
    """
    if not isinstance(message, Mapping):
        return message
    if message.get("role") == "tool" and not supports_tools:
        return result_as_user(message, number)

    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}

    converted = [call for value in calls if (call := _read_call(value))] if isinstance(calls, list) else []
    if not isinstance(calls, list) or len(converted) < len(calls):
        raise InvalidParameter(f"messages[{number}].tool_calls must be a list of function calls", "messages")

    if supports_tools:
        return {
            "content": "",
            **{key: value for key, value in message.items() if value is not None},
            "tool_calls": converted,
        }

    calls_text = (
        PLAIN_FORMAT.open
        + PLAIN_FORMAT.between.join(json.dumps(call["function"]) for call in converted)
        + PLAIN_FORMAT.close
    )
    text = _text(message, number) if message.get("content") else ""
    reasoning = {key: message[key] for key in ("reasoning_content",) if message.get(key)}
    return {"role": "assistant", **reasoning, "content": "\n".join(part for part in (text, calls_text) if part)}


def _text(message: Mapping[str, Any], number: int) -> str:
    """Return the content of message `number` as text. Raises InvalidParameter for other parts."""
    content = message.get("content") or ""
    parts = _parts(content) if isinstance(content, str | list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidParameter(f"messages[{number}].content must be text here", "messages")
    return "".join(str(text) for text in texts)
