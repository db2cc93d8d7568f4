"""Classifier-free guidance as stages agree on it: when it applies, and how its second set of embeddings is named."""

from __future__ import annotations

from unfuse.core.plan import Params
from unfuse.stages.base import need

NEGATIVE = "negative_"  # prefix of what was made from the negative prompt; the value is None without guidance
TOWARDS, AWAY = "towards", "away"  # the halves of guidance: what is predicted for the prompt, and for its negative


def guidance_scale(params: Params) -> float:
    """How much further than the negative prompt's a prediction goes. Raises PermanentError without a scale."""
    return need(params, "guidance_scale", float)


def applies(scale: float) -> bool:
    """Whether there is a second half at that scale: above 1, as diffusers has it."""
    return scale > 1.0
