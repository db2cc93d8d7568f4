"""Messages of chats as clients get them: the deltas of a stream together are the message of an answer."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.text import Answer, AnswerParsing
from unfuse.language.answer_reader import CALL_FORMATS, REASONING_FORMATS
from unfuse.server.chat_stream import StreamedMessage, whole_message

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
BOTH = f"<think>Hm.</think>I call.\n{CALL}\n{CALL}"


def context(**about: Any) -> Any:
    reading = AnswerParsing(CALL_FORMATS["hermes"], {"f": {}}, reasoning=REASONING_FORMATS["qwen3"], **about)
    return SimpleNamespace(id="chat_1", request=SimpleNamespace(derived=DerivedFacts(parsing=reading)))


def deltas(text: str, size: int, ended: str = "stop") -> list[dict[str, Any]]:
    """What a client is told of a text that comes in pieces of a size."""
    message = StreamedMessage(context(), 0)
    ends = [*range(0, len(text), size), len(text)]
    return [message.add(text[start:end]) for start, end in pairwise(ends)] + message.finish(ended)


@pytest.mark.parametrize("size", [1, 2, 7, 30, 500])
def test_stream_deltas_add_up_to_the_whole_message(size: int) -> None:
    message, reason = whole_message(context(), 0, Answer(BOTH, "stop", []))
    told = deltas(BOTH, size)
    assert reason == "tool_calls" and message["content"] == "I call.\n" and message["reasoning_content"] == "Hm."
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in told) == message[name]

    calls = dict[int, dict[str, Any]]()
    for delta in told:
        indexes = [call["index"] for call in delta.get("tool_calls", [])]
        assert len(set(indexes)) == len(indexes)
        for call in delta.get("tool_calls", []):
            if "id" in call:
                calls[call["index"]] = {"id": call["id"], "type": "function", "function": {**call["function"]}}
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert [calls[0], calls[1]] == message["tool_calls"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_tool_call_arguments_are_streamed_after_the_function_name() -> None:
    told = [delta["tool_calls"][0] for delta in deltas(CALL, 1) if delta.get("tool_calls")]
    assert told[0]["function"] == {"name": "f", "arguments": ""} and told[0]["type"] == "function"
    assert [call["function"]["arguments"] for call in told[1:]][-2:] == ["1", "}"]


def test_truncated_tool_call_has_finish_reason_length() -> None:
    message, reason = whole_message(context(), 0, Answer('<tool_call>{"name": "f", "arguments": {"a"', "length", []))
    assert reason == "length" and message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a"'}
    message, _ = whole_message(context(), 0, Answer('<tool_call>{"name":', "length", []))
    assert message == {"content": ""}


def test_text_without_parsing_is_returned_as_content() -> None:
    plain: Any = SimpleNamespace(id="chat_1", request=SimpleNamespace(derived=DerivedFacts()))
    assert whole_message(plain, 0, Answer(CALL, "stop", [])) == ({"content": CALL}, "stop")
    assert not StreamedMessage(plain, 0).is_parsed


def test_hidden_reasoning_is_left_out_of_the_message() -> None:
    message, reason = whole_message(context(hides_reasoning=True), 0, Answer(BOTH, "stop", []))
    assert reason == "tool_calls" and message["content"] == "I call.\n" and "reasoning_content" not in message
