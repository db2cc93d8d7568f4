"""The conformance suite of launchers: run `check_launcher` on a new Launcher."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from unfuse.core.errors import ConfigError
from unfuse.core.messages import Register, ToScheduler, ToWorker
from unfuse.launch.base import Launcher, LineSink, WorkerSpec
from unfuse.wire.address import UNIX
from unfuse.wire.router import Router
from unfuse.wire.unix_socket import private_socket

#: Returns a launcher of these workers, which passes the lines that they write to a callback.
OpenLauncher = Callable[[Sequence[WorkerSpec], LineSink], Launcher]

#: Longest time for anything that must happen, in seconds: long enough for any machine.
WITHIN_S = 120.0

#: Drain timeout for workers without tasks, in seconds.
DRAIN_S = 60.0

#: Seconds between two checks of a condition.
LOOK_S = 0.02

#: A variable with which no worker can start. The worker's error names it.
UNKNOWN = "UNFUSE_NO_SUCH_SETTING"


class Started(msgspec.Struct, frozen=True):
    """A registered worker."""

    #: The role in its spec.
    role: str
    #: A descriptor of its process, which stays valid after the pid is reused.
    pidfd: int

    @property
    def lives(self) -> bool:
        """Whether the process exists, running or stopped."""
        watch = select.poll()
        watch.register(self.pidfd, select.POLLIN)
        return not watch.poll(0)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        signal.pidfd_send_signal(self.pidfd, number)


class WorkerRegistry:
    """A scheduler that answers no message: its workers register, and never load a model.

    They must be processes of this machine.
    """

    def __init__(self, folder: Path) -> None:
        self._router = Router(f"{UNIX}{private_socket(folder)}", self._register, self._register, folder=folder)
        self._folder = folder
        #: Registered workers, by pid.
        self._workers = dict[int, Started]()
        #: Lines that workers have written, with the workers' numbers.
        self.lines: list[tuple[int, bytes]] = []

    @property
    def registered_workers(self) -> list[Started]:
        """All workers that have registered, in order."""
        return [*self._workers.values()]

    def wait_for_workers(self, count: int) -> bool:
        """Return whether `count` workers have registered."""
        return len(self._workers) >= count

    @property
    def living_workers(self) -> list[Started]:
        """The registered workers whose process exists."""
        return [worker for worker in self.registered_workers if worker.lives]

    def spec(self, role: str = "encoder", **environment: str) -> WorkerSpec:
        """Return the spec of a worker that registers here and logs JSON."""
        folders = {"UNFUSE_RUN_DIR": str(self._folder), "UNFUSE_DATA_DIR": str(self._folder)}
        logging = {"UNFUSE_LOG__FORMAT": "json", "UNFUSE_LOG__LEVEL": "info"}
        flags = {"scheduler": self._router.address, "arena": "1MiB"}
        return WorkerSpec(role, flags=flags, environment=folders | logging | environment)

    def record_line(self, number: int, line: bytes) -> None:
        """Record a line that worker `number` has written."""
        self.lines.append((number, line))

    def count_lines(self, number: int, text: bytes) -> int:
        """Return how many lines of a worker have this text."""
        return sum(by == number and text in line for by, line in self.lines)

    async def close(self) -> None:
        """Close the router and all pidfds."""
        for worker in self.registered_workers:
            os.close(worker.pidfd)
        await self._router.close()

    async def _register(self, peer: bytes, message: ToScheduler | ToWorker) -> None:
        if isinstance(message, Register) and message.worker.pid not in self._workers:
            self._workers[message.worker.pid] = Started(message.worker.role, os.pidfd_open(message.worker.pid))


@asynccontextmanager
async def worker_registry() -> AsyncIterator[WorkerRegistry]:
    """Open a Meeting in its own run folder. Kills its workers at the end."""
    async with AsyncExitStack() as stack:
        place = WorkerRegistry(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unfuse-"))))
        stack.push_async_callback(place.close)
        try:
            yield place
        finally:
            for worker in place.living_workers:
                worker.send(signal.SIGKILL)


async def wait_until(condition: Callable[[], object], what: str, within: float) -> None:
    """Wait until a condition holds. Raises AssertionError(`what`) after `within` seconds."""
    try:
        async with asyncio.timeout(within):
            while not condition():
                await asyncio.sleep(LOOK_S)
    except TimeoutError as error:
        raise AssertionError(what) from error


@asynccontextmanager
async def running_launcher(launcher: Launcher, drain_timeout: float) -> AsyncIterator[Launcher]:
    """Start a launcher, and stop it after the block. A context manager."""
    launcher.start()
    try:
        yield launcher
    finally:
        await launcher.stop(drain_timeout)


async def check_launcher(open_launcher: OpenLauncher, within: float = WITHIN_S) -> None:
    """Check a launcher. Raises AssertionError where it breaks the contract.

    `open_launcher(specs, hear)`: returns a launcher whose workers are processes of this machine.
    `within`: the longest time, in seconds, for anything that must happen.
    """
    for check in CHECKS:
        async with worker_registry() as place:
            await check(open_launcher, place, within)
            assert not place.living_workers, f"{check.__name__}: a worker still runs after the stop"


async def each_spec_starts_a_worker_that_stop_drains(
    launch: OpenLauncher, place: WorkerRegistry, within: float
) -> None:
    """Each spec starts a worker with its flags and environment, and `stop` drains it first.

    Lines that workers write are reported with their number.
    """
    specs = [place.spec("encoder"), place.spec("decoder")]
    async with running_launcher(launch(specs, place.record_line), DRAIN_S) as launcher:
        await wait_until(partial(place.wait_for_workers, 2), "a worker did not start", within)
        assert {worker.role for worker in place.registered_workers} == {"encoder", "decoder"}, (
            "a worker did not receive its role"
        )
        assert not launcher.failed.done(), "`failed` is set, but no worker failed"
    assert len(place.registered_workers) == 2, "a worker was restarted during the stop"
    assert launcher.failed.cancelled(), "`failed` was not cancelled by the stop"
    for number in range(2):
        assert place.count_lines(number, b'"draining"'), (
            f"worker {number} did not drain, or its output was not reported"
        )


async def a_killed_worker_is_restarted(launch: OpenLauncher, place: WorkerRegistry, within: float) -> None:
    """A killed worker is restarted, repeatedly. The others run on."""
    specs = [place.spec("encoder"), place.spec("decoder")]
    async with running_launcher(launch(specs, place.record_line), 0):
        for came in (2, 3, 4):
            await wait_until(partial(place.wait_for_workers, came), "a killed worker was not restarted", within)
            if came < 4:
                next(worker for worker in place.living_workers if worker.role == "encoder").send(signal.SIGKILL)
        assert [worker.role for worker in place.registered_workers].count("decoder") == 1, (
            "a worker that runs was restarted too"
        )


async def a_worker_that_cannot_start_is_a_failure(launch: OpenLauncher, place: WorkerRegistry, within: float) -> None:
    """A worker that cannot start sets `failed` and is not restarted. The others run on."""
    specs = [place.spec(), place.spec(**{UNKNOWN: "1"})]
    async with running_launcher(launch(specs, place.record_line), DRAIN_S) as launcher:
        await wait_until(launcher.failed.done, "a worker that cannot start did not set `failed`", within)
        assert isinstance(launcher.failed.exception(), ConfigError), "`failed` is not a ConfigError"
        await wait_until(partial(place.wait_for_workers, 1), "the other worker did not start", within)
    assert place.count_lines(1, UNKNOWN.encode()), "the output of a worker was not reported"
    assert place.count_lines(1, UNKNOWN.encode()) == 1, "a worker that cannot start was restarted"


async def an_unresponsive_worker_is_killed(launch: OpenLauncher, place: WorkerRegistry, within: float) -> None:
    """A worker that does not react to signals is killed by `stop`."""
    async with running_launcher(launch([place.spec()], place.record_line), 0):
        await wait_until(partial(place.wait_for_workers, 1), "a worker did not start", within)
        place.registered_workers[0].send(signal.SIGSTOP)


async def stop_works_without_workers(launch: OpenLauncher, place: WorkerRegistry, within: float) -> None:
    """`stop` works without workers, before they have started, and before `start`."""
    del within
    for specs in ([], [place.spec()]):
        async with running_launcher(launch(specs, place.record_line), 0):
            pass
    await launch([place.spec()], place.record_line).stop(0)


CHECKS = (
    each_spec_starts_a_worker_that_stop_drains,
    a_killed_worker_is_restarted,
    a_worker_that_cannot_start_is_a_failure,
    an_unresponsive_worker_is_killed,
    stop_works_without_workers,
)
