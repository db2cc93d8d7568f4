"""Workers on a pretended GPU take the memory that the plan gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pretend.machine import PretendedMachine
from tests.pretend.process import read_report
from tools.server import computes_of, serving, until
from tools.tiny_language import make_language_model
from unfuse.core.compute_device import CONTEXT

pytestmark = pytest.mark.slow


def test_language_workers_of_one_gpu_get_equal_kv_caches_within_the_planned_memory(tmp_path: Path) -> None:
    folder = make_language_model(tmp_path / "llama")
    machine = PretendedMachine.create(tmp_path / "machine", capacity=4 << 30)
    (tmp_path / "serve").mkdir()
    options = ["--device", "cuda:0", "--workers", "all=2", "--device-memory", "cuda:0=2GiB"]
    with serving(tmp_path / "serve", str(folder), *options, **machine.variables) as server:
        server.ready()
        until(lambda: len(server.get("/v1/workers")["data"]) == 2, "both workers")
        workers = server.get("/v1/workers")["data"]
        computes = [compute.pid for worker in workers for compute in computes_of(worker["pid"])]
        held = [read_report(pid)["held"]["cuda:0"] for pid in computes]
    assert len(held) == 2
    assert held[0] == held[1]
    assert 0.8 < sum(held) / ((2 << 30) - 2 * CONTEXT) < 1
