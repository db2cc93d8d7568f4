"""Read and apply a language model's tokenizer and chat template, without torch.

They come from a folder in transformers' format, or from a GGUF file. They are read as data, never executed as code.
Gateways use them for prompts, decode workers for the text of answers.
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
from unfuse.core.text import CallFormat, ReasoningFormat
from unfuse.language.answer_reader import format_of, reasoning_of
from unfuse.language.chat_template import (
    ChatTemplate,
    Message,
    SpecialText,
    TemplateTooLarge,
    plain,
    text_only,
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

#: Special tokens that templates may refer to by name.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

#: The same tokens by the names of their ids in a GGUF file (`tokenizer.ggml.<name>_token_id`).
NAMED_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

#: The GGUF key of the default chat template, and the prefix of the keys of others.
TEMPLATE = "tokenizer.chat_template"

#: Values of `tokenizer.ggml.token_type`: special tokens, and text tokens that are never split.
CONTROL, USER_DEFINED = 3, 4


class TokenizerFiles(NamedTuple):
    """The parts of a tokenizer, as read from a folder or a GGUF file."""

    #: The folder or file, for error messages.
    source: Path
    #: The tokenizer of the `tokenizers` library.
    tokenizer: Tokenizer
    #: The Jinja text of each chat template, by name. The usual one is "default".
    templates: Mapping[str, str]
    #: The special tokens of NAMED, by name.
    named: Mapping[str, str]
    #: The ids of end-of-text tokens. None for an id that the model does not set.
    stops: Sequence[int | None]


class PreTokenization(NamedTuple):
    """How text is split before the merges of byte-level BPE."""

    #: The first split. "" for none.
    regex: str = ""
    #: Whether GPT-2's regex splits the text further.
    splits_further: bool = True
    #: Whether a piece that is in the vocabulary as a whole becomes one token without merges (`ignore_merges`).
    ignores_merges: bool = False
    #: Whether the text is normalized to Unicode NFC first.
    composed: bool = False


#: The regex that Llama 3 and Qwen 2 share. `%s` is the number of digits in one piece.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: The pre-tokenization for each value of `tokenizer.ggml.pre`, copied from these models' tokenizer.json.
#: A GGUF file has only the name.
SPLITS = {
    "default": PreTokenization(),
    "llama-bpe": PreTokenization(WORDS % "{1,3}", splits_further=False, ignores_merges=True),
    "qwen2": PreTokenization(WORDS % "", splits_further=False, composed=True),
    "smollm": PreTokenization(r"\p{N}"),
}


def of_folder(folder: Path) -> TokenizerFiles:
    """Read the tokenizer of a folder in transformers' format.

    Template files (`chat_template.jinja`, `additional_chat_templates/`) override templates in the settings.
    Raises ConfigError if a file cannot be read.
    """
    settings = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    eos_ids = [_json(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
    stops = next((ids for ids in eos_ids if ids is not None), None)

    files = [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

        named = {name: settings[name] for name in NAMED if settings.get(name)}
        named = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}

        entries = settings.get("chat_template") or []
        entries = [{"name": "default", "template": entries}] if isinstance(entries, str) else entries
        templates = {entry["name"]: entry["template"] for entry in entries}
        file_templates = {
            "default" if file == files[0] else file.stem: file.read_text() for file in files if file.exists()
        }
    except Exception as error:  # the tokenizers library raises only this type
        raise ConfigError(f"the tokenizer of model {folder} cannot be read ({error!r}); {REPAIR}") from error
    return TokenizerFiles(
        folder, tokenizer, file_templates or templates, named, stops if isinstance(stops, list) else [stops]
    )


def of_gguf(file: Path) -> TokenizerFiles:
    """Read the tokenizer in the metadata of a GGUF file.

    Only byte-level BPE ("gpt2") with a pre-tokenization in SPLITS is supported.
    Raises ConfigError for other tokenizers, and for metadata that are not valid.
    """
    metadata = contents(file).metadata
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in SPLITS:
        supported = f"supported is gpt2 with {', '.join(SPLITS)}"
        raise ConfigError(
            f"{file} has a tokenizer {kind} with the pre-tokenizer {split}: {supported}; add tokenizer.json"
        )

    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in (*NAMED_IDS.values(), "eot", "eom")}
    templates = {
        key.removeprefix(TEMPLATE).strip(".") or "default": text
        for key, text in metadata.items()
        if key.startswith(TEMPLATE) and isinstance(text, str)
    }
    try:
        tokens = metadata["tokenizer.ggml.tokens"]
        tokenizer = _byte_level_bpe(tokens, metadata["tokenizer.ggml.merges"], SPLITS[split])
        types = zip(tokens, metadata.get("tokenizer.ggml.token_type", ()), strict=False)
        added = [(token, kind) for token, kind in types if kind in (CONTROL, USER_DEFINED)]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL) for token, kind in added])
        named = {name: tokens[ids[id_name]] for name, id_name in NAMED_IDS.items() if ids[id_name] is not None}
    except Exception as error:  # the tokenizers library raises only this type
        raise ConfigError(f"the tokenizer of {file} is not valid ({error!r}); {REPAIR}") from error
    return TokenizerFiles(file, tokenizer, templates, named, [ids["eos"], ids["eot"], ids["eom"]])


def _byte_level_bpe(tokens: Sequence[str], merges: Sequence[str], pre_tokenization: PreTokenization) -> Tokenizer:
    """Return a byte-level BPE tokenizer, without its special tokens.

    The id of a token is its index in `tokens`. A merge is a text of two tokens with a space between them.
    """
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(
        models.BPE({token: id for id, token in enumerate(tokens)}, pairs, ignore_merges=pre_tokenization.ignores_merges)
    )
    if pre_tokenization.composed:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pre_tokenization.regex), "isolated")] if pre_tokenization.regex else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre_tokenization.splits_further)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file does not exist.

    Raises ConfigError.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any]) if file.exists() else {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); {REPAIR}") from error


class ChatTokenizer:
    """A model's tokenizer with its chat template. Thread-safe."""

    #: The ids of the end-of-text tokens.
    stops: frozenset[int]
    #: The ids of special tokens, which are not part of decoded text.
    specials: frozenset[int]
    #: One more than the largest token id.
    size: int
    #: The format of tool calls, detected from the chat template.
    calls: CallFormat
    #: The format of reasoning, detected from the chat template. None without reasoning.
    reasoning: ReasoningFormat | None

    def __init__(self, parts: TokenizerFiles) -> None:
        source, tokenizer, templates, named, stops = parts

        # tokenizer.json may have settings of training, which would cut or pad prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()

        ids = {name: id for name, token in named.items() if (id := tokenizer.token_to_id(token)) is not None}
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: token.special for token in added.values()}  # token → whether it is special
        missing = [AddedToken(named[name], normalized=False) for name, id in ids.items() if id not in added]
        tokenizer.add_special_tokens(missing)
        self._tokenizer = tokenizer
        self._named = named

        self._templates = {name: ChatTemplate(text, str(source)) for name, text in templates.items()}

        # Chats with tools are rendered by the template `tool_use`, which therefore shows the format of calls.
        template = templates.get("tool_use") or templates.get("default", "")
        self.calls = format_of(template)
        self.reasoning = reasoning_of(template)
        self._supports_tools = "tools" in template
        self._probe_results = dict[tuple[str, str], bool | None]()  # by template and chat, see `_renders_probe`

        self._bytes, self._strips = _byte_decoder(source, tokenizer)
        self.stops = frozenset(id for id in (*stops, ids.get("eos_token")) if id is not None)
        self.specials = frozenset({id for id, token in added.items() if token.special} | set(ids.values()))
        self.size = max(tokenizer.get_vocab().values()) + 1

    @classmethod
    def read(cls, path: Path) -> ChatTokenizer:
        """Return the tokenizer of a folder with tokenizer.json, or of a GGUF file.

        A tokenizer.json beside a GGUF file overrides the tokenizer in the file.
        Raises ConfigError if there is none, or if it is not valid or not supported.
        """
        folder = path.parent if path.is_file() else path
        if (folder / "tokenizer.json").exists():
            return cls(of_folder(folder))
        if folder == path:
            raise ConfigError(f"model {path} has no tokenizer.json; {REPAIR}")
        return cls(of_gguf(path))

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Special tokens in it become their ids; none are added.
        Raises InvalidParameter for text that is not valid Unicode.
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        except TypeError as error:
            raise InvalidParameter("messages: an unpaired surrogate is not valid Unicode", "messages") from error

    def spellings(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each word, for bad words.

        As in vLLM: at the beginning of a text, and after a space if that differs in the first token but not in length.
        """
        spellings = list[list[int]]()
        for word in words:
            initial = self.ids(word.lstrip())
            after_space = self.ids(f" {word.lstrip()}")
            spellings.append(initial)
            if after_space[:1] != initial[:1] and len(after_space) == len(initial):
                spellings.append(after_space)
        return [ids for ids in spellings if ids]

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        media_types: Collection[str] = (),
        edit: Callable[[str], str] = str,
    ) -> list[int]:
        """Return the ids of a chat up to the beginning of the answer.

        All special tokens, including the first one, come from the template; in the texts of messages they are plain
        text. Content parts of the types in `media_types` are passed to the template. `edit` may change the rendered
        text.
        With `continue_final_message` in `template_kwargs`, the prompt ends with the text of the last message.
        Raises InvalidParameter for messages that are malformed, or that the template refuses.
        """
        template = self._template(tools)
        variables = {**(template_kwargs or {}), "messages": plain(messages, media_types), "tools": tools}
        continue_final_message = bool(variables.pop("continue_final_message", False))

        # `mark` is inserted into special tokens in clients' texts. `end_mark` is appended to the last message, with a
        # space that shows whether the template trims the message.
        has_special = self._special_text.occurs_in(variables)
        mark = end_mark = ""
        if has_special or continue_final_message:
            mark, end_mark = unused_characters("".join((*texts_in(variables), template.text, *self._added)), 2)
        if continue_final_message:
            variables["messages"] = _append_to_last(variables["messages"], f"{end_mark} ")
        if has_special:
            variables = self._special_text.marked(variables, mark)

        defaults = {**self._named, "documents": None, "add_generation_prompt": not continue_final_message}
        text = _render(template, self._adapt_content(template, variables.pop("messages")), defaults | variables)
        if continue_final_message:
            text = _cut_at(text, end_mark)
        return self._special_text.ids(edit(text), mark) if has_special else self.ids(edit(text))

    def _template(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        """Return the chat template for a request with these tools.

        Raises InvalidParameter if there is none.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise InvalidParameter("messages: this model has no chat template, which chats need", "messages")
        return template

    @cached_property
    def _special_text(self) -> SpecialText:
        """Distinguishes special tokens in clients' texts from those that templates write."""
        special = {token for token, is_special in self._added.items() if is_special}
        special |= {token for id in self.stops if (token := self._tokenizer.id_to_token(id)) in self._added}
        rendered = "".join(_render_short_chat(template, self._named) for template in self._templates.values())
        return SpecialText(self._tokenizer, special, {token for token in self._added if token in rendered} - special)

    def start_of_answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text before the answer within its turn; "" if it is not known.

        The template writes it. With `continue_final_message` in `template_kwargs` it is the last message.
        """
        texts = plain([text_only(message) for message in messages])
        kwargs = {**(template_kwargs or {})}
        if kwargs.pop("continue_final_message", False):
            return str(texts[-1].get("content") or "")

        template = self._template(tools)
        variables = {**self._named, "tools": tools, "documents": None}
        adapted = self._adapt_content(template, texts)
        with suppress(InvalidParameter):
            with_start = _render(template, adapted, {**variables, "add_generation_prompt": True, **kwargs})
            without_start = _render(template, adapted, {**variables, **kwargs, "add_generation_prompt": False})
            if with_start.startswith(without_start):
                return with_start[len(without_start) :]
        return ""

    def mark_ids(self, marks: Iterable[str]) -> dict[int, str]:
        """Return the marks that are a single token, by token id."""
        ids = ((self._tokenizer.token_to_id(mark), mark) for mark in marks)
        return {id: mark for id, mark in ids if id is not None}

    def simplify(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]:
        """Return the messages and tools in the form that `prompt` needs for this model's template.

        If the template does not support tools, they are described in the messages, and the returned tools are None.
        Earlier messages are read leniently. `developer` becomes `system` if the template does not mention it.
        Raises InvalidParameter for an unknown role, and for malformed messages.
        """
        if not self._templates:
            return messages, tools
        mentions_developer = re.search("['\"]developer['\"]", self._template(tools).text) is not None
        converted = read_leniently(messages, knows_developer=mentions_developer)
        adapted = self._adapt_roles(with_calls(converted, tools, self._supports_tools), self._template(tools))
        return adapted, tools if self._supports_tools else None

    def _adapt_roles(self, messages: Sequence[Any], template: ChatTemplate) -> Sequence[Any]:
        """Return messages of which the template ignores none. Raises InvalidParameter for an unknown role.

        System messages that it would ignore are moved to the beginning, or into the first user message.
        """
        roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
        for role in dict.fromkeys(role for role in roles if isinstance(role, str) and role not in ROLES):
            if not self._renders_role(template, role, later=True):
                problem = f"messages[{roles.index(role)}].role is {printable(role)}"
                remedy = f"send one of {', '.join(ROLES[:5])}"
                raise InvalidParameter(f"{problem}, which the model's chat template ignores: {remedy}", "messages")

        if "tool" in roles and not self._renders_role(template, "tool", later=True):
            messages = [result_as_user(message, number) for number, message in enumerate(messages)]

        if None in roles or "system" not in roles:
            return messages
        if "system" in roles[1:] and not self._renders_role(template, "system", later=True):
            messages = systems_first(messages)
        ignores_first = messages[0]["role"] == "system" and not self._renders_role(template, "system", later=False)
        return system_in_user(messages) if ignores_first else messages

    def _renders_role(self, template: ChatTemplate, role: str, *, later: bool) -> bool:
        """Return whether a template renders messages of this role.

        True if it refuses them with an error.
        `later`: checks a message in the middle of the chat, else the first one.
        """
        turns = ("user", "assistant", role, "user") if later else (role, "user")
        chat = [{"role": turn, "content": PROBE if turn == role else "0"} for turn in turns]
        return self._renders_probe(template, self._adapt_content(template, chat), cache=role in ROLES) is not False

    def _adapt_content(self, template: ChatTemplate, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with texts as content parts if the template only renders parts."""
        text = self._renders_probe(template, [{"role": "user", "content": PROBE}])
        if text or not self._renders_probe(template, [_in_parts({"role": "user", "content": PROBE})]):
            return messages
        return [_in_parts(message) for message in messages]

    def _renders_probe(self, template: ChatTemplate, chat: Sequence[Message], *, cache: bool = True) -> bool | None:
        """Return whether a template renders PROBE in a chat; None if it refuses the chat.

        `cache` stores the result.
        """
        key = template.text, json.dumps(chat)
        if key in self._probe_results:
            return self._probe_results[key]

        rendered = None
        with suppress(InvalidParameter):
            variables = {**self._named, "tools": None, "documents": None, "add_generation_prompt": True}
            rendered = PROBE in template.prompt(chat, variables)
        if cache:
            self._probe_results[key] = rendered
        return rendered

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens; U+FFFD for invalid UTF-8."""
        text_ids = [id for id in ids if id not in self.specials]
        return b"".join(self.piece(id, index == 0) for index, id in enumerate(text_ids)).decode(errors="replace")

    def piece(self, id: int, first: bool = False) -> bytes:
        """Return the bytes of a token, special or not; b"" for an unknown id.

        Some tokenizers start each text with a space, which is omitted from the `first` token.
        """
        token = self._tokenizer.id_to_token(id)
        piece = b"" if token is None else self._bytes(token)
        return piece[1:] if first and self._strips and piece[:1] == b" " else piece


#: The roles of OpenAI's API. `function` is the deprecated name of `tool`.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

#: The text that `_renders_probe` looks for in the output of a template.
PROBE = "written here"

_TURNS = ("user", "assistant", "user")

#: The roles of chats that are rendered to see what a template writes between messages. It may refuse some.
PROBES: tuple[tuple[str, ...], ...] = (("system", *_TURNS), _TURNS, ("user",))


def _in_parts(message: Message) -> Message:
    """Return a message with its text as a content part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _render_short_chat(template: ChatTemplate, named: Mapping[str, str]) -> str:
    """Return what a template renders for a short chat; "" if it refuses all PROBES."""
    for roles in PROBES:
        with suppress(InvalidParameter):
            chat = [{"role": role, "content": "0"} for role in roles]
            return template.prompt(chat, {**named, "tools": None, "documents": None, "add_generation_prompt": True})
    return ""


def _render(template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
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

        previous = [*messages] if completed == variables else None
        for simpler in ([*messages], *simpler_forms(messages)):
            if simpler != previous:
                with suppress(InvalidParameter):
                    return template.prompt(simpler, completed)
            previous = simpler
        raise


def _append_to_last(messages: Sequence[Mapping[str, Any]], end_mark: str) -> list[Mapping[str, Any]]:
    """Return the messages with `end_mark` appended to the last one.

    Raises InvalidParameter if that has no text.
    """
    *others, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*others, {**last, "content": content + end_mark}]

    parts = list(content or ())
    for index in range(len(parts) - 1, -1, -1):
        if parts[index].get("type") == "text":
            parts[index] = {**parts[index], "text": parts[index]["text"] + end_mark}
            return [*others, {**last, "content": parts}]
    message = "continue_final_message: the last message has no text to continue"
    raise InvalidParameter(message, "continue_final_message")


def _cut_at(text: str, end_mark: str) -> str:
    """Return the text before the last `end_mark`, without the white space that a template trims.

    Raises InvalidParameter.
    """
    before, separator, after = text.rpartition(end_mark)
    if not separator:
        message = "continue_final_message: the model's chat template changes the last message, so leave it out"
        raise InvalidParameter(message, "continue_final_message")
    return before if after.startswith(" ") else before.rstrip()


def _byte_decoder(source: Path, tokenizer: Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """Return how tokens become bytes, and whether decoded texts start with an extra space.

    Raises ConfigError for a tokenizer that is neither byte-level nor of SentencePiece.
    """
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {"type": "none"}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    if steps.keys() == {"ByteLevel"}:
        return _byte_level_bytes, False
    if not steps.keys() <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        raise ConfigError(
            f"{source}: a tokenizer with the decoder {', '.join(steps)} is not supported; supported: byte-level "
            "and SentencePiece tokenizers"
        )

    strips = "Strip" in steps or steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
    return _sentencepiece_bytes, strips


_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_REST = [byte for byte in range(256) if byte not in _PRINTED]

#: GPT-2's printable character for each byte, by character.
LETTERS = {chr(byte): byte for byte in _PRINTED} | {chr(256 + place): byte for place, byte in enumerate(_REST)}


def _byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token, or the text of an added token."""
    try:
        return bytes([LETTERS[letter] for letter in token])
    except KeyError:  # an added token, which is written as it is
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    """Return the bytes of a SentencePiece token.

    A byte token looks like `<0x0A>`; in other tokens ▁ stands for a space.
    """
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()
