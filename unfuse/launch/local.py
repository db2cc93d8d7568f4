"""The local launcher: runs workers as processes of this machine and restarts them."""

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
from unfuse.core.supervisor import Supervisor, first_completed
from unfuse.launch.base import Launcher, LineSink, WorkerSpec
from unfuse.planning.placement import is_cpu_only

#: Seconds before a dead worker is restarted, and their maximum. They double with each death soon after a start.
RESTART_S, RESTART_MOST_S = 1.0, 30.0

#: Environment that numbers GPUs in the order that the placement used.
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

#: Exit codes above this, and negative ones, mean that a signal ended a worker.
SIGNALLED = 128

#: Exit code of a worker that had started and may be started again, because its ranks could not start.
LATER = 3

#: A worker that lived for this many seconds did not die soon after its start.
STABLE_S = 30.0

#: Signal that ends a worker without draining, and the seconds after which it is killed.
HURRY_SIGNAL, HURRIED_S = signal.SIGUSR1, 3.0

#: Most bytes of a line. A longer one is split.
MAX_LINE_BYTES = 1 << 16

#: Most lines that wait to be passed on. Beyond that, the oldest are dropped and counted.
WAITING = 10_000

#: Seconds that `OutputPump.close` waits for each pipe that is still open, and for the last lines to be passed on. The
#: receiver of lines may block, as a stopped terminal does.
LAST_S = 2.0

log = structlog.get_logger(__name__)


def write_line(number: int, line: bytes) -> None:
    """Write a worker's line to the standard error of this process."""
    with suppress(OSError, ValueError):
        sys.stderr.write(line.decode(errors="replace") + "\n")
        sys.stderr.flush()


