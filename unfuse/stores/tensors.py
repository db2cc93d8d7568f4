"""Tensors as bytes, also with four-bit quantization.

Types that numpy lacks are stored as their bits, so numpy arrays are stored and read without torch. The quantization is
that of GGUF's Q4_0, but symmetric: blocks of 32 four-bit numbers share a scale.
"""

from __future__ import annotations

import sys
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unfuse.core.object_ref import BLOCK, PACKED, TensorMeta

if TYPE_CHECKING:
    from torch import Tensor


#: A quantized number is −7 to 7 times its block's scale.
LEVELS = 7


class PackedTensor:
    """A quantized tensor: the float16 scales of all blocks, then two numbers in each byte."""

    def __init__(self, data: NDArray[np.uint8], shape: tuple[int, ...]) -> None:
        self.data, self.shape = data, shape


def pack(values: NDArray[np.float32]) -> PackedTensor | None:
    """Quantize to four bits: round each number to the nearest multiple of its block's scale.

    The scale is a seventh of the largest magnitude in the block. A block is 32 consecutive numbers in C order. The
    error of a number is half a scale at most, except in blocks without a magnitude above about 1e-5. Returns None for
    tensors with a number that is not finite, or so large (beyond 458,000) that its scale would overflow float16.
    """
    blocks = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: values.size] = values.reshape(-1)
    with np.errstate(over="ignore"):
        largest = np.abs(blocks).max(axis=1) / LEVELS
        scales = largest.astype(np.float16)
    if not np.isfinite(scales).all():
        return None
    scales.view(np.uint16)[scales > largest] -= 1  # rounded down: otherwise, seven scales may overflow float16
    wide_scales = scales.astype(np.float32)[:, None]
    multiples = np.divide(blocks, wide_scales, out=np.zeros_like(blocks), where=wide_scales > 0)
    levels = (np.clip(np.rint(multiples), -LEVELS, LEVELS) + LEVELS).astype(np.uint8)
    pairs = levels[:, ::2] | levels[:, 1::2] << 4
    return PackedTensor(np.concatenate([scales.view(np.uint8), pairs.reshape(-1)]), values.shape)


