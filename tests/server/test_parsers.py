"""Parsers of answers: chosen by name, or by the model's chat template."""

from __future__ import annotations

import pytest

from unfuse.core.errors import ConfigError
from unfuse.core.text import AnswerParsing
from unfuse.language.answer_reader import CALL_FORMATS, REASONING_FORMATS
from unfuse.language.tools import Tools, read_tools
from unfuse.server.chat_formats import OutputParsers, parsing_of

HERMES, MISTRAL, QWEN3 = CALL_FORMATS["hermes"], CALL_FORMATS["mistral"], REASONING_FORMATS["qwen3"]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}


def tools(**about: object) -> Tools | None:
    return read_tools({"tools": [TOOL], **about})


def test_configured_output_parser_overrides_the_chat_template() -> None:
    auto, chosen = OutputParsers(), OutputParsers("pythonic", "none")
    assert auto.format_of_calls(HERMES) is HERMES and auto.format_of_reasoning(QWEN3) is QWEN3
    assert chosen.format_of_calls(HERMES).name == "pythonic" and chosen.format_of_reasoning(QWEN3) is None
    for tool_call, reasoning in (("openai", "auto"), ("auto", "openai")):
        with pytest.raises(ConfigError, match="choose one of auto"):
            OutputParsers(tool_call, reasoning)


def test_completion_without_tools_or_reasoning_is_not_parsed() -> None:
    assert parsing_of(None, HERMES, None, str) is None


def test_output_parsing_depends_on_tools_and_reasoning() -> None:
    assert parsing_of(tools(), HERMES, None, str) == AnswerParsing(HERMES, {"f": {"a": "integer"}})
    forced = parsing_of(tools(tool_choice="required", parallel_tool_calls=False), MISTRAL, None, str)
    assert (
        forced
        and forced.calls
        and (forced.calls.name, forced.forced, forced.allows_several_calls) == ("llama3_json", True, False)
    )
    assert parsing_of(None, HERMES, QWEN3, lambda: "<think>\n") == AnswerParsing(
        reasoning=QWEN3, starts_in_reasoning=True
    )
    assert parsing_of(None, HERMES, QWEN3, lambda: "assistant\n") == AnswerParsing(reasoning=QWEN3)
    assert parsing_of(None, HERMES, QWEN3, lambda: "<think>\n\n</think>\n\n") == AnswerParsing(
        reasoning=QWEN3, has_reasoning=True
    )


@pytest.mark.row("C5:continue_final_message", "C5:reasoning_content")
@pytest.mark.parametrize(
    ("text", "opened"), [("Paris is", False), ("<think>\nHm", True), ("<think>Hm</think>Par", False)]
)
def test_continued_message_starts_in_reasoning_only_if_its_text_does(text: str, opened: bool) -> None:
    """Given a model that always begins with reasoning, then what follows a beginning of its answer is content."""
    always = REASONING_FORMATS["deepseek_r1"]
    reading = AnswerParsing(reasoning=always, starts_in_reasoning=opened, has_reasoning="</think>" in text)
    assert parsing_of(None, HERMES, always, lambda: text, continues=True) == reading
