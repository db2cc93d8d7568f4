"""Keeps special tokens in clients' texts plain text, while those of the chat template become tokens.

Before the template is rendered, a mark is inserted into each special token in a client's text. Special tokens that the
template writes have no mark. After rendering, each of them is replaced by an unguessable name, and the marks are
removed. A copy of the tokenizer, in which the special tokens have only these names, then encodes the text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from unfuse.core.errors import ConfigError, InvalidParameter

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
