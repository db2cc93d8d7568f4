"""A parser of ZMTP 3 frame headers (ZeroMQ's RFCs 23, 26 and 37).

A connection has a greeting, then frames. The content of frames is not read.
"""

from __future__ import annotations

from collections.abc import Iterator

GREETING = 64
VERSION_OFFSET, MIN_VERSION = 10, 3
#: The first byte of the signature that begins a greeting.
SIGNATURE_FIRST = 0xFF
#: The offset and the value of its last byte.
SIGNATURE_LAST_OFFSET, SIGNATURE_LAST = 9, 0x7F

#: Flags of a frame: more frames of this message follow.
MORE = 1
#: The length has eight bytes, not one.
LONG = 2
#: The frame is a command of the protocol.
COMMAND = 4

READY = b"\x05READY"  # the beginning of the command that ends a handshake


class ProtocolViolation(Exception):
    """A peer breaks the protocol or exceeds a bound.

    The message is a fixed text without any bytes of the peer, so that it can be logged.
    """


class FrameReader:
    """Finds the frames in one direction of a connection.

    It buffers only an incomplete header, never the body of a frame.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._greeting = b""
        self._partial_header = b""
        self._body_bytes_left = 0

    @property
    def greeting_received(self) -> bool:
        """Whether the signature of the greeting was received, and is that of ZMTP."""
        return len(self._greeting) > SIGNATURE_LAST_OFFSET

    def read(self, data: bytes) -> Iterator[tuple[int, int]]:
        """The flags and length of every frame whose header ends in these bytes.

        Raises ProtocolViolation for an invalid header or a frame that is too long.
        """
        if len(self._greeting) < GREETING:
            data = self._read_greeting(data)
        if self._partial_header:
            data = self._partial_header + data
        offset, end = self._body_bytes_left, len(data)
        while offset < end:
            flags = data[offset]
            if flags > MORE | LONG | COMMAND:
                raise ProtocolViolation("it does not speak ZMTP")
            body_offset = offset + (9 if flags & LONG else 2)
            if body_offset > end:
                break
            length = int.from_bytes(data[offset + 1 : body_offset], "big")
            if length > self._max_length:
                raise ProtocolViolation("a frame is too large")
            yield flags, length
            offset = body_offset + length
        self._partial_header, self._body_bytes_left = data[offset:], max(0, offset - end)

    def _read_greeting(self, data: bytes) -> bytes:
        """Check the bytes of the greeting; return the bytes after it. Raises ProtocolViolation."""
        missing = GREETING - len(self._greeting)
        self._greeting += data[:missing]
        greeting = self._greeting
        if greeting[:1] != bytes([SIGNATURE_FIRST]) or (
            self.greeting_received and greeting[SIGNATURE_LAST_OFFSET] != SIGNATURE_LAST
        ):
            raise ProtocolViolation("it does not speak ZMTP")
        if len(greeting) > VERSION_OFFSET and greeting[VERSION_OFFSET] < MIN_VERSION:
            raise ProtocolViolation("it speaks an old ZMTP")
        return data[missing:]
