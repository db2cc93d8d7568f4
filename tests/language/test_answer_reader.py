"""Reasoning in texts: told apart however the text is cut, without its marks and the white space around it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from unfuse.core.text import AnswerParsing
from unfuse.language.answer_reader import (
    CALL_FORMATS,
    REASONING_FORMATS as REASONING,
    AnswerPart,
    AnswerReader,
    opened,
    reasoning_of,
)

HERMES, QWEN3, R1 = CALL_FORMATS["hermes"], REASONING["qwen3"], REASONING["deepseek_r1"]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def read(text: str, cuts: list[int] | None = None, *, cut: bool = False, **about: object) -> list[AnswerPart]:
    """The parts of a text that comes in pieces."""
    reader = AnswerReader(AnswerParsing(**{"reasoning": QWEN3, **about}))  # type: ignore[arg-type]
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts or [])})
    parts = [part for start, end in pairwise(ends) for part in reader.feed(text[start:end])]
    return parts + reader.finish(cut=cut)


def told(parts: list[AnswerPart]) -> tuple[str, str]:
    """(reasoning, content)"""
    texts = ["".join(part.text for part in parts if part.kind == kind) for kind in ("reasoning", "content")]
    return texts[0], texts[1]


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nHm.\n\nYes.\n</think>\n\nIt is.", False, "Hm.\n\nYes.", "It is."),
        ("\n<think></think>It is.", False, "", "It is."),
        ("It is <think>.", False, "", "It is <think>."),
        ("", False, "", ""),
        ("<thin", False, "", "<thin"),
        ("<think>Hm. ", False, "Hm.", ""),
        ("\nHm.\n</think>\nIt is.", True, "Hm.", "It is."),
        ("<think>\nHm.</think>It is.", True, "Hm.", "It is."),
        ("Hm. a < b </thin", True, "Hm. a < b </thin", ""),
        ("</think>It is.", True, "", "It is."),
        ("Hm.</think>", True, "Hm.", ""),
    ],
)
def test_reasoning_is_separated_from_content(text: str, opened: bool, reasoning: str, content: str) -> None:
    parts = read(text, starts_in_reasoning=opened)
    assert told(parts) == (reasoning, content)
    assert "".join(part.raw for part in parts) == text


def test_truncated_reasoning_has_no_partial_marks() -> None:
    assert told(read("<think>Hm.</thi", cut=True)) == ("Hm.", "")
    assert told(read("<think", cut=True)) == ("", "")
    assert told(read("<", cut=True)) == ("", "<")


def test_tool_calls_are_parsed_after_reasoning_and_not_inside() -> None:
    parts = read(f"<think>I write {CALL}</think>{CALL}", calls=HERMES, functions={"f": {}})
    assert told(parts) == (f"I write {CALL}", "")
    assert [part.text for part in parts if part.kind in ("call", "arguments")] == ["f", "{}"]


PIECES = ["<think>", "</think>", "<", "</", "think>", " ", "\n", "Hm.", CALL, "<tool_call>"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES)).map("".join), st.lists(st.integers(0, 200)), st.booleans(), st.booleans())
def test_parse_does_not_depend_on_chunk_boundaries(text: str, cuts: list[int], opened: bool, cut: bool) -> None:
    about = {"calls": HERMES, "functions": {"f": {}}, "starts_in_reasoning": opened}
    whole, parts = read(text, cut=cut, **about), read(text, cuts, cut=cut, **about)
    assert told(parts) == told(whole)
    assert "".join(part.raw for part in parts) == text


def test_reasoning_is_streamed_incrementally() -> None:
    reader = AnswerReader(AnswerParsing(reasoning=QWEN3))
    assert [part.text for part in reader.feed("<think>\nLet me ") if part.kind == "reasoning"] == ["Let me"]
    assert [part.text for part in reader.feed("see </th")] == [" see"]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", None),
        ("content.split('</think>')", "qwen3"),
        ("[THINK]", "mistral"),
        ("<seed:think>", "seed_oss"),
    ],
)
def test_reasoning_format_is_detected_from_chat_template(template: str, name: str | None) -> None:
    found = reasoning_of(template)
    assert (found.name if found else None) == name


def test_prompt_that_opens_reasoning_is_detected() -> None:
    assert opened(QWEN3, "assistant\n<think>\n")
    assert not opened(QWEN3, "assistant\n<think>\n\n</think>\n\n") and not opened(QWEN3, "assistant\n")
    assert opened(R1, "assistant\n") and not opened(R1, "assistant\n<think>\n\n</think>\n\n")


def test_parsing_marks_include_call_and_reasoning_marks() -> None:
    reading = AnswerParsing(calls=CALL_FORMATS["deepseek_v3"], reasoning=QWEN3)
    assert {"<think>", "</think>", "<｜tool▁sep｜>"} <= set(reading.marks)
