"""Classifier-free guidance as stages agree on it: when it applies, and how its second set of embeddings is named."""

from __future__ import annotations

from unfuse.core.plan import Params
from unfuse.stages.base import need

NEGATIVE = "negative_"
"""Prefix of what was made from the negative prompt; such a value is None when guidance does not apply."""


def guided(params: Params) -> bool:
    """Whether guidance applies: its scale is above 1, as diffusers has it. Raises PermanentError without a scale."""
    return need(params, "guidance_scale", float) > 1.0
