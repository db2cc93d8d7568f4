"""What processes that died may have left on this machine, and folders that go with the process that made them."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PASSING = "unfuse-passing-"
"""How the names of folders begin that go with their process, where the system keeps temporary ones."""

LOCK = ".lock"
"""The file in such a folder that its process holds locked."""


@contextmanager
def passing_folder() -> Iterator[Path]:
    """A folder of this user alone that goes with the block; if its process is killed, `doctor --clean` removes it."""
    folder = Path(tempfile.mkdtemp(prefix=PASSING))
    with (folder / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
