"""What may be asked of an answer, and how tools are read: what is refused, and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unfuse.core.codec import decode
from unfuse.core.errors import InvalidParameter
from unfuse.language.answer_reader import CALL_FORMATS as FORMATS
from unfuse.language.grammars import MAX_CHARS, Grammar, grammar_digest, pack_grammar
from unfuse.language.structured_outputs import FORMAT, answer_format
from unfuse.language.tools import grammar_of, read_tools

TAGGED, BARE = FORMATS["hermes"], FORMATS["llama3_json"]


def asked_grammar(said: object, relaxed: bool = False) -> Grammar | None:
    """The grammar that a response_format asks for."""
    found = answer_format({FORMAT: said})
    return found.grammar(relaxed) if found else None


def tool(name: str = "f", **about: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **about}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("said", [None, {"type": "text"}])
def test_text_format_has_no_grammar(said: object) -> None:
    assert asked_grammar(said) is None


def test_each_response_format_type_has_its_grammar() -> None:
    assert asked_grammar({"type": "regex", "regex": "a+"}) == Grammar("regex", "a+")
    assert asked_grammar({"type": "grammar", "grammar": 'start: "a"'}) == Grammar("lark", 'start: "a"')
    for said in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}):
        found = asked_grammar(said)
        assert found and found.kind == "json_schema" and json.loads(found.text)["type"] == "object"


@pytest.mark.parametrize(("strict", "lenient"), [(None, True), (True, False), (False, True)])
def test_schema_is_lenient_unless_strict(strict: object, lenient: bool) -> None:
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
        ({"type": "json_schema"}, "with a schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "with a schema"),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, "must be an object"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}, "true or false"),
        ({"type": "regex", "regex": 3}, "a string regex"),
        ({"type": "grammar"}, "a string grammar"),
    ],
)
def test_invalid_response_format_is_rejected(said: object, says: str) -> None:
    with pytest.raises(InvalidParameter, match=FORMAT) as refused:
        asked_grammar(said)
    assert says in str(refused.value)
    assert refused.value.param == FORMAT


def test_boolean_schema_is_accepted() -> None:
    for schema, has in ((True, {}), (False, {"enum": []})):
        found = asked_grammar({"type": "json_schema", "json_schema": {"schema": schema}})
        assert found and json.loads(found.text).items() >= has.items()


def test_too_long_too_deep_or_non_unicode_grammar_is_rejected() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(InvalidParameter, match="too deeply"):
        asked_grammar({"type": "json_schema", "json_schema": {"schema": deep}})
    while deep:  # or the end of it would be just as deep
        deep = deep["items"]
    with pytest.raises(InvalidParameter, match="the grammar has"):
        pack_grammar(Grammar("regex", "a" * (MAX_CHARS + 1)), FORMAT)
    with pytest.raises(InvalidParameter, match="surrogate"):
        pack_grammar(Grammar("regex", "\ud800"), FORMAT)


def test_packed_grammar_round_trips_with_distinct_digest() -> None:
    one, other = Grammar("regex", "ä+"), Grammar("lark", "ä+")
    assert decode(pack_grammar(one, FORMAT), Grammar) == one
    assert grammar_digest(pack_grammar(one, FORMAT)) != grammar_digest(pack_grammar(other, FORMAT))


@pytest.mark.parametrize("said", [{}, {"tools": None}, {"tools": []}, {"tools": [tool()], "tool_choice": "none"}])
def test_no_tools_are_read_without_tools_or_with_choice_none(said: dict[str, Any]) -> None:
    assert read_tools(said) is None


def test_tool_choice_restricts_callable_functions() -> None:
    both = [tool("f"), tool("g")]
    free, must = read_tools({"tools": both}), read_tools({"tools": both, "tool_choice": "required"})
    one = read_tools({"tools": both, "tool_choice": named("g")})
    assert free and free.choice == "auto" and free.allows_several_calls
    assert must and must.choice == "required" and [each["name"] for each in must.callable] == ["f", "g"]
    assert (
        one
        and one.choice == "required"
        and [each["name"] for each in one.callable] == ["g"]
        and not one.allows_several_calls
    )


@pytest.mark.parametrize(
    ("said", "param", "says"),
    [
        ({"tool_choice": "required"}, "tool_choice", "send tools"),
        ({"tools": "f"}, "tools", "list"),
        ({"tools": [tool()] * 129}, "tools", "128"),
        ({"tools": ["f"]}, "tools", r"tools\[0\]"),
        ({"tools": [{"type": "function"}]}, "tools", "with a function"),
        ({"tools": [tool("a b")]}, "tools", "'a b'"),
        ({"tools": [tool("x" * 129)]}, "tools", "1 to 128"),
        ({"tools": [{"type": "function", "name": 3}]}, "tools", "not 3"),
        ({"tools": [tool(description=3)]}, "tools", "description"),
        ({"tools": [tool(parameters=[])]}, "tools", "JSON schema"),
        ({"tools": [tool(), tool()]}, "tools", "two functions"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "'any'"),
        ({"tools": [tool(strict=3)]}, "tools", "true or false"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools", "of type custom"),
        ({"functions": []}, "functions", "send tools"),
        ({"function_call": "auto"}, "function_call", "send tool_choice"),
        ({"tools": [tool()], "tool_choice": allowed("g")}, "tool_choice", "allowed tool must"),
        ({"tools": [tool()], "tool_choice": allowed()}, "tool_choice", "at least one"),
        ({"tools": [tool()], "tool_choice": named("g")}, "tool_choice", r"\(f\)"),
    ],
)
def test_invalid_tools_and_tool_choice_are_rejected(said: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidParameter, match=says) as refused:
        read_tools(said)
    assert refused.value.param == param


def test_mcp_function_names_are_accepted() -> None:
    names = ("a.b-c_d", "x" * 128)
    tools = read_tools({"tools": [tool(name) for name in names]})
    assert tools and tools.names == names


def test_responses_api_function_format_is_accepted() -> None:
    flat = {"type": "function", "name": "f", "description": "F.", "parameters": {"type": "object"}, "strict": True}
    tools = read_tools({"tools": [flat], "tool_choice": {"type": "function", "name": "f"}})
    assert tools and tools.choice == "required"
    about = {key: value for key, value in flat.items() if key != "type"}
    assert tools.functions == ({"type": "function", "function": about},)


@pytest.mark.row("C31", "C32")
def test_relaxed_schema_drops_invalid_types_and_nulls() -> None:
    """As those are that libraries make of Go's and Python's types, or of Gemini's API."""
    said = {
        "type": "OBJECT",
        "required": None,
        "items": None,
        "properties": {"a": {"type": "any"}, "b": {"type": ["string", "date"]}, "c": {"const": None, "type": "null"}},
    }
    found = asked_grammar({"type": "json_schema", "json_schema": {"schema": said}}, relaxed=True)
    assert found
    kept = {"type": "object", "properties": {"a": {}, "b": {}, "c": {"const": None, "type": "null"}}}
    assert json.loads(found.text).items() >= kept.items()


