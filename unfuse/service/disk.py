"""List the files of an installation on this machine's disks, and remove leftovers."""

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
from unfuse.core.modalities import MODALITIES
from unfuse.core.paths import expand_path
from unfuse.service.groups import Settings
from unfuse.service.settings import ByteSize
from unfuse.stores import COPIES

#: Prefixes of the names of result folders.
REQUESTS = tuple(medium.prefix for medium in MODALITIES)

RESULTS_CLEANUP = "ended requests after --retention, the oldest ones earlier above --results-limit"


def disk_use(settings: Settings) -> list[dict[str, Any]]:
    """Return a table row for each kind of data: path, bytes, files, deletable data.

    `bytes` and `files` are None for data that is not on this machine.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    serve = settings.serve
    results, queue, durable, store = (
        url.replace("DATA_DIR", settings.data_dir) for url in (serve.results, serve.queue, serve.durable, serve.store)
    )
    spill_url = store.partition("+")[2] if store.startswith("spill:") else store if store.startswith("disk:") else ""

    rows = [_store_row("results", results, RESULTS_CLEANUP, REQUESTS)]
    rows += [_store_row("queue", queue, "nothing: it stores the requests that wait or are retained")]
    if durable != "none":
        rows += [_store_row("copies of outputs", durable, "nothing: they are deleted with their requests")]
    elif results.startswith("disk:"):
        saved_url = f"{results.partition('?')[0].rstrip('/')}/{COPIES}"
        rows += [_store_row("saved by the last stop", saved_url, "nothing: it is deleted with its requests")]
    if spill_url:
        rows += [
            _store_row(
                "spilled tensors",
                spill_url,
                "nothing: they are deleted with their requests; doctor --clean deletes others",
            )
        ]

    data_dir = Path(settings.data_dir)
    store_paths = [Path(row["path"]) for row in rows if row["bytes"] is not None]
    other_files = [
        file for file in _files(data_dir) if not any(_is_in_store(file, path, data_dir) for path in store_paths)
    ]
    others_may_go = "costs, batch invariance results and keys: they can be measured or created again"
    rows += [{"what": "other data", "path": str(data_dir), **_totals(other_files), "may go": others_may_go}]
    hub_may_go = "models that are not served: `hf cache delete`"
    hub_row = {
        "what": "models of the hub",
        "path": HF_HUB_CACHE,
        **_totals(_files(Path(HF_HUB_CACHE))),
        "may go": hub_may_go,
    }
    return [*rows, hub_row]


def _store_row(title: str, url: str, may_go: str, prefixes: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the table row of a store.

    `url`: the URL of the store.
    `prefixes`: count only files in folders whose names start with one of these; empty counts all.
    """
    scheme, _, location = url.partition(":")
    if scheme not in ("disk", "sqlite") or not location:
        return {"what": title, "path": url.rpartition("@")[2], "bytes": None, "files": None, "may go": may_go}
    path = expand_path(location.partition("?")[0])
    if scheme == "sqlite":
        # SQLite has more files beside the database, whose names begin with its name.
        return {"what": title, "path": str(path), **_totals(path.parent.glob(f"{path.name}*")), "may go": may_go}
    files = (file for file in _files(path) if not prefixes or _top_folder(file, path).startswith(prefixes))
    return {"what": title, "path": str(path), **_totals(files), "may go": may_go}


def _is_in_store(file: Path, store: Path, data_dir: Path) -> bool:
    """Whether a file of the data folder is counted in the row of this store."""
    if store == data_dir:
        return _top_folder(file, data_dir).startswith(REQUESTS)
    return file.is_relative_to(store) or file.parent == store.parent and file.name.startswith(store.name)


def _top_folder(file: Path, folder: Path) -> str:
    """Return the name of the folder directly below `folder` that has this file, or ""."""
    parts = file.relative_to(folder).parts
    return parts[0] if len(parts) > 1 else ""


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def _totals(files: Iterator[Path] | list[Path]) -> dict[str, int]:
    """Return the number of files, and their bytes. Hard links count once."""
    bytes_by_inode: dict[tuple[int, int], int] = {}
    for file in files:
        try:
            status = file.stat()
        except OSError:  # deleted meanwhile, or a broken link
            continue
        bytes_by_inode[status.st_dev, status.st_ino] = status.st_size
    return {"bytes": sum(bytes_by_inode.values()), "files": len(bytes_by_inode)}


