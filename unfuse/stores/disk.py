"""The disk blob store: one file for each blob."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from typing_extensions import override

from unfuse.core.errors import ConfigError, NotFound, TransientError
from unfuse.core.paths import create_private_folder, expand_path
from unfuse.stores.blobs import PART_BYTES, BlobStore, Data, StoredBlob

#: Values of `fsync` in the URL. None syncs durable blobs only.
FSYNC = {"yes": True, "no": False, "": None}


class DiskBlobs(BlobStore):
    """Blobs as files at `disk:PATH[?fsync=yes|no]`, readable by their owner only.

    A file appears whole or not at all. If it is synced, it also survives a power cut once `write` has returned. Without
    `fsync` in the URL, only durable blobs are synced.
    """

    def __init__(self, url: str) -> None:
        path, _, fsync = url.partition(":")[2].partition("?fsync=")
        if not path or fsync not in FSYNC:
            raise ConfigError(f"{url!r} does not name a folder: use disk:PATH")
        self._root, self._fsync = expand_path(path).absolute(), FSYNC[fsync]
        try:
            _make_folder(self._root)
        except OSError as error:
            raise ConfigError(f"cannot write to folder {path}: {error.strerror}; choose another folder") from error

    @override
    def write(self, folder: str, name: str, data: Data, *, durable: bool = True) -> None:
        fsync = durable if self._fsync is None else self._fsync
        try:
            try:
                self._write(folder, name, data, fsync)
            except FileNotFoundError:  # the folder was dropped meanwhile
                self._write(folder, name, data, fsync)
        except OSError as error:
            raise TransientError(
                f"file {name} of {folder} ({len(data)} bytes) cannot be written: {error.strerror}; "
                f"check the folder {self._root}"
            ) from error

    @override
    def read(self, folder: str, name: str) -> tuple[int, Iterator[bytes]]:
        path = self.path(folder, name)
        with _translated_errors(path):
            return path.stat().st_size, _read_parts(path)

    def path(self, folder: str, name: str) -> Path:
        """Return the path of a blob's file, whether or not it exists."""
        return self._root / folder / name

    @override
    def remove(self, folder: str, name: str) -> None:
        with suppress(OSError):
            self.path(folder, name).unlink()
            self.path(folder, name).parent.rmdir()

    @override
    def drop(self, folder: str) -> None:
        shutil.rmtree(self._root / folder, ignore_errors=True)

    @override
    def entries(self, under: str = "") -> Iterator[StoredBlob]:
        for folder, _, names in os.walk(self._root / under):
            for name in names:
                with suppress(FileNotFoundError):  # removed meanwhile
                    stat = os.stat(os.path.join(folder, name))
                    yield StoredBlob(os.path.relpath(folder, self._root), name, stat.st_size, stat.st_mtime)

    def require_room(self, nbytes: int) -> None:
        """Raise TransientError unless a file of that many bytes could be written now."""
        try:
            with TemporaryFile(dir=self._root) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            raise TransientError(f"{nbytes} bytes cannot be written to {self._root}: {error.strerror}") from error

    def _write(self, folder: str, name: str, data: Data, fsync: bool) -> None:
        """Write a temporary file and rename it."""
        target = self._root / folder
        _make_folder(target)
        if len(data) > shutil.disk_usage(target).free:  # otherwise, the disk would be full for others meanwhile
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        partial = target / f".{name}.{secrets.token_hex(8)}"
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(data)  # type: ignore[arg-type]  # an array is a buffer
                file.flush()
                if fsync:
                    os.fsync(file.fileno())
            partial.replace(target / name)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise
        if fsync:
            _sync_folder(target)


def _read_parts(path: Path) -> Iterator[bytes]:
    """Yield the parts of a file."""
    with _translated_errors(path), path.open("rb", buffering=0) as file:
        while part := file.read(PART_BYTES):
            yield part


@contextmanager
def _translated_errors(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file into NotFound and TransientError."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"file {path} does not exist") from None
    except OSError as error:
        raise TransientError(f"file {path} cannot be read: {error.strerror}") from error


def _make_folder(folder: Path) -> None:
    """Create a folder for its owner only, and sync its entry."""
    if folder.is_dir():
        return
    create_private_folder(folder)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that its entries survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