class OutputPump:
    """Reads the output lines of processes and passes them on, without ever blocking the processes.

    on_line: called with each line.

    One thread reads each pipe. Another one calls `on_line`, which may take long or block; lines beyond WAITING are
    dropped meanwhile.
    """

    def __init__(self, on_line: LineSink) -> None:
        self._sink = on_line
        self._lines: deque[tuple[int, bytes]] = deque()
        self._dropped_count = 0
        self._changed = threading.Condition()
        self._closing = False
        self._readers: list[threading.Thread] = []
        self._writer = threading.Thread(target=self._write_lines, name="tell output", daemon=True)
        self._writer.start()

    def pipe(self, number: int) -> int:
        """Return the writing end of a new pipe for the output of a worker.

        The caller closes it.
        """
        read_fd, write_fd = os.pipe()
        self.read(number, read_fd)
        return write_fd

    def read(self, number: int, read_fd: int) -> None:
        """Read a worker's lines from a pipe, in a new thread, until its end.

        read_fd: file descriptor of the pipe's reading end, which the thread closes.
        """
        reader = threading.Thread(target=self._read_lines, args=(number, os.fdopen(read_fd, "rb")), daemon=True)
        reader.start()
        self._readers = [*(thread for thread in self._readers if thread.is_alive()), reader]

    def put(self, number: int, line: bytes) -> None:
        """Pass on a line as one of the worker of this number. Never blocks."""
        with self._changed:
            if len(self._lines) == WAITING:
                self._lines.popleft()
                self._dropped_count += 1
            self._lines.append((number, line))
            self._changed.notify()

    def close(self) -> None:
        """Pass on the remaining lines, after the processes have ended."""
        for reader in self._readers:
            reader.join(LAST_S)
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._writer.join(LAST_S)

    def _read_lines(self, number: int, pipe: BinaryIO) -> None:
        """Read lines from a pipe until its end."""
        with pipe:
            while line := pipe.readline(MAX_LINE_BYTES):
                self.put(number, line.rstrip(b"\r\n"))

    def _write_lines(self) -> None:
        """Pass on lines until `close`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closing)
                if not self._lines:
                    return
                dropped_count = self._dropped_count
                self._dropped_count = 0
                number, line = self._lines.popleft()

            # `on_line` may block, so it is called without the lock that `put` needs.
            if dropped_count:
                self._sink(number, b"%d earlier lines were not read in time and are lost" % dropped_count)
            self._sink(number, line)


class LocalLauncher(Launcher):
    """Runs `unfuse worker` processes on this machine.

    The environment of a worker is that of this process and of the worker's spec, which takes precedence.

    Each worker has the reading end of a pipe, the lifeline, whose writing end only this process has. When this process
    ends, however it ends, the pipe closes and the workers end too. Each worker has its own session, so that only this
    process receives Ctrl-C.

    on_line: called with each output line of a worker.
    forks: fork servers of the compute processes of workers on CPUs. The launcher runs `ForkServers` as one more
        process, and closes `forks` when it stops. None: no fork server.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        on_line: LineSink = write_line,
        clock: Clock | None = None,
        forks: ForkServers | InheritedForks | None = None,
    ) -> None:
        self._specs = specs
        self._clock = clock or SystemClock()
        self._forks = forks
        self._output = OutputPump(on_line)
        self._lifeline, self._lifeline_writer = os.pipe()
        #: The last process of each worker. The number behind the last worker is that of the fork server.
        self._processes: dict[int, asyncio.subprocess.Process | ForkServerProcess] = {}
        #: For workers that failed on their devices: the specs to start them with, the current one first.
        self._variants: dict[int, list[WorkerSpec]] = {}
        #: The tasks that run and restart each process.
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._background = Supervisor()
        self.failed = asyncio.get_running_loop().create_future()

    @override
    def start(self) -> None:
        # The fork server has the last number. It starts first, because its imports take longest.
        numbers = range(len(self._specs) + isinstance(self._forks, ForkServers))
        self._keepers = [asyncio.create_task(self._run_worker(number)) for number in reversed(numbers)]

    @override
    async def stop(self, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        self._stopping = True
        self._signal(signal.SIGTERM)
        if self._forks:
            self._forks.close()  # the fork server ends when the workers have closed their sockets too

        # Workers get most of the time for draining, then a short time to end by themselves.
        hurry_s = min(HURRIED_S, drain_timeout / 4)
        await self._wait_for_end(drain_timeout - hurry_s, hurry)
        self._signal(HURRY_SIGNAL)
        await self._wait_for_end(HURRIED_S if hurry and hurry.is_set() else hurry_s)
        self._signal(signal.SIGKILL)

        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for process in self._processes.values():
            await process.wait()
            await asyncio.to_thread(_kill_compute_processes, process.pid)
        self.failed.cancel()
        await asyncio.to_thread(self._output.close)
        for descriptor in (self._lifeline_writer, self._lifeline):
            os.close(descriptor)

    async def _wait_for_end(self, seconds: float, hurry: asyncio.Event | None = None) -> None:
        """Wait until all processes have ended, the seconds are over, or `hurry` is set."""
        ended = asyncio.gather(*map(asyncio.shield, self._keepers), return_exceptions=True)
        await first_completed(ended, *([hurry.wait()] if hurry else []), timeout=seconds)

    async def _run_worker(self, number: int) -> None:
        """Run a worker and restart it when it dies.

        An error exit of its first process sets `failed` and ends this. Later errors are retried, since the worker has
        started before.
        """
        deaths = 0
        is_worker = number < len(self._specs)  # else it is the fork server
        while not self._stopping:
            started_at = self._clock.now()
            process = None
            with self._background.log_errors("starting a worker"):
                process = await self._spawn(number)
            if process is None:
                await asyncio.sleep(RESTART_S)
                continue

            code = await process.wait()
            await asyncio.to_thread(_kill_compute_processes, process.pid)
            if self._stopping:
                return

            lived_s = self._clock.now() - started_at
            is_error = 0 < code < SIGNALLED  # a worker that a signal killed may start well the next time
            smaller = is_worker and self._specs[number].smaller
            if is_error and not deaths and is_worker and not (smaller and code == LATER):
                if not self.failed.done():
                    message = f"a worker could not start (exit code {code}): see its message above"
                    self.failed.set_exception(ConfigError(message))
                return

            if is_error and smaller:
                self._use_next_variant(number)
            deaths = 1 if lived_s >= STABLE_S else deaths + 1
            pause = pause_after(deaths)
            event = f"{'a worker' if is_worker else 'the fork server'} ended, restarting it"
            log.warning(event, pid=process.pid, code=code, lived_s=lived_s, pause_s=pause)
            await asyncio.sleep(pause)

    async def _spawn(self, number: int) -> asyncio.subprocess.Process | ForkServerProcess:
        """Start the process of a worker, or of the fork server."""
        if isinstance(self._forks, ForkServers) and number == len(self._specs):
            server = self._processes[number] = self._forks.server()
            self._output.read(number, server.output)
            return server
        spec = self._variants.get(number, [self._specs[number]])[0]
        descriptors = {"--lifeline": self._lifeline}
        if self._forks and is_cpu_only([spec.device]):
            descriptors["--fork-server"] = self._forks.socket_fd
        descriptor_flags = [text for flag, descriptor in descriptors.items() for text in (flag, str(descriptor))]
        output = self._output.pipe(number)
        try:
            process = self._processes[number] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "unfuse", "worker", *spec.arguments, *descriptor_flags),
                pass_fds=[*descriptors.values()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**ORDER, **os.environ, **spec.environment},
                start_new_session=True,
            )
            return process
        finally:
            os.close(output)

    def _use_next_variant(self, number: int) -> None:
        """Select the next of a worker's smaller specs for its next start.

        After the last one, the original spec of the worker follows.
        """
        variants = self._variants.setdefault(number, [self._specs[number], *self._specs[number].smaller])
        variants.append(variants.pop(0))
        spec = variants[0]
        fields = {"role": spec.role, "device": spec.device, "parallel": spec.flags.get("parallel", "")}
        log.warning("a worker cannot continue on its devices, restarting it on others", **fields)

    def _signal(self, signal_number: signal.Signals) -> None:
        """Send a signal to the workers. The fork server gets only SIGKILL.

        It must live as long as the workers, and ends by itself when they have closed their sockets.
        """
        for number, process in self._processes.items():
            if process.returncode is None and (number < len(self._specs) or signal_number == signal.SIGKILL):
                with suppress(ProcessLookupError):
                    process.send_signal(signal_number)


