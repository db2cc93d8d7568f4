"""Language models in GGUF files: their metadata as transformers' configuration, and their weights by its names."""

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
from unfuse.weights.gguf import GGUF, QUANTISED, REPAIR, GgufContents, StoredTensor, contents

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}  # fmt: skip
"""Classes by `general.architecture`."""

ROUTED = "qwen3moe"  # the architecture whose layers are mixtures of experts

SCALED = "rope_freqs.weight"  # the tensor that divides the frequencies of rotary positions, where a model has it

OUTSIDE = {
    "token_embd.weight": ("model.embed_tokens.weight", "vh"), "output_norm.weight": ("model.norm.weight", "h"),
    "output.weight": ("lm_head.weight", "vh"),
}  # fmt: skip
LAYER = {
    "attn_norm.weight": ("input_layernorm.weight", "h"), "attn_q.weight": ("self_attn.q_proj.weight", "qh"),
    "attn_k.weight": ("self_attn.k_proj.weight", "kh"), "attn_v.weight": ("self_attn.v_proj.weight", "kh"),
    "attn_output.weight": ("self_attn.o_proj.weight", "hq"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "h"),
}  # fmt: skip
"""Of each layer: transformers' name of a tensor, and its shape, in letters that `expected` explains."""
DENSE = {
    "ffn_gate.weight": ("mlp.gate_proj.weight", "fh"), "ffn_up.weight": ("mlp.up_proj.weight", "fh"),
    "ffn_down.weight": ("mlp.down_proj.weight", "hf"),
}  # fmt: skip
EXPERTS = {
    "ffn_gate_inp.weight": ("mlp.gate.weight", "eh"), "ffn_gate_exps.weight": ("mlp.experts.gate_proj", "emh"),
    "ffn_up_exps.weight": ("mlp.experts.up_proj", "emh"), "ffn_down_exps.weight": ("mlp.experts.down_proj", "ehm"),
}  # fmt: skip
"""Instead of these in a mixture of experts. transformers has the first two of all experts in one tensor: `_joined`."""
BIASES = {f"attn_{one}.bias": (f"self_attn.{one}_proj.bias", of) for one, of in zip("qkv", "qkk", strict=True)}
OUTPUT_BIAS = {"attn_output.bias": ("self_attn.o_proj.bias", "h")}
NORMS = {f"attn_{one}_norm.weight": (f"self_attn.{one}_norm.weight", "d") for one in "qk"}

CHUNK = 1 << 21  # numbers that are dequantised at a time


