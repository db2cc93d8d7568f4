"""One compute process, as the worker's parent sees it: start, messages, log and end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import structlog

from unfuse.arena.limits import readable_bytes
from unfuse.core.codec import decode, encode
from unfuse.core.compute_options import compute_environment
from unfuse.core.errors import ConfigError, DeviceUnusable, ProtocolError
from unfuse.core.supervisor import Supervisor
from unfuse.worker import compute_messages as messages
from unfuse.worker.fork_server import Ended, Fork, Forked, NotForked
from unfuse.worker.records import read_record, relog

log = structlog.get_logger(__name__)

#: Seconds to wait for a forked process: the fork server may still be importing.
FORK_S = 60.0

#: Seconds to wait for the exit code of a forked process that has ended.
END_S = 1.0

#: The exit code of a forked process whose end is unknown. No process can have it.
UNKNOWN = 256

#: Most bytes of an answer of the fork server.
ANSWER_BYTES = 4096

#: Number of last characters of a process's standard error that are kept as evidence.
LOG_CHARS = 4000

#: Most bytes of a line of a process's standard error. A longer one is cut.
MAX_LINE = 1 << 16

#: Seconds to wait for the rest of a dead process's standard error, which its own children may keep open.
LOG_END_S = 1.0


class ForkedProcess:
    """A forked process, with the interface of `asyncio.subprocess.Process`.

    It is a child of the fork server, not of this process. So its end is observed through a pidfd, and the fork server
    sends its exit code.
    """

    def __init__(self, pid: int, pidfd: int, answers: socket.socket) -> None:
        self.pid = pid
        self._pidfd, self._answers = pidfd, answers

        #: The exit code; UNKNOWN if the fork server is gone. None while the process runs.
        self.returncode: int | None = None
        self._end = asyncio.create_task(self._watch())

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for the end of the process.

        Returns its exit code; below 0, it is the negative number of the signal that ended the process.
        """
        return await asyncio.shield(self._end)  # several callers wait, and each may be cancelled

    async def _watch(self) -> int:
        code = UNKNOWN
        try:
            await _wait_readable(self._pidfd)
            with suppress(TimeoutError, OSError, ProtocolError):
                async with asyncio.timeout(END_S):
                    await _wait_readable(self._answers.fileno())
                code = decode(self._answers.recv(ANSWER_BYTES), Ended).code
        finally:
            self.returncode = code
            os.close(self._pidfd)
            self._answers.close()
        return code


class StartedProcess(msgspec.Struct, frozen=True):
    """A compute process that was started."""

    #: The running process.
    child: asyncio.subprocess.Process | ForkedProcess

    #: This process's end of the socket pair.
    channel: socket.socket

    #: Descriptor of the pipe with the process's standard output and error.
    log: int


async def start_process(environment: Mapping[str, str], fork_server: socket.socket | None = None) -> StartedProcess:
    """Start a compute process with this environment.

    It is forked by the fork server, for a short cold start. Without a server, or if that fails, it is a new
    interpreter.
    """
    if fork_server is not None:
        try:
            return await _start(environment, fork_server)
        except (OSError, ProtocolError) as error:
            log.warning("starting a compute process without the fork server", reason=str(error) or "no answer")
    return await _start(environment)


async def _start(environment: Mapping[str, str], fork_server: socket.socket | None = None) -> StartedProcess:
    ours, theirs = socket.socketpair()
    read_end, write_end = os.pipe()
    try:
        if fork_server is not None:
            return StartedProcess(await _fork(fork_server, theirs.fileno(), write_end, environment), ours, read_end)
        command = sys.executable, "-X", "faulthandler", "-m", "unfuse.worker.compute", str(theirs.fileno())
        child = await asyncio.create_subprocess_exec(
            *command,
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            start_new_session=True,
        )
        return StartedProcess(child, ours, read_end)
    except BaseException:
        ours.close()
        os.close(read_end)
        raise
    finally:  # only the child may have these ends open, or its death would go unnoticed
        theirs.close()
        os.close(write_end)


async def _fork(requests: socket.socket, channel: int, log: int, environment: Mapping[str, str]) -> ForkedProcess:
    """Have the fork server fork a process.

    The process gets the descriptors `channel` and `log`. Raises OSError if it is not forked.
    """
    answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            descriptors_sent = [channel, log, theirs.fileno()]
            socket.send_fds(requests, [encode(Fork(dict(environment)))], descriptors_sent, socket.MSG_DONTWAIT)
        async with asyncio.timeout(FORK_S):
            await _wait_readable(answers.fileno())

        # A socket without data is at its end: the server died with its end of the pair.
        data, descriptors, _, _ = socket.recv_fds(answers, ANSWER_BYTES, 1)
        match decode(data, Forked | NotForked) if data else NotForked("the fork server ended"):
            case Forked(pid):
                return ForkedProcess(pid, descriptors[0], answers)
            case NotForked(reason):
                raise OSError(reason)
    except BaseException:
        answers.close()
        raise


async def _wait_readable(descriptor: int) -> None:
    """Wait until a descriptor has data or is at its end."""
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