def pause_after(deaths: int) -> float:
    """Return the seconds to wait before a restart.

    deaths: number of deaths in a row, all but the first of them soon after a start.
    """
    return min(RESTART_S * 2.0 ** (deaths - 1), RESTART_MOST_S)


def _kill_compute_processes(worker_pid: int) -> None:
    """Kill the compute processes that a dead worker left.

    They end by themselves when their worker dies, but not if they are stopped by SIGSTOP. They name their worker in
    their process name.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                process.stat().st_uid == os.geteuid()
                and (process / "comm").read_text().strip() == f"compute {worker_pid}"
            ):
                os.kill(int(process.name), signal.SIGKILL)


class ForkServerProcess:
    """A running fork server process.

    request_fd: file descriptor of the socket where it receives requests for compute processes.
    models: names or folders of the models whose libraries it imports.
    """

    def __init__(self, request_fd: int, models: Sequence[str]) -> None:
        #: File descriptor that its output is read from. The caller closes it.
        self.output, write_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", "unfuse.worker.fork_server", str(request_fd), *models],
                pass_fds=[request_fd],
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                env=compute_environment(1, os.environ),
                start_new_session=True,
            )
        except BaseException:
            os.close(self.output)
            raise
        finally:
            os.close(write_fd)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code of the process, or None while it runs.

        If a signal ended the process, the code is minus the signal's number.
        """
        return self._process.poll()

    def send_signal(self, signal_number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        self._process.send_signal(signal_number)

    def kill(self) -> None:
        """Kill the process, wait for its end, and close `output`."""
        os.close(self.output)
        self._process.kill()
        self._process.wait()

    async def wait(self) -> int:
        """Wait for the end of the process. Returns its exit code."""
        if self.returncode is None:
            # Popen.wait would block the event loop.
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
    """Starts fork servers, which fork compute processes with the models' libraries imported.

    Workers on CPUs send requests to them through a socket.

    The first fork server starts at once. A launcher runs it and restarts it when it dies. It ends when all copies of
    the socket are closed: that of this object, and those that workers inherited as `socket_fd`.

    models: names or folders of the models.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self._models = models
        self._worker_socket, self._server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._first_server: ForkServerProcess | None = self._start_server()

    @property
    def socket_fd(self) -> int:
        """The file descriptor of the socket, which workers inherit."""
        return self._worker_socket.fileno()

    def server(self) -> ForkServerProcess:
        """Return a running fork server: first the initial one, then a new one each time."""
        server = self._first_server or self._start_server()
        self._first_server = None
        return server

    def close(self) -> None:
        """Close the sockets, and kill the first fork server unless `server` returned it. Idempotent."""
        self._worker_socket.close()
        self._server_socket.close()
        if server := self._first_server:
            self._first_server = None
            server.kill()

    def _start_server(self) -> ForkServerProcess:
        return ForkServerProcess(self._server_socket.fileno(), self._models)


class InheritedForks:
    """The socket to a fork server of the parent process, which several servers may share.

    This process neither starts, restarts nor stops that fork server.
    """

    def __init__(self, socket_fd: int) -> None:
        self._socket = socket.socket(fileno=socket_fd)

    @property
    def socket_fd(self) -> int:
        """The file descriptor of the socket, which workers inherit."""
        return self._socket.fileno()

    def copy(self) -> InheritedForks:
        """Return the same socket with a descriptor of its own."""
        return InheritedForks(os.dup(self.socket_fd))

    def close(self) -> None:
        """Close this descriptor of the socket. Idempotent."""
        self._socket.close()
