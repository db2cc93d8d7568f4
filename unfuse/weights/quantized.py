"""Weights quantized by torchao, as diffusers and transformers save them in safetensors files.

Other quantization formats are recognized by their tensors, and refused.
"""

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

#: The field of a configuration that describes quantized weights.
SETTING = "quantization_config"

#: torchao's quantization methods that run on every device.
ANYWHERE = frozenset(
    {
        "Int8WeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "IntxWeightOnlyConfig",
        "Int8DynamicActivationIntxWeightConfig",
        "Float8WeightOnlyConfig",
    }
)

#: torchao's quantization methods that have no implementation for CPUs.
ON_GPUS = frozenset({"Int4WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"})

#: The other types in configurations of these methods. Any other name is refused: torchao would look it up and call it.
DETAILS = frozenset(
    {
        "FqnToConfig",
        "PerRow",
        "PerAxis",
        "PerGroup",
        "PerTensor",
        "MappingType",
        "torch.dtype",
        "KernelPreference",
        "IntxChooseQParamsAlgorithm",
        "IntxPackingFormat",
        "Int4PackingFormat",
        "Int4ChooseQParamsAlgorithm",
        "Float8MMConfig",
        "Float8PackingFormat",
    }
)

#: Prefixes of the safetensors dtypes of quantized weights, which have no meaning without scales.
CODES = ("I8", "U8", "I16", "U16", "I32", "U32", "F4", "F6", "E8")

#: Names of the tensors with which quantized values are converted to weights (scales, zero points, tables).
SCALES = frozenset(
    {
        "weight_scale",
        "weight_scale_2",
        "weight_scale_inv",
        "weight_zero_point",
        "weight_packed",
        "weight_shape",
        "weight_format",
        "scale_weight",
        "scale_input",
        "input_scale",
        "scaled_fp8",
        "comfy_quant",
        "SCB",
        "absmax",
        "quant_map",
        "nested_absmax",
        "nested_quant_map",
        "qweight",
        "qzeros",
        "g_idx",
        "wscales",
        "wzeros",
    }
)

#: Names of integer tensors that are not weights.
BUFFERS = frozenset(
    {
        "position_ids",
        "token_type_ids",
        "num_batches_tracked",
        "relative_position_index",
        "bias",
        "masked_bias",
        "mask",
        "attn_mask",
        "causal_mask",
    }
)

#: torchao's tensor classes that compute in any dtype, whatever dtype they were quantized from.
CASTS = "Tensor", "Int8Tensor"


def refusal(config: object, speaks: bool) -> str:
    """Return why weights with these quantization settings are not supported; "" if they are.

    `speaks`: whether the model is a language model.
    """
    by = str(config.get("quant_method") if isinstance(config, dict) else config)[:40]
    if by != TORCHAO:
        return f"by {by}, which is not supported: use torchao, GGUF or the original precision"
    if speaks:
        return f"by {by}, which is not supported for language models: use GGUF or the original precision"

    types = {*_types(config)}
    if unknown := sorted(types - ANYWHERE - ON_GPUS - DETAILS):
        served = ", ".join(sorted(ANYWHERE | ON_GPUS))
        return f"by {by} with {unknown[0][:80]}, which is not supported; supported: {served}"
    if not types & (ANYWHERE | ON_GPUS):
        return f"by {by} without the quantization type: quantize it again with {by} 0.17 or later"
    return ""


def codes(tensors: Mapping[str, tuple[str, int]]) -> str:
    """Return why tensors of these dtypes are unsupported quantized weights; "" if not.

    `tensors`: dtype and number of elements by name.
    """
    instead = "provide it in its original precision, quantized by torchao, or as GGUF"
    for name, (dtype, _) in tensors.items():
        layer, _, last = name.rpartition(".")
        if last in SCALES or ".quant_state" in name:
            return f"is quantized in an unsupported format (it has {name[:160]}): {instead}"
        if dtype.startswith(CODES) and layer and last not in BUFFERS:
            return f"is quantized in an unsupported format ({name[:160]} is of type {dtype}): {instead}"
    return ""


def is_whole_number(dtype: str) -> bool:
    """Return whether a safetensors dtype is an integer or boolean type."""
    return dtype[0] in "IU" or dtype == "BOOL"


def library(configs: Iterable[object]) -> set[str]:
    """Return the library that components with these quantization settings need, if any.

    Raises ConfigError if it is not installed.
    """
    if not any(configs):
        return set()
    if find_spec(TORCHAO) is None:
        raise ConfigError("weights quantized by torchao need the library torchao: pip install 'unfuse[torchao]'")
    return {TORCHAO}


def check(component: str, config: object, files: Iterable[Path], dtype: str, device: str, offload: str) -> None:
    """Check that a component with these quantization settings can run, before it is loaded.

    `config`: its quantization settings; no check if it has none. `dtype`, `device`, `offload`: how it is to run.
    Raises ConfigError if it cannot.
    """
    from safetensors import safe_open

    if not config:
        return
    if offload != "none":
        raise ConfigError(
            f"{component} is quantized by torchao, which does not support --offload: add {component}=none to --offload"
        )
    if device == "cpu" and (needs := sorted(ON_GPUS.intersection(_types(config)))):
        served = ", ".join(sorted(ANYWHERE))
        raise ConfigError(f"{component} is quantized by torchao's {needs[0]}, which needs a GPU: on a CPU use {served}")
    for file in files:
        with safe_open(file, "pt") as opened:
            described = [json.loads(text) for key, text in (opened.metadata() or {}).items() if key.endswith(".weight")]
        fixed = [tensor for tensor in described if tensor.get("_type") not in CASTS]
        dtypes = {tensor["_data"]["dtype"]["_data"] for tensor in fixed}
        if dtypes - {dtype}:
            raise ConfigError(f"{component} is quantized for {min(dtypes)}: use --dtype {component}={min(dtypes)}")


def packed_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes in memory: those of its parts if quantized."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    parts, _ = tensor.__tensor_flatten__()
    return sum(getattr(tensor, part).nbytes for part in parts)


def _types(config: Any) -> Iterator[str]:
    """Yield the names of all types in quantization settings."""
    remaining = [config]
    while remaining:
        value = remaining.pop()
        if isinstance(value, dict):
            if "_type" in value:
                yield str(value["_type"])
            remaining.extend(value.values())
        elif isinstance(value, list):
            remaining.extend(value)
