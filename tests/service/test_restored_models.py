"""Models that were added at run time are served again by a server that is started after the last one was killed."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.service.paper import ONE, Machine, shifted
from unfuse.core.clock import SystemClock
from unfuse.core.errors import ConfigError
from unfuse.core.request import ErrorInfo
from unfuse.edge.access import ApiError
from unfuse.planning.placement import PROCESS
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.lifecycle import MODEL_FAILED
from unfuse.service import worker_groups as module

TWO = 2 * ONE + PROCESS // (1 << 20)
"""Room for two models beside each other, in MiB."""

Start = Callable[..., Machine]


class SharedQueue(MemoryQueue):
    """A queue that several servers use."""

    shared = True


@pytest.fixture
async def queue() -> AsyncIterator[MemoryQueue]:
    """What outlives a server."""
    found = SharedQueue(SystemClock())
    yield found
    await found.close()


@pytest.fixture
async def start(queue: MemoryQueue, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Start a server over the queue; those before it count as killed: nothing of theirs is ended in order."""
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.0)
    started = list[Machine]()

    def begun(server: str = "here:8000", workers: str = "all=1") -> Machine:
        started.append(Machine(TWO, queue, server, workers))
        return started[-1]

    yield begun
    for one in started:
        await one.scheduler.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shifted(tmp_path / "shifted", 3.0))


async def killed_with_a_request(start: Start, folder: Path) -> str:
    """A server that is killed after a model was added, and asked."""
    one = start()
    await one.begin()
    await one.crews.add("added", str(folder))
    return await one.ask("added")


async def error_of(machine: Machine, request: str) -> tuple[str, ErrorInfo | None, bool]:
    context = (await machine.scheduler.queue.load(request)).context
    return context.status, context.error, context.is_dead_letter


async def test_added_model_gets_workers_after_a_restart_and_keeps_requests(start: Start, folder: Path) -> None:
    request = await killed_with_a_request(start, folder)
    other = start()
    await other.begin()
    assert await other.served() == {"unfuse/shapes", "added"}, "requests are accepted from the first moment on"
    await other.look(3)
    assert other.live == [["unfuse/shapes"], ["added"]]
    assert (await error_of(other, request))[0] == "queued"
    with pytest.raises(ApiError, match="served already"):
        await other.crews.add("added", str(folder))


async def test_missing_model_folder_fails_requests_and_next_start_retries(
    start: Start, folder: Path, tmp_path: Path
) -> None:
    request = await killed_with_a_request(start, folder)
    aside = shutil.move(folder, tmp_path / "aside")
    other = start()
    await other.begin()
    await other.look(module.QUIET + 2)
    assert other.live == [["unfuse/shapes"]] and await other.served() == {"unfuse/shapes"}
    reason = other.scheduler.registry.failed["added"].failure
    assert "there is no such folder" in reason and str(tmp_path) not in reason
    status, error, dead = await error_of(other, request)
    assert (status, dead) == ("failed", True) and error and error.code == MODEL_FAILED
    assert error.message == f"the model cannot be served: {reason}"

    shutil.move(aside, folder)
    third = start()
    await third.begin()
    await third.look()
    assert third.live == [["unfuse/shapes"], ["added"]] and await third.served() == {"unfuse/shapes", "added"}
    assert third.scheduler.registry.failed == {}


async def test_requests_fail_if_workers_cannot_start_after_a_restart(start: Start, folder: Path) -> None:
    request = await killed_with_a_request(start, folder)
    other = start()
    await other.begin()
    await other.look()
    other.crews.process_line(2, f"unfuse: {folder}/vae is damaged\n".encode())
    other.launchers[-1].failed.set_exception(ConfigError("a worker could not start"))
    late = await other.ask("added")
    await other.look()
    for one in (request, late):
        status, error, _ = await error_of(other, one)
        assert status == "failed" and error and error.message == "the model cannot be served: added/vae is damaged"
    await other.look(module.QUIET + 2)
    assert other.live == [["unfuse/shapes"]]


async def test_model_that_never_started_is_not_restored_after_a_restart(start: Start, folder: Path) -> None:
    one = start()
    await one.begin()
    await one.crews.add("added", str(folder))
    one.launchers[-1].failed.set_exception(ConfigError("a worker could not start"))
    await one.look()
    other = start()
    await other.begin()
    await other.look(2)
    assert other.live == [["unfuse/shapes"]] and await other.served() == {"unfuse/shapes"}
    assert other.scheduler.registry.failed["added"].failure == "a worker could not start", "it can still be read"
    await other.crews.add("added", str(folder))
    assert await other.served() == {"unfuse/shapes", "added"} and other.scheduler.registry.failed == {}


