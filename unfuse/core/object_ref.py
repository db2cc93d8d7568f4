"""Handles to stage outputs. A ref holds no data and no address: addresses come from the registry of workers."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import msgspec

DTYPES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Tensor types that stages may hand on, with bytes per element."""

PACKED = "q4"  # the type of a tensor narrowed to four bits a number: blocks of BLOCK numbers, the last one filled up
BLOCK = 32  # numbers that share a scale; one block takes BLOCK_BYTES, the scale's two and half a byte for each number

BLOCK_BYTES = 2 + BLOCK // 2

ALIGNMENT = 64  # tensors start at multiples of this many bytes: a cache line, and enough for every vector load

CHUNK_BYTES = 4 * 1024 * 1024
MAX_CHUNKS = 256
MAX_TENSORS = 256
MAX_DIMS = 16


class TensorMeta(msgspec.Struct, frozen=True):
    """One named tensor inside an object. `dtype` is "none" for a value that is None; offset and nbytes are bytes.

    `wide` is set when the tensor was narrowed to `dtype` to be stored: readers convert it back to the type `wide`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    wide: str = ""


class ObjectRef(msgspec.Struct, frozen=True):
    """The handle to one stage output: named tensors in one sealed allocation.

    `owner` is the id of the worker that holds the object, `node` the node of that worker. `generation` tells a reused
    allocation from the one that was sealed. `checksums` are xxh3-64, one for each chunk of `chunk_bytes(nbytes)`.
    Readers must show `key`. `created_at` is Unix seconds.
    """

    id: str
    owner: str
    node: str
    request: str
    stage: str
    attempt: int
    generation: int
    nbytes: int
    tensors: tuple[TensorMeta, ...]
    checksums: tuple[int, ...]
    key: bytes
    created_at: float

    @property
    def whole(self) -> bool:
        """Whether the object was all written when the ref was made, or is only announced."""
        return len(self.checksums) * chunk_bytes(self.nbytes) >= self.nbytes


def chunk_bytes(nbytes: int) -> int:
    """Bytes of each chunk of an object: at least CHUNK_BYTES, and so many that there are at most MAX_CHUNKS chunks."""
    return max(CHUNK_BYTES, -(-nbytes // MAX_CHUNKS))


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[tuple[TensorMeta, ...], int]:
    """Place tensors, given as (name, dtype, shape), one after another in one allocation.

    Returns their descriptions and the total bytes. A dtype of "none" takes no room. Raises ValueError for an unknown
    dtype, a shape that is not allowed, too many tensors, or two of one name.
    """
    metas: list[TensorMeta] = []
    offset = 0
    for name, dtype, shape in tensors:
        if len(shape) > MAX_DIMS or any(side < 0 for side in shape):
            raise ValueError(f"tensor {name!r} has shape {shape}")
        if dtype not in ("none", PACKED) and dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} has dtype {dtype}: stages can hand on {', '.join(DTYPES)}")
        size = -(-prod(shape) // BLOCK) * BLOCK_BYTES if dtype == PACKED else DTYPES.get(dtype, 0) * prod(shape)
        metas.append(TensorMeta(name, dtype, shape, offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    if len(metas) > MAX_TENSORS or len({meta.name for meta in metas}) != len(metas):
        raise ValueError(f"an object has up to {MAX_TENSORS} tensors of different names, not {[m.name for m in metas]}")
    return tuple(metas), offset
