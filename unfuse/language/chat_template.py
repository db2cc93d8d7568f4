"""Chat templates: render messages to a prompt, in Jinja's sandbox and within limits.

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

#: The longest prompt that a template may render, in characters.
MAX_CHARACTERS = 32 * 1024 * 1024

#: The most CPU seconds for rendering a prompt.
MAX_S = 5.0

#: The CPU time of this thread at which rendering is stopped.
_deadline = ContextVar[float]("deadline", default=float("inf"))

#: A chat message: an object with a role, a content and more.
Message = Mapping[str, Any]


class TemplateTooLarge(TemplateError):
    """The template takes too long, or renders too long a prompt."""


class _Generation(Extension):
    """Support for `{% generation %}`, which marks text for training and changes nothing here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, set up as in transformers, with a limit on CPU time.

    Every loop iteration and call checks the limit, so that a template without output is stopped too. The limit counts
    this thread's CPU time, so that no prompt fails because the machine is busy. Memory is not limited: a template
    belongs to a model, which is trusted not to exhaust memory on purpose.
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals.pop("lipsum")  # it can make any amount of text, in a loop without checks
        self.globals |= {"raise_exception": _raise, "_on": _check_limit}
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            check = nodes.Call(nodes.Name("_on", "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(check).set_lineno(loop.lineno))
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        if time.thread_time() > _deadline.get():
            raise TemplateTooLarge("rendering takes too long")
        return super().call(__context, __obj, *args, **kwargs)


class ChatTemplate:
    """A compiled chat template. Raises ConfigError if it is not valid.

    `text`: the Jinja source.
    `source`: where it comes from, for error messages.
    `characters`: the length of the longest prompt.
    `seconds`: the most CPU seconds for rendering.
    """

    def __init__(self, text: str, source: str, characters: int = MAX_CHARACTERS, seconds: float = MAX_S) -> None:
        self._characters = characters
        self._seconds = seconds
        #: The Jinja source.
        self.text = text
        try:
            self._template = _Sandbox().from_string(text)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template of {source} is not valid: {error}") from error

    def prompt(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """Return the rendered prompt.

        Raises InvalidParameter if the template refuses the messages, fails on them, or exceeds its limits.
        """
        token = _deadline.set(time.thread_time() + self._seconds)
        parts = []
        length = 0
        try:
            messages = [_with_arguments(message) for message in messages]
            for part in self._template.generate({**variables, "messages": messages}):
                parts.append(part)
                length += len(part)
                if length > self._characters:
                    raise TemplateTooLarge(f"the prompt has more than {self._characters} characters")
        except Exception as error:  # a model's template can raise anything
            reason = str(error) or type(error).__name__
            raise InvalidParameter(
                f"messages: the model's chat template cannot render them: {reason}", "messages"
            ) from error
        finally:
            _deadline.reset(token)
        return "".join(parts)


class CallArguments(dict[str, Any]):
    """The arguments of a tool call, which become JSON when converted to text."""

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
    """Return a tool call with its arguments as `CallArguments`.

    Unchanged if the arguments are not an object.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": CallArguments(function["arguments"])}}


def plain(messages: Sequence[Message], media_types: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return messages with text content as one string and no keys without a value.

    `media_types`: the types of parts, such as "image", that stay in the content, which is then a list of parts.
    Raises InvalidParameter for a malformed message, or a part of another type.
    """
    if not messages:
        raise InvalidParameter("messages: at least one is needed", "messages")

    plain_messages = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidParameter(f"messages[{number}] must be an object with a role", "messages")
        if message.get("content") is None and message["role"] != "assistant":
            raise InvalidParameter(f"messages[{number}] of role {message['role'][:40]} needs a content", "messages")
        content = {"content": _content(message["content"], number, media_types)} if "content" in message else {}
        plain_messages.append({key: value for key, value in {**message, **content}.items() if value is not None})
    return plain_messages


def text_only(message: Message) -> Message:
    """Return a message with only the text parts of its content."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    return {
        **message,
        "content": [part for part in content if isinstance(part, Mapping) and part.get("type") == "text"],
    }


def _content(content: Any, number: int, media_types: Collection[str]) -> str | list[Any] | None:
    """Return the content of message `number` as a string, or as a list of parts.

    It is a list if it has any part of a type in `media_types`.
    """
    if content is None:
        return None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list | tuple):
        raise InvalidParameter(f"messages[{number}].content must be a text or a list of parts", "messages")

    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind in media_types:
            continue
        if kind not in TEXT_PARTS:
            type_name = str(kind)[:40]
            raise InvalidParameter(
                f"messages[{number}].content: parts of type {type_name} are not supported, only text", "messages"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidParameter(f"messages[{number}].content: a part of type text needs a text", "messages")

    texts = [part["text"] for part in parts if part["type"] in TEXT_PARTS]
    if len(texts) == len(parts):
        return "".join(texts)
    return [{**part, "type": "text"} if part["type"] in TEXT_PARTS else part for part in parts]


def _check_limit() -> None:
    """Do nothing. Each loop iteration calls it, so that `_Sandbox.call` checks the time."""


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


#: Characters for private use, which have no meaning in texts.
PRIVATE = range(0xF0000, 0xFFFFE)

#: SentencePiece's byte fallback tokens.
BYTE = re.compile("<0x[0-9A-F]{2}>")


def unused_characters(text: str, count: int) -> list[str]:
    """Return `count` characters that do not occur in this text, literally or JSON-escaped.

    Templates do not strip them as white space. Raises InvalidParameter if there are too few.
    """
    used = set(text)
    unused = list[str]()
    for code in (0x7F, *PRIVATE):
        character = chr(code)
        if character not in used and _escaped(character) not in text:
            unused.append(character)
        if len(unused) == count:
            return unused
    message = "messages: they contain every private-use character of Unicode: leave some of these characters out"
    raise InvalidParameter(message, "messages")


def texts_in(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value, including the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_in(key)
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        texts = [part["text"] for part in value if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        if len(texts) > 1:
            yield "".join(texts)  # a special token may span two parts of a message
        for item in value:
            yield from texts_in(item)


class SpecialText:
    """Distinguishes a template's special tokens from those in clients' texts. Thread-safe.

    `specials`: tokens that are plain text in every message.
    `marks`: tokens such as `<think>` that are plain text in all messages but the assistant's, since models write them.
    """

    def __init__(self, tokenizer: Tokenizer, specials: Collection[str], marks: Collection[str]) -> None:
        self._tokenizer = tokenizer
        self._specials = frozenset(token for token in specials if len(token) > 1 and not BYTE.fullmatch(token))
        self._all = self._specials | frozenset(token for token in marks if len(token) > 1)

        added = tokenizer.get_added_tokens_decoder().values()
        self._normalized = bool(tokenizer.normalizer) and any(
            token.normalized for token in added if token.content in self._all
        )

        # Each token is replaced by an unguessable name while a prompt is encoded.
        nonce = "".join(chr(PRIVATE[byte]) for byte in secrets.token_bytes(8))
        self._names = {
            token: f"{nonce}{chr(PRIVATE[256 + index])}{nonce}" for index, token in enumerate(sorted(self._all))
        }

    def occurs_in(self, value: Any) -> bool:
        """Return whether a string in this JSON value contains a special token.

        Raises InvalidParameter if the value is nested too deeply.
        """
        try:
            text = "\n".join(texts_in(value))
        except RecursionError as error:
            raise InvalidParameter("messages: they are nested too deeply", "messages") from error
        if any(token in text for token in self._all):
            return True
        return self._normalized and any(token in self._tokenizer.normalizer.normalize_str(text) for token in self._all)

    def marked(self, value: Any, mark: str, is_answer: bool = False) -> Any:
        """Return the JSON value with a mark inserted into each special token in its strings.

        In an assistant's message (`is_answer`) the tokens `marks` stay unchanged.
        """
        if isinstance(value, str):
            return self._mark_text(value, mark, self._specials if is_answer else self._all)
        if isinstance(value, Mapping):
            is_answer = is_answer or value.get("role") == "assistant"
            return {
                self.marked(key, mark, is_answer): self.marked(item, mark, is_answer) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return self._mark_parts([self.marked(item, mark, is_answer) for item in value], mark)
        return value

    def _mark_text(self, text: str, mark: str, tokens: Collection[str]) -> str:
        """Return the text with a mark after the first character of each of these tokens."""
        present = [token for token in tokens if token in text]
        if not present:
            return text

        # A token that overlaps with one that was marked needs another pass.
        pattern = _any_of(present)
        while pattern.search(text):
            text = pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        return text

    def _mark_parts(self, parts: list[Any], mark: str) -> list[Any]:
        """Return the parts with a mark between texts that together form a special token."""
        text_before = ""
        for index, part in enumerate(parts):
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                text_before = ""
                continue
            if text_before and any(token in text_before + text for token in self._all):
                parts[index] = {**part, "text": mark + text}
            # Special tokens are shorter than this. The limit bounds the cost of messages with many parts.
            text_before = (text_before + parts[index]["text"])[-1000:]
        return parts

    def ids(self, text: str, mark: str) -> list[int]:
        """Return the token ids of a rendered prompt.

        `mark`: the character that `marked` inserted into special tokens of clients.
        """
        template_tokens = [token for token in self._all if token in text]
        if template_tokens:
            text = _any_of(template_tokens).sub(lambda match: self._names[match[0]], text)
        text = text.replace(mark, "").replace(_escaped(mark), "")
        return list(self._renamed_tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _renamed_tokenizer(self) -> Tokenizer:
        """A copy of the tokenizer with other names for the special tokens.

        Raises ConfigError if that changes an id.
        """
        settings = json.loads(self._tokenizer.to_str())
        model, names = settings["model"], self._names
        for token in settings["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])

        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(token, token): id for token, id in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]

        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if not _merge_tokens(merge) & names.keys()]

        # It adds special tokens by their former names, and prompts have them from the template.
        settings["post_processor"] = None

        renamed = Tokenizer.from_str(json.dumps(settings))
        if any(renamed.token_to_id(name) != self._tokenizer.token_to_id(token) for token, name in names.items()):
            raise ConfigError("the model's tokenizer cannot distinguish its special tokens from text")
        return renamed


def _escaped(character: str) -> str:
    """Return a character as it is written in ASCII-only JSON."""
    return json.dumps(character)[1:-1]


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for any of these tokens. Longer tokens match first, as in tokenizers."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


def _merge_tokens(merge: str | list[str]) -> set[str]:
    """Return the two tokens of a BPE merge, and the merged one."""
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return {first, second, first + second}
