"""The disk under `serve`'s data folder fills up: work waits, probes are told, and with room again all goes on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.disks import fill, small_disk
from tests.integration.test_restarts import SLOW, installed
from tools.server import Server, serving, until


def asked(server: Server, path: str) -> tuple[int, str]:
    """The status and the text of an answer, whatever it is."""
    try:
        with urllib.request.urlopen(server.url + path, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def waiting(server: Server) -> float:
    lines = asked(server, "/metrics")[1].splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("unfuse_results_waiting "))


def charged(shown: dict[str, Any]) -> int:
    """Attempts that failed. One that the full queue refused to give away is none, and may make the next the second."""
    return sum(stage["failures"] + stage["crashes"] for stage in shown["stages"])


@pytest.mark.parametrize(
    "apart",
    [pytest.param(True, marks=pytest.mark.nightly), False],
    ids=["a disk of their own", "the data folder's disk"],
)
def test_full_disk_delays_results_without_failing_requests(apart: bool, tmp_path: Path) -> None:
    """Given requests that run when the disk fills up, then nothing fails and no attempt is charged, `/ready` is 503
    and says why without a path, and requests are listed; one with a timeout expires; with room again the others
    complete by themselves."""
    model, variables = installed(tmp_path)
    with small_disk(tmp_path, 8192) as disk:
        where = {"UNFUSE_SERVE__RESULTS": f"disk:{disk}"} if apart else {"UNFUSE_DATA_DIR": str(disk)}
        with serving(tmp_path, model, "--arena", "16MiB", **variables, **where) as server:
            server.ready()
            requests = [server.submit(SLOW, seed=seed, num_inference_steps=20) for seed in range(3)]
            hasty = server.submit(SLOW, seed=9, timeout=4) if apart else ""
            for event in server.events(requests[0]):
                if event["type"] == "progress":
                    break
            fill(disk)
            until(lambda: asked(server, "/ready")[0] == 503, "it to be not ready", server.process)
            if apart:
                until(lambda: waiting(server) >= 2, "results to wait", server.process)
                assert server.finished(hasty)["status"] == "expired"
                states = [server.get(f"/v1/requests/{request}")["status"] for request in requests]
                assert states == ["in_progress"] * 3
            assert str(tmp_path) not in asked(server, "/ready")[1]
            status, listed = asked(server, "/v1/requests")
            assert status == 200 and all(request in listed for request in requests)
            (disk / "filler").unlink()
            shown = [server.finished(request) for request in requests]
            assert [(one["status"], charged(one)) for one in shown] == [("completed", 0)] * 3
            assert all(server.result(request) for request in requests)
            until(lambda: asked(server, "/ready")[0] == 200, "it to be ready", server.process)
            assert not [path for path in disk.rglob(".*") if path.is_file()]


def test_request_larger_than_the_arena_returns_400(tmp_path: Path) -> None:
    """Given arenas of 1 MiB, then a picture whose latents take 256 bytes more is a 400 with the sum and the flag, and
    a smaller one is made."""
    model, variables = installed(tmp_path)
    with serving(tmp_path, model, "--workers", "split", "--arena", "1MiB", **variables) as server:
        until(lambda: server.get("/health"), "the gateway", server.process)
        for _ in range(2):
            with pytest.raises(urllib.error.HTTPError) as refused:
                server.submit("a star", size="1024x1024")
            error = json.loads(refused.value.read())["error"]
            assert (refused.value.code, error["code"]) == (400, "invalid_parameter")
            assert "1048832 bytes" in error["message"] and "--arena 2MiB" in error["message"]
            server.ready()
        assert server.finished(server.submit("a star", size="1024x512"))["status"] == "completed"
