"""Engines that read the owner's memory without its help. They cannot enforce refs, but still ask for a hold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.arena.arena import Arena
from unfuse.transfer.base import Got, LinkBroken, PeerLink
from unfuse.transfer.tcp import ChannelLink, OwnerClient, OwnerEngine, OwnerServer, read, send

PIECE = 16 * 1024 * 1024  # the most bytes of a range
AT_ONCE = 4  # ranges that are read in one call, and then reported


class CopyRange(NamedTuple):
    """Bytes to copy: an address of the owner, one of ours, and how many."""

    address: int
    to: int
    nbytes: int


class OwnerInfo(msgspec.Struct, frozen=True):
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
    def read(self, name: bytes, ranges: Sequence[CopyRange]) -> None:
        """Copy these ranges from the process that published `name`, in one call of the library.

        Raises LinkBroken; then some of them may be there.
        """

    @override
    def serve(self, arena: Arena) -> str:
        arena.fill()
        self.register(arena.view)
        about = msgspec.msgpack.encode(OwnerInfo(self.publish(), arena.view.ctypes.data))
        self.owner = OwnerServer(arena, self.options, lambda peer, *_: read(peer), about)
        return self.owner.address

    @override
    def connect(self, address: str) -> PeerLink:
        return _OneSidedLink(address, self)


class _OneSidedLink(ChannelLink):
    """Reads at the offset that the owner gives, several ranges in a call.

    Nothing of a failed call counts. The next call reads a single range, so that a transfer makes progress even over a
    link on which calls with many ranges keep failing.
    """

    def __init__(self, address: str, engine: OneSidedEngine) -> None:
        super().__init__(address, engine.options)
        self._engine, self._at_once = engine, AT_ONCE

    @override
    def bring(self, connection: OwnerClient, offset: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        owner = msgspec.msgpack.decode(connection.about, type=OwnerInfo)
        start, at, to = 0, owner.base + offset, into.ctypes.data
        while start < into.nbytes:
            stop = min(start + self._at_once * PIECE, into.nbytes)
            places = range(start, stop, PIECE)
            try:
                self._engine.read(owner.name, [CopyRange(at + one, to + one, min(PIECE, stop - one)) for one in places])
            except LinkBroken:
                self._at_once = 1
                raise
            self._at_once, start = AT_ONCE, stop
            yield stop
        send(connection.socket, Got())
