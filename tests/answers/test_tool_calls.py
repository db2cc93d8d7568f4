"""Rows about calls of tools: whatever a model writes, a client gets its calls, and no text of it is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import openai
import pytest

from tests.answers.conftest import Serve
from tests.answers.scripts import SCRIPTS, TOOLS
from tools.scripted_model import make_scripted_model
from tools.server import Server

BOTH = [("f", {"a": 1}), ("g", {})]


def ask(scripted: Server, model: str, script: str, **about: Any) -> Any:
    """The only choice of an answer to a message that names a script."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": script}],
        "tools": TOOLS,
        "temperature": 0,
        **about,
    }
    return scripted.post("/v1/chat/completions", body)["choices"][0]


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def refusal(scripted: Server, **body: Any) -> dict[str, Any]:
    """The error of a chat that is refused with 400."""
    said = {"model": "pq", "messages": [{"role": "user", "content": "one"}], "max_tokens": 5, **body}
    with pytest.raises(HTTPError) as refused:
        scripted.post("/v1/chat/completions", said)
    assert refused.value.code == 400
    error: dict[str, Any] = json.load(refused.value)["error"]
    return error


@pytest.mark.row("C10", "C11", "C13", "C14", "C19", "K4", "C5:tool_call_parser")
@pytest.mark.parametrize(
    ("model", "script", "content", "calls"),
    [
        ("pq", "one", None, BOTH[:1]),
        ("pq", "two", None, BOTH),
        ("pq", "mark in text", None, [("f", {"a": "x</tool_call>y"})]),
        ("pq", "text", None, BOTH[:1]),
        ("pq", "said", "Let me see.\n", BOTH[:1]),
        ("pl", "typed", None, BOTH[:1]),
        ("pl", "two", None, BOTH),
        ("pl", "tag", None, BOTH[:1]),
        ("coder", "one", None, BOTH[:1]),
        ("coder", "two", "Well.\n", BOTH),
        ("deep", "two", None, BOTH),
        ("mistral", "two", None, BOTH),
        ("mistral", "named", None, BOTH[:1]),
        ("py", "two", None, BOTH),
    ],
)
def test_tool_calls_are_parsed_in_the_format_of_each_model(
    scripted: Server, model: str, script: str, content: str | None, calls: list[tuple[str, Any]]
) -> None:
    """Whole, in a stream, and the first alone where only one may be made."""
    choice = ask(scripted, model, script)
    assert (choice["message"]["content"], calls_of(choice)) == (content, calls)
    assert choice["finish_reason"] == "tool_calls"
    assert calls_of(ask(scripted, model, script, parallel_tool_calls=False)) == calls[:1]

    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": script}]
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            stream=True,
            n=2,
            seed=3,  # type: ignore[call-overload]
        )
        deltas = [chunk.choices[0] for chunk in stream]
    for index in (0, 1):
        own = [choice.delta for choice in deltas if choice.index == index]
        assert "".join(delta.content or "" for delta in own) == (content or "")
        pieces = [call for delta in own for call in delta.tool_calls or []]
        begun = [call for call in pieces if call.id]
        assert [call.index for call in begun] == [*range(len(calls))]
        assert {(call.type, call.function.arguments) for call in begun} == {("function", "")}
        for number, (name, arguments) in enumerate(calls):
            texts = [call.function.arguments for call in pieces if call.index == number]
            assert (begun[number].function.name, json.loads("".join(texts))) == (name, arguments)
            assert "{" in "".join(texts)[:1]
        assert [one.finish_reason for one in deltas if one.index == index][-1] == "tool_calls"


@pytest.mark.row("C16")
@pytest.mark.parametrize(("model", "script"), [("pl", "answer"), ("pq", "unknown"), ("py", "list")])
def test_text_that_calls_no_offered_function_is_content(scripted: Server, model: str, script: str) -> None:
    choice = ask(scripted, model, script)
    assert choice["message"]["content"] == SCRIPTS[model][script]
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"


@pytest.mark.row("C17")
@pytest.mark.parametrize("model", ["pq", "pl", "coder", "mistral", "py"])
def test_truncated_tool_call_is_not_returned_as_content(scripted: Server, model: str) -> None:
    for tokens in (3, 14):
        choice = ask(scripted, model, "", tool_choice="required", max_tokens=tokens)
        assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("", "length")
        assert all(call["function"]["name"] in "fg" for call in choice["message"].get("tool_calls", []))
    cut = ask(scripted, "pq", "one", max_tokens=6)
    assert (cut["message"]["content"], cut["finish_reason"]) == ("", "length")


@pytest.mark.row("C20")
def test_stop_strings_end_content_but_not_tool_calls(scripted: Server) -> None:
    for about in ({}, {"tool_choice": "required", "parallel_tool_calls": False}):
        choice = ask(scripted, "pq", "one", stop=["\n", "name"], **about)
        assert (calls_of(choice), choice["finish_reason"]) == (BOTH[:1], "tool_calls")
    choice = ask(scripted, "pq", "said", stop=["see"])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me ", "stop")


