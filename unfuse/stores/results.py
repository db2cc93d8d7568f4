"""The result store: encoded pictures and videos, kept after their request is over."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from unfuse.core.errors import ConfigError, NotFound, TransientError
from unfuse.core.request import ResultFile

ATTACHED = "attached-"
ATTACHMENT = re.compile(r"[a-z0-9_.-]{1,80}")
REQUEST_ID = re.compile(r"(req|video)_[0-9a-f]{32}")


class ResultStore(ABC):
    """Results by request and index. A result is there as a whole or not at all; putting it again replaces it."""

    @abstractmethod
    def put(self, request: str, index: int, content_type: str, data: bytes) -> ResultFile:
        """Keep `data`; it is safe when this returns. Raises TransientError, nothing kept, when there is no room."""

    @abstractmethod
    def path(self, request: str, index: int) -> Path:
        """A file that holds the result. Raises NotFound."""

    @abstractmethod
    def read(self, request: str, index: int) -> bytes:
        """The bytes of a result. Raises NotFound."""

    @abstractmethod
    def attach(self, request: str, name: str, data: bytes, *, durable: bool = True) -> None:
        """Keep bytes beside a request's results until it is over: an upload, a preview, which need not be durable.

        Raises TransientError when there is no room.
        """

    @abstractmethod
    def attached(self, request: str, name: str) -> bytes:
        """What was attached under that name. Raises NotFound."""

    @abstractmethod
    def detach(self, request: str) -> None:
        """Forget what was attached to a request, but not its results. Idempotent."""

    @abstractmethod
    def delete(self, request: str) -> None:
        """Forget a request's results and attachments. Idempotent."""

    @abstractmethod
    def forget(self, before: float) -> list[str]:
        """Delete the results of requests that got their last one before Unix time `before`; returns their ids."""


class DiskResults(ResultStore):
    """Results as files: one folder per request, one file per index, readable by their owner only.

    A file appears whole or not at all, and survives a power cut once `put` has returned.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            _make_folder(folder)
        except OSError as error:
            reason = f"{error.strerror}; choose another --results"
            raise ConfigError(f"results cannot be kept in {folder}: {reason}") from error

    def put(self, request: str, index: int, content_type: str, data: bytes) -> ResultFile:
        """See ResultStore."""
        self._write(request, str(index), data)
        return ResultFile(index, content_type, len(data), hashlib.sha256(data).hexdigest())

    def path(self, request: str, index: int) -> Path:
        """See ResultStore."""
        path = self._of(request) / str(index)
        if not path.is_file():
            raise NotFound(f"request {request} has no result {index}, or it is kept no longer")
        return path

    def read(self, request: str, index: int) -> bytes:
        """See ResultStore."""
        path = self.path(request, index)
        with suppress(FileNotFoundError):
            return path.read_bytes()
        raise NotFound(f"result {index} of request {request} is kept no longer")

    def attach(self, request: str, name: str, data: bytes, *, durable: bool = True) -> None:
        """See ResultStore."""
        self._write(request, _attachment(name), data, durable)

    def attached(self, request: str, name: str) -> bytes:
        """See ResultStore."""
        with suppress(FileNotFoundError):
            return (self._of(request) / _attachment(name)).read_bytes()
        raise NotFound(f"request {request} has no {name}, or it is kept no longer")

    def detach(self, request: str) -> None:
        """See ResultStore."""
        for file in self._of(request).glob(f"{ATTACHED}*"):
            file.unlink(missing_ok=True)

    def delete(self, request: str) -> None:
        """See ResultStore."""
        shutil.rmtree(self._of(request), ignore_errors=True)

    def forget(self, before: float) -> list[str]:
        """See ResultStore."""
        old = [
            folder.name
            for folder in self._folder.iterdir()
            if REQUEST_ID.fullmatch(folder.name) and folder.stat().st_mtime < before
        ]
        for request in old:
            self.delete(request)
        return old

    def _write(self, request: str, name: str, data: bytes, durable: bool = True) -> None:
        folder = self._of(request)
        partial = folder / f".{name}.{secrets.token_hex(8)}"
        try:
            _make_folder(folder)
            _write_new(partial, data, durable)
            partial.replace(folder / name)
            if durable:
                _sync_folder(folder)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise TransientError(
                f"file {name} of {request} ({len(data)} bytes) cannot be written: {error.strerror}; "
                f"make room under {self._folder}"
            ) from error

    def _of(self, request: str) -> Path:
        if not REQUEST_ID.fullmatch(request):
            raise NotFound(f"{request[:100]!r} is not a request's id")
        return self._folder / request


def open_results(url: str) -> ResultStore:
    """The result store at `disk:PATH`. Raises ConfigError for any other url, and for a folder that cannot be made."""
    scheme, _, path = url.partition(":")
    if scheme != "disk" or not path:
        raise ConfigError(f"--results {url!r}: give disk:PATH")
    return DiskResults(Path(path).expanduser().absolute())


def _attachment(name: str) -> str:
    if not ATTACHMENT.fullmatch(name):
        raise NotFound(f"{name[:100]!r} is not the name of an attachment")
    return ATTACHED + name


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _sync_folder(folder.parent)


def _write_new(path: Path, data: bytes, durable: bool) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
