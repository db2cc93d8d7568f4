"""Fingerprints of files: hashes of all their bytes, cached by file state.

A cached fingerprint is valid until the file's size or times change.
"""

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
from typing import Any, Literal, NamedTuple

import msgspec
import structlog
import xxhash

from unfuse.arena.limits import readable_bytes
from unfuse.core.errors import ConfigError
from unfuse.core.paths import create_private_folder, open_private

FILE = "fingerprints.json"  # in the data folder

PIECE_BYTES = 16 << 20  # files are hashed in pieces of this size, so that several threads can hash one file
READ_BYTES = 1 << 20  # bytes that a thread reads at a time, few enough to stay in the CPU cache until hashed
THREADS = 4

REMEMBERED_FROM = 1 << 20  # bytes; hashing a smaller file costs less than remembering it
MAX_ENTRIES = 4096  # the latest entries that a file keeps
WHOLE_BYTES = 64 << 20
"""Files up to this size enter a component's hash with their content."""

LOGGED_FROM = 1 << 30  # bytes; hashing a smaller file is too quick to be worth a log line

COARSE_S = 2.0
"""The coarsest file-system timestamps, in seconds. A second change within this time may leave the times equal."""

TRIES = 3  # attempts to hash a file that changes in the meantime

Algorithm = Literal["xxh3_128", "sha256", "git"]
"""The hub names large files by their `sha256`, and small files by their `git` blob hash."""

ENTRY = re.compile(r"(xxh3_128|sha256|git)( \d+){5}")
DIGEST = re.compile(r"[0-9a-f]{32,64}")

log = structlog.get_logger(__name__)


class FileState(NamedTuple):
    """The identity of a file's content: device, inode, size and times from stat."""

    #: The number of the file system's device.
    device: int
    #: The number of the file on this device.
    inode: int
    #: Bytes of the file.
    size: int
    #: When the content was changed last, in nanoseconds since 1970.
    mtime_ns: int
    #: When content or attributes were changed last, in nanoseconds since 1970. No program can set it.
    ctime_ns: int

    @classmethod
    def read(cls, path: Path) -> FileState:
        """Return the present state of a file. Follows symbolic links. Raises OSError."""
        status = path.stat()
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def is_settled(self, now: float) -> bool:
        """Return whether a later change of the file is sure to change its times.

        This holds for coarse times, too. `now` is in Unix seconds.
        """
        since_modified = now - self.mtime_ns / 1e9
        return now - self.ctime_ns / 1e9 >= COARSE_S and not 0 <= since_modified < COARSE_S


class Fingerprints:
    """Computes fingerprints of files when they are first needed, and caches them.

    The cache is in memory and, after `cache_in`, in a file that several processes share. The file only saves time:
    if it cannot be read or written, or an entry is damaged, files are hashed again.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def cache_in(self, folder: Path) -> None:
        """Share the cache with other and later processes, by a file in that data folder."""
        self._file = folder / FILE

    @property
    def folder(self) -> Path | None:
        """The data folder in which the cache is shared; None without one."""
        return self._file.parent if self._file else None

    def hash_file(self, path: Path, algorithm: Algorithm = "xxh3_128") -> str:
        """Return a hash of all bytes of a file, as hexadecimal digits.

        Raises ConfigError if the file cannot be read, or keeps changing while it is hashed.
        """
        try:
            for _ in range(TRIES):
                state, now = FileState.read(path), time.time()
                entry = " ".join((algorithm, *map(str, state)))
                if known := self._find(entry, state):
                    return known
                if state.size >= LOGGED_FROM:
                    log.info("hashing weights", file=str(path), size=readable_bytes(state.size))
                digest = HASHES[algorithm](path, state.size)
                if FileState.read(path) == state:
                    if state.size >= REMEMBERED_FROM and state.is_settled(now):
                        self._add(entry, digest)
                    return digest
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}): download or save the model again") from error
        raise ConfigError(f"{path} changes while it is read: wait until it is written completely, then start again")

    def content(self, path: Path) -> bytes:
        """Return what a file contributes to the input of a component's hash.

        It is all bytes of a small file, or the fingerprint of a large one. Raises ConfigError as `hash_file` does.
        """
        try:
            if path.stat().st_size <= WHOLE_BYTES:
                return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}): download or save the model again") from error
        return self.hash_file(path).encode()

    def _find(self, entry: str, state: FileState) -> str:
        """Return the cached fingerprint of a file in that state; "" if there is none."""
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
                add_entry(self._file, partial(_read, self._file), entry, digest)
            except OSError as error:
                log.warning("fingerprints cannot be saved", file=str(self._file), reason=str(error))


FINGERPRINTS = Fingerprints()
"""The cache of this process, shared by all models. No result depends on what it contains."""


def _read(file: Path) -> dict[str, str]:
    """Return the valid entries of the cache file; empty if it is missing or damaged."""
    try:
        entries = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return {
        entry: digest
        for entry, digest in entries.items()
        if isinstance(digest, str) and ENTRY.fullmatch(entry) and DIGEST.fullmatch(digest)
    }


def add_entry(file: Path, read: Callable[[], dict[str, Any]], entry: str, value: object) -> None:
    """Add an entry to a JSON file, which keeps the latest MAX_ENTRIES.

    Other processes may write the file too: it is locked, `read` again, and replaced atomically.
    """
    create_private_folder(file.parent)
    with open(file.with_suffix(".lock"), "w", opener=open_private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = read()
        entries.pop(entry, None)
        entries[entry] = value
        fresh = file.with_suffix(".new")
        with open(fresh, "wb", opener=open_private) as stream:
            stream.write(msgspec.json.encode(dict([*entries.items()][-MAX_ENTRIES:])))
        fresh.replace(file)


def _hash_in_threads(path: Path, size: int) -> str:
    """Return the xxh3-128 hash over the xxh3-128 hashes of a file's pieces."""
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
        if not count:  # the file was truncated, and the caller will see that its state changed
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
