"""Noise of a seed that is equal in all versions of torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: torch computes normal numbers in groups of this size on a CPU.
GROUP = 16


def draw_noise(sizes: Sequence[int], generator: torch.Generator, dtype: torch.dtype | None) -> Tensor:
    """Return normal numbers as `torch.randn` of torch 2.13 draws them.

    On a CPU, older versions draw other 16-bit numbers from the same seed, so 16-bit numbers are drawn in float32 and
    rounded. A last, incomplete group of 16 is replaced by a whole one, as in torch 2.13.

    `generator`: draws on its device.
    `dtype`: None is float32.
    """
    import torch

    if dtype in (None, torch.float32) or generator.device.type != "cpu":
        return torch.randn(tuple(sizes), generator=generator, device=generator.device, dtype=dtype)
    count = prod(sizes)
    drawn = torch.randn(-(-count // GROUP) * GROUP if count > GROUP else count, generator=generator)
    if drawn.numel() > count:
        drawn = torch.cat([drawn[: count - GROUP], drawn[-GROUP:]])
    return drawn.to(dtype).reshape(tuple(sizes))