class GgufModel(ModelFolder):
    """Reads a model that is one GGUF file, as `ModelFolder` reads those of transformers.

    Everything raises ConfigError, naming the file, for one that cannot be served.
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
    def is_whole(self) -> bool:
        return True

    @override
    def beside(self, name: str) -> dict[str, Any]:
        return ModelFolder(self.home).beside(name)

    @override
    def config(self, component: str) -> dict[str, Any]:
        return self._config

    @override
    def weights(self, component: str) -> list[Path]:
        return [self.path] if self._tensors_by_name else []

    @override
    def tensors(self, component: str) -> dict[str, tuple[str, int]]:
        stored = self._contents.tensors
        names = {name: stored[own] for own, name in self._tensors_by_name.items()}
        return {name: (f"GGUF {QUANTISED[one.kind][0]}", math.prod(one.shape)) for name, one in names.items()}

    @override
    def size(self, component: str) -> int:
        return self.path.stat().st_size

    @override
    def identity(self, *components: str) -> str:
        """A fingerprint of all bytes, independent of the file's name."""
        digest = xxhash.xxh3_128(f"{self.path.stat().st_size}\0".encode())
        digest.update(FINGERPRINTS.content(self.path))
        return digest.hexdigest()

    @override
    def files(self, component: str) -> dict[str, Path]:
        return {self.path.name: self.path}

    def load(self, kind: Any, dtype: torch.dtype) -> Any:
        """The model, of that class of transformers, with all its weights in that dtype, on the CPU.

        A few MiB of one tensor at a time are dequantised, and the experts of one layer joined, so that it takes little
        more memory than its weights.
        """
        import torch

        config = kind.config_class(**self._config)
        weights = dict[str, torch.Tensor]()
        with torch.device("meta"):
            model = kind(config).to(dtype)
        with self.path.open("rb") as stream:
            for own, name in self._tensors_by_name.items():
                weights[name] = self._unpermuted(own, _dequantised(stream, self._contents.tensors[own], dtype))
            positions = type(model.model.rotary_emb)(config)
            if factors := self._contents.tensors.get(SCALED):
                positions.inv_freq /= _dequantised(stream, factors, torch.float32)
        model.model.rotary_emb = positions
        model.load_state_dict(_joined(weights), strict=False, assign=True)
        model.tie_weights()
        return model

    def _unpermuted(self, own: str, tensor: torch.Tensor) -> torch.Tensor:
        """Queries and keys of a llama as transformers has them: rows half a head apart lie side by side in files."""
        part = own.rpartition(".")[0].rpartition(".")[2]
        if self._contents.said["general.architecture"] != "llama" or part not in ("attn_q", "attn_k"):
            return tensor
        heads = self._config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    @cached_property
    def _contents(self) -> GgufContents:
        return contents(self.path)

    @cached_property
    def _config(self) -> dict[str, Any]:
        found = self._contents
        with self.reading("GGUF"):
            try:
                return config_of(found)
            except ConfigError as error:
                raise ConfigError(f"model {self.path} cannot be served: {error}") from error

    @cached_property
    def _tensors_by_name(self) -> dict[str, str]:
        """Names in transformers by those in the file, which has all tensors that the model needs, and no others."""
        stored = self._contents.tensors
        with self.reading("GGUF"):
            wanted = expected(self._config, stored)
        for own, (_, shape) in wanted.items():
            if own not in stored:
                raise ConfigError(f"model {self.path} lacks the tensor {own}; {REPAIR}")
            if stored[own].shape != shape:
                raise ConfigError(
                    f"model {self.path}: tensor {own} has the shape {stored[own].shape}, and {shape} by the "
                    f"configuration; {REPAIR}"
                )
        if unknown := sorted(stored.keys() - wanted.keys()):
            raise ConfigError(
                f"model {self.path} has the tensor {unknown[0][:80]}, which no {self.kind} has: give the model in "
                "transformers' format"
            )
        return {own: name for own, (name, _) in wanted.items() if name}


def files_of(path: Path) -> ModelFolder:
    """Reads the model at a path: a folder, or a GGUF file."""
    return GgufModel(path) if path.suffix == GGUF and path.is_file() else ModelFolder(path)


