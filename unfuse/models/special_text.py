"""Special tokens that clients write in their texts: they stay text, and those of the chat template are tokens.

A text of a client is marked in the middle of each special token before the template reads it. What the template
itself writes is not marked. Then each unmarked special token gets a name that nobody can guess, the marks are removed,
and a copy of the tokenizer, which knows special tokens by these names alone, makes the ids.
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

PRIVATE = range(0xF0000, 0xFFFFE)  # characters of Unicode's plane for private use, which no text means anything by
BYTE = re.compile("<0x[0-9A-F]{2}>")  # tokens of bytes, which models of SentencePiece fall back to


def unused_characters(text: str, count: int) -> list[str]:
    """Characters that are not in this text, as they are or escaped for JSON. No template splits or strips them."""
    known, found = set(text), list[str]()
    for code in (0x7F, *PRIVATE):
        character = chr(code)
        if character not in known and _escaped(character) not in text:
            found.append(character)
        if len(found) == count:
            return found
    raise InvalidParameter("messages: they have every character for private use, which no text does", "messages")


def texts_in(value: Any) -> Iterator[str]:
    """All texts of a JSON value, with the keys of its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from texts_in(key)
            yield from texts_in(one)
    elif isinstance(value, list | tuple):
        texts = [one["text"] for one in value if isinstance(one, Mapping) and isinstance(one.get("text"), str)]
        if len(texts) > 1:
            yield "".join(texts)  # a token may begin in one part of a message and end in the next one
        for one in value:
            yield from texts_in(one)


class SpecialText:
    """Tells special tokens of a template from those in the texts of clients. Of many threads, each may call it.

    `specials` are the tokens that are text in every message, `marks` those that are text in all but answers: a model
    writes them itself, such as `<think>`.
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
        """Whether a text of this JSON value has a special token. Raises InvalidParameter where it is too deep."""
        try:
            text = "\n".join(texts_in(value))
        except RecursionError as error:
            raise InvalidParameter("messages: they are nested too deeply", "messages") from error
        if any(token in text for token in self._all):
            return True
        return self._normalized and any(token in self._tokenizer.normalizer.normalize_str(text) for token in self._all)

    def marked(self, value: Any, mark: str, answer: bool = False) -> Any:
        """The JSON value with a mark in each special token of its texts. One of an `answer` has fewer of them."""
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
        """The parts, with a mark between two texts that would make a special token together."""
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
        """The ids of a template's text, in which special tokens of clients are marked."""
        written = [token for token in self._all if token in text]
        if written:
            text = _any_of(written).sub(lambda match: self._names[match[0]], text)
        text = text.replace(mark, "").replace(_escaped(mark), "")
        return list(self._copy.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _copy(self) -> Tokenizer:
        """The tokenizer, with other names for the special tokens. Raises ConfigError where that changes an id."""
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
            raise ConfigError("the tokenizer of the model cannot tell its special tokens from text")
        return copy


def _escaped(character: str) -> str:
    """A character as JSON of ASCII has it."""
    return json.dumps(character)[1:-1]


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """A pattern of these tokens, of which the longest goes first, as tokenizers find them."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


def _parts_of(merge: str | list[str]) -> set[str]:
    one, other = merge.split(" ", 1) if isinstance(merge, str) else merge
    return {one, other, one + other}
