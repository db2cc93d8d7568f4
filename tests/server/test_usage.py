"""The usage of a chat: how many tokens of its answers are reasoning."""

from __future__ import annotations

import pytest

from unfuse.core.text import Answer, AnswerParsing, TokenDelta
from unfuse.language.answer_reader import CALL_FORMATS, REASONING_FORMATS
from unfuse.server.chat import reasoning_tokens

QWEN3, SEED = REASONING_FORMATS["qwen3"], REASONING_FORMATS["seed_oss"]


@pytest.mark.row("C5:completion_tokens_details")
@pytest.mark.parametrize(
    ("reading", "tokens", "count"),
    [
        (AnswerParsing(reasoning=QWEN3), ["<think>", "a", "</think>", "b"], 3),
        (AnswerParsing(reasoning=QWEN3), ["\n", "<think>", "a", "</", "think>b", "c"], 5),
        (AnswerParsing(reasoning=QWEN3, starts_in_reasoning=True), ["a", "</think>", "b"], 2),
        (AnswerParsing(reasoning=QWEN3, starts_in_reasoning=True), ["a", "b"], 2),
        (AnswerParsing(reasoning=SEED), ["<seed:think>", "a", "</seed:think>", "b"], 3),
        (AnswerParsing(reasoning=QWEN3), ["say ", "</think>", " once"], 0),
        (AnswerParsing(reasoning=QWEN3), ["", ""], 0),
        (AnswerParsing(CALL_FORMATS["hermes"]), ["a", "</think>"], 0),
        (AnswerParsing(), ["<think>", "a", "</think>", "b"], 3),
    ],
)
def test_reasoning_tokens_are_counted(reading: AnswerParsing, tokens: list[str], count: int) -> None:
    pieces = [TokenDelta(id, text) for id, text in enumerate(tokens)]
    assert reasoning_tokens(Answer("".join(tokens), "stop", pieces), reading) == count
