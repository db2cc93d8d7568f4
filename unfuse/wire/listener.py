"""A proxy in front of ZMQ: it accepts, limits and drops connections of workers.

ZMQ itself cannot drop a single connection.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from typing_extensions import override

from unfuse.core.clock import TokenBucket
from unfuse.core.errors import ConfigError
from unfuse.core.supervisor import LogThrottle
from unfuse.wire.address import unix_path
from unfuse.wire.bounded_connection import BoundedConnection, Bounds, ForwardProtocol, Owner
from unfuse.wire.unix_socket import BACKLOG, listen_unix, remove_socket

MAX_ACCEPTS_PER_TURN = 16  # the most connections accepted in one turn of the event loop
PAUSE_S = 0.1  # seconds without accepting after it was too fast, or failed
FDS_PER_CONNECTION = 3  # file descriptors of one connection: two here, one in ZMQ
CREDENTIALS = struct.Struct("3i")  # the kernel's record about a peer of a unix socket: process, user, group

log = structlog.get_logger(__name__)


class BoundedListener(Owner):
    """Accepts connections at `listener`, and forwards each to the unix socket `backend_path`.

    A peer that exceeds a bound is dropped, which is logged, each reason at most once a second. On a unix socket, only
    this process's own user is accepted. It runs in the event loop in which it is created.
    """

    def __init__(self, listener: socket.socket, backend_path: Path, bounds: Bounds | None = None) -> None:
        self.pending_bytes = 0
        self._listener, self._backend_path = listener, str(backend_path)
        self._bounds = bounds or Bounds()
        fd_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_connections = min(self._bounds.connections, fd_limit // (2 * FDS_PER_CONNECTION))
        self._loop = asyncio.get_running_loop()
        self._accept_rate = TokenBucket(self._bounds.accepts_per_s, self._bounds.accept_burst, self._loop.time())
        self._connections: set[BoundedConnection] = set()
        self._handshakes: dict[BoundedConnection, None] = {}
        self._open_tasks: set[asyncio.Task[None]] = set()
        self._throttle = LogThrottle()
        self._resume_timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop accepting, and close every connection at once."""
        self._loop.remove_reader(self._listener)
        if self._resume_timer:
            self._resume_timer.cancel()
        if self._listener.family == socket.AF_UNIX:
            remove_socket(Path(self._listener.getsockname()))
        self._listener.close()
        for connection in list(self._connections):
            connection.abort()

    @override
    async def connect_backend(self, protocol: ForwardProtocol) -> None:
        await self._loop.create_unix_connection(lambda: protocol, self._backend_path)

    @override
    def on_pending_bytes_exceeded(self) -> None:
        """Drop the connection with the most unanswered bytes."""
        largest = max(self._connections, key=lambda connection: connection.pending_bytes)
        largest.drop("too many messages of all peers are unanswered")

    @override
    def on_handshake_done(self, connection: BoundedConnection) -> None:
        self._handshakes.pop(connection, None)

    @override
    def on_closed(self, connection: BoundedConnection) -> None:
        self._connections.discard(connection)
        self._handshakes.pop(connection, None)

    @override
    def on_dropped(self, reason: str, peer: str) -> None:
        if times := self._throttle.count_if_due(reason):
            log.warning("dropped a connection to the control port", reason=reason, peer=peer, times=times)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS_PER_TURN):
            if not self._accept_rate.try_acquire(1, self._loop.time()):
                self._pause()
                return
            try:
                client_socket, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # for example, no descriptors are left
                self.on_dropped(f"it cannot be accepted: {error.strerror}", "")
                self._pause()
                return
            self._admit(client_socket, str(address[0]) if address else "")

    def _pause(self) -> None:
        """Stop accepting for PAUSE_S; connections wait in the kernel meanwhile."""
        self._loop.remove_reader(self._listener)
        self._resume_timer = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._listener, self._accept)

    def _admit(self, client_socket: socket.socket, peer: str) -> None:
        client_socket.setblocking(False)
        if client_socket.family == socket.AF_UNIX:
            credentials = client_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            _, uid, _ = CREDENTIALS.unpack(credentials)
            peer = f"user {uid}"
            if uid != os.geteuid():
                self._reject(client_socket, "it belongs to another user", peer)
                return
        if len(self._connections) >= self._max_connections:
            self._reject(client_socket, "there are too many connections", peer)
            return
        connection = BoundedConnection(self, self._bounds, peer)
        self._connections.add(connection)
        self._handshakes[connection] = None
        if len(self._handshakes) > self._bounds.handshakes:
            next(iter(self._handshakes)).drop("too many connections are in the handshake, this one the longest")
        task = self._loop.create_task(self._open(client_socket, connection))
        self._open_tasks.add(task)
        task.add_done_callback(self._open_tasks.discard)

    def _reject(self, client_socket: socket.socket, reason: str, peer: str) -> None:
        self.on_dropped(reason, peer)
        client_socket.close()

    async def _open(self, client_socket: socket.socket, connection: BoundedConnection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection.client, client_socket)
        except OSError:  # the peer is gone already
            client_socket.close()
            connection.abort()
            self.on_closed(connection)


def listen(address: str) -> tuple[socket.socket, str]:
    """Listen at a control address; return the socket, and the address with its port.

    Raises ConfigError if the address cannot be bound.
    """
    if path := unix_path(address):
        return listen_unix(path), address
    parts = urlsplit(address)
    host = "0.0.0.0" if parts.hostname == "*" else parts.hostname or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, parts.port or 0), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}; choose another --listen") from error
    listener.setblocking(False)
    bound_host, port = listener.getsockname()[:2]
    return listener, f"tcp://[{bound_host}]:{port}" if ":" in bound_host else f"tcp://{bound_host}:{port}"
