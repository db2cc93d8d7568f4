"""The result store: uploads, and encoded pictures and videos, by request."""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from typing_extensions import override

from unfuse.core.errors import ConfigError, NotFound, ResultsUnavailable, TransientError
from unfuse.core.messages import StorageLocations
from unfuse.core.modalities import MODALITIES
from unfuse.core.paths import create_private_folder, expand_path, open_private
from unfuse.core.request import ResultFile
from unfuse.stores import BLOB_STORES
from unfuse.stores.blobs import BlobStore, StoredBlob, open_blobs
from unfuse.stores.disk import DiskBlobs

#: Prefixes of blob names: of attachments, and of attachments with video fragments.
ATTACHED = "attached-"
FRAGMENT = "part-"
ATTACHMENT = re.compile(r"[a-z0-9_.-]{1,80}")
PREFIXES = tuple(modality.prefix for modality in MODALITIES)
REQUEST_ID = re.compile(rf"({'|'.join(PREFIXES)})[0-9a-f]{{32}}")

#: A disk with fewer free bytes than this, about a picture, counts as full.
MIN_FREE_BYTES = 1 << 20

#: The file in a result folder with the folder's id. By the id, machines recognize the same folder.
ID_FILE = "results.mark"

#: Seconds that a local copy of a result is kept. No reader takes longer.
COPY_S = 3600


class ResultStore(ABC):
    """Results by request and index. A result is stored whole or not at all.

    Putting a result again replaces it. Every method raises ResultsUnavailable when the store fails, and NotFound for
    a text that is not a request's id.
    """

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs

    def put(self, request: str, index: int, content_type: str, data: bytes) -> ResultFile:
        """Store `data` durably. Raises ResultsUnavailable, with nothing stored, if there is no room."""
        with _unavailable():
            self._blobs.write(_folder(request), str(index), data)
        return ResultFile(index, content_type, len(data), hashlib.sha256(data).hexdigest())

    @abstractmethod
    def path(self, request: str, index: int) -> Path:
        """Return a file with the result, for reading. Raises NotFound."""

    @abstractmethod
    def check(self) -> None:
        """Raise ResultsUnavailable if it is known that no result can be stored now."""

    def read(self, request: str, index: int) -> bytes:
        """Return the bytes of a result. Raises NotFound."""
        return self._read(request, str(index), f"result {index}")

    def attach(self, request: str, name: str, data: bytes, *, durable: bool = True) -> None:
        """Store an upload or a preview until the request is over. Raises ResultsUnavailable."""
        with _unavailable():
            self._blobs.write(_folder(request), _attachment_name(name), data, durable=durable)

    def attached(self, request: str, name: str) -> bytes:
        """Return the attachment of that name. Raises NotFound."""
        return self._read(request, _attachment_name(name), name)

    def detach(self, request: str, prefix: str = "") -> None:
        """Delete a request's attachments whose names start with `prefix`. Idempotent."""
        with _unavailable():
            for entry in self._blobs.entries(_folder(request)):
                if entry.name.startswith(ATTACHED + prefix):
                    self._blobs.remove(request, entry.name)

    def delete(self, request: str) -> None:
        """Delete a request's results and attachments. Idempotent."""
        with _unavailable():
            self._blobs.drop(_folder(request))

    def stored_requests(self) -> dict[str, tuple[float, int]]:
        """Return (Unix time of the last write, bytes) of each request here, oldest first."""
        stored: dict[str, tuple[float, int]] = {}
        with _unavailable():
            for entry in self._blobs.entries():
                if REQUEST_ID.fullmatch(entry.folder):
                    last, nbytes = stored.get(entry.folder, (0.0, 0))
                    stored[entry.folder] = max(entry.modified, last), nbytes + entry.nbytes
        return dict(sorted(stored.items(), key=lambda item: item[1]))

    def forget(self, before: float) -> list[str]:
        """Delete the results of requests whose last write is older than `before`.

        Returns the ids of these requests. `before` is a Unix time in seconds.
        """
        expired = [request for request, (modified, _) in self.stored_requests().items() if modified < before]
        for request in expired:
            self.delete(request)
        return expired

    def _read(self, request: str, name: str, description: str) -> bytes:
        folder = _folder(request)
        try:
            with _unavailable():
                return b"".join(self._blobs.read(folder, name)[1])
        except NotFound:
            raise _not_found(request, description) from None


class DiskResults(ResultStore):
    """Results as files, readable by their owner only: a folder per request."""

    _blobs: DiskBlobs

    @override
    def path(self, request: str, index: int) -> Path:
        path = self._blobs.path(_folder(request), str(index))
        if not path.is_file():
            raise _not_found(request, f"result {index}")
        return path

    @override
    def check(self) -> None:
        with _unavailable():
            self._blobs.require_room(MIN_FREE_BYTES)