#: The prefix of the names of `passing_folder`, in the system's temporary folder.
PASSING = "unfuse-passing-"

#: The file in a passing folder that its process locks as long as it lives.
LOCK = ".lock"

#: Names of files that are being written, in a folder of results or objects, and of rendezvous files of ranks.
PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}")

YOUNG_S = 60.0  # seconds; a younger folder may not be locked yet, and is not removed
WRITTEN_S = 3600.0  # seconds without a write after which a partial file is removed


#: A removed leftover of a dead process: what it was, its path, and its bytes.
Remain = dict[str, Any]


@contextmanager
def passing_folder() -> Iterator[Path]:
    """Yield a private temporary folder, which is deleted after the block.

    If the process is killed, `unfuse doctor --clean` removes the folder.
    """
    folder = Path(tempfile.mkdtemp(prefix=PASSING))
    with (folder / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def clean(settings: Settings) -> list[Remain]:
    """Remove the leftovers of dead processes, and return them.

    Files that a running process may need are not removed.
    """
    run_dir = Path(settings.run_dir)
    removed = [
        *_remove_sockets(run_dir),
        *_remove_partial_files(run_dir),
        *_remove_passing_folders(),
        *_remove_locks(Path(settings.data_dir)),
    ]
    for url in {settings.serve.results, settings.serve.store, settings.serve.durable}:
        removed += _remove_partial_files(folder) if (folder := _disk_folder(url, settings)) else []
    # Spilled objects have no lock, and any worker of this machine may have written them.
    if (spill_folder := _disk_folder(settings.serve.store, settings)) and not _is_worker_running():
        removed += _remove(spill_folder / "objects", "spilled objects of dead workers")
    return removed


def _disk_folder(url: str, settings: Settings) -> Path | None:
    """Return the folder of a store, or None if it is not on this machine."""
    kind, _, path = (url.partition("+")[2] if url.startswith("spill:") else url).partition("?")[0].partition(":")
    folder = expand_path(path.replace("DATA_DIR", settings.data_dir))
    return folder if kind == "disk" and folder.is_dir() else None


def _remove_sockets(folder: Path) -> Iterator[Remain]:
    """Remove sockets without a listener, and yield them.

    The folder is locked meanwhile, because a socket that is bound but not listening yet looks the same. Servers hold
    this lock from bind to listen.
    """
    if not folder.is_dir():
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for path in sorted(folder.rglob("*")):
            if is_refused(path):
                yield from _remove(path, "a socket without a listener")
    finally:
        os.close(descriptor)


def _remove_passing_folders() -> Iterator[Remain]:
    """Remove passing folders of this user's killed processes, and yield them."""
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PASSING}*")):
        with suppress(OSError):
            status = folder.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and time.time() - status.st_mtime > YOUNG_S and _is_unlocked(folder / LOCK):
                yield from _remove(folder, "results of a process that was killed")


def _remove_locks(folder: Path) -> Iterator[Remain]:
    """Remove lock files whose file was deleted, and yield them.

    Other lock files stay, because a process may be about to lock them.
    """
    for path in sorted(folder.glob("*.lock")):
        with suppress(OSError):
            if not path.with_suffix("").exists() and _is_unlocked(path):
                yield from _remove(path, "a lock file whose file was deleted")


def _remove_partial_files(folder: Path) -> Iterator[Remain]:
    """Remove files that were not written completely, and yield them."""
    for path in sorted(folder.rglob(".*")):
        with suppress(OSError):
            if PARTIAL.fullmatch(path.name) and time.time() - path.lstat().st_mtime > WRITTEN_S:
                yield from _remove(path, "a partially written file")


def _is_unlocked(path: Path) -> bool:
    """Whether no process has locked this file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _is_worker_running() -> bool:
    """Whether an `unfuse worker` process runs on this machine."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"worker" in words and any(word.endswith(b"unfuse") for word in words):
                return True
    return False


def _remove(path: Path, description: str) -> Iterator[Remain]:
    """Remove a file or a folder, and yield it. If that fails, yield nothing."""
    with suppress(OSError):
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        size = sum(file.lstat().st_size for file in files)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield {"what": description, "path": str(path), "bytes": ByteSize(size)}