class ComputeProcess:
    """A compute process. `start` may be called again when it has died."""

    def __init__(
        self, load: messages.LoadModels, background: Supervisor, fork_server: socket.socket | None = None
    ) -> None:
        self._background, self._fork_server = background, fork_server
        self._child: asyncio.subprocess.Process | ForkedProcess | None = None
        self._halted_s = 0.0

        #: What the process loads when it is started.
        self.load = load

        #: Seconds that loading took.
        self.load_s = 0.0

        #: Why the process was killed on purpose. Empty if it was not.
        self.killed_for = ""

        #: The last LOG_CHARS characters of its standard error.
        self.log = ""

    @property
    def pid(self) -> int | None:
        """The process id; None before the first start."""
        return self._child.pid if self._child else None

    async def start(self, rendezvous: str = "") -> messages.ModelsLoaded:
        """Start the process and wait until it has loaded its models.

        Ranks meet in the file `rendezvous`. Raises ConfigError if loading failed, and DeviceUnusable if its device did.
        The calling asyncio task must be one of this process's own, because its log context gets the number of the rank.
        """
        if self.load.ranks > 1:  # bound in this asyncio task and those it starts, so for all logs of the process
            structlog.contextvars.bind_contextvars(rank=self.load.rank)

        log.info("importing")
        environment = compute_environment(self.load.compute.threads, os.environ)
        process = await start_process(environment, self._fork_server)
        self._child, self._channel = process.child, await messages.ParentChannel.open(process.channel)
        self.killed_for = ""
        self.log = ""
        self._halted_s = 0.0
        self._logging = asyncio.create_task(self._read_log(process.log))

        await self._channel.send(msgspec.structs.replace(self.load, rendezvous=rendezvous))
        started_at = time.monotonic()
        while True:
            try:
                message = await self._channel.receive()
            except EOFError:
                raise ConfigError(f"the compute process ended while loading ({await self.last_words()})") from None
            match message:
                case messages.LoadingStage():
                    log.info("loading", **msgspec.structs.asdict(message))
                case messages.ComponentLoaded():
                    log.info("loaded", **msgspec.structs.asdict(message))
                case messages.LoadFailed():
                    await self._child.wait()
                    if message.by_device:
                        raise DeviceUnusable(message.message, self.load.rank)
                    raise ConfigError(message.message)
                case messages.ModelsLoaded():
                    self.load_s = time.monotonic() - started_at
                    return message

    async def send(self, message: messages.ToCompute) -> None:
        """Send a message. Raises nothing if the process is gone: `receive` notices it."""
        await self._channel.send(message)

    async def receive(self) -> messages.FromCompute:
        """Return the next message.

        Raises EOFError if the process is gone, and ProtocolError if the data is not a message.
        """
        return await self._channel.receive()

    def kill(self, reason: str) -> None:
        """Kill the process. `last_words` returns the first reason."""
        if self._child and self._child.returncode is None and not self.killed_for:
            self.killed_for = reason
            self._child.kill()

    async def close(self) -> None:
        """Close the channel and kill the process, if it was started."""
        if not self._child:
            return
        self._channel.close()
        if self._child.returncode is None:
            self._child.kill()
            await self.last_words()
        self._logging.cancel()

    def memory_excess(self, limit: int) -> str:
        """Return why to kill the process if its own memory exceeds `limit` bytes, else "".

        A limit of 0 means any memory is allowed.
        """
        used = _own_memory(self.pid) if limit and self.pid else 0
        if used <= limit:
            return ""
        used_text, limit_text = readable_bytes(used), readable_bytes(limit)
        return f"killed, because it took {used_text} of memory, and --memory-limit allows {limit_text}"

    def halted(self, since_s: float) -> str:
        """Return why to kill a rank that was stopped (SIGSTOP) too long, else "".

        That is if all checks of more than --collective-s seconds have found it stopped. The last check was `since_s`
        seconds ago. Exchanges have a time limit of their own, but other ranks may also wait for this one between
        exchanges. A process that is the only rank is never killed for this.
        """
        is_stopped = self.load.ranks > 1 and self.pid is not None and _is_stopped(self.pid)
        self._halted_s = self._halted_s + since_s if is_stopped else 0.0
        limit = self.load.compute.collective_s
        return f"killed, because it was stopped for {limit:g} s (--collective-s)" if self._halted_s > limit else ""

    async def last_words(self) -> str:
        """Wait for the end of the process and return how it ended.

        `log` is complete then.
        """
        assert self._child
        code = await self._child.wait()
        await asyncio.wait({self._logging}, timeout=LOG_END_S)
        if self.killed_for or code == UNKNOWN:
            return self.killed_for or "its exit status is unknown"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def _read_log(self, descriptor: int) -> None:
        """Log the records of the process's output, and copy its other lines to standard error.

        `log` gets the last characters of both.
        """
        reader, incomplete = asyncio.StreamReader(), b""
        pipe = os.fdopen(descriptor, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        with closing(transport):
            while data := await reader.read(1 << 16):
                *lines, incomplete = (incomplete + data).split(b"\n")
                if len(incomplete) > MAX_LINE:
                    lines, incomplete = [*lines, incomplete], b""
                for line in lines:
                    self._relay(line + b"\n")
            if incomplete:
                self._relay(incomplete)

    def _relay(self, line: bytes) -> None:
        """Log the record in a line, or copy the line to standard error."""
        text = line.decode(errors="replace")
        self.log = (self.log + text)[-LOG_CHARS:]
        with self._background.log_errors("relaying compute output"):  # reading must go on, or the process blocks
            if record := read_record(line):
                relog(record)
            else:
                sys.stderr.write(text)
                sys.stderr.flush()


def _own_memory(pid: int) -> int:
    """Return the anonymous resident bytes of a process: without mapped files and the arena."""
    with suppress(OSError):
        if match := re.search(r"^RssAnon:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
            return int(match[1]) * 1024
    return 0


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
