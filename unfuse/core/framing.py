"""Messages in a stream of bytes. A header with the length precedes each; it is checked before memory is allocated."""

from __future__ import annotations

from collections.abc import Callable

from unfuse.core.errors import ProtocolError

HEADER_BYTES = 4


def frame(data: bytes) -> bytes:
    """The message with its header."""
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def length_of(header: bytes | bytearray, most: int) -> int:
    """The length in bytes of the message after this header. Raises ProtocolError for more than `most` bytes."""
    length = int.from_bytes(header[:HEADER_BYTES], "big")
    if length > most:
        raise ProtocolError(f"message of {length} bytes: those here are at most {most}")
    return length


def read_message(read: Callable[[int], bytes], most: int) -> bytes:
    """Read one message. `read(n)` returns exactly n bytes. Raises ProtocolError for one of more than `most` bytes."""
    return read(length_of(read(HEADER_BYTES), most))


def split_message(received: bytearray, most: int) -> bytes | None:
    """Take the first message off `received`; None if incomplete. Raises ProtocolError above `most` bytes."""
    if len(received) < HEADER_BYTES:
        return None
    end = HEADER_BYTES + length_of(received, most)
    if len(received) < end:
        return None
    data = bytes(received[HEADER_BYTES:end])
    del received[:end]
    return data
