"""A worker's end of the wire: many calls at once over one connection, each with its own answer."""

from __future__ import annotations

import asyncio
import itertools

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from unfuse.core.codec import decode, encode
from unfuse.core.errors import ProtocolError
from unfuse.core.messages import ToScheduler, ToWorker
from unfuse.supervision.supervisor import Supervisor
from unfuse.wire.address import Trust, endpoint, keys_for, open_socket

LOST: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "the connection was closed",
    zmq.EVENT_CONNECT_RETRIED: "nobody listens there",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it does not speak as we do: both need --keys of one `unfuse keys new`",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak as we do: both need --keys of one `unfuse keys new`",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know our keys: both need --keys of one `unfuse keys new`",
}
"""Events after which no answer will come, and what they mean."""

log = structlog.get_logger(__name__)


class Dealer:
    """A connection to one scheduler. When it is lost it stays lost, and all calls raise ConnectionError."""

    def __init__(self, address: str, trust: Trust = None) -> None:
        keys, there, self.address = keys_for(address, trust), endpoint(address), address
        self._lost = ""
        self._numbers = itertools.count(1)
        self._waiting: dict[bytes, asyncio.Future[ToWorker]] = {}
        self._socket = open_socket(zmq.DEALER)
        if keys:
            keys.secure(self._socket, server=False)
        self._monitor = self._socket.get_monitor_socket(sum(LOST))
        self._socket.connect(there)
        background = Supervisor()
        self._tasks = [
            background.forever("receiving from the scheduler", self._read),
            background.forever("watching the connection", self._watch),
        ]

    async def call(self, message: ToScheduler, timeout: float) -> ToWorker:
        """Send a message and return its answer. Raises TimeoutError after `timeout` seconds, and ConnectionError."""
        if self._lost:
            raise ConnectionError(self._lost)
        number = next(self._numbers).to_bytes(8, "big")
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await self._socket.send_multipart([number, encode(message)])
                answer: ToWorker = await future
                return answer
        finally:
            del self._waiting[number]

    async def close(self, linger: float = 0.0) -> None:
        """Close the connection; messages are still sent for up to `linger` seconds. Idempotent."""
        self._lose("we left")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close(linger=round(linger * 1000))

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError(self._lost))

    async def _watch(self) -> None:
        """Notice a lost connection. ZMQ would connect again silently, and answers to earlier messages never come."""
        event = await recv_monitor_message(self._monitor)
        self._lose(LOST[event["event"]])

    async def _read(self) -> None:
        frames = await self._socket.recv_multipart()
        try:
            number, body = frames
            answer: ToWorker = decode(body, ToWorker)
        except (ValueError, ProtocolError) as error:
            log.warning("refused an answer", reason=str(error))
            return
        future = self._waiting.get(number)
        if future and not future.done():
            future.set_result(answer)
