"""The unix socket of an arena: it has a random name, in a folder that only its user may enter."""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
import struct
from pathlib import Path

from unfuse.core.errors import ConfigError, ProtocolError

SCHEME = "unix:"
ABSTRACT = "unix:@"  # the beginning of addresses in versions before run folders: abstract sockets, open to every user
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
    if address.startswith(ABSTRACT):
        return "\0" + address.removeprefix(ABSTRACT)
    path = Path(address.removeprefix(SCHEME))
    if not address.startswith(SCHEME) or not NAME.fullmatch(path.name):
        raise ProtocolError(f"{address!r} is not an arena's address: those are {SCHEME}FOLDER/arena-…")
    return os.fspath(folder / path.name if folder else path)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process id (0: a process that is not visible from here) and the user id at the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes of a blocking socket, within its own limit of silence for all of them. Raises OSError."""
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
