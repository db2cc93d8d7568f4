"""Advice for errors about values that are not finite."""

from __future__ import annotations

import torch

from unfuse.core.plan import Params


def remedy(what: str, dtype: torch.dtype | None, params: Params | None = None) -> str:
    """Return advice for a part of a model (`what`, in `dtype`) that produced NaN or infinite values.

    `params` are the request's parameters, if they may be the cause.
    """
    asked = params or {}
    knobs = ["guidance_scale"] * bool(asked.get("guidance_scale")) + ["lora_scale"] * bool(asked.get("lora"))
    tries = [f"try a smaller {' or '.join(knobs)}"] if knobs else []
    if dtype == torch.float32:
        tries.append("download the model's files again, in case they are damaged")
    else:
        tries.append(f"serve {what} in float32")
    return ", or ".join(tries)
