"""Workers as processes of this machine: they are restarted when they die, and end with their starter."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import structlog
from typing_extensions import override

from unfuse.core.clock import Clock, SystemClock
from unfuse.core.compute_options import compute_environment
from unfuse.core.errors import ConfigError
from unfuse.core.supervisor import Supervisor, first
from unfuse.launch.base import Hear, Launcher, WorkerSpec
from unfuse.planning.placement import only_cpu

RESTART_S, RESTART_MOST_S = 1.0, 30.0
"""Seconds before a worker that died is restarted; this doubles, up to the maximum, while it dies at once each time."""

ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Numbers GPUs as the placement did."""

SIGNALLED = 128
"""Exit codes above this, and negative ones, mean that a signal ended a worker."""

LATER = 3
"""The exit code of a worker that had started, and may start again: its ranks could not."""

SETTLED_S = 30.0
"""A worker that lived for this many seconds did not die at once."""

HURRY, HURRIED_S = signal.SIGUSR1, 3.0
"""What a worker is sent that is to end at once, and the seconds that it has then until it is killed."""

PART = 1 << 16  # the most bytes of a line; a longer one is cut
WAITING = 10_000  # the most lines that wait to be passed on; then the oldest are dropped and counted

LAST_S = 2.0
"""How long the end waits for a pipe that somebody keeps open, and for what is still to be told: who hears may be stuck,
as a terminal that was stopped is."""

log = structlog.get_logger(__name__)


def pass_on(number: int, line: bytes) -> None:
    """Write a line to our own standard error."""
    with suppress(OSError, ValueError):
        sys.stderr.write(line.decode(errors="replace") + "\n")
        sys.stderr.flush()


class OutputPump:
    """Pipes that are always emptied, so that a process that writes to one never waits for the receiver of its lines.

    One thread reads each, another tells: hearing may take long, or stand still.
    """

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._lines: deque[tuple[int, bytes]] = deque()
        self._lost = 0
        self._changed = threading.Condition()
        self._closing = False
        self._readers: list[threading.Thread] = []
        self._teller = threading.Thread(target=self._tell, name="tell output", daemon=True)
        self._teller.start()

    def pipe(self, number: int) -> int:
        """The writing end of a new pipe for the process of this number; the caller closes it."""
        reading, writing = os.pipe()
        self.read(number, reading)
        return writing

    def read(self, number: int, reading: int) -> None:
        """Read what the process of this number writes to the other end of this pipe, and close it at its end."""
        reader = threading.Thread(target=self._read, args=(number, os.fdopen(reading, "rb")), daemon=True)
        reader.start()
        self._readers = [*(thread for thread in self._readers if thread.is_alive()), reader]

    def tell(self, number: int, line: bytes) -> None:
        """Have a line told as that of the process of this number. Never waits."""
        with self._changed:
            if len(self._lines) == WAITING:
                self._lines.popleft()
                self._lost += 1
            self._lines.append((number, line))
            self._changed.notify()

    def close(self) -> None:
        """Pass on the lines that are left, after the processes have ended."""
        for reader in self._readers:
            reader.join(LAST_S)
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._teller.join(LAST_S)

    def _read(self, number: int, pipe: BinaryIO) -> None:
        with pipe:
            while line := pipe.readline(PART):
                self.tell(number, line.rstrip(b"\r\n"))

    def _tell(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closing)
                if not self._lines:
                    return
                lost, self._lost = self._lost, 0
                number, line = self._lines.popleft()
            if lost:
                self._hear(number, b"%d earlier lines were not read in time and are lost" % lost)
            self._hear(number, line)


