"""One connection through the listener: it forwards bytes both ways, as long as the peer keeps to its bounds."""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush
from typing import Protocol, cast

import msgspec
from typing_extensions import override

from unfuse.core.clock import TokenBucket
from unfuse.core.codec import MAX_BYTES
from unfuse.wire.frames import COMMAND, MORE, READY, FrameReader, Unwelcome

OVERHEAD = 64  # bytes that encryption may add to a frame; it adds 33
LINGER_S = 5.0  # seconds to send the rest to one side after the other has disconnected


class Bounds(msgspec.Struct, frozen=True):
    """The bounds of a listener.

    A worker has at most 64 unanswered messages, of two frames each. A frame is answered by at most one frame. So the
    number of frames received minus frames sent bounds the unanswered messages, without decoding any.
    """

    #: Bytes of one frame.
    frame: int = MAX_BYTES + OVERHEAD
    #: Frames of one message.
    parts: int = 8
    #: Unanswered frames of one connection.
    unanswered: int = 512
    #: Bytes of the unanswered frames of one connection.
    owed: int = 4 * MAX_BYTES
    #: Bytes of the unanswered frames of all connections.
    owed_by_all: int = 32 * MAX_BYTES
    #: Frames a second of one connection, more than this process could answer.
    frames_s: float = 100_000
    #: Bytes a second of one connection, more than this process could answer.
    bytes_s: float = 2 * MAX_BYTES
    #: Seconds of full rate that a connection may use at once.
    burst_s: float = 2.0
    #: Bytes of a handshake.
    handshake: int = 4096
    #: Seconds of a handshake.
    handshake_s: float = 10.0
    #: Connections in their handshake.
    waiting: int = 512
    #: Open connections.
    connections: int = 4096
    #: New connections a second.
    accepts_s: float = 500
    #: New connections at once, after a pause.
    accepts_at_once: int = 1000


class Owner(Protocol):
    """What a connection needs of the listener that accepted it."""

    owed: int
    """Bytes of unanswered frames, over all connections."""

    async def connect_inside(self, side: Side) -> None:
        """Connect a side to the ZMQ socket that answers. Raises OSError."""

    def too_much_owed(self) -> None:
        """The sum `owed` is above its bound."""

    def handshake_done(self, connection: BoundedConnection) -> None:
        """A handshake is complete."""

    def ended(self, connection: BoundedConnection) -> None:
        """Both sides of a connection have ended."""

    def dropped(self, reason: str, peer: str) -> None:
        """A peer is dropped, for this reason."""


class Side(asyncio.Protocol):
    """One of the two sides of a connection: to the peer, or to ZMQ. While one cannot send, the other does not read."""

    transport: asyncio.Transport | None = None
    other: Side

    def __init__(self, connection: BoundedConnection) -> None:
        self._connection = connection

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connection.arrived(self)

    @override
    def data_received(self, data: bytes) -> None:
        self._connection.heard(self, data)

    @override
    def pause_writing(self) -> None:
        if (other := self.other.transport) and not other.is_closing():
            other.pause_reading()

    @override
    def resume_writing(self) -> None:
        if (other := self.other.transport) and not other.is_closing():
            other.resume_reading()

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._connection.lost()

    def write(self, data: bytes) -> None:
        """Send, unless this side has ended."""
        if self.transport and not self.transport.is_closing():
            self.transport.write(data)

    def abort(self) -> None:
        """End this side now; what was not sent is dropped."""
        if self.transport:
            self.transport.abort()

    def close(self) -> None:
        """End this side when everything is sent, or after LINGER_S."""
        if self.transport:
            self.transport.close()
            asyncio.get_running_loop().call_later(LINGER_S, self.abort)


