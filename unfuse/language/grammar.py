"""Grammars: what the text of an answer must be, and the messages of those who follow one."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Literal

import msgspec

from unfuse.core.codec import encode
from unfuse.core.errors import InvalidParameter, ProtocolError

MAX_CHARS = 256 * 1024  # the longest grammar, in characters

Kind = Literal["json_schema", "regex", "lark", "ebnf"]


class Grammar(msgspec.Struct, frozen=True):
    """A JSON schema (made by `schema_text`), a regular expression, or a grammar, for llguidance.

    A grammar is in Lark's notation, or in the EBNF of llama.cpp (GBNF) and XGrammar.
    """

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
