"""A worker's models: files that change, sets that are loaded in turn, adapters that come from the scheduler."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from tests.integration.pictures import SHAPES
from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE
from tests.worker.test_executor import load
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import ConfigError, NotFound, PermanentError, TransientError, UnfuseError
from unfuse.core.messages import AdapterBytes, FetchAdapter, Rejected, UnknownWorker
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import StageSelector, roles_of
from unfuse.core.task import Claim, Lease
from unfuse.core.worker_status import ChangedFile
from unfuse.models import read_model_spec
from unfuse.service.service import AdapterServer
from unfuse.stores.tensor_store import TensorStore
from unfuse.testing.queue_samples import task_of
from unfuse.weights.adapters import CHUNK, AdapterFolder
from unfuse.worker import loaded_models
from unfuse.worker.compute_messages import unfetched
from unfuse.worker.loaded_models import AdapterFetcher, ModelSwapper, WeightFiles, states_of
from unfuse.worker.registration import ServedStages, swappable_sets

VAE = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the model that comes with unfuse."""
    return Path(shutil.copytree(SHAPES, tmp_path / "model"))


@pytest.fixture
def card(folder: Path) -> ModelSpec:
    return read_model_spec("model", folder)


@pytest.fixture
def files(folder: Path, card: ModelSpec) -> WeightFiles:
    """Those of a worker of all stages."""
    return WeightFiles([("model", str(folder), "auto")], [card], StageSelector(), states_of(folder))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a minute later than it is: all files have been written."""
    now = time.time()
    monkeypatch.setattr(loaded_models.time, "time", lambda: now + 60)


def overwrite(file: Path) -> None:
    """Change one weight where it lies."""
    with file.open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        stream.write(np.float32(0.5).tobytes())


def rename_over(file: Path) -> None:
    """Put another file with one other weight in its place."""
    tensors = load_file(file)
    next(iter(tensors.values())).flat[0] += 1
    save_file(tensors, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def look(files: WeightFiles) -> dict[str, ChangedFile]:
    files.refresh()
    return files.changed


def test_unchanged_weight_files_are_not_reported(files: WeightFiles) -> None:
    assert not files.refresh()
    assert files.changed == {}


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("change", [overwrite, rename_over, Path.unlink])
def test_changed_file_disables_the_pools_loaded_from_it(
    change: object, folder: Path, card: ModelSpec, files: WeightFiles
) -> None:
    assert callable(change)
    change(folder / VAE)
    pool = card.pools()["vae_decode"]

    assert files.refresh()
    assert files.changed == {pool: ChangedFile(VAE, compared=False)}
    files.compare()
    assert look(files) == {pool: ChangedFile(VAE, compared=True)}
    assert not files.refresh()


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("name", ["config.json", "diffusion_pytorch_model.safetensors"])
def test_rewritten_file_with_the_same_bytes_is_still_served(name: str, folder: Path, files: WeightFiles) -> None:
    file = folder / "vae" / name
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)

    assert {changed.name for changed in look(files).values()} == {f"vae/{name}"}
    files.compare()
    assert look(files) == {}
    overwrite(folder / VAE)
    assert files.refresh()


@pytest.mark.usefixtures("written")
def test_pool_is_served_again_after_its_file_is_restored(folder: Path, files: WeightFiles) -> None:
    content = (folder / VAE).read_bytes()
    overwrite(folder / VAE)
    files.refresh()
    files.compare()
    assert all(changed.compared for changed in look(files).values())

    (folder / VAE).write_bytes(content)
    files.refresh()
    files.compare()
    assert look(files) == {}


def test_file_being_written_is_compared_after_writing_ends(
    folder: Path, files: WeightFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    overwrite(folder / VAE)
    files.refresh()
    files.compare()
    assert [changed.compared for changed in look(files).values()] == [False]

    now = time.time()
    monkeypatch.setattr(loaded_models.time, "time", lambda: now + 60)
    files.compare()
    assert [changed.compared for changed in look(files).values()] == [True]


@pytest.mark.row("K1")
def test_clock_set_back_does_not_delay_the_file_comparison(
    folder: Path, files: WeightFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a file whose times are an hour ahead, when it stays as it is, then it is compared all the same."""
    wall, monotonic = time.time(), time.monotonic()
    monkeypatch.setattr(loaded_models.time, "time", lambda: wall - 3600)
    monkeypatch.setattr(loaded_models.time, "monotonic", lambda: monotonic)
    overwrite(folder / VAE)
    files.refresh()
    files.compare()
    assert [changed.compared for changed in look(files).values()] == [False]

    monkeypatch.setattr(loaded_models.time, "monotonic", lambda: monotonic + 60)
    rename_over(folder / VAE)
    files.refresh()
    files.compare()
    assert [changed.compared for changed in look(files).values()] == [False]

    monkeypatch.setattr(loaded_models.time, "monotonic", lambda: monotonic + 120)
    files.compare()
    assert [changed.compared for changed in look(files).values()] == [True]


