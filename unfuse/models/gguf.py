"""What a GGUF file says of itself, without its tensors. After the format's specification, versions 2 and 3."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from unfuse.core.errors import ConfigError
from unfuse.models.folder import REPAIR

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9


def metadata(file: Path) -> dict[str, Any]:
    """All values by key: numbers, strings, and lists of either. Raises ConfigError, naming the file."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).all()
    except (OSError, ValueError, struct.error) as error:  # UnicodeDecodeError is a ValueError
        raise ConfigError(f"{file} is not a GGUF file that can be read ({error}); {REPAIR}") from error


class _Reader:
    """Reads values one behind the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def all(self) -> dict[str, Any]:
        if self._data[:4] != b"GGUF" or self._data[4:8] not in (b"\2\0\0\0", b"\3\0\0\0"):
            raise ValueError("it does not begin as versions 2 and 3 do")
        self._at = 16  # behind magic, version and the number of tensors
        return {self._text(): self._value(self._number("I")) for _ in range(self._number("Q"))}

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
