"""Messages in a stream of bytes: each has its length before it, which is checked before any room is made for it."""

from __future__ import annotations

from collections.abc import Callable

from unfuse.core.errors import ProtocolError

HEADER_BYTES = 4


def frame(data: bytes) -> bytes:
    """The bytes of a message as they travel."""
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def length_of(header: bytes | bytearray, most: int) -> int:
    """Bytes of the message that follows a header. Raises ProtocolError for more than `most`, which none of ours has."""
    length = int.from_bytes(header[:HEADER_BYTES], "big")
    if length > most:
        raise ProtocolError(f"message of {length} bytes: those here are at most {most}")
    return length


def take(read: Callable[[int], bytes], most: int) -> bytes:
    """The next message of what `read` gives exactly so many bytes of. Raises ProtocolError as `length_of` does."""
    return read(length_of(read(HEADER_BYTES), most))


def cut(received: bytearray, most: int) -> bytes | None:
    """Take the first message off what was received; None until all of it is there. Raises ProtocolError likewise."""
    if len(received) < HEADER_BYTES:
        return None
    end = HEADER_BYTES + length_of(received, most)
    if len(received) < end:
        return None
    data = bytes(received[HEADER_BYTES:end])
    del received[:end]
    return data
