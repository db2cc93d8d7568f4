"""The tcp transfer engine, and authenticated connections for the control messages of other engines."""

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
    FromOwner,
    LinkBroken,
    PeerLink,
    Ping,
    Pong,
    Pull,
    Ready,
    ToOwner,
    TransferEngine,
    TransferOptions,
    Watch,
    answer_watch,
    check_refusal,
    hold_object,
    refusal,
)

#: Bytes of a nonce.
NONCE = 32

#: Most connections of an owner.
MAX_PEERS = 1024

#: Most connections that have not proved the secret yet. With more, the oldest of them is closed.
MAX_STRANGERS = 64

#: Bytes received between two reports of progress.
RECEIVE_BYTES = 256 * 1024

#: The error of a link that was closed by its own process.
CLOSED = "the connection is closed"

Reply = TypeVar("Reply", bound=FromOwner)

#: Delivers the bytes of a Pull to a peer.
Deliver = Callable[[socket.socket, Extent, Pull], object]


class OwnerConnection(Protocol):
    """One connection to an owner. It fails with the `errors` of its link."""

    def call(self, message: ToOwner, kind: type[Reply], id: str = "") -> Reply:
        """Send a message about object `id`. Returns the answer.

        Raises ObjectLost or ArenaFull if the owner answers so.
        """
        ...

    def is_alive(self) -> bool:
        """Whether the connection can be used again. Sends nothing."""
        ...

    def interrupt(self) -> None:
        """Make calls of other threads that wait on this connection fail soon."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


C = TypeVar("C", bound=OwnerConnection)


class PooledLink(PeerLink, Generic[C]):
    """A pool of at most `queues` connections to one owner.

    Connections are opened on demand and reused while they work.
    """

    errors: tuple[type[Exception], ...] = (OSError, ProtocolError)

    def __init__(self, open: Callable[[], C], address: str, options: TransferOptions) -> None:
        self._open, self._address = open, address
        self._queues = options.queues
        self._slots = BoundedSemaphore(options.queues)
        self._lock = Lock()
        self._idle: list[C] = []
        self._busy: set[C] = set()
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[C]:
        """Lend a connection to the body of a `with` statement.

        It is reused if the body succeeds, or raises the owner's answer. Other `errors` raise LinkBroken.
        """
        with self._slots:
            try:
                connection = self._acquire()
                is_reusable = False
                try:
                    yield connection
                    is_reusable = True
                except (ObjectLost, ArenaFull):
                    is_reusable = True
                    raise
                finally:
                    self._put_back(connection, is_reusable)
            except self.errors as error:
                raise LinkBroken(f"the owner at {self._address} cannot be reached: {error}") from error

    @override
    def written(self, ref: ObjectRef, known: int, wait: float) -> tuple[tuple[int, ...], bool]:
        with self.connection() as connection:
            answer = connection.call(Watch(ref.id, ref.key, ref.generation, ref.nbytes, known, wait), Written, ref.id)
        return answer.checksums, answer.is_whole

    @override
    def ping(self) -> None:
        # With all connections busy there is none for a ping, and their timeouts notice a silent owner.
        if len(self._busy) < self._queues:
            with self.connection() as connection:
                connection.call(Ping(), Pong)

    @override
    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._busy:
                connection.interrupt()
            while self._idle:
                self._idle.pop().close()

    def _acquire(self) -> C:
        """Return an idle connection that is alive, or a new one."""
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError(CLOSED)
            while self._idle:
                connection = self._idle.pop()
                if connection.is_alive():
                    self._busy.add(connection)
                    return connection
                connection.close()
        connection = self._open()  # without the lock, because it may take seconds
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection
        connection.close()
        raise ConnectionAbortedError(CLOSED)

    def _put_back(self, connection: C, is_reusable: bool) -> None:
        """Return a connection to the pool, or close it."""
        with self._lock:
            self._busy.discard(connection)
            if is_reusable and not self._closed:
                self._idle.append(connection)
            else:
                connection.close()


class OwnerServer:
    """Serves an arena to peers that prove the secret, each connection in its own thread.

    It serves at `address` until `close`. A peer receives `about` once it has proved the secret. `deliver` sends the
    bytes of a Pull if `sends` is true. Otherwise it waits for the peer's Got. The object is retained until it returns.
    """

    def __init__(
        self, arena: Arena, options: TransferOptions, deliver: Deliver, about: bytes = b"", *, sends: bool = False
    ) -> None:
        self._arena, self._options = arena, options
        self._deliver, self._sends = deliver, sends
        self._about = about
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
        self._strangers: dict[Thread, socket.socket] = {}  # peers that have not proved the secret yet
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
        """Accept connections until the listener is closed."""
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
        """Serve one connection until it ends or breaks the protocol."""
        with suppress(OSError, ProtocolError):
            prepare(peer, self._options.silence_s)
            self._authenticate(peer)
            while True:
                self._answer(peer, decode(read(peer), ToOwner))
        with self._lock:
            self._strangers.pop(current_thread(), None)
            del self._peers[current_thread()]
            peer.close()  # under the lock, so that no other thread shuts down a reused descriptor

    def _authenticate(self, peer: socket.socket) -> None:
        """Verify the peer's proof of the secret, then prove it to the peer.

        A proof is the HMAC-SHA256 of both nonces and the name of the side.
        """
        reader_nonce, owner_nonce = read(peer), secrets.token_bytes(NONCE)
        write(peer, owner_nonce)
        check(read(peer), self._options.secret, b"reader", owner_nonce, reader_nonce)
        with self._lock:
            self._strangers.pop(current_thread(), None)
        write(peer, prove(self._options.secret, b"owner", owner_nonce, reader_nonce))
        write(peer, self._about)

    def _answer(self, peer: socket.socket, message: ToOwner) -> None:
        """Answer one request."""
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
        """Deliver the bytes of a Pull while the object is retained."""
        extent = hold_object(self._arena, pull)
        # In one packet with the first bytes, so that the reader wakes up once.
        bytes_follow = self._sends and pull.stop > pull.start
        try:
            send(peer, Ready(extent.offset + pull.start), socket.MSG_MORE if bytes_follow else 0)
            self._deliver(peer, extent, pull)
        finally:
            self._arena.unhold(pull.id)


class OwnerEngine(TransferEngine):
    """An engine whose owners serve control messages over TCP."""

    #: The server of this process's arena. None before `serve`.
    owner: OwnerServer | None = None

    @override
    def close(self) -> None:
        if self.owner:
            self.owner.close()


class OwnerClient(OwnerConnection):
    """The reader's end of a connection.

    Raises OSError or ProtocolError if there is no owner at the address, or one with another secret.
    """

    def __init__(self, address: str, options: TransferOptions) -> None:
        parts = urlsplit(address)
        if parts.scheme != "tcp" or not parts.hostname or not parts.port:
            raise ProtocolError(f"{address!r} is not a TCP address of a transfer engine")
        self._options = options
        self.socket = socket.create_connection((parts.hostname, parts.port), options.silence_s)
        try:
            prepare(self.socket, options.silence_s)
            self.about = self._authenticate()
        except BaseException:
            self.socket.close()
            raise

    @override
    def call(self, message: ToOwner, kind: type[Reply], id: str = "") -> Reply:
        send(self.socket, message)
        reply: FromOwner = decode(read(self.socket), FromOwner)
        check_refusal(reply, id)
        if not isinstance(reply, kind):
            raise ProtocolError(f"the owner answered {type(reply).__name__} to {type(message).__name__}")
        return reply

    @override
    def is_alive(self) -> bool:
        """Whether there is nothing to read.

        An owner sends only answers. So data, or the end of the stream, mean that the connection is broken.
        """
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
        """Reset the connection, so that the owner notices at once, even while it sends.

        It then frees the retained object.
        """
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _authenticate(self) -> bytes:
        """Prove the secret to the owner and verify its proof. Returns its `about`."""
        secret, reader_nonce = self._options.secret, secrets.token_bytes(NONCE)
        write(self.socket, reader_nonce)
        owner_nonce = read(self.socket)
        write(self.socket, prove(secret, b"reader", owner_nonce, reader_nonce))
        check(read(self.socket), secret, b"owner", owner_nonce, reader_nonce)
        return read(self.socket)


class ChannelLink(PooledLink[OwnerClient]):
    """A link that requests each pull over a connection; `receive_into` moves the bytes."""

    def __init__(self, address: str, options: TransferOptions) -> None:
        super().__init__(lambda: OwnerClient(address, options), address, options)

    @abstractmethod
    def receive_into(self, connection: OwnerClient, offset: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        """Fill `into` from `offset` of the owner's arena on; yields the bytes so far.

        The owner retains the object meanwhile.
        """

    @override
    def pull(self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        pull = Pull(ref.id, ref.key, ref.generation, ref.nbytes, start, stop)
        with self.connection() as connection:
            ready = connection.call(pull, Ready, ref.id)
            yield from self.receive_into(connection, ready.offset, into[: stop - start])


def prepare(connection: socket.socket, timeout_s: float) -> None:
    """Set the timeouts of a connection, and make it send small messages at once.

    It stays a blocking socket, as MSG_WAITALL needs. So the kernel has the timeouts, not Python's socket object.
    """
    connection.settimeout(None)
    timeval = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def hang_up(connection: socket.socket) -> None:
    """Shut down a connection that another thread may wait for. That thread closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def write(connection: socket.socket, data: bytes, flags: int = 0) -> None:
    """Send bytes as one message."""
    connection.sendall(frame(data), flags)


