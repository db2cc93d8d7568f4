"""Models that come and go at a server whose device has room for one of them: who is started, ended and refused."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from tests.service.paper import ONE, Machine, shifted
from unfuse.core.errors import ConfigError
from unfuse.planning.placement import PROCESS
from unfuse.service import worker_groups as module
from unfuse.service.plan import ServingPlan


@pytest.fixture
async def machine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Machine]:
    """A server of the built-in model, whose workers have loaded it, with room for one such model."""
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.0)
    found = Machine(ONE)
    await found.begin()

    async def nothing() -> dict[str, list[str]]:
        return {}

    monkeypatch.setattr(found.scheduler.registry, "unavailable_pools", nothing)
    yield found
    await found.crews.stop(0)
    await found.scheduler.close()


@pytest.fixture(scope="module")
def siblings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models like the built-in one, each with a noise scheduler of its own."""
    return [shifted(tmp_path_factory.mktemp("model") / f"shift-{shift}", shift) for shift in (3.0, 6.0)]


async def test_models_that_do_not_fit_together_share_a_swapping_worker(machine: Machine, siblings: list[str]) -> None:
    """Given a model that fills its device, when two are added, then one worker for all three is started once the one
    before has ended, and says which of them it has; and when one is removed, the others get a worker of their own."""
    for name in siblings:
        await machine.crews.add(name, name)
    assert await machine.served() == {"unfuse/shapes", *siblings}, "requests are accepted from now on"
    assert machine.live == [["unfuse/shapes"]], "no call waits until workers have ended"
    await machine.crews.check_once()
    everyone = [*reversed(siblings), "unfuse/shapes"]
    assert (machine.live, machine.launchers[-1].max_loaded_models) == ([everyone], "1")
    assert machine.offered[-1] == sorted(everyone)

    await machine.scheduler.registry.dismiss(siblings[0])
    for _ in range(module.QUIET):
        assert machine.live == [everyone]
        await machine.crews.check_once()
    assert (machine.live, machine.launchers[-1].max_loaded_models) == ([[siblings[1], "unfuse/shapes"]], "1")
    await machine.scheduler.registry.dismiss(siblings[1])
    for _ in range(module.QUIET):
        await machine.crews.check_once()
    assert (machine.live, machine.launchers[-1].max_loaded_models) == ([["unfuse/shapes"]], "all")


async def test_model_gets_its_own_workers_if_memory_suffices(machine: Machine, siblings: list[str]) -> None:
    machine.service = Machine(2 * ONE + PROCESS // (1 << 20)).service
    await machine.crews.add(siblings[0], siblings[0])
    assert machine.live == [["unfuse/shapes"], [siblings[0]]]
    await machine.crews.check_once()
    assert len(machine.live) == 2


def heavy(name: str) -> str:
    """A model with a tensor of 64 MiB more."""
    folder = Path(f"{name}-heavy")
    (file,) = shutil.copytree(name, folder).glob("transformer/*.safetensors")
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    more = {"dtype": "F32", "shape": [16 << 20], "data_offsets": [len(data) - end, len(data) - end + (64 << 20)]}
    header = json.dumps(json.loads(data[8:end]) | {"more": more}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    os.truncate(file, 8 + len(header) + more["data_offsets"][1])
    return str(folder)


async def test_model_too_large_to_swap_is_rejected_without_changes(machine: Machine, siblings: list[str]) -> None:
    for name, said in ((heavy(siblings[0]), "the models do not fit"), ("/nowhere", "nowhere")):
        with pytest.raises(ConfigError, match=said):
            await machine.crews.add(name, name)
    await machine.crews.check_once()
    assert (machine.live, await machine.served()) == ([["unfuse/shapes"]], {"unfuse/shapes"})


async def test_swapping_rejects_a_model_that_needs_a_download(
    machine: Machine, siblings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a model whose weights are planned for and not on this disk, when it could only take turns, then the refusal
    says what to do first: nobody's workers end for a download."""
    folder, planned = Path(shutil.copytree(siblings[0], tmp_path / "away")), machine.service._planned

    def vanish(models: Mapping[str, str], others: Counter[str], coming: Counter[str]) -> ServingPlan:
        found = planned(models, others, coming)
        next(folder.glob("transformer/*.safetensors")).unlink()
        return found

    monkeypatch.setattr(machine.service, "_planned", vanish)
    with pytest.raises(ConfigError, match="do not fit.* download its files by `unfuse pull`"):
        await machine.crews.add(str(folder), str(folder))
    await machine.crews.check_once()
    assert machine.live == [["unfuse/shapes"]]


async def test_memory_of_workers_to_be_replaced_counts_as_free(machine: Machine, siblings: list[str]) -> None:
    await machine.crews.add(siblings[0], siblings[0])
    (plan, beside, together) = machine.asked
    held = PROCESS + (ONE << 20)
    assert plan == [0, 0]
    assert beside[1] == 0 and 0 < held - beside[0] < 8 << 20
    assert together == [0, -beside[0]]


async def test_model_that_fails_to_load_is_removed_and_others_are_restored(
    machine: Machine, siblings: list[str]
) -> None:
    """Given three models in turns of which the last one added cannot be loaded, when its worker ends, then it is served
    no more, its request fails with the reason, and the others are served again; so is each other one that is broken."""
    for name in siblings:
        await machine.crews.add(name, name)
    await machine.crews.check_once()
    asked = [await machine.ask(name) for name in (*siblings, "unfuse/shapes")]
    machine.launchers[-1].failed.set_exception(ConfigError("a worker could not start"))
    await machine.crews.check_once()
    assert machine.live == [sorted([siblings[0], "unfuse/shapes"])]
    await machine.served()
    assert {name: one.failure for name, one in machine.scheduler.registry.failed.items()} == {
        siblings[1]: "a worker could not start"
    }
    machine.launchers[-1].failed.set_exception(ConfigError("that one neither"))
    await machine.crews.check_once()
    assert machine.live == [["unfuse/shapes"]]
    assert await machine.served() == {"unfuse/shapes"}
    records = [await machine.scheduler.queue.load(request) for request in asked]
    assert [record.status for record in records] == ["failed", "failed", "queued"]
    (error,) = {record.context.error for record in records[1:2]}
    assert error and (error.code, error.message) == (
        "model_failed",
        "the model cannot be served: a worker could not start",
    )


async def test_workers_start_for_a_pending_request_of_a_removed_model(machine: Machine, siblings: list[str]) -> None:
    """Given a model that was added and removed at once, with a request between, then workers still come for that."""
    await machine.crews.add(siblings[0], siblings[0])
    request = await machine.ask(siblings[0])
    await machine.scheduler.registry.dismiss(siblings[0])
    for _ in range(module.QUIET + 1):
        await machine.crews.check_once()
    assert machine.live == [[siblings[0], "unfuse/shapes"]]
    await machine.scheduler.cancel(request)
    for _ in range(module.QUIET):
        await machine.crews.check_once()
    assert machine.live == [["unfuse/shapes"]]
