"""The unix socket of an arena, and the messages between owner, readers and writers."""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
import struct
from pathlib import Path
from typing import Annotated

import msgspec

from unfuse.arena.extents import MemoryUsage
from unfuse.arena.objects import Extent
from unfuse.core import codec
from unfuse.core.errors import ConfigError, ProtocolError

#: Most bytes of a message.
MAX_MESSAGE = 128 * 1024

SCHEME = "unix:"

#: Names of sockets. They have 96 random bits, so that no two arenas have the same name, on any machine.
NAME = re.compile(r"arena-[0-9a-f]{24}")

#: Prefix of a socket's name until it listens.
DRAFT = "."

#: The kernel's `struct ucred`: process id, user id, group id.
_CREDENTIALS = struct.Struct("3i")


class ShownRef(msgspec.Struct, frozen=True):
    """The fields of an object's ref that a reader must show."""

    #: The object's id.
    id: str

    #: The object's secret, without which it cannot be read.
    key: bytes

    #: Number of the object among all that its arena created.
    generation: int

    #: Size of the object.
    nbytes: int


class HoldObject(ShownRef, frozen=True, tag=True):
    """Hold a sealed object until Unhold or the end of the connection.

    Answered by ObjectPlace or ObjectUnavailable.
    """


class GetWritten(ShownRef, frozen=True, tag=True):
    """Request an object's progress. Answered at once by Written or ObjectUnavailable."""


class Unhold(msgspec.Struct, frozen=True, tag=True):
    """End one hold. Not answered."""

    #: Id of the object that this connection holds.
    id: str


class GetOwner(msgspec.Struct, frozen=True, tag=True):
    """Request the owner of the arena. Answered by OwnerReply."""


class Write(msgspec.Struct, frozen=True, tag=True):
    """Prove the right to write, which the messages below need.

    Answered by Acknowledged with a writable descriptor.
    """

    #: The arena's write token, which only its owner's processes have.
    token: bytes


