"""The unix socket of an arena, and the messages between its owner and its readers and writers."""

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

MAX_MESSAGE = 128 * 1024  # the most bytes of a message


class ShownRef(msgspec.Struct, frozen=True):
    """The fields of an object's ref that a reader must show."""

    id: str
    key: bytes
    generation: int
    nbytes: int


class HoldObject(ShownRef, frozen=True, tag=True):
    """Hold a sealed object until Unhold or the end of this connection. Answered by ObjectPlace, or Lost."""


class GetWritten(ShownRef, frozen=True, tag=True):
    """Ask how much of an object, whose writer may be at it, can be read. Answered at once, by Written, or Lost."""


class Unhold(msgspec.Struct, frozen=True, tag=True):
    """End one hold. Not answered."""

    id: str


class GetOwner(msgspec.Struct, frozen=True, tag=True):
    """Ask who owns the arena. Answered by OwnerReply."""


class Write(msgspec.Struct, frozen=True, tag=True):
    """Prove the right to write, which the messages below need. Answered by Acknowledged with a writable descriptor."""

    token: bytes


class Create(msgspec.Struct, frozen=True, tag=True):
    """Allocate an object; it is aborted if this connection ends before Seal. Answered by ObjectPlace, or NoRoom."""

    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    request: str


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Let an object be read while it is written. `written`: checksums of whole chunks. Answered by Acknowledged,
    or Lost.
    """

    id: str
    written: tuple[int, ...]


class Seal(msgspec.Struct, frozen=True, tag=True):
    """The object of this connection is written. Answered by Acknowledged, or Lost."""

    id: str


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Drop an object that this connection is writing. Answered by Acknowledged."""

    id: str


class Delete(msgspec.Struct, frozen=True, tag=True):
    """Delete an object. Answered by Acknowledged."""

    id: str


class Release(msgspec.Struct, frozen=True, tag=True):
    """Delete every object of a request. Answered by Acknowledged."""

    request: str


class SpillObject(msgspec.Struct, frozen=True, tag=True):
    """Free the room of an object that was copied elsewhere. Answered by Acknowledged, or Lost."""

    id: str


class GetState(msgspec.Struct, frozen=True, tag=True):
    """Ask for the state of the arena. Answered by ArenaState."""


class ObjectPlace(msgspec.Struct, frozen=True, tag=True):
    """The place of the object. The answer to a connection's first HoldObject carries the read-only descriptor.

    `given_back` is how often the arena has given memory back: a map of that is empty again.
    """

    extent: Extent
    given_back: int = 0


class Written(msgspec.Struct, frozen=True, tag=True):
    """The checksums of an announced object's complete chunks, and whether it is whole; of others () and True."""

    checksums: tuple[int, ...]
    whole: bool


class OwnerReply(msgspec.Struct, frozen=True, tag=True):
    """The owner of the arena, by the name that refs have."""

    id: str


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """The request was carried out."""


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The object cannot be held, read, sealed or spilled, for the reason in `message`."""

    message: str


class NoRoom(msgspec.Struct, frozen=True, tag=True):
    """There is no room: `needed`, `free` and `capacity` are bytes; the rest says of what, and what helps."""

    needed: int
    free: int
    capacity: int
    full: str
    remedy: str


class ArenaState(msgspec.Struct, frozen=True, tag=True):
    """How full the arena is, the requests that it holds objects for, and idle objects, which could be spilled."""

    usage: MemoryUsage
    requests: frozenset[str]
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
FromOwner = OwnerReply | ObjectPlace | Written | Acknowledged | Lost | NoRoom | ArenaState


def frame(message: ToOwner | FromOwner) -> bytes:
    """The message with its header."""
    return codec.frame(codec.encode(message))


SCHEME = "unix:"
NAME = re.compile(r"arena-[0-9a-f]{24}")  # 96 random bits, so that no two arenas have one name, on any machine
DRAFT = "."  # the beginning of a socket's name until it listens

_CREDENTIALS = struct.Struct("3i")


def listen(folder: Path) -> tuple[socket.socket, Path]:
    """A socket in a folder, which does not block, and its path. Raises ConfigError when there can be none.

    It is given its name once it listens. So a socket of such a name that refuses has lost its owner for good.
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
                f"no socket can be made in the run folder {folder} ({reason}): set UNFUSE_RUN_DIR"
            ) from error
        listener.listen()
        try:
            os.rename(draft, path)
        except FileNotFoundError:  # another process removed it as stale before it listened
            listener.close()
            continue
        return listener, path


def remove_stale(folder: Path) -> list[Path]:
    """Remove the sockets of arenas whose owners are gone, for example killed. Returns their paths."""
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name.removeprefix(DRAFT))]
    stale = [path for path in found if is_refused(path)]
    for path in stale:
        path.unlink(missing_ok=True)
    return stale


def socket_name(address: str, folder: Path | None = None) -> str:
    """The name of the socket to connect to. Raises ProtocolError for what is not an address of an arena.

    With a `folder` it is looked for there, wherever the owner says that it lies: containers may see one folder at
    different paths, and who registers an address does not choose what is connected to.
    """
    path = Path(address.removeprefix(SCHEME))
    if not address.startswith(SCHEME) or not NAME.fullmatch(path.name):
        raise ProtocolError(f"{address!r} is not an arena's address: those are {SCHEME}FOLDER/arena-…")
    return os.fspath(folder / path.name if folder else path)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process id (0: a process that is not visible from here) and the user id at the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes from a blocking socket; its timeout holds for all of them. Raises OSError."""
    data = connection.recv(count, socket.MSG_WAITALL) if count else b""
    if len(data) < count:
        raise ConnectionResetError("it closed the connection")
    return data


def is_refused(path: Path) -> bool:
    """Whether a socket is there that nobody listens at."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            if stat.S_ISSOCK(path.lstat().st_mode):
                probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # the socket is gone by now, or its owner is too busy
            return False
    return False
