"""One connection through the listener: bytes go both ways as they come, as long as the peer keeps its bounds."""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush
from typing import Protocol, cast

import msgspec
from typing_extensions import override

from unfuse.core.codec import MAX_BYTES
from unfuse.core.token_bucket import TokenBucket
from unfuse.wire.frames import COMMAND, MORE, READY, Cutter, Unwelcome

OVERHEAD = 64
"""Bytes that encryption may add to a frame; it adds 33."""

LINGER_S = 5.0
"""Seconds for the rest to go out to one side after the other has gone."""


class Bounds(msgspec.Struct, frozen=True):
    """What a listener lets in, in bytes, frames, seconds and connections.

    A worker has at most 64 messages unanswered, of two frames each. A frame is answered by one frame at most, so frames
    in less frames out bound what waits in here, without a look into them: at most `unanswered` frames of `owed` bytes.
    A second has room for more than this process could answer if it did nothing else.
    `handshake` bytes and `handshake_s` seconds are for the handshake; `waiting` connections may be in it at once.
    """

    frame: int = MAX_BYTES + OVERHEAD
    parts: int = 8
    unanswered: int = 512
    owed: int = 4 * MAX_BYTES
    owed_by_all: int = 32 * MAX_BYTES
    frames_s: float = 100_000
    bytes_s: float = 2 * MAX_BYTES
    burst_s: float = 2.0
    handshake: int = 4096
    handshake_s: float = 10.0
    waiting: int = 512
    connections: int = 4096
    accepts_s: float = 500
    accepts_at_once: int = 1000


class Owner(Protocol):
    """Who accepted it."""

    owed: int
    """Bytes that connections were not answered yet, all together."""

    async def lead_in(self, side: Side) -> None:
        """Connect a side to who answers. Raises OSError."""

    def crowded(self) -> None:
        """More is owed than is good."""

    def through(self, connection: BoundedConnection) -> None:
        """A handshake is over."""

    def left(self, connection: BoundedConnection) -> None:
        """Both sides of a connection have ended."""

    def tell(self, reason: str, peer: str) -> None:
        """A peer was dropped."""


class Side(asyncio.Protocol):
    """One of the two transports of a connection; while it cannot send, the other one does not read."""

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
        """Send, unless it has ended."""
        if self.transport and not self.transport.is_closing():
            self.transport.write(data)

    def abort(self) -> None:
        """End it now; what was not sent is dropped."""
        if self.transport:
            self.transport.abort()

    def close(self) -> None:
        """End it when all is sent, or soon."""
        if self.transport:
            self.transport.close()
            asyncio.get_running_loop().call_later(LINGER_S, self.abort)


class BoundedConnection:
    """A peer and its way in."""

    def __init__(self, host: Owner, bounds: Bounds, peer: str) -> None:
        self.peer, self.owed = peer, 0
        self._host, self._bounds = host, bounds
        self._loop = asyncio.get_running_loop()
        self._late = self._loop.call_later(bounds.handshake_s, self.drop, "it does not come through the handshake")
        self.outer, self._inner = Side(self), Side(self)
        self.outer.other, self._inner.other = self._inner, self.outer
        self._in, self._out = Cutter(bounds.frame), Cutter(bounds.frame)
        self._entering: asyncio.Task[None] | None = None
        self._ended = self._through = self._commanded = False
        self._held = self._said = b""
        self._shown = self._parts = 0
        self._unanswered: list[int] = []
        now = self._loop.time()
        self._frames = TokenBucket(bounds.frames_s, bounds.burst_s * bounds.frames_s, now)
        self._bytes = TokenBucket(bounds.bytes_s, bounds.burst_s * bounds.bytes_s, now)

    def drop(self, reason: str) -> None:
        """End it at once, and nobody else notices."""
        if not self._ended:
            self._host.tell(reason, self.peer)
            self.end()

    def end(self) -> None:
        """End it at once. Idempotent."""
        self._end()
        self.outer.abort()
        self._inner.abort()

    def arrived(self, side: Side) -> None:
        """A side has its transport: the peer's at first, which has to speak before it is led in."""
        if self._ended:
            side.abort()
        elif side is self._inner:
            side.write(self._held)
            self._held = b""

    def heard(self, side: Side, data: bytes) -> None:
        """Bytes came."""
        if side is self._inner:
            self._hear_answers(data)
            return
        try:
            self._hear(data)
        except Unwelcome as error:
            self.drop(str(error))

    def lost(self) -> None:
        """A side has ended: the other one is to send what it has, and end."""
        self._end()
        self.outer.close()
        self._inner.close()
        if self.outer.transport is self._inner.transport is None:
            self._host.left(self)

    def _end(self) -> None:
        self._ended = True
        self._late.cancel()
        self._owe(-self.owed)
        if self._entering:
            self._entering.cancel()

    def _hear(self, data: bytes) -> None:
        """Pass on what the peer says once all of it is checked. Raises Unwelcome."""
        for flags, length in self._in.cut(data):
            if self._through:
                self._check(flags, length)
            elif not flags & COMMAND:
                raise Unwelcome("it says something before the handshake is over")
            else:
                self._commanded = True
                self._see_through()
        if not self._through:
            self._shown += len(data)
            if self._shown > self._bounds.handshake:
                raise Unwelcome("it says too much before the handshake is over")
        if self._inner.transport:
            self._inner.write(data)
            return
        self._held += data
        if self._in.greeted and not self._entering:
            self._entering = self._loop.create_task(self._enter())

    async def _enter(self) -> None:
        try:
            await self._host.lead_in(self._inner)
        except OSError as error:
            self.drop(f"it cannot be led in: {error.strerror}")

    def _check(self, flags: int, length: int) -> None:
        """Count a frame that begins. Raises Unwelcome when it is one too many."""
        bounds, now = self._bounds, self._loop.time()
        if not flags & COMMAND:
            self._parts = self._parts + 1 if flags & MORE else 0
            if self._parts >= bounds.parts:
                raise Unwelcome("a message has too many parts")
        if not (self._frames.take(1, now) and self._bytes.take(length, now)):
            raise Unwelcome("it says too much in a second")
        heappush(self._unanswered, length)
        self._owe(length)
        if len(self._unanswered) > bounds.unanswered or self.owed > bounds.owed:
            raise Unwelcome("too much of what it says is unanswered")
        if self._host.owed > bounds.owed_by_all:
            self._host.crowded()

    def _hear_answers(self, data: bytes) -> None:
        for _ in self._out.cut(data):
            if self._unanswered:  # which one is answered is not seen: as if it were the shortest
                self._owe(-heappop(self._unanswered))
        if not self._through:
            self._said += data
            self._see_through()
        self.outer.write(data)

    def _see_through(self) -> None:
        """Both sides end a handshake: without keys this end's READY alone says nothing of the peer."""
        if self._commanded and READY in self._said:
            self._through, self._said = True, b""
            self._late.cancel()
            self._host.through(self)

    def _owe(self, more: int) -> None:
        self.owed += more
        self._host.owed += more
