"""Connections to the arenas of other owners: opened when first needed, dropped when the owner is gone."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from pathlib import Path
from threading import Lock, Thread

from unfuse.arena.client import ArenaClient
from unfuse.core.errors import NotFound, ObjectLost, ProtocolError, TransientError
from unfuse.core.object_ref import ObjectRef


class Readers:
    """One connection for each owner that was asked for. With a `folder`, the owners' sockets must be there.

    A thread waits for owners to die and closes their connections; otherwise their memory would stay mapped, and in
    use, until the next read. Arrays over that memory stay valid.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self._closed = folder, False
        self._addresses: dict[str, str] = {}
        self._lock = Lock()
        self._clients: dict[tuple[str, str], ArenaClient] = {}
        self._deaths = select.epoll()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._deaths.register(self._stop, select.EPOLLIN)
        self._watcher = Thread(target=self._watch, name="arena-deaths", daemon=True)
        self._watcher.start()

    def learn(self, peers: Mapping[str, tuple[str, str]]) -> None:
        """Learn where owners are, as {owner: (node, address)}."""
        self._addresses.update({owner: address for owner, (_, address) in peers.items()})

    def find(self, ref: ObjectRef) -> ArenaClient:
        """The connection to a ref's owner. Raises ObjectLost if it cannot be reached."""
        try:
            return self._client(ref.owner)
        except NotFound as error:
            raise ObjectLost(f"object {ref.id} is on {error}", ref.id) from error
        except (TransientError, ProtocolError) as error:
            raise ObjectLost(f"object {ref.id} is lost with its owner {ref.owner}: {error}", ref.id) from error

    def reaches(self, owner: str) -> bool:
        """Whether there is a connection to an owner, or one can be made now. It stays until the owner is gone."""
        try:
            self._client(owner)
        except (NotFound, TransientError, ProtocolError):
            return False
        return True

    def close(self) -> None:
        """Close every connection, and each that is being made as soon as it is."""
        with self._lock:
            self._closed = True
        os.eventfd_write(self._stop, 1)
        self._watcher.join()
        for client in self._clients.values():
            client.close()
        self._deaths.close()
        os.close(self._stop)

    def _client(self, owner: str) -> ArenaClient:
        """The connection to an owner. It is made without the lock, so that a slow owner does not hold up others."""
        address = self._addresses.get(owner)
        if address is None:
            raise NotFound(f"{owner}, which is not known here")
        with self._lock:
            if known := self._clients.get((owner, address)):
                return known
        client = ArenaClient(address, folder=self._folder, owner=owner)
        with self._lock:
            known = self._clients.get((owner, address))
            if known or self._closed:
                client.close()
                return known or client
            self._deaths.register(client.fileno(), 0)  # nothing asked for: only the end of the connection is reported
            self._clients[owner, address] = client
        return client

    def _watch(self) -> None:
        while True:
            self._deaths.poll()
            with self._lock:
                # Asked again: a descriptor may have been closed and given to another connection meanwhile.
                ended = {fd for fd, _ in self._deaths.poll(0)}
                if self._stop in ended:
                    return
                for known in [known for known, client in self._clients.items() if client.fileno() in ended]:
                    self._clients.pop(known).close()
