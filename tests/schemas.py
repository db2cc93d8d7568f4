"""JSON schemas made at random: sound ones, impossible ones, and such as are none."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "c d", "é", "$", '"', "x" * 40, ""])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(10**6), 10**6), st.text(max_size=6))
Schema = dict[str, Any]


def between(low: str, high: str, most: int) -> st.SearchStrategy[Schema]:
    """Two bounds, either of which may be missing, or in the wrong order."""
    return st.fixed_dictionaries({}, optional={low: st.integers(0, most), high: st.integers(0, most)})


def kind(name: str, more: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return more.map(lambda said: {"type": name, **said})


PATTERNS = st.sampled_from(["^[a-c]+$", "^(red|green)$", "[0-9]{2}", "^.{3}$", "^$", "a?b*", "é"])
LEAVES: st.SearchStrategy[Schema] = st.one_of(
    kind("string", between("minLength", "maxLength", 12)),
    PATTERNS.map(lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 12}),
    st.sampled_from(["date", "time", "uuid", "ipv4", "email"]).map(lambda of: {"type": "string", "format": of}),
    kind("integer", between("minimum", "maximum", 1000)),
    kind("number", between("exclusiveMinimum", "maximum", 1000)),
    st.integers(1, 50).map(lambda of: {"type": "integer", "multipleOf": of, "minimum": 0, "maximum": 500}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"], "maxLength": 4}]),
    st.lists(SCALARS, max_size=4).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
)


def _inner(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    objects = st.fixed_dictionaries(
        {"properties": st.dictionaries(NAMES, inner, max_size=4), "additionalProperties": st.just(False)},
        optional={"required": st.lists(NAMES, max_size=3, unique=True)},
    )
    arrays = st.tuples(inner, between("minItems", "maxItems", 3)).map(
        lambda of: {"items": of[0], "maxItems": 3, **of[1]}
    )
    return st.one_of(
        kind("object", objects),
        kind("array", arrays),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
        st.lists(inner, min_size=1, max_size=2).map(lambda some: {"allOf": some}),
        inner.map(lambda one: {"$ref": "#/$defs/x", "$defs": {"x": one}}),
    )


SCHEMAS = st.recursive(LEAVES, _inner, max_leaves=6)
"""Sound ones, some of which nothing matches; answers to them are short."""

_WORDS = st.sampled_from(
    [
        "type",
        "properties",
        "items",
        "$ref",
        "$defs",
        "not",
        "if",
        "then",
        "contains",
        "uniqueItems",
        "pattern",
        "enum",
        "anyOf",
        "oneOf",
        "allOf",
        "required",
        "minLength",
        "maxLength",
        "minItems",
        "multipleOf",
        "format",
        "$schema",
        "patternProperties",
        "additionalProperties",
        "dependentRequired",
        "x-guidance",
        "%",
        "propertyNames",
        "const",
    ]
)
_THINGS = st.one_of(
    SCALARS,
    st.floats(),
    st.integers(),
    st.sampled_from(["#", "#/$defs/x", "object", "array", "(", "(a*)*", "^a{99999}$"]),
)
GARBAGE: st.SearchStrategy[Schema] = st.dictionaries(
    _WORDS,
    st.recursive(
        _THINGS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3), max_leaves=8
    ),
    max_size=5,
)
"""What a schema is made of, in any order."""
