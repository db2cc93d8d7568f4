"""The tokenizer and chat template of a language model, as gateways and decoders need them: without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from unfuse.core.errors import ConfigError, InvalidParameter
from unfuse.models.answer_formats import format_of, reasoning_of
from unfuse.models.chat_template import ChatTemplate, Message, plain, text_alone
from unfuse.models.gguf import REPAIR
from unfuse.models.tokenizer_files import Parts, of_folder, of_gguf
from unfuse.models.tool_messages import with_calls


class ChatTokenizer:
    """Ids of texts and of chats, and the bytes that ids stand for. Of many threads, each may call it.

    `stops` end a text; `specials` are no text; `size` is one more than the largest id. By the chat template, `calls`
    is how calls of tools are written, and `reasoning` how reasoning is, or None.
    """

    def __init__(self, parts: Parts) -> None:
        source, tokenizer, templates, named, stops = parts
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = {name: id for name, token in named.items() if (id := tokenizer.token_to_id(token)) is not None}
        added = tokenizer.get_added_tokens_decoder()
        whole = [AddedToken(named[name], normalized=False) for name, id in ids.items() if id not in added]
        tokenizer.add_special_tokens(whole)
        self._tokenizer, self._named = tokenizer, named
        self._templates = {name: ChatTemplate(text, str(source)) for name, text in templates.items()}
        template = templates.get("tool_use") or templates.get("default", "")
        self.calls, self._knows_tools = format_of(template), "tools" in template
        self.reasoning = reasoning_of(template)
        self._bytes, self._strips = _spelling(source, tokenizer)
        self.stops = frozenset(id for id in (*stops, ids.get("eos_token")) if id is not None)
        self.specials = frozenset({id for id, token in added.items() if token.special} | set(ids.values()))
        self.size = max(tokenizer.get_vocab().values()) + 1

    @classmethod
    def read(cls, path: Path) -> ChatTokenizer:
        """That of a folder with tokenizer.json, or of a GGUF file, beside which such a one goes before its own.

        Raises ConfigError where neither is, or what is there cannot be read or is of a kind that is not served.
        """
        folder = path.parent if path.is_file() else path
        if (folder / "tokenizer.json").exists():
            return cls(of_folder(folder))
        if folder == path:
            raise ConfigError(f"model {path} has no tokenizer.json; {REPAIR}")
        return cls(of_gguf(path))

    def ids(self, text: str) -> list[int]:
        """The ids of a text, special tokens in it taken as such, none added. Raises InvalidParameter for no Unicode."""
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        except TypeError as error:
            raise InvalidParameter("messages: half a surrogate pair is no text", "messages") from error

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """The ids of a chat, up to where the answer begins. The template writes all special tokens, the first, too.

        Raises InvalidParameter for messages that are none, or that the model's template refuses.
        """
        return self.ids(self.text(messages, tools, **template_kwargs))

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        shows: Collection[str] = (),
        **template_kwargs: Any,
    ) -> str:
        """A chat's text as `prompt` reads it, with parts of the types in `shows`. Raises InvalidParameter."""
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise InvalidParameter("messages: this model has no chat template, so it cannot chat", "messages")
        variables = {**self._named, "tools": tools, "documents": None, "add_generation_prompt": True, **template_kwargs}
        return template.prompt(plain(messages, shows), variables)

    def start_of_answer(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> str:
        """What the template writes behind the messages, from where the answer goes on; "" where that is not known."""
        texts = [text_alone(message) for message in messages]
        with suppress(InvalidParameter):
            whole = self.text(texts, tools, **template_kwargs)
            before = self.text(texts, tools, **{**template_kwargs, "add_generation_prompt": False})
            if whole.startswith(before):
                return whole[len(before) :]
        return ""

    def mark_ids(self, marks: Iterable[str]) -> dict[int, str]:
        """Those of these texts that are one token of the tokenizer, by id."""
        ids = ((self._tokenizer.token_to_id(mark), mark) for mark in marks)
        return {id: mark for id, mark in ids if id is not None}

    def told(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]:
        """Messages, and tools as such where a template knows none, for `prompt`. Raises InvalidParameter."""
        return with_calls(messages, tools, self._knows_tools), tools if self._knows_tools else None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special ones; U+FFFD for bytes that are no UTF-8."""
        shown = [id for id in ids if id not in self.specials]
        return b"".join(self.piece(id, place == 0) for place, id in enumerate(shown)).decode(errors="replace")

    def piece(self, id: int, first: bool = False) -> bytes:
        """The bytes of a token, special ones too; none for an id that the tokenizer does not have.

        Some tokenizers begin each text with a space: it is not there in the `first` token.
        """
        token = self._tokenizer.id_to_token(id)
        piece = b"" if token is None else self._bytes(token)
        return piece[1:] if first and self._strips and piece[:1] == b" " else piece


def _spelling(source: Path, tokenizer: Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How tokens are written as bytes, and whether each text of them begins with a space that is none of its own."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {"type": "none"}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    if steps.keys() == {"ByteLevel"}:
        return _of_letters, False
    if not steps.keys() <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        raise ConfigError(
            f"{source}: a tokenizer that decodes by {', '.join(steps)} is not served: byte-level ones are, "
            "and those of SentencePiece"
        )
    strips = "Strip" in steps or steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
    return _of_words, strips


_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_REST = [byte for byte in range(256) if byte not in _PRINTED]
LETTERS = {chr(byte): byte for byte in _PRINTED} | {chr(256 + place): byte for place, byte in enumerate(_REST)}
"""How GPT-2 writes bytes, so that each is a letter that can be seen."""


def _of_letters(token: str) -> bytes:
    try:
        return bytes([LETTERS[letter] for letter in token])
    except KeyError:  # an added token, which is written as it is
        return token.encode()


def _of_words(token: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()
