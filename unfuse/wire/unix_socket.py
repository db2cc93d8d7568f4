"""Unix sockets in a run folder: found by name, never taken from one who listens, not left lying by one who is dead."""

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
from unfuse.wire.run_folder import open_run_folder

OURS = re.compile(r"(?:serve-(?P<port>\d+)|own-[0-9a-f]+)\.sock")
"""Names of sockets of servers: with the port of their HTTP API, or of those that nobody is to find."""

BACKLOG = 1024


def server_socket(folder: str | Path, port: int) -> Path:
    """Where the server with that HTTP port listens."""
    return Path(folder).expanduser().absolute() / f"serve-{port}.sock"


def private_socket(folder: str | Path) -> Path:
    """A place that only who is told it knows."""
    return Path(folder).expanduser().absolute() / f"own-{secrets.token_hex(8)}.sock"


def servers(folder: str | Path) -> dict[int, Path]:
    """Sockets of the servers that run, by HTTP port. Raises ConfigError for a folder that is not this user's alone."""
    ports = {path: named["port"] for path in open_run_folder(folder).iterdir() if (named := OURS.fullmatch(path.name))}
    found = {int(port): path for path, port in ports.items() if port and answers(path)}
    return dict(sorted(found.items()))


def answers(path: Path) -> bool:
    """Whether a process listens there, were it stopped or too busy to accept."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:  # the line of those who want in is full
            return True
        except OSError:
            return False
    return True


def listening(path: Path) -> socket.socket:
    """A socket that listens at that path and blocks nobody, in place of what a dead process left there.

    Raises ConfigError where another process listens, or where something is that is no socket.
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
    """Take the name away of a socket of our own that still listens, so that it cannot be another's by now."""
    with suppress(OSError):
        path.unlink()


def _remove_dead(path: Path) -> None:
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode) and not answers(path):
            path.unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[Path]:
    """While it lasts no other process binds or removes a socket here: between its bind and its listen it looks dead."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(held)
