"""The fork server as its starter sees it. It may begin before anything else is known: its imports take longest."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from unfuse.core.compute import compute_environment


class ForkServerProcess:
    """A process of it, and the descriptor from which what it writes is read, which the caller closes."""

    def __init__(self, asked: int, models: Sequence[str]) -> None:
        self.output, writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", "unfuse.worker.fork_server", str(asked), *models],
                pass_fds=[asked], stdin=subprocess.DEVNULL, stdout=writing, stderr=writing,
                env=compute_environment(1, os.environ), start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(self.output)
            raise
        finally:
            os.close(writing)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The code with which it ended, below 0 the signal; None while it runs."""
        return self._process.poll()

    def send_signal(self, sent: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(sent)

    def kill(self) -> None:
        """End it, and wait until it has; nothing that it writes is read any more."""
        os.close(self.output)
        self._process.kill()
        self._process.wait()

    async def wait(self) -> int:
        """Wait for its end; returns the code."""
        if self.returncode is None:
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            pidfd = os.pidfd_open(self.pid)
            loop.add_reader(pidfd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)
        return self._process.wait()


class Forks:
    """The socket by which workers on CPUs ask for compute processes that have imported what these models need.

    The first fork server begins at once. It ends when nobody holds the socket any more, at the latest when `close` and
    those who hold `asks` have closed it. A launcher takes it, and starts it again when it ends.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self._models = models
        self._asks, self._asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._begun: ForkServerProcess | None = self._begin()

    @property
    def asks(self) -> int:
        """The descriptor that workers are handed."""
        return self._asks.fileno()

    def server(self) -> ForkServerProcess:
        """The process that began first; after that a new one each time."""
        begun, self._begun = self._begun or self._begin(), None
        return begun

    def close(self) -> None:
        """Close the socket, and end a process that nobody has taken. Idempotent."""
        self._asks.close()
        self._asked.close()
        if begun := self._begun:
            self._begun = None
            begun.kill()

    def _begin(self) -> ForkServerProcess:
        return ForkServerProcess(self._asked.fileno(), self._models)


class InheritedForks:
    """The socket to a fork server that the parent process owns and may share among several servers.

    This process neither starts, restarts nor stops that fork server.
    """

    def __init__(self, asks: int) -> None:
        self._asks = socket.socket(fileno=asks)

    @property
    def asks(self) -> int:
        """The descriptor that workers are handed."""
        return self._asks.fileno()

    def copy(self) -> InheritedForks:
        """Return the same socket with a descriptor of its own."""
        return InheritedForks(os.dup(self.asks))

    def close(self) -> None:
        """Close this descriptor of the socket. Idempotent."""
        self._asks.close()
