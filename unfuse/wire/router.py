"""The scheduler's side of the control connection: it receives messages of workers, and replies concurrently."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog
import zmq

from unfuse.core.codec import decode, encode
from unfuse.core.errors import ConfigError, ProtocolError, TransientError
from unfuse.core.messages import Rejected, ToScheduler, ToWorker
from unfuse.core.supervisor import LogThrottle
from unfuse.wire.address import Trust, keys_for, open_socket, unix_path
from unfuse.wire.listener import BoundedListener, listen
from unfuse.wire.mailbox import Mailbox
from unfuse.wire.unix_socket import private_socket

MAX_PENDING = 64  # the most unanswered messages of one worker; further ones are refused
MAX_CALL_ID_BYTES = 16  # the most bytes of a call id, which the reply repeats
BACKLOG = 1024  # connections from the listener that wait to be accepted; above its bound of handshakes

MessageCallback = Callable[[bytes, ToScheduler], Awaitable[ToWorker | None]]
UndeliveredCallback = Callable[[bytes, ToWorker], Awaitable[None]]

log = structlog.get_logger(__name__)


class Router:
    """Receives workers' messages on one address.

    `handle_message(peer, message)` returns the reply, or None for a message without one.
    `handle_undelivered(peer, reply)` is called with a reply whose receiver is gone, or does not read.
    `peer` identifies the connection, among those of all routers. Over TCP, only peers with the workers' key are
    accepted, unless `trust` is INSECURE; on a unix socket, only this user.

    Connections come in through a BoundedListener. Behind it, ZMQ listens on a unix socket in `folder`, which only this
    user may enter; by default that of a unix address, else a temporary one.
    """

    def __init__(
        self,
        address: str,
        handle_message: MessageCallback,
        handle_undelivered: UndeliveredCallback,
        trust: Trust = None,
        folder: Path | None = None,
    ) -> None:
        keys = keys_for(address, trust)
        self._handle_message, self._handle_undelivered = handle_message, handle_undelivered
        self._context = zmq.Context[zmq.Socket[bytes]]()  # not shared, because a context has only one ZAP handler
        self._socket = open_socket(zmq.ROUTER, self._context)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._authenticator: Mailbox | None = None
        self._pending: Counter[bytes] = Counter()
        self._throttle = LogThrottle()
        if path := unix_path(address):
            folder = path.parent
        self._temporary_folder = None if folder else tempfile.mkdtemp(prefix="unfuse-")
        self._backend_path = private_socket(folder or str(self._temporary_folder))
        try:
            listener, self.address = listen(address)
            if keys:
                keys.secure(self._socket, server=True)
                self._authenticator = keys.start_authenticator(self._context)
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            self._socket.bind(f"ipc://{self._backend_path}")
        except (ConfigError, zmq.ZMQError) as error:
            self._release()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"cannot listen on {self._backend_path}: {error.strerror}") from error
        self._listener = BoundedListener(listener, self._backend_path)
        self._mailbox = Mailbox(self._socket, "receiving from workers", self._receive)

    async def close(self) -> None:
        """Stop listening. Messages without an answer are dropped."""
        self._mailbox.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()
        self._release()

    def _release(self) -> None:
        if self._authenticator:
            self._authenticator.close()
        self._context.destroy(linger=0)
        self._backend_path.unlink(missing_ok=True)
        if self._temporary_folder:
            shutil.rmtree(self._temporary_folder, ignore_errors=True)

    def _receive(self, frames: list[bytes]) -> None:
        """Start a task that handles a message; other numbers of frames are ignored."""
        match frames:
            case [peer, call_id, body] if len(call_id) <= MAX_CALL_ID_BYTES:
                task = asyncio.create_task(self._handle(peer, call_id, body))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _handle(self, peer: bytes, call_id: bytes, body: bytes) -> None:
        try:
            if self._pending[peer] >= MAX_PENDING:
                raise ProtocolError(f"more than {MAX_PENDING} messages wait for an answer")
            message: ToScheduler = decode(body, ToScheduler)
        except ProtocolError as error:
            if times := self._throttle.count_if_due("refused"):
                log.warning("refused a message", reason=str(error), times=times)
            await self._send(peer, call_id, Rejected(str(error)))
            return
        self._pending[peer] += 1
        try:
            reply = await self._reply(peer, message)
        finally:
            self._pending[peer] -= 1
            if not self._pending[peer]:
                del self._pending[peer]
        if reply is not None:
            await self._send(peer, call_id, reply)

    async def _reply(self, peer: bytes, message: ToScheduler) -> ToWorker | None:
        try:
            return await self._handle_message(self._peer_id(peer), message)
        except TransientError as error:
            if times := self._throttle.count_if_due("again"):
                reason, name = str(error), type(message).__name__
                log.warning("a message failed, the worker repeats it", message=name, reason=reason, times=times)
            return Rejected(str(error))
        except Exception as error:  # one worker's message must not end the service of all
            if times := self._throttle.count_if_due(type(error).__name__):
                log.exception("a message could not be answered", message=type(message).__name__, times=times)
            return Rejected(f"the scheduler failed on this message: {error}")

    async def _send(self, peer: bytes, call_id: bytes, reply: ToWorker) -> None:
        """Send without waiting; a reply that cannot be sent is undelivered."""
        try:
            self._mailbox.send([peer, call_id, encode(reply)])
        except zmq.ZMQError:
            await self._handle_undelivered(self._peer_id(peer), reply)

    def _peer_id(self, peer: bytes) -> bytes:
        return self.address.encode() + peer
