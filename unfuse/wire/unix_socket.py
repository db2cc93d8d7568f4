"""Unix sockets in a run folder: found by name, never taken from a process that listens, removed when it is dead."""

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

OURS = re.compile(r"(?:serve-(?P<port>\d+)|own-[0-9a-f]+)\.sock")
"""Names of servers' sockets: public ones with the port of the HTTP API, and private ones."""

BACKLOG = 1024


def server_socket(folder: str | Path, port: int) -> Path:
    """The path of the socket of the server with this HTTP port."""
    return expand_path(folder).absolute() / f"serve-{port}.sock"


def private_socket(folder: str | Path) -> Path:
    """A path for a socket that nobody can find by its name."""
    return expand_path(folder).absolute() / f"own-{secrets.token_hex(8)}.sock"


def servers(folder: str | Path) -> dict[int, Path]:
    """The sockets of the servers that run, by HTTP port. Raises ConfigError if other users can enter the folder."""
    ports = {path: named["port"] for path in open_run_folder(folder).iterdir() if (named := OURS.fullmatch(path.name))}
    found = {int(port): path for path, port in ports.items() if port and answers(path)}
    return dict(sorted(found.items()))


def answers(path: Path) -> bool:
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


def listening(path: Path) -> socket.socket:
    """Listen at a path, without blocking; the socket of a dead process there is replaced.

    Raises ConfigError if another process listens there, or if something that is not a socket is there.
    """
    with _alone(open_run_folder(path.parent)) as folder:
        for left in (path, *(one for one in folder.iterdir() if OURS.fullmatch(one.name))):
            _remove_dead(left)
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


def leave(path: Path) -> None:
    """Remove the path of our own socket; call it while the socket still listens, so that no other can have the path."""
    with suppress(OSError):
        path.unlink()


def _remove_dead(path: Path) -> None:
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode) and not answers(path):
            path.unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[Path]:
    """Lock the folder: no other process binds or removes sockets, as one that is bound and not listening looks dead."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(held)
