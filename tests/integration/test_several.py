"""Several gateways and workers over one Redis: any may end, by force or by request, while clients are at work."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checker import check
from tests.chaos.cluster import ROLES, Cluster, Gateway, running_cluster, until
from tests.chaos.history import LOST_CONNECTION, Asked, Final, History, Load, events_of, healthy, observe
from tests.chaos.monkey import drained

CLIENTS = 8


def final_of(cluster: Cluster) -> Final:
    return observe([gateway.url for gateway in cluster.gateways], lambda: drained(cluster))


def load_on(cluster: Cluster, count: int, name: str, order: str = "") -> Load:
    """Clients at work; with an order for every prompt they are slow enough to be watched."""
    work = [
        (key, Asked(f"{asked.prompt} {order}", asked.seed), mode) for key, asked, mode in healthy(count, name, seed=1)
    ]
    return Load([gateway.port for gateway in cluster.gateways], work, CLIENTS, 1, History())


def submit(gateway: Gateway, asked: Asked, key: str) -> str:
    """Queue one picture; returns the request's id."""
    headers = {"content-type": "application/json", "prefer": "respond-async", "idempotency-key": key}
    call = urllib.request.Request(f"{gateway.url}/v1/images/generations", asked.body(key), headers)
    with urllib.request.urlopen(call, timeout=600) as answer:
        return str(json.loads(answer.read())["id"])


def stream(gateway: Gateway, request: str, after: int) -> Iterator[dict[str, Any]]:
    """Events of one connection, to its end or to where it breaks."""
    asked = urllib.request.Request(f"{gateway.url}/v1/requests/{request}/events", headers={"last-event-id": str(after)})
    with suppress(*LOST_CONNECTION), urllib.request.urlopen(asked, timeout=600) as lines:
        for line in lines:
            if line.startswith(b"data:"):
                yield json.loads(line[5:])


def test_load_completes_when_each_scheduler_is_killed_in_turn(tmp_path: Path) -> None:
    """Given two schedulers and three workers over Redis, when each scheduler in turn is killed under load, then nothing
    is lost, and no client sees an error that its retry does not cure."""
    with running_cluster(tmp_path, workers=1) as cluster:
        with load_on(cluster, 240, "either") as load:
            for number, gateway in enumerate(cluster.gateways, 1):
                until(lambda done=80 * number: len(load.history.operations) >= done, "a part of the load")
                gateway.kill()
                until(lambda done=80 * number + 40: len(load.history.operations) >= done, "more with one gateway")
                gateway.start()
                cluster.ready()
            history = load.finish()
        verdict = check("either", history.operations, final_of(cluster))
    verdict.require_nothing_wrong()
    assert verdict.completed == 240
    assert verdict.reconnects > 0


@pytest.mark.nightly
def test_event_stream_resumes_at_another_gateway_without_gap(tmp_path: Path) -> None:
    """Given a client that follows a request, when its gateway is killed, then the other one tells it the rest."""
    with running_cluster(tmp_path, workers=1) as cluster:
        one, other = cluster.gateways
        request = submit(one, Asked("slow [sleep=0.2@denoise]", 1, steps=20), "stream")
        seen: list[dict[str, Any]] = []
        for event in stream(one, request, 0):
            seen.append(event)
            if event["type"] == "progress" and event["step"] >= 3:
                one.kill()
        assert seen[-1]["type"] == "progress", "the request was over before its gateway died"
        seen += stream(other, request, seen[-1]["seq"])
        assert seen == events_of(other.url, request)
        assert [event["seq"] for event in seen] == list(range(1, len(seen) + 1))
        assert seen[-1]["type"] == "completed"