def unpack(data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the numbers of a packed tensor of that shape."""
    size = prod(shape)
    blocks = -(-size // BLOCK)
    scales = data[: 2 * blocks].view(np.float16).astype(np.float32)
    pairs = data[2 * blocks :].reshape(blocks, BLOCK // 2)
    levels = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(blocks, BLOCK).astype(np.float32) - LEVELS
    return (levels * scales[:, None]).reshape(-1)[:size].reshape(shape)


Value: TypeAlias = "NDArray[Any] | Tensor | PackedTensor | None"

#: The numpy types for the bits of types that numpy lacks.
RAW = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}

#: Dtypes by encoding of floats.
NARROW = {"bf16": "bfloat16", "fp16": "float16", "int4": PACKED}

#: The dtypes that each narrow dtype can stand for.
WIDE: dict[str, tuple[str, ...]] = {
    "bfloat16": ("float32",),
    "float16": ("float32",),
    PACKED: ("float32", "bfloat16", "float16"),
}


def narrowed(value: Value, encoding: str) -> Value:
    """Return a tensor of floats rounded to fewer bits.

    Other tensors, and those that would overflow, are returned unchanged. Raises TypeError for a numpy array to be
    narrowed to bfloat16.
    """
    narrow = NARROW[encoding]
    if value is None or isinstance(value, PackedTensor) or describe(value)[0] not in WIDE[narrow]:
        return value
    if narrow == PACKED:
        return pack(_floats(value)) or value
    if isinstance(value, np.ndarray):
        if encoding == "bf16":
            raise TypeError("numpy does not support bfloat16: encode the outputs of this stage as fp16")
        with np.errstate(over="ignore"):
            rounded = value.astype(np.float16)
        return value if np.isinf(rounded).sum() > np.isinf(value).sum() else rounded
    import torch

    half = value.to(getattr(torch, narrow))
    return value if half.isinf().sum() > value.isinf().sum() else half


def describe(value: Value) -> tuple[str, tuple[int, ...]]:
    """Return the dtype's name and the shape of a tensor; "none" for None. Raises TypeError."""
    if value is None:
        return "none", ()
    if isinstance(value, np.ndarray):
        return _name(value.dtype), value.shape
    if isinstance(value, PackedTensor):
        return PACKED, value.shape
    torch = sys.modules.get("torch")  # there is no torch tensor where torch was never imported
    if torch is not None and isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch."), tuple(value.shape)
    raise TypeError(f"an object can contain only numpy arrays, torch tensors and None, not {type(value).__name__}")


@cache
def _name(dtype: np.dtype[Any]) -> str:
    """Return a dtype's name.

    Cached, because numpy builds it at each call, which takes a third of the time of a small put.
    """
    return dtype.name


def flat_bytes(value: NDArray[Any] | Tensor) -> NDArray[np.uint8] | None:
    """Return a tensor's bytes in C order without copying.

    None if they are not contiguous in this process's memory, or not in its byte order.
    """
    if isinstance(value, np.ndarray):
        is_plain = value.flags.c_contiguous and value.dtype.isnative
        return value.reshape(-1).view(np.uint8) if is_plain else None
    if value.device.type != "cpu" or not value.is_contiguous():
        return None
    import torch

    elements = value.detach().as_strided((value.numel(),), (1,))  # dimensions of one element may have any stride
    raw: NDArray[np.uint8] = elements.view(torch.uint8).numpy()
    return raw


def copy_into(memory: NDArray[np.uint8], value: NDArray[Any] | Tensor) -> None:
    """Write a tensor of any strides, device and byte order into `memory`, in C order."""
    if isinstance(value, np.ndarray):
        memory.view(value.dtype.newbyteorder("=")).reshape(value.shape)[...] = value
    else:
        _torch_over(memory, *describe(value)).copy_(value.detach())


def numpy_over(memory: NDArray[np.uint8], meta: TensorMeta) -> NDArray[Any] | None:
    """Return the array that `meta` describes over an object's bytes. None for dtype "none".

    It is a copy if the values are decoded to the dtype that they had before. bfloat16 and float8 are returned as bits.
    """
    if meta.dtype == "none":
        return None
    part = memory[meta.offset : meta.offset + meta.nbytes]
    if meta.dtype == PACKED:
        wide = unpack(part, meta.shape)
        return _bits_of_bfloat16(wide) if meta.is_wide in RAW else wide.astype(meta.is_wide, copy=False)
    array = part.view(RAW.get(meta.dtype, meta.dtype)).reshape(meta.shape)
    # The bits of a bfloat16 are the upper half of the bits of a float32.
    if meta.is_wide and meta.dtype in RAW:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(meta.is_wide) if meta.is_wide else array


def torch_over(memory: NDArray[np.uint8], meta: TensorMeta) -> Tensor | None:
    """Return the torch tensor that `meta` describes over an object's bytes, as `numpy_over`.

    The memory is read-only, which torch does not know: writing to it ends the process.
    """
    if meta.dtype == "none":
        return None
    part = memory[meta.offset : meta.offset + meta.nbytes]
    if meta.dtype == PACKED:
        import torch

        return torch.from_numpy(unpack(part, meta.shape)).to(getattr(torch, meta.is_wide))
    tensor = _torch_over(part, meta.dtype, meta.shape)
    return tensor.float() if meta.is_wide else tensor


def _floats(value: NDArray[Any] | Tensor) -> NDArray[np.float32]:
    """Return a tensor as a float32 array."""
    if isinstance(value, np.ndarray):
        return value.astype(np.float32, copy=False)
    floats: NDArray[np.float32] = value.detach().float().cpu().numpy()
    return floats


def _bits_of_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 numbers, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _torch_over(memory: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> Tensor:
    import torch

    return torch.from_numpy(memory).view(getattr(torch, dtype)).reshape(shape)
