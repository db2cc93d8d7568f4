"""The tokenizer and chat template of a language model, as gateways and decoders need them: without torch.

They come from a folder as transformers saves it, or from a GGUF file, and are read as data, never as code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from unfuse.core.errors import ConfigError, InvalidParameter
from unfuse.core.parameters import printable
from unfuse.language.answer_reader import format_of, reasoning_of
from unfuse.language.chat_template import (
    ChatTemplate,
    Message,
    SpecialText,
    TemplateTooLarge,
    plain,
    text_alone,
    texts_in,
    unused_characters,
)
from unfuse.language.messages import (
    read_leniently,
    result_as_user,
    simpler_forms,
    system_in_user,
    systems_first,
    with_calls,
    with_properties,
)
from unfuse.weights.gguf import REPAIR, contents

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Tokens that templates may name."""
NAMED_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""And how a GGUF file calls their ids."""
TEMPLATE = "tokenizer.chat_template"
CONTROL, USER_DEFINED = 3, 4  # of `tokenizer.ggml.token_type`: tokens that are no text, and those that are, unsplit


class TokenizerFiles(NamedTuple):
    """What a tokenizer is made of: the library's, chat templates and tokens by name, ids that end a text (None: no)."""

    source: Path
    tokenizer: Tokenizer
    templates: Mapping[str, str]
    named: Mapping[str, str]
    stops: Sequence[int | None]


class PreTokenization(NamedTuple):
    """How texts are split before tokens are merged: by a regex, then as GPT-2 does where the regex leaves that to it.

    What is `whole` in the vocabulary is not made of merges; where texts are `composed`, letters and their accents are
    put together first.
    """

    regex: str = ""
    rest: bool = True
    whole: bool = False
    composed: bool = False


WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "default": PreTokenization(),
    "llama-bpe": PreTokenization(WORDS % "{1,3}", rest=False, whole=True),
    "qwen2": PreTokenization(WORDS % "", rest=False, composed=True),
    "smollm": PreTokenization(r"\p{N}"),
}
"""By `tokenizer.ggml.pre`, as the tokenizer.json of these models has it; a GGUF file has but the name."""


def of_folder(folder: Path) -> TokenizerFiles:
    """As transformers reads it: a template in a file of its own goes before one among the settings."""
    settings = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    said = [_json(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
    stops = next((ids for ids in said if ids is not None), None)
    files = [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        named = {name: settings[name] for name in NAMED if settings.get(name)}
        named = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}
        several = settings.get("chat_template") or []
        several = [{"name": "default", "template": several}] if isinstance(several, str) else several
        templates = {each["name"]: each["template"] for each in several}
        own = {"default" if file == files[0] else file.stem: file.read_text() for file in files if file.exists()}
    except Exception as error:  # the tokenizers library has no other
        raise ConfigError(f"the tokenizer of model {folder} cannot be read ({error!r}); {REPAIR}") from error
    return TokenizerFiles(folder, tokenizer, own or templates, named, stops if isinstance(stops, list) else [stops])


def of_gguf(file: Path) -> TokenizerFiles:
    """What the metadata of a GGUF file have. Raises ConfigError for kinds of tokenizers that are not served."""
    said = contents(file).said
    kind, split = said.get("tokenizer.ggml.model"), said.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in SPLITS:
        served = f"served is gpt2, split as {', '.join(SPLITS)}"
        raise ConfigError(f"{file} has a tokenizer of kind {kind}, split as {split}: {served}; give its tokenizer.json")
    ids = {name: said.get(f"tokenizer.ggml.{name}_token_id") for name in (*NAMED_IDS.values(), "eot", "eom")}
    templates = {key.removeprefix(TEMPLATE).strip(".") or "default": text for key, text in said.items()
                 if key.startswith(TEMPLATE) and isinstance(text, str)}  # fmt: skip
    try:
        tokens = said["tokenizer.ggml.tokens"]
        tokenizer = _merging(tokens, said["tokenizer.ggml.merges"], SPLITS[split])
        types = zip(tokens, said.get("tokenizer.ggml.token_type", ()), strict=False)
        own = [(token, kind) for token, kind in types if kind in (CONTROL, USER_DEFINED)]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL) for token, kind in own])
        named = {name: tokens[ids[called]] for name, called in NAMED_IDS.items() if ids[called] is not None}
    except Exception as error:  # the tokenizers library has no other
        raise ConfigError(f"the tokenizer of {file} is not valid ({error!r}); {REPAIR}") from error
    return TokenizerFiles(file, tokenizer, templates, named, [ids["eos"], ids["eot"], ids["eom"]])


