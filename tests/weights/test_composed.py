"""A model of which some components come from elsewhere: what it is, what it is known by, and what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.integration.pictures import SHAPES
from unfuse.core.errors import ConfigError, UsageError
from unfuse.models import read_model_spec, resolve_source
from unfuse.weights.fingerprints import FINGERPRINTS
from unfuse.weights.source import is_local, parse_component_sources, source_of, split_name, with_components


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FINGERPRINTS, "_file", None)
    FINGERPRINTS.cache_in(tmp_path / "data")


@pytest.fixture
def vae(tmp_path: Path) -> Path:
    """The folder of a VAE with other weights than the built-in model's, and nothing around it."""
    folder = tmp_path / "other" / "vae"
    shutil.copytree(SHAPES / "vae", folder)
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + 1
    save_file(tensors, file, {"format": "pt"})
    return folder


def pools(folder: Path) -> dict[str, str]:
    return dict(read_model_spec("m", folder).pools())


def rewritten(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_composed_model_has_the_pools_of_a_manually_merged_folder(vae: Path, tmp_path: Path) -> None:
    """Pools are those of a copy by hand; those of stages that use nothing from elsewhere are the model's own."""
    copied = tmp_path / "copied"
    shutil.copytree(SHAPES, copied)
    shutil.rmtree(copied / "vae")
    shutil.copytree(vae, copied / "vae")

    found = pools(resolve_source(with_components("unfuse/shapes", {"vae": str(vae)})))

    assert found == pools(copied)
    own = pools(SHAPES)
    assert found["vae_decode"] != own["vae_decode"]
    assert {name: pool for name, pool in found.items() if name != "vae_decode"} == {
        name: pool for name, pool in own.items() if name != "vae_decode"
    }


def test_component_source_may_be_a_whole_pipeline_folder(vae: Path, tmp_path: Path) -> None:
    shutil.copy(SHAPES / "model_index.json", vae.parent)
    by_folder, by_pipeline = (
        pools(resolve_source(with_components("unfuse/shapes", {"vae": str(place)}))) for place in (vae, vae.parent)
    )
    assert by_folder == by_pipeline
    with pytest.raises(ConfigError, match="that model has no component vae_2"):
        resolve_source(with_components("unfuse/shapes", {"vae_2": str(vae.parent)}))


def test_composed_model_name_resolves_to_the_same_folder_again(vae: Path) -> None:
    """The name is what a scheduler offers; made again, it is the same folder, and other weights make another."""
    name = with_components("unfuse/shapes", {"vae": str(vae)})
    folder = resolve_source(name)
    assert source_of(folder) == name and resolve_source(source_of(folder)) == folder == resolve_source(str(folder))
    assert is_local(name) and not is_local(with_components("owner/model", {"vae": str(vae)}))
    moved = vae.rename(vae.with_name("moved"))
    assert resolve_source(with_components("unfuse/shapes", {"vae": str(moved)})) != folder


def test_source_file_of_a_plain_model_folder_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SHAPES, folder)
    folder.with_suffix(".source").write_text("unfuse/shapes#vae=/etc")
    assert source_of(folder) == str(folder)


@pytest.mark.parametrize("name", ["a/b", "a/b@main", "/x/y#z", "a#b", "#", "a#=b", "a#b=", "x" * 5000, "a\0b"])
def test_model_names_without_component_sources_are_not_split(name: str) -> None:
    assert split_name(name) == (name, {})


def test_existing_folder_named_like_a_composed_model_is_not_split(tmp_path: Path) -> None:
    folder = tmp_path / "a#vae=b"
    folder.mkdir()
    assert split_name(str(folder)) == (str(folder), {})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"_class_name": "AutoencoderKL"},
            "'AutoencoderKL', but the model needs 'AutoencoderKLWan'",
        ),
        ({"in_channels": 3}, "its in_channels is 3, but the model needs 48"),
        ({"z_dim": 4}, "its z_dim is 4, but the model needs 16"),
    ],
)
def test_incompatible_component_is_rejected(vae: Path, changes: dict[str, Any], says: str) -> None:
    rewritten(vae, **changes)
    with pytest.raises(ConfigError, match=says):
        resolve_source(with_components("unfuse/shapes", {"vae": str(vae)}))


def test_unknown_component_or_invalid_component_folder_is_rejected(vae: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such component; components are .*vae"):
        resolve_source(with_components("unfuse/shapes", {"text_encoder_2": str(vae)}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither model_index.json nor config.json"):
        resolve_source(with_components("unfuse/shapes", {"vae": str(tmp_path / "empty")}))
    with pytest.raises(ConfigError, match="no such folder or file on this machine"):
        resolve_source(with_components("unfuse/shapes", {"vae": "/nowhere"}))


def test_unwritable_data_folder_raises_config_error(vae: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "composed").write_text("")
    with pytest.raises(ConfigError, match="cannot be created .*use another data folder"):
        resolve_source(with_components("unfuse/shapes", {"vae": str(vae)}))


@pytest.mark.parametrize("entry", ["vae", "vae=", "=x", "a b=x", "vae=a#b", "../vae=x", "vae/..=x"])
def test_malformed_component_flag_raises_usage_error(entry: str) -> None:
    with pytest.raises(UsageError, match="is not COMPONENT=FOLDER"):
        parse_component_sources((entry,))


def test_component_flags_resolve_relative_folders_and_reject_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert parse_component_sources(("vae=here", "text_encoder=owner/model")) == {
        "vae": str(tmp_path / "here"),
        "text_encoder": "owner/model",
    }
    with pytest.raises(UsageError, match="names vae twice"):
        parse_component_sources(("vae=a", "vae=b"))
