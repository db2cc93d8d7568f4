"""Numbers of bytes as people read them."""

from __future__ import annotations


def readable_bytes(count: int) -> str:
    """Return a number of bytes as text, such as 1.5 GiB."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"
