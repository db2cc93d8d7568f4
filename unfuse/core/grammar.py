"""Grammars: what the text of an answer must be, and the messages of those who follow one."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Annotated, Literal

import msgspec

from unfuse.core.codec import encode
from unfuse.core.errors import InvalidParameter, ProtocolError
from unfuse.core.parameters import printable

FORMAT = "response_format"

GRAMMAR = "grammar"  # the upload that has a request's grammar, and the parameter that has its hash
MAX_CHARS = 256 * 1024  # the longest grammar, in characters

GUIDANCE = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n]{0,16}",
}
"""How JSON is written, in llguidance's words: with white space as one likes, but not for ever."""

Kind = Literal["json_schema", "regex", "lark"]


class Grammar(msgspec.Struct, frozen=True):
    """A JSON schema (`schema_text`), a regular expression or a grammar in Lark's notation, as llguidance reads them."""

    kind: Kind
    text: str


class Compiled(msgspec.Struct, frozen=True):
    """A grammar is compiled, or cannot be, for this reason."""

    error: str = ""


class Follow(msgspec.Struct, frozen=True, array_like=True):
    """A text has these ids from number `start` on: say what may follow; or it is `over`."""

    text: int
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    ids: bytes = b""
    over: bool = False


class Allowed(msgspec.Struct, frozen=True, array_like=True):
    """Behind `length` ids of a text, those tokens may follow whose bit is set; none, for this reason."""

    text: int
    length: int
    mask: bytes = b""
    error: str = ""


def packed(grammar: Grammar, param: str) -> bytes:
    """As an upload has it. Raises InvalidParameter, which names this parameter."""
    if len(grammar.text) > MAX_CHARS:
        raise InvalidParameter(f"{param}: {len(grammar.text)} characters of grammar, of at most {MAX_CHARS}", param)
    try:
        return encode(grammar)
    except ProtocolError as error:
        raise InvalidParameter(f"{param}: half a surrogate pair is no text", param) from error


def digest(grammar: bytes) -> str:
    """A hash of a packed grammar."""
    return blake2b(grammar, digest_size=16).hexdigest()


def schema_text(schema: object, strict: object, param: str) -> str:
    """A JSON schema as grammars have it. One that says not to be strict lets pass what it cannot be held to.

    Raises InvalidParameter, which names this parameter.
    """
    if schema is True or schema is False:
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise InvalidParameter(f"{param}: a JSON schema must be an object, not {printable(schema)}", param)
    if strict not in (None, True, False):
        raise InvalidParameter(f"{param}: strict must be true or false, not {printable(strict)}", param)
    lenient = strict is False
    try:
        return json.dumps(schema | {"x-guidance": {**GUIDANCE, "lenient": lenient, "coerce_one_of": lenient}})
    except RecursionError as error:
        raise InvalidParameter(f"{param}: the JSON schema is nested too deeply", param) from error


def asked_grammar(value: object) -> Grammar | None:
    """The grammar that a `response_format` asks for; None of type text. Raises InvalidParameter."""
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar("json_schema", schema_text({"type": "object"}, None, FORMAT))
        case {"type": "json_schema", "json_schema": {"schema": schema, **about}}:
            return Grammar("json_schema", schema_text(schema, about.get("strict"), FORMAT))
        case {"type": "regex", "regex": str(text)}:
            return Grammar("regex", text)
        case {"type": "grammar", "grammar": str(text)}:
            return Grammar("lark", text)
        case {"type": "json_schema" | "regex" | "grammar" as kind}:
            needs = {"json_schema": "json_schema, with a schema in it", "regex": "a text regex"}
            raise InvalidParameter(f"{FORMAT} of type {kind} needs {needs.get(kind, 'a text grammar')}", FORMAT)
    asked = value.get("type") if isinstance(value, dict) else value
    known = "text, json_object, json_schema, regex or grammar"
    raise InvalidParameter(f"{FORMAT} must be of type {known}, not {printable(asked)}", FORMAT)
