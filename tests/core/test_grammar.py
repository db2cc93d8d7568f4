"""What may be asked of an answer, and how tools are read: what is refused, and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unfuse.core.codec import decode
from unfuse.core.errors import InvalidParameter
from unfuse.core.grammar import FORMAT, MAX_CHARS, Grammar, asked_grammar, digest, packed
from unfuse.core.tools import FORMATS, grammar_of, read_tools

TAGGED, BARE = FORMATS["tagged"], FORMATS["bare"]


def tool(name: str = "f", **about: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **about}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("said", [None, {"type": "text"}])
def test_a_text_needs_no_grammar(said: object) -> None:
    assert asked_grammar(said) is None


def test_each_type_has_its_grammar() -> None:
    assert asked_grammar({"type": "regex", "regex": "a+"}) == Grammar("regex", "a+")
    assert asked_grammar({"type": "grammar", "grammar": 'start: "a"'}) == Grammar("lark", 'start: "a"')
    for said in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}):
        found = asked_grammar(said)
        assert found and found.kind == "json_schema" and json.loads(found.text)["type"] == "object"


@pytest.mark.parametrize(("strict", "lenient"), [(None, False), (True, False), (False, True)])
def test_only_a_schema_that_says_so_lets_pass_what_it_cannot_be_held_to(strict: object, lenient: bool) -> None:
    """Whatever the schema itself says to llguidance."""
    schema = {"type": "object", "x-guidance": {"lenient": not lenient}}
    found = asked_grammar({"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}})
    assert found
    assert json.loads(found.text)["x-guidance"]["lenient"] is lenient


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("json", "'json'"),
        ([], "a list"),
        ({}, "None"),
        ({"type": "xml"}, "'xml'"),
        ({"type": ["json_object"]}, "a list"),
        ({"type": "json_schema"}, "with a schema in it"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "with a schema in it"),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, "must be an object"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}, "true or false"),
        ({"type": "regex", "regex": 3}, "a text regex"),
        ({"type": "grammar"}, "a text grammar"),
    ],
)
def test_what_is_no_format_is_refused(said: object, says: str) -> None:
    with pytest.raises(InvalidParameter, match=FORMAT) as refused:
        asked_grammar(said)
    assert says in str(refused.value)
    assert refused.value.param == FORMAT


def test_a_schema_may_be_true_or_false() -> None:
    for schema, has in ((True, {}), (False, {"enum": []})):
        found = asked_grammar({"type": "json_schema", "json_schema": {"schema": schema}})
        assert found and json.loads(found.text).items() >= has.items()


def test_what_is_too_long_or_too_deep_or_no_text_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(InvalidParameter, match="too deeply"):
        asked_grammar({"type": "json_schema", "json_schema": {"schema": deep}})
    while deep:  # or the end of it would be just as deep
        deep = deep["items"]
    with pytest.raises(InvalidParameter, match="characters of grammar"):
        packed(Grammar("regex", "a" * (MAX_CHARS + 1)), FORMAT)
    with pytest.raises(InvalidParameter, match="surrogate"):
        packed(Grammar("regex", "\ud800"), FORMAT)


def test_a_packed_grammar_is_read_again_and_has_its_own_hash() -> None:
    one, other = Grammar("regex", "ä+"), Grammar("lark", "ä+")
    assert decode(packed(one, FORMAT), Grammar) == one
    assert digest(packed(one, FORMAT)) != digest(packed(other, FORMAT))


@pytest.mark.parametrize("said", [{}, {"tools": None}, {"tools": []}, {"tools": [tool()], "tool_choice": "none"}])
def test_without_tools_none_are_read(said: dict[str, Any]) -> None:
    assert read_tools(said) is None


def test_a_choice_says_what_may_be_called() -> None:
    both = [tool("f"), tool("g")]
    free, must = read_tools({"tools": both}), read_tools({"tools": both, "tool_choice": "required"})
    one = read_tools({"tools": both, "tool_choice": named("g")})
    assert free and free.choice == "auto" and free.several
    assert must and must.choice == "required" and [each["name"] for each in must.callable] == ["f", "g"]
    assert one and one.choice == "required" and [each["name"] for each in one.callable] == ["g"] and not one.several


@pytest.mark.parametrize(
    ("said", "param", "says"),
    [
        ({"tool_choice": "required"}, "tool_choice", "send tools too"),
        ({"tools": "f"}, "tools", "list"),
        ({"tools": [tool()] * 129}, "tools", "128"),
        ({"tools": ["f"]}, "tools", r"tools\[0\]"),
        ({"tools": [{"type": "function"}]}, "tools", "with a function"),
        ({"tools": [tool("a b")]}, "tools", "'a b'"),
        ({"tools": [tool("x" * 65)]}, "tools", "1 to 64"),
        ({"tools": [tool(description=3)]}, "tools", "description"),
        ({"tools": [tool(parameters=[])]}, "tools", "JSON schema"),
        ({"tools": [tool(), tool()]}, "tools", "two functions"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "'any'"),
        ({"tools": [tool()], "tool_choice": named("g")}, "tool_choice", r"\(f\)"),
    ],
)
def test_what_are_no_tools_is_refused(said: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidParameter, match=says) as refused:
        read_tools(said)
    assert refused.value.param == param


def test_who_may_call_is_free_and_who_must_is_held_to_it() -> None:
    said: dict[str, Any] = {"tools": [tool(), tool("g", parameters={"type": "object"})]}
    assert grammar_of(said, read_tools(said), TAGGED) is None
    must = said | {"tool_choice": "required"}
    found = grammar_of(must, read_tools(must), TAGGED)
    assert found and found.kind == "lark" and '{\\"name\\": \\"g\\"' in found.text and "{0,15}" in found.text
    single = must | {"parallel_tool_calls": False}
    found = grammar_of(single, read_tools(single), TAGGED)
    assert found and "{0,15}" not in found.text
    found = grammar_of(must, read_tools(must), BARE)
    assert found and "{0,15}" not in found.text and '\\"parameters\\"' in found.text


def test_who_may_call_a_strict_function_is_held_to_it_once_it_calls() -> None:
    said: dict[str, Any] = {"tools": [tool(strict=True), tool("g")]}
    found = grammar_of(said, read_tools(said), TAGGED)
    assert found and '[lazy]: TEXT "<tool_call>"' in found.text
    assert grammar_of(said, read_tools(said), BARE) is None


def test_a_format_and_tools_are_either() -> None:
    said: dict[str, Any] = {"tools": [tool()], FORMAT: {"type": "json_object"}}
    found = grammar_of(said, read_tools(said), TAGGED)
    assert found and found.text.startswith("start: calls | answer")
    said[FORMAT] = {"type": "regex", "regex": "a"}
    with pytest.raises(InvalidParameter, match="tool_choice none"):
        grammar_of(said, read_tools(said), TAGGED)
    with pytest.raises(InvalidParameter, match="true or false"):
        grammar_of({}, read_tools({"tools": [tool(strict=3)], "tool_choice": "required"}), TAGGED)
