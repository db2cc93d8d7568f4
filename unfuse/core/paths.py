"""User paths with `~`, private files, and texts without the paths of this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path


def expand_path(path: str | Path) -> Path:
    """Return a path with the home folder in place of `~` or `~user`.

    Without that user, or without a home folder, the path is unchanged, and then names nothing.
    """
    return Path(os.path.expanduser(path))


def create_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents, which only this user can enter.

    Existing folders stay as they are.
    """
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)  # raises for a file in its place


def open_private(path: str, flags: int) -> int:
    """Open a file, for its owner only if it is new: an `opener`."""
    return os.open(path, flags, 0o600)


# Absolute paths in quotes may have spaces. Without quotes, a final dot belongs to the sentence.
_QUOTED = re.compile(r"""(["'])(?:~|[a-z_0-9]+:)?/[^"'\n]*/([^"'\n/]*)/?\1""")
_PLAIN = re.compile(r"(?:(?<![\w./…-])/(?!/)|(?<=file://)/)[^\s\"'`:;,()<>\[\]{}|]*[^\s\"'`:;,.()<>\[\]{}|]")


def without_paths(text: str) -> str:
    """Return the text with absolute paths shortened to their last part.

    file: URLs are shortened too. Other URLs stay.
    """
    text = _QUOTED.sub(lambda match: f"{match[1]}…/{match[2]}{match[1]}", text)
    return _PLAIN.sub(lambda match: f"…/{match[0].rstrip('/').rpartition('/')[2]}", text)