class RemoteResults(ResultStore):
    """Results in S3 or Redis. `check` does nothing: only writing shows whether there is room.

    `path` copies a result to this machine for COPY_S seconds, so that it can be read in ranges.
    """

    @override
    def check(self) -> None:
        pass

    @override
    def path(self, request: str, index: int) -> Path:
        self._local.forget(time.time() - COPY_S)
        self._local.put(request, index, "", self.read(request, index))
        return self._local.path(request, index)

    @cached_property
    def _local(self) -> DiskResults:
        folder = tempfile.mkdtemp(prefix="unfuse-results-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return DiskResults(DiskBlobs(f"disk:{folder}?fsync=no"))


class _InaccessibleBlobs(BlobStore):
    """An inaccessible blob store of another machine: nothing can be read or stored."""

    @override
    def write(self, folder: str, name: str, data: object, *, durable: bool = True) -> None:
        raise TransientError("the results folder is on another machine")

    @override
    def read(self, folder: str, name: str) -> tuple[int, Iterator[bytes]]:
        raise TransientError("the results folder is on another machine")

    @override
    def remove(self, folder: str, name: str) -> None:
        pass

    @override
    def drop(self, folder: str) -> None:
        pass

    @override
    def entries(self, under: str = "") -> Iterator[StoredBlob]:
        return iter(())


def store_id(url: str) -> str:
    """Return the id by which `is_same_store` recognizes a result folder.

    It is "" for other stores. The id is written if it is missing. If it cannot be written, as on a full disk, it is "".
    Then the folder counts as the same on every machine.
    """
    if not (path := _id_file(url)):
        return ""
    try:
        create_private_folder(path.parent)
        with suppress(FileExistsError), open(path, "x", opener=open_private) as file:
            file.write(secrets.token_hex(16))
        return path.read_text()
    except OSError:
        with suppress(OSError):
            if not path.stat().st_size:  # the next server may have room for it
                path.unlink()
        return ""


def is_same_store(url: str, expected_id: str) -> bool:
    """Whether this machine reaches the scheduler's result store at `url`, by its expected id."""
    path = _id_file(url)
    try:
        return not (path and expected_id) or path.read_text() == expected_id
    except OSError:
        return False


def copies_here(locations: StorageLocations) -> str:
    """Return the URL of durable copies of this machine's objects, or "none".

    Without a URL of their own, copies are in the result store. There are none if this machine cannot reach it.
    """
    is_here = locations.durable != "none" or is_same_store(locations.results, locations.results_store_id)
    return locations.durable_url if is_here else "none"


def _id_file(url: str) -> Path | None:
    """Return the path of a `disk:` URL's id file. None for other URLs."""
    kind, _, path = url.partition("?")[0].partition(":")
    return expand_path(path).absolute() / ID_FILE if kind == "disk" and path else None


def fragment_name(attempt: int, step: int) -> str:
    """Return the name of the attachment with the video fragment of a step.

    Steps of an attempt count from 1.
    """
    return f"{fragment_prefix(attempt)}{step}"


def fragment_prefix(attempt: int) -> str:
    """Return the prefix of the names of an attempt's video fragments."""
    return f"{FRAGMENT}{attempt}-"


def open_results(url: str, expected_id: str = "") -> ResultStore:
    """Open the result store at a URL.

    If the folder has another id than the expected one, it is on another machine: nothing can be read or stored.

    `url` is `disk:PATH`, `s3://BUCKET/PREFIX`, or `redis://HOST:PORT/DATABASE`, which keeps results for a day. Raises
    ConfigError for any other URL, and for a folder that cannot be made.
    """
    if url.partition(":")[0] not in BLOB_STORES:
        raise ConfigError(
            f"--results {url!r} is not supported: use disk:PATH, s3://BUCKET/PREFIX or redis://HOST:PORT/DATABASE"
        )
    if not is_same_store(url, expected_id):
        return RemoteResults(_InaccessibleBlobs())
    blobs = open_blobs(url)
    return DiskResults(blobs) if isinstance(blobs, DiskBlobs) else RemoteResults(blobs)


@contextmanager
def _unavailable() -> Iterator[None]:
    """Turn TransientError into ResultsUnavailable.

    Clients see its message, so it does not say where the store is.
    """
    try:
        yield
    except TransientError as error:
        raise ResultsUnavailable("the result store is full or cannot be reached") from error


def _folder(request: str) -> str:
    """Return the folder of a request.

    Raises NotFound for a text that is no request's id.
    """
    if not REQUEST_ID.fullmatch(request):
        raise NotFound(f"{request[:100]!r} is not a request ID")
    return request


def _attachment_name(name: str) -> str:
    """Return the blob name of an attachment. Raises NotFound for an illegal name."""
    if not ATTACHMENT.fullmatch(name):
        raise NotFound(f"{name[:100]!r} is not a valid attachment name")
    return ATTACHED + name


def _not_found(request: str, description: str) -> NotFound:
    """Return the error for a missing result or attachment."""
    return NotFound(f"request {request} has no {description}, or it was deleted")
