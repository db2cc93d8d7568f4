"""A client of another process's arena, for reading objects and, with a token, for writing."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from unfuse.arena import protocol
from unfuse.arena.arena import WritableMap, map_bytes
from unfuse.arena.extents import MemoryUsage
from unfuse.arena.objects import Extent, FinalizerLock
from unfuse.arena.protocol import peer_of, receive_exactly, socket_name
from unfuse.core.codec import HEADER_BYTES, decode, read_length
from unfuse.core.errors import ArenaFull, ObjectLost, ProtocolError, TransientError

Reply = TypeVar("Reply", bound=protocol.FromOwner)

#: Seconds without an answer after which an owner counts as ended. An answer usually takes microseconds.
ANSWER_WITHIN_S = 30


class ArenaClient:
    """A connection to the arena at `address`. Thread-safe.

    With `token`, it may write. With `folder`, the socket must be in it; with `owner`, the arena must be that owner's.
    Every method that sends a request raises TransientError when the owner has ended. After that error, only `close` may
    be called.
    """

    #: The map for reading objects. It exists from the first hold on.
    view: NDArray[np.uint8]

    _writable_map: WritableMap
    _release_count = 0

    def __init__(self, address: str, token: bytes = b"", folder: Path | None = None, owner: str = "") -> None:
        name = socket_name(address, folder)
        self._address = address
        self._lock = FinalizerLock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Not `settimeout`: Python must treat the socket as blocking, for MSG_WAITALL.
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", ANSWER_WITHIN_S, 0))
        try:
            self._connect(name)
            if owner:
                self._check_owner(owner)
            if token:
                self._ask(protocol.Write(token), protocol.Acknowledged)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector that watches whether the owner is alive."""
        return self._socket.fileno()

    def hold(self, id: str, key: bytes, generation: int, nbytes: int) -> Extent:
        """Hold a sealed object in its place until `unhold` or `close`. Raises ObjectLost."""
        return self._ask_place(protocol.HoldObject(id, key, generation, nbytes), id)

    def watch(self, id: str, key: bytes, generation: int, nbytes: int) -> tuple[tuple[int, ...], bool]:
        """Return the checksums of an announced object's complete chunks, and whether it is whole.

        Raises ObjectLost.
        """
        reply = self._ask(protocol.GetWritten(id, key, generation, nbytes), protocol.Written, id)
        return reply.checksums, reply.is_whole

    def unhold(self, id: str) -> None:
        """End one hold.

        Never waits for an answer and never fails, so finalizers may call it.
        """
        self._lock.post(partial(self._send, protocol.Unhold(id)))

    def create(self, nbytes: int, request: str) -> Extent:
        """Allocate an object. Raises ArenaFull.

        The object is aborted if this connection ends before `seal`.
        """
        return self._ask_place(protocol.Create(nbytes, request))

    def writable(self, extent: Extent) -> NDArray[np.uint8]:
        """Return the bytes of an object that was created here."""
        return self._writable_map.object_bytes(extent, self._release_count)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """All of the arena's bytes, for a writer."""
        return self._writable_map.bytes

    def announce(self, id: str, written: tuple[int, ...] = ()) -> None:
        """Let an object be read while it is written, as `ObjectTable.announce`. Raises ObjectLost."""
        self._ask(protocol.Announce(id, written), protocol.Acknowledged, id)

    def seal(self, id: str) -> None:
        """Make an object readable. Raises ObjectLost if it was released meanwhile."""
        self._ask(protocol.Seal(id), protocol.Acknowledged, id)

    def abort(self, id: str) -> None:
        """Drop an object that is being written."""
        self._ask(protocol.Abort(id), protocol.Acknowledged)

    def delete(self, id: str) -> None:
        """Delete an object. Its room is free when its last hold ends."""
        self._ask(protocol.Delete(id), protocol.Acknowledged)

    def spill(self, id: str) -> None:
        """Free the room of an object that was copied elsewhere, unless it is held.

        Raises ObjectLost.
        """
        self._ask(protocol.SpillObject(id), protocol.Acknowledged, id)

    def release(self, request: str) -> None:
        """Delete every object of a request."""
        self._ask(protocol.Release(request), protocol.Acknowledged)

    def requests(self) -> frozenset[str]:
        """Return the ids of the requests with objects."""
        return self._ask(protocol.GetState(), protocol.ArenaState).requests

    def usage(self) -> MemoryUsage:
        """Return how full the arena is."""
        return self._ask(protocol.GetState(), protocol.ArenaState).usage

    def idle(self) -> list[Extent]:
        """Return sealed objects without a hold, least recently used first."""
        return self._ask(protocol.GetState(), protocol.ArenaState).idle

    def close(self) -> None:
        """End the connection, every hold, and every object that is being written.

        Mapped memory stays readable.
        """
        with self._lock:
            self._hang_up()
            self._socket.close()

    def _connect(self, name: str) -> None:
        """Connect to the socket. Raises TransientError, also if it belongs to another user."""
        try:
            self._socket.connect(name)
            if peer_of(self._socket)[1] != os.geteuid():
                raise PermissionError("its process belongs to another user")
        except OSError as error:
            raise self._unreachable(error) from error

    def _check_owner(self, owner: str) -> None:
        """Raise TransientError if the arena is not that of `owner`."""
        if self._ask(protocol.GetOwner(), protocol.OwnerReply).id != owner:
            raise TransientError(f"the arena at {self._address} does not belong to {owner}")

    def _ask_place(self, message: protocol.HoldObject | protocol.Create, id: str = "") -> Extent:
        """Send HoldObject or Create, and return the place of the object."""
        reply = self._ask(message, protocol.ObjectPlace, id)
        # Two threads may get here in another order than their answers were sent.
        self._release_count = max(self._release_count, reply.release_count)
        return reply.extent

    def _ask(self, message: protocol.ToOwner, kind: type[Reply], id: str = "") -> Reply:
        """Send a request and return its answer.

        Raises ObjectLost or ArenaFull if the owner answers so, TransientError if it has ended, and ProtocolError for
        another kind of answer.
        """
        with self._lock:
            try:
                self._socket.sendall(protocol.frame(message))
                reply, fd = self._receive()
                if fd is not None:
                    self._map(fd, isinstance(message, protocol.Write))
            except OSError as error:
                self._hang_up()
                raise self._unreachable(error) from error
            except BaseException:  # an answer that is read late would count for the next request
                self._hang_up()
                raise

        match reply:
            case protocol.ObjectUnavailable(text):
                raise ObjectLost(text, id)
            case protocol.NoRoom():
                raise ArenaFull(*msgspec.structs.astuple(reply))
        if not isinstance(reply, kind):
            raise ProtocolError(f"the arena answered {type(reply).__name__} to {type(message).__name__}")
        return reply

    def _send(self, message: protocol.ToOwner) -> None:
        """Send a message that is not answered."""
        try:
            self._socket.sendall(protocol.frame(message))
        except OSError:
            self._hang_up()

    def _receive(self) -> tuple[protocol.FromOwner, int | None]:
        """Receive an answer, with a descriptor if there is one."""
        flags = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
        header, fds, _, _ = socket.recv_fds(self._socket, HEADER_BYTES, 1, flags)
        fd = fds[0] if fds else None
        try:
            if len(header) < HEADER_BYTES:
                raise ConnectionResetError("the owner closed the connection")
            body = receive_exactly(self._socket, read_length(header, protocol.MAX_MESSAGE))
            return decode(body, protocol.FromOwner), fd
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise

    def _map(self, fd: int, writable: bool) -> None:
        """Map the arena by a received descriptor."""
        try:
            if writable:
                self._writable_map = WritableMap(fd)
            else:
                self.view = map_bytes(fd)
        finally:
            os.close(fd)

    def _hang_up(self) -> None:
        """Shut the connection down. Its descriptor stays open for the selector that watches it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _unreachable(self, error: OSError) -> TransientError:
        """Return the error for an owner that does not answer."""
        return TransientError(f"the owner of the arena at {self._address} does not answer: {error.strerror or error}")
