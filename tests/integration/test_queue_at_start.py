"""A server that starts before its queue can be used: it waits, says so, and goes on by itself."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.disks import fill, small_disk
from tests.integration.test_full_disk import asked
from tests.integration.test_restarts import SLOW, installed
from tools.redis_server import RedisServer
from tools.server import Server, all_gone, family_of, serving, until
from unfuse import queues
from unfuse.queues.base import SCHEMA_VERSION

WAITS = "the queue cannot be used yet: waiting for it"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    (folder := tmp_path / "redis").mkdir()
    server = RedisServer(folder)
    server.sync()
    yield server
    if server.running:
        server.stop()


def waits_and_goes_on(server: Server, reason: str, comes: Callable[[], object]) -> None:
    """A server without workers is alive, not ready, and refuses calls, for this reason, until the queue comes."""
    until(lambda: server.get("/health"), "the gateway to answer", server.process)
    status, text = asked(server, "/ready")
    assert (status, json.loads(text)["error"]["code"]) == (503, "not_ready")
    assert reason in text
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.submit("a red circle on white")
    assert (refused.value.code, refused.value.headers["retry-after"]) == (503, "2")
    comes()
    until(lambda: server.get("/v1/models"), "the queue to be used", server.process)
    assert "has no worker" in asked(server, "/ready")[1]
    assert server.log().count(WAITS) == 1


def test_serve_waits_for_unreachable_redis(redis: RedisServer, tmp_path: Path) -> None:
    redis.kill()
    with serving(tmp_path, "--workers", "none", "--queue", redis.url) as server:
        waits_and_goes_on(server, f"127.0.0.1:{redis.port}/0 does not respond", redis.start)


def test_serve_waits_while_sqlite_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path, 4096) as disk:
        fill(disk)
        with serving(tmp_path, "--workers", "none", UNFUSE_DATA_DIR=str(disk)) as server:
            waits_and_goes_on(server, "the disk of the queue is full", (disk / "filler").unlink)


def test_serve_exits_3_with_queue_wait_0_and_unreachable_redis(redis: RedisServer, tmp_path: Path) -> None:
    redis.kill()
    with serving(tmp_path, "--workers", "none", "--queue", redis.url, "--queue-wait", "0") as server:
        assert server.process.wait(60) == 3
        assert "does not respond" in server.log() and WAITS not in server.log()


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_serve_exits_2_on_queue_schema_version_mismatch(kind: str, redis: RedisServer, tmp_path: Path) -> None:
    """Exit code 2 and one sentence that says what to do; the queue is left as it is."""
    file = tmp_path / "queue.db"
    if kind == "sqlite":
        queue, what_to_do = f"sqlite:{file}", "use another file with --queue sqlite:PATH, or delete this one"
        asyncio.run(queues.open(queue).close())
        with closing(sqlite3.connect(file)) as database:
            database.execute(f"PRAGMA user_version = {SCHEMA_VERSION - 1}")
    else:
        queue, what_to_do = redis.url, "use another prefix, as in ?prefix=NAME, or delete the keys that begin with"
        redis.client.hset("{unfuse}:meta", "arrivals", 1)
    before = file.read_bytes() if file.exists() else redis.client.hgetall("{unfuse}:meta")

    with serving(tmp_path, "--workers", "none", "--queue", queue) as server:
        assert server.process.wait(60) == 2
        assert server.log().count(what_to_do) == 1 and "Traceback" not in server.log()

    assert before == (file.read_bytes() if file.exists() else redis.client.hgetall("{unfuse}:meta"))


def test_sigterm_stops_server_that_waits_for_queue(redis: RedisServer, tmp_path: Path) -> None:
    redis.kill()
    with serving(tmp_path, "--workers", "none", "--queue", redis.url) as server:
        until(lambda: WAITS in server.log(), "it to wait", server.process)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [10, 40])
def test_requests_survive_simultaneous_kill_of_redis_and_gateway(
    steps: int, redis: RedisServer, tmp_path: Path
) -> None:
    """Given requests that run, when Redis and the gateway are killed at once and the gateway starts first, then it
    waits, and all requests complete under their ids."""
    model, variables = installed(tmp_path)
    with serving(tmp_path, model, "--arena", "16MiB", "--queue", redis.url, **variables) as server:
        server.ready()
        requests = [server.submit(SLOW, seed=seed, num_inference_steps=steps) for seed in range(4)]
        until(lambda: server.get(f"/v1/requests/{requests[0]}")["status"] == "in_progress", "it to run", server.process)
        everyone = family_of(server.process.pid)
        redis.kill()
        server.process.kill()
        server.process.wait()
        until(lambda: all_gone(everyone), "the server's processes to end")
        server.killed_and_started_again()
        until(lambda: server.get("/health"), "the gateway to answer", server.process)
        assert asked(server, "/ready")[0] == 503
        redis.start()
        server.ready()
        assert [server.finished(request)["status"] for request in requests] == ["completed"] * 4
        assert all(server.result(request) for request in requests)
