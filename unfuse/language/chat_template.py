"""A model's chat template: from messages to the text of a prompt, in Jinja's sandbox and within bounds.

Special tokens in clients' texts stay plain text, while those of the template become tokens. Before the template is
rendered, a mark is inserted into each special token in a client's text. Special tokens that the template writes have no
mark. After rendering, each of them is replaced by an unguessable name, and the marks are removed. A copy of the
tokenizer, in which the special tokens have only these names, then encodes the text.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from unfuse.core.errors import ConfigError, InvalidParameter
from unfuse.language.messages import TEXT_PARTS

MAX_CHARACTERS = 32 * 1024 * 1024  # the longest prompt a template may make
MAX_S = 5.0  # seconds of computing that it may take for that

_deadline = ContextVar[float]("deadline", default=float("inf"))
Message = Mapping[str, Any]


class TemplateTooLarge(TemplateError):
    """A template takes too long, or renders too long a prompt."""


class _Generation(Extension):
    """{% generation %} marks what training looks at; here it is a block like any."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for templates, whose every loop and call looks at the clock.

    So none goes on for ever, even one without output. The clock is that of this thread's computing: a machine under
    load fails no prompt. A template belongs to a model, which is trusted not to use up memory on purpose.
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals.pop("lipsum")  # it makes as much text as it is told to, in a loop of its own
        self.globals |= {"raise_exception": _raise, "_on": _on}
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            on = nodes.Call(nodes.Name("_on", "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(on).set_lineno(loop.lineno))
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        if time.thread_time() > _deadline.get():
            raise TemplateTooLarge("it takes too long")
        return super().call(__context, __obj, *args, **kwargs)


class ChatTemplate:
    """A template. `source` names it in errors. Raises ConfigError for one that is not valid.

    It may take `seconds` of computing and make a prompt of `characters`.
    """

    def __init__(self, text: str, source: str, characters: int = MAX_CHARACTERS, seconds: float = MAX_S) -> None:
        self._characters, self._seconds, self.text = characters, seconds, text
        try:
            self._template = _Sandbox().from_string(text)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template of {source} is not valid: {error}") from error

    def prompt(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The text of a prompt. Raises InvalidParameter for messages that the template refuses, or fails on."""
        token = _deadline.set(time.thread_time() + self._seconds)
        made, length = [], 0
        try:
            told = [_with_arguments(message) for message in messages]
            for part in self._template.generate({**variables, "messages": told}):
                made.append(part)
                length += len(part)
                if length > self._characters:
                    raise TemplateTooLarge(f"it makes more than {self._characters} characters")
        except Exception as error:  # whatever somebody else's template raises
            reason = str(error) or type(error).__name__
            raise InvalidParameter(
                f"messages: the model's chat template fails on them: {reason}", "messages"
            ) from error
        finally:
            _deadline.reset(token)
        return "".join(made)


class CallArguments(dict[str, Any]):
    """Arguments of a call, which become JSON if a template converts them to text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return f"{self}{other}"

    def __radd__(self, other: str) -> str:
        return f"{other}{self}"


def _with_arguments(message: Message) -> Message:
    """Return a message with the arguments of its calls as `CallArguments`."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [_call(call) for call in calls]}


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": CallArguments(function["arguments"])}}


def plain(messages: Sequence[Message], shows: Collection[str] = ()) -> list[dict[str, Any]]:
    """Messages as templates read them: content as one text, and no key without a value.

    Content with parts of a type in `shows` stays a list. Raises InvalidParameter for what is no message, and for
    content that is nothing of that, naming it.
    """
    if not messages:
        raise InvalidParameter("messages: at least one is needed", "messages")
    made = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidParameter(f"messages[{number}] must be an object with a role", "messages")
        if message.get("content") is None and message["role"] != "assistant":
            raise InvalidParameter(f"messages[{number}] of role {message['role'][:40]} needs a content", "messages")
        content = {"content": _content(message["content"], number, shows)} if "content" in message else {}
        made.append({key: value for key, value in {**message, **content}.items() if value is not None})
    return made


def text_alone(message: Message) -> Message:
    """Return a message with only the text parts of its content."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    return {
        **message,
        "content": [part for part in content if isinstance(part, Mapping) and part.get("type") == "text"],
    }


def _content(content: Any, number: int, shows: Collection[str]) -> str | list[Any] | None:
    if content is None:
        return None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list | tuple):
        raise InvalidParameter(f"messages[{number}].content must be a text or a list of parts", "messages")
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind in shows:
            continue
        if kind not in TEXT_PARTS:
            shown = str(kind)[:40]
            raise InvalidParameter(
                f"messages[{number}].content: parts of type {shown} are not read, only text", "messages"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidParameter(f"messages[{number}].content: a part of type text needs a text", "messages")
    texts = [part["text"] for part in parts if part["type"] in TEXT_PARTS]
    if len(texts) == len(parts):
        return "".join(texts)
    return [{**part, "type": "text"} if part["type"] in TEXT_PARTS else part for part in parts]


def _on() -> None:
    """Go on: called by each turn of a loop, so that `call` looks at the clock."""


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own filter would write it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


PRIVATE = range(0xF0000, 0xFFFFE)  # characters for private use, which have no meaning in texts
BYTE = re.compile("<0x[0-9A-F]{2}>")  # SentencePiece's byte fallback tokens


def unused_characters(text: str, count: int) -> list[str]:
    """Return characters that do not occur in this text, literally or JSON-escaped, and that templates do not strip."""
    known, found = set(text), list[str]()
    for code in (0x7F, *PRIVATE):
        character = chr(code)
        if character not in known and _escaped(character) not in text:
            found.append(character)
        if len(found) == count:
            return found
    message = "messages: they contain every private-use character of Unicode: leave some of these characters out"
    raise InvalidParameter(message, "messages")


def texts_in(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value, including the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from texts_in(key)
            yield from texts_in(one)
    elif isinstance(value, list | tuple):
        texts = [one["text"] for one in value if isinstance(one, Mapping) and isinstance(one.get("text"), str)]
        if len(texts) > 1:
            yield "".join(texts)  # a special token may span two parts of a message
        for one in value:
            yield from texts_in(one)


class SpecialText:
    """Distinguishes special tokens of a template from those in clients' texts. Thread-safe.

    `specials` are plain text in every message. `marks`, such as `<think>`, are plain text in all messages but the
    assistant's, since models write them.
    """

    def __init__(self, tokenizer: Tokenizer, specials: Collection[str], marks: Collection[str]) -> None:
        self._tokenizer = tokenizer
        self._specials = frozenset(token for token in specials if len(token) > 1 and not BYTE.fullmatch(token))
        self._all = self._specials | frozenset(token for token in marks if len(token) > 1)
        added = tokenizer.get_added_tokens_decoder().values()
        self._normalized = bool(tokenizer.normalizer) and any(
            token.normalized for token in added if token.content in self._all
        )
        nonce = "".join(chr(PRIVATE[byte]) for byte in secrets.token_bytes(8))
        self._names = {
            token: f"{nonce}{chr(PRIVATE[256 + place])}{nonce}" for place, token in enumerate(sorted(self._all))
        }

    def is_in(self, value: Any) -> bool:
        """Whether a string in this JSON value has a special token. Raises InvalidParameter if nested too deeply."""
        try:
            text = "\n".join(texts_in(value))
        except RecursionError as error:
            raise InvalidParameter("messages: they are nested too deeply", "messages") from error
        if any(token in text for token in self._all):
            return True
        return self._normalized and any(token in self._tokenizer.normalizer.normalize_str(text) for token in self._all)

    def marked(self, value: Any, mark: str, answer: bool = False) -> Any:
        """Return the JSON value with a mark inserted into each special token; in an `answer` only into `specials`."""
        if isinstance(value, str):
            return self._marked(value, mark, self._specials if answer else self._all)
        if isinstance(value, Mapping):
            answer = answer or value.get("role") == "assistant"
            return {self.marked(key, mark, answer): self.marked(one, mark, answer) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return self._parts([self.marked(one, mark, answer) for one in value], mark)
        return value

    def _marked(self, text: str, mark: str, tokens: Collection[str]) -> str:
        found = [token for token in tokens if token in text]
        if not found:
            return text
        pattern = _any_of(found)
        while pattern.search(text):
            text = pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        return text

    def _parts(self, parts: list[Any], mark: str) -> list[Any]:
        """Return the parts with a mark between two texts that together would form a special token."""
        before = ""
        for place, part in enumerate(parts):
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                before = ""
                continue
            if before and any(token in before + text for token in self._all):
                parts[place] = {**part, "text": mark + text}
            before = (before + parts[place]["text"])[-1000:]
        return parts

    def ids(self, text: str, mark: str) -> list[int]:
        """Return the ids of a rendered template in which the special tokens of clients are marked."""
        written = [token for token in self._all if token in text]
        if written:
            text = _any_of(written).sub(lambda match: self._names[match[0]], text)
        text = text.replace(mark, "").replace(_escaped(mark), "")
        return list(self._copy.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _copy(self) -> Tokenizer:
        """The tokenizer with other names for the special tokens. Raises ConfigError if that changes an id."""
        said = json.loads(self._tokenizer.to_str())
        model, names = said["model"], self._names
        for token in said["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(token, token): id for token, id in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if not _parts_of(merge) & names.keys()]
        said["post_processor"] = None
        copy = Tokenizer.from_str(json.dumps(said))
        if any(copy.token_to_id(name) != self._tokenizer.token_to_id(token) for token, name in names.items()):
            raise ConfigError("the model's tokenizer cannot distinguish its special tokens from text")
        return copy


def _escaped(character: str) -> str:
    """Return a character as it is written in ASCII-only JSON."""
    return json.dumps(character)[1:-1]


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for any of these tokens. Longer tokens match first, as in tokenizers."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


def _parts_of(merge: str | list[str]) -> set[str]:
    one, other = merge.split(" ", 1) if isinstance(merge, str) else merge
    return {one, other, one + other}
