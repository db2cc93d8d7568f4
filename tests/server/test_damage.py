"""A gateway over a Redis that holds garbage: everything whole is served, and the rest is listed until it is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.server.served import IDLE, PICTURES, Served, serve, until
from tools.redis_server import RedisServer
from unfuse.cli.main import run

URL, P = "/v1/images/generations", "{unfuse}"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def served(redis: RedisServer, tmp_path: Path) -> Iterator[Served]:
    with serve(tmp_path / "results", queue=redis.url, lease_ttl=2.0) as served:
        yield served


def test_damaged_redis_records_are_listed_and_deletable_while_others_work(
    redis: RedisServer, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given a context, a worker and its card, a lease and an event that are garbage, then requests are accepted, made,
    listed and shown, `/ready` and `/metrics` answer, and `unfuse dead` lists what cannot be read, and forgets it."""
    with httpx2.Client(base_url=served.url, timeout=30, trust_env=False) as http:
        asked = {"model": IDLE.name, "prompt": "a red circle"}
        bad, good = (http.post(URL, json=asked, headers={"prefer": "respond-async"}).json()["id"] for _ in range(2))
        redis.client.hset(f"{P}:request:{bad}", "context", b"\xc1")
        redis.client.zadd(f"{P}:events:{good}", {b"\xc1": 0})
        redis.client.zadd(f"{P}:leases", {b"nobody": 0})
        for kind in ("joined", "workers", "cards", "seen"):
            where = f"{P}:{kind}"
            redis.client.zadd(where, {"rogue": 0}) if kind == "joined" else redis.client.hset(where, "rogue", b"\xff")
        redis.client.publish(f"{P}:news", b"request:\xff")

        answer = http.post(URL, json={**asked, "model": PICTURES.name, "response_format": "url"})
        assert answer.status_code == 200, answer.text
        made = answer.json()
        assert [one["id"] for one in http.get("/v1/requests").json()["data"]] == [made["id"], good]
        assert http.get(f"/v1/requests/{made['id']}").json()["status"] == "completed"
        assert http.get(f"/v1/requests/{made['id']}/events").text.count("event: completed") == 1
        assert http.get("/metrics").status_code == 200
        assert set(http.get("/ready").json()["missing"]) == {IDLE.name}
        assert [worker["id"] for worker in http.get("/v1/workers").json()["data"]] == ["worker-1"]
        answer = http.get(f"/v1/requests/{bad}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "damaged")
        assert "see `unfuse dead ls`" in answer.json()["error"]["message"]

        def listed() -> dict[str, str]:
            return {one["id"]: one["kind"] for one in http.get("/v1/dead").json()["data"]}

        until(lambda: {bad, "rogue", "nobody"} <= listed().keys())  # the lease is met by the sweep
        assert (listed()[bad], listed()["nobody"]) == ("request", "lease")
        with pytest.raises(SystemExit):
            run(("dead", "ls", "--server", served.url))
        assert bad in capsys.readouterr().out
        for id in (bad, "rogue", "nobody"):
            assert http.delete(f"/v1/dead/{id}").json()["deleted"]
        assert listed() == {}
        assert http.get(f"/v1/requests/{bad}").status_code == 404
        assert http.delete(f"/v1/dead/{good}").status_code == 404  # of which only an event cannot be read
        assert http.get(f"/v1/requests/{good}").json()["status"] == "queued"
