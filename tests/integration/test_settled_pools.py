"""A served stage that is not batch invariant: its pool compares three keys, and then no more."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tools.server import Server, serving, until

pytestmark = pytest.mark.slow

VARIANT = """
import importlib.abc, importlib.util, sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "unfuse.stages.denoise":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            step = module.Denoise.step
            module.Denoise.step = lambda stage, batch: [row + 1e-3 * (len(batch) > 1) for row in step(stage, batch)]

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, Finder())
"""
"""A `sitecustomize` by which a prediction of denoising depends on whether others share its forward."""

SIDES = (32, 64, 96)


def variables(folder: Path) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(VARIANT)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", os.getcwd())])}


def complete(server: Server, side: int) -> None:
    size = f"{side}x{side}"
    requests = [server.submit("a red circle", seed=seed, size=size, num_inference_steps=12) for seed in range(4)]
    assert [server.finished(request)["error"] for request in requests] == [None] * 4


def denoise_pool(server: Server) -> dict[str, Any]:
    (pool,) = [pool for pool in server.get("/v1/pools")["data"] if pool["id"].startswith("denoise")]
    return dict(pool)


def metric(server: Server, pool: str) -> str:
    with urllib.request.urlopen(server.url + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("unfuse_pool_not_batch_invariant{") and pool in line]
    return line.rpartition(" ")[2]


@pytest.mark.parametrize(
    ("batching", "mode"),
    [
        pytest.param("exact", "alone", marks=pytest.mark.nightly),
        ("exact-or-batched", "batched"),
    ],
)
def test_pool_that_is_not_batch_invariant_compares_three_sizes_of_pictures(
    batching: str, mode: str, tmp_path: Path
) -> None:
    flags = ["unfuse/shapes", "--batching", batching, "--workers", "all=1", "--threads", "1", "--arena", "16MiB"]
    with serving(tmp_path, *flags, **variables(tmp_path / "patch")) as server:
        server.ready()
        for side in SIDES:
            assert denoise_pool(server)["batch_invariance"]["mode"] == "compared"
            complete(server, side)
        complete(server, 128)
        until(lambda: denoise_pool(server)["batch_invariance"]["mode"] == mode, "the worker to report the mode")
        pool = denoise_pool(server)
        invariance = pool["batch_invariance"]
        assert (invariance["largest"], invariance["mode"]) == (1, mode)
        assert invariance["differences"]["2"] == "results differ"
        assert metric(server, pool["id"]) == "1.0"
        assert "this pool compares no more batches" in server.log()
        assert server.get("/v1/workers")["data"][0]["numerics"]["batching"] == batching

        server.killed_and_started_again().ready()
        complete(server, 160)
        until(lambda: denoise_pool(server)["batch_invariance"]["mode"] == mode, "the worker to report the mode again")
        assert denoise_pool(server)["batch_invariance"] == {"largest": 1, "differences": {}, "mode": mode}
