"""A ZMQ socket in an event loop, with a callback per message; sending never waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from unfuse.core.supervisor import Supervisor

PAUSE_S = 0.2  # seconds before a socket that could not be read is read again


class Mailbox:
    """Calls `on_message` for every message of a socket.

    It handles one message per turn of the running loop, so that other callbacks run in between. Only the mailbox may
    read or close the socket. An error is logged with the name `action`, and the next message is received.
    """

    def __init__(self, socket: zmq.Socket[bytes], action: str, on_message: Callable[[list[bytes]], object]) -> None:
        self._socket = socket
        self._action, self._on_message = action, on_message
        self._background = Supervisor()
        self._loop = asyncio.get_running_loop()
        self._scheduled_read: asyncio.Handle | None = None
        self._fd = int(socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._schedule_read)
        self._schedule_read()

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message. Raises ZMQError if it cannot be sent now."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        finally:
            self._schedule_read()  # sending may have reset the edge of ZMQ's file descriptor

    def close(self, linger: float = 0.0) -> None:
        """Close the socket; queued messages are still sent for up to `linger` seconds. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            if self._scheduled_read:
                self._scheduled_read.cancel()
            self._socket.close(linger=round(linger * 1000))

    def _schedule_read(self) -> None:
        """Schedule a read if a message is available.

        ZMQ's file descriptor is edge-triggered: it becomes readable once per change.
        """
        if self._scheduled_read is None and int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._scheduled_read = self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._scheduled_read = None
        try:
            message = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        except Exception as error:  # for example, no memory: a later read can succeed
            self._background.log(self._action, error)
            self._scheduled_read = self._loop.call_later(PAUSE_S, self._read)
            return
        with self._background.log_errors(self._action):
            self._on_message(message)
        if not self._socket.closed:
            self._schedule_read()
