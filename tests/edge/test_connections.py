"""What connections may take; tried on what `serve` composes, with its default settings, byte by byte."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import httpx2
import pytest
import uvloop
from fastapi import FastAPI

from tests.server.composed import Answer, call, composed, connect, rest, say
from tests.server.served import IDLE, PICTURES, serve, until
from unfuse.edge.access import AccessPolicy
from unfuse.edge.connections import MAX_HEADERS, ConnectionLimits, HttpServer

ASKED = json.dumps({"prompt": "a red circle"})
POST = "POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
END = "Connection: close\r\n\r\n"
GET = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{END}"
ASYNC = {"prefer": "respond-async"}

HASTY = ConnectionLimits(64, 64, head_s=0.3, stall_s=0.3, rate=1024 * 1024)
"""Bounds that a test need not wait long for."""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with composed(tmp_path_factory.mktemp("served")) as port:
        yield port


@contextmanager
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Have what uvicorn logs in `caplog` too, from servers that were made already: each takes the handlers away."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)


def alive(port: int) -> bool:
    return call(port, "/health").status == 200


def hear(connection: socket.socket, word: bytes) -> None:
    """Read on until a word has come."""
    data = b""
    while word not in data:
        data += (more := connection.recv(65536))
        assert more, data


def asked(port: int) -> int:
    """How many requests the server holds."""
    return len(json.loads(call(port, "/v1/requests?limit=1000").body)["data"])


def refused(answer: Answer, status: int, code: str) -> None:
    assert (answer.status, answer.error["code"], answer.headers["connection"]) == (status, code, "close")


def test_ambiguous_body_framing_is_rejected_and_creates_no_request(port: int) -> None:
    """Given both framings, or two lengths, when a creating call comes, then it is refused and nothing is created."""
    before, chunked = asked(port), f"{len(ASKED):x}\r\n{ASKED}\r\n0\r\n\r\n"
    both = f"Content-Length: {len(ASKED)}\r\nTransfer-Encoding: chunked\r\n"
    refused(say(port, f"{POST}{both}{END}{chunked}"), 400, "bad_framing")
    swapped = f"Transfer-Encoding: chunked\r\nContent-Length: {len(ASKED)}\r\n"
    refused(say(port, f"{POST}{swapped}{END}{chunked}"), 400, "bad_framing")
    old = POST.replace("HTTP/1.1", "HTTP/1.0")
    refused(say(port, f"{old}Transfer-Encoding: chunked\r\n{END}{chunked}"), 400, "bad_framing")
    for lengths in (("5", str(len(ASKED))), (str(len(ASKED)), "5"), ("-1",), ("+5",), ("0x5",), ("5,6",), ("",)):
        head = "".join(f"Content-Length: {length}\r\n" for length in lengths)
        refused(say(port, f"{POST}{head}{END}{ASKED}"), 400, "bad_request")
    for coding in ("chunked, chunked", "xchunked", "gzip, chunked", "identity"):
        assert say(port, f"{POST}Transfer-Encoding: {coding}\r\n{END}{chunked}").status in (400, 501)
    assert asked(port) == before


def test_oversized_headers_return_431_and_targets_414(port: int) -> None:
    many = "".join(f"a{number}: b\r\n" for number in range(10_000))
    refused(say(port, f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{many}{END}"), 431, "headers_too_large")
    short = "a: b\r\n" * (MAX_HEADERS + 1)
    refused(say(port, f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{short}{END}"), 431, "headers_too_large")
    wide = f"a: {'b' * 40_000}\r\n"
    refused(say(port, f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{wide}{END}"), 431, "headers_too_large")
    refused(say(port, f"GET /{'x' * 9000} HTTP/1.1\r\nHost: localhost\r\n{END}"), 414, "target_too_long")
    fits = "".join(f"a{number}: b\r\n" for number in range(MAX_HEADERS - 2))
    assert say(port, f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{fits}{END}").status == 200


def test_endless_header_closes_the_connection(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\na: ")
        try:
            for _ in range(64):
                connection.sendall(b"x" * 65536)
        except (BrokenPipeError, ConnectionResetError):
            pass
        else:
            raise AssertionError("4 MiB of one head were taken")
    assert alive(port)


def test_many_tiny_chunks_return_400(port: int) -> None:
    body = " " * 4000 + ASKED
    fine = "".join(f"1\r\n{char}\r\n" for char in body) + "0\r\n\r\n"
    refused(say(port, f"{POST}Transfer-Encoding: chunked\r\n{END}{fine}"), 400, "chunks_too_small")
    few = "".join(f"1\r\n{char}\r\n" for char in ASKED) + "0\r\n\r\n"
    assert say(port, f"{POST}Prefer: respond-async\r\nTransfer-Encoding: chunked\r\n{END}{few}").status == 202
    wordy = f"1;{'x' * 40_000}\r\n"
    assert say(port, f"{POST}Transfer-Encoding: chunked\r\n{END}{wordy * 20}").status in (0, 400, 431)


@pytest.mark.parametrize(
    "data",
    [
        b"GET /v1/models\r\n\r\n",  # HTTP/0.9
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\na: \0\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\na: b\rc: d\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n Host: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,  # TLS
        b"\0" * 1024,
        b"\xff" * 1024 + b"\r\n\r\n",
    ],
)
def test_malformed_http_returns_400_without_a_traceback(
    port: int, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with logged(caplog):
        refused(say(port, data), 400, "bad_request")
        assert alive(port) and caplog.text == ""


@pytest.mark.parametrize(
    "data", [b"GET /v1/models HTTP/9.9\r\nHost: localhost\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
)
def test_unsupported_http_versions_return_505(port: int, data: bytes) -> None:
    refused(say(port, data), 505, "http_version")


def test_malformed_body_during_a_stream_closes_without_a_traceback(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Given an answer that has begun, when the client's body turns to rubbish, then the connection ends, no more."""
    with (
        serve(tmp_path) as served,
        logged(caplog),
        connect(port_of(served.url)) as connection,
    ):
        id = httpx2.post(
            f"{served.url}/v1/images/generations", json={"model": IDLE.name, "prompt": "a"}, headers=ASYNC
        ).json()["id"]
        head = f"GET /v1/requests/{id}/events HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        hear(connection, b"queued")
        connection.sendall(b"rubbish\r\n")
        rest(connection)
        assert httpx2.get(f"{served.url}/health").status_code == 200
    assert caplog.text == ""