def test_allowed_tools_restrict_callable_functions() -> None:
    both = [tool("f"), tool("g")]
    some = read_tools({"tools": both, "tool_choice": allowed("g")})
    must = read_tools({"tools": both, "tool_choice": allowed("f", "g", mode="required")})
    assert some and (some.choice, some.names, len(some.template_functions)) == ("auto", ("g",), 2)
    assert must and (must.choice, must.names) == ("required", ("f", "g"))


def test_missing_tool_fields_are_filled_in_for_templates() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": ["integer", "null"]}}}
    said = [tool("f", description=None), tool("g", parameters=parameters, description="G.")]
    tools = read_tools({"tools": said})
    assert tools
    nothing = {"type": "object", "properties": {}}
    assert tools.template_functions[0]["function"] == {"name": "f", "description": "", "parameters": nothing}
    assert tools.template_functions[1] == said[1]
    assert tools.types == {"f": {}, "g": {"a": "integer|null"}}


def test_calls_are_constrained_only_if_tool_choice_is_required() -> None:
    said: dict[str, Any] = {"tools": [tool(), tool("g", parameters={"type": "object"})]}
    assert grammar_of(None, read_tools(said), TAGGED) is None
    must = said | {"tool_choice": "required"}
    found = grammar_of(None, read_tools(must), TAGGED)
    assert found and found.kind == "lark" and '{\\"name\\": \\"g\\"' in found.text and "{0,15}" in found.text
    found = grammar_of(None, read_tools(must | {"parallel_tool_calls": False}), TAGGED)
    assert found and "{0,15}" not in found.text
    found = grammar_of(None, read_tools(must), BARE)
    assert found and "{0,15}" not in found.text and '\\"parameters\\"' in found.text


