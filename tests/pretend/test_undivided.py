"""Pipelines that are served undivided, on a pretended GPU, make the CPU's bytes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pretend.gpus import PretendedGpus
from tests.pretend.running import GPU, differing, held_by, load, run_request
from tools import tiny_whole

pytestmark = pytest.mark.nightly

NEED_TORCHVISION = ("flux2", "qwen-edit-plus")
SEE = ("sd-image", "ltx-image", "qwen-edit-plus")


@pytest.mark.parametrize("kind", tiny_whole.KINDS)
def test_undivided_pipeline_on_second_gpu_has_bytes_of_cpu(kind: str, tmp_path: Path) -> None:
    if kind in NEED_TORCHVISION and find_spec("torchvision") is None:
        pytest.skip("needs torchvision")
    folder = tiny_whole.build(kind, tmp_path / kind)
    params = {"image": "image", "strength": 0.6} if kind in SEE else {}
    expected = run_request(load(folder), params)
    with PretendedGpus() as gpus:
        model = load(folder, GPU)
        assert differing(expected, run_request(model, params)) == []
        held = held_by(gpus)
        assert differing(expected, run_request(model, params)) == []
        assert held_by(gpus) == held and held.keys() == {GPU}
