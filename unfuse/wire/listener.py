"""Where workers come in: connections are accepted, bounded and dropped here, in front of ZMQ, which cannot drop one."""

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

from unfuse.core.errors import ConfigError
from unfuse.core.log_throttle import LogThrottle
from unfuse.core.token_bucket import TokenBucket
from unfuse.wire.address import unix_path
from unfuse.wire.bounded_connection import BoundedConnection, Bounds, Owner, Side
from unfuse.wire.unix_socket import BACKLOG, leave, listening

AT_ONCE = 16
"""Connections accepted before others have their turn."""

PAUSE_S = 0.1
"""Seconds without accepting when that was too fast, or failed."""

FILES = 3
"""Descriptors that a connection takes: two here, one of ZMQ's."""

CREDENTIALS = struct.Struct("3i")
"""What the kernel says of who connected to a unix socket: process, user, group."""

log = structlog.get_logger(__name__)


class BoundedListener(Owner):
    """Lets those in who connect to `listener`, one connection to the unix socket `inside` for each of theirs.

    Who does not keep the bounds is dropped and told of in the log, a reason at most once a second. On a unix socket
    only this process' user is let in. Runs in the event loop that it is made in.
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
        """Let nobody in any more, and end every connection."""
        self._loop.remove_reader(self._listener)
        if self._rest:
            self._rest.cancel()
        if self._listener.family == socket.AF_UNIX:
            leave(Path(self._listener.getsockname()))
        self._listener.close()
        for connection in list(self._connections):
            connection.end()

    @override
    async def lead_in(self, side: Side) -> None:
        await self._loop.create_unix_connection(lambda: side, self._inside)

    @override
    def crowded(self) -> None:
        """Who takes most room leaves."""
        max(self._connections, key=lambda connection: connection.owed).drop("too much of what is said is unanswered")

    @override
    def through(self, connection: BoundedConnection) -> None:
        self._waiting.pop(connection, None)

    @override
    def left(self, connection: BoundedConnection) -> None:
        self._connections.discard(connection)
        self._waiting.pop(connection, None)

    @override
    def tell(self, reason: str, peer: str) -> None:
        if times := self._throttle.count_if_due(reason):
            log.warning("dropped a connection to the control port", reason=reason, peer=peer, times=times)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if not self._pace.take(1, self._loop.time()):
                self._pause()
                return
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors left, say
                self.tell(f"it cannot be accepted: {error.strerror}", "")
                self._pause()
                return
            self._welcome(accepted, str(address[0]) if address else "")

    def _pause(self) -> None:
        """Who comes meanwhile waits in the kernel."""
        self._loop.remove_reader(self._listener)
        self._rest = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._listener, self._accept)

    def _welcome(self, accepted: socket.socket, peer: str) -> None:
        accepted.setblocking(False)
        if accepted.family == socket.AF_UNIX:
            shown = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            _, user, _ = CREDENTIALS.unpack(shown)
            peer = f"user {user}"
            if user != os.geteuid():
                self._turn_away(accepted, "it is another user's", peer)
                return
        if len(self._connections) >= self._most:
            self._turn_away(accepted, "there are too many", peer)
            return
        connection = BoundedConnection(self, self._bounds, peer)
        self._connections.add(connection)
        self._waiting[connection] = None
        if len(self._waiting) > self._bounds.waiting:
            next(iter(self._waiting)).drop("too many are in the handshake, this one for longest")
        task = self._loop.create_task(self._open(accepted, connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _turn_away(self, accepted: socket.socket, reason: str, peer: str) -> None:
        self.tell(reason, peer)
        accepted.close()

    async def _open(self, accepted: socket.socket, connection: BoundedConnection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection.outer, accepted)
        except OSError:  # it left already
            accepted.close()
            connection.end()
            self.left(connection)


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket at a control address, and the address that leads to it. Raises ConfigError."""
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
