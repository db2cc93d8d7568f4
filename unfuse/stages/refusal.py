"""Which language models cannot be served with paged attention, by their configuration. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The kinds of rotary position scaling that are served: results with them were compared with transformers. The other
#: kinds depend on the current length of the text.
ROPES = ("default", "linear", "llama3", "yarn")

#: Configuration entries of models with another kind of attention, each with a verb phrase for the error message.
UNLIKE = {
    "attention_chunk_size": "uses chunked attention",
    "attn_logit_softcapping": "caps attention logits",
    "kv_lora_rank": "compresses keys and values",
}


def refusal(config: Mapping[str, Any], multimodal: bool = False) -> str:
    """Return why a model of this configuration cannot be served, or "" if it can.

    `config`: the contents of `config.json`.
    `multimodal`: whether the model also reads pictures. It may then have rotary positions of three sections.
    """
    unsupported_layers = sorted({*(config.get("layer_types") or ())} - {"full_attention"})
    if unsupported_layers:
        return f"its layers are of kind {', '.join(unsupported_layers)}: only full_attention is supported"

    window = config.get("use_sliding_window", True) and config.get("sliding_window")
    if window and "layer_types" not in config:
        return f"it uses sliding window attention ({window} tokens), which is not supported"

    for name, behaviour in UNLIKE.items():
        if config.get(name):
            return f"it {behaviour} ({name}), which is not supported"

    sinks = [name for name, value in config.items() if "sink" in name and value]
    if sinks:
        return f"it has attention sinks ({sinks[0]}), which are not supported"

    rope = {**(config.get("rope_parameters") or config.get("rope_scaling") or {})}
    if multimodal and rope.pop("mrope_section", None):
        rope = {name: "default" if value == "mrope" else value for name, value in rope.items()}

    kind = rope.get("rope_type", rope.get("type", "default"))
    if "mrope_section" in rope or any(isinstance(value, Mapping) for value in rope.values()):
        return "its rotary embedding has several sections or differs by layer, which is not supported"
    if kind not in ROPES:
        return f"its rotary embedding has the scaling {kind}; supported: {', '.join(ROPES)}"
    return ""
