"""Pictures that requests bring, with stages on two hosts and a queue in Redis: the bytes that one host makes.

And clients that send them slowly, leave in between, or do not take what was made.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.integration.test_nodes import keys, moved, other_host
from tests.models.conftest import draw_pictures
from tests.netns import SecondHost
from tests.server.composed import Answer, connect, rest
from tools.redis_server import RedisServer
from tools.server import Server, computes_of, serving, until
from tools.tiny import build
from unfuse.client import Client
from unfuse.core.errors import InvalidParameter

__all__ = ["keys", "other_host"]
pytestmark = pytest.mark.nightly

KINDS = ("flux", "klein", "wan-image-last", "wan-2.2-image")
REDRAWN = {"model": "flux", "prompt": "a ring", "image": "sky.png", "strength": 0.6, "num_inference_steps": 6}
FRAMES = {"prompt": "it turns", "num_frames": 5, "image": "sky.png", "video": True}
CASES: list[dict[str, Any]] = [
    REDRAWN,
    {**REDRAWN, "mask": "hole.png"},
    {**REDRAWN, "image": "wall.jpg", "strength": 1.0, "size": "48x24"},
    {"model": "klein", "prompt": "a ring", "image": ["sea.png", "wall.jpg"]},
    {"model": "klein", "prompt": "a ring", "image": ["wall.jpg", "sea.png", "large.png"]},
    {**FRAMES, "model": "wan-image-last", "last_frame": "wall.jpg"},
    {**FRAMES, "model": "wan-2.2-image", "last_frame": "wall.jpg"},
    {**FRAMES, "model": "wan-2.2-image"},
]
MOST, DRIP = 47 << 19, 2400
"""Bytes of a body that is never whole, and of what follows at a time. There is room for ten at one time."""
TIMES = 32
"""How often a result is asked for that is not taken: by more bytes than the system keeps for a connection."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    draw_pictures(root)
    noise = np.random.default_rng(1).integers(0, 256, (320, 320, 3), dtype=np.uint8)
    Image.fromarray(noise).save(root / "large.png")
    for kind in KINDS:
        build(kind, root / kind)
    return root


def served(folder: Path) -> list[str]:
    names = [argument for kind in KINDS for argument in (str(folder / kind), "--served-model-name", kind)]
    return [*names, "--arena", "64MiB"]


def made(server: Server, folder: Path, kill: int = 0) -> list[bytes]:
    """What the cases get, all asked for at once. The computes of that worker are killed once they are."""
    with Client(server.url) as u:
        requests = []
        for seed, case in enumerate(CASES):
            files = {name: case[name] for name in ("image", "mask", "last_frame") if name in case}
            given = {
                name: [folder / one for one in ([file] if isinstance(file, str) else file)]
                for name, file in files.items()
            }
            sent = {name: paths if name == "image" else paths[0] for name, paths in given.items()}
            requests.append(u.submit(**{"size": "32x32", **case, **sent, "seed": seed, "cache": False}))
        for compute in computes_of(kill) if kill else ():
            compute.kill()
    for request in requests:
        view = server.finished(request.id)
        assert view["status"] == "completed", view["error"]
    return [server.result(request.id) for request in requests]


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """What one host makes."""
    with serving(tmp_path_factory.mktemp("alone"), *served(folder), "--workers", "all=1") as server:
        found = made(server.ready(), folder)
    assert len({*found}) == len(CASES)
    return found


@pytest.fixture
def server(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    folder: Path,
    other_host: SecondHost,
    keys: list[str],
    redis_server: RedisServer,
) -> Iterator[Server]:
    """One of which those roles are on the other host; that worker is the last one."""
    here = [f"{role}=1" for role in ("encoder", "denoiser", "decoder") if role not in request.param]
    options = [*keys, "--queue", redis_server.url, "--workers", ",".join(here)]
    with serving(tmp_path, *served(folder), *options, at=other_host.near) as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        server.worker(request.param, *keys, "--engine", "tcp", within=other_host.enter)
        yield server.ready()


@pytest.mark.parametrize("server", ["denoiser", "encoder+decoder"], indirect=True)
def test_image_inputs_across_hosts_match_one_host_also_after_crashes(
    server: Server, folder: Path, alone: list[bytes]
) -> None:
    """By a strength, where a mask says, of several, and between two frames, with what denoises on another host or what
    encodes and decodes; also when that one's compute processes are killed amid the requests."""
    assert made(server, folder) == alone
    until(lambda: moved(server).get("tcp", 0) > 0, "what was pulled to be told")
    assert made(server, folder, kill=server.workers[-1].pid) == alone
    with (
        Client(server.url) as u,
        pytest.raises(InvalidParameter, match="mask is 40x36 .* send a mask of the same size"),
    ):
        u.submit(**{**REDRAWN, "image": folder / "sea.png", "mask": folder / "hole.png"})


