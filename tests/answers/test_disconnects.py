"""Clients that disconnect while their chat or picture is made, by a server with its defaults."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from typing import Any

import pytest

from tests.answers.chats import ENDLESS, HELLO, serve_arguments
from tests.answers.conftest import Serve
from tools.server import Server, until
from unfuse.client import aconnect, connect as connect_client

CHAT = "/v1/chat/completions", {"model": "zeta", "messages": HELLO, **ENDLESS}
PICTURE = "/v1/images/generations", {"model": "alpha", "prompt": "a red circle", "num_inference_steps": 100, "n": 4}
CALLS = {"chat": CHAT, "picture": PICTURE}


@pytest.fixture(scope="module")
def server(served: Serve, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return served(*serve_arguments(tmp_path_factory))


def connect(server: Server, path: str, body: dict[str, Any], *headers: str) -> socket.socket:
    """Send a call, and leave its connection open."""
    data = json.dumps(body)
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    client = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=600)
    client.sendall("\r\n".join([*lines, f"Content-Length: {len(data)}", "", data]).encode())
    return client


def newest(server: Server) -> str:
    """Return the id of the newest request, or ""."""
    data = server.get("/v1/requests?limit=1")["data"]
    return data[0]["id"] if data else ""


def begun(server: Server, before: str) -> str:
    """Wait until a request that is newer than `before` has made a step. Returns its id."""
    request = until(lambda: (found := newest(server)) != before and found, "the call to be accepted")
    until(lambda: server.get(f"/v1/requests/{request}")["step"] > 0, "the first step")
    return str(request)


def leased(server: Server) -> int:
    return sum(worker["leased"] for worker in server.get("/v1/workers")["data"])


@pytest.mark.row("C61", "N9")
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", ["chat", "picture"])
def test_a_request_is_cancelled_when_its_client_disconnects(
    server: Server, call: str, stream: bool, reset: bool
) -> None:
    """Given a chat or picture of many steps, when its client closes or resets its connection, then it is cancelled."""
    path, body = CALLS[call]
    before = newest(server)
    with connect(server, path, {**body, "stream": stream}) as client:
        request = begun(server, before)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    found = server.finished(request)
    assert found["status"] == "cancelled"
    assert found["error"] == {"code": "cancelled", "message": "its client disconnected", "stage": "", "evidence": ""}
    until(lambda: leased(server) == 0, "its slot to be free")


def test_half_closed_connection_cancels_the_request(server: Server) -> None:
    before = newest(server)
    with connect(server, *CHAT) as client:
        request = begun(server, before)
        client.shutdown(socket.SHUT_WR)
        assert server.finished(request)["status"] == "cancelled"


def test_request_with_idempotency_key_continues_after_disconnect(server: Server) -> None:
    path, body = CHAT
    before = newest(server)
    with connect(server, path, {**body, "max_tokens": 60}, "Idempotency-Key: mine"):
        request = begun(server, before)
    assert server.finished(request)["status"] == "completed"
    answer = server.post(path, {**body, "max_tokens": 60}, Idempotency_Key="mine")
    assert (answer["id"], answer["usage"]["completion_tokens"]) == (request, 60)


def test_disconnects_of_many_clients_free_all_worker_slots(server: Server) -> None:
    """Given twenty chats whose clients all leave, some before they are accepted, then a chat is answered."""
    path, body = CHAT
    clients = [connect(server, path, {**body, "stream": bool(number % 2)}) for number in range(20)]
    for client in clients:
        client.close()
    answer = server.post(path, {**body, "max_tokens": 3})
    assert answer["usage"]["completion_tokens"] == 3
    until(lambda: not unfinished(server), "all to be over")
    until(lambda: leased(server) == 0, "all slots to be free")


def unfinished(server: Server) -> list[str]:
    data = server.get("/v1/requests?limit=100")["data"]
    return [one["id"] for one in data if one["status"] in ("queued", "in_progress")]


def test_pipelined_requests_on_one_connection_are_answered_in_order(server: Server) -> None:
    """Given two calls sent at once on one connection, then both are answered, in their order."""
    path, body = CHAT
    before = newest(server)
    with connect(server, path, {**body, "max_tokens": 5}) as client:
        data = json.dumps({**body, "max_tokens": 7})
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close"]
        client.sendall("\r\n".join([*lines, f"Content-Length: {len(data)}", "", data]).encode())
        text = b""
        while more := client.recv(65536):
            text += more
    assert before != newest(server)
    assert text.count(b"HTTP/1.1 200") == 2
    assert text.index(b'"completion_tokens":5') < text.index(b'"completion_tokens":7')


@pytest.mark.row("C61")
def test_dropping_the_client_chat_iterator_cancels_the_request(server: Server) -> None:
    before = newest(server)
    with connect_client(server.url) as client:
        answer = client.chat("what is the capital of France", model="zeta", **ENDLESS)
        next(answer)
        request = newest(server)
        assert request != before
        del answer
        assert server.finished(request)["status"] == "cancelled"


def test_closing_a_client_chat_cancels_the_request(server: Server) -> None:
    before = newest(server)
    with connect_client(server.url) as client:
        with client.chat("what is the capital of France", model="zeta", **ENDLESS) as answer:
            next(answer)
            request = newest(server)
            assert request != before
        assert server.finished(request)["status"] == "cancelled"
        assert list(answer) == []


async def test_closing_an_async_client_chat_cancels_the_request(server: Server) -> None:
    async with aconnect(server.url) as client:
        async with client.chat("what is the capital of France", model="zeta", **ENDLESS) as answer:
            await anext(answer)
            request = newest(server)
        assert server.finished(request)["status"] == "cancelled"


async def test_cancelling_an_async_client_chat_cancels_the_request(server: Server) -> None:
    async with aconnect(server.url) as client:
        answer = client.chat("what is the capital of France", model="zeta", **ENDLESS)
        reading = asyncio.ensure_future(anext(answer))
        await reading
        request = newest(server)

        async def read_all() -> None:
            async for _ in answer:
                pass

        rest = asyncio.ensure_future(read_all())
        await asyncio.sleep(0)
        rest.cancel()
        await asyncio.wait([rest])
        assert rest.cancelled()
    assert server.finished(request)["status"] == "cancelled"


@pytest.mark.row("C2")
@pytest.mark.parametrize("call", ["chat", "picture"])
def test_repeated_call_without_idempotency_key_creates_a_new_request(server: Server, call: str) -> None:
    """Given equal calls without a seed, also with the header of a client's retry, then each draws a seed of its own."""
    path, body = CALLS[call]
    small = {"max_tokens": 3} if call == "chat" else {"num_inference_steps": 1, "n": 1}
    ids = set()
    for count in ("0", "1", "1", "2"):
        headers = {"content-type": "application/json", "x-stainless-retry-count": count}
        asked = urllib.request.Request(server.url + path, json.dumps({**body, **small}).encode(), headers)
        with urllib.request.urlopen(asked, timeout=600) as answer:
            ids.add(json.loads(answer.read())["id"])
    assert len(ids) == 4
