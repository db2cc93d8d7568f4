"""Engines that read the owner's memory without its help (one-sided, as RDMA does).

They cannot enforce refs, but still ask the owner to retain the object.
"""

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

#: Most bytes of a range.
MAX_RANGE_BYTES = 16 * 1024 * 1024

#: Number of ranges that are read in one call of the library.
RANGES_PER_CALL = 4


class CopyRange(NamedTuple):
    """A range of bytes to copy."""

    #: Address in the owner's process.
    address: int

    #: Address in this process.
    destination: int

    #: Number of bytes to copy.
    nbytes: int


class OwnerInfo(msgspec.Struct, frozen=True):
    """The name and the memory address of an owner, which its readers need."""

    #: The owner's name in the library.
    name: bytes

    #: The address of its arena in its process.
    base: int


class OneSidedEngine(OwnerEngine):
    """An engine whose library moves bytes between registered memory of both ends.

    The peers agree over TCP on what may be read.
    """

    enforces_refs = False

    @abstractmethod
    def publish(self) -> bytes:
        """Return the name by which peers `read` from this process. Called after `register`."""

    @abstractmethod
    def read(self, name: bytes, ranges: Sequence[CopyRange]) -> None:
        """Copy these ranges from the process that published `name`, in one library call.

        Raises LinkBroken. Some of the ranges may be copied then.
        """

    @override
    def serve(self, arena: Arena) -> str:
        # Registered memory must stay allocated, so the arena allocates all of it now.
        arena.fill()
        self.register(arena.view)
        info = msgspec.msgpack.encode(OwnerInfo(self.publish(), arena.view.ctypes.data))
        self.owner = OwnerServer(arena, self.options, lambda peer, *_: read(peer), info)
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
        self._engine, self._at_once = engine, RANGES_PER_CALL

    @override
    def receive_into(self, connection: OwnerClient, offset: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        owner = msgspec.msgpack.decode(connection.about, type=OwnerInfo)
        start = 0
        source = owner.base + offset
        destination = into.ctypes.data

        while start < into.nbytes:
            stop = min(start + self._at_once * MAX_RANGE_BYTES, into.nbytes)
            starts = range(start, stop, MAX_RANGE_BYTES)
            try:
                self._engine.read(
                    owner.name,
                    [CopyRange(source + at, destination + at, min(MAX_RANGE_BYTES, stop - at)) for at in starts],
                )
            except LinkBroken:
                self._at_once = 1
                raise
            self._at_once, start = RANGES_PER_CALL, stop
            yield stop
        send(connection.socket, Got())  # the owner retains the object until then
