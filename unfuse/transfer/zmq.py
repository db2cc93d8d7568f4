"""The ZeroMQ transfer engine: encrypted (CURVE) with the workers' keys.

Large objects take twice as long as over tcp.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import suppress
from threading import Thread

import numpy as np
import zmq
from numpy.typing import NDArray
from typing_extensions import override
from zmq.utils import z85

from unfuse.arena.arena import Arena
from unfuse.core.codec import decode, encode
from unfuse.core.errors import ArenaFull, ConfigError, ObjectLost, ProtocolError
from unfuse.core.object_ref import ObjectRef
from unfuse.transfer.base import (
    MAX_MESSAGE,
    FromOwner,
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
from unfuse.transfer.tcp import OwnerConnection, PooledLink, Reply

Context = zmq.Context[zmq.Socket[bytes]]

#: Most bytes of an object in one message. A pull takes several messages.
MESSAGE_BYTES = 1024 * 1024

#: Number of pieces that are requested ahead.
IN_FLIGHT = 4

#: Most messages that wait for one reader. More are dropped, since that reader does not read its answers.
MAX_UNSENT = 64

#: Events of a socket monitor that mean that the owner is gone.
OWNER_LOST_EVENTS = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

#: Milliseconds between two checks of a waiting reader whether it was interrupted.
LOOK_UP_MS = 100


class ZmqEngine(TransferEngine):
    """Moves bytes over ZeroMQ.

    One owner and any number of links, in a context of their own.
    """

    name = "zmq"
    _owner: _Owner | None = None

    def __init__(self, options: TransferOptions) -> None:
        super().__init__(options)
        if options.secret and len(options.secret) != 40:
            raise ConfigError("the transfer engine zmq requires CURVE keys: create them with `unfuse keys new DIR`")
        self._context = zmq.Context()

    @override
    def serve(self, arena: Arena) -> str:
        self._owner = _Owner(arena, self._context, self.options)
        return self._owner.address

    @override
    def connect(self, address: str) -> PeerLink:
        return _ZmqLink(lambda: _ZmqConnection(address, self._context, self.options), address, self.options)

    @override
    def close(self) -> None:
        if self._owner:
            self._owner.stop()
        self._context.destroy(linger=0)


class _Owner:
    """Answers readers in one thread.

    ZMQ copies the bytes that it sends, so no object is retained for a reader that does not read.
    """

    def __init__(self, arena: Arena, context: Context, options: TransferOptions) -> None:
        host = options.host
        self._arena = arena
        self._auth_socket = context.socket(zmq.REP)
        self._auth_socket.bind("inproc://zeromq.zap.01")
        self._peer_key = b""
        self._socket = _open(context, zmq.ROUTER, options, MAX_MESSAGE)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.SNDHWM, MAX_UNSENT)
        if options.secret:
            self._socket.set(zmq.CURVE_SERVER, 1)
            self._socket.set(zmq.ZAP_DOMAIN, b"unfuse")
            self._peer_key = z85.decode(zmq.curve_public(options.secret.encode()))
        try:
            self._socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {host}: {error.strerror}; choose another --listen") from error
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = Thread(target=self._serve, name="transfer-zmq", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop answering."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)

    def _serve(self) -> None:
        """Answer requests until `stop`."""
        poller = zmq.Poller()
        for source in (self._socket, self._auth_socket, self._stop):
            poller.register(source, zmq.POLLIN)
        while self._stop not in (ready := dict(poller.poll())):
            if self._auth_socket in ready:
                self._admit()
            if self._socket in ready:
                peer, *message = self._socket.recv_multipart()
                with suppress(ProtocolError, zmq.ZMQError):  # the peer is gone or breaks the protocol
                    self._answer(peer, decode(b"".join(message), ToOwner))
        # Closed by the thread that uses them, since ZeroMQ's sockets are not thread-safe.
        self._socket.close(linger=0)
        self._auth_socket.close(linger=0)

    def _admit(self) -> None:
        """Admit peers that have the same key, by ZAP (ZeroMQ's RFC 27)."""
        version, request_id, _, _, _, *credentials = self._auth_socket.recv_multipart()
        is_admitted = credentials == [b"CURVE", self._peer_key]
        self._auth_socket.send_multipart([version, request_id, b"200" if is_admitted else b"400", b"", b"", b""])

    def _answer(self, peer: bytes, message: ToOwner) -> None:
        """Answer one request."""
        try:
            match message:
                case Pull():
                    self._send_piece(peer, message)
                case Watch():
                    self._send(peer, answer_watch(self._arena, message, 0.0))
                case Ping():
                    self._send(peer, Pong())
        except (ObjectLost, ArenaFull) as error:
            self._send(peer, refusal(error))

    def _send_piece(self, peer: bytes, pull: Pull) -> None:
        """Send the bytes of one pull. Raises ProtocolError for more than MESSAGE_BYTES."""
        if pull.stop - pull.start > MESSAGE_BYTES:
            raise ProtocolError(f"a pull may have at most {MESSAGE_BYTES} bytes")
        extent = hold_object(self._arena, pull)
        try:
            piece = self._arena.view[extent.offset + pull.start : extent.offset + pull.stop]
            self._socket.send_multipart([peer, encode(Ready(extent.offset)), piece.data], zmq.NOBLOCK)
        finally:
            self._arena.unhold(pull.id)

    def _send(self, peer: bytes, message: FromOwner) -> None:
        self._socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)