@pytest.mark.row("C13")
def test_completion_ends_after_one_call_without_parallel_tool_calls(scripted: Server) -> None:
    body = {"model": "pq", "messages": [{"role": "user", "content": "two"}], "tools": TOOLS}
    both = scripted.post("/v1/chat/completions", body)
    one = scripted.post("/v1/chat/completions", {**body, "parallel_tool_calls": False})
    assert one["usage"]["completion_tokens"] < both["usage"]["completion_tokens"]


@pytest.mark.row("C10")
def test_tool_call_arguments_are_streamed_in_chunks(scripted: Server) -> None:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "one"}]
        stream = client.chat.completions.create(
            model="pq",
            messages=messages,
            tools=TOOLS,
            stream=True,  # type: ignore[call-overload]
        )
        pieces = [call.function.arguments for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert len(pieces) > 3 and "".join(pieces) == '{"a": 1}'


@pytest.mark.row("K4")
def test_every_form_of_tool_choice_is_enforced(scripted: Server) -> None:
    allowed = {"mode": "auto", "tools": [TOOLS[0]]}
    assert calls_of(ask(scripted, "pq", "one", tool_choice="none")) == []
    assert (
        calls_of(ask(scripted, "pq", "two", tool_choice={"type": "allowed_tools", "allowed_tools": allowed}))
        == BOTH[:1]
    )
    must: list[Any] = [
        {"type": "function", "function": {"name": "f"}},
        {"type": "allowed_tools", "allowed_tools": {**allowed, "mode": "required"}},
    ]
    for choice in must:
        ((name, arguments),) = calls_of(ask(scripted, "py", "", tool_choice=choice, parallel_tool_calls=False))
        assert name == "f" and isinstance(arguments["a"], int)


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.row("C32", "C34", "K3")
@pytest.mark.parametrize(
    ("choice", "about", "parameters"),
    [
        ("required", {}, {"type": "object", "propertyNames": {"type": "string"}}),
        (NAMED, {}, {"type": "object", "properties": {"a": {"not": {"const": 3}}}, "uniqueItems": True}),
        ("required", {"strict": None}, {"type": "object", "properties": {"a": {"$ref": "https://example.com/schema"}}}),
        (NAMED, {"strict": False}, {"type": "object", "properties": {"b": {"type": "string", "pattern": "^(?!x)"}}}),
    ],
)
def test_unsupported_function_schemas_are_rejected_only_if_strict(
    scripted: Server, choice: Any, about: dict[str, Any], parameters: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, **about}}]
    asked = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 80}
    made = ask(scripted, "pq", "one", **asked)
    assert made["message"]["tool_calls"][0]["function"]["name"] == "f"
    strict = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    error = refusal(scripted, tools=strict, tool_choice="required")
    assert error["param"] == "tools" and "cannot be enforced" in error["message"]


@pytest.mark.row("C43", "N3")
def test_custom_tools_and_legacy_functions_return_400(scripted: Server) -> None:
    custom = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}
    error = refusal(scripted, tools=[*TOOLS, custom])
    assert error["param"] == "tools" and "tools[2] is of type custom" in error["message"]
    error = refusal(scripted, functions=[{"name": "f", "parameters": {}}], function_call="auto")
    assert error["param"] == "functions" and "send tools" in error["message"]
    error = refusal(scripted, function_call="auto")
    assert error["param"] == "function_call" and "tool_choice" in error["message"]


@pytest.mark.row("N2")
def test_tools_without_description_or_parameters_are_accepted(scripted: Server) -> None:
    for about in ({}, {"description": None}, {"parameters": None}, {"description": "Does."}):
        choice = ask(scripted, "pq", "one", tools=[{"type": "function", "function": {"name": "f", **about}}])
        assert calls_of(choice) == BOTH[:1]


@pytest.mark.row("C7")
@pytest.mark.parametrize(
    "name",
    ["grammar", "tool_calls", "prompt_tokens", "shown", "reading", "expected_tokens"],
)
def test_internal_parameters_are_rejected_as_unknown(scripted: Server, name: str) -> None:
    error = refusal(scripted, **{name: 'root ::= "yes"'})
    assert error["param"] == name and "unknown parameter" in error["message"]


@pytest.mark.row("C5:tool_call_parser")
def test_parser_flags_select_tool_call_and_reasoning_parsers(served: Serve, tmp_path: Path) -> None:
    model = make_scripted_model(tmp_path / "any", {"py": "[f(a=1)]", "think": "<think>\nHm.\n</think>\n\nYes."})
    server = served(model, "--tool-call-parser", "pythonic", "--reasoning-parser", "deepseek_r1", "--kv", "8MiB")
    choice = ask(server, str(model), "think")
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Yes.", "Hm.")
    choice = ask(server, str(model), "py")
    assert choice["message"]["reasoning_content"] == "[f(a=1)]"
