"""Object refs: handles to stage outputs, with the layout of their tensors.

A ref has no data and no address: addresses come from the registry of workers.
"""

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
"""Tensor types of stage outputs, with bytes per element."""

PACKED = "q4"  # dtype of a tensor quantized to 4 bits a number, in blocks of BLOCK numbers; the last one is padded
BLOCK = 32  # numbers that share a scale
BLOCK_BYTES = 2 + BLOCK // 2  # bytes of a block: two for the scale, and half a byte for each number

ALIGNMENT = 64  # tensors start at multiples of this many bytes: a cache line, and enough for every vector load

CHUNK_BYTES = 4 * 1024 * 1024  # the least bytes of a chunk, which has a checksum of its own
MAX_CHUNKS = 256
MAX_TENSORS = 256
MAX_DIMS = 16


class TensorMeta(msgspec.Struct, frozen=True):
    """One named tensor inside an object."""

    #: Name of the value, unique within the object.
    name: str
    #: A key of DTYPES, PACKED, or "none" for a value that is None.
    dtype: str
    #: Number of elements along each dimension.
    shape: tuple[int, ...]
    #: Offset in the object, in bytes.
    offset: int
    #: Bytes of the tensor, without padding.
    nbytes: int
    #: Dtype to which readers convert the tensor, if it was narrowed to `dtype` to be stored; "": it was not.
    is_wide: str = ""


class ObjectRef(msgspec.Struct, frozen=True):
    """The handle to one stage output: named tensors in one sealed allocation."""

    #: Id under which the owner stores the object.
    id: str
    #: Id of the worker that stores the object.
    owner: str
    #: Node of that worker.
    node: str
    #: Id of the request.
    request: str
    #: Name of the stage that made it.
    stage: str
    #: Number of the attempt that made it.
    attempt: int
    #: Number that distinguishes the allocation from later ones at the same offset of the arena.
    generation: int
    #: Bytes of the allocation, with the padding between tensors.
    nbytes: int
    #: Its tensors, in the order of their offsets.
    tensors: tuple[TensorMeta, ...]
    #: xxh3-64 of each chunk of `chunk_bytes(nbytes)` bytes.
    checksums: tuple[int, ...]
    #: Secret with which readers prove that they may read the object.
    key: bytes
    #: When it was allocated, in Unix seconds.
    created_at: float

    @property
    def is_whole(self) -> bool:
        """Whether the object was complete when the ref was made; False: it was only announced."""
        return len(self.checksums) * chunk_bytes(self.nbytes) >= self.nbytes


def chunk_bytes(nbytes: int) -> int:
    """Return the bytes of each chunk of an object.

    It is at least CHUNK_BYTES, and large enough for at most MAX_CHUNKS chunks.
    """
    return max(CHUNK_BYTES, -(-nbytes // MAX_CHUNKS))


def layout_tensors(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[tuple[TensorMeta, ...], int]:
    """Return the layout of tensors in one allocation, and its bytes.

    Tensors are given as (name, dtype, shape). The dtype "none" takes no bytes. Raises ValueError for an unknown dtype,
    a shape that is not allowed, too many tensors, or two of one name.
    """
    metas: list[TensorMeta] = []
    offset = 0
    for name, dtype, shape in tensors:
        if len(shape) > MAX_DIMS or any(dimension < 0 for dimension in shape):
            raise ValueError(f"tensor {name!r} has the invalid shape {shape}")
        if dtype not in ("none", PACKED) and dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} has the unsupported dtype {dtype}; supported: {', '.join(DTYPES)}")
        # in each form -(-a // b), the division rounds up
        size = -(-prod(shape) // BLOCK) * BLOCK_BYTES if dtype == PACKED else DTYPES.get(dtype, 0) * prod(shape)
        metas.append(TensorMeta(name, dtype, shape, offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    if len(metas) > MAX_TENSORS or len({meta.name for meta in metas}) != len(metas):
        raise ValueError(f"an object has up to {MAX_TENSORS} tensors of different names, not {[m.name for m in metas]}")
    return tuple(metas), offset
