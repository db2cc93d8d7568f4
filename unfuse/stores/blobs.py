"""The port for bytes that outlive a process: kept under a folder and a name, on a disk, in Redis, in S3.

Stores that keep objects by key, durable copies and results are built on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from urllib.parse import quote, unquote

from unfuse.core.registry import resolve
from unfuse.stores import SHELVES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Data: TypeAlias = bytes | NDArray[np.uint8]

PART_BYTES = 4 * 1024 * 1024
"""Bytes that are moved at a time."""


class Entry(NamedTuple):
    """One thing that is kept. `modified` is Unix seconds."""

    folder: str
    name: str
    nbytes: int
    modified: float


class BlobStore(ABC):
    """Bytes by folder and name. What is written is there as a whole or not at all; writing it again replaces it.

    Thread-safe. A folder is a path of parts as `folder_of` makes them; a name has no "/" and does not begin with ".".
    Every method raises TransientError when the place fails or cannot be reached, and works again when it is back.
    With `durable`, what is written survives a power cut, as far as the place and its URL can have it.
    """

    @abstractmethod
    def write(self, folder: str, name: str, data: Data, *, durable: bool = True) -> None:
        """Keep `data`. Raises TransientError, nothing kept."""

    @abstractmethod
    def read(self, folder: str, name: str) -> tuple[int, Iterator[bytes]]:
        """How many bytes there are, known before any is read, and their parts in order. Raises NotFound."""

    @abstractmethod
    def remove(self, folder: str, name: str) -> None:
        """Forget one. Idempotent."""

    @abstractmethod
    def drop(self, folder: str) -> None:
        """Forget all there is in a folder and those below it. Idempotent."""

    @abstractmethod
    def entries(self, under: str = "") -> Iterator[Entry]:
        """What is in a folder and those below it."""


def open_blobs(url: str) -> BlobStore:
    """The blob store at `disk:PATH`, `redis://…`, `s3://BUCKET/…` or `module:attr://…`. Raises ConfigError."""
    known = url.partition(":")[0]
    at = resolve(SHELVES, known if known in SHELVES else url.partition("://")[0], "place to keep things")
    blobs: BlobStore = at(url)
    return blobs


def folder_of(*parts: str) -> str:
    """A folder whose parts may be any text: nothing in them leads elsewhere."""
    quoted = (quote(part, safe="").replace(".", "%2E").replace("~", "%7E").replace("%", "~") for part in parts)
    return "/".join(filter(None, quoted))


def last_part(folder: str) -> str:
    """The last of the parts that `folder_of` was given."""
    return unquote(folder.rpartition("/")[2].replace("~", "%"))
