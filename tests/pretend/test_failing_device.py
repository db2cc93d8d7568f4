"""A pretended GPU fails for good in the middle of a request: the request completes, and the GPU is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pretend.faults import STICKY, Fault
from tests.pretend.machine import PretendedMachine
from tools.server import serving
from tools.tiny import build

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_requests_complete_after_a_gpu_fails_in_mid_request(tmp_path: Path) -> None:
    folder = build("flux", tmp_path / "flux")
    machine = PretendedMachine.create(tmp_path / "machine")
    machine.order(Fault(STICKY, "FluxTransformer2DModel", first=2, once=True))
    (tmp_path / "serve").mkdir()
    options = ["--dtype", "float32", "--workers", "all=2"]
    with serving(tmp_path / "serve", str(folder), *options, **machine.variables) as server:
        server.ready()
        requests = [server.submit("a red circle", seed=1, num_inference_steps=4) for _ in range(4)]
        ended = [server.finished(request) for request in requests]
        assert [request["status"] for request in ended] == ["completed"] * 4
        assert {stage["crashes"] + stage["failures"] for request in ended for stage in request["stages"]} == {0}
        assert len({server.result(request) for request in requests}) == 1
        devices = {
            device["index"]: device["uuid"] for w in server.get("/v1/workers")["data"] for device in w["device_health"]
        }
        assert devices.keys() == {"cuda:0", "cuda:1"}
        assert all(uuid.startswith("GPU-0000000") for uuid in devices.values())
        (line,) = [line for line in server.log().splitlines() if '"event": "a device failed"' in line]
        assert '"device": "cuda:' in line and '"uuid": "GPU-0000000' in line
