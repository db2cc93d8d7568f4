"""Clients that disconnect before their picture is made: the request is cancelled, unless others may want it."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.server.composed import Answer, call, composed, connect, rest
from tests.server.served import MOVING, PICTURES, Served, picture, serve, until
from tools.redis_server import RedisServer
from unfuse.core.errors import TransientError
from unfuse.core.request import Event, RequestContext
from unfuse.queues.base import RequestFilter
from unfuse.scheduler.scheduler import Scheduler

URL = "/v1/images/generations"
ASKED = {"model": PICTURES.name, "prompt": "a red circle", "seed": 5}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway that cancels for clients that leave."""
    with serve(tmp_path_factory.mktemp("hasty"), cards=(PICTURES, MOVING), cancels=True) as served:
        yield served


@pytest.fixture
def http(hasty: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=hasty.url, timeout=600, trust_env=False) as client:
        yield client


def asked(body: dict[str, Any], *headers: str, url: str = URL) -> bytes:
    """A call as it is sent, on a connection that stays open."""
    data = json.dumps(body)
    lines = [f"POST {url} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", data]).encode()


def port_of(served: Served) -> int:
    return urlsplit(served.url).port or 0


def ids(served: Served) -> list[str]:
    return [record.context.id for record in served.run(served.queue.list(RequestFilter(), limit=10_000))]


@contextmanager
def calling(served: Served, *headers: str, port: int = 0, **more: Any) -> Iterator[tuple[socket.socket, str]]:
    """A client that waits, and the request that its call became."""
    before = set(ids(served))
    with connect(port or port_of(served)) as client:
        client.sendall(asked(ASKED | more, *headers))
        until(lambda: bool(set(ids(served)) - before))
        (request,) = set(ids(served)) - before
        yield client, request


def context(served: Served, request: str) -> RequestContext:
    return served.run(served.queue.load(request)).context


def ended(served: Served, request: str) -> str:
    """How a request ended, once it has."""
    until(lambda: context(served, request).is_over)
    return context(served, request).status


def free(served: Served) -> bool:
    """Whether nothing waits or runs."""
    return served.run(served.queue.stats([])).active == 0


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"stream": True, "partial_images": 2}, {"n": 3}])
@pytest.mark.parametrize("reset", [False, True])
def test_client_disconnect_cancels_the_request(hasty: Served, more: dict[str, Any], reset: bool) -> None:
    with hasty.held(), calling(hasty, **more) as (client, request):
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        assert ended(hasty, request) == "cancelled"
        error = context(hasty, request).error
        assert error and error.message == "its client disconnected"
        assert free(hasty)


def test_disconnect_between_steps_cancels_the_request_and_deletes_uploads(hasty: Served) -> None:
    """Given a picture that starts from another, half drawn, then its lease ends, and its upload is deleted."""
    before = set(ids(hasty))
    data = "data:image/png;base64," + base64.b64encode(picture(9)).decode()
    with hasty.held(after_steps=True), connect(port_of(hasty)) as client:
        client.sendall(asked({**ASKED, "model": MOVING.name, "image": data}, url="/v1/images/edits"))
        until(lambda: bool(set(ids(hasty)) - before))
        (request,) = set(ids(hasty)) - before
        hasty.next_event(request, "progress")
        assert hasty.results.attached(request, "image")
        client.close()
        assert ended(hasty, request) == "cancelled"
        until(lambda: not (hasty.folder / request).exists())


def test_disconnect_cancels_only_the_pending_call_of_a_connection(hasty: Served) -> None:
    """Given two calls on one connection that the client closes in the second, then the first stays as it was."""
    before = set(ids(hasty))
    with connect(port_of(hasty)) as client:
        client.sendall(asked(ASKED))
        data = b""
        while not (data.partition(b"\r\n\r\n")[2] and data.endswith(b"}")):
            data += client.recv(65536)
        first = json.loads(Answer(data).body)["id"]
        with hasty.held():
            client.sendall(asked(ASKED))
            until(lambda: len(set(ids(hasty)) - before) == 2)
            (second,) = set(ids(hasty)) - before - {first}
            client.close()
            assert ended(hasty, second) == "cancelled"
    assert context(hasty, first).status == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_after_the_response_does_not_cancel(hasty: Served, stream: bool) -> None:
    with calling(hasty, "Connection: close", stream=stream) as (client, request):
        answer = Answer(rest(client))
    assert (answer.status, ended(hasty, request)) == (200, "completed")
    assert picture(5) in base64.b64decode(answer.body.split(b'"b64_json":"')[1].split(b'"')[0])


def pass_on(come: socket.socket, go: socket.socket) -> None:
    """Pass bytes on, and then the end of them alone: the other direction stays open."""
    with suppress(OSError):
        while data := come.recv(65536):
            go.sendall(data)
    with suppress(OSError):
        go.shutdown(socket.SHUT_WR)