def config_of(found: GgufContents) -> dict[str, Any]:
    """What transformers would save. Raises ConfigError if not served, ValueError or TypeError for wrong values."""
    said, stored = found.said, found.tensors
    architecture = said.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"it is of the architecture {str(architecture)[:80]}: served are GGUF files of {', '.join(ARCHITECTURES)}"
        )
    own = {key.removeprefix(f"{architecture}."): value for key, value in said.items()}
    if said.get("split.count", 1) > 1:
        raise ConfigError("it is one of several files: join them (llama-gguf-split --merge), and give the result")
    if own.get("expert_count") and architecture != ROUTED:
        raise ConfigError(f"it is a mixture of experts: of these only the architecture {ROUTED} is served")
    hidden, heads = _whole(own, "embedding_length"), _whole(own, "attention.head_count")
    kept = _whole(own, "attention.head_count_kv", heads)
    width = _whole(own, "attention.key_length", hidden // heads)
    if heads % kept or width % 2 or _whole(own, "attention.value_length", width) != width:
        raise ValueError(f"{heads} heads, {kept} of them with keys, of {width} numbers each")
    if _whole(own, "rope.dimension_count", width) != width:
        raise ConfigError("its rotary positions turn a part of each head, which is not served")
    ids = {name: said.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": _whole(own, "vocab_size", len(said.get("tokenizer.ggml.tokens", ()))),
        "hidden_size": hidden,
        "intermediate_size": _whole(own, "feed_forward_length"),
        "num_hidden_layers": _whole(own, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kept,
        "head_dim": width,
        "max_position_embeddings": _whole(own, "context_length"),
        "rms_norm_eps": _positive(own, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(own),
        "tie_word_embeddings": "output.weight" not in stored,
        "attention_bias": "blk.0.attn_output.bias" in stored,
        "sliding_window": own.get("attention.sliding_window"),
        **{f"{name}_token_id": id for name, id in ids.items() if id is not None},
        **(_routing(own) if architecture == ROUTED else {}),
    }


def _routing(own: Mapping[str, Any]) -> dict[str, Any]:
    """What a mixture has more. Raises ValueError where a token would go to more experts than there are."""
    experts, each = _whole(own, "expert_count"), _whole(own, "expert_used_count")
    if each > experts:
        raise ValueError(f"{each} of {experts} experts for each token")
    width = _whole(own, "expert_feed_forward_length")
    return {
        "num_experts": experts, "num_experts_per_tok": each, "moe_intermediate_size": width,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def expected(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """By the names of GGUF, the tensors of a model: transformers' name, if it has one, and the shape.

    Raises ValueError where there are fewer tensors than layers.
    """
    layers, kind = config["num_hidden_layers"], config["architectures"][0]
    if layers > len(stored):
        raise ValueError(f"{layers} layers, and {len(stored)} tensors")
    biased = kind == ARCHITECTURES["qwen2"] or config["attention_bias"]
    routed = kind == ARCHITECTURES[ROUTED]
    each = {
        **LAYER,
        **(EXPERTS if routed else DENSE),
        **(BIASES if biased else {}),
        **(OUTPUT_BIAS if config["attention_bias"] else {}),
        **(NORMS if routed or kind == ARCHITECTURES["qwen3"] else {}),
    }
    tied = {"output.weight"} if config["tie_word_embeddings"] else set()
    named = {own: one for own, one in OUTSIDE.items() if own not in tied}
    for layer in range(layers):
        named |= {f"blk.{layer}.{own}": (f"model.layers.{layer}.{name}", of) for own, (name, of) in each.items()}
    if SCALED in stored and kind == ARCHITECTURES["llama"]:
        named[SCALED] = ("", "r")
    width, heads, kept = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    sizes = {
        "v": config["vocab_size"], "h": config["hidden_size"], "f": config["intermediate_size"],
        "q": heads * width, "k": kept * width, "d": width, "r": width // 2,
        "e": config.get("num_experts", 0), "m": config.get("moe_intermediate_size", 0),
    }  # fmt: skip
    return {own: (name, tuple(sizes[letter] for letter in of)) for own, (name, of) in named.items()}


def _rope(own: Mapping[str, Any]) -> dict[str, Any]:
    """How positions turn. Raises ConfigError for a scaling that is not served."""
    base = {"rope_theta": _positive(own, "rope.freq_base", 10_000.0)}
    kind = own.get("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": kind, "factor": _positive(own, "rope.scaling.factor"), **base}
    if kind != "none" or "rope.scale_linear" in own:
        raise ConfigError(f"its rotary positions are scaled by {str(kind)[:40]}: linear is served")
    return {"rope_type": "default", **base}


def _whole(own: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = own.get(key, default)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ValueError(f"{key} is {str(value)[:40]}")
    return value


def _positive(own: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = own.get(key, default)
    if type(value) is not float or not 0 < value < math.inf:
        raise ValueError(f"{key} is {str(value)[:40]}")
    return value


def _joined(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights, with the gates of a layer's experts and what they gate in one tensor, as transformers has them."""
    import torch

    for gates in [name for name in weights if name.endswith(".experts.gate_proj")]:
        layer = gates.removesuffix("gate_proj")
        weights[f"{layer}gate_up_proj"] = torch.cat([weights.pop(gates), weights.pop(f"{layer}up_proj")], 1)
    return weights


def _dequantised(stream: BinaryIO, stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    made = torch.empty(stored.shape, dtype=dtype)
    rows = made.view(-1, stored.shape[-1])
    width, step = stored.size // len(rows), max(1, CHUNK // stored.shape[-1])
    stream.seek(stored.start)
    for chunk in torch.split(rows, step):
        raw = np.fromfile(stream, np.uint8, len(chunk) * width).reshape(len(chunk), width)
        chunk.copy_(torch.from_numpy(dequantize(raw, GGMLQuantizationType(stored.kind))))
    return made