class BoundedConnection:
    """A connection of a peer (`outer`), and the one to ZMQ that carries its bytes on (`inner`)."""

    def __init__(self, host: Owner, bounds: Bounds, peer: str) -> None:
        self.peer, self.owed = peer, 0
        self._host, self._bounds = host, bounds
        self._loop = asyncio.get_running_loop()
        self._late = self._loop.call_later(bounds.handshake_s, self.drop, "it does not complete the handshake")
        self.outer, self._inner = Side(self), Side(self)
        self.outer.other, self._inner.other = self._inner, self.outer
        self._in, self._out = FrameReader(bounds.frame), FrameReader(bounds.frame)
        self._entering: asyncio.Task[None] | None = None
        self._ended = self._through = self._commanded = False
        self._held = self._said = b""
        self._shown = self._parts = 0
        self._unanswered: list[int] = []
        now = self._loop.time()
        self._frames = TokenBucket(bounds.frames_s, bounds.burst_s * bounds.frames_s, now)
        self._bytes = TokenBucket(bounds.bytes_s, bounds.burst_s * bounds.bytes_s, now)

    def drop(self, reason: str) -> None:
        """End the connection at once, and report the reason."""
        if not self._ended:
            self._host.dropped(reason, self.peer)
            self.end()

    def end(self) -> None:
        """End the connection at once. Idempotent."""
        self._end()
        self.outer.abort()
        self._inner.abort()

    def arrived(self, side: Side) -> None:
        """A side is connected. The peer's is the first; the inner one follows when the peer has sent a greeting."""
        if self._ended:
            side.abort()
        elif side is self._inner:
            side.write(self._held)
            self._held = b""

    def heard(self, side: Side, data: bytes) -> None:
        """Bytes have come from a side."""
        if side is self._inner:
            self._hear_answers(data)
            return
        try:
            self._hear(data)
        except Unwelcome as error:
            self.drop(str(error))

    def lost(self) -> None:
        """A side has ended: let the other one send what it has, and end."""
        self._end()
        self.outer.close()
        self._inner.close()
        if self.outer.transport is self._inner.transport is None:
            self._host.ended(self)

    def _end(self) -> None:
        self._ended = True
        self._late.cancel()
        self._owe(-self.owed)
        if self._entering:
            self._entering.cancel()

    def _hear(self, data: bytes) -> None:
        """Check bytes of the peer, then forward them. Raises Unwelcome."""
        for flags, length in self._in.read(data):
            if self._through:
                self._check(flags, length)
            elif not flags & COMMAND:
                raise Unwelcome("it sends a message before the handshake is over")
            else:
                self._commanded = True
                self._see_through()
        if not self._through:
            self._shown += len(data)
            if self._shown > self._bounds.handshake:
                raise Unwelcome("it sends too much before the handshake is over")
        if self._inner.transport:
            self._inner.write(data)
            return
        self._held += data
        if self._in.greeted and not self._entering:
            self._entering = self._loop.create_task(self._enter())

    async def _enter(self) -> None:
        try:
            await self._host.connect_inside(self._inner)
        except OSError as error:
            self.drop(f"it cannot be connected inside: {error.strerror}")

    def _check(self, flags: int, length: int) -> None:
        """Count a new frame. Raises Unwelcome if a bound is exceeded."""
        bounds, now = self._bounds, self._loop.time()
        if not flags & COMMAND:
            self._parts = self._parts + 1 if flags & MORE else 0
            if self._parts >= bounds.parts:
                raise Unwelcome("a message has too many parts")
        if not (self._frames.try_acquire(1, now) and self._bytes.try_acquire(length, now)):
            raise Unwelcome("it sends too much in a second")
        heappush(self._unanswered, length)
        self._owe(length)
        if len(self._unanswered) > bounds.unanswered or self.owed > bounds.owed:
            raise Unwelcome("too many of its messages are unanswered")
        if self._host.owed > bounds.owed_by_all:
            self._host.too_much_owed()

    def _hear_answers(self, data: bytes) -> None:
        for _ in self._out.read(data):
            if self._unanswered:  # it is not known which one this answers: count the shortest
                self._owe(-heappop(self._unanswered))
        if not self._through:
            self._said += data
            self._see_through()
        self.outer.write(data)

    def _see_through(self) -> None:
        """End the handshake when both sides have: without keys, our READY alone says nothing about the peer."""
        if self._commanded and READY in self._said:
            self._through, self._said = True, b""
            self._late.cancel()
            self._host.handshake_done(self)

    def _owe(self, more: int) -> None:
        self.owed += more
        self._host.owed += more
