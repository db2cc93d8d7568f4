"""How a compute process begins: as a process of its own, or forked from one that has imported what it needs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress

import msgspec
import structlog
from typing_extensions import override

from unfuse.core.codec import decode, encode
from unfuse.core.errors import ProtocolError
from unfuse.worker.fork_server import Ended, Fork, Forked, NotForked

FORK_S = 60.0
"""Seconds to wait for a forked process: the forking one may still be importing."""

END_S = 1.0
"""Seconds to wait for how a forked process ended, once it has."""

ANSWER_BYTES = 4096
"""The most bytes of an answer of the fork server."""

log = structlog.get_logger(__name__)


class Child(ABC):
    """A process that was started here, until and after its end."""

    pid: int

    @property
    @abstractmethod
    def runs(self) -> bool:
        """Whether it has not ended, as far as is known here."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it, unless it has ended."""

    @abstractmethod
    async def wait(self) -> int | None:
        """Wait for its end. Returns its exit code, below 0 the signal that ended it; None where nobody knows."""


class Begun(msgspec.Struct, frozen=True):
    """A compute process that was started: our end of its socket pair, and the descriptor of what it writes."""

    child: Child
    channel: socket.socket
    log: int


async def begin(environment: Mapping[str, str], fork_server: socket.socket | None = None) -> Begun:
    """Start a compute process with this environment: forked if there is a fork server that can, else on its own."""
    if fork_server is not None:
        try:
            return await _begin(environment, fork_server)
        except (OSError, ProtocolError) as error:
            log.warning("starting a compute process that imports by itself", reason=str(error) or "no answer")
    return await _begin(environment)


async def _begin(environment: Mapping[str, str], fork_server: socket.socket | None = None) -> Begun:
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    try:
        if fork_server is None:
            child: Child = await _spawned(theirs.fileno(), writing, environment)
        else:
            child = await _forked(fork_server, theirs.fileno(), writing, environment)
    except BaseException:
        ours.close()
        os.close(reading)
        raise
    finally:
        theirs.close()
        os.close(writing)
    return Begun(child, ours, reading)


class _Spawned(Child):
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self.pid = process, process.pid

    @property
    @override
    def runs(self) -> bool:
        return self._process.returncode is None

    @override
    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    @override
    async def wait(self) -> int:
        return await self._process.wait()


async def _spawned(channel: int, log: int, environment: Mapping[str, str]) -> Child:
    command = sys.executable, "-X", "faulthandler", "-m", "unfuse.worker.compute", str(channel)
    return _Spawned(
        await asyncio.create_subprocess_exec(
            *command,
            pass_fds=[channel],
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )  # fmt: skip
    )


class _Forked(Child):
    """Known by its pidfd, since it is no child of ours; the fork server says how it ended, while that lives."""

    def __init__(self, pid: int, pidfd: int, answers: socket.socket) -> None:
        self.pid, self._pidfd, self._answers = pid, pidfd, answers
        self._end = asyncio.create_task(self._watch())

    @property
    @override
    def runs(self) -> bool:
        return not self._end.done()

    @override
    def kill(self) -> None:
        if self.runs:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    @override
    async def wait(self) -> int | None:
        return await asyncio.shield(self._end)

    async def _watch(self) -> int | None:
        try:
            await _readable(self._pidfd)
            with suppress(TimeoutError, OSError, ProtocolError):
                async with asyncio.timeout(END_S):
                    await _readable(self._answers.fileno())
                return decode(self._answers.recv(ANSWER_BYTES), Ended).code
            return None
        finally:
            os.close(self._pidfd)
            self._answers.close()


async def _forked(requests: socket.socket, channel: int, log: int, environment: Mapping[str, str]) -> Child:
    """Raises OSError where no process is forked."""
    answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            handed = [channel, log, theirs.fileno()]
            socket.send_fds(requests, [encode(Fork(dict(environment)))], handed, socket.MSG_DONTWAIT)
        async with asyncio.timeout(FORK_S):
            await _readable(answers.fileno())
        data, descriptors, _, _ = socket.recv_fds(answers, ANSWER_BYTES, 1)
        match decode(data, Forked | NotForked) if data else NotForked("the fork server ended"):
            case Forked(pid):
                return _Forked(pid, descriptors[0], answers)
            case NotForked(reason):
                raise OSError(reason)
    except BaseException:
        answers.close()
        raise


async def _readable(descriptor: int) -> None:
    """Wait until there is something to read, or the end."""
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
