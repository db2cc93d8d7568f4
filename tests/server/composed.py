"""What `serve` composes, in this process and without workers; and a client that says just what it is told to."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from unfuse.service.logs import Logs
from unfuse.service.options import plan_service, serve_options
from unfuse.service.service import Service
from unfuse.service.settings import load

TIMEOUT_S = 60.0


@contextmanager
def composed(folder: Path, **serve: object) -> Iterator[int]:
    """The port of `unfuse serve --workers none` with these of its settings, and defaults for the others."""
    own = {"workers": "none", "port": 0, **serve}
    places = {"data_dir": str(folder), "run_dir": os.environ["UNFUSE_RUN_DIR"]}
    settings = {f"serve.{name}": value for name, value in own.items()} | places
    chosen = serve_options(load(settings, environment={}))
    started: Future[tuple[asyncio.AbstractEventLoop, Service, str]] = Future()

    async def run() -> None:
        service = Service(chosen, plan_service(chosen), Logs())
        try:
            await service.run(lambda url: started.set_result((asyncio.get_running_loop(), service, url)))
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=lambda: uvloop.run(run()))
    thread.start()
    try:
        loop, service, url = started.result(TIMEOUT_S)
        try:
            yield urlsplit(url).port or 0
        finally:
            for _ in range(2):
                loop.call_soon_threadsafe(service.stop)
    finally:
        thread.join()


class Answer:
    """The head and the body of an answer, as they came."""

    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        found = re.fullmatch(r"HTTP/1\.1 (\d{3})(?: .*)?", lines[0])
        self.status = int(found[1]) if found else 0
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])


def connect(port: int, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((host, port), timeout=TIMEOUT_S)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    try:
        while more := connection.recv(65536):
            data += more
    except ConnectionResetError:
        pass
    return data


def say(port: int, text: str | bytes, host: str = "127.0.0.1") -> Answer:
    """The answer to these bytes, which have to make the server close."""
    with connect(port, host) as connection:
        connection.sendall(text.encode("latin-1") if isinstance(text, str) else text)
        return Answer(rest(connection))


def call(port: int, target: str, *headers: str, method: str = "GET", body: str = "", host: str | None = None) -> Answer:
    """The answer to one call, whose Host is that of the port unless `host` or a header says otherwise."""
    own = [] if any(header.lower().startswith("host:") for header in headers) else [f"Host: {host or 'localhost'}"]
    lines = [f"{method} {target} HTTP/1.1", *own, *headers, "Connection: close"]
    lines += [f"Content-Length: {len(body)}"] if body or method == "POST" else []
    return say(port, "\r\n".join([*lines, "", body]))
