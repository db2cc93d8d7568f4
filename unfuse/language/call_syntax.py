"""Incremental parsers of a single tool call, one per format, fed character by character."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unfuse.core.text import SEPARATOR, CallFormat

#: A parser as a generator: it receives characters by `send`, and returns a value when its element is complete.
Parsing = Generator[None, str, Any]

#: What a parser emits: the kind, its text, and the model's text for it.
Event = tuple[Literal["call", "arguments", "mark"], str, str]

#: The longest text that is read as the head of a call.
MAX_NAME = 128

#: The white space of JSON.
SPACE = " \r\n\t"

#: The characters of JSON outside strings, and of unquoted words that models write.
_JSON = frozenset(' \r\n\t,:"[]{}+-.') | frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_OPENED = re.compile(r"\n[ \t]*<parameter=([^>\n]{1,128})>")
_CONSTANTS = {"true": True, "false": False, "null": None}


class NotACall(Exception):
    """The text started like a call but is not one."""


@dataclass
class ParsedCall:
    """The parsed beginning of a JSON object that may be a call."""

    #: The function's name; "" before it was parsed.
    name: str = ""
    #: Arguments as text, if they came before the name.
    arguments: str = ""
    #: How many objects are open.
    depth: int = 1


class CallInput:
    """The input characters of one call, and the events that the parser emits."""

    def __init__(self) -> None:
        self.reset("")

    def reset(self, start: str) -> None:
        """Prepare for a new call. `start` is its text that was already consumed."""
        self._pending = [*start]  # consumed, but not yet part of an event
        self._returned = ""  # a character that was put back
        self._events = list[Event]()
        self._streams = False  # whether pending characters are arguments
        self.started = False  # whether this is certainly a call

    def next(self) -> Parsing:
        """Return the next character."""
        if self._returned:
            char, self._returned = self._returned, ""
        else:
            char = yield
        self._pending.append(char)
        return char

    def unread(self) -> None:
        """Return the last character to the input, so that `next` returns it again."""
        self._returned = self._pending.pop()

    def emit(self, kind: Literal["call", "arguments", "mark"], text: str) -> None:
        """Emit an event that covers all pending characters."""
        self.started = self.started or kind == "call"
        self._events.append((kind, text, "".join(self._pending)))
        self._pending.clear()

    def write(self, text: str) -> None:
        """Replace the last character by this text in the streamed arguments."""
        if self._streams:
            char = self._pending.pop()
            self._flush()
            self._pending.append(char)
            self.emit("arguments", text)

    def stream(self, on: bool) -> None:
        """Turn on or off emitting the following characters unchanged as arguments."""
        if self._streams:
            self._flush()
        self._streams = on

    def pop_events(self) -> list[Event]:
        """Return the events since the last call."""
        if self._streams:
            self._flush()
        events, self._events = self._events, []
        return events

    def remaining_text(self) -> str:
        """Return the consumed characters that are not part of an event."""
        return "".join(self._pending) + self._returned

    def _flush(self) -> None:
        if self._pending:
            self.emit("arguments", "".join(self._pending))


class CallParsers:
    """The call parsers for one answer.

    They raise NotACall for other text, and for a function that is not offered.
    """

    def __init__(
        self, format: CallFormat, functions: Mapping[str, Mapping[str, str]], chars: CallInput, several: bool
    ) -> None:
        self._format = format
        self._functions = functions
        self._chars = chars
        self._several = several
        self._tagged: TaggedArguments | None = None

    def parse(self, start: str) -> Parsing:
        """Parse the rest of a call whose beginning `start` was consumed."""
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
        """Complete the arguments as far as possible, because the answer ended within a call."""
        if self._tagged is not None:
            self._chars.emit("arguments", (self._tagged.argument() if self._tagged.has_value else "") + "}")

    def _emit_call(self, name: str) -> None:
        """Emit the start of a call. Raises NotACall if the function is not offered."""
        if name not in self._functions:
            raise NotACall
        self._chars.emit("call", name)

    def _space(self) -> Parsing:
        """Return the next character that is not white space."""
        while (char := (yield from self._chars.next())) in SPACE:
            pass
        return char

    def _until(self, mark: str, stops: str = "\n") -> Parsing:
        """Return the text before a mark, and consume the mark.

        Raises NotACall at a character in `stops`.
        """
        text = ""
        while not text.endswith(mark):
            text += yield from self._chars.next()
            if text[-1] in stops or len(text) > MAX_NAME + len(mark):
                raise NotACall
        return text.removesuffix(mark)

    def _json(self, start: str) -> Parsing:
        """Parse an object with a name and arguments, also in a list or code fence."""
        char = start if start in ("{", "[") else (yield from self._space())
        if char == "`":
            yield from self._until("\n", stops="")
            char = yield from self._space()
        if char == "[":
            char = yield from self._space()
        yield from self._object(char)

    def _object(self, char: str) -> Parsing:
        """Parse an object with a name, arguments and any other keys, in any order.

        The arguments are an object or a string. Also accepts OpenAI's form, with both in an object `function`.
        """
        if char != "{":
            raise NotACall
        call = ParsedCall()
        while call.depth:
            char = yield from self._space()
            if char == "}":
                call.depth -= 1
            elif char == '"':
                yield from self._field(call)
            elif char == "{" and call == ParsedCall():
                call.depth += 1  # some models double the braces, as their template does
            elif char != ",":
                self._chars.unread()
                break

        if not self._chars.started:
            # In a format without marks, an object with a name but no arguments may just be an answer in JSON.
            if not call.name or call.depth or self._format.bare:
                raise NotACall
            self._emit_call(call.name)
            self._chars.emit("arguments", "{}")

    def _field(self, call: ParsedCall) -> Parsing:
        """Parse a key, whose opening quote was consumed, and its value."""
        key = yield from self._string()
        if (yield from self._space()) != ":":
            raise NotACall
        char = yield from self._space()
        if key in ("arguments", "parameters") and not self._chars.started:
            call.arguments = yield from self._arguments(char, call.name)
        elif key in ("name", "function") and char == '"':
            name = yield from self._string()
            call.name = call.name or name
        elif key == "function" and char == "{":
            call.depth += 1
        else:
            yield from self._other(char)

        if call.name and call.arguments and not self._chars.started:
            self._emit_call(call.name)
            self._chars.emit("arguments", call.arguments)

    def _arguments(self, char: str, name: str) -> Parsing:
        """Return the arguments as text; "" if streamed, because the name was known."""
        if char == "{" and name:
            self._chars.unread()
            self._emit_call(name)
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
        """Return the rest of an object or list, up to its end.

        Also ends at a character that JSON does not allow, if the call is certain; else raises NotACall. Line breaks and
        other control characters in strings are escaped, as JSON requires.
        """
        depth = 1
        text = list[str]()
        in_string = escaped = False
        while depth:
            char = yield from self._chars.next()
            if in_string and char < " ":
                char, escaped = json.dumps(char)[1:-1], False
                self._chars.write(char)
            elif in_string:
                in_string, escaped = escaped or char != '"', char == "\\" and not escaped
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
            elif char == '"':
                in_string = True
            elif char not in _JSON:
                if not self._chars.started:
                    raise NotACall
                self._chars.unread()
                break
            text.append(char)
        return "".join(text)

    def _string(self) -> Parsing:
        """Return the value of a JSON string whose opening quote was consumed."""
        chars, escaped = ['"'], False
        while True:
            char = yield from self._chars.next()
            chars.append(char)
            if char == '"' and not escaped:
                break
            escaped = char == "\\" and not escaped
        try:
            return json.loads("".join(chars), strict=False)
        except ValueError as error:
            raise NotACall from error

    def _other(self, char: str) -> Parsing:
        """Skip the value of another key.

        Until the call is certain, raises NotACall for an object or list.
        """
        if char == '"':
            yield from self._string()
        elif char in "{[":
            if not self._chars.started:
                raise NotACall
            yield from self._nested()
        else:
            yield from self._word(char)

    def _word(self, char: str) -> Parsing:
        """Return a number or constant that begins with this character."""
        word = ""
        while char in _JSON and char not in ' \r\n\t,:"[]{}':
            word += char
            char = yield from self._chars.next()
        if not word:
            raise NotACall
        self._chars.unread()
        return word

    def _named_arguments(self) -> Parsing:
        """Parse `NAME mark JSON`, or `TYPE mark NAME newline JSON`.

        The JSON may be in a code fence.
        """
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
        """Parse a list of objects, or a name, an optional id and arguments."""
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
        """Parse the arguments of a call whose name is known."""
        if char != "{":
            raise NotACall

        # "" would mean that the name comes later. A blank is no function's name, so it raises NotACall.
        yield from self._arguments(char, name or " ")

    def _tags(self, start: str) -> Parsing:
        """Parse a function tag with one tag per parameter.

        Also accepts JSON in the outer tag.
        """
        if start == "<tool_call>":
            char = yield from self._space()
            if char in "{[":
                char = char if char == "{" else (yield from self._space())
                yield from self._object(char)
                return
            if char + (yield from self._until("=")) != "<function":
                raise NotACall

        name = (yield from self._until(">")).strip("\"' ")
        self._emit_call(name)
        self._tagged = TaggedArguments(self._functions[name])
        self._chars.emit("arguments", "{")

        tag = yield from self._tag()
        while tag == "<parameter=":
            self._tagged.start_value((yield from self._until(">")).strip("\"' "))
            tag = yield from self._tagged_value()
        self._chars.emit("arguments", "}")

    def _tag(self) -> Parsing:
        """Return a tag up to its first = or >; "" if no tag follows."""
        if (yield from self._space()) != "<":
            self._chars.unread()
            return ""
        tag = "<"
        while tag[-1] not in "=>" and len(tag) < MAX_NAME:
            tag += yield from self._chars.next()
        return tag

    def _tagged_value(self) -> Parsing:
        """Parse the value of a parameter, and return the beginning of the call's next tag."""
        assert self._tagged
        while True:
            tag = self._tagged.add((yield from self._chars.next()))
            if tag:
                self._chars.emit("arguments", self._tagged.argument())
                return tag

    def _python(self, start: str) -> Parsing:
        """Parse a Python list of calls whose keyword arguments are literals."""
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
            self._emit_call(name)
            self._chars.emit("arguments", arguments)
            char = "]" if not self._several else (yield from self._space())
            if char == "]":
                return
            if char != ",":
                self._chars.unread()
                return

    def _parentheses(self) -> Parsing:
        """Return the text up to the closing parenthesis; the opening one was consumed."""
        depth = 1
        text = ""
        quote, escaped = "", False
        while depth:
            char = yield from self._chars.next()
            if quote:
                quote = "" if char == quote and not escaped else quote
                escaped = char == "\\" and not escaped
            elif char in "\"'":
                quote = char
            elif char in "([{":
                depth += 1
            elif char in ")]}":
                depth -= 1
            text += char
        return text[:-1]


