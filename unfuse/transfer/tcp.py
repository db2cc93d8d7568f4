"""The tcp engine, and the authenticated connections in which other engines agree on what to move."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import BoundedSemaphore, Lock, Thread, current_thread
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.arena.arena import Arena
from unfuse.arena.objects import Extent
from unfuse.arena.protocol import Written, receive_exactly
from unfuse.core.codec import decode, encode, frame, read_message
from unfuse.core.errors import ArenaFull, ConfigError, ObjectLost, ProtocolError
from unfuse.core.object_ref import ObjectRef
from unfuse.transfer.base import (
    MAX_MESSAGE,
    Coming,
    FromOwner,
    LinkBroken,
    PeerLink,
    Ping,
    Pong,
    Pull,
    ToOwner,
    TransferEngine,
    TransferOptions,
    Watch,
    answer_watch,
    check_refusal,
    hold_for,
    refusal,
)

Reply = TypeVar("Reply", bound=FromOwner)


class OwnerConnection(Protocol):
    """One connection to an owner. Its failures are the `errors` of its link."""

    def ask(self, message: ToOwner, kind: type[Reply], id: str = "") -> Reply:
        """Send a message about object `id`; returns the answer. Raises ObjectLost or ArenaFull if the owner says so."""
        ...

    def is_alive(self) -> bool:
        """Whether it can be used again, as far as can be seen without asking the owner."""
        ...

    def interrupt(self) -> None:
        """Make calls of other threads that wait here fail soon."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


C = TypeVar("C", bound=OwnerConnection)