class LocalLauncher(Launcher):
    """A set of `unfuse worker` processes. Their environment is ours, and the variables of their spec.

    They hold the reading end of a pipe whose writing end is ours: when this process ends, however it ends, the pipe
    closes and they end too. They are a session of their own, so Ctrl-C is ours alone. With `forks`, which it closes,
    compute processes of workers on CPUs are forked from one process, which is started here unless it is inherited.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        hear: Hear = pass_on,
        clock: Clock | None = None,
        forks: ForkServers | InheritedForks | None = None,
    ) -> None:
        self._specs, self._clock, self._forks = specs, clock or SystemClock(), forks
        self._output = OutputPump(hear)
        self._lifeline, self._ours = os.pipe()
        self._processes: dict[int, asyncio.subprocess.Process | ForkServerProcess] = {}
        self._ways: dict[int, list[WorkerSpec]] = {}
        """Of workers that could not go on as they were: ways to start them, the one in use first."""
        self._watching: list[asyncio.Task[None]] = []
        self._stopping = False
        self._background = Supervisor()
        self.failed = asyncio.get_running_loop().create_future()

    @override
    def start(self) -> None:
        numbers = range(len(self._specs) + isinstance(self._forks, ForkServers))
        self._watching = [asyncio.create_task(self._keep(number)) for number in reversed(numbers)]

    @override
    async def stop(self, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        self._stopping = True
        self._signal(signal.SIGTERM)
        if self._forks:
            self._forks.close()  # the fork server ends when workers have closed it too
        last = min(HURRIED_S, drain_timeout / 4)
        await self._ended(drain_timeout - last, hurry)
        self._signal(HURRY)
        await self._ended(HURRIED_S if hurry and hurry.is_set() else last)
        self._signal(signal.SIGKILL)
        for watching in self._watching:
            watching.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for process in self._processes.values():
            await process.wait()
            await asyncio.to_thread(_end_computes, process.pid)
        self.failed.cancel()
        await asyncio.to_thread(self._output.close)
        for end in (self._ours, self._lifeline):
            os.close(end)

    async def _ended(self, seconds: float, hurry: asyncio.Event | None = None) -> None:
        """Wait until all processes have ended, but not beyond so many seconds, or `hurry`."""
        ended = asyncio.gather(*map(asyncio.shield, self._watching), return_exceptions=True)
        await first(ended, *([hurry.wait()] if hurry else []), timeout=seconds)

    async def _keep(self, number: int) -> None:
        """Run a worker, again and again. Only the first start may fail for good: later ones have what they need."""
        deaths = 0
        while not self._stopping:
            began = self._clock.now()
            process = None
            with self._background.besides("starting a worker"):
                process = await self._spawn(number)
            if process is None:
                await asyncio.sleep(RESTART_S)
                continue
            code = await process.wait()
            await asyncio.to_thread(_end_computes, process.pid)
            if self._stopping:
                return
            lived, smaller = self._clock.now() - began, number < len(self._specs) and self._specs[number].smaller
            if 0 < code < SIGNALLED and not deaths and number < len(self._specs) and not (smaller and code == LATER):
                if not self.failed.done():
                    message = f"a worker could not start (exit code {code}); its message is above"
                    self.failed.set_exception(ConfigError(message))
                return
            if 0 < code < SIGNALLED and smaller:
                self._shrink(number)
            deaths = 1 if lived >= SETTLED_S else deaths + 1
            pause = pause_after(deaths)
            event = f"{'a worker' if number < len(self._specs) else 'the fork server'} ended, starting it again"
            log.warning(event, pid=process.pid, code=code, lived_s=lived, pause_s=pause)
            await asyncio.sleep(pause)

    async def _spawn(self, number: int) -> asyncio.subprocess.Process | ForkServerProcess:
        if isinstance(self._forks, ForkServers) and number == len(self._specs):
            server = self._processes[number] = self._forks.server()
            self._output.read(number, server.output)
            return server
        spec, handed = self._ways.get(number, [self._specs[number]])[0], {"--lifeline": self._lifeline}
        if self._forks and only_cpu([spec.device]):
            handed["--fork-server"] = self._forks.asks
        told = [text for flag, descriptor in handed.items() for text in (flag, str(descriptor))]
        writing = self._output.pipe(number)
        try:
            process = self._processes[number] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "unfuse", "worker", *spec.arguments, *told, pass_fds=[*handed.values()],
                stdin=asyncio.subprocess.DEVNULL, stdout=writing, stderr=writing,
                env={**ORDER, **os.environ, **spec.environment}, start_new_session=True,
            )  # fmt: skip
            return process
        finally:
            os.close(writing)

    def _shrink(self, number: int) -> None:
        """Have the next one of a spec's smaller ones start in its place, and after the last one that itself again."""
        ways = self._ways.setdefault(number, [self._specs[number], *self._specs[number].smaller])
        ways.append(ways.pop(0))
        told = {"role": ways[0].role, "device": ways[0].device, "parallel": ways[0].flags.get("parallel", "")}
        log.warning("a worker cannot go on with its devices, it is started with others", **told)

    def _signal(self, sent: signal.Signals) -> None:
        """Send a signal to the workers; the fork server is only killed."""
        for number, process in self._processes.items():
            if process.returncode is None and (number < len(self._specs) or sent == signal.SIGKILL):
                with suppress(ProcessLookupError):
                    process.send_signal(sent)


def pause_after(deaths: int) -> float:
    """Seconds before a worker is restarted that died so many times in a row, all but the first time at once."""
    return min(RESTART_S * 2.0 ** (deaths - 1), RESTART_MOST_S)


def _end_computes(worker: int) -> None:
    """Kill what a worker that is gone has left: a compute process that was stopped does not notice it."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.stat().st_uid == os.geteuid() and (process / "comm").read_text().strip() == f"compute {worker}":
                os.kill(int(process.name), signal.SIGKILL)


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


class ForkServers:
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
