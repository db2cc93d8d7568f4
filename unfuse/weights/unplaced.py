"""Unexpected tensors of weight files: those that are refused, and those that may be ignored.

Published files hold tensors that no forward uses: tables that follow from the configuration, counters and losses of
training, and layers that were removed later. diffusers and transformers ignore them with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

TABLES = (
    r"position_ids", r"token_type_ids", r"relative_position_index", r"num_batches_tracked", r"causal_mask",
    r"attn_mask", r"masked_bias", r"inv_freq", r"rotary_emb\.(cos|sin)_cached", r"pos_embed",
)  # fmt: skip
"""Ends of the names of tensors that follow from the configuration, which older versions of libraries saved."""

LEFT_OVER = (
    r"y_embedding", r"norm_final\.weight", r"_extra_state", r"time_embed(ding)?\.cond_proj\.weight",
)  # fmt: skip
"""Ends of the names of tensors that only training, or a distilled variant of the model, uses.

Some transformers' `y_embedding` replaced captions in training, and some `norm_final` is never called;
merges with LCM have its `cond_proj`, which only exists with `time_cond_proj_dim` in the configuration.
"""

TRAINING = (
    r"loss\.", r"model_ema\.", r"logvar\.", r"accum_", r"repa_projectors\.", r"pos_embedder\.",
    r"per_channel_statistics\.", r"(video_|audio_)?embeddings_connector",
)  # fmt: skip
"""Beginnings of names, or of their parts, of losses, averages and counters, or of another component."""

UNCOMPUTED = re.compile(rf"(^|\.)(({'|'.join((*TABLES, *LEFT_OVER))})$|({'|'.join(TRAINING)}))")

MARKERS = {"__index_timestep_zero__": "zero_cond_t"}
"""Names of empty tensors by which other tools mark a variant of a model, with the equivalent configuration field."""


def unplaced(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Return the unexpected tensors that must be refused.

    Tensors of other modules are accepted: the files of an encoder may hold the whole transformers model, with a head,
    a decoder or a vision tower that the encoder's class does not have.
    """
    left = [key for key in unexpected if not UNCOMPUTED.search(key) and not _is_declared(model, key)]
    prefix = getattr(model, "base_model_prefix", None)
    if prefix is None:
        return left
    children = {name for name, _ in model.named_children()}
    inside = {key: key if key.partition(".")[0] in children else key.removeprefix(f"{prefix}.") for key in left}
    return [key for key, own in inside.items() if own.partition(".")[0] in children]


def _is_declared(model: Any, key: str) -> bool:
    """Return whether a tensor only marks a variant that the model's configuration names too."""
    field = MARKERS.get(key.rpartition(".")[2])
    return bool(field) and bool(getattr(model.config, str(field), False))
