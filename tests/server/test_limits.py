"""What a key allows: so many requests, these models, reading alone; and the calls of a key that is withdrawn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.edge.test_keys import written
from tests.server.served import IDLE, Served, serve, until
from tools.cards import MOVING, PICTURES
from tools.redis_server import RedisServer

URL = "/v1/images/generations"
LATER = {"prefer": "respond-async"}


def as_(served: Served, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=served.url, headers={"authorization": f"Bearer {key}"}, trust_env=False, timeout=60)


def asked(http: httpx2.Client, model: str = IDLE.name, **more: object) -> httpx2.Response:
    return http.post(URL, json={"model": model, "prompt": "a circle", **more}, headers=LATER)


def refused(answer: httpx2.Response, status: int, code: str) -> str:
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    return str(answer.json()["error"]["message"])


def test_tenant_over_its_concurrency_limit_gets_429_others_do_not(tmp_path: Path) -> None:
    with (
        serve(tmp_path, keys=["ada a concurrent=2", "ada a2 concurrent=2", "bob b"]) as served,
        as_(served, "a") as ada,
        as_(served, "a2") as other_key,
        as_(served, "b") as bob,
    ):
        ids = [asked(ada).json()["id"] for _ in range(2)]
        for http in (ada, other_key):
            answer = asked(http)
            assert "its key allows 2" in refused(answer, 429, "rate_limit_exceeded")
            assert int(answer.headers["retry-after"]) >= 1
        assert [asked(bob).status_code for _ in range(3)] == [202] * 3
        ada.post(f"/v1/requests/{ids[0]}/cancel")
        assert asked(ada).status_code == 202
        refused(asked(ada), 429, "rate_limit_exceeded")


def test_rate_limit_counts_only_accepted_requests(tmp_path: Path) -> None:
    with (
        serve(tmp_path, keys=["ada a rate=2/h", "bob b"]) as served,
        as_(served, "a") as ada,
        as_(served, "b") as bob,
    ):
        refused(asked(ada, steps=0), 400, "invalid_parameter")
        twice = {"prompt": "a circle", "model": IDLE.name}
        first = [ada.post(URL, json=twice, headers=LATER | {"idempotency-key": "k"}).json()["id"] for _ in range(3)]
        assert len(set(first)) == 1
        assert asked(ada).status_code == 202
        answer = asked(ada)
        assert "2 requests in 3600 s" in refused(answer, 429, "rate_limit_exceeded")
        assert 1700 < int(answer.headers["retry-after"]) <= 1800
        assert asked(bob).status_code == 202
        assert ada.get("/v1/requests").status_code == 200, "reading is not limited"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.mark.slow
def test_gateways_sharing_redis_enforce_one_limit(tmp_path: Path, redis: RedisServer) -> None:
    keys = ["ada a concurrent=3", "bob b rate=3/h"]
    with serve(tmp_path, keys=keys, queue=redis.url) as one, serve(tmp_path, keys=keys, queue=redis.url) as two:
        for key in "ab":
            with as_(one, key) as here, as_(two, key) as there:
                assert [asked(http).status_code for http in (here, there, here)] == [202] * 3
                for http in (here, there):
                    refused(asked(http), 429, "rate_limit_exceeded")


def test_api_key_is_restricted_to_its_models(tmp_path: Path) -> None:
    keys = [f"ada a models={PICTURES.name}", "bob b", "cy c models=elsewhere"]
    with (
        serve(tmp_path, keys=keys, cards=(PICTURES, MOVING)) as served,
        as_(served, "a") as ada,
        as_(served, "b") as bob,
        as_(served, "c") as cy,
    ):
        until(lambda: len(bob.get("/v1/models").json()["data"]) == 3)
        assert [model["id"] for model in ada.get("/v1/models").json()["data"]] == [PICTURES.name]
        assert cy.get("/v1/models").json()["data"] == []
        refused(ada.get(f"/v1/models/{IDLE.name}"), 404, "model_not_found")
        assert asked(ada, PICTURES.name).status_code == 202
        message = refused(asked(ada, IDLE.name), 404, "model_not_found")
        assert PICTURES.name in message and MOVING.name not in message
        refused(asked(cy, PICTURES.name), 404, "model_not_found")
        left_out = ada.post(URL, json={"prompt": "a circle"}, headers=LATER)
        assert left_out.json()["model"] == PICTURES.name


def test_read_only_key_gets_403_for_writes(tmp_path: Path) -> None:
    with serve(tmp_path, keys=["ada a", "ada r read=yes"]) as served, as_(served, "a") as ada, as_(served, "r") as http:
        request = asked(ada).json()["id"]
        assert [one["id"] for one in http.get("/v1/requests").json()["data"]] == [request]
        refused(asked(http), 403, "read_only")
        refused(http.post(f"/v1/requests/{request}/cancel"), 403, "read_only")
        refused(http.delete(f"/v1/videos/{request}"), 403, "read_only")
        refused(http.post(f"/v1/dead/{request}/retry"), 403, "read_only")


def test_revoked_key_ends_open_calls_but_not_its_requests(tmp_path: Path) -> None:
    file = written(tmp_path, "ada a", "ada a2", "bob b")
    ends: dict[str, Any] = {}

    def keep(name: str, http: httpx2.Client, **body: object) -> None:
        try:
            answer = http.post(URL, json={"model": PICTURES.name, "prompt": "a circle", **body})
            ends[name] = answer.status_code, answer.text
        except httpx2.HTTPError as error:
            ends[name] = error

    with (
        serve(tmp_path / "results", keys=file) as served,
        served.held(),
        as_(served, "a") as ada,
        as_(served, "a2") as second,
        as_(served, "b") as bob,
    ):
        calls = [
            threading.Thread(target=keep, args=("waiting", ada)),
            threading.Thread(target=keep, args=("streaming", ada), kwargs={"stream": True}),
            threading.Thread(target=keep, args=("other", bob)),
        ]
        for thread in calls:
            thread.start()
        until(
            lambda: (
                len(second.get("/v1/requests").json()["data"]) == 2 and len(bob.get("/v1/requests").json()["data"]) == 1
            )
        )
        written(tmp_path, "ada a2", "bob b")
        for thread in calls[:2]:
            thread.join(30)
        assert ends["waiting"] == (401, ends["waiting"][1]) and "invalid_api_key" in ends["waiting"][1]
        assert ends["streaming"][0] == 200 and "event: error" in ends["streaming"][1]
        assert "other" not in ends
        refused(ada.get("/v1/models"), 401, "invalid_api_key")
        going = [one["status"] for one in second.get("/v1/requests").json()["data"]]
        assert going and not {"cancelled", "failed"} & set(going)
        served.let_go()
        until(lambda: {one["status"] for one in second.get("/v1/requests").json()["data"]} == {"completed"})
        calls[2].join(30)
        assert ends["other"][0] == 200


def test_revoked_key_aborts_its_video_stream(tmp_path: Path) -> None:
    """Given a stream that has begun, when its key is removed, then it has no proper end: nobody takes it for whole."""
    file = written(tmp_path, "ada a", "bob b")
    with serve(tmp_path / "results", keys=file) as served, as_(served, "a") as ada:
        film = ada.post("/v1/videos", json={"prompt": "a circle", "model": IDLE.name}).json()["id"]
        with ada.stream("GET", f"/v1/videos/{film}/content?stream=1") as streamed:
            assert streamed.status_code == 200
            written(tmp_path, "bob b")
            with pytest.raises(httpx2.RemoteProtocolError):
                streamed.read()