def test_strict_function_is_constrained_lazily_with_tool_choice_auto() -> None:
    said: dict[str, Any] = {"tools": [tool(strict=True), tool("g")]}
    tools = read_tools(said)
    found = grammar_of(None, tools, TAGGED)
    assert tools and found and '[lazy]: TEXT "<tool_call>"' in found.text
    assert grammar_of(None, tools, BARE) is None and grammar_of(None, tools, FORMATS["mistral"]) is None


def test_response_format_with_tools_allows_calls_or_content() -> None:
    tools = read_tools({"tools": [tool()]})
    found = grammar_of(answer_format({FORMAT: {"type": "json_object"}}), tools, TAGGED)
    assert found and found.text.startswith("start: calls | answer")
    for said in ({FORMAT: {"type": "regex", "regex": "a"}}, {"guided_regex": "a"}):
        with pytest.raises(InvalidParameter, match="set tool_choice to none"):
            grammar_of(answer_format(said), tools, TAGGED)


def test_relaxed_schema_drops_unenforceable_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {"pattern": {"type": "string", "pattern": "(?=a)"}, "b": {"$ref": "https://example.com"}},
        "items": [{"format": "x", "enum": [{"not": 1}]}],
        "additionalProperties": {"not": {}, "$ref": "#/$defs/c"},
        "$defs": {"c": {"anyOf": [{"multipleOf": 0}]}},
        "required": ["pattern"],
    }
    found = asked_grammar({"type": "json_object", "schema": schema}, relaxed=True)
    assert found
    read = json.loads(found.text)
    del read["x-guidance"]
    assert read == {
        "type": "object",
        "properties": {"pattern": {"type": "string"}, "b": {}},
        "items": [{"enum": [{"not": 1}]}],
        "additionalProperties": {"$ref": "#/$defs/c"},
        "$defs": {"c": {"anyOf": [{}]}},
        "required": ["pattern"],
    }
    strict = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
    assert asked_grammar(strict, relaxed=True) == asked_grammar(strict)


SCHEMA = {"type": "object", "required": ["a"]}


@pytest.mark.parametrize(
    ("said", "kind", "has"),
    [
        ({FORMAT: {"type": "json_object", "schema": SCHEMA}}, "json_schema", '"required": ["a"]'),
        ({FORMAT: {"type": "json_schema", "schema": SCHEMA}}, "json_schema", '"required": ["a"]'),
        ({"guided_json": SCHEMA}, "json_schema", '"required": ["a"]'),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", '"required": ["a"]'),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", '"required": ["a"]'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["yes", 'n"o']}, "lark", 'start: "yes" | "n\\"o"'),
        ({"guided_grammar": "root ::= a"}, "ebnf", "root ::= a"),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema", '"required": ["a"]'),
        ({"structured_outputs": {"choice": ["é"], "disable_fallback": True}}, "lark", 'start: "é"'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '"type": "object"'),
        ({"structured_outputs": {"regex": "a", "json_object": False}}, "regex", "a"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}, FORMAT: {"type": "text"}}, "ebnf", 'root ::= "a"'),
    ],
)
def test_vllm_and_sglang_format_parameters_are_accepted(said: dict[str, Any], kind: str, has: str) -> None:
    found = answer_format(said)
    assert found
    grammar = found.grammar()
    assert grammar.kind == kind and has in grammar.text


@pytest.mark.parametrize(
    ("said", "param", "says"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex both"),
        ({FORMAT: {"type": "json_object"}, "regex": "a"}, "regex", "send one"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "both"),
        ({"structured_outputs": {"lark": "a"}}, "structured_outputs", "no 'lark'"),
        ({"structured_outputs": "json"}, "structured_outputs", "an object"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "send tools"),
        ({FORMAT: {"type": "structural_tag"}}, FORMAT, "send tools"),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        ({"guided_regex": 3}, "guided_regex", "a string"),
        ({"guided_choice": []}, "guided_choice", "1 to"),
        ({"guided_choice": ["a", 3]}, "guided_choice", "list of strings"),
        ({"guided_choice": "a"}, "guided_choice", "list"),
    ],
)
def test_invalid_vllm_and_sglang_format_parameters_are_rejected(said: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidParameter, match=says) as refused:
        answer_format(said)
    assert refused.value.param == param
