"""One proxied connection: bytes are forwarded both ways while the peer respects its bounds."""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush
from typing import Protocol, cast

import msgspec
from typing_extensions import override

from unfuse.core.clock import TokenBucket
from unfuse.core.codec import MAX_BYTES
from unfuse.wire.frames import COMMAND, MORE, READY, FrameReader, ProtocolViolation

OVERHEAD = 64  # bytes that encryption may add to a frame; it adds 33
LINGER_S = 5.0  # seconds to send the buffered bytes to one side after the other has disconnected


class Bounds(msgspec.Struct, frozen=True):
    """The bounds of a listener.

    A worker has at most 64 unanswered messages, of two frames each. A frame is answered by at most one frame. So the
    number of frames received minus frames sent bounds the unanswered messages, without decoding any.
    """

    #: Bytes of one frame.
    frame_bytes: int = MAX_BYTES + OVERHEAD
    #: Frames of one message.
    message_frames: int = 8
    #: Unanswered frames of one connection.
    pending_frames: int = 512
    #: Bytes of the unanswered frames of one connection.
    pending_bytes: int = 4 * MAX_BYTES
    #: Bytes of the unanswered frames of all connections.
    total_pending_bytes: int = 32 * MAX_BYTES
    #: Frames a second of one connection, more than this process could answer.
    frames_per_s: float = 100_000
    #: Bytes a second of one connection, more than this process could answer.
    bytes_per_s: float = 2 * MAX_BYTES
    #: Seconds of full rate that a connection may use at once.
    burst_s: float = 2.0
    #: Bytes of a handshake.
    handshake_bytes: int = 4096
    #: Seconds of a handshake.
    handshake_s: float = 10.0
    #: Connections in their handshake.
    handshakes: int = 512
    #: Open connections.
    connections: int = 4096
    #: New connections a second.
    accepts_per_s: float = 500
    #: New connections at once, after a pause.
    accept_burst: int = 1000


class Owner(Protocol):
    """The callbacks of a connection into the listener that accepted it."""

    pending_bytes: int
    """Bytes of unanswered frames, over all connections."""

    async def connect_backend(self, protocol: ForwardProtocol) -> None:
        """Connect a protocol to the ZMQ socket of the router. Raises OSError."""

    def on_pending_bytes_exceeded(self) -> None:
        """`pending_bytes` exceeds its bound."""

    def on_handshake_done(self, connection: BoundedConnection) -> None:
        """A handshake is complete."""

    def on_closed(self, connection: BoundedConnection) -> None:
        """Both transports of a connection are closed."""

    def on_dropped(self, reason: str, peer: str) -> None:
        """A peer is dropped, for this reason."""


class ForwardProtocol(asyncio.Protocol):
    """One of the two transports of a connection: to the peer, or to ZMQ.

    While the write buffer of one is full, the other does not read (back-pressure).
    """

    transport: asyncio.Transport | None = None
    opposite: ForwardProtocol

    def __init__(self, connection: BoundedConnection) -> None:
        self._connection = connection

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connection.on_connected(self)

    @override
    def data_received(self, data: bytes) -> None:
        self._connection.on_data(self, data)

    @override
    def pause_writing(self) -> None:
        if (opposite := self.opposite.transport) and not opposite.is_closing():
            opposite.pause_reading()

    @override
    def resume_writing(self) -> None:
        if (opposite := self.opposite.transport) and not opposite.is_closing():
            opposite.resume_reading()

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._connection.on_disconnected()

    def write(self, data: bytes) -> None:
        """Send, unless this transport is closed."""
        if self.transport and not self.transport.is_closing():
            self.transport.write(data)

    def abort(self) -> None:
        """Close this transport now; unsent bytes are dropped."""
        if self.transport:
            self.transport.abort()

    def close(self) -> None:
        """Close this transport when all bytes are sent, or after LINGER_S."""
        if self.transport:
            self.transport.close()
            asyncio.get_running_loop().call_later(LINGER_S, self.abort)


