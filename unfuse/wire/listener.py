"""The listener in front of ZMQ: it accepts workers' connections, bounds them and drops them, which ZMQ cannot do."""

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
from unfuse.wire.bounded_connection import BoundedConnection, Bounds, Owner, Side
from unfuse.wire.unix_socket import BACKLOG, leave, listening

AT_ONCE = 16  # the most connections accepted in one turn of the event loop
PAUSE_S = 0.1  # seconds without accepting after it was too fast, or failed
FILES = 3  # file descriptors of one connection: two here, one in ZMQ
CREDENTIALS = struct.Struct("3i")  # the kernel's record about a peer of a unix socket: process, user, group

log = structlog.get_logger(__name__)


class BoundedListener(Owner):
    """Accepts connections at `listener`, and connects each to the unix socket `inside`.

    A peer that exceeds a bound is dropped, which is logged, each reason at most once a second. On a unix socket, only
    this process's own user is accepted. It runs in the event loop that it is made in.
    """

    def __init__(self, listener: socket.socket, inside: Path, bounds: Bounds | None = None) -> None:
        self.owed = 0
        self._listener, self._inside = listener, str(inside)
        self._bounds = bounds or Bounds()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = min(self._bounds.connections, files // (2 * FILES))
        self._loop = asyncio.get_running_loop()
        self._pace = TokenBucket(self._bounds.accepts_s, self._bounds.accepts_at_once, self._loop.time())
        self._connections: set[BoundedConnection] = set()
        self._waiting: dict[BoundedConnection, None] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._throttle = LogThrottle()
        self._rest: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop accepting, and end every connection."""
        self._loop.remove_reader(self._listener)
        if self._rest:
            self._rest.cancel()
        if self._listener.family == socket.AF_UNIX:
            leave(Path(self._listener.getsockname()))
        self._listener.close()
        for connection in list(self._connections):
            connection.end()

    @override
    async def connect_inside(self, side: Side) -> None:
        await self._loop.create_unix_connection(lambda: side, self._inside)

    @override
    def too_much_owed(self) -> None:
        """Drop the connection with the most unanswered bytes."""
        most = max(self._connections, key=lambda connection: connection.owed)
        most.drop("too many messages of all peers are unanswered")

    @override
    def handshake_done(self, connection: BoundedConnection) -> None:
        self._waiting.pop(connection, None)

    @override
    def ended(self, connection: BoundedConnection) -> None:
        self._connections.discard(connection)
        self._waiting.pop(connection, None)

    @override
    def dropped(self, reason: str, peer: str) -> None:
        if times := self._throttle.count_if_due(reason):
            log.warning("dropped a connection to the control port", reason=reason, peer=peer, times=times)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if not self._pace.try_acquire(1, self._loop.time()):
                self._pause()
                return
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # for example, no descriptors are left
                self.dropped(f"it cannot be accepted: {error.strerror}", "")
                self._pause()
                return
            self._welcome(accepted, str(address[0]) if address else "")

    def _pause(self) -> None:
        """Stop accepting for PAUSE_S; connections wait in the kernel meanwhile."""
        self._loop.remove_reader(self._listener)
        self._rest = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._listener, self._accept)

    def _welcome(self, accepted: socket.socket, peer: str) -> None:
        accepted.setblocking(False)
        if accepted.family == socket.AF_UNIX:
            shown = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            _, user, _ = CREDENTIALS.unpack(shown)
            peer = f"user {user}"
            if user != os.geteuid():
                self._turn_away(accepted, "it belongs to another user", peer)
                return
        if len(self._connections) >= self._most:
            self._turn_away(accepted, "there are too many connections", peer)
            return
        connection = BoundedConnection(self, self._bounds, peer)
        self._connections.add(connection)
        self._waiting[connection] = None
        if len(self._waiting) > self._bounds.waiting:
            next(iter(self._waiting)).drop("too many connections are in the handshake, this one the longest")
        task = self._loop.create_task(self._open(accepted, connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _turn_away(self, accepted: socket.socket, reason: str, peer: str) -> None:
        self.dropped(reason, peer)
        accepted.close()

    async def _open(self, accepted: socket.socket, connection: BoundedConnection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection.outer, accepted)
        except OSError:  # the peer is gone already
            accepted.close()
            connection.end()
            self.ended(connection)


def listen(address: str) -> tuple[socket.socket, str]:
    """Listen at a control address. Returns the socket, and the address with its port. Raises ConfigError."""
    if path := unix_path(address):
        return listening(path), address
    parts = urlsplit(address)
    host = "0.0.0.0" if parts.hostname == "*" else parts.hostname or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, parts.port or 0), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}; choose another --listen") from error
    listener.setblocking(False)
    bound, port = listener.getsockname()[:2]
    return listener, f"tcp://[{bound}]:{port}" if ":" in bound else f"tcp://{bound}:{port}"
