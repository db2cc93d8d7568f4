"""Messages of clients with tools, as chat templates read them: those that know of tools, and those that do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unfuse.core.errors import InvalidParameter
from unfuse.language.messages import with_calls

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SAID = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [SAID, SAID]},
    {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}],
    },
]


def test_template_with_tool_support_receives_arguments_as_objects() -> None:
    user, assistant, tool = with_calls(ASKED, [TOOL], supports_tools=True)
    assert (user, tool) == (ASKED[0], ASKED[2])
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"a": 1}] * 2
    assert assistant["content"] == "" and assistant["tool_calls"][0]["id"] == "call_1"


def test_tools_and_calls_become_text_for_template_without_support() -> None:
    system, user, assistant, tool = with_calls(ASKED, [TOOL], supports_tools=False)
    assert system["role"] == "system" and json.dumps(TOOL) in system["content"] and "<tool_call>" in system["content"]
    assert user == ASKED[0]
    said = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": f"{said}\n{said}"}
    assert tool == {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_tools_are_appended_to_the_system_message(content: Any) -> None:
    system, _ = with_calls([{"role": "system", "content": content}, ASKED[0]], [TOOL], supports_tools=False)
    text = system["content"] if isinstance(content, str) else "".join(part["text"] for part in system["content"])
    assert text.startswith("Be brief.\n\nYou may call functions")


def test_messages_without_tools_are_unchanged() -> None:
    assert with_calls(ASKED[:1], None, supports_tools=False) == ASKED[:1]
    assert with_calls([], [TOOL], supports_tools=False) == []
    assert with_calls([3], None, supports_tools=False) == [3]  # type: ignore[list-item]  # who reads it refuses it


@pytest.mark.parametrize("calls", [3, [3], [{"function": {}}]])
@pytest.mark.parametrize("knows", [False, True])
def test_malformed_tool_calls_are_rejected(calls: Any, knows: bool) -> None:
    with pytest.raises(InvalidParameter, match="list of function calls"):
        with_calls([{"role": "assistant", "tool_calls": calls}], None, knows)


def test_non_text_tool_result_is_rejected() -> None:
    for content in (3, [3], [{"type": "image_url"}]):
        with pytest.raises(InvalidParameter, match=r"messages\[0\]"):
            with_calls([{"role": "tool", "content": content}], None, supports_tools=False)
