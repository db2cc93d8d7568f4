"""The health endpoint of a worker: liveness and readiness, for probes such as a kubelet's.

It serves only the HTTP that a probe needs. A client that reaches the port learns these two facts and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

from unfuse.core.errors import ConfigError

#: Most bytes of a request's head.
HEAD_BYTES = 4096

#: Most seconds for sending a request's head.
HEAD_S = 5.0

#: Most requests at one time.
MAX_REQUESTS = 16


@asynccontextmanager
async def health_server(address: str, unready_reason: Callable[[], str]) -> AsyncIterator[None]:
    """Serve `/health` (200) and `/ready` at HOST:PORT within the block, for GET and HEAD.

    `/ready` is 200 if `unready_reason` returns "", else 503 with the returned reason. With an empty address nothing is
    served. Raises ConfigError for an address that cannot be used.
    """
    if not address:
        yield
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise ConfigError(f"--health {address!r} is not an address: use HOST:PORT, such as 0.0.0.0:8002")
    slots = asyncio.Semaphore(MAX_REQUESTS)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            if not slots.locked():  # a request above the limit is closed at once: probes do not wait
                async with slots, asyncio.timeout(HEAD_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_response(head.split(b" ")[:2], unready_reason))
                    await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, host.strip("[]"), int(port), limit=HEAD_BYTES)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on --health {address} ({error}): choose another address") from error
    try:
        yield
    finally:
        server.close()


def _response(request_line: list[bytes], unready_reason: Callable[[], str]) -> bytes:
    """Return the whole HTTP response to a request with this method and path."""
    method, path = (*request_line, b"")[:2]
    reason = unready_reason()
    answers = {b"/health": (200, "ok"), b"/ready": (503, reason) if reason else (200, "ready")}
    status, text = answers.get(
        path if method in (b"GET", b"HEAD") else b"", (404, "not found: the paths are /health and /ready")
    )
    body = text.encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    ).encode()
    return head if method == b"HEAD" else head + body
