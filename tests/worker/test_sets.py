"""The sets of weights of a worker: what they are, and when it may be given another one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.integration.pictures import SHAPES
from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE
from tests.worker.test_executor import load
from unfuse.core.errors import ConfigError
from unfuse.core.plan import Choice, roles_of
from unfuse.core.task import Lease
from unfuse.models import card_of
from unfuse.stores.tensor_store import TensorStore
from unfuse.testing.queue_samples import task_of
from unfuse.worker.loaded_models import Swapping
from unfuse.worker.registration import Served, sets_of

OTHER = replace(CARD, name="test/other", weights={name: f"other-{weights}" for name, weights in CARD.weights.items()})


class Options:
    """Those of a worker that matter here."""

    def __init__(self, role: str = "all", loaded: str = "all") -> None:
        self.role, self.max_loaded_models, self.components = role, loaded, ()


def sets(role: str = "all", loaded: str = "all", *cards: Any) -> Any:
    served = Served((), cards or (CARD, OTHER), (), 1, ("cpu",))
    return sets_of(served, Options(role, loaded))  # type: ignore[arg-type]


def test_everything_is_loaded_unless_it_is_said_or_there_is_one_set() -> None:
    assert sets() == sets("encoder+denoiser") == sets("all", "1", CARD) == {}


def test_a_set_is_a_model_with_the_stages_of_its_roles() -> None:
    assert sets("all", "1") == {
        CARD.name: frozenset({ENCODE, DENOISE, DECODE}), OTHER.name: frozenset(OTHER.pools().values())
    }  # fmt: skip
    assert sets("denoiser", "1")[CARD.name] == {DENOISE}


def test_a_set_is_a_role_of_all_models_where_roles_stand_behind_commas() -> None:
    found = sets("encoder+decoder,denoiser", "all", CARD)
    assert found == {"encoder+decoder": frozenset({ENCODE, DECODE}), "denoiser": frozenset({DENOISE})}


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="both say what is loaded at a time"):
        sets("encoder,denoiser", "1")


class Executed:
    """An executor that is told what to load, and has loaded it when a test says so."""

    ready, loaded = True, ("first", 2.0)

    def __init__(self) -> None:
        self.swapped: list[str] = []

    def swap(self, loads: Any) -> None:
        self.ready, self.loaded = False, (loads[0].holds, 2.0)
        self.swapped.append(loads[0].holds)


def lease(pool: str) -> Lease:
    return Lease(task_of("req_1", "stage", 1, pool, "kind", CARD.name, {}, ()), "w", b"t", 0.0)


def shapes(*roles: str, folder: Path = SHAPES) -> Swapping:
    """A worker of the built-in model that has one of these roles at a time."""
    card = card_of("shapes", SHAPES, "auto")
    found = {role: frozenset(card.pools(Choice(roles_of(role))).values()) for role in roles}
    with TensorStore.create("shared_memory", owner="w", node="n", capacity=1 << 20) as store:
        loads = [replace(load(store, "/results"), models=(("shapes", str(folder), "auto"),))]  # type: ignore[arg-type]
    return Swapping(found, loads, [card])


async def test_another_set_is_loaded_once_nothing_runs_and_no_task_of_the_other_meets_it() -> None:
    with TensorStore.create("shared_memory", owner="w", node="n", capacity=1 << 20) as store:
        loads = [load(store, "/results")]  # type: ignore[arg-type]
        swapping = Swapping({"first": frozenset({ENCODE}), "second": frozenset({DENOISE})}, loads)
        executor, idle, withdrawn = Executed(), asyncio.Event(), asyncio.Event()

        async def withdraw() -> None:
            withdrawn.set()

        assert swapping.loads("second")[0].pools == {DENOISE}
        going = asyncio.create_task(swapping.to("second", executor, withdraw, idle))  # type: ignore[arg-type]
        await withdrawn.wait()
        await swapping.to("second", executor, withdraw, idle)  # type: ignore[arg-type]  # which it is told each second
        assert (swapping.going, swapping.holds, executor.swapped) == ("second", "first", [])
        assert swapping.fits(lease(f"{ENCODE}@1a2b"))
        assert not swapping.fits(lease(DENOISE))
        swapping.loaded(executor)  # type: ignore[arg-type]  # its compute had died, and has started again
        assert swapping.going == "second"

        idle.set()
        await going
        assert (swapping.going, swapping.holds, executor.swapped) == ("second", "", ["second"])
        assert not swapping.fits(lease(ENCODE))
        executor.ready = True
        swapping.loaded(executor)  # type: ignore[arg-type]
        assert (swapping.going, swapping.holds, swapping.load_s) == ("", "second", 2.0)
        assert swapping.fits(lease(DENOISE))
        await swapping.to("second", executor, withdraw, idle)  # type: ignore[arg-type]  # by an answer that came late
        assert (swapping.going, swapping.holds, executor.swapped) == ("", "second", ["second"])


class TestReadingAhead:
    """The kernel is asked for the files of a set, which it may read while another set still works."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        found: list[str] = []

        def ask(file: int, offset: int, length: int, advice: int) -> None:
            path = Path(f"/proc/self/fd/{file}").readlink()
            assert (offset, length, advice) == (0, 0, os.POSIX_FADV_WILLNEED)
            found.append(path.relative_to(SHAPES).as_posix())

        monkeypatch.setattr(os, "posix_fadvise", ask)
        return found

    async def test_files_of_the_set_that_is_likely_to_be_next_are_asked_for_once(self, asked: list[str]) -> None:
        swapping = shapes("encoder", "denoiser")
        await swapping.ahead("denoiser")
        await swapping.ahead("denoiser")
        assert asked == ["transformer/diffusion_pytorch_model.safetensors"]
        await swapping.ahead("nothing")
        assert len(asked) == 1

    async def test_those_of_the_set_that_is_loaded_are_asked_for_as_long_as_what_runs_takes(
        self, asked: list[str]
    ) -> None:
        """Given tasks that run, when another set is to be loaded, then its files are asked for before they end."""
        swapping, executor, idle = shapes("encoder", "denoiser"), Executed(), asyncio.Event()

        async def withdraw() -> None:
            return

        going = asyncio.create_task(swapping.to("denoiser", executor, withdraw, idle))  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            while not asked:
                await asyncio.sleep(0.01)
        assert executor.swapped == []
        idle.set()
        await going
        executor.ready = True
        swapping.loaded(executor)  # type: ignore[arg-type]
        await swapping.ahead("encoder")
        assert [name.partition("/")[0] for name in asked] == ["transformer", "text_encoder"]

    async def test_what_cannot_be_read_is_left_to_loading(self, asked: list[str], tmp_path: Path) -> None:
        await shapes("encoder", "denoiser", folder=tmp_path).ahead("denoiser")
        assert asked == []