class TaggedArguments:
    """Converts arguments written as tags to JSON, by the types of the function's parameters."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self._types = types
        self._count = 0  # how many arguments `argument` has returned
        self._name = ""  # the current parameter
        self._value = list[str]()  # the characters of its value

    def start_value(self, name: str) -> None:
        """Start the value of this parameter."""
        self._name, self._value = name, []

    def add(self, char: str) -> str:
        """Add a character. Returns the tag after the value once it is complete, else "".

        A closing tag belongs to the value unless another tag of the call follows it. If the model omits the closing
        tag, the value ends with the call.
        """
        self._value.append(char)
        if char not in "=>":
            return ""
        # Only the end is examined, so that the cost of a long value is linear in its length.
        tail = "".join(self._value[-MAX_NAME:])
        tag = next((tag for tag in ("<parameter=", "</function>", "</tool_call>") if tail.endswith(tag)), "")
        text_before = tail.removesuffix(tag).rstrip()
        if not tag or not (text_before.endswith("</parameter>") or self._ends_call(tag, text_before)):
            return ""
        self._value = ["".join(self._value).removesuffix(tag)]
        return tag

    def _ends_call(self, tag: str, text_before: str) -> bool:
        """Return whether this tag ends the call although the value has no closing tag."""
        has_end_tags = tag == "</tool_call>" and text_before.endswith("\n</function>")
        return has_end_tags and "<function=" not in "".join(self._value)

    @property
    def has_value(self) -> bool:
        """Whether there is a value that `argument` has not returned yet."""
        return bool(self._name)

    def argument(self) -> str:
        """Return the value as a JSON member, after a comma unless it is the first.

        If closing tags were omitted, it contains several values, and all their members are returned.
        """
        text = "".join(self._value).rstrip()
        for tag in ("</tool_call>", "</function>", "</parameter>"):
            text = text.removesuffix(tag).rstrip() if tag != "</parameter>" else text.removesuffix(tag)
        members = ""
        while (omitted_end := _OPENED.search(text)) and omitted_end[1] in self._types and omitted_end[1] != self._name:
            members += self._member(text[: omitted_end.start()])
            self._name = omitted_end[1]
            text = text[omitted_end.end() :]
        return members + self._member(text)

    def _member(self, text: str) -> str:
        """Return the current parameter with this value as a JSON member, and end it."""
        text = text.removeprefix("\n").removesuffix("\n")
        value = json_value(text, self._types.get(self._name, "string").split("|"))
        member = f"{', ' if self._count else ''}{json.dumps(self._name, ensure_ascii=False)}: {value}"
        self._count += 1
        self._name = ""
        return member


def json_value(text: str, types: Sequence[str]) -> str:
    """Return a text as JSON of one of these types, else as a string."""
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
    """Raise ValueError, because NaN and Infinity are not JSON."""
    raise ValueError(constant)


def _python_value(text: str) -> str:
    """Return a Python list or dict literal as JSON; "" for other text."""
    if text[:1] not in ("[", "{"):
        return ""
    try:
        return json.dumps(_literal(ast.parse(text, mode="eval").body), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, NotACall):
        return ""


def keywords(text: str) -> str:
    """Return the keyword arguments of a Python call as JSON.

    Raises NotACall for positional or non-literal arguments.
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise NotACall
        values = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
        arguments.encode()  # raises ValueError for a lone surrogate, which cannot be sent
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NotACall from error
    if None in values:
        raise NotACall
    return arguments


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, also with JSON's constants. Raises NotACall for other code."""
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
    """Return the value of a string literal. Raises NotACall for other code."""
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    raise NotACall


def object_in(text: str) -> str:
    """Return the JSON object in a string of arguments, as text. Raises NotACall."""
    try:
        value = json.loads(text or "{}")
        text.encode()  # raises ValueError for a lone surrogate, which cannot be sent
    except (ValueError, RecursionError) as error:
        raise NotACall from error
    if not isinstance(value, dict):
        raise NotACall
    return text or "{}"
