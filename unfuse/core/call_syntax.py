"""Parsers of a single call in each format, which are given the text of an answer character by character."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unfuse.core.call_formats import SEPARATOR, CallFormat

#: A parser: it is sent characters, and returns a value when it has read what it is for.
Parsing = Generator[None, str, Any]
Event = tuple[Literal["call", "arguments", "mark"], str, str]

MAX_NAME = 128  # the longest text that is read as the head of a call
SPACE = " \r\n\t"
_JSON = frozenset(' \r\n\t,:"[]{}+-.') | frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_OPENED = re.compile(r"\n[ \t]*<parameter=([^>\n]{1,128})>")
_CONSTANTS = {"true": True, "false": False, "null": None}


class NotACall(Exception):
    """What began like a call is none."""


@dataclass
class Found:
    """What is known of an object that may be a call."""

    name: str = ""
    #: Arguments as text, if they were there before the name.
    arguments: str = ""
    #: How many objects are open.
    depth: int = 1


class Chars:
    """The characters of a call, as parsers take them, and the events that they make of them."""

    def __init__(self) -> None:
        self.reset("")

    def reset(self, start: str) -> None:
        """Begin with a call that starts with this text, which is read already."""
        self._pending = [*start]  # read, and not part of an event
        self._returned = ""  # a character that was read, and is to be read again
        self._events = list[Event]()
        self._streams = False  # whether what is pending are arguments
        self.started = False  # whether a call is certain

    def next(self) -> Parsing:
        """The next character."""
        if self._returned:
            char, self._returned = self._returned, ""
        else:
            char = yield
        self._pending.append(char)
        return char

    def put_back(self) -> None:
        """Have the last character read again."""
        self._returned = self._pending.pop()

    def emit(self, kind: Literal["call", "arguments", "mark"], text: str) -> None:
        """Add an event that was made of all that is pending."""
        self.started = self.started or kind == "call"
        self._events.append((kind, text, "".join(self._pending)))
        self._pending.clear()

    def write(self, text: str) -> None:
        """Have this text in the arguments that are streamed, in place of the last character."""
        if self._streams:
            char = self._pending.pop()
            self._flush()
            self._pending.append(char)
            self.emit("arguments", text)

    def stream(self, on: bool) -> None:
        """Whether the characters from here on are arguments, just as they are."""
        if self._streams:
            self._flush()
        self._streams = on

    def taken(self) -> list[Event]:
        """The events since the last time."""
        if self._streams:
            self._flush()
        events, self._events = self._events, []
        return events

    def left(self) -> str:
        """What is read, and not part of an event."""
        return "".join(self._pending) + self._returned

    def _flush(self) -> None:
        if self._pending:
            self.emit("arguments", "".join(self._pending))


class Syntaxes:
    """The parsers for one answer. They raise NotACall for what is none, also if its function is not offered."""

    def __init__(
        self, format: CallFormat, functions: Mapping[str, Mapping[str, str]], chars: Chars, several: bool
    ) -> None:
        self._format, self._functions, self._chars, self._several = format, functions, chars, several
        self._tagged: Tagged | None = None

    def parse(self, start: str) -> Parsing:
        """Read a call behind this start of it."""
        self._tagged = None
        match self._format.syntax:
            case "tags":
                yield from self._tags(start)
            case "named":
                yield from self._named_arguments()
            case "listed":
                yield from self._listed(start)
            case "python":
                yield from self._python(start)
            case "json":
                yield from self._json(start)
        self._chars.emit("mark", "")

    def end(self) -> None:
        """The answer has ended within a call: complete what can be."""
        if self._tagged is not None:
            self._chars.emit("arguments", (self._tagged.argument() if self._tagged.begun else "") + "}")

    def _begin(self, name: str) -> None:
        if name not in self._functions:
            raise NotACall
        self._chars.emit("call", name)

    def _space(self) -> Parsing:
        """The next character that is no white space."""
        while (char := (yield from self._chars.next())) in SPACE:
            pass
        return char

    def _until(self, mark: str, stops: str = "\n") -> Parsing:
        """The text before a mark, which has none of these characters. The mark is read, too."""
        text = ""
        while not text.endswith(mark):
            text += yield from self._chars.next()
            if text[-1] in stops or len(text) > MAX_NAME + len(mark):
                raise NotACall
        return text.removesuffix(mark)

    def _json(self, start: str) -> Parsing:
        """An object with a name and arguments, also as the first one of a list, or in a fence behind a mark."""
        char = start if start in ("{", "[") else (yield from self._space())
        if char == "`":
            yield from self._until("\n", stops="")
            char = yield from self._space()
        if char == "[":
            char = yield from self._space()
        yield from self._object(char)

    def _object(self, char: str) -> Parsing:
        """An object whose arguments may be an object or a text, and which may have other keys, in any order.

        OpenAI's form, where both are in an object `function`, is read too.
        """
        if char != "{":
            raise NotACall
        found = Found()
        while found.depth:
            char = yield from self._space()
            if char == "}":
                found.depth -= 1
            elif char == '"':
                yield from self._field(found)
            elif char == "{" and found == Found():
                found.depth += 1  # some models double the braces, as their template does
            elif char != ",":
                self._chars.put_back()
                break
        if not self._chars.started:
            if not found.name or found.depth or self._format.bare:
                raise NotACall
            self._begin(found.name)
            self._chars.emit("arguments", "{}")

    def _field(self, found: Found) -> Parsing:
        """Read a key, whose first quote is read, and its value."""
        key = yield from self._string()
        if (yield from self._space()) != ":":
            raise NotACall
        char = yield from self._space()
        if key in ("arguments", "parameters") and not self._chars.started:
            found.arguments = yield from self._arguments(char, found.name)
        elif key in ("name", "function") and char == '"':
            name = yield from self._string()
            found.name = found.name or name
        elif key == "function" and char == "{":
            found.depth += 1
        else:
            yield from self._other(char)
        if found.name and found.arguments and not self._chars.started:
            self._begin(found.name)
            self._chars.emit("arguments", found.arguments)

    def _arguments(self, char: str, name: str) -> Parsing:
        """Arguments as text; "" if the name was known, so that they were streamed."""
        if char == "{" and name:
            self._chars.put_back()
            self._begin(name)
            self._chars.stream(True)
            yield from self._chars.next()
            yield from self._nested()
            self._chars.stream(False)
            return ""
        if char == "{":
            return "{" + (yield from self._nested())
        if char == '"':
            text = yield from self._string()
            return object_in(text)
        if char == "n" and (yield from self._word(char)) == "null":
            return "{}"
        raise NotACall

    def _nested(self) -> Parsing:
        """The rest of an object or list, up to where it ends, or is none any more.

        Line breaks and other control characters in texts are escaped, as JSON has them.
        """
        open, text = 1, list[str]()
        quoted = escaped = False
        while open:
            char = yield from self._chars.next()
            if quoted and char < " ":
                char, escaped = json.dumps(char)[1:-1], False
                self._chars.write(char)
            elif quoted:
                quoted, escaped = escaped or char != '"', char == "\\" and not escaped
            elif char in "{[":
                open += 1
            elif char in "}]":
                open -= 1
            elif char == '"':
                quoted = True
            elif char not in _JSON:
                if not self._chars.started:
                    raise NotACall
                self._chars.put_back()
                break
            text.append(char)
        return "".join(text)

    def _string(self) -> Parsing:
        """The text of a JSON string whose first quote is read."""
        written, escaped = ['"'], False
        while True:
            char = yield from self._chars.next()
            written.append(char)
            if char == '"' and not escaped:
                break
            escaped = char == "\\" and not escaped
        try:
            return json.loads("".join(written), strict=False)
        except ValueError as error:
            raise NotACall from error

    def _other(self, char: str) -> Parsing:
        """Pass over the value of a key that says nothing of the call. Before that is certain, only a simple one."""
        if char == '"':
            yield from self._string()
        elif char in "{[":
            if not self._chars.started:
                raise NotACall
            yield from self._nested()
        else:
            yield from self._word(char)

    def _word(self, char: str) -> Parsing:
        """A number or constant that begins with this character."""
        word = ""
        while char in _JSON and char not in ' \r\n\t,:"[]{}':
            word += char
            char = yield from self._chars.next()
        if not word:
            raise NotACall
        self._chars.put_back()
        return word

    def _named_arguments(self) -> Parsing:
        """A name and a mark, or a type, a mark and the name on a line; then JSON, perhaps in a fence."""
        head = yield from self._until(SEPARATOR, stops="")
        name = head.strip().removeprefix(self._format.starts[1]).strip()
        if name == "function":
            name = (yield from self._until("\n", stops="")).strip()
        char = yield from self._space()
        if char == "`":
            yield from self._until("\n", stops="")
            char = yield from self._space()
        yield from self._arguments_of(name, char)

    def _listed(self, start: str) -> Parsing:
        """A list of objects, or a name, perhaps an id, and arguments."""
        char = start if start == "{" else (yield from self._space())
        if char == "[":
            char = yield from self._space()
        if char == "{":
            yield from self._object(char)
            return
        name = ""
        while char not in "[{" + SPACE and len(name) < MAX_NAME:
            name += char
            char = yield from self._chars.next()
        if char in SPACE:
            char = yield from self._space()
        while char == "[":
            mark = yield from self._until("]")
            if mark == "CALL_ID":
                yield from self._until("[")
                mark = yield from self._until("]")
            if mark != "ARGS":
                raise NotACall
            char = yield from self._space()
        yield from self._arguments_of(name, char)

    def _arguments_of(self, name: str, char: str) -> Parsing:
        """The arguments of a call whose name is known."""
        if char != "{":
            raise NotACall
        yield from self._arguments(char, name or " ")

    def _tags(self, start: str) -> Parsing:
        """A tag for the function, in it one for each parameter. JSON in the outer tag is read too."""
        if start == "<tool_call>":
            char = yield from self._space()
            if char in "{[":
                char = char if char == "{" else (yield from self._space())
                yield from self._object(char)
                return
            if char + (yield from self._until("=")) != "<function":
                raise NotACall
        name = (yield from self._until(">")).strip("\"' ")
        self._begin(name)
        self._tagged = Tagged(self._functions[name])
        self._chars.emit("arguments", "{")
        tag = yield from self._tag()
        while tag == "<parameter=":
            self._tagged.begin((yield from self._until(">")).strip("\"' "))
            tag = yield from self._tagged_value()
        self._chars.emit("arguments", "}")

    def _tag(self) -> Parsing:
        """The beginning of a tag, up to its first = or >; "" where there is none."""
        if (yield from self._space()) != "<":
            self._chars.put_back()
            return ""
        tag = "<"
        while tag[-1] not in "=>" and len(tag) < MAX_NAME:
            tag += yield from self._chars.next()
        return tag

    def _tagged_value(self) -> Parsing:
        """Read the value of a parameter, and the beginning of the next tag of the call, which is returned."""
        assert self._tagged
        while True:
            tag = self._tagged.add((yield from self._chars.next()))
            if tag:
                self._chars.emit("arguments", self._tagged.argument())
                return tag

    def _python(self, start: str) -> Parsing:
        """A list of calls with keyword arguments that are literals."""
        if start != "[" and (yield from self._space()) != "[":
            raise NotACall
        while True:
            char = yield from self._space()
            name = ""
            while char.isalnum() or char in "_.-":
                name += char
                char = yield from self._chars.next()
            if char != "(" or name not in self._functions:
                raise NotACall
            arguments = keywords((yield from self._parentheses()))
            self._begin(name)
            self._chars.emit("arguments", arguments)
            char = "]" if not self._several else (yield from self._space())
            if char == "]":
                return
            if char != ",":
                self._chars.put_back()
                return

    def _parentheses(self) -> Parsing:
        """The text up to the parenthesis that closes the one that was read."""
        open, text = 1, ""
        quote, escaped = "", False
        while open:
            char = yield from self._chars.next()
            if quote:
                quote = "" if char == quote and not escaped else quote
                escaped = char == "\\" and not escaped
            elif char in "\"'":
                quote = char
            elif char in "([{":
                open += 1
            elif char in ")]}":
                open -= 1
            text += char
        return text[:-1]


class Tagged:
    """Arguments of a call that are written as tags, by the types of its function's parameters."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self._types, self._count = types, 0
        self._name, self._value = "", list[str]()

    def begin(self, name: str) -> None:
        """Read the value of this parameter."""
        self._name, self._value = name, []

    def add(self, char: str) -> str:
        """Add a character of the value; returns the tag behind it, once that is there.

        A closing tag that is not followed by another tag of the call belongs to the value. Where a model has left it
        out, the value ends with the call.
        """
        self._value.append(char)
        if char not in "=>":
            return ""
        end = "".join(self._value[-MAX_NAME:])
        tag = next((tag for tag in ("<parameter=", "</function>", "</tool_call>") if end.endswith(tag)), "")
        before = end.removesuffix(tag).rstrip()
        if not tag or not (before.endswith("</parameter>") or self._ends_call(tag, before)):
            return ""
        self._value = ["".join(self._value).removesuffix(tag)]
        return tag

    def _ends_call(self, tag: str, before: str) -> bool:
        """Whether a tag ends the call, though the value is not closed: no call within it does."""
        ends = tag == "</tool_call>" and before.endswith("\n</function>")
        return ends and "<function=" not in "".join(self._value)

    @property
    def begun(self) -> bool:
        """Whether a value was begun, and is not told yet."""
        return bool(self._name)

    def argument(self) -> str:
        """The value as JSON, with its name and what goes between it and the one before.

        It is several where the tags that close the first ones were left out.
        """
        text = "".join(self._value).rstrip()
        for tag in ("</tool_call>", "</function>", "</parameter>"):
            text = text.removesuffix(tag).rstrip() if tag != "</parameter>" else text.removesuffix(tag)
        written = ""
        while (found := _OPENED.search(text)) and found[1] in self._types and found[1] != self._name:
            written += self._one(text[: found.start()])
            self._name, text = found[1], text[found.end() :]
        return written + self._one(text)

    def _one(self, text: str) -> str:
        text = text.removeprefix("\n").removesuffix("\n")
        value = json_value(text, self._types.get(self._name, "string").split("|"))
        written = f"{', ' if self._count else ''}{json.dumps(self._name, ensure_ascii=False)}: {value}"
        self._count += 1
        self._name = ""
        return written


