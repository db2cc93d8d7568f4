"""Language models in GGUF files, dequantized on loading into transformers' classes.

The metadata become transformers' configuration, and the tensors get its names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import xxhash
from typing_extensions import override

from unfuse.core.errors import ConfigError
from unfuse.weights.fingerprints import FINGERPRINTS
from unfuse.weights.folder import ModelFolder
from unfuse.weights.gguf import GGUF, QUANTIZED, REPAIR, GgufContents, StoredTensor, contents

if TYPE_CHECKING:
    import torch

#: Classes of transformers by `general.architecture`.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}

#: The architecture with a mixture of experts.
ROUTED = "qwen3moe"

#: The optional tensor that divides the frequencies of the rotary position embedding.
SCALED = "rope_freqs.weight"

#: The tensors outside the layers by their names in GGUF: transformers' name, and the shape in letters (see `expected`).
OUTSIDE = {
    "token_embd.weight": ("model.embed_tokens.weight", "vh"),
    "output_norm.weight": ("model.norm.weight", "h"),
    "output.weight": ("lm_head.weight", "vh"),
}

#: The same for the tensors of each layer.
LAYER = {
    "attn_norm.weight": ("input_layernorm.weight", "h"),
    "attn_q.weight": ("self_attn.q_proj.weight", "qh"),
    "attn_k.weight": ("self_attn.k_proj.weight", "kh"),
    "attn_v.weight": ("self_attn.v_proj.weight", "kh"),
    "attn_output.weight": ("self_attn.o_proj.weight", "hq"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "h"),
}

#: The feed-forward tensors of a layer without experts.
DENSE = {
    "ffn_gate.weight": ("mlp.gate_proj.weight", "fh"),
    "ffn_up.weight": ("mlp.up_proj.weight", "fh"),
    "ffn_down.weight": ("mlp.down_proj.weight", "hf"),
}

#: The feed-forward tensors of a mixture of experts. transformers has gate and up of all experts in one tensor: see
#: `_join_gates`.
EXPERTS = {
    "ffn_gate_inp.weight": ("mlp.gate.weight", "eh"),
    "ffn_gate_exps.weight": ("mlp.experts.gate_proj", "emh"),
    "ffn_up_exps.weight": ("mlp.experts.up_proj", "emh"),
    "ffn_down_exps.weight": ("mlp.experts.down_proj", "ehm"),
}

#: Optional tensors of a layer.
BIASES = {f"attn_{letter}.bias": (f"self_attn.{letter}_proj.bias", of) for letter, of in zip("qkv", "qkk", strict=True)}
OUTPUT_BIAS = {"attn_output.bias": ("self_attn.o_proj.bias", "h")}
NORMS = {f"attn_{letter}_norm.weight": (f"self_attn.{letter}_norm.weight", "d") for letter in "qk"}

#: How many values are dequantized at a time.
CHUNK = 1 << 21


class GgufModel(ModelFolder):
    """A model in one GGUF file, with the interface of `ModelFolder`.

    Every method raises ConfigError if the file is not supported.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.hub = None

    @property
    @override
    def home(self) -> Path:
        return self.path.parent

    @property
    @override
    def created(self) -> int:
        return int(self.path.stat().st_mtime)

    @cached_property
    @override
    def is_transformers_model(self) -> bool:
        return True

    @override
    def optional_config(self, name: str) -> dict[str, Any]:
        return ModelFolder(self.home).optional_config(name)

    @override
    def config(self, component: str) -> dict[str, Any]:
        return self._config

    @override
    def weights(self, component: str) -> list[Path]:
        return [self.path] if self._model_names else []

    @override
    def tensors(self, component: str) -> dict[str, tuple[str, int]]:
        stored = self._contents.tensors
        tensors = {name: stored[gguf_name] for gguf_name, name in self._model_names.items()}
        return {
            name: (f"GGUF {QUANTIZED[tensor.kind][0]}", math.prod(tensor.shape)) for name, tensor in tensors.items()
        }

    @override
    def size(self, component: str) -> int:
        return self.path.stat().st_size

    @override
    def identity(self, *components: str) -> str:
        """Return a fingerprint of all bytes, independent of the file's name."""
        digest = xxhash.xxh3_128(f"{self.path.stat().st_size}\0".encode())
        digest.update(FINGERPRINTS.content(self.path))
        return digest.hexdigest()

    @override
    def files(self, component: str) -> dict[str, Path]:
        return {self.path.name: self.path}

    def load(self, kind: Any, dtype: torch.dtype) -> Any:
        """Return the model on the CPU, as this class of transformers, dequantized to this dtype.

        A few MiB of one tensor are dequantized at a time, and the experts of one layer joined. It therefore takes
        little more memory than the model's weights.
        """
        import torch

        config = kind.config_class(**self._config)
        weights = dict[str, torch.Tensor]()
        with torch.device("meta"):
            model = kind(config).to(dtype)
        with self.path.open("rb") as stream:
            for gguf_name, name in self._model_names.items():
                tensor = _dequantize(stream, self._contents.tensors[gguf_name], dtype)
                weights[name] = self._unpermute(gguf_name, tensor)

            # Buffers are not in the file: the rotary embedding is made anew outside the meta device.
            rotary = type(model.model.rotary_emb)(config)
            if factors := self._contents.tensors.get(SCALED):
                rotary.inv_freq /= _dequantize(stream, factors, torch.float32)

        model.model.rotary_emb = rotary
        model.load_state_dict(_join_gates(weights), strict=False, assign=True)
        model.tie_weights()
        return model

    def _unpermute(self, gguf_name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor with the rows of a llama's queries and keys in transformers' order.

        In the file, rows that are half a head apart are adjacent. Other tensors are unchanged.
        """
        part = gguf_name.rpartition(".")[0].rpartition(".")[2]
        if self._contents.metadata["general.architecture"] != "llama" or part not in ("attn_q", "attn_k"):
            return tensor
        heads = self._config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    @cached_property
    def _contents(self) -> GgufContents:
        """The file's metadata and tensor table."""
        return contents(self.path)

    @cached_property
    def _config(self) -> dict[str, Any]:
        """The configuration in transformers' terms."""
        file_contents = self._contents
        with self.reading("GGUF"):
            try:
                return config_of(file_contents)
            except ConfigError as error:
                raise ConfigError(f"model {self.path} cannot be served: {error}") from error

    @cached_property
    def _model_names(self) -> dict[str, str]:
        """The tensors' names in transformers, by their names in the file.

        Raises ConfigError unless the file has all tensors that the model needs, and no others.
        """
        stored = self._contents.tensors
        with self.reading("GGUF"):
            needed = expected(self._config, stored)
        for name, (_, shape) in needed.items():
            if name not in stored:
                raise ConfigError(f"model {self.path} lacks the tensor {name}; {REPAIR}")
            if stored[name].shape != shape:
                raise ConfigError(
                    f"model {self.path}: tensor {name} has the shape {stored[name].shape}, but its configuration "
                    f"requires {shape}; {REPAIR}"
                )
        if unknown := sorted(stored.keys() - needed.keys()):
            raise ConfigError(
                f"model {self.path} has the tensor {unknown[0][:80]}, which a {self.kind} does not have: use the model "
                "in transformers' format"
            )
        return {gguf_name: name for gguf_name, (name, _) in needed.items() if name}


def open_files(path: Path) -> ModelFolder:
    """Return the reader of the model at a path: a folder, or a GGUF file."""
    return GgufModel(path) if path.suffix == GGUF and path.is_file() else ModelFolder(path)


def config_of(contents: GgufContents) -> dict[str, Any]:
    """Return transformers' configuration of a model in a GGUF file.

    Raises ConfigError if it is not supported, ValueError or TypeError for invalid values.
    """
    metadata = contents.metadata
    stored = contents.tensors
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"its architecture {str(architecture)[:80]} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )

    settings = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    if metadata.get("split.count", 1) > 1:
        raise ConfigError("it is one of several files: merge them with llama-gguf-split --merge, and use the result")
    if settings.get("expert_count") and architecture != ROUTED:
        raise ConfigError(f"it is a mixture of experts, which is supported only for the architecture {ROUTED}")

    hidden, heads = _integer(settings, "embedding_length"), _integer(settings, "attention.head_count")
    kv_heads = _integer(settings, "attention.head_count_kv", heads)
    head_dim = _integer(settings, "attention.key_length", hidden // heads)
    if heads % kv_heads or head_dim % 2 or _integer(settings, "attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{heads} heads, {kv_heads} key/value heads and head size {head_dim} do not match")
    if _integer(settings, "rope.dimension_count", head_dim) != head_dim:
        raise ConfigError("its rotary embedding covers only a part of each head, which is not supported")

    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": _integer(settings, "vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        "hidden_size": hidden,
        "intermediate_size": _integer(settings, "feed_forward_length"),
        "num_hidden_layers": _integer(settings, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": _integer(settings, "context_length"),
        "rms_norm_eps": _positive(settings, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(settings),
        "tie_word_embeddings": "output.weight" not in stored,
        "attention_bias": "blk.0.attn_output.bias" in stored,
        "sliding_window": settings.get("attention.sliding_window"),
        **{f"{name}_token_id": id for name, id in ids.items() if id is not None},
        **(_routing(settings) if architecture == ROUTED else {}),
    }


def _routing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a mixture of experts.

    Raises ValueError if a token would be routed to more experts than there are.
    """
    experts, experts_per_token = _integer(settings, "expert_count"), _integer(settings, "expert_used_count")
    if experts_per_token > experts:
        raise ValueError(f"{experts_per_token} experts per token, but only {experts} experts")
    width = _integer(settings, "expert_feed_forward_length")
    return {
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def expected(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors that a model must have, by their names in GGUF.

    Each has transformers' name ("" if it has none), and the shape. Raises ValueError if there are fewer tensors than
    layers.
    """
    layers, kind = config["num_hidden_layers"], config["architectures"][0]
    if layers > len(stored):
        raise ValueError(f"{layers} layers, but only {len(stored)} tensors")

    has_biases = kind == ARCHITECTURES["qwen2"] or config["attention_bias"]
    has_experts = kind == ARCHITECTURES[ROUTED]
    layer_tensors = {
        **LAYER,
        **(EXPERTS if has_experts else DENSE),
        **(BIASES if has_biases else {}),
        **(OUTPUT_BIAS if config["attention_bias"] else {}),
        **(NORMS if has_experts or kind == ARCHITECTURES["qwen3"] else {}),
    }

    tied = {"output.weight"} if config["tie_word_embeddings"] else set()
    tensors = {gguf_name: entry for gguf_name, entry in OUTSIDE.items() if gguf_name not in tied}
    for layer in range(layers):
        for gguf_name, (name, letters) in layer_tensors.items():
            tensors[f"blk.{layer}.{gguf_name}"] = (f"model.layers.{layer}.{name}", letters)
    if SCALED in stored and kind == ARCHITECTURES["llama"]:
        tensors[SCALED] = ("", "r")

    head_dim = config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    sizes = {
        "v": config["vocab_size"],
        "h": config["hidden_size"],
        "f": config["intermediate_size"],
        "q": heads * head_dim,
        "k": kv_heads * head_dim,
        "d": head_dim,
        "r": head_dim // 2,
        "e": config.get("num_experts", 0),
        "m": config.get("moe_intermediate_size", 0),
    }
    return {
        gguf_name: (name, tuple(sizes[letter] for letter in letters)) for gguf_name, (name, letters) in tensors.items()
    }


def _rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the rotary position embedding.

    Raises ConfigError for an unsupported scaling.
    """
    base = {"rope_theta": _positive(settings, "rope.freq_base", 10_000.0)}
    kind = settings.get("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": kind, "factor": _positive(settings, "rope.scaling.factor"), **base}
    if kind != "none" or "rope.scale_linear" in settings:
        raise ConfigError(f"its rotary embedding has the scaling {str(kind)[:40]}; supported: linear")
    return {"rope_type": "default", **base}


def _integer(settings: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive 31-bit integer. Raises ValueError for other values."""
    value = settings.get(key, default)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ValueError(f"{key} is {str(value)[:40]}, not a positive integer")
    return value


def _positive(settings: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive, finite float. Raises ValueError for other values."""
    value = settings.get(key, default)
    if type(value) is not float or not 0 < value < math.inf:
        raise ValueError(f"{key} is {str(value)[:40]}, not a positive number")
    return value


def _join_gates(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with gate and up projections of a layer's experts joined.

    transformers has both in one tensor (experts, 2 * moe_intermediate, hidden).
    """
    import torch

    for gates in [name for name in weights if name.endswith(".experts.gate_proj")]:
        layer = gates.removesuffix("gate_proj")
        weights[f"{layer}gate_up_proj"] = torch.cat([weights.pop(gates), weights.pop(f"{layer}up_proj")], 1)
    return weights


def _dequantize(stream: BinaryIO, stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of an open file, dequantized to this dtype."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    tensor = torch.empty(stored.shape, dtype=dtype)
    rows = tensor.view(-1, stored.shape[-1])
    row_bytes = stored.size // len(rows)
    chunk_rows = max(1, CHUNK // stored.shape[-1])

    stream.seek(stored.start)
    for chunk in torch.split(rows, chunk_rows):
        raw = np.fromfile(stream, np.uint8, len(chunk) * row_bytes).reshape(len(chunk), row_bytes)
        chunk.copy_(torch.from_numpy(dequantize(raw, GGMLQuantizationType(stored.kind))))
    return tensor
