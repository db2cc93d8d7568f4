"""What a server of the version before had accepted, this one completes: its queue is opened as it was left."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
from functools import partial
from pathlib import Path

import pytest

from tests.integration.recorded import RECORDED, REQUESTS, circumstances
from tools.redis_server import RedisServer
from tools.server import Server, serving

LEFT = Path(__file__).with_name("yesterday")
WAITED = {
    "sqlite": {
        "video_a54f749940f6884a1fd3f8455f185963": 6,
        "req_bfd945b5059e30daea7584af756833a2": 1,
        "req_99f940bf0bb13dec5e17002746020436": 4,
        "video_5d9f41c36b2d46a53ce019ad204dbb73": 7,
    },
    "redis": {
        "video_d86c2776c6210ff1aceeb99d8a2a444e": 6,
        "req_7298b61a6a38e9803fdfb18b62fbb262": 1,
        "req_caa065e5ead1eb29fea81b5eee9997bc": 4,
        "video_b074bb144c52523f4a6bf4d4918f78a3": 7,
    },
}
"""Which of the ten recorded requests each request that was not over is."""

OVER = {
    "sqlite": ("req_a31964f237bce24d6736a6e379e1e96d", "req_629fdd7573cd6327699086a822322461"),
    "redis": ("req_4d62627098eede04ad65d647774c2cf1", "req_0c77fa13f9693befebd7e85a4d4f8fe3"),
}
"""The completed and the cancelled one."""

KEPT = {"UNFUSE_SERVE__RETENTION_S": "1e10"}
"""They were made on one day in 2026, and would be forgotten on the next."""

WORKERS = ("--workers", "all=1", "--threads", "1")
"""One, of all stages: it has to do what was left for an encoder, a denoiser and a decoder."""


def check(server: Server, queue: str) -> None:
    """Everything is there as it was, and what was not over is completed, to the recorded bytes."""
    completed, cancelled = (server.get(f"/v1/requests/{id}") for id in OVER[queue])
    assert (completed["status"], cancelled["status"]) == ("completed", "cancelled")
    assert {request["id"] for request in server.get("/v1/requests?limit=100")["data"]} == {*WAITED[queue], *OVER[queue]}

    assert {id: server.finished(id)["status"] for id in WAITED[queue]} == dict.fromkeys(WAITED[queue], "completed")

    recorded = json.loads(RECORDED.read_text())
    if circumstances() == recorded["circumstances"]:
        for id, number in WAITED[queue].items():
            results = [server.result(id, index) for index in range(len(recorded["results"][number]))]
            assert [hashlib.sha256(result).hexdigest() for result in results] == recorded["results"][number]
    repeated = {"model": "unfuse/shapes"} | REQUESTS[0][1]
    ask = partial(server.post, REQUESTS[0][0], repeated, prefer="respond-async")
    assert ask(idempotency_key="yesterday-1")["id"] == OVER[queue][0]
    assert server.finished(ask()["id"])["status"] == "completed"


@pytest.mark.nightly
def test_a_queue_db_of_the_version_before(tmp_path: Path) -> None:
    shutil.copy(LEFT / "queue.db", tmp_path)

    with serving(tmp_path, "--queue", f"sqlite:{tmp_path}/queue.db", *WORKERS, **KEPT) as server:
        check(server.ready(), "sqlite")


@pytest.mark.nightly
def test_a_redis_of_the_version_before(tmp_path: Path, redis_server: RedisServer) -> None:
    commands = (LEFT / "redis.aof").read_bytes()
    with socket.create_connection(("127.0.0.1", redis_server.port)) as connection:
        connection.sendall(commands + b"PING\r\n")
        answers = b""
        while not answers.endswith(b"+PONG\r\n"):
            answers += connection.recv(65536)
    assert b"-" not in {line[:1] for line in answers.splitlines()}

    with serving(tmp_path, "--queue", redis_server.url, *WORKERS, **KEPT) as server:
        check(server.ready(), "redis")


@pytest.mark.parametrize("queue", ["sqlite", "redis"])
def test_what_was_left_is_whole(queue: str) -> None:
    """The fixtures hold what the tests above look for, so that those cannot pass over nothing."""
    held = (LEFT / {"sqlite": "queue.db", "redis": "redis.aof"}[queue]).read_bytes()

    assert all(id.encode() in held for id in (*WAITED[queue], *OVER[queue]))
