"""Components whose weights torchao has quantised, as diffusers and transformers save them in safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfuse.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

TORCHAO = "torchao"
SETTING = "quantization_config"  # what says in a configuration that it is of quantised weights

ANYWHERE = frozenset({
    "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig",
    "Int8DynamicActivationIntxWeightConfig", "Float8WeightOnlyConfig",
})  # fmt: skip
ON_GPUS = frozenset({"Int4WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"})
"""Of torchao's ways to quantise, those for which it has no code on CPUs."""

DETAILS = frozenset({
    "FqnToConfig", "PerRow", "PerAxis", "PerGroup", "PerTensor", "MappingType", "torch.dtype", "KernelPreference",
    "IntxChooseQParamsAlgorithm", "IntxPackingFormat", "Int4PackingFormat", "Int4ChooseQParamsAlgorithm",
    "Float8MMConfig", "Float8PackingFormat",
})  # fmt: skip
"""What configurations of these say more: torchao would look up any other name, and call what it finds."""

CODES = ("I8", "U8", "I16", "U16", "I32", "U32", "F4", "F6", "E8")
"""Prefixes of the safetensors dtypes of quantised weights, which have no meaning without scales."""

SCALES = frozenset({
    "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_zero_point", "weight_packed", "weight_shape",
    "weight_format", "scale_weight", "scale_input", "input_scale", "scaled_fp8", "comfy_quant", "SCB", "absmax",
    "quant_map", "nested_absmax", "nested_quant_map", "qweight", "qzeros", "g_idx", "wscales", "wzeros",
})  # fmt: skip
"""Names of the tensors with which quantised values are converted to weights (scales, zero points, tables)."""

BUFFERS = frozenset({
    "position_ids", "token_type_ids", "num_batches_tracked", "relative_position_index", "bias", "masked_bias", "mask",
    "attn_mask", "causal_mask",
})  # fmt: skip
"""Names of integer tensors that are not weights."""

CASTS = "Tensor", "Int8Tensor"  # tensors that compute in any dtype, whichever they were made of


def refusal(said: object, speaks: bool) -> str:
    """Why weights that are quantised so are not served, in words; "" if they are. A language model `speaks`."""
    by = str(said.get("quant_method") if isinstance(said, dict) else said)[:40]
    if by != TORCHAO:
        return f"by {by}, which is not served: give it as torchao quantises it, as GGUF, or in its original precision"
    if speaks:
        return f"by {by}, which is not served of language models: give a GGUF file, or its original precision"
    found = {*_types(said)}
    if unknown := sorted(found - ANYWHERE - ON_GPUS - DETAILS):
        served = ", ".join(sorted(ANYWHERE | ON_GPUS))
        return f"by {by} with {unknown[0][:80]}, which is not served: served are {served}"
    if not found & (ANYWHERE | ON_GPUS):
        return f"by a {by} that does not say how: quantise it anew, with {by} 0.17 or later"
    return ""


def codes(tensors: Mapping[str, tuple[str, int]]) -> str:
    """Return why tensors with these names and types are unsupported quantised weights; "" if they are not."""
    instead = "provide it in its original precision, quantised by torchao, or as GGUF"
    for name, (dtype, _) in tensors.items():
        layer, _, last = name.rpartition(".")
        if last in SCALES or ".quant_state" in name:
            return f"is quantised in an unsupported format (it has {name[:160]}): {instead}"
        if dtype.startswith(CODES) and layer and last not in BUFFERS:
            return f"is quantised in an unsupported format ({name[:160]} is of type {dtype}): {instead}"
    return ""


def is_whole_number(dtype: str) -> bool:
    """Return whether a safetensors dtype is an integer or boolean type."""
    return dtype[0] in "IU" or dtype == "BOOL"


def library(said: Iterable[object]) -> set[str]:
    """The library that components with these settings need. Raises ConfigError where it is not installed."""
    if not any(said):
        return set()
    if find_spec(TORCHAO) is None:
        raise ConfigError("weights that are quantised by torchao need that library: pip install 'unfuse[torchao]'")
    return {TORCHAO}


def check(component: str, said: object, files: Iterable[Path], dtype: str, device: str, offload: str) -> None:
    """Raises ConfigError, before anything is loaded, where a component cannot compute; `said` if it is quantised."""
    from safetensors import safe_open

    if not said:
        return
    if offload != "none":
        raise ConfigError(f"{component} is quantised by torchao, which --offload {offload} cannot move: leave it out")
    if device == "cpu" and (needs := sorted(ON_GPUS.intersection(_types(said)))):
        served = ", ".join(sorted(ANYWHERE))
        raise ConfigError(f"{component} is quantised by torchao's {needs[0]}, which needs a GPU: on a CPU use {served}")
    for file in files:
        with safe_open(file, "pt") as opened:
            described = [json.loads(text) for key, text in (opened.metadata() or {}).items() if key.endswith(".weight")]
        made = {one["_data"]["dtype"]["_data"] for one in described if one.get("_type") not in CASTS}
        if made - {dtype}:
            raise ConfigError(f"{component} is quantised for {min(made)}: use --dtype {component}={min(made)}")


def packed_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes in memory, which are those of its parts if it has any."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    parts, _ = tensor.__tensor_flatten__()
    return sum(getattr(tensor, part).nbytes for part in parts)


def _types(said: Any) -> Iterator[str]:
    """All names of types in a configuration."""
    left = [said]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            if "_type" in one:
                yield str(one["_type"])
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