def form(picture: bytes, **fields: object) -> bytes:
    """The body of an edit, but for its end."""
    head = 'content-disposition: form-data; name="{}"'.format
    parts = "".join(f"--x\r\n{head(name)}\r\n\r\n{value}\r\n" for name, value in fields.items())
    return f'{parts}--x\r\n{head("image")}; filename="a"\r\n\r\n'.encode() + picture


def begun(server: Server, body: bytes, length: int) -> socket.socket:
    """A connection on which an edit was begun, of a body of that length."""
    connection = connect(int(server.url.rpartition(":")[2]))
    kind = "content-type: multipart/form-data; boundary=x\r\nconnection: close"
    connection.sendall(
        f"POST /v1/images/edits HTTP/1.1\r\nhost: localhost\r\n{kind}\r\ncontent-length: {length}\r\n\r\n".encode()
    )
    with suppress(ConnectionError):  # what is refused is not read to its end
        connection.sendall(body)
    return connection


def answered(connection: socket.socket, more: Iterator[bytes]) -> Answer:
    """The answer, until which the next of these bytes are sent five times a second."""
    connection.settimeout(0.2)
    data = b""
    with connection:
        while not data:
            try:
                data = connection.recv(65536)
                break
            except TimeoutError:
                with suppress(ConnectionError):
                    connection.sendall(next(more, b""))
        connection.settimeout(600)
        return Answer(data + rest(connection))


def sent_by_drips(server: Server, body: bytes, drip: int) -> Answer:
    """The answer to a body that is sent by so many bytes at a time."""
    return answered(begun(server, b"", len(body)), (body[place : place + drip] for place in range(0, len(body), drip)))


def held_up(server: Server, body: bytes, stop: threading.Event) -> Answer:
    """The answer to a body of which little more comes, and from then on nothing."""
    return answered(begun(server, body, 2 * MOST), iter(lambda: b"" if stop.is_set() else bytes(DRIP), None))


def asked_for(server: Server, request: str, times: int = 1) -> socket.socket:
    """A connection on which the result of a request comes so many times, to whoever takes few bytes at a time."""
    connection = connect(int(server.url.rpartition(":")[2]))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = f"GET /v1/requests/{request}/result/0 HTTP/1.1\r\nhost: localhost\r\n"
    connection.sendall((f"{head}\r\n" * (times - 1) + f"{head}connection: close\r\n\r\n").encode())
    return connection


def taken_by_sips(server: Server, request: str, pause: threading.Event) -> bytes:
    """The result, of which little is taken five times a second."""
    data = b""
    with asked_for(server, request) as connection:
        while more := connection.recv(8192):
            data += more
            pause.wait(0.2)
    return Answer(data).body


def not_taken(server: Server, request: str) -> bytes:
    """What is there of results that nobody took, once the server has given it up; the system has room for some."""
    with asked_for(server, request, TIMES) as connection:
        assert connection.recv(1, socket.MSG_PEEK)
        until(lambda: '"to": "read"' in server.log(), "the server to let it go")
        return rest(connection)


@pytest.mark.parametrize("server", ["denoiser"], indirect=True)
def test_too_slow_clients_are_disconnected_without_delaying_others(
    server: Server, folder: Path, alone: list[bytes]
) -> None:
    """Given clients that send a large picture in less than the least rate, begin more large ones than there is room
    for, leave, or do not take a large one, then these are refused, those that are slow but not too slow are served,
    and so is everybody else."""
    own = {"model": "klein", "prompt": "a ring", "seed": 5, "size": "32x32"}
    picture, end = (folder / "large.png").read_bytes(), b"\r\n--x--\r\n"
    for _ in range(12):
        begun(server, form(secrets.token_bytes(MOST), **own), 2 * MOST).close()
    large = server.submit("a ring", model="klein", size="512x512", seed=1)
    result = server.finished(large) and server.result(large)
    assert len(result) > 1 << 19
    before = len(server.get("/v1/requests?limit=1000")["data"])
    with ThreadPoolExecutor(16) as clients:
        slow = clients.submit(sent_by_drips, server, form(picture, **own) + end, 8192)
        drips = clients.submit(sent_by_drips, server, form(picture, **own), 64)
        sips = clients.submit(taken_by_sips, server, large, threading.Event())
        stop = threading.Event()
        held = [clients.submit(held_up, server, form(bytes(MOST), **own), stop) for _ in range(11)]
        first = next(as_completed(held)).result()
        assert (first.status, first.error["code"]) == (503, "too_many_bodies")
        assert made(server, folder) == alone
        stop.set()
        assert Counter(one.result().error["code"] for one in held) == {"too_many_bodies": 1, "timeout": 10}
        assert (drips.result().status, drips.result().error["code"]) == (408, "timeout")
        assert slow.result().status == 200
        assert sips.result() == result
    assert len(not_taken(server, large)) < TIMES * len(result)
    assert made(server, folder) == alone
    assert len(server.get("/v1/requests?limit=1000")["data"]) == before + 1 + 2 * len(CASES)
