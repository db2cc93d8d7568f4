"""A server whose denoisers have another attention than torch's choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.server import serving

pytestmark = pytest.mark.nightly


def denoise_pools(folder: Path, *options: str) -> tuple[str, dict[str, str]]:
    """The denoise pool and its worker's numerics, of a server that has completed a request."""
    folder.mkdir()
    with serving(folder, "unfuse/shapes", "--workers", "all=1", *options) as server:
        request = server.finished(server.ready().submit("a red circle", seed=1, num_inference_steps=2))
        assert request["error"] is None
        (worker,) = server.get("/v1/workers")["data"]
        (pool,) = [stage["pool"] for stage in request["stages"] if stage["name"] == "denoise.0"]
        return pool, worker["numerics"]


def test_attention_is_part_of_the_numerics_of_a_pool(tmp_path: Path) -> None:
    native, numerics = denoise_pools(tmp_path / "native")
    assert "attention" not in numerics
    math, numerics = denoise_pools(tmp_path / "math", "--attention", "_native_math")
    assert numerics["attention"] == "_native_math"
    assert math != native


def test_attention_that_no_worker_can_use_ends_serve_with_its_reason(tmp_path: Path) -> None:
    with serving(tmp_path, "unfuse/shapes", "--workers", "all=1", "--attention", "sage") as server:
        assert server.process.wait(60) == 1
        assert "--attention sage does not compute on cpu, where transformer is" in server.log()
