"""Unix sockets in a run folder: found by name, and removed when stale.

The socket of a process that listens is never replaced.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unfuse.core.errors import ConfigError
from unfuse.core.paths import expand_path
from unfuse.wire.run_folder import open_run_folder

SERVER_SOCKET_NAME = re.compile(r"(?:serve-(?P<port>\d+)|own-[0-9a-f]+)\.sock")
"""Names of servers' sockets: public ones with the port of the HTTP API, and private ones."""

BACKLOG = 1024


def server_socket(folder: str | Path, port: int) -> Path:
    """The path of the socket of the server with this HTTP port."""
    return expand_path(folder).absolute() / f"serve-{port}.sock"


def private_socket(folder: str | Path) -> Path:
    """A path for a socket, with a random name."""
    return expand_path(folder).absolute() / f"own-{secrets.token_hex(8)}.sock"


def running_servers(folder: str | Path) -> dict[int, Path]:
    """The sockets of the running servers, by HTTP port.

    Raises ConfigError if other users can enter the folder.
    """
    ports = {
        path: match["port"]
        for path in open_run_folder(folder).iterdir()
        if (match := SERVER_SOCKET_NAME.fullmatch(path.name))
    }
    sockets = {int(port): path for path, port in ports.items() if port and is_listening(path)}
    return dict(sorted(sockets.items()))


def is_listening(path: Path) -> bool:
    """Whether a process listens there, even if it is stopped or too busy to accept."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:  # the backlog is full
            return True
        except OSError:
            return False
    return True


def listen_unix(path: Path) -> socket.socket:
    """Listen at a path, without blocking; the socket of a dead process there is replaced.

    Raises ConfigError if another process listens there, or if something that is not a socket is there.
    """
    with _lock_folder(open_run_folder(path.parent)) as folder:
        for socket_path in (path, *(file for file in folder.iterdir() if SERVER_SOCKET_NAME.fullmatch(file.name))):
            _remove_stale(socket_path)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(os.fspath(path))
            path.chmod(0o600)
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            reason = "it is taken" if path.exists() else error.strerror
            raise ConfigError(
                f"cannot listen at unix:{path} ({reason}): end the server that has it, or name another by --listen"
            ) from error
        return listener


def remove_socket(path: Path) -> None:
    """Remove the path of our own socket.

    Call it while the socket still listens, so that no other process can bind the path first.
    """
    with suppress(OSError):
        path.unlink()


def _remove_stale(path: Path) -> None:
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode) and not is_listening(path):
            path.unlink(missing_ok=True)


@contextmanager
def _lock_folder(folder: Path) -> Iterator[Path]:
    """Hold a lock on the folder, so that no other process binds or removes sockets.

    Without it, a socket that is bound but does not listen yet would look stale.
    """
    lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(lock_fd)