class PooledLink(PeerLink, Generic[C]):
    """At most `queues` connections to one owner; they are opened when they are needed, and kept while they work."""

    errors: tuple[type[Exception], ...] = (OSError, ProtocolError)

    def __init__(self, open: Callable[[], C], address: str, options: TransferOptions) -> None:
        self._open, self._address, self._queues = open, address, options.queues
        self._room = BoundedSemaphore(options.queues)
        self._lock = Lock()
        self._idle: list[C] = []
        self._busy: set[C] = set()
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[C]:
        """A context with a connection. It is used again if the body succeeds, or raises the owner's answer."""
        with self._room:
            try:
                connection = self._borrow()
                reusable = False
                try:
                    yield connection
                    reusable = True
                except (ObjectLost, ArenaFull):
                    reusable = True
                    raise
                finally:
                    self._return(connection, reusable)
            except self.errors as error:
                raise LinkBroken(f"the owner at {self._address} is not reached: {error}") from error

    @override
    def written(self, ref: ObjectRef, known: int, wait: float) -> tuple[tuple[int, ...], bool]:
        with self.connection() as connection:
            answer = connection.ask(Watch(ref.id, ref.key, ref.generation, ref.nbytes, known, wait), Written, ref.id)
        return answer.checksums, answer.whole

    @override
    def ping(self) -> None:
        if len(self._busy) < self._queues:
            with self.connection() as connection:
                connection.ask(Ping(), Pong)

    @override
    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._busy:
                connection.interrupt()
            while self._idle:
                self._idle.pop().close()

    def _borrow(self) -> C:
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("the link is closed")
            while self._idle:
                connection = self._idle.pop()
                if connection.is_alive():
                    self._busy.add(connection)
                    return connection
                connection.close()
        connection = self._open()
        with self._lock:
            self._busy.add(connection)
        return connection

    def _return(self, connection: C, reusable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if reusable and not self._closed:
                self._idle.append(connection)
            else:
                connection.close()


NONCE = 32
MAX_PEERS = 1024  # the most connections of an owner
MAX_STRANGERS = 64  # the most connections that have not proved the secret yet; above that, the oldest of them is closed

Deliver = Callable[[socket.socket, Extent, Pull], object]


class OwnerServer:
    """Serves peers that prove the secret, each connection in a thread of its own, at `address` until `close`.

    `deliver` sends the bytes of a Pull (it `sends`), or waits for the peer's Got; the object is held until it returns.
    A peer that has proved the secret gets `about`.
    """

    def __init__(
        self, arena: Arena, options: TransferOptions, deliver: Deliver, about: bytes = b"", *, sends: bool = False
    ) -> None:
        self._arena, self._options, self._deliver, self._about, self._sends = arena, options, deliver, about, sends
        host = options.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}: {error.strerror}; choose another --listen") from error
        port = self._listener.getsockname()[1]
        self.address = f"tcp://[{host}]:{port}" if family == socket.AF_INET6 else f"tcp://{host}:{port}"
        self._lock = Lock()
        self._peers: dict[Thread, socket.socket] = {}
        self._strangers: dict[Thread, socket.socket] = {}
        self._thread = Thread(target=self._accept, name="transfer-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections, and wait until nothing reads the arena any more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            peers = dict(self._peers)
            for peer in peers.values():
                hang_up(peer)
        for thread in peers:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            thread = Thread(target=self._serve, args=(peer,), name="transfer-owner", daemon=True)
            with self._lock:
                if len(self._peers) >= MAX_PEERS:
                    peer.close()
                    continue
                if len(self._strangers) >= MAX_STRANGERS:
                    hang_up(self._strangers.pop(next(iter(self._strangers))))
                self._peers[thread] = self._strangers[thread] = peer
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        with suppress(OSError, ProtocolError):
            prepare(peer, self._options.silence_s)
            self._greet(peer)
            while True:
                self._answer(peer, decode(read(peer), ToOwner))
        with self._lock:
            self._strangers.pop(current_thread(), None)
            del self._peers[current_thread()]
            peer.close()

    def _greet(self, peer: socket.socket) -> None:
        theirs, mine = read(peer), secrets.token_bytes(NONCE)
        write(peer, mine)
        check(read(peer), self._options.secret, b"reader", mine, theirs)
        with self._lock:
            self._strangers.pop(current_thread(), None)
        write(peer, prove(self._options.secret, b"owner", mine, theirs))
        write(peer, self._about)

    def _answer(self, peer: socket.socket, message: ToOwner) -> None:
        try:
            match message:
                case Ping():
                    send(peer, Pong())
                case Watch():
                    send(peer, answer_watch(self._arena, message, self._options.heartbeat_s))
                case Pull():
                    self._serve_pull(peer, message)
                case _:
                    raise ProtocolError(f"not a request: {type(message).__name__}")
        except (ObjectLost, ArenaFull) as error:
            send(peer, refusal(error))

    def _serve_pull(self, peer: socket.socket, pull: Pull) -> None:
        extent = hold_for(self._arena, pull)
        together = self._sends and pull.stop > pull.start  # then the reader is woken once, when bytes are there
        try:
            send(peer, Coming(extent.offset + pull.start), socket.MSG_MORE if together else 0)
            self._deliver(peer, extent, pull)
        finally:
            self._arena.unhold(pull.id)


class OwnerEngine(TransferEngine):
    """An engine whose `owner` agrees over TCP on what may be read."""

    owner: OwnerServer | None = None

    @override
    def close(self) -> None:
        if self.owner:
            self.owner.close()


class OwnerClient(OwnerConnection):
    """A reader's end. Raises OSError or ProtocolError if there is no owner at the address, or not one of ours."""

    def __init__(self, address: str, options: TransferOptions) -> None:
        parts = urlsplit(address)
        if parts.scheme != "tcp" or not parts.hostname or not parts.port:
            raise ProtocolError(f"{address!r} is no address of a transfer engine over TCP")
        self._options = options
        self.socket = socket.create_connection((parts.hostname, parts.port), options.silence_s)
        try:
            prepare(self.socket, options.silence_s)
            self.about = self._greet()
        except BaseException:
            self.socket.close()
            raise

    @override
    def ask(self, message: ToOwner, kind: type[Reply], id: str = "") -> Reply:
        send(self.socket, message)
        reply: FromOwner = decode(read(self.socket), FromOwner)
        check_refusal(reply, id)
        if not isinstance(reply, kind):
            raise ProtocolError(f"the owner answered {type(reply).__name__} to {type(message).__name__}")
        return reply

    @override
    def is_alive(self) -> bool:
        """Whether there is nothing to read: an owner sends nothing unasked, so bytes, or an end, mean it is broken."""
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @override
    def interrupt(self) -> None:
        hang_up(self.socket)

    @override
    def close(self) -> None:
        """Reset the connection, so that the owner notices at once, even while it sends, and ends its hold."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _greet(self) -> bytes:
        secret, mine = self._options.secret, secrets.token_bytes(NONCE)
        write(self.socket, mine)
        theirs = read(self.socket)
        write(self.socket, prove(secret, b"reader", theirs, mine))
        check(read(self.socket), secret, b"owner", theirs, mine)
        return read(self.socket)


class ChannelLink(PooledLink[OwnerClient]):
    """A link that agrees on each pull over a connection; `bring` moves the bytes."""

    def __init__(self, address: str, options: TransferOptions) -> None:
        super().__init__(lambda: OwnerClient(address, options), address, options)

    @abstractmethod
    def bring(self, connection: OwnerClient, offset: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        """Fill `into` with the bytes at an offset of the owner's arena, which are held; yields how many are there."""

    @override
    def pull(self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        pull = Pull(ref.id, ref.key, ref.generation, ref.nbytes, start, stop)
        with self.connection() as connection:
            coming = connection.ask(pull, Coming, ref.id)
            yield from self.bring(connection, coming.offset, into[: stop - start])


def prepare(connection: socket.socket, patience: float) -> None:
    """Fail after `patience` silent seconds, send small messages at once; block still, as MSG_WAITALL needs."""
    connection.settimeout(None)
    limit = struct.pack("ll", int(patience), int(patience % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def hang_up(connection: socket.socket) -> None:
    """Shut a connection down that another thread may wait for; that thread closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def write(connection: socket.socket, data: bytes, flags: int = 0) -> None:
    """Send bytes as one message."""
    connection.sendall(frame(data), flags)


def read(connection: socket.socket) -> bytes:
    """Receive the bytes of one message."""
    return read_message(partial(receive_exactly, connection), MAX_MESSAGE)


def send(connection: socket.socket, message: ToOwner | FromOwner, flags: int = 0) -> None:
    """Send a message."""
    write(connection, encode(message), flags)


def prove(secret: str, side: bytes, owners: bytes, readers: bytes) -> bytes:
    """A proof that this side knows the secret, over two nonces that were never used before."""
    return hmac.digest(secret.encode(), side + owners + readers, "sha256")


def check(proof: bytes, secret: str, side: bytes, owners: bytes, readers: bytes) -> None:
    """Raise ProtocolError if the proof is wrong: the other side does not know the secret."""
    if len(owners + readers) != 2 * NONCE or not hmac.compare_digest(proof, prove(secret, side, owners, readers)):
        raise ProtocolError("it does not know our secret: start all workers with the same --keys")


PIECE = 256 * 1024  # bytes received between two reports


class TcpEngine(OwnerEngine):
    """One owner and any number of links."""

    name = "tcp"

    @override
    def serve(self, arena: Arena) -> str:
        self.owner = OwnerServer(arena, self.options, partial(_send, arena.view), sends=True)
        return self.owner.address

    @override
    def connect(self, address: str) -> TcpLink:
        return TcpLink(address, self.options)


class TcpLink(ChannelLink):
    """Receives the bytes on the connection itself."""

    @override
    def bring(self, connection: OwnerClient, offset: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        view, done = into.data, 0
        while done < len(view):
            got = connection.socket.recv_into(view[done : done + PIECE], 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionResetError("the connection ended")
            done += got
            yield done


def _send(view: NDArray[np.uint8], peer: socket.socket, extent: Extent, pull: Pull) -> None:
    """Send by copying. sendfile would save the owner this copy, but make the reader, which has more to do, slower."""
    peer.sendall(view[extent.offset + pull.start : extent.offset + pull.stop].data)
