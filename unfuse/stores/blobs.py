"""The port for blob stores, such as a disk, Redis or S3.

A blob is bytes, stored by folder and name outside of every process.

Keyed backends, durable copies and the result store are built on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from urllib.parse import quote, unquote

from unfuse.core.registry import resolve
from unfuse.stores import BLOB_STORES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: The bytes of a blob.
Data: TypeAlias = "bytes | NDArray[np.uint8]"

#: Bytes that are read or written at a time.
PART_BYTES = 4 * 1024 * 1024


class StoredBlob(NamedTuple):
    """One stored blob."""

    #: The path of the blob's folder, as `folder_of` returns it.
    folder: str

    #: The blob's name in its folder.
    name: str

    #: Size of the blob, in bytes.
    nbytes: int

    #: Unix time of the last write, in seconds.
    modified: float


class BlobStore(ABC):
    """Blobs by folder and name. A blob is stored whole or not at all.

    Thread-safe. Writing a blob again replaces it. A folder is a path that `folder_of` made; a name has no "/" and
    does not begin with ".". Every method raises TransientError while the store fails or cannot be reached, and works
    again afterwards. A blob written with `durable` survives a power cut, if the store and its URL provide for that.
    """

    @abstractmethod
    def write(self, folder: str, name: str, data: Data, *, durable: bool = True) -> None:
        """Store `data`. Raises TransientError, with nothing stored."""

    @abstractmethod
    def read(self, folder: str, name: str) -> tuple[int, Iterator[bytes]]:
        """Return the size of a blob in bytes, and an iterator over its parts.

        Raises NotFound.
        """

    @abstractmethod
    def remove(self, folder: str, name: str) -> None:
        """Delete a blob. Idempotent."""

    @abstractmethod
    def drop(self, folder: str) -> None:
        """Delete all blobs in a folder and its subfolders. Idempotent."""

    @abstractmethod
    def entries(self, under: str = "") -> Iterator[StoredBlob]:
        """Return all blobs in a folder and its subfolders."""

    def close(self) -> None:  # noqa: B027 - most stores have no connections
        """Close the connections to the store."""


def open_blobs(url: str) -> BlobStore:
    """Open the blob store at a URL: `disk:PATH`, `redis://…`, `s3://BUCKET/…` or `module:attr://…`.

    Raises ConfigError.
    """
    scheme = url.partition(":")[0]
    factory = resolve(BLOB_STORES, scheme if scheme in BLOB_STORES else url.partition("://")[0], "blob store")
    blobs: BlobStore = factory(url)
    return blobs


def folder_of(*parts: str) -> str:
    """Return the path of a folder from parts, which may be any text.

    Special characters are quoted.
    """
    quoted = (quote(part, safe="").replace(".", "%2E").replace("~", "%7E").replace("%", "~") for part in parts)
    return "/".join(filter(None, quoted))


def last_part(folder: str) -> str:
    """Return the last part of a path that `folder_of` made, unquoted."""
    return unquote(folder.rpartition("/")[2].replace("~", "%"))
