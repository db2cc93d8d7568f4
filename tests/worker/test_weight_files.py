"""Files that a worker has loaded: what shows that they have changed, and which pools cannot be served then."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import unfuse.models
from unfuse.core.card import ModelCard
from unfuse.core.messages import ChangedFile
from unfuse.core.plan import Choice
from unfuse.models import card_of
from unfuse.worker import loaded_models
from unfuse.worker.loaded_models import WeightFiles, states_of

SHAPES = Path(unfuse.models.__file__).parent / "shapes"
VAE = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the model that comes with unfuse."""
    return Path(shutil.copytree(SHAPES, tmp_path / "model"))


@pytest.fixture
def card(folder: Path) -> ModelCard:
    return card_of("model", folder)


@pytest.fixture
def files(folder: Path, card: ModelCard) -> WeightFiles:
    """Those of a worker of all stages."""
    return WeightFiles([("model", str(folder), "auto")], [card], Choice(), states_of(folder))


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


def replace(file: Path) -> None:
    """Put another file with one other weight in its place."""
    tensors = load_file(file)
    next(iter(tensors.values())).flat[0] += 1
    save_file(tensors, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def look(files: WeightFiles) -> dict[str, ChangedFile]:
    files.look()
    return files.changed


def test_files_that_nobody_touches_are_what_was_loaded(files: WeightFiles) -> None:
    assert not files.look()
    assert files.changed == {}


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("change", [overwrite, replace, Path.unlink])
def test_a_changed_file_spoils_the_pools_that_are_loaded_from_it(
    change: object, folder: Path, card: ModelCard, files: WeightFiles
) -> None:
    assert callable(change)
    change(folder / VAE)
    pool = card.pools()["vae_decode"]

    assert files.look()
    assert files.changed == {pool: ChangedFile(VAE, compared=False)}
    files.compare()
    assert look(files) == {pool: ChangedFile(VAE, compared=True)}
    assert not files.look()


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("name", ["config.json", "diffusion_pytorch_model.safetensors"])
def test_the_same_bytes_are_served_on(name: str, folder: Path, files: WeightFiles) -> None:
    file = folder / "vae" / name
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)

    assert {changed.name for changed in look(files).values()} == {f"vae/{name}"}
    files.compare()
    assert look(files) == {}
    overwrite(folder / VAE)
    assert files.look()


@pytest.mark.usefixtures("written")
def test_a_file_whose_bytes_are_put_back_is_served_again(folder: Path, files: WeightFiles) -> None:
    content = (folder / VAE).read_bytes()
    overwrite(folder / VAE)
    files.look()
    files.compare()
    assert all(changed.compared for changed in look(files).values())

    (folder / VAE).write_bytes(content)
    files.look()
    files.compare()
    assert look(files) == {}


def test_a_file_that_is_written_to_is_compared_once_that_is_over(
    folder: Path, files: WeightFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    overwrite(folder / VAE)
    files.look()
    files.compare()
    assert [changed.compared for changed in look(files).values()] == [False]

    now = time.time()
    monkeypatch.setattr(loaded_models.time, "time", lambda: now + 60)
    files.compare()
    assert [changed.compared for changed in look(files).values()] == [True]


@pytest.mark.row("K1")
def test_a_clock_that_was_set_back_delays_no_comparison(
    folder: Path, files: WeightFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a file whose times are an hour ahead, when it stays as it is, then it is compared all the same."""
    wall, monotonic = time.time(), time.monotonic()
    monkeypatch.setattr(loaded_models.time, "time", lambda: wall - 3600)
    monkeypatch.setattr(loaded_models.time, "monotonic", lambda: monotonic)
    overwrite(folder / VAE)
    files.look()
    files.compare()
    assert [changed.compared for changed in look(files).values()] == [False]

    monkeypatch.setattr(loaded_models.time, "monotonic", lambda: monotonic + 60)
    replace(folder / VAE)
    files.look()
    files.compare()
    assert [changed.compared for changed in look(files).values()] == [False]

    monkeypatch.setattr(loaded_models.time, "monotonic", lambda: monotonic + 120)
    files.compare()
    assert [changed.compared for changed in look(files).values()] == [True]


@pytest.mark.usefixtures("written")
def test_a_pool_that_compute_left_out_is_not_served_even_if_its_bytes_are_put_back(
    folder: Path, card: ModelCard, files: WeightFiles
) -> None:
    pool, content = card.pools()["vae_decode"], (folder / VAE).read_bytes()
    overwrite(folder / VAE)
    files.look()
    files.left_out = frozenset({pool})
    (folder / VAE).write_bytes(content)
    files.compare()
    assert look(files) == {pool: ChangedFile(VAE, compared=True)}

    files.left_out = frozenset()
    assert look(files) == {}


def test_a_change_between_card_and_loading_is_seen(folder: Path) -> None:
    before = states_of(folder)
    card = card_of("model", folder)
    overwrite(folder / VAE)

    files = WeightFiles([("model", str(folder), "auto")], [card], Choice(), before)
    assert files.look()


def test_files_of_stages_that_run_elsewhere_do_not_count(folder: Path, card: ModelCard) -> None:
    files = WeightFiles(
        [("model", str(folder), "auto")], [card], Choice(roles=frozenset({"denoiser"})), states_of(folder)
    )
    overwrite(folder / VAE)
    assert not files.look()


@pytest.mark.usefixtures("written")
def test_of_equal_components_the_ones_that_were_loaded_count(folder: Path, card: ModelCard, tmp_path: Path) -> None:
    twin = Path(shutil.copytree(folder, tmp_path / "twin"))
    models = [("model", str(folder), "auto"), ("twin", str(twin), "auto")]
    cards = [card, card_of("twin", twin)]
    states = states_of(folder) | states_of(twin)
    together = WeightFiles(models, cards, Choice(), states)
    in_turns = WeightFiles(models, cards, Choice(), states, in_turns=True)

    overwrite(twin / VAE)

    assert not together.look()
    assert in_turns.look()


def test_only_what_is_written_to_in_place_changes_mapped_weights(
    folder: Path, card: ModelCard, files: WeightFiles
) -> None:
    pool = card.pools()["vae_decode"]
    replace(folder / VAE)
    assert files.overwritten(pool) is None
    assert files.overwritten(card.pools()["denoise"]) is None


@pytest.mark.usefixtures("written")
def test_what_was_overwritten_is_known_before_and_after_it_is_compared(
    folder: Path, card: ModelCard, files: WeightFiles
) -> None:
    pool = card.pools()["vae_decode"]
    overwrite(folder / VAE)
    assert files.overwritten(pool) == ChangedFile(VAE, compared=False)
    assert files.overwritten(card.pools()["denoise"]) is None

    files.compare()
    assert files.overwritten(pool) == ChangedFile(VAE, compared=True)


def test_a_gguf_file_is_known_by_its_own_name(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert [*states_of(file)] == [file]
