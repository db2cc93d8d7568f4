"""Transfer over TCP, the default: from the owner's arena into the reader's. Authenticated, not encrypted."""

from __future__ import annotations

import socket
from collections.abc import Generator
from functools import partial

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.arena.arena import Arena
from unfuse.arena.objects import Extent
from unfuse.transfer.owner_messages import Pull
from unfuse.transfer.tcp_connection import ChannelLink, Connection, OwnerEngine, OwnerServer

PIECE = 256 * 1024  # bytes received between two reports


class TcpEngine(OwnerEngine):
    """One owner and any number of links."""

    name = "tcp"

    @override
    def serve(self, arena: Arena) -> str:
        self.owner = OwnerServer(arena, self.options, partial(_send, arena.view), sends=True)
        return self.owner.address

    @override
    def connect(self, address: str) -> TcpLink:
        return TcpLink(address, self.options)


class TcpLink(ChannelLink):
    """Receives the bytes on the connection itself."""

    @override
    def bring(self, connection: Connection, offset: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        view, done = into.data, 0
        while done < len(view):
            got = connection.socket.recv_into(view[done : done + PIECE], 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionResetError("the connection ended")
            done += got
            yield done


def _send(view: NDArray[np.uint8], peer: socket.socket, extent: Extent, pull: Pull) -> None:
    """Send by copying. sendfile would save the owner this copy, but make the reader, which has more to do, slower."""
    peer.sendall(view[extent.offset + pull.start : extent.offset + pull.stop].data)
