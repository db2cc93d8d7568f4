"""Floats in four bits: blocks of 32 that share a scale, as quantised weights are kept (GGUF's Q4_0, but symmetric)."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from unfuse.core.object_ref import BLOCK

LEVELS = 7  # a number is −7 to 7 times its block's scale


class Packed:
    """A tensor of this shape, as bytes: the scales of all blocks in float16, then two numbers in each byte."""

    def __init__(self, data: NDArray[np.uint8], shape: tuple[int, ...]) -> None:
        self.data, self.shape = data, shape


def pack(values: NDArray[np.float32]) -> Packed | None:
    """Round each number to the nearest multiple of its block's scale, which is a seventh of the largest there.

    Blocks are 32 numbers that follow each other in C order. A number is off by half a scale at most. None for tensors
    with a number that is not finite, or one that no scale reaches (beyond 458,000).
    """
    blocks = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: values.size] = values.reshape(-1)
    with np.errstate(over="ignore"):
        largest = np.abs(blocks).max(axis=1) / LEVELS
        scales = largest.astype(np.float16)
    if not np.isfinite(scales).all():
        return None
    scales.view(np.uint16)[scales > largest] -= 1  # rounded down: else seven scales may be too large for float16
    wide = scales.astype(np.float32)[:, None]
    multiples = np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide > 0)
    levels = (np.clip(np.rint(multiples), -LEVELS, LEVELS) + LEVELS).astype(np.uint8)
    pairs = levels[:, ::2] | levels[:, 1::2] << 4
    return Packed(np.concatenate([scales.view(np.uint8), pairs.reshape(-1)]), values.shape)


def unpack(data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The numbers of a packed tensor of that shape."""
    size = prod(shape)
    blocks = -(-size // BLOCK)
    scales = data[: 2 * blocks].view(np.float16).astype(np.float32)
    pairs = data[2 * blocks :].reshape(blocks, BLOCK // 2)
    levels = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(blocks, BLOCK).astype(np.float32) - LEVELS
    return (levels * scales[:, None]).reshape(-1)[:size].reshape(shape)
