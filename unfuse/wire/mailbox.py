"""A ZMQ socket in an event loop: what comes is handed over at once, and sending never waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from unfuse.core.supervisor import Supervisor

PAUSE_S = 0.2  # seconds before a socket that could not be read is read again


class Mailbox:
    """Hands every message of a socket to `hear`, one a turn of the running loop, so that others have theirs between.

    From now on the socket is read and closed here alone. Errors are logged as those of `what`, and it goes on.
    """

    def __init__(self, socket: zmq.Socket[bytes], what: str, hear: Callable[[list[bytes]], object]) -> None:
        self._socket, self._what, self._hear = socket, what, hear
        self._background = Supervisor()
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Handle | None = None
        self._fd = int(socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._look)
        self._look()

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message. Raises ZMQError if it cannot be sent now."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        finally:
            self._look()  # sending may have taken the word that something is there to be read

    def close(self, linger: float = 0.0) -> None:
        """Close the socket; what was sent goes on for up to `linger` seconds. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            if self._next:
                self._next.cancel()
            self._socket.close(linger=round(linger * 1000))

    def _look(self) -> None:
        """Read in a turn of its own if something is there: its descriptor tells of a change, and only once."""
        if self._next is None and int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._next = self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._next = None
        try:
            message = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        except Exception as error:  # such as no memory, which there may be again
            self._background.log(self._what, error)
            self._next = self._loop.call_later(PAUSE_S, self._read)
            return
        with self._background.log_errors(self._what):
            self._hear(message)
        if not self._socket.closed:
            self._look()
