"""A server whose machine's clock is set while requests run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.test_restarts import SLOW, installed
from tools.server import serving, until

CLOCK = """
import os, time

real, ahead = time.time, os.environ["CLOCK_AHEAD"]
time.time = lambda: real() + float(open(ahead).read())
"""
"""A `sitecustomize` that sets the Unix time of a process forward by as many seconds as a file says."""


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [3600, -3600])
def test_requests_complete_after_the_system_clock_jumps_by_an_hour(seconds: int, tmp_path: Path) -> None:
    """Given eight pictures that run and wait, when the clock is set by an hour, then all of them complete."""
    model, variables = installed(tmp_path)
    (patch := tmp_path / "patch").mkdir()
    (patch / "sitecustomize.py").write_text(CLOCK)
    (ahead := tmp_path / "ahead").write_text("0")
    variables["PYTHONPATH"] = os.pathsep.join([str(patch), variables["PYTHONPATH"]])
    variables["CLOCK_AHEAD"] = str(ahead)
    with serving(tmp_path, model, "--arena", "16MiB", "--image-timeout", "60", **variables) as server:
        server.ready()
        assert server.finished(server.submit(SLOW, seed=9, num_inference_steps=10))["status"] == "completed"
        requests = [server.submit(SLOW, seed=seed, num_inference_steps=30) for seed in range(8)]
        until(lambda: server.get(f"/v1/requests/{requests[0]}")["status"] == "in_progress", "it to run", server.process)
        (new := tmp_path / "new").write_text(str(seconds))
        new.rename(ahead)
        assert [server.finished(request)["status"] for request in requests] == ["completed"] * 8
