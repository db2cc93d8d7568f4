"""Objects in an arena that every process of the machine can map: the owner's own, and those of its peers."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.arena.arena import Arena
from unfuse.arena.client import ArenaClient
from unfuse.arena.server import ArenaServer
from unfuse.core.errors import ObjectLost, TransientError
from unfuse.core.object_ref import ObjectRef
from unfuse.stores.base import Hold, ObjectDraft, StoreOptions, TabledBackend
from unfuse.stores.readers import Readers


class SharedMemoryBackend(TabledBackend):
    """Writes into `home`, which is the process's own arena or a connection to one, and reads there and from peers.

    With a run folder, only sockets of peers in that folder are opened; without one, the addresses that peers give.
    """

    announces = True

    def __init__(self, options: StoreOptions, home: Arena | ArenaClient, address: str, token: bytes) -> None:
        super().__init__(home)
        self.address, self.write_token = address, token
        self._owner, self._home = options.owner, home
        self._readers = Readers(Path(options.run_dir) if options.run_dir else None)

    @override
    def create(self, nbytes: int, request: str) -> ObjectDraft:
        extent = self._home.create(nbytes, request)
        return ObjectDraft(extent.id, extent.key, extent.generation, self._home.writable(extent))

    @override
    def at(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return self._home.memory[offset : offset + nbytes]

    @override
    def announce(self, id: str, written: tuple[int, ...]) -> None:
        self._home.announce(id, written)

    @override
    def is_whole(self, ref: ObjectRef) -> bool:
        with _or_lost(ref):
            _, whole = self._reader(ref).watch(ref.id, ref.key, ref.generation, ref.nbytes)
        return whole

    @override
    def hold(self, ref: ObjectRef) -> Hold:
        reader = self._reader(ref)
        with _or_lost(ref):
            extent = reader.hold(ref.id, ref.key, ref.generation, ref.nbytes)
        return Hold(reader.view[extent.offset : extent.offset + extent.nbytes], partial(reader.unhold, ref.id))

    @override
    def learn(self, peers: Mapping[str, tuple[str, str]]) -> None:
        self._readers.learn(peers)

    @override
    def reaches(self, owner: str) -> bool:
        return self._readers.reaches(owner)

    @override
    def close(self) -> None:
        self._readers.close()
        self._home.close()

    def _reader(self, ref: ObjectRef) -> Arena | ArenaClient:
        """What reads a ref's object. Raises ObjectLost."""
        return self._home if ref.owner == self._owner else self._readers.find(ref)


@contextmanager
def _or_lost(ref: ObjectRef) -> Iterator[None]:
    """An object is lost where its owner does not answer."""
    try:
        yield
    except ObjectLost:
        raise
    except TransientError as error:
        raise ObjectLost(f"object {ref.id} is lost with its owner {ref.owner}: {error}", ref.id) from error


class OwnedSharedMemory(SharedMemoryBackend):
    """The store of the process that owns the arena and serves it to others, in the run folder or a temporary one."""

    def __init__(self, options: StoreOptions) -> None:
        self.arena = Arena(options.capacity)
        token = secrets.token_bytes(16)
        self._own_folder = None if options.run_dir else tempfile.TemporaryDirectory(prefix="unfuse-")
        folder = Path(self._own_folder.name if self._own_folder else options.run_dir)
        self._server = ArenaServer(self.arena, token, folder, options.owner)
        super().__init__(options, self.arena, self._server.address, token)

    @override
    def close(self) -> None:
        self._server.close()
        if self._own_folder:
            self._own_folder.cleanup()
        super().close()


def open_shared_memory(options: StoreOptions) -> SharedMemoryBackend:
    """Open a new arena, or with `address` that of another process. Raises ConfigError if there is not enough memory."""
    if not options.address:
        return OwnedSharedMemory(options)
    writer = ArenaClient(options.address, options.write_token)
    return SharedMemoryBackend(options, writer, options.address, options.write_token)
