"""Structured outputs: the format that a request demands, with the names of OpenAI, vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec

from unfuse.core.errors import InvalidParameter
from unfuse.core.parameters import printable
from unfuse.core.text_parameters import schema_text, strict_in
from unfuse.language.grammars import Grammar, Kind

FORMAT, STRUCTURED = "response_format", "structured_outputs"

MAX_CHOICES = 1000

WITHOUT_EFFECT = (
    "disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "_backend",
    "_backend_was_auto",
)  # fmt: skip
"""Options of vLLM's structured_outputs that are accepted and ignored."""


class AnswerFormat(msgspec.Struct, frozen=True):
    """The required format of an answer: a JSON schema, or the text of a grammar. `param` is the field it came from."""

    param: str
    kind: Kind
    text: str = ""
    schema: object = None
    strict: bool = False

    def grammar(self, relaxed: bool = False) -> Grammar:
        """Return the grammar, `relaxed` as in `schema_text`. Raises InvalidParameter."""
        if self.kind != "json_schema":
            return Grammar(self.kind, self.text)
        return Grammar("json_schema", schema_text(self.schema, self.strict, self.param, relaxed))


def answer_format(fields: Mapping[str, Any]) -> AnswerFormat | None:
    """Return the format that a request demands; None for free text. Raises InvalidParameter."""
    found = [one for one in _asked(fields) if one is not None]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise InvalidParameter(f"{first} and {second} both set the format of the answer: send one of them", second)
    return found[0] if found else None


def _asked(fields: Mapping[str, Any]) -> Iterator[AnswerFormat | None]:
    yield _response_format(fields.get(FORMAT))
    for name, read in FIELDS.items():
        if (value := fields.get(name)) is not None:
            yield read(value, name)
    structured = fields.get(STRUCTURED)
    if structured is None:
        return
    if not isinstance(structured, dict):
        raise InvalidParameter(f"{STRUCTURED} must be an object, not {printable(structured)}", STRUCTURED)
    for name, value in structured.items():
        if name not in STRUCTURES and name not in WITHOUT_EFFECT:
            known = ", ".join(STRUCTURES)
            raise InvalidParameter(f"{STRUCTURED} has no {printable(name)}: send one of {known}", STRUCTURED)
        if name in STRUCTURES and value is not None and value is not False:
            yield STRUCTURES[name](value, STRUCTURED)


def _schema(value: object, param: str) -> AnswerFormat:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"{param} must be a JSON schema, but is not JSON: {error}", param) from error
    return AnswerFormat(param, "json_schema", schema=value)


def _text(kind: Kind, value: object, param: str) -> AnswerFormat:
    if not isinstance(value, str):
        raise InvalidParameter(f"{param} must be a string, not {printable(value)}", param)
    return AnswerFormat(param, kind, value)


def _grammar(value: object, param: str) -> AnswerFormat:
    """Read a grammar as vLLM does: as EBNF if it contains `::=`, else in Lark's notation."""
    return _text("ebnf" if isinstance(value, str) and "::=" in value else "lark", value, param)


def _choice(value: object, param: str) -> AnswerFormat:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidParameter(f"{param} must be a list of 1 to {MAX_CHOICES} strings", param)
    texts = [one for one in value if isinstance(one, str)]
    if len(texts) < len(value):
        raise InvalidParameter(f"{param} must be a list of strings", param)
    choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return AnswerFormat(param, "lark", f"start: {choices}")


def _json_object(value: object, param: str) -> AnswerFormat:
    return AnswerFormat(param, "json_schema", schema={"type": "object"})


def _structural_tag(value: object, param: str) -> AnswerFormat:
    message = f"{param}: structural_tag is not supported: send tools with strict functions instead"
    raise InvalidParameter(message, param)


Read = Callable[[object, str], AnswerFormat]

FIELDS: dict[str, Read] = {
    "guided_json": _schema,
    "guided_regex": partial(_text, "regex"),
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": partial(_text, "regex"),
    "ebnf": partial(_text, "ebnf"),
    "structural_tag": _structural_tag,
}
"""Parameters of vLLM and SGLang, each with its reader."""

STRUCTURES: dict[str, Read] = {
    "json": _schema,
    "regex": partial(_text, "regex"),
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}
"""Fields of vLLM's structured_outputs, each with its reader."""


NEEDS = {
    "json_schema": "an object json_schema with a schema",
    "regex": "a string regex",
    "grammar": "a string grammar",
}
"""The field that a response_format of each type must have."""


def _response_format(value: object) -> AnswerFormat | None:
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object", "schema": schema, **about}:
            return _strict(schema, about)
        case {"type": "json_object"}:
            return _json_object(value, FORMAT)
        case {"type": "json_schema", "json_schema": {"schema": schema, **about}}:
            return _strict(schema, about)
        case {"type": "json_schema", "schema": schema, **about}:
            return _strict(schema, about)
        case {"type": "regex", "regex": str(text)} | {"type": "regex", "pattern": str(text)}:
            return AnswerFormat(FORMAT, "regex", text)
        case {"type": "grammar", "grammar": str(text)}:
            return _grammar(text, FORMAT)
        case {"type": "structural_tag"}:
            return _structural_tag(value, FORMAT)
        case {"type": str(kind)} if kind in NEEDS:
            raise InvalidParameter(f"{FORMAT} of type {kind} needs {NEEDS[kind]}", FORMAT)
    asked = value.get("type") if isinstance(value, dict) else value
    known = "text, json_object, json_schema, regex or grammar"
    raise InvalidParameter(f"{FORMAT} must be of type {known}, not {printable(asked)}", FORMAT)


def _strict(schema: object, about: Mapping[Any, Any]) -> AnswerFormat:
    """Return the format for a schema, with `strict` from the object around it."""
    return AnswerFormat(FORMAT, "json_schema", schema=schema, strict=strict_in(about, FORMAT))
