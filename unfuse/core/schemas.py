"""JSON schemas for grammars, and the keywords that may be dropped from a schema that is not strict."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from unfuse.core.errors import InvalidParameter
from unfuse.core.parameters import printable

GUIDANCE = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n]{0,16}",
}
"""llguidance's options for JSON: any white space, but at most 16 characters at a time."""

UNSURE = {
    "pattern", "patternProperties", "format", "propertyNames", "not", "if", "then", "else", "contains", "minContains",
    "maxContains", "uniqueItems", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
    "unevaluatedItems", "contentMediaType", "contentEncoding", "contentSchema", "multipleOf", "$dynamicRef",
}  # fmt: skip
"""Keywords that llguidance may be unable to enforce."""

TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
_SURROGATES = re.compile("[\ud800-\udfff]")

BY_NAME = ("properties", "$defs", "definitions")
BELOW = ("items", "additionalProperties", "additionalItems")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")


def strict_in(about: Mapping[Any, Any], param: str) -> bool:
    """Return the field `strict` of an object, by default false. Raises InvalidParameter."""
    strict = about.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidParameter(f"{param}: strict must be true or false, not {printable(strict)}", param)
    return bool(strict)


def schema_text(schema: object, strict: bool, param: str, relaxed: bool = False) -> str:
    """Return a JSON schema with llguidance's options.

    Unless it is `strict`, keywords that llguidance does not support are ignored. With `relaxed`, the keywords in UNSURE
    are removed as well, if it is not strict. Raises InvalidParameter, naming `param`.
    """
    if schema is True or schema is False:
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise InvalidParameter(f"{param}: a JSON schema must be an object, not {printable(schema)}", param)
    lenient = not strict
    try:
        kept: dict[str, Any] = _relaxed(schema) if lenient and relaxed else schema
        return json.dumps(kept | {"x-guidance": {**GUIDANCE, "lenient": lenient, "coerce_one_of": lenient}})
    except RecursionError as error:
        raise InvalidParameter(f"{param}: the JSON schema is nested too deeply", param) from error


def _relaxed(schema: Any) -> Any:
    """Return the schema without the keywords in UNSURE, nulls, unknown types and references to other documents."""
    if not isinstance(schema, dict):
        return schema
    if not str(schema.get("$ref", "#")).startswith("#"):
        return {}
    found = {key: value for key, value in schema.items() if key not in UNSURE and (value is not None or key == "const")}
    if "type" in found:
        types = _known_types(found.pop("type"))
        found |= {"type": types} if types else {}
    for key in found.keys() & set(BY_NAME):
        if isinstance(found[key], dict):
            found[key] = {name: _relaxed(one) for name, one in found[key].items()}
    for key in found.keys() & {*BELOW, *LISTS}:
        value = found[key]
        found[key] = [_relaxed(one) for one in value] if isinstance(value, list) else _relaxed(value)
    return found


def _known_types(said: object) -> str | list[str]:
    """Return the type or types of a schema in lower case; empty if one of them is unknown."""
    types = [str(one).lower() for one in (said if isinstance(said, list) else [said])]
    known = types if {*types} <= {*TYPES} else []
    return known if isinstance(said, list) or not known else known[0]


def types_of(schema: object) -> dict[str, str]:
    """Return the type of each property of an object schema, several separated by |; "" if it gives none."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: "|".join(sorted(_types(about))) for name, about in properties.items() if not _SURROGATES.search(name)}


def _types(schema: object, depth: int = 4) -> set[str]:
    if not isinstance(schema, dict) or depth == 0:
        return set()
    said = schema.get("type")
    found = {one for one in TYPES if one in (said if isinstance(said, list) else [said])}
    if isinstance(values := schema.get("enum"), list) and not found:
        found |= {"string"} if all(isinstance(value, str) for value in values) else set()
    for key in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(key), list):
            found |= set().union(*(_types(one, depth - 1) for one in several))
    return found
