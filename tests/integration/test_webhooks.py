"""A gateway is killed while it tells a webhook: another one, or the same when it is back, tells it once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tools.receiver import Receiver
from tools.redis_server import RedisServer
from tools.server import Server, serving, until

SECRET = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
FLAGS = ("--workers", "none", "--webhook-hosts", "127.0.0.0/8", "--webhook-secret", SECRET)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    found.answers = [found.hang]
    yield found
    found.close()


def webhook_of(server: Server, request: str) -> dict[str, Any]:
    shown = server.get(f"/v1/requests/{request}")
    return dict(shown["webhook"]) if shown else {}


def cancelled_and_being_told(server: Server, receiver: Receiver) -> str:
    """The id of a request whose webhook has been called, and does not answer."""
    until(lambda: server.get("/health"), "the gateway", server.process)
    request = server.submit("a red circle on white", webhook=receiver.url)
    server.post(f"/v1/requests/{request}/cancel", {})
    until(lambda: receiver.calls, "the first call", server.process)
    return request


def heard(server: Server, request: str, receiver: Receiver) -> None:
    until(lambda: webhook_of(server, request).get("state") == "delivered", "the webhook to be heard", server.process)
    assert webhook_of(server, request)["attempts"] == 2
    told = receiver.verified(SECRET)
    assert [message["type"] for message in told] == ["request.cancelled"] * 2
    assert [message["data"]["id"] for message in told] == [request] * 2
    assert {headers["webhook-id"] for headers, _ in receiver.calls} == {request}, "by which the target knows a repeat"


@pytest.mark.nightly
@pytest.mark.slow
def test_webhook_is_redelivered_after_server_kill_and_restart(tmp_path: Path, receiver: Receiver) -> None:
    with serving(tmp_path, *FLAGS) as server:
        request = cancelled_and_being_told(server, receiver)
        server.killed_and_started_again()
        heard(server, request, receiver)


@pytest.mark.nightly
def test_webhook_of_killed_gateway_is_redelivered_by_another(tmp_path: Path, receiver: Receiver) -> None:
    redis = RedisServer(tmp_path)
    with ExitStack() as stack:
        stack.callback(redis.stop)
        folders = [tmp_path / name for name in ("one", "two")]
        for folder in folders:
            folder.mkdir()
        one, two = (stack.enter_context(serving(folder, *FLAGS, "--queue", redis.url)) for folder in folders)
        until(lambda: two.get("/health"), "the other gateway", two.process)
        request = cancelled_and_being_told(one, receiver)
        one.process.kill()
        heard(two, request, receiver)
