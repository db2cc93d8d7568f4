"""A client that leaves, and what its picture held is free: sockets, processes and a queue as `serve` composes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.composed import connect
from tools.redis_server import RedisServer
from tools.server import Server, serving, until


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.nightly)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server that cancels for clients that leave, of whose workers the first would be busy for a minute."""
    arguments = ["--workers", "encoder=1,denoiser+decoder=1"]
    if request.param == "sqlite":
        with serving(tmp_path, *arguments) as server:
            yield server.ready()
        return
    redis = RedisServer(tmp_path)
    try:
        with serving(tmp_path, *arguments, "--queue", redis.url) as server:
            yield server.ready()
    finally:
        redis.stop()


def test_client_disconnect_cancels_the_request_and_frees_its_memory(server: Server) -> None:
    """Given a picture of many steps whose client closes its socket, then its memory is given back and others are made,
    long before it could have been done."""
    for stream in (False, True):
        body = json.dumps(
            {"prompt": "a red circle", "num_inference_steps": 100, "size": "64x64", "n": 4, "stream": stream}
        )
        with connect(int(server.url.rpartition(":")[2])) as client:
            head = "POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            listed = until(lambda: server.get("/v1/requests?limit=1")["data"], "the request to be accepted")
            request = listed[0]["id"]
            next(event for event in server.events(request) if event["type"] == "progress")
        assert server.finished(request)["status"] == "cancelled"
        until(lambda: not sum(worker["used"] for worker in server.get("/v1/workers")["data"]), "memory to be free")
    made = server.submit("a red circle", num_inference_steps=2)
    assert server.finished(made)["status"] == "completed"