def read(connection: socket.socket) -> bytes:
    """Return the bytes of the next message."""
    return read_message(partial(receive_exactly, connection), MAX_MESSAGE)


def send(connection: socket.socket, message: ToOwner | FromOwner, flags: int = 0) -> None:
    """Send a message."""
    write(connection, encode(message), flags)


def prove(secret: str, side: bytes, owner_nonce: bytes, reader_nonce: bytes) -> bytes:
    """Return the proof that this side has the secret, over two fresh nonces."""
    return hmac.digest(secret.encode(), side + owner_nonce + reader_nonce, "sha256")


def check(proof: bytes, secret: str, side: bytes, owner_nonce: bytes, reader_nonce: bytes) -> None:
    """Raise ProtocolError if the proof is wrong: the other side does not have the secret."""
    if len(owner_nonce + reader_nonce) != 2 * NONCE or not hmac.compare_digest(
        proof, prove(secret, side, owner_nonce, reader_nonce)
    ):
        raise ProtocolError("the peer has another secret: start all workers with the same --keys")


class TcpEngine(OwnerEngine):
    """Moves bytes over TCP connections. One owner and any number of links."""

    name = "tcp"

    @override
    def serve(self, arena: Arena) -> str:
        self.owner = OwnerServer(arena, self.options, partial(_send_bytes, arena.view), sends=True)
        return self.owner.address

    @override
    def connect(self, address: str) -> TcpLink:
        return TcpLink(address, self.options)


class TcpLink(ChannelLink):
    """Receives the bytes on the connection itself."""

    @override
    def receive_into(self, connection: OwnerClient, offset: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        view, done = into.data, 0
        while done < len(view):
            received = connection.socket.recv_into(view[done : done + RECEIVE_BYTES], 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionResetError("the connection ended")
            done += received
            yield done


def _send_bytes(view: NDArray[np.uint8], peer: socket.socket, extent: Extent, pull: Pull) -> None:
    """Send the bytes of a Pull by copying.

    With sendfile the owner would save this copy, but the reader, which has more work, would be slower.
    """
    peer.sendall(view[extent.offset + pull.start : extent.offset + pull.stop].data)
