"""Transfer engines gloo and NCCL, between compute processes; for trusted networks only.

The workers agree over TCP on what may be read. Each of their connections then has a pair of compute processes, which
move the bytes: only these have the libraries, and the memory of GPUs.
"""

from __future__ import annotations

import secrets
import socket
from collections import deque
from collections.abc import Generator
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, finalize

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.arena.arena import Arena
from unfuse.arena.objects import Extent
from unfuse.core.codec import decode, encode
from unfuse.core.errors import ConfigError
from unfuse.transfer.base import PeerLink, ProcessPairs, Pull, TransferOptions
from unfuse.transfer.tcp import ChannelLink, OwnerClient, OwnerEngine, OwnerServer, read, write

#: Bytes moved at a time. These must arrive within the seconds after which a peer counts as gone.
MOVE_BYTES = 4 * 1024 * 1024


class PairsEngine(OwnerEngine):
    """An engine that moves bytes by pairs of compute processes.

    Each connection's pair is made for its first pull and ends with the connection.
    """

    enforces_refs = False
    _pairs: ProcessPairs
    _memory: NDArray[np.uint8]

    def __init__(self, options: TransferOptions) -> None:
        super().__init__(options)
        self._pair_names = WeakKeyDictionary[object, str]()

    @override
    def use(self, pairs: ProcessPairs, device: str) -> None:
        self._pairs = pairs

    @override
    def register(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory

    @override
    def serve(self, arena: Arena) -> str:
        self.owner = OwnerServer(arena, self.options, self._send)
        return self.owner.address

    @override
    def connect(self, address: str) -> PeerLink:
        return _PairsLink(address, self)

    def receive(self, connection: OwnerClient, address: str, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        """Fill `into`, a part of the registered memory; yields the bytes so far."""
        pair = self._pair_names.get(connection)
        if not pair:
            port: int = decode(read(connection.socket), int)
            pair = self._new_pair(connection)
            sender_address = urlsplit(address).hostname or "", port
            self._pairs.join(pair, self.name, self.options.host, self.options.silence_s, sender_address)
        yield from self._move(pair, into.ctypes.data - self._memory.ctypes.data, into.nbytes)

    def _send(self, peer: socket.socket, extent: Extent, pull: Pull) -> None:
        """Send the bytes of a pull. The first pull of a connection makes its pair."""
        if pull.stop == pull.start:  # the reader does not receive then, either
            return
        pair = self._pair_names.get(peer)
        if not pair:
            pair = self._new_pair(peer)
            port = self._pairs.offer(pair, self.name, self.options.host, self.options.silence_s)
            write(peer, encode(port))
        deque(self._move(pair, extent.offset + pull.start, pull.stop - pull.start), 0)  # runs it to its end

    def _new_pair(self, connection: object) -> str:
        """Return the name of a new pair, which ends with the connection."""
        pair = self._pair_names[connection] = secrets.token_hex(8)
        # Not at the exit of the interpreter, when the compute process may be gone.
        finalize(connection, self._pairs.part, pair).atexit = False
        return pair

    def _move(self, pair: str, start: int, count: int) -> Generator[int, None, None]:
        """Move bytes in pieces, and yield the number of bytes so far.

        Both ends use the same pieces.
        """
        try:
            for done in range(0, count, MOVE_BYTES):
                stop = min(done + MOVE_BYTES, count)
                self._pairs.move(pair, start + done, start + stop)
                yield stop
        except BaseException:
            self._pairs.part(pair)  # now, because the other end may be waiting
            raise


class GlooEngine(PairsEngine):
    """Moves bytes from CPU to CPU by gloo."""

    name = "gloo"


class NcclEngine(PairsEngine):
    """Moves bytes from GPU to GPU by NCCL."""

    name = "nccl"

    @override
    def use(self, pairs: ProcessPairs, device: str) -> None:
        if device == "cpu":
            raise ConfigError("the transfer engine nccl requires a GPU, but this worker runs on the CPU: use tcp")
        super().use(pairs, device)


class _PairsLink(ChannelLink):
    """Receives the bytes that the owner's compute process sends."""

    def __init__(self, address: str, engine: PairsEngine) -> None:
        super().__init__(address, engine.options)
        self._engine = engine

    @override
    def receive_into(self, connection: OwnerClient, offset: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        if into.nbytes:
            for done in self._engine.receive(connection, self._address, into):
                yield done
                # With all bytes received, a closed connection does not matter any more.
                if done < into.nbytes and not connection.is_alive():
                    raise ConnectionAbortedError("the connection was closed")
