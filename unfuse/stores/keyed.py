"""Objects in a blob store: they outlive their owner and are verified when read."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.arena.extents import MemoryUsage
from unfuse.arena.objects import Extent, FinalizerLock
from unfuse.core.errors import ArenaFull, NotFound, ObjectLost, TransientError
from unfuse.core.object_ref import ObjectRef
from unfuse.stores import BLOB_STORES, COPIES, OBJECTS
from unfuse.stores.base import Checksums, ObjectDraft, ObjectHold, StorageBackend, StoreOptions
from unfuse.stores.blobs import BlobStore, folder_of, last_part, open_blobs


class KeyedBackend(StorageBackend):
    """One owner's objects in a blob store, at most `capacity` bytes.

    Every process with access to the blob store can read them.

    Without an `owner`, it has the durable copies of all owners' objects, without a limit, in a folder of their own.
    Objects that are being written or held are in this process's memory, and count in `usage`, too.

    full_message: the beginning and the end of ArenaFull's message: what is full, and how to get more room.
    """

    bounded = False

    def __init__(
        self, blobs: BlobStore, owner: str = "", capacity: int = 0, full_message: tuple[str, str] = ("", "")
    ) -> None:
        self._blobs, self._owner = blobs, owner
        self._capacity, self._full_message = capacity, full_message
        self._folder = partial(folder_of, OBJECTS if owner else COPIES)
        self._hold_lock = FinalizerLock()
        self._writing: dict[str, tuple[ObjectDraft, str]] = {}
        self._generations = count(1)
        self._held_bytes = self._high_water = 0

    @override
    def create(self, nbytes: int, request: str) -> ObjectDraft:
        self._admit(nbytes)
        memory = np.empty(nbytes, np.uint8)
        draft = ObjectDraft(secrets.token_hex(16), secrets.token_bytes(16), next(self._generations), memory)
        self._writing[draft.id] = draft, request
        return draft

    @override
    def seal(self, id: str) -> None:
        """Write the object to the blob store. Raises TransientError, with the object dropped."""
        draft, request = self._writing.get(id) or (None, "")
        if draft is not None:
            folder, name = self._folder(self._owner, request), _blob_name(draft)
            try:
                self._blobs.write(folder, name, draft.memory, durable=False)
            except TransientError:
                self.abort(id)
                raise
            if self._writing.pop(id, None):
                return
            # The request was released during the write: without this, the blob would remain.
            self._blobs.remove(folder, name)
        raise ObjectLost(f"object {id} was released while it was written, because its request has ended", id)

    @override
    def abort(self, id: str) -> None:
        self._writing.pop(id, None)

    def store(self, ref: ObjectRef | Extent, memory: NDArray[np.uint8], *, durable: bool = False) -> None:
        """Store a sealed object of another store.

        Raises ArenaFull, or TransientError if the blob store fails.
        """
        if self._owner:
            self._admit(ref.nbytes)
        self._blobs.write(self._folder(self._owner, ref.request), _blob_name(ref), memory, durable=durable)

    def load(self, object: Extent, memory: NDArray[np.uint8]) -> None:
        """Fill `memory` with an object of this owner, unverified. Raises NotFound and TransientError."""
        self._read(self._folder(self._owner, object.request), object, memory)

    @override
    def open(self, ref: ObjectRef) -> ObjectHold:
        """Read an object into memory. Raises ObjectLost, also if its checksums do not match."""
        try:
            memory = self._read(self._folder(self._owner and ref.owner, ref.request), ref)
        except (NotFound, TransientError) as error:
            raise ObjectLost(f"object {ref.id} is lost: {error}", ref.id) from error
        with self._hold_lock:
            self._held_bytes += ref.nbytes
        # A hold may end in the garbage collector, at any point of any thread: its end is posted, not waited for.
        return ObjectHold(memory, partial(self._hold_lock.post, partial(self._end_hold, ref.nbytes)))

    @override
    def register_owners(self, peers: Mapping[str, tuple[str, str]]) -> None:
        """Do nothing: objects of other owners are in the same blob store."""

    @override
    def delete(self, ref: ObjectRef) -> None:
        if self._owner in ("", ref.owner):
            self._blobs.remove(self._folder(self._owner, ref.request), _blob_name(ref))

    @override
    def release(self, request: str) -> None:
        for id in [id for id, (_, writer) in tuple(self._writing.items()) if writer == request]:
            self.abort(id)
        self._blobs.drop(self._folder(self._owner, request))

    @override
    def stored_requests(self) -> frozenset[str]:
        unsealed = {request for _, request in tuple(self._writing.values())}
        return frozenset(
            unsealed | {last_part(entry.folder) for entry in self._blobs.entries(self._folder(self._owner))}
        )

    @override
    def usage(self) -> MemoryUsage:
        used = self._used()
        self._high_water = max(self._high_water, used + self._held_bytes)
        free = max(0, self._capacity - used)
        used += self._held_bytes
        return MemoryUsage(self._capacity, used, used, free, free, self._high_water)

    @override
    def close(self) -> None:
        """Close the connections to the blob store. Sealed objects stay there."""
        self._blobs.close()

    def clear(self) -> None:
        """Delete every object of this owner."""
        self._blobs.drop(self._folder(self._owner))

    def forget(self, before: float) -> None:
        """Delete objects of all owners that are older than the Unix time `before`.

        Raises TransientError.
        """
        for entry in [entry for entry in self._blobs.entries(self._folder()) if entry.modified < before]:
            self._blobs.remove(entry.folder, entry.name)

    def _used(self) -> int:
        """Return the bytes of unsealed and stored objects of this owner."""
        unsealed: int = sum(draft.memory.nbytes for draft, _ in tuple(self._writing.values()))
        return unsealed + sum(entry.nbytes for entry in self._blobs.entries(self._folder(self._owner)))

    def _admit(self, nbytes: int) -> None:
        """Raise ArenaFull unless there is room for so many bytes."""
        used = self._used()
        if used + nbytes > self._capacity:
            raise ArenaFull(nbytes, max(0, self._capacity - used), self._capacity, *self._full_message)
        self._high_water = max(self._high_water, used + nbytes)

    def _read(
        self, folder: str, object: ObjectRef | Extent, memory: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Return the bytes of an object; those of a ref are verified.

        Raises NotFound and TransientError.
        """
        nbytes, parts = self._blobs.read(folder, _blob_name(object))
        if nbytes != object.nbytes:
            raise TransientError(f"{nbytes} bytes are stored instead of {object.nbytes}")
        memory, filled = np.empty(nbytes, np.uint8) if memory is None else memory, 0
        checksums = Checksums(memory)
        for part in parts:
            if filled + len(part) > nbytes:  # another object has replaced it meanwhile
                raise TransientError(f"more than the {nbytes} bytes of the object are stored")
            memory[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
            filled += len(part)
            checksums.filled(filled)
        if filled != nbytes or (isinstance(object, ObjectRef) and checksums.finish() != object.checksums):
            raise TransientError("its bytes do not match its checksums")
        return memory

    def _end_hold(self, nbytes: int) -> None:
        """Count the bytes of an ended hold as free."""
        self._held_bytes -= nbytes


def open_keyed(options: StoreOptions, remedy: str = "start the worker with a larger --arena") -> KeyedBackend:
    """Open the owner's objects at `options.url`. Raises ConfigError.

    `remedy` is the end of ArenaFull's message: how to get more room.
    """
    full_message = f"the {options.url.partition(':')[0]} store has no room", remedy
    return KeyedBackend(open_blobs(options.url), options.owner, options.capacity, full_message)


def open_copies(url: str) -> KeyedBackend | None:
    """Open the durable copies at `disk:PATH`, `redis://…` or `s3://…`; None for "none".

    Raises ConfigError. Copies stay until their request is released.
    """
    return None if url == "none" else KeyedBackend(open_blobs(url))


class StoredObjects:
    """All objects and durable copies in one blob store, of all owners, also ended ones."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs

    def requests(self) -> dict[str, set[str]]:
        """Return the folders of each request, by its id. Raises TransientError."""
        folders: dict[str, set[str]] = {}
        for root in (OBJECTS, COPIES):
            for entry in self._blobs.entries(folder_of(root)):
                folders.setdefault(last_part(entry.folder), set()).add(entry.folder)
        return folders

    def drop(self, folders: Iterable[str]) -> None:
        """Delete everything in these folders. Raises TransientError."""
        for folder in folders:
            self._blobs.drop(folder)


def stored_objects(*urls: str) -> list[StoredObjects]:
    """Return the stored objects at those of these URLs that are blob stores. Raises ConfigError.

    The URLs are of tensor stores and durable copies; of a spill store, the slow part counts.
    """
    blob_urls = dict.fromkeys(url.partition("+")[2] if url.startswith("spill:") else url for url in urls)
    return [StoredObjects(open_blobs(url)) for url in blob_urls if url.partition(":")[0] in BLOB_STORES]


def _blob_name(object: ObjectRef | Extent | ObjectDraft) -> str:
    """Return the name of an object's blob.

    It has a hash of the key, so finding it needs the whole ref.
    """
    secret = hashlib.blake2b(b"%d " % object.generation + object.key, digest_size=16).hexdigest()
    return f"{folder_of(object.id)}.{secret}"