@pytest.mark.usefixtures("written")
def test_pool_that_was_not_loaded_is_not_served_if_its_file_is_restored(
    folder: Path, card: ModelSpec, files: WeightFiles
) -> None:
    pool, content = card.pools()["vae_decode"], (folder / VAE).read_bytes()
    overwrite(folder / VAE)
    files.refresh()
    files.left_out = frozenset({pool})
    (folder / VAE).write_bytes(content)
    files.compare()
    assert look(files) == {pool: ChangedFile(VAE, compared=True)}

    files.left_out = frozenset()
    assert look(files) == {}


def test_file_change_between_model_spec_and_load_is_detected(folder: Path) -> None:
    before = states_of(folder)
    card = read_model_spec("model", folder)
    overwrite(folder / VAE)

    files = WeightFiles([("model", str(folder), "auto")], [card], StageSelector(), before)
    assert files.refresh()


def test_changed_files_of_stages_on_other_workers_are_ignored(folder: Path, card: ModelSpec) -> None:
    files = WeightFiles(
        [("model", str(folder), "auto")], [card], StageSelector(roles=frozenset({"denoiser"})), states_of(folder)
    )
    overwrite(folder / VAE)
    assert not files.refresh()


@pytest.mark.usefixtures("written")
def test_of_equal_components_only_the_loaded_files_are_watched(folder: Path, card: ModelSpec, tmp_path: Path) -> None:
    twin = Path(shutil.copytree(folder, tmp_path / "twin"))
    models = [("model", str(folder), "auto"), ("twin", str(twin), "auto")]
    cards = [card, read_model_spec("twin", twin)]
    states = states_of(folder) | states_of(twin)
    together = WeightFiles(models, cards, StageSelector(), states)
    in_turns = WeightFiles(models, cards, StageSelector(), states, swaps_models=True)

    overwrite(twin / VAE)

    assert not together.refresh()
    assert in_turns.refresh()


def test_replaced_file_does_not_count_as_overwritten(folder: Path, card: ModelSpec, files: WeightFiles) -> None:
    pool = card.pools()["vae_decode"]
    rename_over(folder / VAE)
    assert files.overwritten(pool) is None
    assert files.overwritten(card.pools()["denoise"]) is None


@pytest.mark.usefixtures("written")
def test_overwritten_file_is_reported_before_and_after_comparison(
    folder: Path, card: ModelSpec, files: WeightFiles
) -> None:
    pool = card.pools()["vae_decode"]
    overwrite(folder / VAE)
    assert files.overwritten(pool) == ChangedFile(VAE, compared=False)
    assert files.overwritten(card.pools()["denoise"]) is None

    files.compare()
    assert files.overwritten(pool) == ChangedFile(VAE, compared=True)


def test_file_states_of_a_gguf_model_contain_only_that_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert [*states_of(file)] == [file]


OTHER = replace(CARD, name="test/other", weights={name: f"other-{weights}" for name, weights in CARD.weights.items()})


class Options:
    """Those of a worker that matter here."""

    def __init__(self, role: str = "all", loaded: str = "all") -> None:
        self.role, self.max_loaded_models, self.components = role, loaded, ()


