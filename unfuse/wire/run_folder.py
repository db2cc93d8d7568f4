"""The run folder, which has the unix sockets of one user's processes on one machine.

Other users cannot enter it.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from unfuse.core.errors import ConfigError
from unfuse.core.paths import expand_path

MAX_PATH = 100  # the most bytes of a socket's path; the kernel allows 107
ROOM_FOR_NAMES = 32  # how many of these bytes are for the separator and the name of a socket
MACHINE_ID_FILE = "machine"  # the name of the file with this machine's id


def open_run_folder(path: str | Path) -> Path:
    """Create the run folder if it is missing; return its absolute path.

    Raises ConfigError if the path is too long, or if other users could enter the folder.
    """
    folder = expand_path(path).absolute()
    if len(os.fsencode(folder)) > MAX_PATH - ROOM_FOR_NAMES:
        raise ConfigError(
            f"the run folder {folder} has a path too long for the sockets in it: set UNFUSE_RUN_DIR to one of at most "
            f"{MAX_PATH - ROOM_FOR_NAMES} bytes"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} cannot be used by uid {os.geteuid()} ({error.strerror}): set UNFUSE_RUN_DIR to a "
            "folder that this user may make"
        ) from error
    _check_private(folder, status)
    return folder


def _check_private(folder: Path, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"the run folder {folder} is not a folder: set UNFUSE_RUN_DIR to one")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"the run folder {folder} belongs to uid {status.st_uid}, this is uid {os.geteuid()}: run as that one, or "
            "set UNFUSE_RUN_DIR to a folder inside a place that this user may write to"
        )
    if status.st_mode & 0o077:
        raise ConfigError(
            f"the run folder {folder} is open to others (mode {stat.S_IMODE(status.st_mode):o}): chmod 700 it, or set "
            "UNFUSE_RUN_DIR to a folder inside it, which is then made as it should be"
        )


def machine_id(folder: Path) -> str:
    """A random id of this machine, equal for all processes that share the run folder.

    It lasts as long as the folder. An equal id only suggests that two processes are on one machine. The proof is that
    the socket of the other process can be opened.
    """
    path = folder / MACHINE_ID_FILE
    draft = folder / f"{MACHINE_ID_FILE}.{secrets.token_hex(4)}"
    if not path.exists():
        draft.write_text(secrets.token_hex(8))
        with suppress(FileExistsError):  # another process was faster: use its id
            os.link(draft, path)
        draft.unlink()
    return path.read_text()
