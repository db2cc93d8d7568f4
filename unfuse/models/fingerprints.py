"""Fingerprints of files: a hash of all their bytes, remembered as long as a file is the same by size and times."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import structlog
import xxhash

from unfuse.arena.limits import readable_bytes
from unfuse.core.errors import ConfigError

FILE = "fingerprints.json"  # in the data folder

PIECE_BYTES = 16 << 20  # a fingerprint is the hash of the hashes of pieces of this size, so that threads share a file
READ_BYTES = 1 << 20  # what one thread reads at a time; it stays in the processor's cache until it is hashed
THREADS = 4

REMEMBERED_FROM = 1 << 20  # bytes; hashing a smaller file costs less than remembering it
MAX_ENTRIES = 4096  # fingerprints in the file, the latest
WHOLE_BYTES = 64 << 20
"""Files up to this size are in longer hashes with their content, as in earlier versions: pools keep their names."""

LOGGED_FROM = 1 << 30  # bytes; hashing a smaller file takes no time that a person notices

COARSE_S = 2.0
"""The coarsest times of a file system, in seconds. A file may change once more within them without showing it."""

TRIES = 3  # how often a file is hashed that changes meanwhile

Algorithm = Literal["xxh3_128", "sha256", "git"]
"""`sha256` and `git` give the hub's names of contents: of large files, and of others."""

ENTRY = re.compile(r"(xxh3_128|sha256|git)( \d+){5}")
DIGEST = re.compile(r"[0-9a-f]{32,64}")

log = structlog.get_logger(__name__)


class FileState(NamedTuple):
    """What shows that a file is still the one that was read: its place on the disk, its size and its times."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Return the present state of a file, of the one that a link points to. Raises OSError."""
        found = path.stat()
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def is_settled(self, now: float) -> bool:
        """Whether any later change will show in the times, even where these are coarse; `now` is in Unix seconds."""
        since_modified = now - self.mtime_ns / 1e9
        return now - self.ctime_ns / 1e9 >= COARSE_S and not 0 <= since_modified < COARSE_S


class Fingerprints:
    """The fingerprints of files, hashed when they are first asked for.

    They are remembered in memory, and from `remember_in` on also in a file that several processes share. That file
    saves time and nothing else: one that cannot be read or written, and entries that are damaged, are passed over.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def remember_in(self, folder: Path) -> None:
        """Share fingerprints with other processes, and with later ones, in that data folder."""
        self._file = folder / FILE

    def of(self, path: Path, algorithm: Algorithm = "xxh3_128") -> str:
        """Return a hash of all bytes of a file, as hexadecimal digits.

        Raises ConfigError if the file cannot be read, or if it changes again and again while it is hashed.
        """
        try:
            for _ in range(TRIES):
                state, now = FileState.of(path), time.time()
                entry = " ".join((algorithm, *map(str, state)))
                if known := self._find(entry, state):
                    return known
                if state.size >= LOGGED_FROM:
                    log.info("hashing weights", file=str(path), size=readable_bytes(state.size))
                digest = HASHES[algorithm](path, state.size)
                if FileState.of(path) == state:
                    if state.size >= REMEMBERED_FROM and state.is_settled(now):
                        self._add(entry, digest)
                    return digest
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}): download or save the model again") from error
        raise ConfigError(f"{path} changes while it is read: wait until it is written, then start again")

    def content(self, path: Path) -> bytes:
        """Return what stands for a file in a longer hash: all bytes of a small file, the fingerprint of another one.

        Raises ConfigError as `of` does.
        """
        try:
            if path.stat().st_size <= WHOLE_BYTES:
                return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}): download or save the model again") from error
        return self.of(path).encode()

    def _find(self, entry: str, state: FileState) -> str:
        """Return the remembered fingerprint of a file in that state; "" if there is none."""
        if state.size < REMEMBERED_FROM:
            return ""
        with self._lock:
            if entry not in self._known and self._file:
                self._known |= _read(self._file)
            return self._known.get(entry, "")

    def _add(self, entry: str, digest: str) -> None:
        with self._lock:
            self._known[entry] = digest
            if self._file is None:
                return
            try:
                _write(self._file, entry, digest)
            except OSError as error:
                log.warning("fingerprints cannot be remembered", file=str(self._file), reason=str(error))


FINGERPRINTS = Fingerprints()
"""Those of this process. One object for all models: a file may be part of several, and no result depends on it."""


def _read(file: Path) -> dict[str, str]:
    """Return the entries of a file that are whole; none if there is no such file, or it is damaged."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return {
        entry: digest
        for entry, digest in found.items()
        if isinstance(digest, str) and ENTRY.fullmatch(entry) and DIGEST.fullmatch(digest)
    }


def _write(file: Path, entry: str, digest: str) -> None:
    """Add an entry to those that other processes have added meanwhile. A reader finds the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = _read(file)
        entries.pop(entry, None)
        entries[entry] = digest
        fresh = file.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(dict([*entries.items()][-MAX_ENTRIES:])))
        fresh.replace(file)


def _hash_in_threads(path: Path, size: int) -> str:
    """Return xxh3-128 of the xxh3-128 hashes of a file's pieces."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        hash_piece = partial(_hash_piece, descriptor, size)
        starts = range(0, size, PIECE_BYTES)
        if len(starts) <= 1:
            pieces = [hash_piece(start) for start in starts]
        else:
            with ThreadPoolExecutor(THREADS) as threads:
                pieces = [*threads.map(hash_piece, starts)]
    finally:
        os.close(descriptor)
    return xxhash.xxh3_128_hexdigest(b"".join(pieces))


def _hash_piece(descriptor: int, size: int, start: int) -> bytes:
    """Return the hash of the piece that begins at `start`."""
    stop = min(start + PIECE_BYTES, size)
    if size > PIECE_BYTES:
        os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(READ_BYTES, stop - start)))
    while start < stop:
        count = os.preadv(descriptor, [buffer[: stop - start]], start)
        if not count:  # the file has become shorter, which its state will show
            break
        digest.update(buffer[:count])
        start += count
    return digest.digest()


def _sha256(path: Path, size: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _git(path: Path, size: int) -> str:
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    digest.update(path.read_bytes())
    return digest.hexdigest()


HASHES: Mapping[Algorithm, Callable[[Path, int], str]] = {
    "xxh3_128": _hash_in_threads,
    "sha256": _sha256,
    "git": _git,
}
