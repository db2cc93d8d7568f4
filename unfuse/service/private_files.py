"""Finds data of this user that other users of the machine can read."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import structlog

from unfuse.core.paths import expand_path

log = structlog.get_logger(__name__)

#: The bits of a mode that let other users read, write or enter.
OTHERS = 0o077


def warn_of_wide_permissions(data_dir: str, *urls: str) -> None:
    """Log one warning with the commands for paths that have wider permissions than new ones.

    `urls`: those of the queue and of stores. Paths of other users stay unnamed, because their owner decides.
    """
    folder = expand_path(data_dir)
    commands = _commands(folder, *(path for path in map(_local_path, urls) if path and not path.is_relative_to(folder)))
    if commands:
        log.warning("other users of this machine can read private files", do=" && ".join(commands))


def _local_path(url: str) -> Path | None:
    """Return the path of a queue or store on this machine's disks, or None."""
    scheme, _, location = url.partition(":")
    is_local = scheme in ("disk", "sqlite") and bool(location)
    return expand_path(location.partition("?")[0]) if is_local else None


def _commands(*paths: Path) -> list[str]:
    """Return the commands that make these paths private.

    A file in a private folder needs none.
    """
    return [
        f"chmod {'700' if path.is_dir() else '600'} {shlex.quote(str(path))}"
        for path in dict.fromkeys(paths)
        if _is_wide(path) and (path.is_dir() or _is_wide(path.parent, of_anyone=True))
    ]


def _is_wide(path: Path, *, of_anyone: bool = False) -> bool:
    """Return whether other users have permissions for a path of this user, or `of_anyone`."""
    try:
        status = path.stat()
    except OSError:  # there is none, or this user may not see it
        return False
    return bool(status.st_mode & OTHERS) and (of_anyone or status.st_uid == os.geteuid())
