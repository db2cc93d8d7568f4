"""Tiny chat models for the rows of public bug reports, each built once in a test run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.models.tokenizers_of import words
from tools.scripted_model import make_scripted_model
from tools.tiny_language import make_language_model
from tools.tiny_vision import make_vision_model

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <args>}\\n</tool_call><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
           (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
    {%- if reasoning_effort is defined %}
        {{- 'effort ' + reasoning_effort }}
    {%- endif %}
{%- endif %}
"""
"""Qwen2.5's own, shortened, with what Qwen3's has for thinking, and one that names a reasoning effort."""

SPOKEN = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

SCRIPTS: dict[str, Any] = {
    "hello": ["He", "llo", " w", "orld", "!"],
    "smile": ["\U0001f600"],
    "stop": ["one", " two", " three"],
    "many": "A longer text, so that there is something to cut.",
    "think": ["<think>", "hm", " hm", "</think>", "4"],
}


def make_qwen(folder: Path) -> Path:
    """A model of random weights with a chat template like Qwen2.5's."""
    make_language_model(folder, positions=1024)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": QWEN}))
    return folder


def make_spoken(folder: Path) -> Path:
    """A Llama of random weights with a tokenizer as SentencePiece's."""
    import torch
    import transformers

    folder.mkdir(parents=True)
    tokenizer = words(metaspace=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": SPOKEN}))
    ids = tokenizer.get_vocab()
    config = transformers.LlamaConfig(
        vocab_size=len(ids),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=ids["</s>"],
        bos_token_id=ids["<s>"],
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_scripted(folder: Path) -> Path:
    """A model that says the texts of `SCRIPTS`; an answer has 12 tokens where a request does not say how many."""
    make_scripted_model(folder, SCRIPTS, positions=512)
    (folder / "serving.json").write_text(json.dumps({"defaults": {"max_tokens": 12}}))
    return folder


def make_all(folder: Path) -> None:
    """All of them, each in a folder of its own."""
    make_qwen(folder / "pq")
    make_spoken(folder / "sp")
    make_scripted(folder / "says")
    make_vision_model(folder / "vl25")
