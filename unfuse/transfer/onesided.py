"""Engines that read the owner's memory without its help. They cannot enforce refs, but still ask for a hold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.arena.arena import Arena
from unfuse.transfer.base import Link
from unfuse.transfer.owner_messages import Got
from unfuse.transfer.tcp_connection import ChannelLink, Connection, Owner, OwnerEngine, read, send

PIECE = 16 * 1024 * 1024  # bytes read between two reports


class About(msgspec.Struct, frozen=True):
    """What a reader must know about an owner: its name in the library, and the address of its arena."""

    name: bytes
    base: int


class OneSidedEngine(OwnerEngine):
    """Agrees over TCP on what may be read; a library then moves the bytes between memory that both ends registered."""

    enforces_refs = False

    @abstractmethod
    def publish(self) -> bytes:
        """The name that peers need to `read` from here, once memory is registered."""

    @abstractmethod
    def read(self, name: bytes, address: int, to: int, count: int) -> None:
        """Copy `count` bytes from an address in the process that published `name` to ours, `to`. Raises LinkBroken."""

    @override
    def serve(self, arena: Arena) -> str:
        arena.fill()
        self.register(arena.view)
        about = msgspec.msgpack.encode(About(self.publish(), arena.view.ctypes.data))
        self.owner = Owner(arena, self.options, lambda peer, *_: read(peer), about)
        return self.owner.address

    @override
    def connect(self, address: str) -> Link:
        return _OneSidedLink(address, self)


class _OneSidedLink(ChannelLink):
    """Reads at the offset that the owner gives."""

    def __init__(self, address: str, engine: OneSidedEngine) -> None:
        super().__init__(address, engine.options)
        self._engine = engine

    @override
    def bring(self, connection: Connection, offset: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        owner = msgspec.msgpack.decode(connection.about, type=About)
        for start in range(0, into.nbytes, PIECE):
            count = min(PIECE, into.nbytes - start)
            self._engine.read(owner.name, owner.base + offset + start, into.ctypes.data + start, count)
            yield start + count
        send(connection.socket, Got())
