"""The owner's end of an arena's socket: one thread that answers readers and writers, and ends their holds with them."""

from __future__ import annotations

import hmac
import os
import selectors
import socket
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from unfuse.arena.arena import Arena
from unfuse.arena.protocol import (
    MAX_MESSAGE,
    Abort,
    Create,
    Delete,
    Done,
    FromOwner,
    Full,
    Hold,
    Look,
    Lost,
    Owner,
    Placed,
    Release,
    Seal,
    Seen,
    Spill,
    ToOwner,
    Unhold,
    Who,
    Write,
    frame,
)
from unfuse.arena.sockets import SCHEME, listen, peer_of, remove_stale
from unfuse.core.codec import decode
from unfuse.core.errors import ArenaFull, ObjectLost, ProtocolError
from unfuse.core.framing import split_message

RECEIVE_BYTES = 64 * 1024

MOST_CLIENTS = 256
"""Connections at once: two for each other worker of the machine, and that of one's own compute process."""

AT_A_TIME = 32
"""Messages of one client that are answered before it is the others' turn."""


@dataclass(eq=False, slots=True)
class _Connection:
    """A client: what it has sent so far, and what must be undone when it goes."""

    socket: socket.socket
    pid: int
    received: bytearray = field(default_factory=bytearray)
    holds: Counter[str] = field(default_factory=Counter)
    writing: set[str] = field(default_factory=set)
    writer: bool = False
    reads: bool = False


class ArenaServer:
    """Serves an arena at `address`, in a `folder`, until closed. Who shows `token` (128 random bits) may write.

    A client that sends anything but messages it may send, or does not read its answers, is disconnected. However many
    it sends, the others have their turns, and of too many connections one gives way of whoever has the most.
    Raises ConfigError when there can be no socket in the folder. What dead owners left there is removed.
    """

    def __init__(self, arena: Arena, token: bytes, folder: Path, owner: str) -> None:
        self._arena, self._token, self._owner = arena, token, owner
        self._listener, self._path = listen(folder)
        remove_stale(folder)
        self.address = f"{SCHEME}{self._path}"
        self._behind: dict[_Connection, None] = {}
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._thread = Thread(target=self._serve, name="arena", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Disconnect everybody, which ends their holds. What they have mapped stays readable to them."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for connection in self._connections():
            self._disconnect(connection)
        self._selector.close()
        self._path.unlink(missing_ok=True)
        self._listener.close()
        os.close(self._stop)

    def _serve(self) -> None:
        while True:
            ready = [key for key, _ in self._selector.select(0 if self._behind else None)]
            behind, self._behind = self._behind, {}
            for connection in behind:
                self._hear(connection, receive=False)
            for key in ready:
                if key.fileobj == self._stop:
                    return
                if key.data is None:
                    self._accept()
                elif key.data not in behind and key.data.socket.fileno() >= 0:
                    self._hear(key.data)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:  # it did not wait
            return
        except OSError:  # out of descriptors
            self._make_room()
            return
        pid, uid = peer_of(client)
        if uid != os.geteuid() or (len(self._connections()) >= MOST_CLIENTS and not self._make_room()):
            client.close()
            return
        client.setblocking(False)
        self._selector.register(client, selectors.EVENT_READ, _Connection(client, pid))

    def _connections(self) -> list[_Connection]:
        """The oldest first."""
        return [key.data for key in self._selector.get_map().values() if key.data]

    def _make_room(self) -> bool:
        """Disconnect one that neither writes nor holds anything, of the process with the most; False if none is so."""
        idle = [one for one in self._connections() if not (one.writer or one.holds.total())]
        for pid, _ in Counter(one.pid for one in idle).most_common(1):
            self._disconnect(next(one for one in idle if one.pid == pid))
        return bool(idle)

    def _hear(self, connection: _Connection, *, receive: bool = True) -> None:
        """Answer some of what a client has sent; the rest when it is its turn again, before more is received."""
        try:
            if receive:
                data = connection.socket.recv(RECEIVE_BYTES)
                if not data:
                    raise ProtocolError("the connection is closed")
                connection.received += data
            for _ in range(AT_A_TIME):
                if (body := split_message(connection.received, MAX_MESSAGE)) is None:
                    return
                self._answer(connection, decode(body, ToOwner))
            self._behind[connection] = None
        except (OSError, ProtocolError):
            self._disconnect(connection)

    def _disconnect(self, connection: _Connection) -> None:
        self._behind.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        for id in connection.holds.elements():
            self._arena.unhold(id)
        for id in connection.writing:
            self._arena.abort(id)

    def _answer(self, connection: _Connection, message: ToOwner) -> None:
        reply: FromOwner
        fd = None
        try:
            match message:
                case Unhold(id):
                    if not connection.holds[id]:
                        raise ProtocolError(f"object {id} is not held by this connection")
                    connection.holds[id] -= 1
                    self._arena.unhold(id)
                    return
                case Who():
                    reply = Owner(self._owner)
                case Hold(id, key, generation, nbytes):
                    reply = Placed(self._arena.hold(id, key, generation, nbytes))
                    connection.holds[id] += 1
                    if not connection.reads:
                        connection.reads, fd = True, self._arena.read_fd
                case Write(token):
                    if not hmac.compare_digest(token, self._token):
                        raise ProtocolError("not this arena's token")
                    connection.writer, reply, fd = True, Done(), self._arena.fd
                case _:
                    reply = self._change(connection, message)
        except ObjectLost as error:
            reply = Lost(str(error))
        except ArenaFull as error:
            reply = Full(error.needed, error.free, error.capacity)
        _send(connection.socket, frame(reply), fd)

    def _change(self, connection: _Connection, message: ToOwner) -> FromOwner:
        if not connection.writer:
            raise ProtocolError("not a writer")
        match message:
            case Create(nbytes, request):
                extent = self._arena.create(nbytes, request)
                connection.writing.add(extent.id)
                return Placed(extent)
            case Seal(id) | Abort(id):
                if id not in connection.writing:
                    raise ProtocolError(f"object {id} is not being written by this connection")
                connection.writing.remove(id)
                (self._arena.abort if isinstance(message, Abort) else self._arena.seal)(id)
            case Spill(id):
                self._arena.spill(id)
            case Delete(id):
                self._arena.delete(id)
            case Release(request):
                self._arena.release(request)
            case Look():
                return Seen(self._arena.usage(), self._arena.requests(), self._arena.idle())
        return Done()


def _send(client: socket.socket, data: bytes, fd: int | None) -> None:
    """Send without waiting: a client asks one thing at a time, so only one that never reads has no room for more."""
    sent = socket.send_fds(client, [data], [] if fd is None else [fd])
    if sent < len(data):
        raise ProtocolError("the client does not read its answers")
