"""The launcher of this machine keeps the port's promises; and the suite that says so finds who breaks them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import msgspec
import pytest

from unfuse.launch.base import LineSink, WorkerSpec
from unfuse.launch.local import LocalLauncher
from unfuse.testing import check_launcher
from unfuse.testing.launcher_suite import WITHIN_S, wait_until, worker_registry


async def test_local_launcher_passes_the_contract_suite() -> None:
    await check_launcher(LocalLauncher)


class Deaf(LocalLauncher):
    """Nobody is told what workers write."""

    def __init__(self, specs: Sequence[WorkerSpec], hear: LineSink) -> None:
        del hear
        super().__init__(specs, lambda number, line: None)


class Rude(LocalLauncher):
    """Ends workers without asking."""

    async def stop(self, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        del drain_timeout, hurry
        self._signal(signal.SIGKILL)
        await super().stop(0)


class Bare(LocalLauncher):
    """Does not tell workers what they are to be."""

    def __init__(self, specs: Sequence[WorkerSpec], hear: LineSink) -> None:
        super().__init__(
            [WorkerSpec("encoder", flags=spec.flags, environment=spec.environment) for spec in specs], hear
        )


class Forgetful(LocalLauncher):
    """Does not look after what it started."""

    async def _run_worker(self, number: int) -> None:
        await (await self._spawn(number)).wait()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        pytest.param(Deaf, "output was not reported", marks=pytest.mark.nightly),
        (Rude, "did not drain"),
        pytest.param(Bare, "did not receive its role", marks=pytest.mark.nightly),
        pytest.param(Forgetful, "did not start|was not restarted", marks=pytest.mark.nightly),
    ],
)
async def test_contract_suite_detects_broken_launchers(broken: type[LocalLauncher], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        await check_launcher(broken, within=5.0 if broken is Forgetful else WITHIN_S)


STARTER = """
import asyncio, msgspec, sys
from unfuse.launch.base import WorkerSpec
from unfuse.launch.local import LocalLauncher

async def main():
    LocalLauncher([msgspec.json.decode(sys.argv[1], type=WorkerSpec)]).start()
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_worker_ends_when_its_starter_is_killed() -> None:
    async with worker_registry() as place:
        with subprocess.Popen([sys.executable, "-c", STARTER, msgspec.json.encode(place.spec())]) as starter:
            await wait_until(partial(place.wait_for_workers, 1), "no worker came", WITHIN_S)
            starter.kill()
        await wait_until(lambda: not place.living_workers, "the worker lives on", WITHIN_S)
