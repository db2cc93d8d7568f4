"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder in place of `~` or `~user`.

    Where there is no such user, or no home folder, it is left as it is, and then names nothing.
    """
    return Path(os.path.expanduser(path))