class Create(msgspec.Struct, frozen=True, tag=True):
    """Allocate an object. Answered by ObjectPlace or NoRoom.

    The object is aborted if this connection ends before Seal.
    """

    #: Size of the object.
    nbytes: Annotated[int, msgspec.Meta(ge=0)]

    #: Id of the request that the object belongs to, or another name that keeps it (see `ObjectTable.retain`).
    request: str


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Let an object be read while it is written. Answered by Acknowledged or ObjectUnavailable."""

    #: Id of an object that this connection is writing.
    id: str

    #: Checksums of the complete chunks.
    written: tuple[int, ...]


class Seal(msgspec.Struct, frozen=True, tag=True):
    """Make this connection's object readable. Answered by Acknowledged or ObjectUnavailable."""

    #: Id of an object that this connection is writing.
    id: str


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Drop an object that this connection is writing. Answered by Acknowledged."""

    #: Id of the object.
    id: str


class Delete(msgspec.Struct, frozen=True, tag=True):
    """Delete an object. Answered by Acknowledged."""

    #: Id of the object, which need not exist.
    id: str


class Release(msgspec.Struct, frozen=True, tag=True):
    """Delete every object of a request. Answered by Acknowledged."""

    #: Id of the request, or another name that keeps objects.
    request: str


class SpillObject(msgspec.Struct, frozen=True, tag=True):
    """Free the room of an object that was copied elsewhere.

    Answered by Acknowledged or ObjectUnavailable.
    """

    #: Id of the object. A held object keeps its room.
    id: str


class GetState(msgspec.Struct, frozen=True, tag=True):
    """Request the state of the arena. Answered by ArenaState."""


class ObjectPlace(msgspec.Struct, frozen=True, tag=True):
    """The place of the object.

    The answer to a connection's first HoldObject comes with the read-only descriptor.
    """

    #: Place of the object in the arena.
    extent: Extent

    #: How often the arena has given memory back. Each time, writers must populate their maps' pages anew.
    release_count: int = 0


class Written(msgspec.Struct, frozen=True, tag=True):
    """How far an object is written."""

    #: Checksums of the complete chunks. Empty for an object that was not announced.
    checksums: tuple[int, ...]

    #: Whether the object is whole.
    is_whole: bool


class OwnerReply(msgspec.Struct, frozen=True, tag=True):
    """The owner of the arena, as in the refs of its objects."""

    #: Id of the owner (`ObjectRef.owner`).
    id: str


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """The request was carried out."""


class ObjectUnavailable(msgspec.Struct, frozen=True, tag=True):
    """The object cannot be held, read, sealed or spilled."""

    #: The reason, as the text of the client's ObjectLost.
    message: str


class NoRoom(msgspec.Struct, frozen=True, tag=True):
    """There is no room. The fields are those of ArenaFull, in the same order."""

    #: Bytes that the object needs.
    needed: int

    #: Free bytes, not necessarily contiguous.
    free: int

    #: Bytes of the arena.
    capacity: int

    #: What is full, as the beginning of the error message.
    full: str

    #: What helps, as the end of the error message.
    remedy: str


class ArenaState(msgspec.Struct, frozen=True, tag=True):
    """The state of the arena."""

    #: How full it is.
    usage: MemoryUsage

    #: Ids of the requests with objects.
    requests: frozenset[str]

    #: Objects that could be spilled.
    idle: list[Extent]


ToOwner = (
    GetOwner
    | HoldObject
    | GetWritten
    | Unhold
    | Write
    | Create
    | Announce
    | Seal
    | Abort
    | Delete
    | Release
    | SpillObject
    | GetState
)
FromOwner = OwnerReply | ObjectPlace | Written | Acknowledged | ObjectUnavailable | NoRoom | ArenaState


def frame(message: ToOwner | FromOwner) -> bytes:
    """Return the message with its header."""
    return codec.frame(codec.encode(message))


def listen(folder: Path) -> tuple[socket.socket, Path]:
    """Return a listening, non-blocking socket in a folder, and its path. Raises ConfigError.

    The socket gets its final name only once it listens. So a socket with such a name that refuses connections has no
    owner any more.
    """
    while True:
        path = folder / f"arena-{secrets.token_hex(12)}"
        draft = path.with_name(DRAFT + path.name)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(os.fspath(draft))
        except OSError as error:
            listener.close()
            reason = error.strerror or error
            raise ConfigError(
                f"cannot create a socket in the run folder {folder} ({reason}): set UNFUSE_RUN_DIR to another folder"
            ) from error
        listener.listen()

        try:
            os.rename(draft, path)
        except FileNotFoundError:  # another process removed it as stale before it listened
            listener.close()
            continue
        return listener, path


def remove_stale(folder: Path) -> list[Path]:
    """Remove the sockets of arenas whose owners have ended, for example killed. Returns their paths."""
    sockets = [path for path in folder.iterdir() if NAME.fullmatch(path.name.removeprefix(DRAFT))]
    stale = [path for path in sockets if is_refused(path)]
    for path in stale:
        path.unlink(missing_ok=True)
    return stale


def socket_name(address: str, folder: Path | None = None) -> str:
    """Return the name of the socket at an arena's address. Raises ProtocolError.

    With a `folder`, the socket is looked for there, wherever the owner says that it is: containers may see one folder
    at different paths, and an owner that registers an address must not choose the socket that others connect to.
    """
    path = Path(address.removeprefix(SCHEME))
    if not address.startswith(SCHEME) or not NAME.fullmatch(path.name):
        raise ProtocolError(f"{address!r} is not the address of an arena: use {SCHEME}FOLDER/arena-…")
    return os.fspath(folder / path.name if folder else path)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end of a connection.

    The process id is 0 for a process that is not visible from here.
    """
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes from a blocking socket. Raises OSError.

    The socket's timeout applies to all of them together.
    """
    data = connection.recv(count, socket.MSG_WAITALL) if count else b""
    if len(data) < count:
        raise ConnectionResetError("the peer closed the connection")
    return data


def is_refused(path: Path) -> bool:
    """Whether there is a socket at which no process listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            if stat.S_ISSOCK(path.lstat().st_mode):
                probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # the socket was removed meanwhile, or its owner's backlog is full
            return False
    return False
