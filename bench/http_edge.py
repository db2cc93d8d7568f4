"""How soon `/health` answers while others ask for much: milliseconds, and as a ratio to the same server when idle.

A server without workers; who asks for much are processes of their own. One opens a thousand event streams at once, as
often as there is time; others post bodies of 8 MB: pictures as text, lists in lists, one unknown name.
`python -m bench.http_edge [SECONDS]`
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.report import quantile, show, spread
from tools.server import serving, until

SECONDS = 20.0
STREAMS = 1000
LARGE = 8 * 1024 * 1024 - 1000
TOGETHER = 4
"""Large bodies that are sent at a time."""

PAUSE_S = 0.002
LOADS = ("streams", "pictures", "lists", "name")


def head(method: str, path: str, port: int, *more: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", *more, "", ""]).encode()


def answer(port: int, call: bytes) -> bytes:
    """What comes back on a connection of its own."""
    with socket.create_connection(("127.0.0.1", port), 600) as connection:
        connection.sendall(call)
        data = b""
        while more := connection.recv(65536):
            data += more
    return data


def health(port: int, seconds: float) -> list[float]:
    """Milliseconds of each answer."""
    taken, call, until = [], head("GET", "/health", port, "Connection: close"), time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        assert b" 200 " in answer(port, call)
        taken.append((time.perf_counter() - began) * 1e3)
        time.sleep(PAUSE_S)
    return taken


def waiting(port: int) -> str:
    """The id of a request that waits, since nobody works."""
    body = b'{"prompt": "a red circle"}'
    more = ("Content-Type: application/json", "Prefer: respond-async", "Connection: close")
    call = head("POST", "/v1/images/generations", port, *more, f"Content-Length: {len(body)}") + body
    return str(json.loads(answer(port, call).partition(b"\r\n\r\n")[2])["id"])


async def streams(port: int, request: str) -> None:
    """Open a thousand event streams at once; leave when all have begun."""

    async def one() -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head("GET", f"/v1/requests/{request}/events", port))
        await reader.readuntil(b"queued")
        return writer

    for writer in await asyncio.gather(*(one() for _ in range(STREAMS))):
        writer.close()


def body(kind: str) -> bytes:
    """A body as large as may be."""
    if kind == "pictures":
        return b'{"prompt":"a","image":"data:image/png;base64,' + b"iVBORw0K" * (LARGE // 8) + b'"}'
    if kind == "lists":
        return b'{"prompt":"a","image":[' + b"[]," * (LARGE // 3) + b"[]]}"
    return b'{"prompt":"a","' + b"promp" * (LARGE // 5) + b'":1}'


async def bodies(port: int, kind: str) -> None:
    """Post large bodies, a few at a time."""
    data = body(kind)
    call = head(
        "POST",
        "/v1/images/edits",
        port,
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        "Connection: close",
    )
    await asyncio.gather(*(asyncio.to_thread(answer, port, call + data) for _ in range(TOGETHER)))


def load(kind: str, port: int, request: str) -> None:
    """Ask for much until standard input ends; a line for each time round."""
    while True:
        asyncio.run(streams(port, request) if kind == "streams" else bodies(port, kind))
        print(flush=True)


@contextmanager
def beside(kind: str, port: int, request: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that asks for much, which has begun to."""
    command = [sys.executable, "-m", "bench.http_edge", kind, str(port), request]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout and process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def measure(seconds: float, kinds: tuple[str, ...] = LOADS) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "--workers", "none") as server:
        until(lambda: server.get("/health"), "the server", server.process)
        port = int(server.url.rpartition(":")[2])
        request = waiting(port)
        idle = health(port, seconds)
        found: dict[str, Any] = {"idle": {"ms": spread(idle)}}
        for kind in kinds:
            with beside(kind, port, request):
                taken = health(port, seconds)
            times = {f"p{int(share * 100)}": quantile(taken, share) / quantile(idle, share) for share in (0.5, 0.99)}
            found[kind] = {"ms": spread(taken) | {"max": max(taken)}, "times_idle": times}
        return found


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in LOADS:
        load(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    seconds = float(sys.argv[1]) if sys.argv[1:] else SECONDS
    show("http_edge", seconds=seconds, health=measure(seconds))


if __name__ == "__main__":
    main()
