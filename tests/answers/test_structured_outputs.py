"""Rows about what an answer must be, in the names of OpenAI, vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError

import pytest

from tools.server import Server

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
EBNF = 'root ::= "yes" | number\nnumber ::= [7-8]{2}'


def say(scripted: Server, **about: Any) -> str:
    body = {"model": "py", "messages": [{"role": "user", "content": "list"}], "max_tokens": 100, **about}
    text: str = scripted.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return text


@pytest.mark.row("C8", "C5:guided_json", "C5:structured_outputs")
@pytest.mark.parametrize(
    "about",
    [
        {"response_format": {"type": "json_object", "schema": CITY}},
        {"response_format": {"type": "json_schema", "schema": CITY}},
        {"guided_json": CITY},
        {"structured_outputs": {"json": CITY}},
        {"json_schema": json.dumps(CITY)},
    ],
)
def test_completion_matches_the_json_schema(scripted: Server, about: dict[str, Any]) -> None:
    assert json.loads(say(scripted, **about)) == {"city": "Rome"}


@pytest.mark.row("C5:guided_regex", "C5:guided_choice", "C5:guided_grammar", "C5:regex", "C5:ebnf")
@pytest.mark.parametrize(
    ("about", "answers"),
    [
        ({"guided_regex": "a[b]{3}"}, ["abbb"]),
        ({"regex": "a[b]{3}"}, ["abbb"]),
        ({"structured_outputs": {"regex": "a[b]{3}"}}, ["abbb"]),
        ({"guided_choice": ["red", "été"]}, ["red", "été"]),
        ({"structured_outputs": {"choice": ["red", "green"]}}, ["red", "green"]),
        ({"guided_grammar": EBNF}, ["yes", "77", "78", "87", "88"]),
        ({"ebnf": EBNF}, ["yes", "77", "78", "87", "88"]),
        ({"structured_outputs": {"grammar": 'start: "ab" | "cd"'}}, ["ab", "cd"]),
    ],
)
def test_guided_decoding_parameters_of_vllm_and_sglang_are_enforced(
    scripted: Server, about: dict[str, Any], answers: list[str]
) -> None:
    assert say(scripted, **about) in answers


@pytest.mark.row("C5:structured_outputs")
@pytest.mark.parametrize(
    ("about", "param", "says"),
    [
        ({"guided_json": CITY, "guided_regex": "a"}, "guided_regex", "send one of them"),
        ({"response_format": {"type": "json_object"}, "ebnf": EBNF}, "ebnf", "send one of them"),
        ({"ebnf": "root ::= ("}, "ebnf", "cannot be enforced"),
        ({"guided_regex": "((("}, "guided_regex", "cannot be enforced"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "not supported"),
        ({"structured_outputs": {"xml": "x"}}, "structured_outputs", "send one of"),
    ],
)
def test_conflicting_or_unsupported_output_constraints_return_400(
    scripted: Server, about: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(HTTPError) as refused:
        say(scripted, **about)
    error = json.load(refused.value)["error"]
    assert (refused.value.code, error["param"]) == (400, param) and says in error["message"]


@pytest.mark.row("C31", "C34", "K3")
@pytest.mark.parametrize(
    "schema",
    [
        {**CITY, "uniqueItems": True, "not": {"required": ["x"]}, "propertyNames": {"pattern": "c"}},
        {"oneOf": [CITY, {**CITY, "minProperties": 1}]},
        {**CITY, "if": {}, "then": {}, "dependentRequired": {}, "unevaluatedProperties": False, "contains": {}},
        {**CITY, "properties": {"city": {"enum": ["Rome"], "pattern": "(?<!x)e$"}}},
        {**CITY, "properties": {"city": {"const": "Rome", "format": "of my own"}}},
    ],
)
def test_unsupported_schema_keywords_are_rejected_only_if_strict(scripted: Server, schema: dict[str, Any]) -> None:
    def format(**about: Any) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **about}}

    about: dict[str, Any] = {} if "not" in schema else {"strict": None} if "if" in schema else {"strict": False}
    assert json.loads(say(scripted, response_format=format(**about))) == {"city": "Rome"}
    with pytest.raises(HTTPError) as refused:
        say(scripted, response_format=format(strict=True))
    error = json.load(refused.value)["error"]
    assert error["param"] == "response_format" and "cannot be enforced" in error["message"]
