"""Read the metadata and tensor table of GGUF files (versions 2 and 3)."""

from __future__ import annotations

import mmap
import struct
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from unfuse.core.errors import ConfigError

#: The suffix of GGUF files.
GGUF = ".gguf"

#: The remedy in messages about damaged files.
REPAIR = "download or save the model again"

#: The `struct` code of each scalar type.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

#: The other types of values.
TEXT, ARRAY = 8, 9

#: The most tensors that a file may have.
MAX_TENSORS = 1 << 16

#: The most dimensions that a tensor may have.
MAX_DIMENSIONS = 5

#: The supported quantization types by number: name, values per block, and bytes per block.
QUANTIZED = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
}


class StoredTensor(NamedTuple):
    """A tensor in a GGUF file."""

    #: Its shape in torch's order of dimensions.
    shape: tuple[int, ...]
    #: Its quantization type: a key of QUANTIZED.
    kind: int
    #: The position of its first byte in the file.
    start: int
    #: Bytes.
    size: int


class GgufContents(NamedTuple):
    """The metadata and tensor table of a GGUF file."""

    #: The metadata: numbers, strings and lists of either, by key.
    metadata: dict[str, Any]
    #: The tensors by name.
    tensors: dict[str, StoredTensor]
    #: The position at which the tensors' data start.
    data: int


def contents(file: Path) -> GgufContents:
    """Return the metadata and the tensor table of a GGUF file.

    Each tensor is complete, within the file, and does not overlap others. Raises ConfigError for an invalid file, and
    for a tensor of an unsupported type.
    """
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).contents()
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except (OSError, ValueError, struct.error) as error:  # UnicodeDecodeError is a ValueError
        raise ConfigError(f"{file} is not a GGUF file that can be read ({error}); {REPAIR}") from error


class _Reader:
    """Reads the values of a GGUF file in order.

    Raises ValueError if they are not valid.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def _read_metadata(self) -> dict[str, Any]:
        """Return the metadata by key."""
        if self._data[:4] != b"GGUF" or self._data[4:8] not in (b"\2\0\0\0", b"\3\0\0\0"):
            raise ValueError("it has no header of GGUF version 2 or 3")
        self._position = 16  # after the magic number, the version and the number of tensors
        return {self._read_text(): self._read_value(self._read_number("I")) for _ in range(self._read_number("Q"))}

    def contents(self) -> GgufContents:
        """Return the metadata and the checked tensor table."""
        metadata = self._read_metadata()
        (count,) = struct.unpack_from("<Q", self._data, 8)
        if count > MAX_TENSORS:
            raise ValueError(f"its header declares {count} tensors, more than {MAX_TENSORS}")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment {str(alignment)[:40]} is not a positive integer")

        entries = [(self._read_text(), self._read_tensor()) for _ in range(count)]
        data = -(-self._position // alignment) * alignment
        tensors = {name: _stored_tensor(name, data, alignment, *entry) for name, entry in entries}
        if len(tensors) < count:
            raise ValueError("two of its tensors have the same name")

        ordered = sorted(tensors.items(), key=lambda item: item[1].start)
        for (first_name, first), (second_name, second) in pairwise(ordered):
            if first.start + first.size > second.start:
                raise ValueError(f"its tensors {first_name} and {second_name} overlap")
        if ordered and (end := ordered[-1][1].start + ordered[-1][1].size) > len(self._data):
            raise ValueError(f"it has {len(self._data)} bytes, but its tensors end at byte {end}")
        return GgufContents(metadata, tensors, data)

    def _read_tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Return the shape, type and offset of the next tensor in the table."""
        dimensions = self._read_number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"it has a tensor of {dimensions} dimensions")
        shape = self._read_numbers(f"{dimensions}Q")
        return shape[::-1], self._read_number("I"), self._read_number("Q")

    def _read_value(self, kind: int) -> Any:
        """Return a metadata value of this type."""
        if kind == ARRAY:
            item_kind, count = self._read_number("I"), self._read_number("Q")
            if item_kind == TEXT:
                return [self._read_text() for _ in range(count)]
            return list(self._read_numbers(f"{count}{_scalar(item_kind)}"))
        return self._read_text() if kind == TEXT else self._read_number(_scalar(kind))

    def _read_text(self) -> str:
        """Return a length-prefixed UTF-8 text."""
        length = self._read_number("Q")
        if length > len(self._data) - self._position:
            raise ValueError("it ends in the middle of a text")
        self._position += length
        return self._data[self._position - length : self._position].decode()

    def _read_number(self, code: str) -> Any:
        """Return a number with this `struct` code."""
        return self._read_numbers(code)[0]

    def _read_numbers(self, codes: str) -> tuple[Any, ...]:
        """Return numbers with these `struct` codes."""
        numbers = struct.unpack_from(f"<{codes}", self._data, self._position)
        self._position += struct.calcsize(f"<{codes}")
        return numbers


def _scalar(kind: int) -> str:
    """Return the `struct` code of a scalar type."""
    if kind not in SCALARS:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return SCALARS[kind]


def _stored_tensor(
    name: str, data: int, alignment: int, shape: tuple[int, ...], kind: int, offset: int
) -> StoredTensor:
    """Return a tensor at this offset from byte `data`. Raises ConfigError for an unsupported type."""
    if kind not in QUANTIZED:
        served = ", ".join(known for known, _, _ in QUANTIZED.values())
        raise ConfigError(f"tensor {name} has the unsupported type {kind}: use a file with the types {served}")

    kind_name, block_values, block_bytes = QUANTIZED[kind]
    if not all(shape) or shape[-1] % block_values:
        raise ValueError(f"its tensor {name} has the shape {shape}, but {kind_name} has blocks of {block_values}")
    if offset % alignment:
        raise ValueError(f"its tensor {name} is not aligned to {alignment} bytes")
    return StoredTensor(shape, kind, data + offset, prod(shape) // block_values * block_bytes)
