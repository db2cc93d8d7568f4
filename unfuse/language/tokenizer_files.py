"""Where tokenizers come from: a folder as transformers saves it, or a GGUF file. Read as data, never as code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from unfuse.core.errors import ConfigError
from unfuse.weights.gguf import REPAIR, metadata

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Tokens that templates may name."""
NAMED_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""And how a GGUF file calls their ids."""
TEMPLATE = "tokenizer.chat_template"
CONTROL, USER_DEFINED = 3, 4  # of `tokenizer.ggml.token_type`: tokens that are no text, and those that are, unsplit


class Parts(NamedTuple):
    """What a tokenizer is made of: the library's, chat templates and tokens by name, ids that end a text (None: no)."""

    source: Path
    tokenizer: Tokenizer
    templates: Mapping[str, str]
    named: Mapping[str, str]
    stops: Sequence[int | None]


class Split(NamedTuple):
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
    "default": Split(),
    "llama-bpe": Split(WORDS % "{1,3}", rest=False, whole=True),
    "qwen2": Split(WORDS % "", rest=False, composed=True),
    "smollm": Split(r"\p{N}"),
}
"""By `tokenizer.ggml.pre`, as the tokenizer.json of these models has it; a GGUF file has but the name."""


def of_folder(folder: Path) -> Parts:
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
    return Parts(folder, tokenizer, own or templates, named, stops if isinstance(stops, list) else [stops])


def of_gguf(file: Path) -> Parts:
    """What the metadata of a GGUF file have. Raises ConfigError for kinds of tokenizers that are not served."""
    said = metadata(file)
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
    return Parts(file, tokenizer, templates, named, [ids["eos"], ids["eot"], ids["eom"]])


def _merging(tokens: Sequence[str], merges: Sequence[str], how: Split) -> Tokenizer:
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