async def test_removed_model_has_workers_until_its_last_request_ends(start: Start, folder: Path) -> None:
    request = await killed_with_a_request(start, folder)
    one = start()
    await one.scheduler.registry.dismiss("added")
    other = start()
    await other.begin()
    await other.look(module.QUIET + 1)
    assert other.live == [["unfuse/shapes"], ["added"]] and await other.served() == {"unfuse/shapes"}
    await other.scheduler.cancel(request)
    await other.look(module.QUIET)
    assert other.live == [["unfuse/shapes"]]
    third = start()
    await third.begin()
    await third.look(2)
    assert third.live == [["unfuse/shapes"]]
    await third.crews.add("added", str(folder))


async def test_requests_for_changed_model_files_fail_and_new_ones_are_served(start: Start, folder: Path) -> None:
    """Given other weights at the place of a model, then nobody has the pools that its old requests wait for."""
    request = await killed_with_a_request(start, folder)
    (file,) = folder.glob("transformer/*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    other = start()
    await other.begin()
    await other.look()
    status, error, _ = await error_of(other, request)
    assert status == "failed" and error and "its files, or --dtype, have changed" in error.message
    assert other.live == [["unfuse/shapes"], ["added"]]
    found = (await other.scheduler.registry.model_specs())["added"].pools()
    (plan,) = [plan for plan in (group.plan for group in other.crews._groups) if plan.models[0].spec.name == "added"]
    assert found == plan.models[0].spec.pools()


async def test_model_added_by_another_server_is_not_started_here(start: Start, folder: Path) -> None:
    await killed_with_a_request(start, folder)
    other = start(server="there:8000")
    await other.begin()
    await other.look(2)
    assert other.live == [["unfuse/shapes"]]
    assert await other.served() == {"unfuse/shapes", "added"}, "it is known all the same"


async def test_model_added_without_workers_is_offered_by_all_such_servers(start: Start, folder: Path) -> None:
    one, other = start(workers="none"), start(server="there:8000", workers="none")
    for machine in (one, other):
        await machine.begin()
    await one.crews.add("added", str(folder))
    await other.look(2)
    assert other.offered[-1] == one.offered[-1] == ["added", "unfuse/shapes"]
    shutil.rmtree(folder)
    third = start(server="yonder:8000", workers="none")
    await third.begin()
    await third.look(2)
    assert await third.served() == {"unfuse/shapes", "added"}, "workers elsewhere may have it"
    assert third.offered[-1] == ["unfuse/shapes"]


async def test_record_of_an_added_model_is_deleted_if_it_is_configured(start: Start, folder: Path) -> None:
    await killed_with_a_request(start, folder)
    other = start()
    await other.begin()
    found = (await other.scheduler.registry.admin_records())["added"].models[0]
    other.scheduler.registry._cards["added"] = found
    await other.look()
    assert await other.scheduler.registry.admin_records() == {}
    assert other.live == [["unfuse/shapes"]]


async def test_concurrent_adds_on_two_servers_reject_one(start: Start, folder: Path, tmp_path: Path) -> None:
    """Given two servers of one queue that looked into a model each, then one of them is told that the name is taken."""
    one, other = start(), start(server="there:8000")
    for machine in (one, other):
        await machine.begin()
    second = shifted(tmp_path / "second", 6.0)
    planned, crew = await one.crews._plan_added_model("added", str(folder))
    await other.crews.add("added", second)
    assert crew is None and not await one.scheduler.registry.admit(planned.models[0].spec, "here:8000")
    with pytest.raises(ApiError, match="served already"):
        await one.crews.add("added", str(folder))
    assert {machine.scheduler.registry.failed == {} for machine in (one, other)} == {True}
    assert (await one.scheduler.registry.model_specs())["added"].source == second


async def test_requests_waiting_for_an_unserved_model_are_logged_once(start: Start) -> None:
    """Given a server that is started without a model that it had, then its log says for what requests wait."""
    one = start()
    await one.begin()
    await one.ask("unfuse/shapes")
    other = start()
    await other.scheduler.registry.declare([])
    with capture_logs() as logs:
        await other.look(2)
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert line["event"].startswith("requests wait for a model that is not served")
    assert (line["model"], line["requests"]) == ("unfuse/shapes", 1)
