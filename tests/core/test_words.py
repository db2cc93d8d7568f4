"""What can be asked of a language model is bounded before anything is queued."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from unfuse.core.card import ModelCard
from unfuse.core.checking import check
from unfuse.core.errors import InvalidParameter
from unfuse.core.media import IMAGE, TEXT, medium_for, medium_of
from unfuse.core.plan import Pipeline
from unfuse.core.request import new_request_id
from unfuse.core.words import MAX_BIASES, MAX_STOP, MAX_STOPS

CARD = ModelCard(
    "m", "m", "language", Pipeline(()), {"max_tokens": 100, "vocabulary": 50}, {"temperature": 0.6}, {}, {}
)
SAID: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}


def asked(*, prompt_tokens: int = 40, **more: object) -> dict[str, Any]:
    return check(CARD, {**SAID, **more}, TEXT, derived={"prompt_tokens": prompt_tokens})[0]


def test_an_answer_may_take_what_the_messages_leave() -> None:
    assert asked()["max_tokens"] == 60
    assert asked(max_tokens=7)["max_tokens"] == 7
    assert asked(max_completion_tokens=8, max_tokens=7)["max_tokens"] == 8


def test_defaults_are_the_model_s_then_ours() -> None:
    params = asked(seed=3)
    assert (params["temperature"], params["top_p"], params["seed"]) == (0.6, 1.0, 3)
    assert json.loads(params["stop"]) == []
    assert params["logprobs"] is None


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt_tokens": 100}, "messages"),
        ({"max_tokens": 61}, "max_tokens"),
        ({"max_completion_tokens": 61}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 17}, "n"),
        ({"temperature": 2.5}, "temperature"),
        ({"stop": 7}, "stop"),
        ({"stop": ["a"] * (MAX_STOPS + 1)}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x" * (MAX_STOP + 1)}, "stop"),
        ({"stop": ["\ud800"]}, "stop"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"50": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": float("nan")}}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(MAX_BIASES + 1)}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt": "a circle"}, "prompt"),
    ],
)
def test_what_is_not_allowed_is_refused_by_its_name(more: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        asked(**more)
    assert refused.value.param == param


def test_messages_must_be_there() -> None:
    with pytest.raises(InvalidParameter, match="messages"):
        check(CARD, {}, TEXT)


@given(st.lists(st.text(min_size=1, max_size=9), max_size=MAX_STOPS), st.integers(0, 20))
def test_stops_and_logprobs_come_through(stops: list[str], top: int) -> None:
    params = asked(stop=stops, logprobs=True, top_logprobs=top)
    assert json.loads(params["stop"]) == stops
    assert params["logprobs"] == top


def test_ids_tell_the_medium() -> None:
    assert medium_of(new_request_id(TEXT)) is TEXT
    assert medium_for({"prompt": "a circle", "n": 2}) is IMAGE


@pytest.mark.parametrize("name", ["prompt_tokens", "shown", "grammar", "tool_calls", "reading"])
def test_what_is_derived_no_client_can_send(name: str) -> None:
    with pytest.raises(InvalidParameter, match="unknown parameter") as refused:
        asked_by(name)
    assert refused.value.param == name


def asked_by(name: str) -> None:
    check(CARD, {**SAID, name: 3}, TEXT, derived={"prompt_tokens": 40})
