"""`serve --queue sqlite:PATH` ends without warning, in the middle of everything: nothing that was accepted is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.oracle import expected
from tests.integration.test_restarts import installed
from tools.server import Server, serving, until

RUNNING, WAITING = 3, 8
CIRCLE = "a circle"


def running(server: Server, request: str) -> None:
    """Wait until its pictures are being made."""
    for event in server.events(request):
        if event["type"] == "progress" and event["stage"] == "denoise.0":
            return
    raise AssertionError("it was over before it was seen to run")


def is_denoised(server: Server, request: str) -> bool:
    stages = server.get(f"/v1/requests/{request}")["stages"]
    return any(one["name"] == "denoise.0" and one["status"] == "leased" for one in stages)


def so_many_run_and_wait(server: Server) -> bool:
    """Whether nothing is over, and just as many requests run, at their denoiser, as should."""
    shown = server.get("/v1/requests?limit=50")["data"]
    leased = [[stage["name"] for stage in one["stages"] if stage["status"] == "leased"] for one in shown]
    unfinished = [names for names, one in zip(leased, shown, strict=True) if one["status"] in ("queued", "in_progress")]
    assert len(unfinished) == RUNNING + WAITING, "they were over before they were seen to wait"
    return sorted(filter(None, unfinished)) == [["denoise.0"]] * RUNNING


def completed(server: Server, requests: list[str]) -> list[dict[str, object]]:
    shown = [server.finished(request) for request in requests]
    assert [one["id"] for one in shown] == requests
    assert {one["status"] for one in shown} == {"completed"}
    return shown


@pytest.mark.nightly
def test_sqlite_queue_completes_all_requests_after_a_server_crash(tmp_path: Path) -> None:
    """Given 8 requests that wait, 3 that run and one that is done, when the server is killed, then the next one
    completes all 11, under their ids, with the bytes they should have; what was done is still there.

    The first of them holds up the denoiser until that is killed: how fast the machine is decides nothing."""
    model, variables = installed(tmp_path)
    workers = "encoder=1,denoiser=1,decoder=1"
    queue = ["--queue", f"sqlite:{tmp_path}/queue.db", "--arena", "16MiB", "--workers", workers]
    prompts = [f"{CIRCLE} [hang=1@denoise]", *[CIRCLE] * (RUNNING + WAITING - 1)]
    with serving(tmp_path, model, *queue, **variables, UNFUSE_WORKER__SLOTS=str(RUNNING)) as server:
        server.ready()
        before = server.submit(CIRCLE, seed=4)
        assert server.finished(before)["status"] == "completed"
        requests = [server.submit(prompts[0], seed=4)]
        until(lambda: is_denoised(server, requests[0]), "the first to hold up the denoiser", server.process)
        requests += [server.submit(prompt, seed=4) for prompt in prompts[1:]]
        until(lambda: so_many_run_and_wait(server), "3 requests to run and the others to wait", server.process)
        server.killed_and_started_again().ready()
        completed(server, [before, *requests])
        assert [server.result(request) for request in (before, *requests)] == [
            expected(prompt, 4) for prompt in (CIRCLE, *prompts)
        ]
        newest = [one["id"] for one in server.get("/v1/requests?limit=50")["data"]]
        assert newest == [*reversed(requests), before]


@pytest.mark.nightly
def test_workers_report_running_tasks_to_a_restarted_server(tmp_path: Path) -> None:
    """Given a task that is being computed while the server is away, then its worker reports it to the next one, and
    it is not done twice."""
    queue = f"sqlite:{tmp_path}/queue.db"
    with serving(tmp_path, "--queue", queue, "--workers", "none", UNFUSE_LEASE__TTL_S="10") as server:
        until(lambda: server.get("/health") is not None, "the gateway", server.process)
        for role in ("encoder", "denoiser", "decoder"):
            server.worker(role)
        server.ready()
        requests = [server.submit("a blue ring on gray", num_inference_steps=100) for _ in range(4)]
        running(server, requests[0])
        server.killed_and_started_again().ready()
        shown = completed(server, requests)
        assert all(server.result(request).startswith(b"\x89PNG") for request in requests)
        assert shown[0]["attempts"] == 1
        assert [worker.poll() for worker in server.workers] == [None, None, None]
