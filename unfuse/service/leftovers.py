"""Removes what dead processes left on this machine; and temporary folders that end with their process."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from unfuse.arena.sockets import is_refused
from unfuse.core.paths import expanded
from unfuse.service.groups import Settings
from unfuse.service.size import Size

PASSING = "unfuse-passing-"  # the beginning of the names of such folders, in the system's temporary folder
LOCK = ".lock"  # the file in such a folder that its process locks

PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}")
"""Names of files that are being written, in a folder of results or objects, and of those in which ranks meet."""

YOUNG_S, WRITTEN_S = 60.0, 3600.0  # seconds: younger folders may not be locked yet, and no file takes so long to write


class Remain(msgspec.Struct, frozen=True):
    """Something that a dead process left: what it is, its path, and its bytes."""

    what: str
    path: str
    bytes: Size


@contextmanager
def passing_folder() -> Iterator[Path]:
    """A private temporary folder for the block; if the process is killed, `doctor --clean` removes it."""
    folder = Path(tempfile.mkdtemp(prefix=PASSING))
    with (folder / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def clean(settings: Settings) -> list[Remain]:
    """Remove what dead processes left, and return it. What a living process may need stays."""
    run_dir = Path(settings.run_dir)
    found = [*_sockets(run_dir), *_partial(run_dir), *_passing(), *_locks(Path(settings.data_dir))]
    for url in {settings.serve.results, settings.serve.store, settings.serve.durable}:
        found += _partial(folder) if (folder := _disk(url, settings)) else []
    if (spill := _disk(settings.serve.store, settings)) and not _workers():
        found += _take(spill / "objects", "what dead workers had moved out of their arenas")
    return found


def _disk(url: str, settings: Settings) -> Path | None:
    """The folder of a store, if it is on disk and exists."""
    place, path = url.rpartition("+")[2].partition("?")[0].split(":", 1) if ":" in url else ("", "")
    folder = expanded(path.replace("DATA_DIR", settings.data_dir))
    return folder if place == "disk" and folder.is_dir() else None


def _sockets(folder: Path) -> Iterator[Remain]:
    """Sockets without a listener. The folder is locked, as one that is bound and not listening yet looks the same."""
    if not folder.is_dir():
        return
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        for path in sorted(folder.rglob("*")):
            if is_refused(path):
                yield from _take(path, "a socket nobody listens at")
    finally:
        os.close(held)


def _passing() -> Iterator[Remain]:
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PASSING}*")):
        with suppress(OSError):
            found = folder.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_ours and time.time() - found.st_mtime > YOUNG_S and _is_free(folder / LOCK):
                yield from _take(folder, "results of a process that was killed")


def _locks(folder: Path) -> Iterator[Remain]:
    """Lock files whose own file is gone; others stay, because another process may be about to lock them."""
    for path in sorted(folder.glob("*.lock")):
        with suppress(OSError):
            if not path.with_suffix("").exists() and _is_free(path):
                yield from _take(path, "the lock of a file that is gone")


def _partial(folder: Path) -> Iterator[Remain]:
    for path in sorted(folder.rglob(".*")):
        with suppress(OSError):
            if PARTIAL.fullmatch(path.name) and time.time() - path.lstat().st_mtime > WRITTEN_S:
                yield from _take(path, "a file that was not written to its end")


def _is_free(path: Path) -> bool:
    """Whether no process holds this lock."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _workers() -> bool:
    """Whether a worker of this user runs on this machine."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"worker" in words and any(word.endswith(b"unfuse") for word in words):
                return True
    return False


def _take(path: Path, what: str) -> Iterator[Remain]:
    """Remove a file or a folder, if possible."""
    with suppress(OSError):
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        taken = sum(file.lstat().st_size for file in files)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield Remain(what, str(path), Size(taken))
