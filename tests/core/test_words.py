"""What can be asked of a language model is bounded before anything is queued."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from unfuse.core.checking import check_request
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import ContextLengthExceeded, InvalidParameter
from unfuse.core.modalities import IMAGE, TEXT, modality_for, modality_of
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Pipeline
from unfuse.core.request import new_request_id
from unfuse.core.text_parameters import (
    MAX_BIASES,
    MAX_STOP,
    MAX_STOP_IDS,
    MAX_STOPS,
    OWN_PARAMETERS,
    PromptTokens,
    template_kwargs,
)

CARD = ModelSpec(
    "m", "m", "language", Pipeline(()), {"max_tokens": 100, "vocabulary": 50}, {"temperature": 0.6}, {}, {}
)
SAID: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}


def asked(card: ModelSpec = CARD, *, prompt_tokens: int = 40, **more: object) -> dict[str, Any]:
    return check_request(card, {**SAID, **more}, TEXT, tokens=PromptTokens(prompt_tokens))[0]


def test_max_tokens_defaults_to_the_rest_of_the_context() -> None:
    assert asked()["max_tokens"] == 60
    assert asked(max_tokens=7)["max_tokens"] == 7
    assert asked(max_completion_tokens=8, max_tokens=7)["max_tokens"] == 8


@pytest.mark.row("K1")
def test_max_tokens_minus_one_means_the_default() -> None:
    """LM Studio and llama.cpp have it so, and scripts that are written for them send it."""
    assert asked(max_tokens=-1)["max_tokens"] == asked(max_completion_tokens=-1)["max_tokens"] == 60
    assert asked(replace(CARD, defaults={"max_tokens": 30}), max_tokens=-1)["max_tokens"] == 30


@pytest.mark.row("K1")
def test_parameters_of_other_servers_are_accepted() -> None:
    said = {"spaces_between_special_tokens": False, "cache_prompt": True, "stop": [str(n) for n in range(MAX_STOPS)]}
    assert len(json.loads(asked(**said)["stop"])) == MAX_STOPS >= 16
    assert "skip_special_tokens" not in asked(skip_special_tokens=True)
    assert asked(skip_special_tokens=False)["skip_special_tokens"] is False


def test_model_defaults_override_server_defaults() -> None:
    params = asked(seed=3)
    assert (params["temperature"], params["top_p"], params["seed"]) == (0.6, 1.0, 3)
    assert json.loads(params["stop"]) == []
    assert params["logprobs"] is None


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"skip_special_tokens": "x"}, "skip_special_tokens"),
        ({"include_reasoning": "x"}, "include_reasoning"),
        ({"n": 129}, "n"),
        ({"top_k": -2}, "top_k"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 61}, "min_tokens"),
        ({"min_tokens": 8, "max_tokens": 7}, "min_tokens"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [50]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * (MAX_STOP_IDS + 1)}, "stop_token_ids"),
        ({"ignore_eos": "x"}, "ignore_eos"),
        ({"include_stop_str_in_output": 7}, "include_stop_str_in_output"),
        ({"audio": {}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"modalities": "text"}, "modalities"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
        ({"stream_options": 5, "stream": True}, "stream_options"),
        ({"stream_options": {"include_usage": "x"}, "stream": True}, "stream_options"),
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
def test_invalid_text_parameter_error_names_the_parameter(more: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        asked(**more)
    assert refused.value.param == param


def test_special_token_stop_strings_become_stop_token_ids() -> None:
    tokens = PromptTokens(1, special_stops=[7])
    for more, ids in (({}, "[7]"), ({"stop_token_ids": [3]}, "[7, 3]")):
        assert check_request(CARD, {**SAID, **more}, TEXT, tokens=tokens)[0]["stop_token_ids"] == ids


@pytest.mark.row("C46", "C47")
@pytest.mark.parametrize(
    ("more", "however"),
    [
        ({"prompt_tokens": 100}, "your messages resulted in 100 tokens"),
        ({"max_tokens": 61}, "you requested 101 tokens (40 in the messages, 61 in the completion)"),
        ({"max_completion_tokens": 4_000_000, "max_tokens": 1}, "you requested 4000040 tokens"),
    ],
)
def test_context_length_error_has_the_wording_of_openai(more: dict[str, object], however: str) -> None:
    with pytest.raises(ContextLengthExceeded) as refused:
        asked(**more)
    assert str(refused.value).startswith(f"This model's maximum context length is 100 tokens. However, {however}")
    assert refused.value.param == "messages"


@pytest.mark.row("C5:default_max_tokens")
def test_default_max_tokens_of_the_model_is_applied() -> None:
    card = replace(CARD, defaults={"max_tokens": 30})
    assert asked(card)["max_tokens"] == 30
    assert asked(card, max_tokens=50)["max_tokens"] == 50
    assert asked(card, prompt_tokens=90)["max_tokens"] == 10


def test_stop_parameters_are_present_only_if_requested() -> None:
    names = ("min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "bad_words")
    assert not asked(ignore_eos=False, min_tokens=0).keys() & {*names}
    said = {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [3, 4], "include_stop_str_in_output": True}
    tokens = PromptTokens(40, bad_words=[[1, 2]])
    params, _ = check_request(CARD, {**SAID, **said, "bad_words": ["a b"]}, TEXT, tokens=tokens)
    assert [params[name] for name in names] == [2, True, "[3, 4]", True, "[[1, 2]]"]


def test_template_kwargs_merge_and_reject_reserved_names() -> None:
    said = {"enable_thinking": "false", "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}}
    assert template_kwargs(said) == {"enable_thinking": True, "reasoning_effort": "low"}
    assert template_kwargs({"add_generation_prompt": False}) == {"add_generation_prompt": False}
    assert template_kwargs({"continue_final_message": True}) == {"continue_final_message": True}
    assert template_kwargs({"enable_thinking": None}) == {}
    for name in OWN_PARAMETERS:
        with pytest.raises(InvalidParameter, match=name):
            template_kwargs({"chat_template_kwargs": {name: 1}})
    with pytest.raises(InvalidParameter, match="cannot both be true"):
        template_kwargs({"continue_final_message": True, "chat_template_kwargs": {"add_generation_prompt": True}})


def test_missing_messages_raise_invalid_parameter() -> None:
    with pytest.raises(InvalidParameter, match="messages"):
        check_request(CARD, {}, TEXT)


@given(st.lists(st.text(min_size=1, max_size=9), max_size=MAX_STOPS), st.integers(0, 20))
def test_stop_strings_and_logprobs_are_passed_on(stops: list[str], top: int) -> None:
    params = asked(stop=stops, logprobs=True, top_logprobs=top)
    assert json.loads(params["stop"]) == stops
    assert params["logprobs"] == top


def test_request_ids_and_parameters_determine_the_modality() -> None:
    assert modality_of(new_request_id(TEXT)) is TEXT
    assert modality_for({"prompt": "a circle", "n": 2}) is IMAGE


@pytest.mark.parametrize("name", DerivedFacts.__struct_fields__)
def test_derived_facts_are_rejected_as_unknown_parameters(name: str) -> None:
    with pytest.raises(InvalidParameter, match="unknown parameter") as refused:
        check_request(CARD, {**SAID, name: 3}, TEXT, tokens=PromptTokens(40))
    assert refused.value.param == name
