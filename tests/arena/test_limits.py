"""How numbers of bytes are written."""

import pytest

from unfuse.arena.limits import readable_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 * MIB, "1.5 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_readable_bytes_formats_binary_units(count: int, text: str) -> None:
    assert readable_bytes(count) == text
