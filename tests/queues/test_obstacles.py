"""What can never be the queue ends the start in one sentence; what passes is waited for."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tests.queues.conftest import Server
from tools.addresses import free_port
from unfuse import queues
from unfuse.core.errors import ConfigError, TransientError
from unfuse.queues.base import SCHEMA_VERSION
from unfuse.queues.script import error

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def refusal(url: str) -> str:
    """The sentence that this address is refused with; empty if it is not."""
    queue = queues.open(url)
    try:
        await queue.check_address()
    except ConfigError as error:
        assert "\n" not in str(error)
        return str(error)
    finally:
        await queue.close()
    return ""


@asynccontextmanager
async def listening(handle: Handle, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_usable_server_passes_the_address_check(server: Server) -> None:
    assert await refusal(server.url) == ""


async def test_wrong_credentials_or_database_raise_error_without_password(server: Server) -> None:
    address = f"127.0.0.1:{server.port}"
    server.client.acl_setuser("reader", enabled=True, passwords=["+right"], commands=["+get", "+select", "+client"])
    try:
        for credentials in ("nobody:right@", "reader:wrong@"):
            said = await refusal(f"redis://{credentials}{address}/0")
            assert f"the queue at {address}/0 cannot be used: authentication failed" in said
            assert "wrong@" not in said and "right@" not in said
        assert "the Redis user lacks permissions" in await refusal(f"redis://reader:right@{address}/0")
        assert "the database does not exist" in await refusal(f"redis://{address}/99999")
    finally:
        server.client.acl_deluser("reader")


@pytest.mark.parametrize(
    ("key", "field", "schema"),
    [("meta", "arrivals", "unknown"), ("declared", "serve", "unknown"), ("secrets", "webhooks", "unknown")]
    + [("meta", "schema", str(SCHEMA_VERSION - 1))],
)
async def test_data_of_another_schema_version_is_rejected_and_unchanged(
    server: Server, key: str, field: str, schema: str
) -> None:
    """Given keys without a schema number, or with another, then the start is refused and no key changes."""
    server.client.hset(f"{{unfuse}}:{key}", field, SCHEMA_VERSION - 1)

    said = await refusal(server.url)

    assert f"written by another version of unfuse (schema {schema}, this version needs {SCHEMA_VERSION})" in said
    assert "use another prefix, as in ?prefix=NAME, or delete the keys that begin with {unfuse}:" in said
    assert server.client.keys() == [f"{{unfuse}}:{key}".encode()]
    assert server.client.hgetall(f"{{unfuse}}:{key}") == {field.encode(): str(SCHEMA_VERSION - 1).encode()}
    assert await refusal(f"{server.url}?prefix=other") == ""


async def test_tls_to_a_server_without_tls_raises_config_error(server: Server) -> None:
    said = await refusal(f"rediss://127.0.0.1:{server.port}/0")
    assert "Redis does not use TLS there: use redis://" in said


async def test_non_redis_server_raises_config_error() -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.transport.abort()

    async with listening(http) as port:
        said = await refusal(f"redis://127.0.0.1:{port}/0")
        assert "the server is not Redis" in said or "closes each connection" in said
    async with listening(hangs_up) as port:
        assert "closes each connection: it is not Redis, or it requires TLS (rediss" in await refusal(
            f"redis://127.0.0.1:{port}/0"
        )


async def test_unreachable_server_raises_transient_and_not_config_error() -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    assert await refusal(url) == ""
    queue = queues.open(url)
    with pytest.raises(TransientError, match="does not respond"):
        await queue.check()
    await queue.close()


@pytest.mark.slow
def test_serve_exits_with_the_error_of_the_queue_address(server: Server) -> None:
    flags = ["--workers", "none", "--port", "0", "--queue", f"redis://me:wrong@127.0.0.1:{server.port}/0"]
    command = [sys.executable, "-m", "unfuse", "serve", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode not in (0, None)
    assert "authentication failed" in ended.stderr
    assert "Traceback" not in ended.stderr and "wrong@" not in ended.stderr


def test_timeout_error_has_a_message() -> None:
    """As one that is stopped: what the client raises then has no words, and /ready named it by a colon."""
    assert str(error(TimeoutError(), "here")).endswith("does not respond: timeout")
