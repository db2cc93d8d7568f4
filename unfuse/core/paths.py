"""Paths as people write them, and text without the paths of this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder in place of `~` or `~user`.

    Where there is no such user, or no home folder, it is left as it is, and then names nothing.
    """
    return Path(os.path.expanduser(path))


_QUOTED = re.compile(r"""(["'])(?:~|[a-z_0-9]+:)?/[^"'\n]*/([^"'\n/]*)/?\1""")
_PLAIN = re.compile(r"(?:(?<![\w./…-])/(?!/)|(?<=file://)/)[^\s\"'`:;,()<>\[\]{}|]*[^\s\"'`:;,.()<>\[\]{}|]")


def without_paths(text: str) -> str:
    """The text with absolute paths, and file: URLs, shortened to their last part. Other URLs stay."""
    text = _QUOTED.sub(lambda found: f"{found[1]}…/{found[2]}{found[1]}", text)
    return _PLAIN.sub(lambda found: f"…/{found[0].rstrip('/').rpartition('/')[2]}", text)
