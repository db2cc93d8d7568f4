"""Structured outputs: the answer format that a request requires.

Accepts the parameters of OpenAI, vLLM, SGLang and llama.cpp.
"""

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

#: The request fields of OpenAI and of vLLM.
FORMAT, STRUCTURED = "response_format", "structured_outputs"

#: The most strings of a choice.
MAX_CHOICES = 1000

#: Options of vLLM's structured_outputs that are accepted and ignored.
WITHOUT_EFFECT = (
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
    "_backend",
    "_backend_was_auto",
)


class AnswerFormat(msgspec.Struct, frozen=True):
    """The required format of an answer: a JSON schema, or a grammar as text."""

    #: The request field that sets the format, for error messages.
    param: str
    #: The notation.
    kind: Kind
    #: The grammar, unless it is a JSON schema.
    text: str = ""
    #: The JSON schema.
    schema: object = None
    #: Whether the schema has `strict` set.
    strict: bool = False

    def grammar(self, relaxed: bool = False) -> Grammar:
        """Return the grammar. Raises InvalidParameter.

        `relaxed`: relaxes a schema as in `schema_text`.
        """
        if self.kind != "json_schema":
            return Grammar(self.kind, self.text)
        return Grammar("json_schema", schema_text(self.schema, self.strict, self.param, relaxed))


def answer_format(fields: Mapping[str, Any]) -> AnswerFormat | None:
    """Return the format that a request requires; None for free text.

    Raises InvalidParameter if it is malformed, or if several fields set a format.
    """
    formats = [answer for answer in _read_formats(fields) if answer is not None]
    if len(formats) > 1:
        first, second = formats[0].param, formats[1].param
        raise InvalidParameter(f"{first} and {second} both set the format of the answer: send one of them", second)
    return formats[0] if formats else None


def _read_formats(fields: Mapping[str, Any]) -> Iterator[AnswerFormat | None]:
    """Yield the formats in all fields of a request. Raises InvalidParameter."""
    yield _response_format(fields.get(FORMAT))
    for name, read_field in FIELDS.items():
        if (value := fields.get(name)) is not None:
            yield read_field(value, name)

    structured = fields.get(STRUCTURED)
    if structured is None:
        return
    if not isinstance(structured, dict):
        raise InvalidParameter(f"{STRUCTURED} must be an object, not {printable(structured)}", STRUCTURED)
    for name, value in structured.items():
        if name not in STRUCTURES and name not in WITHOUT_EFFECT:
            names = ", ".join(STRUCTURES)
            raise InvalidParameter(f"{STRUCTURED} has no {printable(name)}: send one of {names}", STRUCTURED)
        # `json_object: false` sets no format.
        if name in STRUCTURES and value is not None and value is not False:
            yield STRUCTURES[name](value, STRUCTURED)


def _schema(value: object, param: str) -> AnswerFormat:
    """Read a JSON schema, as an object or as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"{param} must be a JSON schema, but is not JSON: {error}", param) from error
    return AnswerFormat(param, "json_schema", schema=value)


def _text(kind: Kind, value: object, param: str) -> AnswerFormat:
    """Read a grammar of this kind."""
    if not isinstance(value, str):
        raise InvalidParameter(f"{param} must be a string, not {printable(value)}", param)
    return AnswerFormat(param, kind, value)


def _grammar(value: object, param: str) -> AnswerFormat:
    """Read a grammar as vLLM does.

    It is EBNF if it contains `::=`, otherwise in Lark's notation.
    """
    return _text("ebnf" if isinstance(value, str) and "::=" in value else "lark", value, param)


def _choice(value: object, param: str) -> AnswerFormat:
    """Read a list of strings, one of which is the answer."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidParameter(f"{param} must be a list of 1 to {MAX_CHOICES} strings", param)
    texts = [text for text in value if isinstance(text, str)]
    if len(texts) < len(value):
        raise InvalidParameter(f"{param} must be a list of strings", param)
    choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return AnswerFormat(param, "lark", f"start: {choices}")


def _json_object(value: object, param: str) -> AnswerFormat:
    """Return the format of any JSON object."""
    return AnswerFormat(param, "json_schema", schema={"type": "object"})


def _structural_tag(value: object, param: str) -> AnswerFormat:
    """Raise InvalidParameter, because structural tags are not supported."""
    message = f"{param}: structural_tag is not supported: send tools with strict functions instead"
    raise InvalidParameter(message, param)


#: A reader of a field: its value and name become a format. Raises InvalidParameter.
FieldReader = Callable[[object, str], AnswerFormat]

#: Parameters of vLLM and SGLang, each with its reader.
FIELDS: dict[str, FieldReader] = {
    "guided_json": _schema,
    "guided_regex": partial(_text, "regex"),
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": partial(_text, "regex"),
    "ebnf": partial(_text, "ebnf"),
    "structural_tag": _structural_tag,
}

#: Fields of vLLM's structured_outputs, each with its reader.
STRUCTURES: dict[str, FieldReader] = {
    "json": _schema,
    "regex": partial(_text, "regex"),
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}

#: The field that a response_format of each type must have.
NEEDS = {
    "json_schema": "an object json_schema with a schema",
    "regex": "a string regex",
    "grammar": "a string grammar",
}


def _response_format(value: object) -> AnswerFormat | None:
    """Read OpenAI's `response_format`; None for free text. Raises InvalidParameter."""
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object", "schema": schema, **options}:
            return _strict(schema, options)
        case {"type": "json_object"}:
            return _json_object(value, FORMAT)
        case {"type": "json_schema", "json_schema": {"schema": schema, **options}}:
            return _strict(schema, options)
        case {"type": "json_schema", "schema": schema, **options}:
            return _strict(schema, options)
        case {"type": "regex", "regex": str(text)} | {"type": "regex", "pattern": str(text)}:
            return AnswerFormat(FORMAT, "regex", text)
        case {"type": "grammar", "grammar": str(text)}:
            return _grammar(text, FORMAT)
        case {"type": "structural_tag"}:
            return _structural_tag(value, FORMAT)
        case {"type": str(kind)} if kind in NEEDS:
            raise InvalidParameter(f"{FORMAT} of type {kind} needs {NEEDS[kind]}", FORMAT)

    type_name = value.get("type") if isinstance(value, dict) else value
    types = "text, json_object, json_schema, regex or grammar"
    raise InvalidParameter(f"{FORMAT} must be of type {types}, not {printable(type_name)}", FORMAT)


def _strict(schema: object, options: Mapping[Any, Any]) -> AnswerFormat:
    """Return the format for a schema, with `strict` from the object around it."""
    return AnswerFormat(FORMAT, "json_schema", schema=schema, strict=strict_in(options, FORMAT))
