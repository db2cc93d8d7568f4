"""The conformance suite of launchers: whoever writes a Launcher runs `check_launcher` on it."""

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
from unfuse.launch.base import Hear, Launcher, WorkerSpec
from unfuse.wire.address import UNIX
from unfuse.wire.router import Router
from unfuse.wire.unix_socket import private_socket

OpenLauncher = Callable[[Sequence[WorkerSpec], Hear], Launcher]

WITHIN_S = 120.0
"""How long whatever has to happen may take: a guard, so long that how fast a machine is decides nothing."""

DRAIN_S = 60.0
"""What workers without work get to end when they are asked to."""

LOOK_S = 0.02

UNKNOWN = "UNFUSE_NO_SUCH_SETTING"
"""A variable with which no worker can start, and which it names in saying so."""


class Started(msgspec.Struct, frozen=True):
    """A worker that said hello; `pidfd` stays that process's, whoever has its number later."""

    role: str
    pidfd: int

    @property
    def lives(self) -> bool:
        """Whether it runs, or is stopped."""
        watch = select.poll()
        watch.register(self.pidfd, select.POLLIN)
        return not watch.poll(0)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        signal.pidfd_send_signal(self.pidfd, number)


class Meeting:
    """Where workers come that have to be of this machine: a scheduler that answers nobody, so none loads anything."""

    def __init__(self, folder: Path) -> None:
        self._router = Router(f"{UNIX}{private_socket(folder)}", self._hear, self._hear, folder=folder)
        self._folder, self._known = folder, dict[int, Started]()
        self.lines: list[tuple[int, bytes]] = []
        """What workers wrote, with their numbers."""

    @property
    def started(self) -> list[Started]:
        """The workers that came, in that order."""
        return [*self._known.values()]

    def came(self, count: int) -> bool:
        """Whether so many came."""
        return len(self._known) >= count

    @property
    def living(self) -> list[Started]:
        """Those of them that run."""
        return [worker for worker in self.started if worker.lives]

    def spec(self, role: str = "encoder", **environment: str) -> WorkerSpec:
        """A worker that comes here and writes records."""
        places = {"UNFUSE_RUN_DIR": str(self._folder), "UNFUSE_DATA_DIR": str(self._folder)}
        logged = {"UNFUSE_LOG__FORMAT": "json", "UNFUSE_LOG__LEVEL": "info"}
        flags = {"scheduler": self._router.address, "arena": "1MiB"}
        return WorkerSpec(role, flags=flags, environment=places | logged | environment)

    def hear(self, number: int, line: bytes) -> None:
        """Keep a line."""
        self.lines.append((number, line))

    def wrote(self, number: int, text: bytes) -> int:
        """Lines of that worker that have this text."""
        return sum(by == number and text in line for by, line in self.lines)

    async def close(self) -> None:
        """Hang up."""
        for worker in self.started:
            os.close(worker.pidfd)
        await self._router.close()

    async def _hear(self, peer: bytes, message: ToScheduler | ToWorker) -> None:
        if isinstance(message, Register) and message.worker.pid not in self._known:
            self._known[message.worker.pid] = Started(message.worker.role, os.pidfd_open(message.worker.pid))


