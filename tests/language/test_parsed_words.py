"""Texts of answers that are parsed: stop texts are for content, and one call may be all that there is room for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from unfuse.core.text import AnswerParsing
from unfuse.language.answer_reader import CALL_FORMATS, REASONING_FORMATS
from unfuse.language.detokenize import AnswerText, StopConditions
from unfuse.language.grammars import ConstraintAfterReasoning

END, BEGIN, CLOSE = 256, 257, 258
QWEN3 = REASONING_FORMATS["qwen3"]


class Bytes:
    """A tokenizer of bytes, whose last tokens are an end and the marks of reasoning."""

    stops, specials, size = frozenset({END}), frozenset({END, BEGIN, CLOSE}), 259

    def piece(self, id: int, first: bool = False) -> bytes:
        return bytes([id])

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()

    def mark_ids(self, marks: Iterable[str]) -> dict[int, str]:
        known = {"<think>": BEGIN, "</think>": CLOSE}
        return {known[mark]: mark for mark in marks if mark in known}


def say(text: str, stops: list[str], reading: AnswerParsing, most: int = 1000) -> tuple[str, str]:
    """(what is recorded of a text, why it ended)"""
    words = AnswerText(Bytes(), StopConditions(tuple(stops)), most, reading)
    for id in [*text.encode(), END]:
        words.add(id, None, ())
        if words.finish_reason:
            break
    return "".join(piece.text for piece in words.deltas), words.finish_reason


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'


def calls(**about: bool) -> AnswerParsing:
    return AnswerParsing(CALL_FORMATS["hermes"], {"f": {}}, **about)


def test_stop_strings_apply_only_to_content() -> None:
    assert say(CALL, ["\n", "name"], calls()) == (CALL, "stop")
    assert say(f"I call. {CALL}", ["call"], calls()) == ("I ", "stop")
    assert say(f"{CALL} done x", ["x"], calls()) == (f"{CALL} done ", "stop")
    reasoned = "<think>a x b</think>c x d"
    assert say(reasoned, ["x"], AnswerParsing(reasoning=QWEN3)) == ("<think>a x b</think>c ", "stop")


def test_completion_ends_after_first_call_without_parallel_calls() -> None:
    text, ended = say(f"{CALL}\n{CALL}", [], calls(allows_several_calls=False))
    assert ended == "stop" and CALL.startswith(text) and text.endswith("}}")


def test_truncated_call_is_recorded_completely() -> None:
    assert say(CALL, [], calls(), most=20) == (CALL[:20], "length")


class Even:
    """A constraint that remembers what it is asked."""

    compiling = False

    def __init__(self) -> None:
        self.asked = list[list[int]]()

    def query(self, ids: Sequence[int]) -> None:
        self.asked.append([*ids])

    def waits(self, wait_s: float = 0.0) -> bool:
        return True

    def allowed(self, ids: Sequence[int]) -> bytes | None:
        return bytes(33)

    def close(self) -> None:
        self.asked.clear()


@pytest.mark.parametrize("opened", [False, True])
def test_grammar_applies_after_reasoning(opened: bool) -> None:
    inner = Even()
    constraint = ConstraintAfterReasoning(inner, AnswerParsing(reasoning=QWEN3, starts_in_reasoning=opened), Bytes())
    thought = [BEGIN] * (not opened) + [97, 98]
    if not opened:
        constraint.query([])
        assert inner.asked == [[]] and constraint.waits()
        mask = constraint.allowed([])
        assert mask and mask[BEGIN // 8] == 1 << BEGIN % 8 and sum(map(bool, mask)) == 1
    inner.asked.clear()
    constraint.query(thought)
    assert inner.asked == [] and not constraint.waits()
    assert constraint.allowed(thought) == b"\xff" * 33
    constraint.query([*thought, CLOSE])
    constraint.query([*thought, CLOSE, 99])
    assert inner.asked == [[], [99]] and constraint.waits()
    assert constraint.allowed([*thought, CLOSE, 99]) == bytes(33)


def test_grammar_applies_from_first_token_without_reasoning() -> None:
    inner = Even()
    constraint = ConstraintAfterReasoning(inner, AnswerParsing(reasoning=QWEN3), Bytes())
    constraint.query([97])
    assert inner.asked == [[97]]
    constraint.close()
    assert inner.asked == []
