"""Tiny tokenizers of each kind, trained on a text of this repository, as folders and as GGUF files."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"
NUMBERS = "in 2024 and 2025, 12345 of a   b   12   34   \n\n   5   "
SPECIALS = ["<s>", "</s>", "<|turn|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

TURNS = "{%- for m in messages %}<|turn|>{{ m.role }}\n{{ m['content'] }}</s>\n{% endfor %}"
OPEN = "{%- if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
TOOLS = """{{ bos_token }}{% set ns = namespace(last='') %}
{%- if tools %}{% for t in tools %}{{ t | tojson(indent=2) }}
{% endfor %}{% endif %}
{%- for m in messages[::-1] %}
    {%- if m.tool_calls is defined %}{% continue %}{% endif %}
    {%- set ns.last = m.role %}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}{% endgeneration %}
    {%- else %}
{{ m.content | default('none') }} <|turn|> {% endif %}
{%- endfor %}{{ ns.last }} {{ documents is none }} {{ strftime_now('%Y') }}
{{ mood | default('calm') }} {{ {'é': '<&>'} | tojson }}"""
ALTERNATE = """{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must take turns') }}{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def letters(pre: str) -> Tokenizer:
    """A byte-level tokenizer that splits texts as that of SmolLM, Llama 3 or Qwen 2 does, or GPT-2's."""
    tokenizer, words = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = {
        "default": [words],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), words],
        "llama-bpe": [pre_tokenizers.Split(Regex(WORDS % "{1,3}"), "isolated"), bytes_only],
        "qwen2": [pre_tokenizers.Split(Regex(WORDS % ""), "isolated"), bytes_only],
    }
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits[pre])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())
    if pre == "llama-bpe":
        tokenizer = without_merges(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", tokenizer.token_to_id("<s>"))])
    return tokenizer


def words(metaspace: bool) -> Tokenizer:
    """As SentencePiece's: words begin with ▁, and what is unknown is written as bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    trained(tokenizer, [], "<unk>", *BYTES)
    return tokenizer


def trained(tokenizer: Tokenizer, alphabet: list[str], *more: str) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=[*SPECIALS, *more], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT.read_text(), NUMBERS * 30], trainer)
    more_tokens = [AddedToken(token, normalized=False, special=False) for token in ("<think>", "<a b ü>")]
    tokenizer.add_tokens(more_tokens)


def without_merges(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, some of whose tokens no merges make: they are found whole."""
    said = json.loads(tokenizer.to_str())
    said["model"] |= {"merges": said["model"]["merges"][:-100], "ignore_merges": True}
    return Tokenizer.from_str(json.dumps(said))


def plain_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, its byte tokens no longer special, so that they are merely known."""
    said = json.loads(tokenizer.to_str())
    said["added_tokens"] = [token for token in said["added_tokens"] if token["content"] not in BYTES]
    return Tokenizer.from_str(json.dumps(said))


def save(folder: Path, tokenizer: Tokenizer, template: str | list[dict[str, str]], **settings: Any) -> None:
    """A folder as transformers saves it."""
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps({**said, "chat_template": template}))


def gguf(file: Path, said: Mapping[str, Any], version: int = 3) -> None:
    """A GGUF file of these metadata, and no tensors."""
    body = b"GGUF" + struct.pack("<IQQ", version, 0, len(said))
    for key, value in said.items():
        body += text(key) + typed(value)
    file.write_bytes(body)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def typed(value: Any) -> bytes:
    """A value behind its type: numbers are u32, i32, f64 or bool, as they come."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value) if value >= 0 else struct.pack("<Ii", 5, value)
        case float():
            return struct.pack("<Id", 12, value)
        case str():
            return struct.pack("<I", 8) + text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        case _:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def metadata_of(tokenizer: Tokenizer, pre: str, template: str) -> dict[str, Any]:
    """What a GGUF file would say of a byte-level tokenizer."""
    said = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    added = {token["content"]: 3 if token["special"] else 4 for token in said["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in said["model"]["merges"]]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [added.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": vocabulary["<s>"],
        "tokenizer.ggml.eos_token_id": vocabulary["</s>"],
        "tokenizer.ggml.eot_token_id": vocabulary["<|turn|>"],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": template,
        "general.a_float": 0.5,
    }
