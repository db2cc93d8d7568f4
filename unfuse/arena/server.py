"""The server of an arena: one thread answers readers and writers, in rotation.

When a client disconnects, it ends the client's holds and aborts the client's unsealed objects.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread

from unfuse.arena import protocol
from unfuse.arena.arena import Arena
from unfuse.arena.protocol import SCHEME, listen, peer_of, remove_stale
from unfuse.core.codec import decode, split_message
from unfuse.core.errors import ArenaFull, ObjectLost, ProtocolError

#: Most bytes that are received in one call.
RECEIVE_BYTES = 64 * 1024

#: Most connections: two for each other worker of the machine, and one for the worker's own compute process.
MAX_CLIENTS = 256

#: Most messages of one client that are answered before those of other clients.
AT_A_TIME = 32


@dataclass(eq=False, slots=True)
class _Connection:
    """A client: its unanswered messages, and what must be undone when it disconnects."""

    socket: socket.socket

    #: The client's process id.
    pid: int

    #: Received bytes that are not answered yet.
    received: bytearray = field(default_factory=bytearray)

    #: Number of holds, by object id.
    holds: Counter[str] = field(default_factory=Counter)

    #: Ids of the objects that it is writing.
    writing: set[str] = field(default_factory=set)

    #: Whether it has proved the right to write.
    writer: bool = False

    #: Whether the descriptor for reading was sent to it.
    reads: bool = False


class ArenaServer:
    """Serves an arena at `address`, a socket in `folder`, until `close`.

    Clients that show `token` may write. A client that breaks the protocol, or does not read its answers, is
    disconnected. Clients are served in rotation, however many messages one sends. If there are too many connections,
    an idle one of the process with the most is closed. Sockets of ended owners in the folder are removed. Raises
    ConfigError if no socket can be made there.
    """

    def __init__(self, arena: Arena, token: bytes, folder: Path, owner: str) -> None:
        self._arena, self._owner = arena, owner
        self._token = token
        self._listener, self._path = listen(folder)
        remove_stale(folder)
        self.address = f"{SCHEME}{self._path}"
        self._unanswered: dict[_Connection, None] = {}  # clients with received messages that are not answered yet
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._spared = os.eventfd(0, os.EFD_CLOEXEC)
        self._selector.register(self._spared, selectors.EVENT_READ)
        arena.on_trimmable(partial(os.eventfd_write, self._spared, 1))
        self._thread = Thread(target=self._serve, name="arena", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Disconnect all clients, which ends their holds.

        Memory that they have mapped stays readable to them.
        """
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for connection in self._connections():
            self._disconnect(connection)
        self._selector.close()
        self._path.unlink(missing_ok=True)
        self._listener.close()
        self._arena.on_trimmable(bool)  # the arena may outlive the descriptor that is closed below
        os.close(self._stop)
        os.close(self._spared)

    def _serve(self) -> None:
        """Answer clients and trim the arena, until `close`."""
        due = self._trim()
        while True:
            timeout = None if due is None else max(0.0, due - time.monotonic())
            ready = [key for key, _ in self._selector.select(0 if self._unanswered else timeout)]
            if timeout == 0:
                due = self._trim()
            unanswered, self._unanswered = self._unanswered, {}
            for connection in unanswered:
                self._serve_client(connection, receive=False)

            for key in ready:
                if key.fileobj == self._stop:
                    return
                if key.fileobj == self._spared:
                    os.eventfd_read(self._spared)
                    due = self._trim()
                elif key.data is None:
                    self._accept()
                # Not a client that was served above, or disconnected since `select`.
                elif key.data not in unanswered and key.data.socket.fileno() >= 0:
                    self._serve_client(key.data)

    def _trim(self) -> float | None:
        """Trim the arena. Returns the monotonic time when that is due again, or None."""
        delay = self._arena.trim()
        return None if delay is None else time.monotonic() + delay

    def _accept(self) -> None:
        """Accept a client of the same user."""
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:  # the client has disconnected already
            return
        except OSError:  # no free descriptors: the client is accepted once a connection is closed
            self._make_room()
            return

        pid, uid = peer_of(client)
        if uid != os.geteuid() or (len(self._connections()) >= MAX_CLIENTS and not self._make_room()):
            client.close()
            return
        client.setblocking(False)
        self._selector.register(client, selectors.EVENT_READ, _Connection(client, pid))

    def _connections(self) -> list[_Connection]:
        """Return all connections, the oldest first."""
        return [key.data for key in self._selector.get_map().values() if key.data]

    def _make_room(self) -> bool:
        """Disconnect an idle client of the process with the most idle ones.

        Returns False if no client is idle.
        """
        idle = [connection for connection in self._connections() if not (connection.writer or connection.holds.total())]
        for pid, _ in Counter(connection.pid for connection in idle).most_common(1):
            self._disconnect(next(connection for connection in idle if connection.pid == pid))
        return bool(idle)

    def _serve_client(self, connection: _Connection, *, receive: bool = True) -> None:
        """Answer up to AT_A_TIME messages of a client.

        Its other messages are answered in the next rotation, before more bytes are received.
        """
        try:
            if receive:
                data = connection.socket.recv(RECEIVE_BYTES)
                if not data:
                    raise ProtocolError("the connection is closed")
                connection.received += data
            for _ in range(AT_A_TIME):
                if (body := split_message(connection.received, protocol.MAX_MESSAGE)) is None:
                    return
                self._answer(connection, decode(body, protocol.ToOwner))
            self._unanswered[connection] = None
        except (OSError, ProtocolError):
            self._disconnect(connection)

    def _disconnect(self, connection: _Connection) -> None:
        """Close a connection; ends its holds and aborts its unsealed objects."""
        self._unanswered.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        for id in connection.holds.elements():
            self._arena.unhold(id)
        for id in connection.writing:
            self._arena.abort(id)

    def _answer(self, connection: _Connection, message: protocol.ToOwner) -> None:
        """Answer one message."""
        reply: protocol.FromOwner
        fd = None
        try:
            match message:
                case protocol.Unhold(id):
                    if not connection.holds[id]:
                        raise ProtocolError(f"object {id} is not held by this connection")
                    connection.holds[id] -= 1
                    self._arena.unhold(id)
                    return
                case protocol.GetOwner():
                    reply = protocol.OwnerReply(self._owner)
                case protocol.GetWritten(id, key, generation, nbytes):
                    reply = protocol.Written(*self._arena.watch(id, key, generation, nbytes))
                case protocol.HoldObject(id, key, generation, nbytes):
                    reply = protocol.ObjectPlace(self._arena.hold(id, key, generation, nbytes))
                    connection.holds[id] += 1
                    fd = None if connection.reads else self._arena.read_fd
                    connection.reads = True
                case protocol.Write(token):
                    if not hmac.compare_digest(token, self._token):
                        raise ProtocolError("the write token does not match this arena")
                    connection.writer = True
                    reply = protocol.Acknowledged()
                    fd = self._arena.fd
                case _:
                    reply = self._serve_writer(connection, message)
        except ObjectLost as error:
            reply = protocol.ObjectUnavailable(str(error))
        except ArenaFull as error:
            reply = protocol.NoRoom(error.needed, error.free, error.capacity, error.full, error.remedy)
        _send_reply(connection.socket, protocol.frame(reply), fd)

    def _serve_writer(self, connection: _Connection, message: protocol.ToOwner) -> protocol.FromOwner:
        """Carry out a message of a writer. Returns the answer."""
        if not connection.writer:
            raise ProtocolError("the connection has no write access")
        match message:
            case protocol.Create(nbytes, request):
                extent = self._arena.create(nbytes, request)
                connection.writing.add(extent.id)
                return protocol.ObjectPlace(extent, self._arena.release_count)
            case protocol.Announce(id) | protocol.Seal(id) | protocol.Abort(id) if id not in connection.writing:
                raise ProtocolError(f"object {id} is not being written by this connection")
            case protocol.Announce(id, written):
                self._arena.announce(id, written)
            case protocol.Seal(id) | protocol.Abort(id):
                connection.writing.remove(id)
                (self._arena.abort if isinstance(message, protocol.Abort) else self._arena.seal)(id)
            case protocol.SpillObject(id):
                self._arena.spill(id)
            case protocol.Delete(id):
                self._arena.delete(id)
            case protocol.Release(request):
                self._arena.release(request)
            case protocol.GetState():
                return protocol.ArenaState(self._arena.usage(), self._arena.requests(), self._arena.idle())
        return protocol.Acknowledged()


def _send_reply(client: socket.socket, data: bytes, fd: int | None) -> None:
    """Send without waiting.

    A client has one request at a time, so its buffer is full only if it never reads.
    """
    sent = socket.send_fds(client, [data], [] if fd is None else [fd])
    if sent < len(data):
        raise ProtocolError("the client does not receive its answers")
