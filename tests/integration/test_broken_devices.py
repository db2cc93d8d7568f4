"""A server with a worker whose device fails from some moment on: no request is lost, and the device is named."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.worker import outside
from tools.server import Server, serving, until

ERROR = "CUDA error: an illegal memory access was encountered"


@contextmanager
def breakable(folder: Path, workers: int) -> Iterator[tuple[Server, Callable[[int, str], None]]]:
    """A server of this many workers, and what breaks the device of the worker with that process id: see the family."""
    broken = folder / "broken"
    broken.mkdir()
    variables = {"PYTHONPATH": str(outside.HERE), "OUTSIDE_BROKEN": str(broken)}
    model = str(outside.model(folder / "outside"))
    with serving(folder, model, "--workers", f"all={workers}", own_forks=True, **variables) as server:
        until(lambda: len(workers_of(server)) == workers, "all workers to be registered")
        yield server, lambda pid, places: (broken / str(pid)).write_text(places)  # type: ignore[return-value]


def workers_of(server: Server) -> list[dict[str, Any]]:
    return (server.get("/v1/workers") or {"data": []})["data"]  # type: ignore[no-any-return]


def unhealthy(server: Server) -> list[dict[str, Any]]:
    return [worker for worker in workers_of(server) if not worker["healthy"]]


def device_samples(server: Server) -> dict[str, float]:
    """The values of `unfuse_device_healthy`, by worker."""
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        lines = [line for line in page.read().decode().splitlines() if line.startswith("unfuse_device_healthy{")]
    return {line.partition('worker="')[2].partition('"')[0]: float(line.split()[-1]) for line in lines}


def device_errors(server: Server) -> dict[str, float]:
    """The values of `unfuse_device_errors_total` that are not 0, by kind."""
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        lines = [line for line in page.read().decode().splitlines() if line.startswith("unfuse_device_errors_total{")]
    counts = {line.partition('kind="')[2].partition('"')[0]: float(line.split()[-1]) for line in lines}
    return {kind: count for kind, count in counts.items() if count}


def finish(server: Server, requests: int, before: Callable[[], object] = bool) -> list[dict[str, Any]]:
    """Run this many requests, eight at a time. `before` is called once a few of them are done."""

    def run(number: int) -> dict[str, Any]:
        if number == requests // 5:
            before()
        return server.finished(server.submit(f"picture {number}", num_inference_steps=4))

    with ThreadPoolExecutor(8) as pool:
        return [*pool.map(run, range(requests))]


def check_no_request_is_lost(server: Server, requests: int, break_device: Callable[[], object]) -> dict[str, Any]:
    """Run this many requests, of which none fails. Returns the worker that was unhealthy meanwhile."""
    with ThreadPoolExecutor(1) as watcher:  # an idle device is healthy again after a pause, if it passes its check
        seen = watcher.submit(until, lambda: unhealthy(server), "a worker to be unhealthy")
        ended = finish(server, requests, break_device)
        (worker,) = seen.result()
    assert [request["status"] for request in ended] == ["completed"] * requests
    stages = [stage for request in ended for stage in request["stages"]]
    assert {(stage["failures"], stage["crashes"]) for stage in stages} == {(0, 0)}
    for number, request in enumerate(ended):
        assert server.result(request["id"]).decode() == f"picture {number}"[::-1]
    return dict(worker)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "reason"),
    [
        pytest.param(
            "run",
            "cpu failed 3 times without a completed task in between",
            marks=pytest.mark.nightly,
            id="check passes",
        ),
        pytest.param("run load", "cpu cannot be used", id="check fails"),
    ],
)
def test_no_request_fails_while_the_device_of_one_worker_does(places: str, reason: str, tmp_path: Path) -> None:
    with breakable(tmp_path, workers=2) as (server, break_device):
        (first, second) = workers_of(server)
        worker = check_no_request_is_lost(server, 60, lambda: break_device(first["pid"], places))
        assert worker["id"] == first["id"]
        assert worker["unhealthy_reason"].startswith(reason) and ERROR in worker["unhealthy_reason"]
        assert worker["device_health"] == [{"index": "cpu", "uuid": "", "healthy": False}]
        if "load" in places:
            assert device_samples(server) == {first["id"]: 0.0, second["id"]: 1.0}
            errors = until(
                lambda: {"failed", "unusable"} <= (counts := device_errors(server)).keys() and counts, "errors"
            )
            assert errors.keys() == {"failed", "unusable"} and errors["failed"] == 1
        assert "the device is unhealthy" in server.log()

        break_device(first["pid"], "")
        until(lambda: not unhealthy(server), "the worker to be healthy again")
        assert {request["status"] for request in finish(server, 8)} == {"completed"}


@pytest.mark.nightly
def test_none_of_200_requests_fails_while_the_device_of_one_worker_does(tmp_path: Path) -> None:
    with breakable(tmp_path, workers=2) as (server, break_device):
        first = workers_of(server)[0]
        worker = check_no_request_is_lost(server, 200, lambda: break_device(first["pid"], "run"))
        assert worker["id"] == first["id"]


@pytest.mark.slow
def test_requests_wait_while_every_device_is_unhealthy(tmp_path: Path) -> None:
    with breakable(tmp_path, workers=1) as (server, break_device):
        (worker,) = workers_of(server)
        break_device(worker["pid"], "run load")
        request = server.submit("patience")
        (worker,) = until(lambda: unhealthy(server), "the worker to be unhealthy")
        assert server.get("/ready") is None
        assert server.get(f"/v1/requests/{request}")["status"] in ("queued", "in_progress")
        break_device(worker["pid"], "")
        assert server.finished(request)["status"] == "completed"
        until(lambda: server.get("/ready"), "the server to be ready")


@pytest.mark.slow
def test_task_that_makes_the_only_device_fail_ends_its_request_and_the_worker_stays_healthy(tmp_path: Path) -> None:
    with breakable(tmp_path, workers=1) as (server, _):
        ended = server.finished(server.submit("fault"))
        assert (ended["status"], ended["error"]["code"]) == ("failed", "compute_crashed")
        assert ERROR in ended["error"]["message"]
        assert ended["attempts"] <= 3
        assert server.finished(server.submit("good"))["status"] == "completed"
        assert not unhealthy(server)
