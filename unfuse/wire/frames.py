"""Follows ZMTP 3 (ZeroMQ's RFCs 23, 26 and 37) from outside: a greeting, then frames, whose content is not read."""

from __future__ import annotations

from collections.abc import Iterator

GREETING = 64
VERSION_AT, OLDEST = 10, 3
SIGNATURE_FIRST, SIGNATURE_LAST_AT, SIGNATURE_LAST = 0xFF, 9, 0x7F

MORE, LONG, COMMAND = 1, 2, 4
READY = b"\x05READY"  # the beginning of the command that ends a handshake


class Unwelcome(Exception):
    """A peer breaks the protocol or a bound. The message is a fixed text that quotes nothing it sent."""


class FrameReader:
    """Finds the frames in one direction of a connection; of the bytes it keeps only an incomplete header."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._greeting = b""
        self._head = b""
        self._left = 0

    @property
    def greeted(self) -> bool:
        """Whether the greeting has come, and is that of ZMTP."""
        return len(self._greeting) > SIGNATURE_LAST_AT

    def read(self, data: bytes) -> Iterator[tuple[int, int]]:
        """The flags and length of every frame whose header ends in these bytes. Raises Unwelcome for a bad one."""
        if len(self._greeting) < GREETING:
            data = self._greet(data)
        if self._head:
            data = self._head + data
        at, end = self._left, len(data)
        while at < end:
            flags = data[at]
            if flags > MORE | LONG | COMMAND:
                raise Unwelcome("it does not speak ZMTP")
            body = at + (9 if flags & LONG else 2)
            if body > end:
                break
            length = int.from_bytes(data[at + 1 : body], "big")
            if length > self._longest:
                raise Unwelcome("a frame is too large")
            yield flags, length
            at = body + length
        self._head, self._left = data[at:], max(0, at - end)

    def _greet(self, data: bytes) -> bytes:
        """Check bytes of the greeting. Returns the bytes that follow it."""
        missing = GREETING - len(self._greeting)
        self._greeting += data[:missing]
        seen = self._greeting
        if seen[:1] != bytes([SIGNATURE_FIRST]) or (self.greeted and seen[SIGNATURE_LAST_AT] != SIGNATURE_LAST):
            raise Unwelcome("it does not speak ZMTP")
        if len(seen) > VERSION_AT and seen[VERSION_AT] < OLDEST:
            raise Unwelcome("it speaks an old ZMTP")
        return data[missing:]