def json_value(text: str, types: Sequence[str]) -> str:
    """A text as JSON of one of these types; a text where it is of none."""
    word = text.strip()
    if word in ("null", "None") and "null" in types:
        return "null"
    if "string" in types:
        return json.dumps(text, ensure_ascii=False)
    word = word.lower() if word in ("True", "False") else word
    try:
        json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _python_value(word) or json.dumps(text, ensure_ascii=False)
    return word


def _refuse(constant: str) -> None:
    """Raise ValueError: NaN and Infinity are no JSON."""
    raise ValueError(constant)


def _python_value(text: str) -> str:
    """A list or dict of Python as JSON; "" for what is none."""
    if text[:1] not in ("[", "{"):
        return ""
    try:
        return json.dumps(_literal(ast.parse(text, mode="eval").body), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, NotACall):
        return ""


def keywords(text: str) -> str:
    """The keyword arguments of a Python call as JSON. Raises NotACall for others, and for what is no literal."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise NotACall
        values = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        written = json.dumps(values, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NotACall from error
    if None in values:
        raise NotACall
    return written


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_text(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise NotACall


def _text(key: ast.expr | None) -> str:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    raise NotACall


def object_in(text: str) -> str:
    """Arguments that were written as a text. Raises NotACall if that is no JSON object."""
    try:
        value = json.loads(text or "{}")
        text.encode()
    except (ValueError, RecursionError) as error:
        raise NotACall from error
    if not isinstance(value, dict):
        raise NotACall
    return text or "{}"
