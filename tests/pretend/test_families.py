"""Families on a pretended GPU make the CPU's bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pretend.gpus import PretendedGpus
from tests.pretend.running import GPU, differing, held_by, load, run_request
from tools import tiny

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["flux", "wan"])
def test_family_on_second_gpu_has_bytes_of_cpu(kind: str, tmp_path: Path) -> None:
    folder = tiny.build(kind, tmp_path / kind)
    expected = run_request(load(folder), {})
    with PretendedGpus() as gpus:
        model = load(folder, GPU)
        first = run_request(model, {}, gpus)
        held = held_by(gpus)
        assert differing(expected, first) == []
        assert differing(expected, run_request(model, {})) == []
        assert held_by(gpus) == held and held.keys() == {GPU}
