"""The scheduler's end of the wire: answers every message of every worker, many at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
import zmq
import zmq.asyncio

from unfuse.core.codec import decode, encode
from unfuse.core.errors import ConfigError, ProtocolError, TransientError
from unfuse.core.messages import Refused, ToScheduler, ToWorker
from unfuse.wire.address import Trust, bind, keys_for, open_socket, unbind

MAX_PENDING = 64
"""Unanswered messages one worker may have; beyond it, it is told to slow down."""

MAX_NUMBER = 16
"""Bytes of what numbers a message, which the answer repeats."""

Answer = Callable[[bytes, ToScheduler], Awaitable[ToWorker | None]]
Undelivered = Callable[[bytes, ToWorker], Awaitable[None]]

log = structlog.get_logger(__name__)


class Router:
    """Receives workers' messages on one address.

    `answer(peer, message)` makes the reply, or None for a message that wants none; `undelivered(peer, reply)` hears
    of a reply whose receiver is gone, or does not read. `peer` is the connection's identity, given by this end: no
    other router's connection has it. Over TCP who does not hold the workers' key is not heard at all, unless `trust`
    is INSECURE; over a unix socket no other user is.
    """

    def __init__(self, address: str, answer: Answer, undelivered: Undelivered, trust: Trust = None) -> None:
        keys = keys_for(address, trust)
        self._context = zmq.asyncio.Context()  # of its own, as there can be one doorkeeper in each
        self._socket = open_socket(zmq.ROUTER, self._context)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._tasks: set[asyncio.Task[Any]] = set()
        try:
            if keys:
                keys.secure(self._socket, server=True)
                self._tasks.add(keys.keep_door(self._context))
            self.address = bind(self._socket, address)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._answer, self._undelivered = answer, undelivered
        self._pending: Counter[bytes] = Counter()
        self._reader = asyncio.create_task(self._read(), name="router")

    async def close(self) -> None:
        """Stop listening; messages being answered are dropped."""
        for task in (self._reader, *self._tasks):
            task.cancel()
        await asyncio.gather(self._reader, *self._tasks, return_exceptions=True)
        unbind(self.address)
        self._context.destroy(linger=0)

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3 or len(frames[1]) > MAX_NUMBER:
                continue
            peer, number, body = frames
            task = asyncio.create_task(self._serve(peer, number, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, peer: bytes, number: bytes, body: bytes) -> None:
        self._pending[peer] += 1
        try:
            reply = await self._reply(peer, body)
        finally:
            self._pending[peer] -= 1
            if not self._pending[peer]:
                del self._pending[peer]
        if reply is not None:
            await self._send(peer, number, reply)

    async def _reply(self, peer: bytes, body: bytes) -> ToWorker | None:
        if self._pending[peer] > MAX_PENDING:
            return Refused(f"more than {MAX_PENDING} messages wait for an answer")
        try:
            message: ToScheduler = decode(body, ToScheduler)
        except ProtocolError as error:
            log.warning("refused a message", reason=str(error))
            return Refused(str(error))
        try:
            return await self._answer(self._named(peer), message)
        except TransientError as error:
            log.warning("a message has to be said again", message=type(message).__name__, reason=str(error))
            return Refused(str(error))
        except Exception as error:  # one worker's message must not end the service of all
            log.exception("a message could not be answered", message=type(message).__name__)
            return Refused(f"the scheduler failed on this message: {error}")

    async def _send(self, peer: bytes, number: bytes, reply: ToWorker) -> None:
        """Send, or not at all: nobody waits for one who does not read."""
        try:
            await self._socket.send_multipart([peer, number, encode(reply)], flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            await self._undelivered(self._named(peer), reply)

    def _named(self, peer: bytes) -> bytes:
        return self.address.encode() + peer