@contextmanager
def half_closing(port: int) -> Iterator[int]:
    """A proxy that tells a server of a client that is gone by closing its own sending half."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept: list[socket.socket] = []

        def accept() -> None:
            with suppress(OSError):
                while True:
                    kept.extend((listener.accept()[0], connect(port)))
                    for ways in ((kept[-2], kept[-1]), (kept[-1], kept[-2])):
                        threading.Thread(target=pass_on, args=ways, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for one in kept:
                one.close()


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_behind_a_half_closing_proxy_cancels_the_request(hasty: Served, stream: bool) -> None:
    with (
        half_closing(port_of(hasty)) as proxy,
        hasty.held(),
        calling(hasty, port=proxy, stream=stream) as (client, request),
    ):
        client.close()
        assert ended(hasty, request) == "cancelled"


def test_async_requests_continue_after_client_disconnect(hasty: Served, http: httpx2.Client) -> None:
    """Given a video, and a picture whose client prefers not to wait, then both are made."""
    with hasty.held():
        video = {"model": PICTURES.name, "prompt": "a", "num_frames": 5}
        film = http.post("/v1/videos", json=video).json()["id"]
        with calling(hasty, "Prefer: respond-async") as (client, drawn):
            client.close()
    assert [ended(hasty, request) for request in (film, drawn)] == ["completed", "completed"]


@pytest.mark.parametrize("stream", [False, True])
def test_request_with_idempotency_key_continues_after_disconnect(
    hasty: Served, http: httpx2.Client, stream: bool
) -> None:
    """Given a client that leaves and comes back with its Idempotency-Key, then it gets what was made meanwhile."""
    key = f"it goes on {stream}"
    with hasty.held(), calling(hasty, f"Idempotency-Key: {key}", stream=stream) as (client, request):
        with connect(port_of(hasty)) as second:
            second.sendall(asked({**ASKED, "stream": stream}, f"Idempotency-Key: {key}"))
        client.close()
    assert ended(hasty, request) == "completed"
    again = http.post(URL, json={**ASKED, "stream": stream}, headers={"idempotency-key": key})
    assert again.status_code == 200
    assert [id for id in ids(hasty) if context(hasty, id).caller.idempotency_key == key] == [request]


def test_request_with_webhook_continues_after_disconnect(tmp_path: Path) -> None:
    with serve(tmp_path, cancels=True, webhook_hosts=["hooks.invalid"]) as served:
        with served.held(), calling(served, webhook="https://hooks.invalid/done") as (client, request):
            client.close()
        assert ended(served, request) == "completed"


def test_repeat_without_idempotency_key_creates_a_new_request(hasty: Served, http: httpx2.Client) -> None:
    more = {"prompt": "made after all"}
    with hasty.held(), calling(hasty, **more) as (client, request):
        client.close()
        assert ended(hasty, request) == "cancelled"
    made = http.post(URL, json=ASKED | more, headers={"x-stainless-retry-count": "1"})
    assert made.status_code == 200, made.text
    assert made.json()["id"] != request


def test_repeat_of_a_cancelled_request_with_its_key_returns_409(hasty: Served, http: httpx2.Client) -> None:
    with hasty.held(), calling(hasty, "Idempotency-Key: no more") as (client, request):
        http.post(f"/v1/requests/{request}/cancel")
        assert client.recv(65536).startswith(b"HTTP/1.1 409")
    again = http.post(URL, json=ASKED, headers={"idempotency-key": "no more"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "cancelled")


def failing(watch: Callable[..., AsyncIterator[Event]]) -> Callable[..., AsyncIterator[Event]]:
    """Events that cannot be read on after the first."""

    async def events(request: str, after: int = 0) -> AsyncIterator[Event]:
        async for event in watch(request, after):
            yield event
            await asyncio.sleep(0.05)
            raise TransientError("the queue does not answer")

    return events


@pytest.mark.parametrize("stream", [False, True])
def test_queue_failure_during_a_call_does_not_cancel_the_request(
    hasty: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a queue that fails while a client waits, then the client, which closes, has cancelled nothing."""
    with hasty.held():
        with monkeypatch.context() as patch:
            patch.setattr(hasty.queue, "watch", failing(hasty.queue.watch))
            with calling(hasty, "Connection: close", stream=stream) as (client, request):
                assert b"503" in rest(client) or stream
        assert not context(hasty, request).is_over
    assert ended(hasty, request) == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_server_shutdown_does_not_cancel_waiting_requests(
    tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a client that waits when the server ends, then it is not taken for one that left, however close the end of
    the queue, and the request is there for the next server to go on with."""
    left: list[str] = []
    monkeypatch.setattr(Scheduler, "client_disconnected", lambda _, request: left.append(request))
    with composed(tmp_path, on_disconnect="cancel", drain_timeout=0) as port:
        client = connect(port)
        client.sendall(asked({"prompt": "a red circle", "stream": stream}))
        until(lambda: b"req_" in call(port, "/v1/requests").body)
    rest(client)
    client.close()
    with composed(tmp_path) as port:
        (request,) = json.loads(call(port, "/v1/requests").body)["data"]
    assert (request["status"], left) == ("queued", [])


def test_request_continues_while_a_client_of_another_gateway_waits(redis: RedisServer, tmp_path: Path) -> None:
    """Given two gateways over one queue and one Idempotency-Key, then neither client takes the request along."""
    with (
        serve(tmp_path, queue=redis.url, cancels=True) as near,
        serve(tmp_path, queue=redis.url, cancels=True, works=False) as far,
        near.held(),
    ):
        until(lambda: all(PICTURES.name in one.run(one.scheduler.registry.model_specs()) for one in (near, far)))
        with calling(near) as (alone, request):
            alone.close()
            assert ended(far, request) == "cancelled"
        with calling(near, "Idempotency-Key: a") as (first, request), connect(port_of(far)) as second:
            second.sendall(asked(ASKED, "Idempotency-Key: a", "Connection: close"))
            first.close()
            near.let_go()
            assert json.loads(Answer(rest(second)).body)["id"] == request
