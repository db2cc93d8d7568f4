"""Workers of any roles: undivided, partly split, split, over every queue; nothing differs but who does what."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.integration.pictures import made_pair
from tests.integration.test_restarts import SLOW, installed
from tools.redis_server import RedisServer
from tools.server import Server, all_gone, family_of, serving, until

LAYOUTS = {
    "all=2": ["all", "all"],
    "encoder+decoder=1,denoiser=2": ["denoiser", "denoiser", "encoder+decoder"],
    "split": ["decoder", "denoiser", "encoder"],
}
QUEUES = ["memory", "redis", "sqlite:FOLDER/queue.db"]
PAIRED = [
    pytest.param(layout, queue, marks=[] if number == place and layout != "all=2" else [pytest.mark.nightly])
    for number, layout in enumerate(LAYOUTS)
    for place, queue in enumerate(QUEUES)
]
"""Every layout over every queue; by day, each layout that splits once."""

ASKED = [("a star", 1), ("a moon", 2), ("a sun", 3)]


@pytest.fixture
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return server.url
    return str(request.param).replace("FOLDER", str(tmp_path))


def roles(server: Server) -> list[str]:
    shown = server.get("/v1/workers")["data"]
    return sorted(worker["role"] for worker in shown if worker["healthy"])


def killed_denoiser(server: Server, request: str) -> None:
    """Kill whoever denoises a request, with its compute."""
    everyone = family_of(denoiser_of(server, request))
    psutil.Process(everyone[0].pid).send_signal(signal.SIGKILL)
    until(lambda: all_gone(everyone), "the worker's processes to end")


def denoiser_of(server: Server, request: str) -> int:
    """The process that denoises a request, once one does."""
    until(lambda: server.get(f"/v1/requests/{request}")["stage"] == "denoise.0", "it to be denoised", server.process)
    stages = {stage["name"]: stage for stage in server.get(f"/v1/requests/{request}")["stages"]}
    (pid,) = (
        worker["pid"] for worker in server.get("/v1/workers")["data"] if worker["id"] == stages["denoise.0"]["worker"]
    )
    return int(pid)


@pytest.mark.parametrize(
    "queue", [*(pytest.param(queue, marks=pytest.mark.nightly) for queue in QUEUES[:-1]), QUEUES[-1]], indirect=True
)
def test_tasks_of_a_dead_worker_are_requeued_before_its_lease_expires(queue: str, tmp_path: Path) -> None:
    """Given leases of five minutes and one worker, when that is killed while it runs a request and another one comes in
    the same moment, then both complete on the worker that takes its place."""
    model, variables = installed(tmp_path)
    arguments = [model, "--workers", "all=1", "--queue", queue, "--arena", "16MiB"]
    with serving(tmp_path, *arguments, **variables | {"UNFUSE_LEASE__TTL_S": "300"}) as server:
        server.ready()
        running = server.submit(SLOW, seed=0, num_inference_steps=60)
        psutil.Process(denoiser_of(server, running)).send_signal(signal.SIGKILL)
        requests = [running, server.submit("a star", seed=1)]
        assert [server.finished(request)["status"] for request in requests] == ["completed"] * 2


@pytest.mark.parametrize(("layout", "queue"), PAIRED, indirect=["queue"])
def test_results_are_identical_for_every_layout_and_queue_backend(layout: str, queue: str, tmp_path: Path) -> None:
    """Given workers of these roles, then requests complete with one and the same bytes, one can be cancelled, an urgent
    one goes before others that wait, and one whose worker is killed completes."""
    model, variables = installed(tmp_path)
    arguments = [model, "--workers", layout, "--queue", queue, "--arena", "16MiB", "--slots", "denoiser=1"]
    with serving(tmp_path, *arguments, "--slots", "all=1", **variables) as server:
        server.ready()
        until(lambda: roles(server) == LAYOUTS[layout], "all workers to be there", server.process)
        made = [server.submit(prompt, seed=seed) for prompt, seed in ASKED]
        assert [server.finished(request)["status"] for request in made] == ["completed"] * len(ASKED)
        assert [server.result(request) for request in made] == EXPECTED.setdefault("", [*map(server.result, made)])

        slow = [server.submit(SLOW, seed=seed, num_inference_steps=60) for seed in range(6)]
        urgent = server.submit("a star", seed=9, priority=5)
        assert server.finished(urgent)["status"] == "completed"
        server.post(f"/v1/requests/{slow[5]}/cancel", {})
        assert server.finished(slow[5])["status"] == "cancelled"
        waiting = [server.get(f"/v1/requests/{request}")["status"] for request in slow[:5]]
        assert waiting.count("completed") < 5, "those before it were over"
        for request in slow[1:5]:
            server.post(f"/v1/requests/{request}/cancel", {})
        server.finished(slow[0])

        again = server.submit(SLOW, seed=7, num_inference_steps=60)
        killed_denoiser(server, again)
        assert server.finished(again)["status"] == "completed"
        calm = server.submit(SLOW, seed=7, num_inference_steps=60)
        assert server.finished(calm)["status"] == "completed"
        assert server.result(calm) == server.result(again)


EXPECTED: dict[str, list[bytes]] = {}
"""What the first layout made, which the others have to make too."""


def test_single_worker_with_all_roles_matches_the_undivided_pipeline(tmp_path: Path, expected_pair: list[str]) -> None:
    with serving(tmp_path, "--workers", "all=1", "--threads", "1", "--arena", "64MiB") as server:
        assert made_pair(server.ready()) == expected_pair
        (worker,) = server.get("/v1/workers")["data"]
        assert (worker["role"], worker["slots"], len(worker["pools"])) == ("all", 9, 3)