def test_stopped_gateway_leaves_queued_request_to_other_gateway(tmp_path: Path) -> None:
    """Given a request that nobody can run yet, when the gateway that accepted it is told to stop, then it ends without
    waiting for the request, and the other one sees it through."""
    with running_cluster(tmp_path, workers=0, serve=["--drain-timeout", "3600"]) as cluster:
        one, other = cluster.gateways
        until(lambda: one.get("/health") and other.get("/health"), "the gateways")
        request = submit(one, Asked("left behind", 1), "left")
        one.send(signal.SIGTERM)
        assert one.popen.wait(600) == 0
        for role in ROLES:
            cluster.worker(role)
        until(lambda: (other.get(f"/v1/requests/{request}") or {}).get("status") == "completed", "the request")


@pytest.mark.nightly
def test_requests_complete_while_workers_join_and_drain(tmp_path: Path) -> None:
    """Given one worker of each role, when others join, the first ones are told to leave, and for a while there is no
    denoiser at all, then those that leave exit with 0 and every request is completed without a charge."""
    with running_cluster(tmp_path, workers=1) as cluster:
        first = list(cluster.workers)
        with load_on(cluster, 300, "scale", "[sleep=0.01@denoise]") as load:
            until(lambda: len(load.history.operations) >= 40, "some of the load")
            joined = {role: cluster.worker(role) for role in ROLES}
            cluster.ready()
            names = {cluster.members()[worker.pid]["id"] for worker in joined.values()}
            for worker in first:
                worker.send(signal.SIGTERM)
            assert [worker.popen.wait(600) for worker in first] == [0, 0, 0]
            done = len(load.history.operations)
            until(lambda: len(load.history.operations) > done + 20, "those that joined to serve alone")
            joined["denoiser"].send(signal.SIGTERM)
            assert joined["denoiser"].popen.wait(600) == 0
            cluster.workers[:] = [worker for worker in cluster.workers if worker.alive]
            names.add(str(_joined(cluster, "denoiser")))
            history = load.finish()
        final = final_of(cluster)
        verdict = check("scale", history.operations, final)
    verdict.require_nothing_wrong()
    assert verdict.completed == 300
    served_by = {stage["worker"] for told in final.requests.values() for stage in told.view["stages"]}
    assert names <= served_by
    lost = [
        event for told in final.requests.values() for event in told.events if "sent no heartbeats" in event["message"]
    ]
    assert lost == []


def _joined(cluster: Cluster, role: str) -> str:
    worker = cluster.worker(role)
    cluster.ready()
    return str(cluster.members()[worker.pid]["id"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("roles", "count", "arena"),
    [
        (["all"], 1000, 256),
        (["all"], 50, 8),
        (list(ROLES), 300, 128),
    ],
)
def test_long_queue_completes_through_small_arena(tmp_path: Path, roles: list[str], count: int, arena: int) -> None:
    """Given requests whose tensors, all together, need many times the arena (MiB), and which all wait when the first
    worker comes, then all are completed at the first attempt of each stage, what waits holds no tensor, and the arena
    is empty after."""
    limits = ["--max-active", "1024", "--max-queue", "1024"]
    with running_cluster(tmp_path, schedulers=1, workers=0, arena=f"{arena}MiB", serve=limits) as cluster:
        gateway = cluster.gateways[0]
        asked = [Asked(f"large {number}", number, width=1024, height=1024, steps=2) for number in range(count)]
        requests = [submit(gateway, one, f"large-{number}") for number, one in enumerate(asked)]
        watching, most = threading.Event(), [0]

        def watch() -> None:
            while not watching.wait(0.1):
                most.append(max((worker["used"] for worker in cluster.members().values()), default=0))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for role in roles:
                cluster.worker(role)
            cluster.ready()
            until(lambda: gateway.get(f"/v1/requests/{requests[-1]}")["status"] == "completed", "the last one", 240)
        finally:
            watching.set()
            watcher.join()
        final = final_of(cluster)
    assert not final.leaks.any
    assert {told.view["status"] for told in final.requests.values()} == {"completed"}
    assert {stage["attempt"] for told in final.requests.values() for stage in told.view["stages"]} == {1}
    assert [final.requests[request].hashes for request in requests] == [[one.right] for one in asked]
    assert 0 < max(most) <= max(arena // 2, 8) << 20, "a backlog held tensors"
