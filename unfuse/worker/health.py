"""Answers those who look after a worker, such as a kubelet: whether it lives, and whether it takes tasks.

It is HTTP, with no more of it than a probe says: who reaches the port learns these two things and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

from unfuse.core.errors import ConfigError

HEAD_BYTES, HEAD_S, AT_ONCE = 4096, 5.0, 16  # bounds: bytes of a call's head, seconds to send it, calls at one time


@asynccontextmanager
async def answering(at: str, lacking: Callable[[], str]) -> AsyncIterator[None]:
    """Serve `/health` (200) and `/ready` at HOST:PORT within the block, for GET and HEAD.

    `/ready` is 200 unless `lacking` returns a reason, else 503 with that reason. With an empty address nothing is
    served. Raises ConfigError.
    """
    if not at:
        yield
        return
    host, _, port = at.rpartition(":")
    if not (host and port.isdecimal()):
        raise ConfigError(f"--health {at!r} is no address: write HOST:PORT, such as 0.0.0.0:8002")
    free = asyncio.Semaphore(AT_ONCE)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            if not free.locked():
                async with free, asyncio.timeout(HEAD_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_answer(head.split(b" ")[:2], lacking))
                    await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, host.strip("[]"), int(port), limit=HEAD_BYTES)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--health {at} cannot be listened on ({error}): name another address") from error
    try:
        yield
    finally:
        server.close()


def _answer(asked: list[bytes], lacking: Callable[[], str]) -> bytes:
    method, path = (*asked, b"")[:2]
    missing = lacking()
    answers = {b"/health": (200, "ok"), b"/ready": (503, missing) if missing else (200, "ready")}
    status, text = answers.get(path if method in (b"GET", b"HEAD") else b"", (404, "there is /health and /ready"))
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: text/plain\r\ncontent-length: {len(text)}\r\n"
    )
    body = "" if method == b"HEAD" else text
    return f"{head}connection: close\r\n\r\n{body}".encode()
