"""Which batching a compute process has, by `--batching` and its models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unfuse.core.compute_options import Batching, ComputeOptions
from unfuse.core.messages import StorageLocations
from unfuse.core.plan import StageSelector
from unfuse.worker.compute import _batching, _invariance_results
from unfuse.worker.compute_messages import LoadModels


def load(batching: Batching, *sources: str) -> LoadModels:
    models = tuple((source, source, "auto") for source in sources)
    compute = ComputeOptions(batching=batching)
    return LoadModels(models, StageSelector(), compute, "w", "n", "", b"", StorageLocations("memory"))


@pytest.mark.parametrize(
    ("batching", "pictures", "texts", "both"),
    [
        ("auto", "exact", "batched", "exact"),
        ("exact", "exact", "exact", "exact"),
        ("batched", "batched", "batched", "batched"),
        ("exact-or-batched", "exact-or-batched", "batched", "exact-or-batched"),
    ],
)
def test_batching_follows_from_the_setting_and_the_families(
    batching: Batching, pictures: str, texts: str, both: str, tmp_path: Path
) -> None:
    language = str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    assert _batching(load(batching, "unfuse/shapes")) == pictures
    assert _batching(load(batching, language)) == texts
    assert _batching(load(batching, "unfuse/shapes", language)) == both


@pytest.mark.parametrize(("batching", "mode"), [("exact", "alone"), ("exact-or-batched", "batched"), ("batched", None)])
def test_settled_pool_is_batched_only_where_the_setting_allows_it(batching: Batching, mode: str | None) -> None:
    results = _invariance_results(load(batching, "unfuse/shapes"), "")
    assert (results.settled_mode if results else None) == mode


def test_each_setting_has_numerics_of_its_own() -> None:
    settings: tuple[Batching, ...] = "exact", "batched", "exact-or-batched"
    assert [ComputeOptions(batching=batching).numerics["batching"] for batching in settings] == [*settings]
