"""What a GGUF file says of itself, and where its tensors lie. After the format's specification, versions 2 and 3."""

from __future__ import annotations

import mmap
import struct
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from unfuse.core.errors import ConfigError

GGUF = ".gguf"  # the suffix of such files

REPAIR = "download or save the model again"

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9

MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 5

QUANTISED = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
}  # fmt: skip
"""Types of tensors that are served, by their numbers: name, numbers in a block, and bytes of that."""


class StoredTensor(NamedTuple):
    """A tensor in a file: its shape as torch has it, its type (a number of QUANTISED), the bytes where it lies."""

    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


class GgufContents(NamedTuple):
    """What a file says, its tensors by name, and at which byte the first of them may begin."""

    said: dict[str, Any]
    tensors: dict[str, StoredTensor]
    data: int


def contents(file: Path) -> GgufContents:
    """All values by key, and a table of the tensors: each is whole, lies in the file, and shares no byte with others.

    Values are numbers, strings, and lists of either. Raises ConfigError, naming the file, for any other table, and for
    a tensor of a type that is not served.
    """
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).contents()
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except (OSError, ValueError, struct.error) as error:  # UnicodeDecodeError is a ValueError
        raise ConfigError(f"{file} is not a GGUF file that can be read ({error}); {REPAIR}") from error


class _Reader:
    """Reads values one behind the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def _values(self) -> dict[str, Any]:
        if self._data[:4] != b"GGUF" or self._data[4:8] not in (b"\2\0\0\0", b"\3\0\0\0"):
            raise ValueError("it does not begin as versions 2 and 3 do")
        self._at = 16  # behind magic, version and the number of tensors
        return {self._text(): self._value(self._number("I")) for _ in range(self._number("Q"))}

    def contents(self) -> GgufContents:
        said, (count,) = self._values(), struct.unpack_from("<Q", self._data, 8)
        if count > MAX_TENSORS:
            raise ValueError(f"it is said to have {count} tensors")
        alignment = said.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its tensors are aligned to {str(alignment)[:40]}")
        found = [(self._text(), self._tensor()) for _ in range(count)]
        data = -(-self._at // alignment) * alignment
        tensors = {name: _placed(name, data, alignment, *tensor) for name, tensor in found}
        if len(tensors) < count:
            raise ValueError("two of its tensors have one name")
        placed = sorted(tensors.items(), key=lambda one: one[1].start)
        for (one, before), (other, behind) in pairwise(placed):
            if before.start + before.size > behind.start:
                raise ValueError(f"its tensors {one} and {other} overlap")
        if placed and (end := placed[-1][1].start + placed[-1][1].size) > len(self._data):
            raise ValueError(f"it has {len(self._data)} bytes, and its tensors end at byte {end}")
        return GgufContents(said, tensors, data)

    def _tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Shape, type and offset of the next one."""
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"it has a tensor of {dimensions} dimensions")
        shape = self._numbers(f"{dimensions}Q")
        return shape[::-1], self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == ARRAY:
            inside, count = self._number("I"), self._number("Q")
            if inside == TEXT:
                return [self._text() for _ in range(count)]
            return list(self._numbers(f"{count}{_scalar(inside)}"))
        return self._text() if kind == TEXT else self._number(_scalar(kind))

    def _text(self) -> str:
        length = self._number("Q")
        if length > len(self._data) - self._at:
            raise ValueError("it ends in the middle of a text")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _number(self, code: str) -> Any:
        return self._numbers(code)[0]

    def _numbers(self, codes: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{codes}", self._data, self._at)
        self._at += struct.calcsize(f"<{codes}")
        return found


def _scalar(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"value of the unknown type {kind}")
    return SCALARS[kind]


def _placed(name: str, data: int, alignment: int, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
    if kind not in QUANTISED:
        served = ", ".join(known for known, _, _ in QUANTISED.values())
        raise ConfigError(f"tensor {name} is of type {kind}, which is not served: give a file of the types {served}")
    called, numbers, width = QUANTISED[kind]
    if not all(shape) or shape[-1] % numbers:
        raise ValueError(f"its tensor {name} has the shape {shape}, and {called} has blocks of {numbers}")
    if offset % alignment:
        raise ValueError(f"its tensor {name} is not aligned to {alignment} bytes")
    return StoredTensor(shape, kind, data + offset, prod(shape) // numbers * width)