def sets(role: str = "all", loaded: str = "all", *cards: Any) -> Any:
    served = ServedStages((), cards or (CARD, OTHER), (), 1, ("cpu",))
    return swappable_sets(served, Options(role, loaded))  # type: ignore[arg-type]


def test_all_models_are_loaded_at_once_by_default() -> None:
    assert sets() == sets("encoder+denoiser") == sets("all", "1", CARD) == {}


def test_max_loaded_models_1_makes_one_swappable_set_per_model() -> None:
    assert sets("all", "1") == {
        CARD.name: frozenset({ENCODE, DENOISE, DECODE}),
        OTHER.name: frozenset(OTHER.pools().values()),
    }
    assert sets("denoiser", "1")[CARD.name] == {DENOISE}


def test_comma_separated_roles_make_one_swappable_set_per_role() -> None:
    found = sets("encoder+decoder,denoiser", "all", CARD)
    assert found == {"encoder+decoder": frozenset({ENCODE, DECODE}), "denoiser": frozenset({DENOISE})}


def test_comma_roles_with_max_loaded_models_1_raise_config_error() -> None:
    with pytest.raises(ConfigError, match="both select what is loaded at a time"):
        sets("encoder,denoiser", "1")


class Executed:
    """An executor that is told what to load, and has loaded it when a test says so."""

    ready, loaded = True, ("first", 2.0)

    def __init__(self) -> None:
        self.swapped: list[str] = []

    def swap(self, loads: Any) -> None:
        self.ready, self.loaded = False, (loads[0].loaded_model, 2.0)
        self.swapped.append(loads[0].loaded_model)


def lease(pool: str) -> Lease:
    return Lease(task_of("req_1", "stage", 1, pool, "kind", CARD.name, {}, ()), "w", b"t", 0.0)


def shapes(*roles: str, folder: Path = SHAPES) -> ModelSwapper:
    """A worker of the built-in model that has one of these roles at a time."""
    card = read_model_spec("shapes", SHAPES, "auto")
    found = {role: frozenset(card.pools(StageSelector(roles_of(role))).values()) for role in roles}
    with TensorStore.create("shared_memory", owner="w", node="n", capacity=1 << 20) as store:
        loads = [replace(load(store, "/results"), models=(("shapes", str(folder), "auto"),))]  # type: ignore[arg-type]
    return ModelSwapper(found, loads, [card])


async def test_model_swap_waits_until_idle_and_blocks_tasks_of_other_models() -> None:
    with TensorStore.create("shared_memory", owner="w", node="n", capacity=1 << 20) as store:
        loads = [load(store, "/results")]  # type: ignore[arg-type]
        swapping = ModelSwapper({"first": frozenset({ENCODE}), "second": frozenset({DENOISE})}, loads)
        executor, idle, withdrawn = Executed(), asyncio.Event(), asyncio.Event()

        async def withdraw() -> None:
            withdrawn.set()

        assert swapping.loads("second")[0].pools == {DENOISE}
        going = asyncio.create_task(swapping.swap_to("second", executor, withdraw, idle))  # type: ignore[arg-type]
        await withdrawn.wait()
        await swapping.swap_to("second", executor, withdraw, idle)  # type: ignore[arg-type]  # which it is told each second
        assert (swapping.target_model, swapping.loaded_model, executor.swapped) == ("second", "first", [])
        assert swapping.is_loaded(lease(f"{ENCODE}@1a2b"))
        assert not swapping.is_loaded(lease(DENOISE))
        swapping.loaded(executor)  # type: ignore[arg-type]  # its compute had died, and has started again
        assert swapping.target_model == "second"

        idle.set()
        await going
        assert (swapping.target_model, swapping.loaded_model, executor.swapped) == ("second", "", ["second"])
        assert not swapping.is_loaded(lease(ENCODE))
        executor.ready = True
        swapping.loaded(executor)  # type: ignore[arg-type]
        assert (swapping.target_model, swapping.loaded_model, swapping.load_s) == ("", "second", 2.0)
        assert swapping.is_loaded(lease(DENOISE))
        await swapping.swap_to("second", executor, withdraw, idle)  # type: ignore[arg-type]  # by an answer that came late
        assert (swapping.target_model, swapping.loaded_model, executor.swapped) == ("", "second", ["second"])


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

    async def test_files_of_the_next_model_are_read_ahead_once(self, asked: list[str]) -> None:
        swapping = shapes("encoder", "denoiser")
        await swapping.read_ahead("denoiser")
        await swapping.read_ahead("denoiser")
        assert asked == ["transformer/diffusion_pytorch_model.safetensors"]
        await swapping.read_ahead("nothing")
        assert len(asked) == 1

    async def test_files_are_read_ahead_while_tasks_finish_before_a_swap(self, asked: list[str]) -> None:
        """Given tasks that run, when another set is to be loaded, then its files are asked for before they end."""
        swapping, executor, idle = shapes("encoder", "denoiser"), Executed(), asyncio.Event()

        async def withdraw() -> None:
            return

        going = asyncio.create_task(swapping.swap_to("denoiser", executor, withdraw, idle))  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            while not asked:
                await asyncio.sleep(0.01)
        assert executor.swapped == []
        idle.set()
        await going
        executor.ready = True
        swapping.loaded(executor)  # type: ignore[arg-type]
        await swapping.read_ahead("encoder")
        assert [name.partition("/")[0] for name in asked] == ["transformer", "text_encoder"]

    async def test_unreadable_files_are_skipped_by_read_ahead(self, asked: list[str], tmp_path: Path) -> None:
        await shapes("encoder", "denoiser", folder=tmp_path).read_ahead("denoiser")
        assert asked == []


