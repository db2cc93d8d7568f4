"""Reads and writes numbers of bytes, and times, as people do."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{end}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for end, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


class Size(int):
    """A number of bytes that prints with a unit, for output only. Settings, and what is made of them, have ints."""

    @staticmethod
    def parse(text: str) -> int:
        """A number of bytes: a number, "2GiB", "512MB"; a bare prefix ("2G") is binary. Raises ValueError."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
        if not match or match[2] not in _UNITS:
            raise ValueError(f"{text!r} is not a size: write bytes, or a number with KiB, MiB, GiB or TiB")
        return int(Decimal(match[1]) * _UNITS[match[2]])


_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}


def seconds_in(text: str) -> float:
    """Parse a time: a number of seconds, or "90min", "24h", "7d". Raises ValueError when it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in _SECONDS:
        raise ValueError(f"{text!r} is not a time: write seconds, or a number with s, min, h or d")
    return float(match[1]) * _SECONDS[match[2]]
