"""Local workers as real processes: parents that wait for a scheduler, so that nothing heavy loads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import psutil
import pytest
import structlog
import structlog.testing

from tools.addresses import unix_address
from unfuse.core.errors import ConfigError
from unfuse.launch.base import WorkerSpec
from unfuse.launch.local import STABLE_S, LocalLauncher
from unfuse.testing.clock import ManualClock


@pytest.fixture
async def nobody() -> AsyncIterator[str]:
    """An address where no scheduler answers: whoever asks there waits."""
    address = unix_address()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(address.removeprefix("unix:"))
        silent.listen()
        yield address


def spec(scheduler: str, role: str = "encoder") -> WorkerSpec:
    return WorkerSpec(role, flags={"scheduler": scheduler, "arena": "1MiB"})


def children() -> list[psutil.Process]:
    """This process's workers; what started as one is not yet one before it has become its own program."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            found += [child] if "--lifeline" in child.cmdline() else []
    return found


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def test_each_spec_is_a_process_and_stop_ends_all(nobody: str) -> None:
    workers = LocalLauncher([spec(nobody), spec(nobody, "decoder")])
    workers.start()
    await until(lambda: len(children()) == 2)
    mine = children()
    await workers.stop(20)
    assert not any(process.is_running() for process in mine)


async def test_killed_worker_is_restarted(nobody: str) -> None:
    workers = LocalLauncher([spec(nobody)])
    workers.start()
    await until(lambda: len(children()) == 1)
    (first,) = children()
    first.kill()
    await until(lambda: [child.pid for child in children()] not in ([], [first.pid]))
    await workers.stop(0)
    assert children() == []


async def test_restarts_of_crashing_worker_back_off_exponentially(nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.launch.local.RESTART_S", 0.01)
    monkeypatch.setattr("unfuse.launch.local.RESTART_MOST_S", 0.05)
    workers = LocalLauncher([spec(nobody)])
    seen: set[int] = set()
    with structlog.testing.capture_logs() as logs:
        workers.start()
        for _ in range(5):
            await until(lambda: any(child.pid not in seen for child in children()))
            (child,) = [child for child in children() if child.pid not in seen]
            seen.add(child.pid)
            child.kill()
        await until(lambda: len([line for line in logs if "pause_s" in line]) == 5)
        pauses = [line["pause_s"] for line in logs if "pause_s" in line]
    assert pauses == [0.01, 0.02, 0.04, 0.05, 0.05]
    await workers.stop(0)


async def test_restart_backoff_resets_after_stable_run(nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.launch.local.RESTART_S", 0.01)
    clock = ManualClock()
    workers = LocalLauncher([spec(nobody)], clock=clock)
    with structlog.testing.capture_logs() as logs:
        workers.start()
        for count in range(3):
            await until(lambda: bool(children()))
            clock.advance(STABLE_S)
            children()[0].kill()
            await until(lambda count=count: len([line for line in logs if "pause_s" in line]) > count)
    assert {line["pause_s"] for line in logs if "pause_s" in line} == {0.01}
    await workers.stop(0)


async def test_worker_that_fails_to_start_is_not_restarted(nobody: str) -> None:
    workers = LocalLauncher([spec(nobody, "encoder+")])
    workers.start()
    with pytest.raises(ConfigError, match="exit code 1"):
        await workers.failed
    assert children() == []
    await workers.stop(0)


async def test_stop_with_zero_timeout_kills_unresponsive_worker(nobody: str) -> None:
    workers = LocalLauncher([spec(nobody)])
    workers.start()
    await until(lambda: len(children()) == 1)
    (process,) = children()
    process.suspend()  # it cannot hear a signal that asks
    await workers.stop(0)
    assert not process.is_running()


async def test_hurried_stop_kills_unresponsive_worker(nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a worker that hears nothing, and a stop with much time, when it is hurried, then the worker is killed."""
    monkeypatch.setattr("unfuse.launch.local.HURRIED_S", 0.1)
    workers, hurry = LocalLauncher([spec(nobody)]), asyncio.Event()
    workers.start()
    await until(lambda: len(children()) == 1)
    (process,) = children()
    process.suspend()
    stopping = asyncio.create_task(workers.stop(3600, hurry))
    await asyncio.sleep(0)
    hurry.set()
    await stopping
    assert not process.is_running()
