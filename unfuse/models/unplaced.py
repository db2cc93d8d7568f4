"""Tensors of weight files that a model has no place for: those that are refused, and those that may be there.

Published files hold tensors that no forward reads: tables that follow from the configuration, counters and losses of
training, and layers that their makers removed later. diffusers and transformers leave these out with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

TABLES = (
    r"position_ids", r"token_type_ids", r"relative_position_index", r"num_batches_tracked", r"causal_mask",
    r"attn_mask", r"masked_bias", r"inv_freq", r"rotary_emb\.(cos|sin)_cached", r"pos_embed",
)  # fmt: skip
"""The ends of names of tensors that follow from the configuration: older versions of libraries saved them."""

LEFT_OVER = (
    r"y_embedding", r"norm_final\.weight", r"_extra_state", r"time_embed(ding)?\.cond_proj\.weight",
)  # fmt: skip
"""The ends of names of what training used, or what another step count would use, and no forward of these models does.

PixArt's and Sana's `y_embedding` replaced captions in training; Lumina's and Z-Image's `norm_final` is never called;
merges with LCM carry its `cond_proj`, which only a configuration with `time_cond_proj_dim` has a place for.
"""

TRAINING = (
    r"loss\.", r"model_ema\.", r"logvar\.", r"accum_", r"repa_projectors\.", r"pos_embedder\.",
    r"per_channel_statistics\.", r"(video_|audio_)?embeddings_connector",
)  # fmt: skip
"""What names, or parts of them, begin with that are of losses, averages and counters, or of another component."""

UNCOMPUTED = re.compile(rf"(^|\.)(({'|'.join((*TABLES, *LEFT_OVER))})$|({'|'.join(TRAINING)}))")

MARKERS = {"__index_timestep_zero__": "zero_cond_t"}
"""Names of empty tensors by which other tools mark a kind of model, and the field of the configuration that says so."""


def unplaced(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Return the tensors in files that a model has no place for, but those that change nothing.

    A class of transformers that is a part of a larger model, such as an encoder, may be given the files of the whole:
    the head, the decoder or the tower that it does not have lies in modules of their own.
    """
    left = [key for key in unexpected if not UNCOMPUTED.search(key) and not _is_said(model, key)]
    prefix = getattr(model, "base_model_prefix", None)
    if prefix is None:
        return left
    children = {name for name, _ in model.named_children()}
    inside = {key: key if key.partition(".")[0] in children else key.removeprefix(f"{prefix}.") for key in left}
    return [key for key, own in inside.items() if own.partition(".")[0] in children]


def _is_said(model: Any, key: str) -> bool:
    """Whether a tensor only marks what the model's configuration says as well."""
    field = MARKERS.get(key.rpartition(".")[2])
    return bool(field) and bool(getattr(model.config, str(field), False))
