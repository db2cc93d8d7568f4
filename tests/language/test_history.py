"""What models and tools have written is read leniently; new messages stay as they are."""

from __future__ import annotations

from typing import Any

import pytest

from unfuse.language.messages import read_leniently, simplified


def read(message: Any, **more: Any) -> Any:
    return read_leniently([message], **{"knows_developer": False} | more)[0]


def called(arguments: Any) -> Any:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return read({"role": "assistant", "content": None, "tool_calls": [call]})["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("arguments", "means"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ('{"a": ', {}),
        ("null", {}),
        ("", {}),
        (None, {}),
        ("[1]", {}),
        ("{" * 100_000, {}),
        ('"{}"', {}),
    ],
)
def test_truncated_or_invalid_call_arguments_become_empty(arguments: Any, means: dict[str, Any]) -> None:
    assert called(arguments) == means


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "", "refusal": "No."}, "No."),
        ({"content": "Yes.", "refusal": None}, "Yes."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, [{"type": "text", "text": "No."}]),
        (
            {"content": ["a", {"type": "output_text", "text": "b"}, {"type": "reasoning", "text": "c"}, 7]},
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        ),
        ({"content": "a\ud83d"}, "a\ufffd"),
        ({"content": "a\ud83d\ude00"}, "a😀"),
        ({"content": None, "tool_calls": [{"id": "1"}, 5, {"function": {"name": 3}}]}, ""),
    ],
)
def test_assistant_content_is_normalized(message: dict[str, Any], content: Any) -> None:
    assert read({"role": "assistant", **message})["content"] == content


@pytest.mark.row("K2")
@pytest.mark.parametrize(
    ("message", "reasoning"),
    [
        ({"reasoning_content": "a"}, "a"),
        ({"reasoning": "a"}, "a"),
        ({"reasoning_content": None, "reasoning": "a\ud83d"}, "a\ufffd"),
        ({"reasoning": {"effort": "low"}}, None),
        ({"reasoning_content": [], "reasoning": 7}, None),
    ],
)
def test_assistant_reasoning_is_stored_as_reasoning_content(message: dict[str, Any], reasoning: Any) -> None:
    assert read({"role": "assistant", "content": "b", **message})["reasoning_content"] == reasoning


@pytest.mark.row("K2")
@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"url": "x"}, '{"url": "x"}'),
        ({"type": "json", "json": [1]}, '{"type": "json", "json": [1]}'),
        (7, "7"),
        (None, "null"),
    ],
)
def test_non_text_parts_of_tool_results_become_json_text(part: Any, text: str) -> None:
    said = read({"role": "tool", "content": ["a", part]})["content"]
    assert said == [{"type": "text", "text": "a"}, {"type": "text", "text": text}]


def test_image_parts_of_tool_results_are_preserved() -> None:
    shown = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_image", "image_url": "x"}]
    assert read({"role": "tool", "content": shown})["content"] == shown


def test_legacy_and_custom_calls_become_function_calls() -> None:
    old = read({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}})
    assert old["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert "function_call" not in old
    custom = {"id": "1", "type": "custom", "custom": {"name": "run", "input": "ls"}}
    (call,) = read({"role": "assistant", "content": None, "tool_calls": [custom]})["tool_calls"]
    assert call == {"id": "1", "type": "function", "function": {"name": "run", "arguments": {"input": "ls"}}}


@pytest.mark.parametrize(
    ("content", "means"),
    [
        (None, ""),
        ("4\ud83d", "4\ufffd"),
        ({"a": "é"}, '{"a": "é"}'),
        (7, "7"),
        (["4", {"type": "text", "text": "2"}], [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]),
    ],
)
def test_tool_results_become_text(content: Any, means: Any) -> None:
    for role in ("tool", "function"):
        assert read({"role": role, "content": content}) == {"role": "tool", "content": means}


def test_developer_role_becomes_system_if_unknown_to_template() -> None:
    said = {"role": "developer", "content": "Be brief."}
    assert read(said) == {"role": "system", "content": "Be brief."}
    assert read(said, knows_developer=True) == said


@pytest.mark.parametrize("new", ["hi", 5, {"role": "user", "content": None}, {"role": "user", "content": "\ud83d"}, {}])
def test_user_messages_are_unchanged(new: Any) -> None:
    assert read(new) == new


def test_parallel_calls_are_split_into_single_calls_with_results() -> None:
    calls = [{"id": id, "function": {"name": "f", "arguments": {}}} for id in "ab"]
    user = {"role": "user", "content": "hi"}
    asked = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": id, "content": id} for id in "ba"]
    stray = {"role": "tool", "tool_call_id": "c", "content": "c"}
    assert simplified([user, asked, *results, stray, user]) == [
        user,
        {**asked, "tool_calls": calls[:1]},
        results[1],
        {**asked, "content": "", "tool_calls": calls[1:]},
        results[0],
        stray,
        user,
    ]


def test_consecutive_assistant_messages_are_merged() -> None:
    user, one, two = ({"role": "user", "content": "hi"}, *({"role": "assistant", "content": text} for text in "ab"))
    assert simplified([user, one, two, user]) == [user, {"role": "assistant", "content": "a\n\nb"}, user]
    assert simplified([user, one, user]) == [user, one, user]
    called = {"role": "assistant", "content": "c", "tool_calls": [{"id": "1"}]}
    assert simplified([user, one, called]) == [user, one, called]
