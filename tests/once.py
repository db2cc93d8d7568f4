"""What takes long to make and is only read: made by the first process of a test run that asks for it."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(name: str, folders: pytest.TempPathFactory, make: Callable[[Path], None]) -> Path:
    """A folder of that name, filled by `make` once a run, however many processes share the run."""
    mine = folders.getbasetemp()
    place = (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / name
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            unfinished = folders.mktemp(name)
            make(unfinished)
            unfinished.rename(place)
    return place
