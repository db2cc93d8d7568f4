"""A worker's end of the wire: many calls at once over one connection, each with its own answer."""

from __future__ import annotations

import asyncio
import itertools

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from unfuse.core.codec import decode, encode
from unfuse.core.errors import ProtocolError
from unfuse.core.messages import ToScheduler, ToWorker
from unfuse.wire.address import Trust, endpoint, keys_for, open_socket
from unfuse.wire.mailbox import Mailbox

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
        self._socket = open_socket(zmq.DEALER, zmq.Context.instance())
        if keys:
            keys.secure(self._socket, server=False)
        monitor = self._socket.get_monitor_socket(sum(LOST))
        self._monitor = Mailbox(monitor, "watching the connection", self._notice)
        self._socket.connect(there)
        self._mailbox = Mailbox(self._socket, "receiving from the scheduler", self._hear)

    async def call(self, message: ToScheduler, timeout: float) -> ToWorker:
        """Send a message and return its answer. Raises TimeoutError after `timeout` seconds, and ConnectionError."""
        if self._lost:
            raise ConnectionError(self._lost)
        number = next(self._numbers).to_bytes(8, "big")
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                self._mailbox.send([number, encode(message)])
                answer: ToWorker = await future
                return answer
        except zmq.ZMQError as error:
            raise ConnectionError(f"nothing can be sent: {error.strerror}") from error
        finally:
            del self._waiting[number]

    async def close(self, linger: float = 0.0) -> None:
        """Close the connection; messages are still sent for up to `linger` seconds. Idempotent."""
        self._lose("we left")
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._mailbox.close(linger)

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError(self._lost))

    def _notice(self, frames: list[bytes]) -> None:
        """Notice a lost connection. ZMQ would connect again silently, and answers to earlier messages never come."""
        self._lose(LOST[parse_monitor_message(frames)["event"]])

    def _hear(self, frames: list[bytes]) -> None:
        try:
            number, body = frames
            answer: ToWorker = decode(body, ToWorker)
        except (ValueError, ProtocolError) as error:
            log.warning("refused an answer", reason=str(error))
            return
        future = self._waiting.get(number)
        if future and not future.done():
            future.set_result(answer)
