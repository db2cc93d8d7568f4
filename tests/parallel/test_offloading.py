"""FSDP with shards in host memory: the bytes of shards on the device, and one pinned buffer for a model's shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.conftest import run_ranks

pytestmark = pytest.mark.slow

RANKS = [2, pytest.param(3, marks=pytest.mark.nightly)]

COMPUTES = {
    "equal": True,
    "devices": ["cpu"],
    "neighbour was loaded": True,
    "neighbour was unloaded": True,
}
"""What is so on each device. The devices are those of the shards between forwards."""

ON_GPU = {"one buffer": True, "registered": True, "pinned by torch": 0, "released": True}


def facts(kind: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    codes = run_ranks("offloading", ranks, folder, kind)
    assert codes == [0] * ranks, (folder / "log0").read_text()[-3000:]
    return [json.loads((folder / f"out{rank}").read_text().splitlines()[-1]) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", RANKS)
def test_offloaded_shards_on_cpus_compute_the_same(ranks: int, tmp_path: Path) -> None:
    assert facts("cpu", ranks, tmp_path) == [COMPUTES] * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_offloaded_shards_of_gpus_are_pinned_in_one_buffer_for_each_rank(ranks: int, tmp_path: Path) -> None:
    copies = {"copies": ["copy cpu to cuda of pinned memory"]}
    assert facts("gpu", ranks, tmp_path) == [COMPUTES | ON_GPU | copies] * ranks


@pytest.mark.nightly
def test_shards_that_the_driver_does_not_pin_are_copied_from_pageable_memory(tmp_path: Path) -> None:
    pageable = {"one buffer": False, "registered": False, "pinned by torch": 0, "copies": ["copy cpu to cuda"]}
    assert [COMPUTES | pageable | {"released": False}] * 2 == facts("refused", 2, tmp_path)
    assert "weights not pinned" in (tmp_path / "out0").read_text()
