"""Two gateways over one Redis are one server to their clients, also when Redis goes away for a while."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

from tests.server.served import IDLE, MOVING, PICTURES, WORKER, Served, picture, serve, until
from tools.redis_server import RedisServer
from unfuse.client import Client
from unfuse.core.errors import NotFound

URL = "/v1/images/generations"
ASKED = {"model": "test/pictures", "prompt": "a red circle"}
ASYNC = {"prefer": "respond-async"}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.sync("always")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def pair(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """Two gateways, each with its scheduler, that share a queue and a folder of results; the first has the worker."""
    folder, cards = tmp_path_factory.mktemp("results"), (PICTURES, MOVING)
    with (
        serve(folder, queue=redis.url, cards=cards) as one,
        serve(folder, queue=redis.url, works=False) as other,
    ):
        until(lambda: len(models(one)) == len(models(other)) == 3)
        yield one, other


@pytest.fixture
def near(pair: tuple[Served, Served]) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=pair[0].url, timeout=600, trust_env=False) as client:
        yield client


@pytest.fixture
def far(pair: tuple[Served, Served]) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=pair[1].url, timeout=600, trust_env=False) as client:
        yield client


def models(served: Served) -> list[Any]:
    with httpx2.Client(base_url=served.url, trust_env=False) as client:
        return list(client.get("/v1/models").json()["data"])


def submit(http: httpx2.Client, model: str = "test/pictures", **headers: str) -> str:
    return str(http.post(URL, json={**ASKED, "model": model}, headers={**ASYNC, **headers}).json()["id"])


def count(http: httpx2.Client, what: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"unfuse_requests_{what}_total ")))


def test_request_and_result_are_available_from_the_other_gateway(near: httpx2.Client, far: httpx2.Client) -> None:
    view = near.post(URL, json={**ASKED, "seed": 5, "response_format": "url"}).json()
    id = view["id"]
    assert far.get(f"/v1/requests/{id}").json()["status"] == "completed"
    assert far.get(f"/v1/requests/{id}/result/0").content == picture(5)
    assert near.get("/v1/requests").json()["first_id"] == far.get("/v1/requests").json()["first_id"] == id


def test_request_is_run_by_the_worker_of_the_other_gateway(far: httpx2.Client) -> None:
    assert far.post(URL, json=ASKED).status_code == 200


def test_event_stream_resumes_at_the_other_gateway(
    pair: tuple[Served, Served], near: httpx2.Client, far: httpx2.Client
) -> None:
    with Client(pair[0].url) as one, Client(pair[1].url) as other:
        with pair[0].held(after_steps=True):
            id = submit(near)
            begun = one.request(id).events()
            heard = []
            while not heard or heard[-1].type != "progress":
                heard.append(next(begun))
        rest = list(other.request(id).events(after=heard[-1].seq))
        assert [*heard, *rest] == list(one.request(id).events())
        assert rest[-1].type == "completed"


def test_cancel_at_one_gateway_ends_a_request_of_the_other(near: httpx2.Client, far: httpx2.Client) -> None:
    id = submit(near, IDLE.name)
    before = count(near, "cancelled"), count(far, "cancelled")
    assert far.post(f"/v1/requests/{id}/cancel").json()["status"] == "cancelled"
    assert near.get(f"/v1/requests/{id}").json()["status"] == "cancelled"
    assert near.post(f"/v1/requests/{id}/cancel").json()["status"] == "cancelled"
    assert (count(near, "cancelled"), count(far, "cancelled")) == (before[0], before[1] + 1)


def test_idempotency_key_is_shared_between_gateways(near: httpx2.Client, far: httpx2.Client) -> None:
    key = {"idempotency-key": "order-7"}
    id = submit(near, **key)
    assert submit(far, **key) == id
    other = far.post(URL, json={**ASKED, "seed": 1}, headers={**ASYNC, **key})
    assert (other.status_code, other.headers["x-should-retry"]) == (409, "false")


def test_repeat_without_idempotency_key_creates_another_request(near: httpx2.Client, far: httpx2.Client) -> None:
    assert submit(near) != submit(far, **{"x-stainless-retry-count": "1"})


def test_each_transition_is_counted_once_across_gateways(near: httpx2.Client, far: httpx2.Client) -> None:
    def counts() -> list[float]:
        return [count(http, what) for what in ("submitted", "completed") for http in (near, far)]

    def settled() -> bool:
        ended = [count(http, what) for what in ("completed", "cancelled") for http in (near, far)]
        return sum(counts()[:2]) == sum(ended)

    until(settled)
    submitted_near, submitted_far, completed_near, completed_far = counts()
    for http in (near, far):
        assert http.post(URL, json=ASKED).status_code == 200
    until(lambda: counts() == [submitted_near + 1, submitted_far + 1, completed_near + 2, completed_far])


def test_upload_accepted_by_one_gateway_is_deleted_by_the_other(
    pair: tuple[Served, Served], far: httpx2.Client
) -> None:
    asked = {"model": MOVING.name, "prompt": "a red circle", "seconds": "2"}
    with pair[0].held():
        id = far.post("/v1/videos", data=asked, files={"input_reference": picture(9)}).json()["id"]
        assert pair[1].results.attached(id, "image") == picture(9)
    pair[1].next_event(id, "completed")

    def let_go() -> bool:
        try:
            pair[1].results.attached(id, "image")
        except NotFound:
            return True
        return False

    until(let_go)


def test_calls_get_503_while_redis_is_down_and_recover_afterwards(
    redis: RedisServer, pair: tuple[Served, Served], near: httpx2.Client, far: httpx2.Client
) -> None:
    id, heard = submit(near, IDLE.name), []
    with Client(pair[1].url, reconnect_delay=0.3) as client:
        request = client.request(id)
        following = threading.Thread(target=lambda: heard.extend(e.type for e in request.events()), daemon=True)
        following.start()
        redis.kill()
        with capture_logs() as logs:
            for answer in (
                near.post(URL, json=ASKED),
                near.get(f"/v1/requests/{id}"),
                near.post(f"/v1/requests/{id}/cancel"),
                far.get("/metrics"),
            ):
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
                assert answer.json()["error"]["code"] == "unavailable"
            ready = near.get("/ready")
            assert (ready.status_code, ready.headers["retry-after"]) == (503, "2")
            assert "does not respond" in ready.json()["error"]["message"]
            assert near.get("/health").status_code == 200
        told = [line for line in logs if line["event"] == "unavailable"]
        assert len(told) >= 4
        assert [line for line in logs if line.get("exc_info")] == []
        redis.start()
        redis.sync("always")
        for http in (near, far):
            until(lambda http=http: http.post(URL, json=ASKED).status_code == 200)
        until(lambda: far.get(f"/v1/requests/{id}").json().get("status") == "queued")
        until(lambda: near.post(f"/v1/requests/{id}/cancel").json().get("status") == "cancelled")
        following.join(60)
    assert heard == ["queued", "cancelled"]


def test_request_accepted_before_a_restart_is_counted_as_completed(tmp_path: Path) -> None:
    queue = f"sqlite:{tmp_path}/queue.db"
    with serve(tmp_path / "results", queue=queue, works=False) as first:
        first.run(first.scheduler.queue.register(WORKER, (PICTURES,)))
        with httpx2.Client(base_url=first.url, trust_env=False) as http:
            id = submit(http)
            assert count(http, "submitted") == 1
    with serve(tmp_path / "results", queue=queue) as second:
        second.next_event(id, "completed")
        with httpx2.Client(base_url=second.url, trust_env=False) as http:
            until(lambda: count(http, "completed") == 1)
            assert count(http, "submitted") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_waiting_call_gets_error_lost_if_the_queue_lost_its_request(
    stream: bool, redis: RedisServer, tmp_path: Path
) -> None:
    """Given a caller that waits, when the data of the queue's server is deleted, then the answer is a 503 `lost`."""
    with (
        serve(tmp_path, queue=f"{redis.url}?prefix=lost", works=False) as served,
        httpx2.Client(base_url=served.url, timeout=60, trust_env=False) as http,
        ThreadPoolExecutor() as asking,
    ):
        answer = asking.submit(http.post, URL, json={"model": IDLE.name, "prompt": "a", "stream": stream})
        until(lambda: list(redis.client.scan_iter("{lost}:request:*")))
        redis.client.delete(*redis.client.scan_iter("{lost}*"))
        response = answer.result()
    error = json.loads(response.text.removeprefix("data: "))["error"]
    assert (error["code"], response.status_code) == ("lost", 200 if stream else 503)
