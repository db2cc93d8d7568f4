"""Rows about reasoning: it is told apart from the answer, whoever opens it, and whatever follows it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.answers.scripts import TOOLS
from tools.server import Server

pytestmark = pytest.mark.row("C5:reasoning_content")


def ask(scripted: Server, model: str, script: str, **about: Any) -> tuple[str | None, str | None, Any]:
    """(reasoning, content, the choice) of an answer to a message that names a script."""
    body = {"model": model, "messages": [{"role": "user", "content": script}], "temperature": 0, **about}
    choice = scripted.post("/v1/chat/completions", body)["choices"][0]
    return choice["message"].get("reasoning_content"), choice["message"]["content"], choice


@pytest.mark.parametrize(
    ("model", "script", "reasoning", "content"),
    [
        ("think", "answer", "Let me see.\n\nYes.", "It is 4."),
        ("think", "plain", None, "It is 5."),
        ("think", "endless", "First this, then that,", ""),
        ("deep", "answer", "So it is.", "Six."),
    ],
)
def test_reasoning_content_is_separated_from_content(
    scripted: Server, model: str, script: str, reasoning: str | None, content: str
) -> None:
    """Whole and in a stream, also where the template has begun it, or it never ends."""
    found = ask(scripted, model, script)
    assert found[:2] == (reasoning, content) and found[2]["finish_reason"] == "stop"
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": script}], stream=True
        )
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == (reasoning or "")
    assert "".join(delta.content or "" for delta in deltas) == content


def test_tool_calls_are_parsed_after_reasoning(scripted: Server) -> None:
    reasoning, content, choice = ask(scripted, "think", "call", tools=TOOLS)
    assert (reasoning, content, choice["finish_reason"]) == ("I call f.", None, "tool_calls")
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


@pytest.mark.parametrize("model", ["think", "deep"])
def test_completion_truncated_in_reasoning_has_empty_content(scripted: Server, model: str) -> None:
    reasoning, content, choice = ask(scripted, model, "answer", max_tokens=4)
    assert content == "" and choice["finish_reason"] == "length"
    assert reasoning and ("Let me see." + "So it is.").count(reasoning)


def test_stop_strings_do_not_end_reasoning(scripted: Server) -> None:
    assert ask(scripted, "think", "answer", stop=["see", " 4"])[:2] == ("Let me see.\n\nYes.", "It is")


@pytest.mark.parametrize(
    ("model", "about", "answers"),
    [
        ("think", {"guided_choice": ["yes", "no"]}, ["yes", "no"]),
        ("deep", {"response_format": {"type": "json_object", "schema": {"enum": [1, 2]}}}, ["1", "2"]),
    ],
)
def test_structured_output_is_enforced_after_reasoning(
    scripted: Server, model: str, about: dict[str, Any], answers: list[str]
) -> None:
    reasoning, content, _ = ask(scripted, model, "answer", **about)
    assert reasoning == {"think": "Let me see.\n\nYes.", "deep": "So it is."}[model]
    assert content in answers
    plain = ask(scripted, "think", "plain", guided_choice=["yes", "no"])
    assert plain[0] is None and plain[1] in ["yes", "no"]


def test_required_tool_call_follows_reasoning(scripted: Server) -> None:
    """Also where the marks of calls are special tokens, which no grammar can write."""
    asked = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
    for model, thought in (("think", "Let me see.\n\nYes."), ("deep", "So it is.")):
        reasoning, content, choice = ask(scripted, model, "answer", **asked)
        assert (reasoning, content) == (thought, None)
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_chat_template_receives_earlier_reasoning_content(scripted: Server) -> None:
    def tokens(**about: str) -> int:
        said = [{"role": "user", "content": "plain"}, {"role": "assistant", "content": "5", **about}]
        body = {"model": "think", "messages": [*said, {"role": "user", "content": "plain"}], "max_tokens": 1}
        count: int = scripted.post("/v1/chat/completions", body)["usage"]["prompt_tokens"]
        return count

    assert tokens(reasoning_content="Why?") == tokens() + 2 + len("\nWhy?\n\n\n")
