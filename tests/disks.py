"""A small disk of one's own, to be filled."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    """A file system of so many KiB under `folder`; skips the test where none may be mounted."""
    place = folder / "disk"
    place.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"no file system may be mounted here: {mount.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> None:
    """Leave no byte of it free: all that was is in the file `filler`."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            while True:
                try:
                    file.write(b"x" * size)
                except OSError:
                    break
