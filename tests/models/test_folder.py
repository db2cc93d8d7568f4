"""A model's folder: what its components are, and what tells one from another."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from unfuse.core.errors import ConfigError
from unfuse.models import folder as module
from unfuse.models.folder import ModelFolder

HEADER = json.dumps({"tensor": {"dtype": "U8", "shape": [4000], "data_offsets": [0, 4000]}}).encode()


@pytest.fixture
def model(tmp_path: Path) -> ModelFolder:
    """A component of one weight file of 4,000 zeros."""
    component = tmp_path / "vae"
    component.mkdir()
    (component / "config.json").write_text("{}")
    (component / "w.safetensors").write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + bytes(4000))
    return ModelFolder(tmp_path)


@given(position=st.integers(0, 3999))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_that_is_hashed_whole_shows_any_changed_byte(model: ModelFolder, position: int) -> None:
    file = model.path / "vae" / "w.safetensors"
    whole = file.read_bytes()
    before = model.identity("vae")

    at = len(whole) - 4000 + position
    file.write_bytes(whole[:at] + b"\1" + whole[at + 1 :])
    changed = model.identity("vae")
    file.write_bytes(whole)

    assert changed != before
    assert model.identity("vae") == before


@pytest.fixture
def sampled(model: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> ModelFolder:
    """The same, with thresholds that make its file a large one: five pieces of 16 bytes."""
    monkeypatch.setattr(module, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(module, "SAMPLES", 5)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 16)
    return model


def _flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(("at", "seen"), [
    (10, True),  # in the header
    (-4000, True), (-3985, True), (-1, True), (-16, True), (8 + len(HEADER) + 1992, True),  # first, last, middle piece
    (-500, False),  # between two pieces
])  # fmt: skip
def test_of_a_large_file_header_and_samples_count(sampled: ModelFolder, at: int, seen: bool) -> None:
    before = sampled.identity("vae")

    _flip(sampled.path / "vae" / "w.safetensors", at)

    assert (sampled.identity("vae") != before) is seen


def test_size_name_and_configuration_count(sampled: ModelFolder) -> None:
    component = sampled.path / "vae"
    seen = {sampled.identity("vae")}
    with (component / "w.safetensors").open("ab") as file:
        file.write(b"\0")
    seen.add(sampled.identity("vae"))
    (component / "w.safetensors").rename(component / "v.safetensors")
    seen.add(sampled.identity("vae"))
    (component / "config.json").write_text('{"a": 1}')
    seen.add(sampled.identity("vae"))
    assert len(seen) == 4

    (component / "README.md").write_text("other files do not")
    assert sampled.identity("vae") in seen


def test_a_header_that_claims_to_be_endless_is_read_in_bounds(sampled: ModelFolder) -> None:
    file = sampled.path / "vae" / "w.safetensors"
    file.write_bytes(b"\xff" * 8 + bytes(4000))

    assert len(sampled.identity("vae")) == 32


def test_shards_named_by_an_index_must_all_be_there(model: ModelFolder) -> None:
    shards = {"weight_map": {"a": "w.safetensors", "b": "w-2.safetensors"}}
    (model.path / "vae" / "w.safetensors.index.json").write_text(json.dumps(shards))

    with pytest.raises(ConfigError, match=r"component vae lacks vae/w-2\.safetensors; download or save"):
        model.weights("vae")

    (model.path / "vae" / "w-2.safetensors").write_bytes(b"")
    assert [file.name for file in model.weights("vae")] == ["w-2.safetensors", "w.safetensors"]


def test_size_is_the_bytes_of_the_components_files(model: ModelFolder) -> None:
    assert model.size("vae") == 2 + 8 + len(HEADER) + 4000


@pytest.mark.parametrize(("component", "file"), [
    ("vae", "config.json"), ("text_encoder_2", "config.json"), ("scheduler", "scheduler_config.json"),
    ("tokenizer", "tokenizer_config.json"), ("tokenizer_2", "tokenizer_config.json"),
])  # fmt: skip
def test_each_component_has_its_configuration_file(component: str, file: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{component}/{file} cannot be read"):
        ModelFolder(tmp_path).config(component)

    (tmp_path / component).mkdir()
    (tmp_path / component / file).write_text('{"found": true}')
    assert ModelFolder(tmp_path).config(component) == {"found": True}