@asynccontextmanager
async def meeting() -> AsyncIterator[Meeting]:
    """A meeting in a run folder of its own; whoever came is dead after it."""
    async with AsyncExitStack() as stack:
        place = Meeting(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unfuse-"))))
        stack.push_async_callback(place.close)
        try:
            yield place
        finally:
            for worker in place.living:
                worker.send(signal.SIGKILL)


async def until(condition: Callable[[], object], what: str, within: float) -> None:
    """Wait for something to become so. Raises AssertionError, saying `what` is not, when it does not."""
    try:
        async with asyncio.timeout(within):
            while not condition():
                await asyncio.sleep(LOOK_S)
    except TimeoutError as error:
        raise AssertionError(what) from error


@asynccontextmanager
async def running(launcher: Launcher, drain_timeout: float) -> AsyncIterator[Launcher]:
    """A launcher that is started, and stopped after the block."""
    launcher.start()
    try:
        yield launcher
    finally:
        await launcher.stop(drain_timeout)


async def check_launcher(open_launcher: OpenLauncher, within: float = WITHIN_S) -> None:
    """Raise AssertionError where a launcher breaks the contract.

    `open_launcher(specs, hear)` makes one whose workers are processes of this machine. Whatever has to happen may take
    `within` seconds.
    """
    for check in CHECKS:
        async with meeting() as place:
            await check(open_launcher, place, within)
            assert not place.living, f"{check.__name__}: a worker is left after the stop"


async def each_spec_is_a_worker_that_is_asked_to_end(launch: OpenLauncher, place: Meeting, within: float) -> None:
    """Flags and variables arrive; what is written is told by number; `stop` asks first."""
    specs = [place.spec("encoder"), place.spec("decoder")]
    async with running(launch(specs, place.hear), DRAIN_S) as launcher:
        await until(partial(place.came, 2), "a worker that was to be started did not come", within)
        assert {worker.role for worker in place.started} == {"encoder", "decoder"}, "a worker was not told its role"
        assert not launcher.failed.done(), "a worker that runs is no failure"
    assert len(place.started) == 2, "a worker was started again though it was asked to end"
    assert launcher.failed.cancelled(), "after the stop somebody may still wait for a failure"
    for number in range(2):
        assert place.wrote(number, b'"draining"'), f"worker {number} was not asked to end, or nobody was told"


async def one_that_is_killed_is_started_again(launch: OpenLauncher, place: Meeting, within: float) -> None:
    """Time and again, and the others run on meanwhile."""
    specs = [place.spec("encoder"), place.spec("decoder")]
    async with running(launch(specs, place.hear), 0):
        for came in (2, 3, 4):
            await until(partial(place.came, came), "one that was killed did not come again", within)
            if came < 4:
                next(worker for worker in place.living if worker.role == "encoder").send(signal.SIGKILL)
        assert [worker.role for worker in place.started].count("decoder") == 1, "the other one was started again too"


async def one_that_cannot_start_is_a_failure(launch: OpenLauncher, place: Meeting, within: float) -> None:
    """It is said once, by the worker and by `failed`; the others are none the worse for it."""
    specs = [place.spec(), place.spec(**{UNKNOWN: "1"})]
    async with running(launch(specs, place.hear), DRAIN_S) as launcher:
        await until(launcher.failed.done, "a worker that cannot start is no failure", within)
        assert isinstance(launcher.failed.exception(), ConfigError), "a worker that cannot start is no ConfigError"
        await until(partial(place.came, 1), "the other of one that cannot start did not come", within)
    assert place.wrote(1, UNKNOWN.encode()), "nobody was told what a worker wrote"
    assert place.wrote(1, UNKNOWN.encode()) == 1, "a worker that cannot start was tried again"


async def one_that_does_not_hear_is_ended_by_force(launch: OpenLauncher, place: Meeting, within: float) -> None:
    """A process that is stopped hears no signal that asks."""
    async with running(launch([place.spec()], place.hear), 0):
        await until(partial(place.came, 1), "a worker that was to be started did not come", within)
        place.started[0].send(signal.SIGSTOP)


async def one_that_has_nothing_to_end_stops(launch: OpenLauncher, place: Meeting, within: float) -> None:
    """Where there are no workers, before there are any, and before they were to be there."""
    del within
    for specs in ([], [place.spec()]):
        async with running(launch(specs, place.hear), 0):
            pass
    await launch([place.spec()], place.hear).stop(0)


CHECKS = (
    each_spec_is_a_worker_that_is_asked_to_end,
    one_that_is_killed_is_started_again,
    one_that_cannot_start_is_a_failure,
    one_that_does_not_hear_is_ended_by_force,
    one_that_has_nothing_to_end_stops,
)
