"""The worker's side of the control connection: concurrent calls, each with its own reply."""

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

DISCONNECT_REASONS: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "the connection was closed",
    zmq.EVENT_CONNECT_RETRIED: "nobody listens there",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it does not speak as we do: both need --keys of one `unfuse keys new`",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak as we do: both need --keys of one `unfuse keys new`",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know our keys: both need --keys of one `unfuse keys new`",
}
"""Events of the socket after which no reply can arrive, and the reason in each error."""

log = structlog.get_logger(__name__)


class Dealer:
    """A connection to one scheduler.

    It does not reconnect: after it is lost, all calls raise ConnectionError.
    """

    def __init__(self, address: str, trust: Trust = None) -> None:
        self.address = address
        keys, zmq_endpoint = keys_for(address, trust), endpoint(address)
        self._disconnect_reason = ""
        self._call_ids = itertools.count(1)
        self._pending_calls: dict[bytes, asyncio.Future[ToWorker]] = {}
        self._socket = open_socket(zmq.DEALER, zmq.Context.instance())
        if keys:
            keys.secure(self._socket, server=False)
        monitor = self._socket.get_monitor_socket(sum(DISCONNECT_REASONS))
        self._monitor = Mailbox(monitor, "watching the connection", self._handle_disconnect)
        self._socket.connect(zmq_endpoint)
        self._mailbox = Mailbox(self._socket, "receiving from the scheduler", self._receive)

    async def call(self, message: ToScheduler, timeout: float) -> ToWorker:
        """Send a message and return its answer. Raises TimeoutError after `timeout` seconds, and ConnectionError."""
        if self._disconnect_reason:
            raise ConnectionError(self._disconnect_reason)
        call_id = next(self._call_ids).to_bytes(8, "big")
        future = self._pending_calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                self._mailbox.send([call_id, encode(message)])
                answer: ToWorker = await future
                return answer
        except zmq.ZMQError as error:
            raise ConnectionError(f"nothing can be sent: {error.strerror}") from error
        finally:
            del self._pending_calls[call_id]

    async def close(self, linger: float = 0.0) -> None:
        """Close the connection; messages are still sent for up to `linger` seconds. Idempotent."""
        self._fail_pending_calls("we left")
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._mailbox.close(linger)

    def _fail_pending_calls(self, reason: str) -> None:
        self._disconnect_reason = self._disconnect_reason or reason
        for future in self._pending_calls.values():
            if not future.done():
                future.set_exception(ConnectionError(self._disconnect_reason))

    def _handle_disconnect(self, frames: list[bytes]) -> None:
        """Fail the pending calls of a lost connection.

        ZMQ would reconnect silently, and the replies to earlier messages would never arrive.
        """
        self._fail_pending_calls(DISCONNECT_REASONS[parse_monitor_message(frames)["event"]])

    def _receive(self, frames: list[bytes]) -> None:
        try:
            call_id, body = frames
            answer: ToWorker = decode(body, ToWorker)
        except (ValueError, ProtocolError) as error:
            log.warning("refused an answer", reason=str(error))
            return
        future = self._pending_calls.get(call_id)
        if future and not future.done():
            future.set_result(answer)
