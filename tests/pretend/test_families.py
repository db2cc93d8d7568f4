"""Every family on a pretended GPU makes the CPU's bytes, and the host waits for the GPU at most as often as it may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pretend.ceilings import exceeded, read
from tests.pretend.families import Family, cases, options_of
from tests.pretend.running import GPU, differing, held_by, run_request
from tools import tiny
from unfuse.core.compute_options import ComputeOptions
from unfuse.planning.placement import CPU, Device, WorkerPlan
from unfuse.service.plan import read_models

pytestmark = pytest.mark.slow

BY_DAY = ("flux plain", "wan plain")
ALL = [(kind, case) for kind in tiny.KINDS for case in cases(kind)]

Families = Callable[..., Family]


def marked(kind: str, case: str) -> Any:
    name = f"{kind} {case}"
    return pytest.param(kind, case, id=name, marks=() if name in BY_DAY else pytest.mark.nightly)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Families]:
    """Families by kind and options. The last one stays loaded, for the next test."""
    loaded: dict[str, Family] = {}

    def family(kind: str, **options: Any) -> Family:
        name = f"{kind} {options}"
        if name not in loaded:
            loaded.clear()
            loaded[name] = Family(kind, tmp_path_factory.mktemp(kind), **options)
        return loaded[name]

    yield family
    loaded.clear()


@pytest.mark.parametrize(("kind", "case"), [marked(kind, case) for kind, case in ALL])
def test_family_on_second_gpu_has_bytes_of_cpu_and_few_waits(kind: str, case: str, families: Families) -> None:
    family, params = families(kind, **options_of(case)), cases(kind)[case]
    expected = family.expected(params)
    found, counts = family.measure(params)
    assert differing(expected, found) == []
    assert exceeded(f"{kind} {case}", counts) == {}
    assert held_by(family.gpus).keys() == {GPU}
    assert family.gpus.records.streams.keys() <= {GPU}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind", ["wan", "wan-image", "wan-2.2", "flux", "kontext", "hunyuan-video", "sdxl", "sd3", "qwen-image"]
)
def test_family_has_bytes_of_cpu_in_the_dtypes_of_a_gpu_without_bfloat16(kind: str, tmp_path: Path) -> None:
    """Some components are in float16 there, and others in float32."""
    old_gpu = Device(CPU, 1 << 36), Device(GPU, 1 << 36, has_bfloat16=False)
    wanted = WorkerPlan(None, {}, ComputeOptions(device=GPU))
    (model,) = read_models([str(tiny.build(kind, tmp_path / "read" / kind))], "", wanted, old_gpu)
    assert "float16" in model.dtypes or kind == "qwen-image"
    family, params = Family(kind, tmp_path, dtype=model.dtypes), cases(kind)["plain"]
    found, _ = family.measure(params)
    assert differing(family.expected(params), found) == []


@pytest.mark.nightly
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_family_in_bfloat16_on_second_gpu_has_bytes_of_cpu(kind: str, families: Families) -> None:
    family, params = families(kind, dtype="bfloat16"), cases(kind)["plain"]
    expected = family.expected(params)
    with family.gpus:
        assert differing(expected, run_request(family.on_gpu, params)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("offload", ["model", "sequential"])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_offloaded_family_on_second_gpu_has_bytes_of_cpu(kind: str, offload: str, families: Families) -> None:
    """Also those of a second request. Nothing is copied to another GPU than its own, nor by a stream of another."""
    family, params = families(kind, offload=offload), cases(kind)["plain"]
    expected = family.expected(params)
    with family.gpus as gpus:
        torch.cuda.set_device(GPU)  # as each process does that computes on it
        for _ in range(2):
            assert differing(expected, run_request(family.on_gpu, params)) == []
        assert held_by(gpus).keys() <= {GPU} and gpus.records.streams.keys() <= {GPU}


def test_every_case_of_every_family_has_ceilings() -> None:
    assert {*read()} == {f"{kind} {case}" for kind, case in ALL}
