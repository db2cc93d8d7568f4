"""Encodes messages as a version byte and msgpack, and frames them in a byte stream.

Sizes are checked before anything is decoded or allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any, TypeVar, cast

import msgspec

from unfuse.core.errors import ProtocolError

VERSION = 3  # of the encoding; peers of another version are refused
MAX_BYTES = 8 * 1024 * 1024  # the largest control message; tensors never travel in one
MAX_UPLOAD_BYTES = 32 * 1024 * 1024  # the largest message with the frames of a video: as large as a client's body

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_build_lock = Lock()
"""Guards the first use of a type: a thread that used msgspec's half-built type information would crash the process."""


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of a type, built once."""
    with _build_lock:
        return msgspec.msgpack.Decoder(kind)


def encode(message: object, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of a message.

    Raises ProtocolError for text that is not Unicode, integers of over 64 bits, and more than `max_bytes` bytes.
    """
    try:
        body = _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise ProtocolError(f"message cannot be encoded: {error}") from error
    if len(body) >= max_bytes:  # the version byte comes on top
        raise ProtocolError(f"message of {len(body)} bytes exceeds the limit of {max_bytes} bytes")
    return bytes([VERSION]) + body


def decode(data: bytes | memoryview, kind: type[T] | Any, max_bytes: int = MAX_BYTES) -> T:
    """Return the message of type `kind` in `data`, which has at most `max_bytes` bytes.

    Unknown fields are ignored, so that a newer peer may add optional ones. The types bound the depth, since none is
    recursive. Raises ProtocolError for data that is empty, too large, of another version or of other types.
    """
    if not 0 < len(data) <= max_bytes:
        raise ProtocolError(f"message of {len(data)} bytes must have 1 to {max_bytes} bytes")
    if data[0] != VERSION:
        raise ProtocolError(
            f"message has protocol version {data[0]}, but this process needs version {VERSION}: "
            "install the same version of unfuse on all machines"
        )
    try:
        return cast("T", _decoder(cast("Any", kind)).decode(memoryview(data)[1:]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"message cannot be decoded: {error}") from error


HEADER_BYTES = 4  # of a frame: the length of its message


def frame(data: bytes) -> bytes:
    """Return the message behind a header with its length."""
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def read_length(header: bytes | bytearray, max_bytes: int) -> int:
    """Return the length in bytes of the message after this header.

    Raises ProtocolError for more than `max_bytes` bytes.
    """
    length = int.from_bytes(header[:HEADER_BYTES], "big")
    if length > max_bytes:
        raise ProtocolError(f"message of {length} bytes exceeds the limit of {max_bytes} bytes")
    return length


def read_message(read: Callable[[int], bytes], max_bytes: int) -> bytes:
    """Return the next message of a stream. `read(n)` must return exactly n bytes.

    Raises ProtocolError for a message of more than `max_bytes` bytes.
    """
    return read(read_length(read(HEADER_BYTES), max_bytes))


def split_message(received: bytearray, max_bytes: int) -> bytes | None:
    """Remove the first message from `received` and return it; None if it is incomplete.

    Raises ProtocolError for a message of more than `max_bytes` bytes.
    """
    if len(received) < HEADER_BYTES:
        return None
    end = HEADER_BYTES + read_length(received, max_bytes)
    if len(received) < end:
        return None
    data = bytes(received[HEADER_BYTES:end])
    del received[:end]
    return data
