"""The S3 blob store, for S3 and servers with its protocol."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from typing_extensions import override

from unfuse.core.errors import ConfigError, NotFound, TransientError
from unfuse.stores.blobs import PART_BYTES, BlobStore, Data, StoredBlob

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store
except ImportError as error:
    raise ConfigError("storage in S3 requires the package obstore: pip install 'unfuse[s3]'") from error

if TYPE_CHECKING:
    from obstore.store import ClientConfig

URL = re.compile(r"s3://([a-z0-9.-]{3,63})(?:/([^?]*))?(?:\?endpoint=(https?://.+))?")
#: Longest time to connect, without a received byte, and for a whole call.
TIMES: ClientConfig = {"connect_timeout": "5s", "read_timeout": "30s", "timeout": "600s"}

#: Time for which a failed call is repeated (retry policy).
RETRY_TIMEOUT = timedelta(seconds=10)


class S3Blobs(BlobStore):
    """Blobs at `s3://BUCKET/PREFIX[?endpoint=URL]`: one S3 object for each.

    S3 stores objects whole and durably. Credentials, region and endpoint come from the usual AWS_ variables.
    """

    def __init__(self, url: str) -> None:
        match = URL.fullmatch(url)
        if match is None:
            raise ConfigError(f"{url!r} is not an S3 URL: use s3://BUCKET/PREFIX, with ?endpoint=URL if not on AWS")
        self._place = url.partition("?")[0]
        self._store = S3Store(
            match[1],
            prefix=match[2] or None,
            config={"endpoint": match[3]} if match[3] else {},
            client_options={"allow_http": True, **TIMES},
            retry_config={"max_retries": 3, "retry_timeout": RETRY_TIMEOUT},
        )

    @override
    def write(self, folder: str, name: str, data: Data, *, durable: bool = True) -> None:
        with self._translated_errors(f"write {folder}/{name} ({len(data)} bytes)"):
            obstore.put(self._store, f"{folder}/{name}", memoryview(data))  # type: ignore[arg-type]

    @override
    def read(self, folder: str, name: str) -> tuple[int, Iterator[bytes]]:
        try:
            with self._translated_errors(f"read {folder}/{name}"):
                response = obstore.get(self._store, f"{folder}/{name}")
        except FileNotFoundError:
            raise NotFound(f"{folder}/{name} is not in {self._place}") from None
        return response.meta["size"], self._read_parts(response)

    @override
    def remove(self, folder: str, name: str) -> None:
        self._delete([f"{folder}/{name}"])

    @override
    def drop(self, folder: str) -> None:
        if paths := [f"{entry.folder}/{entry.name}" for entry in self.entries(folder)]:
            self._delete(paths)

    @override
    def entries(self, under: str = "") -> Iterator[StoredBlob]:
        with self._translated_errors(f"list {under or '/'}"):
            for page in obstore.list(self._store, under or None, chunk_size=1000):
                for meta in page:
                    folder, _, name = meta["path"].rpartition("/")
                    yield StoredBlob(folder, name, meta["size"], meta["last_modified"].timestamp())

    def _read_parts(self, response: obstore.GetResult) -> Iterator[bytes]:
        """Yield the parts of a blob."""
        with self._translated_errors("continue a read"):
            yield from response.stream(PART_BYTES)

    def _delete(self, paths: list[str]) -> None:
        """Delete S3 objects; missing ones are ignored."""
        with suppress(FileNotFoundError), self._translated_errors("delete"):
            obstore.delete(self._store, paths)

    @contextmanager
    def _translated_errors(self, action: str) -> Iterator[None]:
        """Turn the library's errors into TransientError. FileNotFoundError is raised as it is."""
        try:
            yield
        except FileNotFoundError:
            raise
        except (BaseError, OSError, ValueError) as error:
            reason = re.split(r"\n|: <\?xml", str(error))[0]
            raise TransientError(f"cannot {action} in {self._place}: {reason}") from error