def _merging(tokens: Sequence[str], merges: Sequence[str], how: PreTokenization) -> Tokenizer:
    pairs = [(one, other) for one, _, other in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, pairs, ignore_merges=how.whole))
    if how.composed:
        tokenizer.normalizer = normalizers.NFC()
    first = [pre_tokenizers.Split(Regex(how.regex), "isolated")] if how.regex else []
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=how.rest)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, rest])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _json(file: Path) -> dict[str, Any]:
    """What a file says; nothing if it is not there."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any]) if file.exists() else {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); {REPAIR}") from error


class ChatTokenizer:
    """Ids of texts and of chats, and the bytes that ids stand for. Of many threads, each may call it.

    `stops` end a text; `specials` are no text; `size` is one more than the largest id. `calls` and `reasoning` (or
    None) are the formats that follow from the chat template.
    """

    def __init__(self, parts: TokenizerFiles) -> None:
        source, tokenizer, templates, named, stops = parts
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = {name: id for name, token in named.items() if (id := tokenizer.token_to_id(token)) is not None}
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: token.special for token in added.values()}
        whole = [AddedToken(named[name], normalized=False) for name, id in ids.items() if id not in added]
        tokenizer.add_special_tokens(whole)
        self._tokenizer, self._named = tokenizer, named
        self._templates = {name: ChatTemplate(text, str(source)) for name, text in templates.items()}
        template = templates.get("tool_use") or templates.get("default", "")
        self.calls, self._knows_tools = format_of(template), "tools" in template
        self.reasoning = reasoning_of(template)
        self._probed = dict[tuple[str, str], bool | None]()
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

    def spellings(self, words: Sequence[str]) -> list[list[int]]:
        """Return the ids of each word, at the beginning of a text and after a space, as vLLM does for bad words."""
        found = list[list[int]]()
        for word in words:
            first, behind = self.ids(word.lstrip()), self.ids(f" {word.lstrip()}")
            found.append(first)
            if behind[:1] != first[:1] and len(behind) == len(first):
                found.append(behind)
        return [ids for ids in found if ids]

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        shows: Collection[str] = (),
        edit: Callable[[str], str] = str,
    ) -> list[int]:
        """Return the ids of a chat up to the beginning of the answer.

        All special tokens, including the first one, come from the template; in the texts of messages they are plain
        text. Content parts of the types in `shows` are passed to the template, and `edit` may change the rendered text.
        With `continue_final_message` in `template_kwargs`, the prompt ends with the text of the last message.
        Raises InvalidParameter for messages that are malformed, or that the template refuses.
        """
        template = self._template(tools)
        given = {**(template_kwargs or {}), "messages": plain(messages, shows), "tools": tools}
        continue_final_message = bool(given.pop("continue_final_message", False))
        is_special = self._special_text.is_in(given)
        mark = end = ""
        if is_special or continue_final_message:
            mark, end = unused_characters("".join((*texts_in(given), template.text, *self._added)), 2)
        if continue_final_message:
            given["messages"] = _ended(given["messages"], f"{end} ")
        if is_special:
            given = self._special_text.marked(given, mark)
        usual = {**self._named, "documents": None, "add_generation_prompt": not continue_final_message}
        text = _rendered(template, self._shaped(template, given.pop("messages")), usual | given)
        if continue_final_message:
            text = _up_to(text, end)
        return self._special_text.ids(edit(text), mark) if is_special else self.ids(edit(text))

    def _template(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise InvalidParameter("messages: this model has no chat template, so it cannot chat", "messages")
        return template

    @cached_property
    def _special_text(self) -> SpecialText:
        """Keeps special tokens in texts of messages apart from those that templates write."""
        special = {token for token, is_special in self._added.items() if is_special}
        special |= {token for id in self.stops if (token := self._tokenizer.id_to_token(id)) in self._added}
        written = "".join(_probe(template, self._named) for template in self._templates.values())
        return SpecialText(self._tokenizer, special, {token for token in self._added if token in written} - special)

    def start_of_answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text before the answer within its turn; "" if it is not known.

        The template writes it. With `continue_final_message` in `template_kwargs` it is the last message.
        """
        texts, given = plain([text_alone(message) for message in messages]), {**(template_kwargs or {})}
        if given.pop("continue_final_message", False):
            return str(texts[-1].get("content") or "")
        template, variables = self._template(tools), {**self._named, "tools": tools, "documents": None}
        shaped = self._shaped(template, texts)
        with suppress(InvalidParameter):
            whole = _rendered(template, shaped, {**variables, "add_generation_prompt": True, **given})
            before = _rendered(template, shaped, {**variables, **given, "add_generation_prompt": False})
            if whole.startswith(before):
                return whole[len(before) :]
        return ""

    def mark_ids(self, marks: Iterable[str]) -> dict[int, str]:
        """Return the marks that are a single token, by id."""
        ids = ((self._tokenizer.token_to_id(mark), mark) for mark in marks)
        return {id: mark for id, mark in ids if id is not None}

    def told(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]:
        """Messages, and tools as such where a template knows none, for `prompt`. Raises InvalidParameter.

        Earlier messages are read leniently. `developer` becomes `system` if the template does not mention it.
        """
        if not self._templates:
            return messages, tools
        knows_developer = re.search("['\"]developer['\"]", self._template(tools).text) is not None
        read = read_leniently(messages, knows_developer=knows_developer)
        told = self._written(with_calls(read, tools, self._knows_tools), self._template(tools))
        return told, tools if self._knows_tools else None

    def _written(self, messages: Sequence[Any], template: ChatTemplate) -> Sequence[Any]:
        """Return messages of which the template drops none. Raises InvalidParameter for an unknown role.

        System messages that it would drop are moved to the beginning, or into the first user message.
        """
        roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
        for role in dict.fromkeys(role for role in roles if isinstance(role, str) and role not in ROLES):
            if not self._writes(template, role, later=True):
                what = f"messages[{roles.index(role)}].role is {printable(role)}"
                known = f"send one of {', '.join(ROLES[:5])}"
                raise InvalidParameter(f"{what}, which the model's chat template ignores: {known}", "messages")
        if "tool" in roles and not self._writes(template, "tool", later=True):
            messages = [result_as_user(message, number) for number, message in enumerate(messages)]
        if None in roles or "system" not in roles:
            return messages
        if "system" in roles[1:] and not self._writes(template, "system", later=True):
            messages = systems_first(messages)
        first = messages[0]["role"] == "system" and not self._writes(template, "system", later=False)
        return system_in_user(messages) if first else messages

    def _writes(self, template: ChatTemplate, role: str, *, later: bool) -> bool:
        """Whether a template renders the first, or a later, message of a role. True if it raises an error for it."""
        turns = ("user", "assistant", role, "user") if later else (role, "user")
        chat = [{"role": turn, "content": PROBE if turn == role else "0"} for turn in turns]
        return self._written_of(template, self._shaped(template, chat), keep=role in ROLES) is not False

    def _shaped(self, template: ChatTemplate, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with texts as content parts if the template only renders parts."""
        text = self._written_of(template, [{"role": "user", "content": PROBE}])
        if text or not self._written_of(template, [_in_parts({"role": "user", "content": PROBE})]):
            return messages
        return [_in_parts(message) for message in messages]

    def _written_of(self, template: ChatTemplate, chat: Sequence[Message], *, keep: bool = True) -> bool | None:
        """Whether a template renders the PROBE in a chat; None if it refuses the chat. `keep` caches the result."""
        key = template.text, json.dumps(chat)
        if key in self._probed:
            return self._probed[key]
        written = None
        with suppress(InvalidParameter):
            variables = {**self._named, "tools": None, "documents": None, "add_generation_prompt": True}
            written = PROBE in template.prompt(chat, variables)
        if keep:
            self._probed[key] = written
        return written

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


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of OpenAI's API. `function` is the deprecated name of `tool`."""

PROBE = "written here"

_TURNS = ("user", "assistant", "user")
PROBES: tuple[tuple[str, ...], ...] = (("system", *_TURNS), _TURNS, ("user",))
"""Chats, by their roles, that are rendered to see what a template writes between messages. Some are refused."""


def _in_parts(message: Message) -> Message:
    """Return a message with its text as a content part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _probe(template: ChatTemplate, named: Mapping[str, str]) -> str:
    """Return what a template renders for a short chat; "" if it refuses all of PROBES."""
    for roles in PROBES:
        with suppress(InvalidParameter):
            chat = [{"role": role, "content": "0"} for role in roles]
            return template.prompt(chat, {**named, "tools": None, "documents": None, "add_generation_prompt": True})
    return ""


def _rendered(template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """Return the rendered messages. If the template refuses them, tries completed tools and simpler messages.

    Raises InvalidParameter if it refuses these too.
    """
    try:
        return template.prompt(messages, variables)
    except InvalidParameter as error:
        if isinstance(error.__cause__, TemplateTooLarge):
            raise
        tools = variables.get("tools")
        completed = {**variables, "tools": [*map(with_properties, tools)]} if tools else variables
        before = [*messages] if completed == variables else None
        for simpler in ([*messages], *simpler_forms(messages)):
            if simpler != before:
                with suppress(InvalidParameter):
                    return template.prompt(simpler, completed)
            before = simpler
        raise


def _ended(messages: Sequence[Mapping[str, Any]], end: str) -> list[Mapping[str, Any]]:
    """Return the messages with `end` appended to the last one. Raises InvalidParameter if that has no text."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": content + end}]
    parts = list(content or ())
    for place in range(len(parts) - 1, -1, -1):
        if parts[place].get("type") == "text":
            parts[place] = {**parts[place], "text": parts[place]["text"] + end}
            return [*before, {**last, "content": parts}]
    message = "continue_final_message: the last message has no text to continue"
    raise InvalidParameter(message, "continue_final_message")


def _up_to(text: str, end: str) -> str:
    """Return the text before the last `end`, without the white space that a template trims. Raises InvalidParameter."""
    before, found, behind = text.rpartition(end)
    if not found:
        message = "continue_final_message: the model's chat template changes the last message, so leave it out"
        raise InvalidParameter(message, "continue_final_message")
    return before if behind.startswith(" ") else before.rstrip()


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
