"""Models by name and by folder: what is known, where it is, and that looking needs no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unfuse.core.errors import ConfigError
from unfuse.models import find, pipeline_class, resolve_source, served_classes


@pytest.mark.parametrize("name", [
    "unfuse/shapes", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan-AI/Wan2.1-T2V-14B-Diffusers", "Wan-AI/Wan2.1-T2V-7B-New",
])  # fmt: skip
def test_a_model_is_known_by_its_exact_name_then_by_pattern(name: str) -> None:
    assert pipeline_class(name) == "WanPipeline"
    assert type(find(name)).__name__ == "Wan"


def test_an_exact_name_goes_before_a_pattern_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.models.PLANS", {"a/b-*": "Pattern", "a/b-c": "Exact"})

    assert pipeline_class("a/b-c") == "Exact"
    assert pipeline_class("a/b-d") == "Pattern"


@pytest.mark.parametrize("name", [
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", "wan-ai/wan2.1-t2v-1.3b-diffusers", "", "os:system",
])  # fmt: skip
def test_an_unknown_name_is_told_what_is_known(name: str) -> None:
    with pytest.raises(ConfigError, match=r"not known by name; known are unfuse/shapes, .*any folder with model_index"):
        find(name)


@pytest.mark.parametrize("found", ["FluxPipeline", "os:system", ["WanPipeline"], None])
def test_a_class_that_is_not_served_is_told_what_is(found: object, tmp_path: Path) -> None:
    """A folder comes from anywhere: what it names is looked up, never imported."""
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": found}))

    with pytest.raises(ConfigError, match=f"which is not served; served are {', '.join(served_classes())}"):
        find(tmp_path)


@pytest.mark.parametrize(("content", "sentence"), [
    (None, "model_index.json cannot be read .*this is no model in diffusers' layout"),
    ("[]", "model_index.json is not valid"),
    ("{", "model_index.json is not valid"),
    ('"\udcff"', "model_index.json is not valid"),
])  # fmt: skip
def test_a_folder_without_a_model(content: str | None, sentence: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "model_index.json").write_bytes(content.encode(errors="surrogateescape"))

    with pytest.raises(ConfigError, match=sentence):
        find(tmp_path)


def test_a_source_may_be_the_packaged_model_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (resolve_source("unfuse/shapes") / "model_index.json").is_file()
    assert resolve_source(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert resolve_source("owner/model") == tmp_path / "owner" / "model"


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none-at-all", "shapes", "a/b/c", ""])
def test_a_source_that_is_nothing_is_refused_before_any_network(name: str) -> None:
    with pytest.raises(ConfigError, match="is no folder, nor a hub name such as owner/model, nor one of unfuse/shapes"):
        resolve_source(name)


HUB = """
import json, sys
from unfuse.core.errors import ConfigError
from unfuse.models import resolve_source
found = []
for name, revision in json.load(sys.stdin):
    try:
        found.append(str(resolve_source(name, revision)))
    except ConfigError as error:
        found.append("ConfigError " + str(error))
loaded = [name for name in ("torch", "diffusers", "transformers") if name in sys.modules]
json.dump([found, loaded], sys.stdout)
"""


def test_a_hub_name_is_found_in_the_hubs_cache(tmp_path: Path) -> None:
    """The cache as the hub library lays it out, offline; in a process of its own, as the library reads it at import."""
    repository = tmp_path / "hub" / "models--owner--model"
    snapshot = repository / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model_index.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c" * 40)

    model, other, bad = "owner/model", "owner/other", "o/-.-"
    asked = [(model, None), (model, "c" * 40), (model, "tag"), (other, None), (bad, None)]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, "-c", HUB]
    done = subprocess.run(command, input=json.dumps(asked), env=environment, text=True, capture_output=True, check=True)

    (latest, pinned, *refused), loaded = json.loads(done.stdout)
    assert latest == pinned == str(snapshot)
    for answer in refused:
        assert answer.startswith("ConfigError model 'o")
        assert "the hub library could not bring it" in answer
        assert "\n" not in answer
    assert loaded == []


CARD = """
import sys
from unfuse.models import find, resolve_source
folder = resolve_source("unfuse/shapes")
card = find(folder).card("unfuse/shapes", folder)
heavy = ("torch", "diffusers", "transformers", "huggingface_hub", "safetensors", "numpy", "PIL", "av")
print(card.name, [name for name in heavy if name in sys.modules])
"""


def test_a_card_is_made_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CARD], text=True, capture_output=True, check=True)

    assert done.stdout.split("\n")[0] == "unfuse/shapes []"
