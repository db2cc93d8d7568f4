"""What to do about numbers that are not finite, in words."""

from __future__ import annotations

import torch

from unfuse.core.plan import Params


def remedy(what: str, dtype: torch.dtype | None, params: Params | None = None) -> str:
    """Return what a person can do where a part of a model, in that dtype, made numbers that are not finite.

    `params` are those of the request, if these may be the reason.
    """
    asked = params or {}
    knobs = ["guidance_scale"] * bool(asked.get("guidance_scale")) + ["lora_scale"] * bool(asked.get("lora"))
    tries = [f"try a smaller {' or '.join(knobs)}"] if knobs else []
    if dtype == torch.float32:
        tries.append("fetch the model's files anew, in case they are damaged")
    else:
        tries.append(f"serve {what} in float32")
    return ", or ".join(tries)
