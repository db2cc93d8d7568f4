"""One compute process, as the worker's parent sees it: its start, its messages, its log and its end."""

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
from unfuse.core.errors import ConfigError, ProtocolError
from unfuse.core.supervisor import Supervisor
from unfuse.worker import compute_messages as messages
from unfuse.worker.fork_server import Ended, Fork, Forked, NotForked
from unfuse.worker.records import read_record, relog

log = structlog.get_logger(__name__)

FORK_S = 60.0
"""Seconds to wait for a forked process: the forking one may still be importing."""

END_S = 1.0
"""Seconds to wait for how a forked process ended, once it has."""

UNKNOWN = 256
"""The exit code of a forked process whose end is unknown; no process can have it."""
ANSWER_BYTES = 4096
"""The most bytes of an answer of the fork server."""

LOG_CHARS = 4000  # the number of last characters of a process's standard error that are kept as evidence

MAX_LINE = 1 << 16  # the most bytes of a line of its standard error; a longer one is cut

LOG_END_S = 1.0  # seconds to wait for the rest of a dead process's standard error, which its own children may hold open


class ForkedProcess:
    """A forked process, as `asyncio.subprocess.Process` has one that was started here.

    It is known by its pidfd, since it is no child of ours; the fork server says how it ended, while that lives.
    """

    def __init__(self, pid: int, pidfd: int, answers: socket.socket) -> None:
        self.pid, self._pidfd, self._answers = pid, pidfd, answers
        self.returncode: int | None = None  # UNKNOWN where nobody knows how it ended
        self._end = asyncio.create_task(self._watch())

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for its end. Returns its exit code, below 0 the signal that ended it."""
        return await asyncio.shield(self._end)

    async def _watch(self) -> int:
        code = UNKNOWN
        try:
            await _readable(self._pidfd)
            with suppress(TimeoutError, OSError, ProtocolError):
                async with asyncio.timeout(END_S):
                    await _readable(self._answers.fileno())
                code = decode(self._answers.recv(ANSWER_BYTES), Ended).code
        finally:
            self.returncode = code
            os.close(self._pidfd)
            self._answers.close()
        return code


class StartedProcess(msgspec.Struct, frozen=True):
    """A compute process that was started: our end of its socket pair, and the descriptor of what it writes."""

    child: asyncio.subprocess.Process | ForkedProcess
    channel: socket.socket
    log: int


async def begin(environment: Mapping[str, str], fork_server: socket.socket | None = None) -> StartedProcess:
    """Start a compute process with this environment: forked if there is a fork server that can, else on its own."""
    if fork_server is not None:
        try:
            return await _begin(environment, fork_server)
        except (OSError, ProtocolError) as error:
            log.warning("starting a compute process that imports by itself", reason=str(error) or "no answer")
    return await _begin(environment)


async def _begin(environment: Mapping[str, str], fork_server: socket.socket | None = None) -> StartedProcess:
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    try:
        if fork_server is not None:
            return StartedProcess(await _forked(fork_server, theirs.fileno(), writing, environment), ours, reading)
        command = sys.executable, "-X", "faulthandler", "-m", "unfuse.worker.compute", str(theirs.fileno())
        child = await asyncio.create_subprocess_exec(
            *command, pass_fds=[theirs.fileno()], env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=writing,
            stderr=writing, start_new_session=True,
        )  # fmt: skip
        return StartedProcess(child, ours, reading)
    except BaseException:
        ours.close()
        os.close(reading)
        raise
    finally:
        theirs.close()
        os.close(writing)


async def _forked(requests: socket.socket, channel: int, log: int, environment: Mapping[str, str]) -> ForkedProcess:
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
                return ForkedProcess(pid, descriptors[0], answers)
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


class ComputeProcess:
    """A compute process; `start` may be called again when it has died."""

    def __init__(
        self, load: messages.LoadModels, background: Supervisor, fork_server: socket.socket | None = None
    ) -> None:
        self.load, self._background, self._fork_server = load, background, fork_server
        self._child: asyncio.subprocess.Process | ForkedProcess | None = None
        self._halted_s = 0.0
        self.load_s = 0.0  # seconds that it took to load
        self.killed_for = ""  # why it was killed, if it was killed on purpose
        self.log = ""  # the end of what it wrote to its standard error

    @property
    def pid(self) -> int | None:
        """Its process id; None before the first start."""
        return self._child.pid if self._child else None

    async def start(self, rendezvous: str = "") -> messages.ModelsLoaded:
        """Start the process and have it load, in a task of its own; ranks meet in that file. Raises ConfigError."""
        if self.load.ranks > 1:  # in this task, and in those that it begins, so for all that is logged of the process
            structlog.contextvars.bind_contextvars(rank=self.load.rank)
        log.info("importing")
        environment = compute_environment(self.load.compute.threads, os.environ)
        begun = await begin(environment, self._fork_server)
        self._child, self._channel = begun.child, await messages.ParentChannel.open(begun.channel)
        self.killed_for, self.log, self._halted_s = "", "", 0.0
        self._logging = asyncio.create_task(self._keep_log(begun.log))
        await self._channel.send(msgspec.structs.replace(self.load, rendezvous=rendezvous))
        began = time.monotonic()
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
                    raise ConfigError(message.message)
                case messages.ModelsLoaded():
                    self.load_s = time.monotonic() - began
                    return message

    async def send(self, message: messages.ToCompute) -> None:
        """Send a message. Raises nothing if the process is gone: `receive` notices it."""
        await self._channel.send(message)

    async def receive(self) -> messages.FromCompute:
        """The next message. Raises EOFError if the process is gone, ProtocolError for what is not a message."""
        return await self._channel.receive()

    def kill(self, reason: str) -> None:
        """Kill the process; `last_words` gives the first reason."""
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

    def excess(self, limit: int) -> str:
        """The reason to kill it if its own memory exceeds `limit` bytes (0: any), else ""."""
        taken = _own_memory(self.pid) if limit and self.pid else 0
        if taken <= limit:
            return ""
        took, most = readable_bytes(taken), readable_bytes(limit)
        return f"killed, because it took {took} of memory, and --memory-limit allows {most}"

    def halted(self, since_s: float) -> str:
        """The reason to kill it if it is a rank that was stopped at each look for longer than ranks wait, else "".

        The last look was `since_s` seconds ago. Others may wait for it outside of exchanges, which have a limit.
        """
        is_stopped = self.load.ranks > 1 and self.pid is not None and _is_stopped(self.pid)
        self._halted_s = self._halted_s + since_s if is_stopped else 0.0
        limit = self.load.compute.collective_s
        return f"killed, because it was stopped for {limit:g} s (--collective-s)" if self._halted_s > limit else ""

    async def last_words(self) -> str:
        """Wait for its end, and say how it ended; `log` has the end of its standard error then."""
        assert self._child
        code = await self._child.wait()
        await asyncio.wait({self._logging}, timeout=LOG_END_S)
        if self.killed_for or code == UNKNOWN:
            return self.killed_for or "it ended, and how is not known"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def _keep_log(self, descriptor: int) -> None:
        """Read what it writes: log the records, write the rest to our standard error, and keep the end in `log`."""
        reader, rest = asyncio.StreamReader(), b""
        pipe = os.fdopen(descriptor, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        with closing(transport):
            while data := await reader.read(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_LINE:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._pass_on(line + b"\n")
            if rest:
                self._pass_on(rest)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self.log = (self.log + text)[-LOG_CHARS:]
        with self._background.besides("passing on what compute wrote"):  # reading must go on, or the process blocks
            if record := read_record(line):
                relog(record)
            else:
                sys.stderr.write(text)
                sys.stderr.flush()


def _own_memory(pid: int) -> int:
    """Anonymous resident bytes of the process: neither files nor the arena count."""
    with suppress(OSError):
        if found := re.search(r"^RssAnon:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return 0


def _is_stopped(pid: int) -> bool:
    """Whether somebody has stopped the process (SIGSTOP)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
