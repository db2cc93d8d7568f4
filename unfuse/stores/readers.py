"""Connections to the arenas of other owners: opened when first needed, dropped when the owner is gone."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from threading import Lock, Thread

from unfuse.arena.client import ArenaClient
from unfuse.core.errors import ObjectLost, TransientError
from unfuse.core.object_ref import ObjectRef


class Readers:
    """One connection for each owner that was asked for.

    A thread without work waits for owners to die: their memory would otherwise stay mapped here, and so exist, until
    the next object was read. Arrays that lie in it stay valid.
    """

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}
        self._lock = Lock()
        self._clients: dict[str, ArenaClient] = {}
        self._deaths = select.epoll()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._deaths.register(self._stop, select.EPOLLIN)
        self._watcher = Thread(target=self._watch, name="arena-deaths", daemon=True)
        self._watcher.start()

    def learn(self, peers: Mapping[str, tuple[str, str]]) -> None:
        """Where owners are, as {owner: (node, address)}."""
        self._addresses.update({owner: address for owner, (_, address) in peers.items()})

    def find(self, ref: ObjectRef) -> ArenaClient:
        """The connection to a ref's owner. Raises ObjectLost if it cannot be reached."""
        address = self._addresses.get(ref.owner)
        if address is None:
            raise ObjectLost(f"object {ref.id} is on {ref.owner}, which is not known here", ref.id)
        with self._lock:
            client = self._clients.get(address)
            if client is None:
                client = self._clients[address] = self._connect(address, ref)
        return client

    def close(self) -> None:
        """End every connection."""
        os.eventfd_write(self._stop, 1)
        self._watcher.join()
        for client in self._clients.values():
            client.close()
        self._deaths.close()
        os.close(self._stop)

    def _connect(self, address: str, ref: ObjectRef) -> ArenaClient:
        try:
            client = ArenaClient(address)
        except TransientError as error:
            raise ObjectLost(f"object {ref.id} is lost with its owner {ref.owner}: {error}", ref.id) from error
        self._deaths.register(client.fileno(), 0)  # nothing asked for: only the end of the connection is reported
        return client

    def _watch(self) -> None:
        while True:
            self._deaths.poll()
            with self._lock:
                # Asked again: a descriptor may have been closed and given to another connection meanwhile.
                ended = {fd for fd, _ in self._deaths.poll(0)}
                if self._stop in ended:
                    return
                for address in [address for address, client in self._clients.items() if client.fileno() in ended]:
                    self._clients.pop(address).close()
