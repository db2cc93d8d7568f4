"""Advice on numbers that are not finite never says to serve in float32 what is served so."""

from __future__ import annotations

import pytest
import torch

from unfuse.core.plan import Params
from unfuse.stages.media import remedy


@pytest.mark.row("P47")
@pytest.mark.parametrize(
    ("dtype", "params", "advice"),
    [
        (torch.float16, {}, "serve the model in float32"),
        (None, {}, "serve the model in float32"),
        (torch.bfloat16, {"guidance_scale": 5.0}, "try a smaller guidance_scale, or serve the model in float32"),
        (torch.float32, {}, "download the model's files again, in case they are damaged"),
        (
            torch.float32,
            {"guidance_scale": 5.0, "lora": "ink"},
            "try a smaller guidance_scale or lora_scale, or download the model's files again, in case they are damaged",
        ),
    ],
)
def test_non_finite_advice_depends_on_dtype_and_parameters(
    dtype: torch.dtype | None, params: Params, advice: str
) -> None:
    assert remedy("the model", dtype, params) == advice
