"""ZMTP 3 from outside (ZeroMQ's RFCs 23, 26 and 37): a greeting, then frames. What these hold is not looked at."""

from __future__ import annotations

from collections.abc import Iterator

GREETING = 64
VERSION_AT, OLDEST = 10, 3
SIGNATURE_FIRST, SIGNATURE_LAST_AT, SIGNATURE_LAST = 0xFF, 9, 0x7F

MORE, LONG, COMMAND = 1, 2, 4
READY = b"\x05READY"
"""How a command begins that ends a handshake."""


class Unwelcome(Exception):
    """A peer does what none of ours does. The message is one of few, with nothing of what it sent."""


class Cutter:
    """Follows one direction of a connection, whatever pieces its bytes come in, and keeps none but half a header."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._greeting = b""
        self._head = b""
        self._left = 0

    @property
    def greeted(self) -> bool:
        """Whether it has begun as our protocol does."""
        return len(self._greeting) > SIGNATURE_LAST_AT

    def cut(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Flags and length of every frame whose header ends in these bytes. Raises Unwelcome at the first bad one."""
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
        """Take the greeting in; returns what follows it."""
        missing = GREETING - len(self._greeting)
        self._greeting += data[:missing]
        seen = self._greeting
        if seen[:1] != bytes([SIGNATURE_FIRST]) or (self.greeted and seen[SIGNATURE_LAST_AT] != SIGNATURE_LAST):
            raise Unwelcome("it does not speak ZMTP")
        if len(seen) > VERSION_AT and seen[VERSION_AT] < OLDEST:
            raise Unwelcome("it speaks an old ZMTP")
        return data[missing:]
