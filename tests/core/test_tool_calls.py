"""Calls of tools in texts: found however the text is cut, and nothing lost that is none."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings, strategies as st

from unfuse.core.tool_calls import Call, CallReader
from unfuse.core.tools import FORMATS

TAGGED, BARE = FORMATS["tagged"], FORMATS["bare"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool>", "b": [1]}}\n</tool_call>'
OTHER = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
PARTS = ["<", "<tool_call>", "</tool_call>", "text ", "\n", '{"name": "f"', ', "arguments": {}}', CALL, OTHER]


def read(text: str, cuts: list[int] | None = None, how: str = "tagged") -> tuple[str, list[Call]]:
    """What is read of a text that comes in pieces."""
    reader = CallReader(FORMATS[how], "request:0")
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts or [])})
    pieces = [*(reader.feed(text[start:end]) for start, end in pairwise(ends)), reader.finish()]
    told = [call for _, calls in pieces for call in calls]
    assert told == reader.calls
    return "".join(shown for shown, _ in pieces), told


def test_calls_are_taken_out_of_a_text() -> None:
    text, calls = read(f"Let me see.\n{CALL}\n{OTHER}\n")
    assert text == "Let me see.\n"
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"a": "</tool>", "b": [1]}), ("g", {})]
    assert len({call.id for call in calls}) == 2


def test_a_call_that_the_model_did_not_close_is_one() -> None:
    text, (call,) = read(CALL.removesuffix("\n</tool_call>"))
    assert (text, call.name) == ("", "f")


@pytest.mark.parametrize(
    "text",
    ["", "a < b", "<tool", "<tool_call>", "<tool_call>x</tool_call>", '<tool_call>{"name": 3}</tool_call> and',
     '<tool_call>{"name": "f", "arguments": 3}</tool_call>', "<tool_call>" + "[" * 100_000, "</tool_call>",
     '<tool_call>{"name": "f", "arguments": {}, "x": 1}</tool_call>'],
)  # fmt: skip
def test_what_is_no_call_is_text(text: str) -> None:
    assert read(text) == (text, [])


@settings(deadline=None)
@given(st.lists(st.sampled_from(PARTS)).map("".join), st.lists(st.integers(0, 500)))
@example(f"a{CALL}", [*range(100)])
def test_where_a_text_is_cut_makes_no_difference(text: str, cuts: list[int]) -> None:
    """But for white space behind a call, which is the call's if it comes by itself."""
    whole, cut = read(text), read(text, cuts)
    assert whole[1] == cut[1]
    assert whole[0].split() == cut[0].split() or "".join(whole[0].split()) == "".join(cut[0].split())


@settings(deadline=None)
@given(st.text(st.sampled_from("<tol_ca>{}\n x")), st.lists(st.integers(0, 60)))
def test_a_text_without_calls_comes_whole(text: str, cuts: list[int]) -> None:
    assert read(text, cuts) == (text, [])


@pytest.mark.parametrize("text", ['{"name": "f", "parameters": {"a": 1}}', ' \n{"name": "f", "parameters": {"a": 1}} '])
@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 60)))
def test_an_answer_may_be_a_call(text: str, cuts: list[int]) -> None:
    shown, (call,) = read(text, cuts, "bare")
    assert (shown, call.name, call.arguments) == ("", "f", '{"a": 1}')


@pytest.mark.parametrize("text", ["", " ", "hello", '{"name": "f"}', '{"a": 1}', "{", "x {", '[{"name": "f"}]'])
@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 60)))
def test_an_answer_that_is_no_call_is_text(text: str, cuts: list[int]) -> None:
    assert read(text, cuts, "bare") == (text, [])


def test_a_text_is_shown_as_soon_as_it_can_be_no_call() -> None:
    reader = CallReader(TAGGED, "request:0")
    assert reader.feed("a <tool") == ("a ", [])
    assert reader.feed("s> ") == ("<tools> ", [])
    bare = CallReader(BARE, "request:0")
    assert bare.feed("Hello ") == ("Hello ", [])
    assert bare.feed('{"name"') == ('{"name"', [])
