"""Each encoder of a model can be a pool of its own, with workers of its own."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from tests.integration.recorded import RECORDED, REQUESTS, circumstances
from tools.server import environment, serving, unfuse, until
from tools.tiny import build

FLUX = 8
"""Which of the recorded requests is one to a model of two text encoders."""


@pytest.mark.nightly
def test_each_text_encoder_runs_in_a_pool_and_worker_of_its_own(tmp_path: Path) -> None:
    """Given a worker for each of two text encoders, then each has a pool of its own, and pictures are as ever."""
    model = str(build("flux", tmp_path / "flux"))
    with serving(tmp_path, model, "--served-model-name", "flux", "--workers", "none") as server:
        until(lambda: server.get("/health"), "the gateway", server.process)
        for role, *component in (
            ("encoder", "text_encoder"),
            ("encoder", "text_encoder_2"),
            ("denoiser",),
            ("decoder",),
        ):
            server.worker(role, *(f"--component={name}" for name in component), "--threads", "1")
        server.ready()

        encoders = [worker["pools"] for worker in server.get("/v1/workers")["data"] if worker["role"] == "encoder"]
        path, body = REQUESTS[FLUX]
        request = server.finished(server.post(path, body, prefer="respond-async")["id"])
        ran = {stage["name"]: stage["worker"] for stage in request["stages"]}

        assert sorted(map(len, encoders)) == [1, 1]
        assert encoders[0] != encoders[1]
        assert request["status"] == "completed"
        assert ran["text_encode"] != ran["text_encode_2"]
        recorded = json.loads(RECORDED.read_text())
        if circumstances() == recorded["circumstances"]:
            assert [hashlib.sha256(server.result(request["id"])).hexdigest()] == recorded["results"][FLUX]

        command = unfuse("worker", "--role", "decoder", "--component", "text_encoder", "--scheduler", server.control)
        refused = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
        assert refused.returncode == 1
        assert "components are text_encoder, text_encoder_2, transformer, vae" in refused.stderr