class _ZmqConnection(OwnerConnection):
    """The reader's end of a connection.

    Answers arrive in the order of the requests. So it cannot be used again while an answer is unread.
    """

    def __init__(self, address: str, context: Context, options: TransferOptions) -> None:
        self._silence, self._interrupted = options.silence_s, False

        #: Number of requests whose answer is unread.
        self.waiting = 0
        self._socket = _open(context, zmq.DEALER, options, MESSAGE_BYTES + MAX_MESSAGE)  # encryption adds some bytes
        if options.secret:
            self._socket.set(zmq.CURVE_SERVERKEY, zmq.curve_public(options.secret.encode()))
        self._monitor = self._socket.get_monitor_socket(OWNER_LOST_EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._socket.connect(address)
        except BaseException:
            self.close()
            raise

    @override
    def call(self, message: ToOwner, kind: type[Reply], id: str = "") -> Reply:
        self.request(message)
        return self.answer(kind, id)[0]

    def request(self, message: ToOwner) -> None:
        """Send a message. `answer` returns its answer later."""
        self._socket.send(encode(message), zmq.NOBLOCK)
        self.waiting += 1

    def answer(self, kind: type[Reply], id: str) -> tuple[Reply, list[zmq.Frame]]:
        """Wait for the next answer. Returns it with the frames that follow it."""
        for _ in range(max(1, int(self._silence * 1000 / LOOK_UP_MS))):
            ready = dict(self._poller.poll(LOOK_UP_MS))
            if self._interrupted or (self._monitor in ready and self._socket not in ready):
                raise ConnectionResetError("the connection ended")
            if self._socket in ready:
                break
        else:
            raise TimeoutError("the owner does not answer")
        header, *frames = self._socket.recv_multipart(copy=False)
        self.waiting -= 1
        reply: FromOwner = decode(header.buffer, FromOwner)
        check_refusal(reply, id)
        if not isinstance(reply, kind):
            raise ProtocolError(f"the owner answered {type(reply).__name__}")
        return reply, frames

    @override
    def is_alive(self) -> bool:
        return not (self.waiting or self._monitor.poll(0))

    @override
    def interrupt(self) -> None:
        self._interrupted = True

    @override
    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


class _ZmqLink(PooledLink[_ZmqConnection]):
    """Requests up to IN_FLIGHT pieces ahead."""

    errors = (OSError, ProtocolError, zmq.ZMQError)

    @override
    def pull(self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        ends = [*range(start + MESSAGE_BYTES, stop, MESSAGE_BYTES), stop]
        requests = iter(zip([start, *ends], ends, strict=False))
        with self.connection() as connection:
            done = start
            for end in ends:
                # `requests` continues where the last round ended, so that IN_FLIGHT answers are always under way.
                for piece_start, piece_stop in requests:
                    connection.request(Pull(ref.id, ref.key, ref.generation, ref.nbytes, piece_start, piece_stop))
                    if connection.waiting == IN_FLIGHT:
                        break
                _, frames = connection.answer(Ready, ref.id)
                if [len(frame) for frame in frames] != [end - done]:
                    raise ProtocolError("the owner sent an unexpected number of bytes")
                into[done - start : end - start] = np.frombuffer(frames[0].buffer, np.uint8)
                done = end
                yield done - start


def _open(context: Context, kind: int, options: TransferOptions, max_message: int) -> zmq.Socket[bytes]:
    """Return a socket with bounded memory, which authenticates and encrypts if there is a secret."""
    zmq_socket = context.socket(kind)
    zmq_socket.set(zmq.MAXMSGSIZE, max_message)
    zmq_socket.set(zmq.LINGER, 0)
    zmq_socket.set(zmq.IPV6, ":" in options.host)
    if options.secret:
        zmq_socket.set(zmq.CURVE_SECRETKEY, options.secret.encode())
        zmq_socket.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(options.secret.encode()))
    return zmq_socket
