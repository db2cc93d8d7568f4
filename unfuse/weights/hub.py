"""Brings the weights of a model from a hub into the hub library's cache, and goes on where somebody stopped.

The library does the rest: it knows caches, tokens and listings. But of a file that it could not bring to its end it
keeps nothing. Here what came stays beside the file's place, under the name of its content; whoever asks next, in
whatever process, gets what is missing. A file counts once it has the size and the hash that the hub lists.
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

AT_ONCE = 4  # files that come side by side
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # before the next try, when no byte came since the last; then it gives up

CHUNK = 1 << 20
TELL_S, RATE_S = 1.5, 10.0  # how often somebody is told, and over how long a rate is taken
LOOK_S = 0.5  # how often who waits for another process looks how far that is
PART = ".unfuse-part"  # what is behind the name of a file's content while it is not whole

FULL = (errno.ENOSPC, errno.EDQUOT)


class DownloadProgress(msgspec.Struct, frozen=True):
    """How far weights have come: bytes that are here, of all that were missing, and bytes a second of late."""

    model: str
    done: int
    total: int
    rate: float = 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds until all are here, at that rate; None while nothing comes."""
        return (self.total - self.done) / self.rate if self.rate else None

    def __str__(self) -> str:
        """In words: 1.2 GiB of 22.2 GiB, 98.0 MiB/s, 3:40 left."""
        text = f"{readable_bytes(self.done)} of {readable_bytes(self.total)}"
        if self.eta_s is None:
            return text
        minutes, seconds = divmod(round(self.eta_s), 60)
        return f"{text}, {readable_bytes(round(self.rate))}/s, {minutes}:{seconds:02} left"


Tell = Callable[[DownloadProgress], object]


class DownloadStopped(Exception):
    """Another file could not be brought, or nobody waits any more."""


def bring(model: ModelFolder, components: Collection[str], tell: Tell | None = None) -> None:
    """Bring what is not here of these components' weights. Raises ConfigError: what is here, and what to do."""
    if model.hub and (lacking := model.lacking(components)):
        _Download(model.hub, model.path, lacking, tell or bool).run()


