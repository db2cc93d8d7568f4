"""What a model's configuration says against it, as `config.json` has it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from unfuse.stages.refusal import refusal

SERVED: list[dict[str, Any]] = [
    {},
    {"sliding_window": 131072, "use_sliding_window": False, "rope_theta": 1e6},
    {"sliding_window": None, "rope_scaling": None},
    {"layer_types": ["full_attention"] * 2, "sliding_window": 4096, "use_sliding_window": True},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    {"kv_lora_rank": None, "attention_chunk_size": None},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sliding_window": 4096}, "it uses sliding window attention (4096 tokens)"),
    ({"sliding_window": 4096, "use_sliding_window": True}, "it uses sliding window attention (4096 tokens)"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "its layers are of kind linear_attention"),
    ({"attention_chunk_size": 8192}, "it uses chunked attention"),
    ({"attn_logit_softcapping": 50.0}, "it caps attention logits"),
    ({"kv_lora_rank": 512}, "it compresses keys and values"),
    ({"add_attention_sink_bias": True}, "it has attention sinks (add_attention_sink_bias)"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "its rotary embedding has the scaling longrope"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "its rotary embedding has several sections"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "has several sections or differs by layer"),
]


@pytest.mark.parametrize("config", SERVED, ids=str)
def test_full_attention_configs_are_accepted(config: dict[str, Any]) -> None:
    assert refusal(config) == ""


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=lambda given: "" if isinstance(given, str) else str(given))
def test_unsupported_attention_is_rejected_with_a_reason(config: dict[str, Any], reason: str) -> None:
    said = refusal(config)

    assert said.startswith(("it ", "its ")) and "supported" in said
    assert reason in said


@pytest.mark.slow
def test_model_config_check_does_not_import_torch() -> None:
    asked = "import sys, unfuse.stages.refusal; print({'torch', 'transformers'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout == "set()\n"
