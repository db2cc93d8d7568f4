"""Models that come and go while a server runs: removed while they load, added twice at once, with what they say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.service.paper import ONE, Machine, shifted
from unfuse.core.errors import ConfigError
from unfuse.edge.access import ApiError
from unfuse.planning.placement import PROCESS
from unfuse.server.served_models import AddModelProgress
from unfuse.service import worker_groups as module

TWO = 2 * ONE + PROCESS // (1 << 20)
"""Room for two models beside each other, in MiB."""


@pytest.fixture
async def machine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Machine]:
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.0)
    found = Machine(TWO, workers="all=1")
    await found.begin()
    yield found
    await found.scheduler.close()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return shifted(tmp_path / "shifted", 3.0)


async def test_model_removed_while_loading_can_be_added_again(machine: Machine, folder: str) -> None:
    await machine.crews.add("added", folder)
    await machine.scheduler.registry.dismiss("added")
    assert await machine.served() == {"unfuse/shapes"}
    with pytest.raises(ApiError, match="is being removed") as refused:
        await machine.crews.add("added", folder)
    assert (refused.value.status, refused.value.code) == (409, "model_leaves")
    await machine.look(module.QUIET)
    assert machine.live == [["unfuse/shapes"]] and await machine.scheduler.registry.admin_records() == {}
    await machine.crews.add("added", folder)
    assert await machine.served() == {"unfuse/shapes", "added"}


async def test_worker_failure_after_removal_is_not_a_model_failure(machine: Machine, folder: str) -> None:
    await machine.crews.add("added", folder)
    request = await machine.ask("added")
    await machine.scheduler.registry.dismiss("added")
    machine.launchers[-1].failed.set_exception(ConfigError("a worker could not start"))
    await machine.look()
    assert machine.live == [["unfuse/shapes"]] and await machine.served() == {"unfuse/shapes"}
    assert machine.scheduler.registry.failed == {} and await machine.scheduler.registry.admin_records() == {}
    assert (await machine.scheduler.queue.load(request)).status == "failed"


async def test_concurrent_adds_of_one_name_add_one_model(machine: Machine, folder: str, tmp_path: Path) -> None:
    second = shifted(tmp_path / "second", 6.0)
    calls = [machine.crews.add("added", source) for source in (folder, second)]
    first, other = await asyncio.gather(*calls, return_exceptions=True)
    assert first is None and isinstance(other, ApiError) and (other.status, other.code) == (409, "model_exists")
    assert machine.live == [["unfuse/shapes"], ["added"]]
    assert (await machine.scheduler.registry.model_specs())["added"].source == folder


async def test_worker_log_lines_update_the_progress_of_their_own_model(machine: Machine, folder: str) -> None:
    await machine.crews.add("added", folder)
    assert machine.crews.progress("added") == AddModelProgress("starting")
    machine.crews.process_line(2, b'{"event": "loading", "level": "info", "done": 1, "total": 2}')
    assert machine.crews.progress("added") == AddModelProgress("loading", 1, 2)
    assert machine.crews.progress("unfuse/shapes") == AddModelProgress("starting")
    machine.crews.process_line(2, b'{"event": "ready", "level": "info"}')
    assert machine.crews.progress("added") is None
    machine.crews.process_line(99, b"unfuse: nobody's")
    assert machine.crews.progress("nobody") is None


async def test_late_request_for_a_failed_model_fails(machine: Machine, folder: str) -> None:
    """Given a request that was checked before its model failed, and stored after, then it fails at the next look."""
    await machine.crews.add("added", folder)
    card = (await machine.scheduler.registry.model_specs())["added"]
    machine.launchers[-1].failed.set_exception(ConfigError("a worker could not start"))
    await machine.look()
    late = await machine.ask_card(card)
    await machine.look()
    assert (await machine.scheduler.queue.load(late)).status == "failed"


async def test_shutdown_does_not_wait_for_an_unresponsive_hub(machine: Machine, folder: str) -> None:
    """Given a model that is still looked into, then workers are told to end at once, and its call is refused."""
    machine.hub_answers.clear()
    machine.hub_is_asked.clear()
    adding = asyncio.create_task(machine.crews.add("added", folder))
    try:
        await asyncio.to_thread(machine.hub_is_asked.wait)
        stopping = asyncio.create_task(machine.crews.stop(0.0))
        await asyncio.wait({stopping}, timeout=10)
        assert stopping.done() and machine.live == []
        with pytest.raises(ApiError, match="the server is stopping"):
            await adding
    finally:
        machine.hub_answers.set()
    assert await machine.served() == {"unfuse/shapes"}
