"""Resumable downloads of weights from a hub into the hub library's cache.

The library handles caches, tokens and listings, but discards a file whose download fails. Here the received bytes stay
in a partial file, named by the hash of the content. The next download, in any process, fetches only the missing rest.
A file is complete once its size and hash are those that the hub lists.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from unfuse.arena.limits import readable_bytes
from unfuse.core.errors import ConfigError
from unfuse.weights.fingerprints import HASHES
from unfuse.weights.folder import HubFile, ModelFolder, hub_errors

#: The number of parallel downloads.
PARALLEL_DOWNLOADS = 4

#: Seconds before each further try if no byte was received since the last one. After these, the download fails.
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)

CHUNK = 1 << 20

#: Seconds between two reports of progress.
PROGRESS_INTERVAL_S = 1.5

#: Seconds over which the download rate is averaged.
RATE_S = 10.0

#: Seconds between two checks of a file that another process downloads.
CHECK_INTERVAL_S = 0.5

#: The suffix of partial files, after the hash of the content.
PARTIAL_SUFFIX = ".unfuse-part"

#: The errors of a full disk.
FULL = (errno.ENOSPC, errno.EDQUOT)


class DownloadProgress(msgspec.Struct, frozen=True):
    """The progress of downloading a model's weights."""

    #: The model's hub name.
    model: str
    #: Bytes received.
    done: int
    #: Bytes of all files that were missing.
    total: int
    #: Recent bytes per second; 0 if nothing was received.
    rate: float = 0.0

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds until the end, or None without a rate."""
        return (self.total - self.done) / self.rate if self.rate else None

    def __str__(self) -> str:
        """Return a text such as "1.2 GiB of 22.2 GiB, 98.0 MiB/s, 3:40 left"."""
        text = f"{readable_bytes(self.done)} of {readable_bytes(self.total)}"
        if self.eta_s is None:
            return text
        minutes, seconds = divmod(round(self.eta_s), 60)
        return f"{text}, {readable_bytes(round(self.rate))}/s, {minutes}:{seconds:02} left"


#: A callback for progress.
ProgressCallback = Callable[[DownloadProgress], object]


class DownloadStopped(Exception):
    """The download was stopped, because another file failed or the caller was interrupted."""


def download_weights(
    model: ModelFolder, components: Collection[str], on_progress: ProgressCallback | None = None
) -> None:
    """Download the missing weights of these components.

    `on_progress`: called with the progress at the start and about every PROGRESS_INTERVAL_S seconds.
    Raises ConfigError with what was received, and what to do.
    """
    if model.hub and (lacking := model.missing_files(components)):
        _Download(model.hub, model.path, lacking, on_progress or bool).run()


class _Download:
    """The download of some files of one commit."""

    def __init__(
        self, hub: tuple[str, str], snapshot: Path, files: Mapping[str, HubFile], on_progress: ProgressCallback
    ) -> None:
        self._name, self._commit = hub
        self._blobs = snapshot.parent.parent / "blobs"
        self._files = files  # by path
        self._report = on_progress
        self._received: dict[str, int] = {}  # bytes by path
        self._recent: deque[tuple[float, int]] = deque()  # time and bytes received, over RATE_S seconds
        self._stopped = threading.Event()

    def run(self) -> None:
        """Download all files. Raises ConfigError."""
        self._blobs.mkdir(parents=True, exist_ok=True)
        for path, file in self._files.items():
            with suppress(FileNotFoundError):
                self._received[path] = self._partial_file(file).stat().st_size

        self._check_disk_space()
        self._report(self._progress())
        with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
            try:
                pending = {pool.submit(self._download_file, path, file) for path, file in self._files.items()}
                while pending:
                    done, pending = wait(pending, PROGRESS_INTERVAL_S)
                    for future in done:
                        future.result()
                    self._report(self._progress())
            except BaseException:
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _partial_file(self, file: HubFile) -> Path:
        """Return the path of a file until it is complete."""
        return self._blobs / f"{file.digest}{PARTIAL_SUFFIX}"

    def _progress(self) -> DownloadProgress:
        """Return the progress of all files, and record it for the rate."""
        now = time.monotonic()
        done = sum(self._received.values())
        self._recent.append((now, done))
        while now - self._recent[0][0] > RATE_S:
            self._recent.popleft()
        start, done_at_start = self._recent[0]
        rate = max(0, done - done_at_start) / (now - start) if now > start else 0.0
        return DownloadProgress(self._name, done, sum(file.size for file in self._files.values()), rate)

    def _check_disk_space(self) -> None:
        """Raise ConfigError if the disk is too small for the need bytes."""
        progress = self._progress()
        free = shutil.disk_usage(self._blobs).free
        if (need := progress.total - progress.done) > free:
            raise ConfigError(
                f"model {self._name}: the download needs {readable_bytes(need)}, but {self._blobs} has only "
                f"{readable_bytes(free)} free: free some space, or set HF_HOME to a folder on a larger disk"
            )

    def _download_file(self, path: str, file: HubFile) -> None:
        """Download one file, and store it in the hub library's cache."""
        from huggingface_hub import hf_hub_download

        blob = self._partial_file(file).with_name(file.digest)
        with self._config_errors(path):
            with self._lock_partial_file(path, file, blob) as stream:
                if stream is not None:
                    self._download_rest(path, file, stream)
                    if HASHES[file.algorithm](self._partial_file(file), file.size) != file.digest:
                        raise _WrongFile("its hash differs; it was deleted, and the next try downloads it again")
                    os.replace(self._partial_file(file), blob)
            self._received[path] = file.size
            hf_hub_download(self._name, path, revision=self._commit)

    @contextmanager
    def _lock_partial_file(self, path: str, file: HubFile, blob: Path) -> Iterator[BinaryIO | None]:
        """Open a partial file, locked for this process; yields None if the blob is complete.

        While another process has the lock, waits and reports its progress.
        """
        partial = self._partial_file(file)
        while not blob.exists():
            with partial.open("a+b") as stream:
                with suppress(BlockingIOError, FileNotFoundError):
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _is_same_file(stream, partial):
                        yield _unless_complete(stream, partial, blob)
                        return
                self._received[path] = os.fstat(stream.fileno()).st_size
            if self._stopped.wait(CHECK_INTERVAL_S):
                raise DownloadStopped
        yield None

    def _download_rest(self, path: str, file: HubFile, stream: BinaryIO) -> None:
        """Download the missing bytes of a file, with retries.

        A connection that breaks or is silent is retried. The pauses start again after each one that received bytes.
        """
        from httpx2 import TransportError

        pauses = iter(PAUSES_S)
        while (offset := stream.seek(0, os.SEEK_END)) < file.size:
            try:
                self._append_response(path, file, stream, offset)
            except (TransportError, _TemporaryError) as error:
                stream.flush()
                if stream.seek(0, os.SEEK_END) > offset:
                    pauses = iter(PAUSES_S)
                elif (pause := next(pauses, None)) is None:
                    raise ConnectionError(str(error) or type(error).__name__) from error
                elif self._stopped.wait(pause):
                    raise DownloadStopped from error
        if offset > file.size:
            raise _WrongFile(f"it has more than the {file.size} bytes that the hub lists")

    def _append_response(self, path: str, file: HubFile, stream: BinaryIO, at: int) -> None:
        """Append the bytes of one response, from offset `at` on."""
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import get_session, hf_raise_for_status

        url = hf_hub_url(self._name, path, revision=self._commit)
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={at}-"} if at else {})}
        try:
            location = get_hf_file_metadata(url).location
            if _host(location) == _host(url):  # the token must not be sent to other hosts
                headers |= {k: v for k, v in build_hf_headers().items() if k.lower() == "authorization"}
            timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
            with get_session().stream(
                "GET", location, headers=headers, timeout=timeout, follow_redirects=True
            ) as response:
                hf_raise_for_status(response)
                if at and response.status_code != 206:
                    stream.truncate(at := 0)  # the server sends the whole file
                for chunk in response.iter_raw():
                    if self._stopped.is_set():
                        raise DownloadStopped
                    stream.write(chunk)
                    at += len(chunk)
                    self._received[path] = at
                    if at > file.size:
                        raise _WrongFile(f"it has more than the {file.size} bytes that the hub lists")
        except HfHubHTTPError as error:
            if error.response.status_code in (408, 429) or error.response.status_code >= 500:
                raise _TemporaryError(f"the hub returned status {error.response.status_code}") from error
            raise
        stream.flush()
        if at < file.size:
            raise _WrongFile(f"it ends after {at} bytes, but the hub lists {file.size}")

    @contextmanager
    def _config_errors(self, path: str) -> Iterator[None]:
        """Convert errors in this block to ConfigError.

        A file that is not the one that the hub lists is removed.
        """
        try:
            yield
        except _WrongFile as error:
            self._partial_file(self._files[path]).unlink(missing_ok=True)
            raise ConfigError(f"model {self._name}: {path} is not the file that the hub lists: {error}") from error
        except hub_errors() as error:
            progress = self._progress()
            here = f"{readable_bytes(progress.done)} of {readable_bytes(progress.total)} are downloaded"
            if isinstance(error, OSError) and error.errno in FULL:
                reason = f"the disk of {self._blobs} is full: {here}; free some space, then resume with `unfuse pull`"
            else:
                reason = f"{path} cannot be downloaded ({' '.join(str(error).split())}): {here}; a retry resumes there"
            raise ConfigError(f"model {self._name}: {reason}") from error


class _WrongFile(Exception):
    """The received file is not the one that the hub lists."""


class _TemporaryError(Exception):
    """The hub answers with an error that a retry may resolve."""


def _host(url: str) -> str:
    """Return the host and port of a URL."""
    return url.partition("://")[2].partition("/")[0]


def _unless_complete(stream: BinaryIO, partial: Path, blob: Path) -> BinaryIO | None:
    """Return a locked partial file, or None if another process has completed the blob.

    It may have done so before this process opened the partial file, which is then a new one and is deleted.
    """
    if not blob.exists():
        return stream
    partial.unlink()
    return None


def _is_same_file(stream: BinaryIO, path: Path) -> bool:
    """Return whether an open file is still the one at this path.

    Another process may have completed and renamed it.
    """
    opened, current = os.fstat(stream.fileno()), path.stat()
    return (opened.st_dev, opened.st_ino) == (current.st_dev, current.st_ino)
