"""What probes of a worker are answered, and what else comes to that port."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest

from tools.addresses import free_port
from unfuse.core.errors import ConfigError
from unfuse.worker import health
from unfuse.worker.health import HEAD_BYTES, MAX_REQUESTS, health_server


async def asked(port: int, said: bytes) -> bytes:
    """All that is answered; b"" where the connection ends without a word."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(ConnectionError):
        writer.write(said)
        await writer.drain()
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def probe(path: str) -> bytes:
    """As a kubelet asks."""
    lines = f"GET {path} HTTP/1.1", "Host: 10.1.0.7:8002", "User-Agent: kube-probe/1.32", "Connection: close", "", ""
    return "\r\n".join(lines).encode()


async def test_health_returns_200_at_once_and_ready_503_until_models_load() -> None:
    lacks = "models load"
    async with health_server(f"127.0.0.1:{(port := free_port())}", lambda: lacks):
        assert (await asked(port, probe("/health"))).startswith(b"HTTP/1.1 200 OK\r\n")
        answer = await asked(port, probe("/ready"))
        assert answer.startswith(b"HTTP/1.1 503 ") and answer.endswith(b"\r\n\r\nmodels load")
        assert b"content-length: 11\r\n" in answer
        lacks = ""
        assert (await asked(port, probe("/ready"))).startswith(b"HTTP/1.1 200 OK\r\n")
    with pytest.raises(OSError, match="Connect call failed"):
        await asked(port, probe("/health"))


async def test_head_is_answered_without_a_body() -> None:
    async with health_server(f"127.0.0.1:{(port := free_port())}", lambda: "models load"):
        for path, status in (("/health", b"200 OK"), ("/ready", b"503 Service Unavailable"), ("/", b"404 Not Found")):
            whole = await asked(port, probe(path))
            head = await asked(port, probe(path).replace(b"GET", b"HEAD", 1))
            assert head == whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
            assert head.startswith(b"HTTP/1.1 " + status)


async def test_content_length_counts_bytes() -> None:
    """Given a reason that is not ASCII, such as the name of a model file, then the length is that of its UTF-8."""
    reason = "files of the model have changed: modèle.safetensors"
    async with health_server(f"127.0.0.1:{(port := free_port())}", lambda: reason):
        head, _, body = (await asked(port, probe("/ready"))).partition(b"\r\n\r\n")
    assert body.decode() == reason
    assert f"content-length: {len(body)}".encode() in head.split(b"\r\n")


@pytest.mark.parametrize(
    "said", [probe("/"), probe("/healthy"), b"POST /health HTTP/1.1\r\n\r\n", b"\r\n\r\n", b"\0\xff GET\r\n\r\n"]
)
async def test_other_requests_return_404(said: bytes) -> None:
    async with health_server(f"127.0.0.1:{(port := free_port())}", lambda: ""):
        assert (await asked(port, said)).startswith(b"HTTP/1.1 404 Not Found\r\n")


async def test_oversized_or_incomplete_requests_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HEAD_S", 0.05)
    async with health_server(f"127.0.0.1:{(port := free_port())}", lambda: ""):
        assert await asked(port, b"GET /health HTTP/1.1\r\n" + b"x" * 4 * HEAD_BYTES) == b""
        assert await asked(port, b"GET /health") == b""
        assert (await asked(port, probe("/health"))).startswith(b"HTTP/1.1 200")


async def test_connections_over_the_limit_are_closed_and_silent_ones_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HEAD_S", 0.5)
    async with health_server(f"127.0.0.1:{(port := free_port())}", lambda: ""):
        silent = [asyncio.create_task(asked(port, b"GET ")) for _ in range(MAX_REQUESTS)]
        await asyncio.sleep(0.1)
        assert await asked(port, probe("/health")) == b""
        assert await asyncio.gather(*silent) == [b""] * MAX_REQUESTS
        assert (await asked(port, probe("/health"))).startswith(b"HTTP/1.1 200")


async def test_health_server_without_an_address_does_not_listen() -> None:
    async with health_server("", lambda: ""):
        pass


@pytest.mark.parametrize("at", ["8002", ":8002", "localhost:", "localhost:http", "127.0.0.1:99999"])
async def test_invalid_health_address_raises_config_error(at: str) -> None:
    with pytest.raises(ConfigError, match="--health"):
        async with health_server(at, lambda: ""):
            pass


async def test_health_port_in_use_raises_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen on --health {at} .*: choose another address"):
            async with health_server(at, lambda: ""):
                pass
