"""The scheduler's end of the wire: answers every message of every worker, many at once."""

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
import zmq.asyncio

from unfuse.core.codec import decode, encode
from unfuse.core.errors import ConfigError, ProtocolError, TransientError
from unfuse.core.log_throttle import LogThrottle
from unfuse.core.messages import Refused, ToScheduler, ToWorker
from unfuse.supervision.supervisor import Supervisor
from unfuse.wire.address import Trust, keys_for, open_socket, unix_path
from unfuse.wire.listener import BoundedListener, listen
from unfuse.wire.unix_socket import private_socket

MAX_PENDING = 64
"""Unanswered messages one worker may have; beyond it, it is told to slow down."""

MAX_NUMBER = 16
"""Bytes of what numbers a message, which the answer repeats."""

BACKLOG = 1024
"""Connections that may be on their way from the listener; it has fewer that do not speak yet."""

Answer = Callable[[bytes, ToScheduler], Awaitable[ToWorker | None]]
Undelivered = Callable[[bytes, ToWorker], Awaitable[None]]

log = structlog.get_logger(__name__)


class Router:
    """Receives workers' messages on one address.

    `answer(peer, message)` makes the reply, or None for a message that wants none; `undelivered(peer, reply)` hears
    of a reply whose receiver is gone, or does not read. `peer` is the connection's identity, given by this end: no
    other router's connection has it. Over TCP who does not hold the workers' key is not heard at all, unless `trust`
    is INSECURE; over a unix socket no other user is.

    Connections come in through a BoundedListener; behind it ZMQ listens on a socket in `folder`, which must be this
    user's alone: the one of the unix socket, or a temporary one, if none is given.
    """

    def __init__(
        self,
        address: str,
        answer: Answer,
        undelivered: Undelivered,
        trust: Trust = None,
        folder: Path | None = None,
    ) -> None:
        keys = keys_for(address, trust)
        self._answer, self._undelivered = answer, undelivered
        self._context = zmq.asyncio.Context()  # of its own, as there can be one doorkeeper in each
        self._socket = open_socket(zmq.ROUTER, self._context)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pending: Counter[bytes] = Counter()
        self._throttle = LogThrottle()
        if path := unix_path(address):
            folder = path.parent
        self._made = None if folder else tempfile.mkdtemp(prefix="unfuse-")
        self._inside = private_socket(folder or str(self._made))
        try:
            listener, self.address = listen(address)
            if keys:
                keys.secure(self._socket, server=True)
                self._tasks.add(keys.authenticate(self._context))
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            self._socket.bind(f"ipc://{self._inside}")
        except (ConfigError, zmq.ZMQError) as error:
            self._leave()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"cannot listen on {self._inside}: {error.strerror}") from error
        self._door = BoundedListener(listener, self._inside)
        self._reader = Supervisor().forever("receiving from workers", self._read)

    async def close(self) -> None:
        """Stop listening; messages being answered are dropped."""
        for task in (self._reader, *self._tasks):
            task.cancel()
        await asyncio.gather(self._reader, *self._tasks, return_exceptions=True)
        self._door.close()
        self._leave()

    def _leave(self) -> None:
        self._context.destroy(linger=0)
        self._inside.unlink(missing_ok=True)
        if self._made:
            shutil.rmtree(self._made, ignore_errors=True)

    async def _read(self) -> None:
        match await self._socket.recv_multipart():
            case [peer, number, body] if len(number) <= MAX_NUMBER:
                await self._take(peer, number, body)
        await asyncio.sleep(0)  # others have a turn after each message: the gateway shares this loop

    async def _take(self, peer: bytes, number: bytes, body: bytes) -> None:
        """Have a message answered beside those that wait; what is none is refused on the spot."""
        try:
            if self._pending[peer] >= MAX_PENDING:
                raise ProtocolError(f"more than {MAX_PENDING} messages wait for an answer")
            message: ToScheduler = decode(body, ToScheduler)
        except ProtocolError as error:
            if times := self._throttle.count_if_due("refused"):
                log.warning("refused a message", reason=str(error), times=times)
            await self._send(peer, number, Refused(str(error)))
            return
        self._pending[peer] += 1
        task = asyncio.create_task(self._serve(peer, number, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, peer: bytes, number: bytes, message: ToScheduler) -> None:
        try:
            reply = await self._reply(peer, message)
        finally:
            self._pending[peer] -= 1
            if not self._pending[peer]:
                del self._pending[peer]
        if reply is not None:
            await self._send(peer, number, reply)

    async def _reply(self, peer: bytes, message: ToScheduler) -> ToWorker | None:
        try:
            return await self._answer(self._named(peer), message)
        except TransientError as error:
            if times := self._throttle.count_if_due("again"):
                reason, name = str(error), type(message).__name__
                log.warning("a message has to be said again", message=name, reason=reason, times=times)
            return Refused(str(error))
        except Exception as error:  # one worker's message must not end the service of all
            if times := self._throttle.count_if_due(type(error).__name__):
                log.exception("a message could not be answered", message=type(message).__name__, times=times)
            return Refused(f"the scheduler failed on this message: {error}")

    async def _send(self, peer: bytes, number: bytes, reply: ToWorker) -> None:
        """Send, or not at all: nobody waits for one who does not read."""
        try:
            await self._socket.send_multipart([peer, number, encode(reply)], flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            await self._undelivered(self._named(peer), reply)

    def _named(self, peer: bytes) -> bytes:
        return self.address.encode() + peer
