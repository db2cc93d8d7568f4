"""A pool that sleeps at zero workers, and is woken by a request: a real server, and real workers that come and go."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.integration.test_restarts import SLOW, installed
from tools.server import all_gone, family_of, serving, until


@pytest.mark.nightly
@pytest.mark.slow
def test_cold_start_extends_deadline_and_is_measured_for_next_eta(
    tmp_path: Path,
) -> None:
    """Given a server whose workers may be away, when a picture is asked for within 2 s and workers come after 4, then
    it says that it is waking, and is made; when they left again, the next one's eta is what that took, also for a
    server that was started again."""
    model, variables = installed(tmp_path)
    arguments = "--workers", "none", "--scale-to-zero", "all=2", "--cold-start-timeout", "60"
    with serving(tmp_path, model, *arguments, **variables) as server:
        server.ready()
        asked = {"prompt": SLOW, "seed": 1, "num_inference_steps": 4}
        first = server.post("/v1/images/generations", asked | {"timeout": 2}, prefer="respond-async")
        assert (first["status"], first["state"]) == ("queued", "cold_start")
        assert 290 < first["eta_s"] < 310
        time.sleep(4)  # what a deadline of 2 s would not outlast
        began = time.time()
        worker = server.worker("all", **variables)
        over = server.finished(first["id"])
        assert (over["status"], over["state"]) == ("completed", "completed")
        took = time.time() - first["created_at"]
        everyone = family_of(worker.pid)
        worker.send_signal(signal.SIGTERM)
        worker.wait()
        until(lambda: all_gone(everyone), "the worker to be gone")
        until(lambda: {one["state"] for one in server.get("/v1/pools")["data"]} == {"scaled_to_zero"}, "pools to sleep")
        for _ in range(2):
            second = server.post("/v1/images/generations", asked, prefer="respond-async")
            assert second["state"] == "cold_start"
            assert began - first["created_at"] - 1 < second["eta_s"] < took + 5
            server.post(f"/v1/requests/{second['id']}/cancel", {})
            server.process.send_signal(signal.SIGTERM)
            server.process.wait()
            server.killed_and_started_again().ready()