DATA = os.urandom(2 * CHUNK + 7)


ID = xxhash.xxh3_128_hexdigest(DATA)


Change = Callable[[AdapterBytes], Any]


class Lender:
    """What a worker's link is to one whose folder is `folder`; `change` says what becomes of each answer."""

    def __init__(self, folder: Path, change: Change = lambda lent: lent) -> None:
        self.asked, self._change = list[FetchAdapter](), change
        self._lending = AdapterServer(None, str(folder))  # type: ignore[arg-type]

    async def call(self, message: FetchAdapter) -> Any:
        self.asked.append(message)
        answer = await self._lending.answer(b"", message)
        return self._change(answer) if isinstance(answer, AdapterBytes) else answer


def adapted(kind: str = "denoise", lora: str = "ink:0.5", ids: str = ID) -> Lease:
    params: dict[str, Any] = {"lora": lora} if lora else {}
    task = task_of("r", "denoise", 1, "p", kind, "m", params, derived=DerivedFacts(lora_id=ids if lora else ""))
    return Lease(task, "worker", b"token", 0.0)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The scheduler's folder, the worker's own, and where it keeps what it borrows."""
    found = tmp_path / "there", tmp_path / "here", tmp_path / "data/loras"
    for folder in found[:2]:
        folder.mkdir()
    (found[0] / "ink.safetensors").write_bytes(DATA)
    return found


def bring(link: Lender, places: tuple[Path, Path, Path], *leases: Lease) -> None:
    async def all_of_them() -> None:
        made = AdapterFetcher(link, str(places[1]), places[2])  # type: ignore[arg-type]
        await asyncio.gather(*(made.fetch(one) for one in leases or [adapted()]))

    asyncio.run(all_of_them())


def kept(places: tuple[Path, Path, Path]) -> list[str]:
    return sorted(file.name for file in places[2].iterdir()) if places[2].exists() else []


def test_adapter_is_fetched_once_in_chunks_and_cached_by_content_hash(places: tuple[Path, Path, Path]) -> None:
    link = Lender(places[0])
    bring(link, places, adapted(), adapted())
    bring(link, places, adapted(lora="renamed"))
    assert [message.offset for message in link.asked] == [0, CHUNK, 2 * CHUNK]
    assert kept(places) == [f"{ID}.safetensors"]
    assert AdapterFolder(str(places[1]), str(places[2])).file("ink", ID).read_bytes() == DATA


def test_local_or_unused_adapter_is_not_fetched(places: tuple[Path, Path, Path]) -> None:
    link = Lender(places[0])
    bring(link, places, adapted("text_encode"), adapted(lora=""))
    asyncio.run(AdapterFetcher(link, "", places[2]).fetch(adapted()))  # type: ignore[arg-type]  # no adapters are served
    (places[1] / "ink.safetensors").write_bytes(DATA)
    bring(link, places)
    assert not link.asked and not kept(places)


def test_local_adapter_with_other_content_is_not_used(places: tuple[Path, Path, Path]) -> None:
    (places[1] / "ink.safetensors").write_bytes(b"other")
    bring(Lender(places[0]), places)
    assert AdapterFolder(str(places[1]), str(places[2])).file("ink", ID).read_bytes() == DATA


def test_corrupt_cached_adapter_is_fetched_again(places: tuple[Path, Path, Path]) -> None:
    bring(Lender(places[0]), places)
    (places[2] / f"{ID}.safetensors").write_bytes(DATA[:-1] + b"?")
    bring(again := Lender(places[0]), places)
    assert again.asked
    assert (places[2] / f"{ID}.safetensors").read_bytes() == DATA


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda lent: AdapterBytes(lent.size, bytes(len(lent.data))), PermanentError, "does not match its checksum"),
        (lambda lent: AdapterBytes(lent.size - 1, lent.data), TransientError, "was changed while"),
        (lambda lent: AdapterBytes(lent.size, b""), TransientError, "was changed while"),
        (lambda lent: AdapterBytes(5 << 30, lent.data), PermanentError, "adapters may have 1 to"),
        (lambda _: AdapterBytes(0, b""), PermanentError, "adapters may have 1 to"),
        (lambda _: Rejected("no lora 'ink' is there"), NotFound, "no lora 'ink' is there"),
        (lambda _: UnknownWorker(), NotFound, "cannot be fetched"),
    ],
)
def test_invalid_adapter_download_is_rejected_and_not_cached(
    change: Change, error: type[UnfuseError], says: str, places: tuple[Path, Path, Path]
) -> None:
    with pytest.raises(error, match=says) as raised:
        bring(Lender(places[0], change), places)
    assert not kept(places)
    failed = unfetched(Claim("r", "denoise", 1, b"t"), raised.value, True)
    assert failed.kind == ("transient" if error is TransientError else "permanent")


def test_path_as_adapter_id_raises_permanent_error(places: tuple[Path, Path, Path]) -> None:
    with pytest.raises(PermanentError, match="is not the id of an adapter"):
        AdapterFolder(str(places[0]), str(places[2])).file("ink", "../../there/ink")


def test_adapter_server_rejects_paths_and_unknown_adapters(places: tuple[Path, Path, Path]) -> None:
    async def ask(loras: str, name: str, id: str = ID) -> Any:
        return await AdapterServer(None, loras).answer(b"", FetchAdapter(name, id))  # type: ignore[arg-type]

    said = [asyncio.run(ask(str(places[0]), name)) for name in ("../there/ink", "fog")]
    assert all(isinstance(answer, Rejected) and "does not exist" in answer.message for answer in said)
    assert "other content" in asyncio.run(ask(str(places[0]), "ink", "0" * 32)).message
    assert "--loras FOLDER" in asyncio.run(ask("", "ink")).message


def test_adapter_cache_evicts_old_files_and_checks_free_disk_space(
    places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_models, "MAX_ADAPTER_BYTES", len(DATA) + 10)
    places[2].mkdir(parents=True)
    for number, name in enumerate(("new", "old", ".left")):
        (places[2] / name).write_bytes(bytes(8))
        os.utime(places[2] / name, (1e9 - number, 1e9))
    bring(Lender(places[0]), places)
    assert kept(places) == [f"{ID}.safetensors", "new"]
    monkeypatch.setattr(loaded_models.shutil, "disk_usage", lambda _: _Full)
    (places[2] / f"{ID}.safetensors").unlink()
    with pytest.raises(TransientError, match="has only 5 free"):
        bring(Lender(places[0]), places)


class _Full:
    free = 5
