"""What lies on this machine's disks for these settings, and what of it may go."""

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
from typing import Any

from unfuse.arena.protocol import is_refused
from unfuse.core.modalities import MEDIA
from unfuse.core.paths import expanded
from unfuse.service.groups import Settings
from unfuse.service.settings import ByteSize
from unfuse.stores import COPIES

REQUESTS = tuple(medium.prefix for medium in MEDIA)  # prefixes of result folders

RESULTS_GO = "what is over goes after --retention, the oldest before that over --results-limit"


def disk_use(settings: Settings) -> list[dict[str, Any]]:
    """One row for each kind of thing: where, bytes (None: not on this machine), files, and what may go."""
    from huggingface_hub.constants import HF_HUB_CACHE

    serve = settings.serve
    results, queue, durable, store = (
        url.replace("DATA_DIR", settings.data_dir) for url in (serve.results, serve.queue, serve.durable, serve.store)
    )
    spill = store.partition("+")[2] if store.startswith("spill:") else store if store.startswith("disk:") else ""
    rows = [_row("results", results, RESULTS_GO, REQUESTS)]
    rows += [_row("queue", queue, "nothing: requests that wait, and those that are kept")]
    if durable != "none":
        rows += [_row("copies of outputs", durable, "nothing: they go with their requests")]
    elif results.startswith("disk:"):
        saved = f"{results.partition('?')[0].rstrip('/')}/{COPIES}"
        rows += [_row("saved by the last stop", saved, "nothing: it goes with its requests")]
    if spill:
        rows += [_row("spilled tensors", spill, "nothing: they go with their requests; doctor --clean removes others")]
    own = Path(settings.data_dir)
    known = [Path(row["path"]) for row in rows if row["bytes"] is not None]
    rest = [path for path in _files(own) if not any(_within(path, place, own) for place in known)]
    what_else = "costs, verdicts and keys: only what can be measured or made again"
    rows += [{"what": "other data", "path": str(own), **_sums(rest), "may go": what_else}]
    may_go = "models that are not served: `hf cache delete`"
    hub = {"what": "models of the hub", "path": HF_HUB_CACHE, **_sums(_files(Path(HF_HUB_CACHE))), "may go": may_go}
    return [*rows, hub]


def _row(what: str, url: str, may_go: str, prefixes: tuple[str, ...] = ()) -> dict[str, Any]:
    kind, _, place = url.partition(":")
    if kind not in ("disk", "sqlite") or not place:
        return {"what": what, "path": url.rpartition("@")[2], "bytes": None, "files": None, "may go": may_go}
    path = expanded(place.partition("?")[0])
    if kind == "sqlite":
        return {"what": what, "path": str(path), **_sums(path.parent.glob(f"{path.name}*")), "may go": may_go}
    found = (file for file in _files(path) if not prefixes or _top(file, path).startswith(prefixes))
    return {"what": what, "path": str(path), **_sums(found), "may go": may_go}


def _within(file: Path, place: Path, own: Path) -> bool:
    """Whether a file of the data folder belongs to a place that has a row of its own."""
    if place == own:
        return _top(file, own).startswith(REQUESTS)
    return file.is_relative_to(place) or file.parent == place.parent and file.name.startswith(place.name)


def _top(file: Path, folder: Path) -> str:
    """The first part of a file's path below a folder that is followed by others."""
    parts = file.relative_to(folder).parts
    return parts[0] if len(parts) > 1 else ""


def _files(folder: Path) -> Iterator[Path]:
    for inside, _, names in os.walk(folder):
        yield from (Path(inside, name) for name in names)


def _sums(files: Iterator[Path] | list[Path]) -> dict[str, int]:
    """How many files, and their bytes; what several names have in common counts once."""
    seen: dict[tuple[int, int], int] = {}
    for file in files:
        try:
            stat = file.stat()
        except OSError:  # gone meanwhile, or a link to nothing
            continue
        seen[stat.st_dev, stat.st_ino] = stat.st_size
    return {"bytes": sum(seen.values()), "files": len(seen)}


PASSING = "unfuse-passing-"  # the beginning of the names of such folders, in the system's temporary folder
LOCK = ".lock"  # the file in such a folder that its process locks

PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}")
"""Names of files that are being written, in a folder of results or objects, and of those in which ranks meet."""

YOUNG_S, WRITTEN_S = 60.0, 3600.0  # seconds: younger folders may not be locked yet, and no file takes so long to write


Remain = dict[str, Any]  # something that a dead process left: what it is, its path, and its bytes


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
        yield {"what": what, "path": str(path), "bytes": ByteSize(taken)}
