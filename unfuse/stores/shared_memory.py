"""The shared memory backend: objects in an arena that local processes can map.

It reads the owner's own objects and those of its peers.
"""

from __future__ import annotations

import os
import secrets
import select
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock, Thread

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.arena.arena import Arena
from unfuse.arena.client import ArenaClient
from unfuse.arena.server import ArenaServer
from unfuse.core.errors import NotFound, ObjectLost, ProtocolError, TransientError
from unfuse.core.object_ref import ObjectRef
from unfuse.stores.base import ObjectDraft, ObjectHold, StoreOptions, TabledBackend


class ArenaReaders:
    """The connections to other owners, one for each that was needed.

    With a `folder`, the owners' sockets must be there. A thread waits for owners to end and closes their connections;
    otherwise their memory would stay mapped, and in use, until the next read. Arrays over that memory stay valid.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self._closed = folder, False
        self._addresses: dict[str, str] = {}
        self._lock = Lock()
        self._clients: dict[tuple[str, str], ArenaClient] = {}
        self._epoll = select.epoll()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._watcher = Thread(target=self._watch, name="arena-deaths", daemon=True)
        self._watcher.start()

    def register_owners(self, peers: Mapping[str, tuple[str, str]]) -> None:
        """Register the addresses of owners, as {owner: (node, address)}."""
        self._addresses.update({owner: address for owner, (_, address) in peers.items()})

    def find(self, ref: ObjectRef) -> ArenaClient:
        """Return the connection to a ref's owner. Raises ObjectLost if it cannot be reached."""
        try:
            return self._client(ref.owner)
        except NotFound as error:
            raise ObjectLost(f"object {ref.id} cannot be read: {error}", ref.id) from error
        except (TransientError, ProtocolError) as error:
            raise ObjectLost(f"object {ref.id} is lost with its owner {ref.owner}: {error}", ref.id) from error

    def reaches(self, owner: str) -> bool:
        """Whether there is a connection to an owner, or one can be made now.

        The connection stays until the owner has ended.
        """
        try:
            self._client(owner)
        except (NotFound, TransientError, ProtocolError):
            return False
        return True

    def close(self) -> None:
        """Close every connection, also those that are being made."""
        with self._lock:
            self._closed = True
        os.eventfd_write(self._stop, 1)
        self._watcher.join()
        for client in self._clients.values():
            client.close()
        self._epoll.close()
        os.close(self._stop)

    def _client(self, owner: str) -> ArenaClient:
        """Return the connection to an owner.

        It is made without the lock, so that a slow owner does not delay others.
        """
        address = self._addresses.get(owner)
        if address is None:
            raise NotFound(f"its owner {owner} is unknown")
        with self._lock:
            if existing := self._clients.get((owner, address)):
                return existing
        client = ArenaClient(address, folder=self._folder, owner=owner)
        # Another thread may have made the same connection meanwhile: then that one is used.
        with self._lock:
            existing = self._clients.get((owner, address))
            if existing or self._closed:
                client.close()
                return existing or client
            self._epoll.register(client.fileno(), 0)  # without events, only the end of the connection is reported
            self._clients[owner, address] = client
        return client

    def _watch(self) -> None:
        """Close the connections of owners that have ended, until `close`."""
        while True:
            self._epoll.poll()
            with self._lock:
                # Polled again: a descriptor may have been closed and reused for another connection meanwhile.
                ended = {fd for fd, _ in self._epoll.poll(0)}
                if self._stop in ended:
                    return
                for key in [key for key, client in self._clients.items() if client.fileno() in ended]:
                    self._clients.pop(key).close()


class SharedMemoryBackend(TabledBackend):
    """Writes into `local_arena`, and reads there and from peers.

    `local_arena` is the process's own arena or a connection to one. With a run folder, only sockets of peers in that
    folder are opened. Without one, the addresses that peers register are opened.
    """

    announces = True

    def __init__(self, options: StoreOptions, local_arena: Arena | ArenaClient, address: str, token: bytes) -> None:
        super().__init__(local_arena)
        self.address, self.write_token = address, token
        self._owner, self._local_arena = options.owner, local_arena
        self._readers = ArenaReaders(Path(options.run_dir) if options.run_dir else None)

    @override
    def create(self, nbytes: int, request: str) -> ObjectDraft:
        extent = self._local_arena.create(nbytes, request)
        return ObjectDraft(extent.id, extent.key, extent.generation, self._local_arena.writable(extent))

    @override
    def memory(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return self._local_arena.memory[offset : offset + nbytes]

    @override
    def announce(self, id: str, checksums: tuple[int, ...]) -> None:
        self._local_arena.announce(id, checksums)

    @override
    def is_whole(self, ref: ObjectRef) -> bool:
        with _lost_if_unreachable(ref):
            _, is_complete = self._reader(ref).watch(ref.id, ref.key, ref.generation, ref.nbytes)
        return is_complete

    @override
    def open(self, ref: ObjectRef) -> ObjectHold:
        reader = self._reader(ref)
        with _lost_if_unreachable(ref):
            extent = reader.hold(ref.id, ref.key, ref.generation, ref.nbytes)
        return ObjectHold(reader.view[extent.offset : extent.offset + extent.nbytes], partial(reader.unhold, ref.id))

    @override
    def register_owners(self, peers: Mapping[str, tuple[str, str]]) -> None:
        self._readers.register_owners(peers)

    @override
    def reaches(self, owner: str) -> bool:
        return self._readers.reaches(owner)

    @override
    def close(self) -> None:
        self._readers.close()
        self._local_arena.close()

    def _reader(self, ref: ObjectRef) -> Arena | ArenaClient:
        """Return the arena or connection with a ref's object. Raises ObjectLost."""
        return self._local_arena if ref.owner == self._owner else self._readers.find(ref)


@contextmanager
def _lost_if_unreachable(ref: ObjectRef) -> Iterator[None]:
    """Turn TransientError into ObjectLost: the owner does not answer."""
    try:
        yield
    except ObjectLost:
        raise
    except TransientError as error:
        raise ObjectLost(f"object {ref.id} is lost with its owner {ref.owner}: {error}", ref.id) from error


class OwnedSharedMemory(SharedMemoryBackend):
    """The store of the process that owns the arena and serves it to others.

    The socket is in the run folder, or in a temporary one.
    """

    def __init__(self, options: StoreOptions) -> None:
        self.arena = Arena(options.capacity)
        token = secrets.token_bytes(16)
        self._temporary_folder = None if options.run_dir else tempfile.TemporaryDirectory(prefix="unfuse-")
        folder = Path(self._temporary_folder.name if self._temporary_folder else options.run_dir)
        self._server = ArenaServer(self.arena, token, folder, options.owner)
        super().__init__(options, self.arena, self._server.address, token)

    @override
    def close(self) -> None:
        self._server.close()
        if self._temporary_folder:
            self._temporary_folder.cleanup()
        super().close()


def open_shared_memory(options: StoreOptions) -> SharedMemoryBackend:
    """Open a new arena, or that at `address` of another process. Raises ConfigError.

    ConfigError is raised if there is not enough memory.
    """
    if not options.address:
        return OwnedSharedMemory(options)
    writer = ArenaClient(options.address, options.write_token)
    return SharedMemoryBackend(options, writer, options.address, options.write_token)