def test_server_shutdown_ends_open_streams_without_a_traceback(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Given a stream that is open, when the server ends, then the connection ends, no more."""
    with ExitStack() as stack:
        with composed(tmp_path) as port:
            stack.enter_context(logged(caplog))
            post = call(
                port,
                "/v1/images/generations",
                "Content-Type: application/json",
                "Prefer: respond-async",
                method="POST",
                body=ASKED,
            )
            connection = stack.enter_context(connect(port))
            events = f"{urlsplit(post.headers['location']).path}/events"
            connection.sendall(f"GET {events} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            hear(connection, b"queued")
        rest(connection)
    assert caplog.text == ""


def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    """Given many calls at once on one connection, then each has its answer, in order."""
    many = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200
    with connect(port) as connection:
        connection.sendall((many + GET).encode())
        data = rest(connection)
    assert data.count(b"HTTP/1.1 200 OK") == 401
    assert data.count(b'{"version"') == 200


def test_http_request_inside_a_body_is_not_executed(port: int) -> None:
    """Given a body that looks like a call, then it is the first call's body, and not another one."""
    hidden = f"{POST}Prefer: respond-async\r\nContent-Length: {len(ASKED)}\r\n\r\n{ASKED}"
    before = asked(port)
    data = say(port, f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(hidden)}\r\n{END}{hidden}")
    assert data.status == 200 and asked(port) == before


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
def test_protocol_upgrade_headers_are_ignored(port: int, upgrade: str, caplog: pytest.LogCaptureFixture) -> None:
    head = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close, Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    with logged(caplog):
        answer = say(port, f"{head}Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nUpgrade: {upgrade}\r\n\r\n")
    assert answer.status == 200 and caplog.text == ""


def test_server_survives_half_closed_partial_requests(port: int) -> None:
    for text in (GET, POST, f"{POST}Content-Length: 100\r\n\r\nabc"):
        with connect(port) as connection:
            connection.sendall(text.encode())
            connection.shutdown(socket.SHUT_WR)
            rest(connection)
    assert alive(port)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.mark.parametrize("head", [b"", b"GET /v1/models HTTP/1.1\r\nHost: loc", b"GET /health HTTP/1.1\r\n"])
def test_connection_without_a_complete_header_times_out(tmp_path: Path, head: bytes) -> None:
    with serve(tmp_path, bounds=HASTY) as served, connect(port_of(served.url)) as connection:
        connection.sendall(head)
        answer = Answer(rest(connection))
    assert answer.status == (408 if head else 0)


def test_header_sent_byte_by_byte_times_out(tmp_path: Path) -> None:
    with serve(tmp_path, bounds=HASTY) as served, connect(port_of(served.url)) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n")
        connection.settimeout(0.02)
        data = b""
        for _ in range(3000):
            try:
                connection.sendall(b"a")
                data += (more := connection.recv(65536))
                if not more:
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            raise AssertionError("a head may take for ever")


@pytest.mark.parametrize("framing", [f"Content-Length: {10**6}", "Transfer-Encoding: chunked"])
def test_stalled_request_body_returns_408(tmp_path: Path, framing: str) -> None:
    with serve(tmp_path, bounds=HASTY) as served:
        with connect(port_of(served.url)) as connection:
            connection.sendall(f"{POST}{framing}\r\n\r\n".encode())
            refused(Answer(rest(connection)), 408, "timeout")
        assert httpx2.get(f"{served.url}/v1/requests").json()["data"] == []


def test_stalled_body_after_an_early_404_is_closed(tmp_path: Path) -> None:
    """Given an answer that was given before the body was there, when the rest never comes, then it is over."""
    with serve(tmp_path, bounds=HASTY) as served, connect(port_of(served.url)) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n")
        assert b"404" in rest(connection)


def test_client_that_does_not_read_its_response_is_disconnected(tmp_path: Path) -> None:
    """Given answers of megabytes that nobody reads, then what is held for them is given back."""
    with serve(tmp_path, bounds=HASTY) as served, ExitStack() as stack:
        made = httpx2.post(
            f"{served.url}/v1/images/generations",
            json={"model": PICTURES.name, "prompt": "a", "n": 1, "response_format": "url"},
            timeout=60,
        ).json()
        served.run(_grow(served.results.path(made["id"], 0)))
        connections = [stack.enter_context(connect(port_of(served.url))) for _ in range(3)]
        for connection in connections:
            connection.sendall(f"GET /v1/requests/{made['id']}/result/0 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        for connection in connections:
            assert connection.recv(16, socket.MSG_PEEK)
        until(lambda: not served.server.server_state.connections)


async def _grow(path: Path) -> None:
    path.write_bytes(b"\0" * 32 * 1024 * 1024)


def test_idle_event_stream_is_not_timed_out(tmp_path: Path) -> None:
    """Given bounds on silence, when a stream is silent because nothing happens, then it is not the client's fault."""
    with ExitStack() as stack:
        served = stack.enter_context(serve(tmp_path, bounds=HASTY))
        connection = stack.enter_context(connect(port_of(served.url)))
        with httpx2.Client(base_url=served.url, timeout=60) as http:
            body = {"model": IDLE.name, "prompt": "a"}
            id = http.post("/v1/images/generations", json=body, headers=ASYNC).json()["id"]
            connection.sendall(f"GET /v1/requests/{id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            hear(connection, b"queued")
            with connect(port_of(served.url)) as silent:  # which goes only once connections were looked at
                rest(silent)
            with connect(port_of(served.url)) as silent:
                rest(silent)
            http.post(f"/v1/requests/{id}/cancel")
            hear(connection, b"cancelled")


def test_connections_over_the_per_address_limit_return_429(tmp_path: Path) -> None:
    with serve(tmp_path, bounds=ConnectionLimits(64, per_address=3)) as served, ExitStack() as stack:
        port = port_of(served.url)
        held = [stack.enter_context(connect(port)) for _ in range(3)]
        refused(Answer(_all(port)), 429, "too_many_connections")
        with socket.create_connection(("127.0.0.1", port), 60, source_address=("127.0.0.2", 0)) as other:
            other.sendall(GET.encode())
            assert Answer(rest(other)).status == 200
        held[0].close()
        until(lambda: say(port, GET).status == 200)


def test_connections_over_the_total_limit_return_503(tmp_path: Path) -> None:
    bounds = ConnectionLimits(connections=4, per_address=2)
    with serve(tmp_path, bounds=bounds, access=AccessPolicy(proxies=("127.0.0.1",))) as served, ExitStack() as stack:
        port = port_of(served.url)
        held = [stack.enter_context(connect(port)) for _ in range(4)]  # more than one address may, but a proxy of ours
        refused(Answer(_all(port)), 503, "too_many_connections")
        held[0].close()
        until(lambda: say(port, GET).status == 200)


def _all(port: int) -> bytes:
    """What a connection is told that says nothing."""
    with connect(port) as connection:
        return rest(connection)


def test_1000_event_streams_from_one_address_are_accepted(port: int) -> None:
    body = call(
        port,
        "/v1/images/generations",
        "Content-Type: application/json",
        "Prefer: respond-async",
        method="POST",
        body=ASKED,
    ).body
    id = json.loads(body)["id"]
    with ExitStack() as stack:
        streams = [stack.enter_context(connect(port)) for _ in range(1000)]
        for stream in streams:
            stream.sendall(f"GET /v1/requests/{id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert alive(port)
        for stream in streams:
            hear(stream, b"queued")
        assert alive(port)


@pytest.mark.parametrize("loop", [asyncio, uvloop])
def test_accepted_connections_use_tcp_nodelay(loop: ModuleType) -> None:
    """Given either event loop, then no connection waits for an acknowledgement before it sends what comes next."""

    async def delays() -> list[int]:
        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(FastAPI(), ConnectionLimits(8192, 2048), AccessPolicy())
        serving = asyncio.create_task(server.serve([listener]))
        with connect(listener.getsockname()[1]):
            while not server.server_state.connections:
                await asyncio.sleep(0)
            ends = [each.transport.get_extra_info("socket") for each in server.server_state.connections]
            found = [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in ends]
        server.should_exit = True
        await serving
        return found

    assert loop.run(delays()) == [1]


@pytest.mark.parametrize("loop", [asyncio, uvloop])
def test_shutdown_during_startup_closes_the_listener(loop: ModuleType) -> None:
    async def left() -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(FastAPI(), ConnectionLimits(8192, 2048), AccessPolicy())
        server.should_exit = True
        await server.serve([listener])
        return listener.fileno()

    assert loop.run(left()) == -1


def test_pending_connections_are_accepted_in_batches(tmp_path: Path) -> None:
    """Given many that wait to be taken, when the event loop turns, then it takes some of them each time, not one."""

    async def turns() -> int:
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        server = HttpServer(FastAPI(), ConnectionLimits(8192, 2048), AccessPolicy())
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0)
        with ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(connect(listener.getsockname()[1]))
            taken = 0
            while len(server.server_state.connections) < 200:
                await asyncio.sleep(0)
                taken += 1
        server.should_exit = True
        await serving
        return taken

    assert uvloop.run(turns()) < 100