class BoundedConnection:
    """A connection of a peer (`client`) that is forwarded to ZMQ (`_backend`)."""

    def __init__(self, owner: Owner, bounds: Bounds, peer: str) -> None:
        self.peer, self.pending_bytes = peer, 0
        self._owner, self._bounds = owner, bounds
        self._loop = asyncio.get_running_loop()
        self._handshake_timer = self._loop.call_later(
            bounds.handshake_s, self.drop, "it does not complete the handshake"
        )
        self.client, self._backend = ForwardProtocol(self), ForwardProtocol(self)
        self.client.opposite, self._backend.opposite = self._backend, self.client
        self._client_reader, self._backend_reader = FrameReader(bounds.frame_bytes), FrameReader(bounds.frame_bytes)
        self._connecting: asyncio.Task[None] | None = None
        self._closed = False
        self._handshake_complete = self._client_command_received = False
        self._buffered = self._backend_handshake = b""
        self._handshake_bytes = self._message_frames = 0
        self._pending_lengths: list[int] = []
        now = self._loop.time()
        self._frame_rate = TokenBucket(bounds.frames_per_s, bounds.burst_s * bounds.frames_per_s, now)
        self._byte_rate = TokenBucket(bounds.bytes_per_s, bounds.burst_s * bounds.bytes_per_s, now)

    def drop(self, reason: str) -> None:
        """End the connection at once, and report the reason."""
        if not self._closed:
            self._owner.on_dropped(reason, self.peer)
            self.abort()

    def abort(self) -> None:
        """End the connection at once. Idempotent."""
        self._stop()
        self.client.abort()
        self._backend.abort()

    def on_connected(self, protocol: ForwardProtocol) -> None:
        """Forward the buffered bytes when the backend is connected.

        The client is connected first. The backend is connected when the peer has sent a greeting.
        """
        if self._closed:
            protocol.abort()
        elif protocol is self._backend:
            protocol.write(self._buffered)
            self._buffered = b""

    def on_data(self, protocol: ForwardProtocol, data: bytes) -> None:
        """Process bytes that one transport received."""
        if protocol is self._backend:
            self._receive_from_backend(data)
            return
        try:
            self._receive_from_client(data)
        except ProtocolViolation as error:
            self.drop(str(error))

    def on_disconnected(self) -> None:
        """Close both transports after one has closed; the other sends its buffer first."""
        self._stop()
        self.client.close()
        self._backend.close()
        if self.client.transport is self._backend.transport is None:
            self._owner.on_closed(self)

    def _stop(self) -> None:
        self._closed = True
        self._handshake_timer.cancel()
        self._add_pending_bytes(-self.pending_bytes)
        if self._connecting:
            self._connecting.cancel()

    def _receive_from_client(self, data: bytes) -> None:
        """Check the bytes of the peer, then forward them. Raises ProtocolViolation."""
        for flags, length in self._client_reader.read(data):
            if self._handshake_complete:
                self._check_frame(flags, length)
            elif not flags & COMMAND:
                raise ProtocolViolation("it sends a message before the handshake is over")
            else:
                self._client_command_received = True
                self._check_handshake()
        if not self._handshake_complete:
            self._handshake_bytes += len(data)
            if self._handshake_bytes > self._bounds.handshake_bytes:
                raise ProtocolViolation("it sends too much before the handshake is over")
        if self._backend.transport:
            self._backend.write(data)
            return
        self._buffered += data
        if self._client_reader.greeting_received and not self._connecting:
            self._connecting = self._loop.create_task(self._connect_backend())

    async def _connect_backend(self) -> None:
        try:
            await self._owner.connect_backend(self._backend)
        except OSError as error:
            self.drop(f"it cannot be connected inside: {error.strerror}")

    def _check_frame(self, flags: int, length: int) -> None:
        """Count a new frame. Raises ProtocolViolation if a bound is exceeded."""
        bounds, now = self._bounds, self._loop.time()
        if not flags & COMMAND:
            self._message_frames = self._message_frames + 1 if flags & MORE else 0
            if self._message_frames >= bounds.message_frames:
                raise ProtocolViolation("a message has too many parts")
        if not (self._frame_rate.try_acquire(1, now) and self._byte_rate.try_acquire(length, now)):
            raise ProtocolViolation("it sends too much in a second")
        heappush(self._pending_lengths, length)
        self._add_pending_bytes(length)
        if len(self._pending_lengths) > bounds.pending_frames or self.pending_bytes > bounds.pending_bytes:
            raise ProtocolViolation("too many of its messages are unanswered")
        if self._owner.pending_bytes > bounds.total_pending_bytes:
            self._owner.on_pending_bytes_exceeded()

    def _receive_from_backend(self, data: bytes) -> None:
        for _ in self._backend_reader.read(data):
            if self._pending_lengths:  # the frame that this answers is not known: count the shortest
                self._add_pending_bytes(-heappop(self._pending_lengths))
        if not self._handshake_complete:
            self._backend_handshake += data
            self._check_handshake()
        self.client.write(data)

    def _check_handshake(self) -> None:
        """Complete the handshake when both sides have sent their command.

        Without keys, our READY alone does not prove that the peer has completed it.
        """
        if self._client_command_received and READY in self._backend_handshake:
            self._handshake_complete, self._backend_handshake = True, b""
            self._handshake_timer.cancel()
            self._owner.on_handshake_done(self)

    def _add_pending_bytes(self, nbytes: int) -> None:
        self.pending_bytes += nbytes
        self._owner.pending_bytes += nbytes
