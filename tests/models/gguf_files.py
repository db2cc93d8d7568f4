"""GGUF files of models that transformers saved, written by the `gguf` package as llama.cpp's converter does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tools.tiny_language import TEMPLATE

ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "Qwen2ForCausalLM": ("qwen2", gguf.MODEL_ARCH.QWEN2),
    "Qwen3ForCausalLM": ("qwen3", gguf.MODEL_ARCH.QWEN3),
    "Qwen3MoeForCausalLM": ("qwen3moe", gguf.MODEL_ARCH.QWEN3MOE),
}
QUANTIZED = gguf.GGMLQuantizationType


def write_gguf(file: Path, folder: Path, kind: QUANTIZED = QUANTIZED.F32, **said: Any) -> Path:
    """The model of that folder. `kind` is the type of its matrices; `said` are more metadata of it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    name, architecture = ARCHITECTURES[type(model).__name__]
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, name)
    heads, kept = config.num_attention_heads, config.num_key_value_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kept)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if name == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    add_tokenizer(writer, folder)
    for key, value in said.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key if key.startswith("split.") else f"{name}.{key}", value)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for theirs, tensor in apart(model.state_dict()):
        if theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = names.get_name(theirs, (".weight", ".bias"))
        assert own is not None
        own += "" if own.endswith((".weight", ".bias")) else ".weight"
        array = tensor.float().numpy()
        if name == "llama" and theirs.split(".")[-2] in ("q_proj", "k_proj"):
            array = permuted(array, heads if "q_proj" in theirs else kept)
        stored = kind if array.ndim > 1 else QUANTIZED.F32
        writer.add_tensor(own, gguf.quants.quantize(array, stored), raw_dtype=stored)
    if (factors := rope_factors(model)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return file


def apart(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, those of experts as llama.cpp has them: one tensor for what gates, and one for what is gated."""
    for name, tensor in weights.items():
        if name.endswith(".experts.gate_up_proj"):
            gates, gated = tensor.chunk(2, 1)
            yield name.replace("gate_up", "gate"), gates
            yield name.replace("gate_up", "up"), gated
        else:
            yield name, tensor


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """The tokenizer of `tools.tiny_language` in that folder."""
    said = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = said["model"]["vocab"]
    added = {token["content"] for token in said["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in said["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in added else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_pad_token_id(vocabulary["<|endoftext|>"])
    writer.add_chat_template(TEMPLATE)


def permuted(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Queries or keys as llama.cpp turns them."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def rope_factors(model: Any) -> np.ndarray[Any, Any] | None:
    """By what Llama 3.1's frequencies are divided, from their definition; None for models of another kind."""
    rope = model.config.rope_parameters
    if rope["rope_type"] != "llama3":
        return None
    width, old = model.config.head_dim, rope["original_max_position_embeddings"]
    frequencies = 1 / rope["rope_theta"] ** (torch.arange(0, width, 2).double() / width)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    found = []
    for wave in (2 * torch.pi / frequencies).tolist():
        smooth = min(max((old / wave - low) / (high - low), 0), 1)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)