class _Download:
    """Some files of one commit."""

    def __init__(self, hub: tuple[str, str], snapshot: Path, files: Mapping[str, HubFile], tell: Tell) -> None:
        self._name, self._commit = hub
        self._blobs = snapshot.parent.parent / "blobs"
        self._files, self._tell = files, tell
        self._here: dict[str, int] = {}
        self._recent: deque[tuple[float, int]] = deque()
        self._stopped = threading.Event()

    def run(self) -> None:
        self._blobs.mkdir(parents=True, exist_ok=True)
        for path, file in self._files.items():
            with suppress(FileNotFoundError):
                self._here[path] = self._part(file).stat().st_size
        self._need_room()
        self._tell(self._state())
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                left = {pool.submit(self._bring, path, file) for path, file in self._files.items()}
                while left:
                    done, left = wait(left, TELL_S)
                    for future in done:
                        future.result()
                    self._tell(self._state())
            except BaseException:
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _part(self, file: HubFile) -> Path:
        return self._blobs / f"{file.digest}{PART}"

    def _state(self) -> DownloadProgress:
        now, done = time.monotonic(), sum(self._here.values())
        self._recent.append((now, done))
        while now - self._recent[0][0] > RATE_S:
            self._recent.popleft()
        since, before = self._recent[0]
        rate = max(0, done - before) / (now - since) if now > since else 0.0
        return DownloadProgress(self._name, done, sum(file.size for file in self._files.values()), rate)

    def _need_room(self) -> None:
        state, free = self._state(), shutil.disk_usage(self._blobs).free
        if (need := state.total - state.done) > free:
            raise ConfigError(
                f"model {self._name}: {readable_bytes(need)} are still to come, and in {self._blobs} there is room for "
                f"{readable_bytes(free)}: make room there, or set HF_HOME to a folder on a larger disk"
            )

    def _bring(self, path: str, file: HubFile) -> None:
        """Bring one file, and put it where the hub library looks for it."""
        from huggingface_hub import hf_hub_download

        whole = self._part(file).with_name(file.digest)
        with self._explained(path):
            with self._locked(path, file, whole) as stream:
                if stream is not None:
                    self._complete(path, file, stream)
                    if HASHES[file.algorithm](self._part(file), file.size) != file.digest:
                        raise _Lie("its hash is another; it was removed, and a next try brings it anew")
                    os.replace(self._part(file), whole)
            self._here[path] = file.size
            hf_hub_download(self._name, path, revision=self._commit)

    @contextmanager
    def _locked(self, path: str, file: HubFile, whole: Path) -> Iterator[BinaryIO | None]:
        """What came of a file so far, for this process alone; None once it is whole. Whoever waits sees it grow."""
        part = self._part(file)
        while not whole.exists():
            with part.open("a+b") as stream:
                with suppress(BlockingIOError, FileNotFoundError):
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _is_at(stream, part):
                        yield stream
                        return
                self._here[path] = os.fstat(stream.fileno()).st_size
            if self._stopped.wait(LOOK_S):
                raise DownloadStopped
        yield None

    def _complete(self, path: str, file: HubFile, stream: BinaryIO) -> None:
        """Ask for what is missing, again and again: a connection that ends, or is silent, is no reason to give up."""
        from httpx2 import TransportError

        pauses = iter(PAUSES_S)
        while (before := stream.seek(0, os.SEEK_END)) < file.size:
            try:
                self._append(path, file, stream, before)
            except (TransportError, _Busy) as error:
                stream.flush()
                if stream.seek(0, os.SEEK_END) > before:
                    pauses = iter(PAUSES_S)
                elif (pause := next(pauses, None)) is None:
                    raise ConnectionError(str(error) or type(error).__name__) from error
                elif self._stopped.wait(pause):
                    raise DownloadStopped from error
        if before > file.size:
            raise _Lie(f"it has more than the {file.size} bytes that the hub lists")

    def _append(self, path: str, file: HubFile, stream: BinaryIO, at: int) -> None:
        """Append what comes of one connection."""
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import get_session, hf_raise_for_status

        url = hf_hub_url(self._name, path, revision=self._commit)
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={at}-"} if at else {})}
        try:
            place = get_hf_file_metadata(url).location
            if _host(place) == _host(url):  # a token is for the hub alone
                headers |= {k: v for k, v in build_hf_headers().items() if k.lower() == "authorization"}
            timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
            with get_session().stream("GET", place, headers=headers, timeout=timeout, follow_redirects=True) as answer:
                hf_raise_for_status(answer)
                if at and answer.status_code != 206:
                    stream.truncate(at := 0)
                for chunk in answer.iter_raw():
                    if self._stopped.is_set():
                        raise DownloadStopped
                    stream.write(chunk)
                    at += len(chunk)
                    self._here[path] = at
                    if at > file.size:
                        raise _Lie(f"more comes than the {file.size} bytes that the hub lists")
        except HfHubHTTPError as error:
            if error.response.status_code in (408, 429) or error.response.status_code >= 500:
                raise _Busy(f"it answers {error.response.status_code}") from error
            raise
        stream.flush()
        if at < file.size:
            raise _Lie(f"it ends after {at} bytes, and the hub lists {file.size}")

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        """Raises ConfigError for what goes wrong inside. A file that is not what was listed is removed."""
        try:
            yield
        except _Lie as error:
            self._part(self._files[path]).unlink(missing_ok=True)
            raise ConfigError(f"model {self._name}: {path} is not the file that the hub lists: {error}") from error
        except hub_errors() as error:
            state = self._state()
            here = f"{readable_bytes(state.done)} of {readable_bytes(state.total)} are here"
            if isinstance(error, OSError) and error.errno in FULL:
                reason = f"the disk of {self._blobs} is full: {here}; make room, and `unfuse pull` goes on from there"
            else:
                reason = f"{path} cannot be brought ({' '.join(str(error).split())}): {here}; later goes on from there"
            raise ConfigError(f"model {self._name}: {reason}") from error


class _Lie(Exception):
    """What comes is not what is listed."""


class _Busy(Exception):
    """The hub asks to come again."""


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


def _is_at(stream: BinaryIO, path: Path) -> bool:
    """Whether that is still the file at this path: somebody may have finished it meanwhile."""
    found, named = os.fstat(stream.fileno()), path.stat()
    return (found.st_dev, found.st_ino) == (named.st_dev, named.st_ino)
