"""A worker's end of the wire: many calls in flight over one connection, each with its own answer."""

from __future__ import annotations

import asyncio
import itertools

import structlog
import zmq

from unfuse.core.codec import decode, encode
from unfuse.core.errors import ProtocolError
from unfuse.core.messages import ToScheduler, ToWorker
from unfuse.wire.address import check, open_socket

log = structlog.get_logger(__name__)


class Dealer:
    """A connection to one scheduler. It reconnects by itself; an answer that never comes is the caller's timeout."""

    def __init__(self, address: str) -> None:
        check(address)
        self._socket = open_socket(zmq.DEALER)
        self._socket.connect(address)
        self._numbers = itertools.count(1)
        self._waiting: dict[bytes, asyncio.Future[ToWorker]] = {}
        self._reader = asyncio.create_task(self._read(), name="dealer")

    async def call(self, message: ToScheduler, timeout: float) -> ToWorker:
        """Send a message and return its answer. Raises TimeoutError after `timeout` seconds."""
        number = next(self._numbers).to_bytes(8, "big")
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await self._socket.send_multipart([number, encode(message)])
                answer: ToWorker = await future
                return answer
        finally:
            del self._waiting[number]

    async def tell(self, message: ToScheduler) -> None:
        """Send a message that has no answer."""
        await self._socket.send_multipart([next(self._numbers).to_bytes(8, "big"), encode(message)])

    async def close(self, linger: float = 0.0) -> None:
        """Drop the connection; what was told goes out for up to `linger` seconds."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close(linger=round(linger * 1000))

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                number, body = frames
                answer: ToWorker = decode(body, ToWorker)
            except (ValueError, ProtocolError) as error:
                log.warning("refused an answer", reason=str(error))
                continue
            future = self._waiting.get(number)
            if future and not future.done():
                future.set_result(answer)
