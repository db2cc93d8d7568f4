"""Bodies that take long to read, and many calls at once: nobody else is held up by them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.server.composed import composed
from tests.server.served import IDLE
from unfuse import queues
from unfuse.core.modalities import IMAGE, VIDEO
from unfuse.core.registry import MAX_NAME_CHARS, nearest_name
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.app import create_app
from unfuse.server.body import MAX_TEXT, MAX_VALUES
from unfuse.server.gateway import Gateway
from unfuse.stores.results import open_results

EDITS, VIDEOS = "/v1/images/edits", "/v1/videos"
JSON = {"content-type": "application/json"}
LARGE = MAX_TEXT - 1000


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    with (
        composed(tmp_path_factory.mktemp("served")) as port,
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client,
    ):
        yield client


def refused(response: httpx2.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text[:1000]
    return dict(response.json()["error"])


def test_punctuation_in_strings_is_not_counted_as_json_values(http: httpx2.Client) -> None:
    """Given a chat with a table, then it is read, and refused only for what it says."""
    table = 'a,"b",[c],\\\n' * MAX_VALUES
    response = http.post("/v1/chat/completions", json={"model": "no", "messages": [{"role": "user", "content": table}]})
    assert response.status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        '{"image":[' + "[]," * (LARGE // 3) + "[]]}",
        '{"image":' + "[" * (LARGE // 2) + "]" * (LARGE // 2) + "}",
        '{"a":{' + '"a":{' * (LARGE // 6) + "}" * (LARGE // 6) + "}}",
        "{" + ",".join(f'"{number:x}":1' for number in range(LARGE // 10)) + "}",
        '{"image":[' + "1," * (LARGE // 2) + "1]}",
        '{"image":[' + "1," * MAX_VALUES + '"' + '\\"' * (LARGE // 4),
    ],
    ids=["lists", "deep", "deep objects", "keys", "numbers", "a text without an end"],
)
def test_body_with_too_many_json_values_returns_400(http: httpx2.Client, body: str) -> None:
    error = refused(http.post(EDITS, content=body, headers=JSON))
    assert error["message"] == f"the body has more than {MAX_VALUES} values"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": ' + b"1" * LARGE + b"}",
        b'{"prompt": "\xff"}',
        b"{}{}",
        b"[" * 20_000 + b"]" * 20_000,
        b"",
        b"\0",
    ],
    ids=range(6),
)
def test_invalid_json_body_returns_400(http: httpx2.Client, body: bytes) -> None:
    assert refused(http.post(VIDEOS, content=body, headers=JSON))["message"].startswith("the body is not JSON: ")


def test_huge_parameter_name_is_truncated_in_the_error(http: httpx2.Client) -> None:
    """Given an unknown parameter with a name as long as the body may be, then nothing is sought for that is like it."""
    error = refused(http.post(VIDEOS, json={"prompt": "a", "p" * LARGE: 1}))
    assert "unknown parameter" in error["message"] and "did you mean" not in error["message"]
    assert len(error["message"]) < 2000 and len(error["param"]) < 100


@pytest.mark.parametrize("value", ["m" * LARGE, ["m" * LARGE], {"m" * LARGE: 1}, [[1] * 1000]])
@pytest.mark.parametrize("name", ["model", "prompt", "size", "seed", "metadata", "priority", "output_format", "lora"])
def test_huge_parameter_values_are_not_echoed_in_the_error(http: httpx2.Client, name: str, value: object) -> None:
    response = http.post(EDITS, json={"prompt": "a", "image": "x", name: value})
    assert response.status_code in (400, 404) and len(response.content) < 2000


def test_nearest_name_skips_overlong_names() -> None:
    assert nearest_name("promt", ["prompt", "seed"]) == "prompt"
    assert nearest_name("p" * (MAX_NAME_CHARS + 1), ["p" * MAX_NAME_CHARS]) is None
    assert max(len(one.name) for one in (*IMAGE.parameters, *VIDEO.parameters)) <= MAX_NAME_CHARS


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[tuple[Any, str]]:
    """The application of a gateway, and a request that waits."""
    queue = queues.open("memory")
    scheduler = Scheduler(queue, specs=(IDLE,))
    app = create_app(Gateway(scheduler, open_results(f"disk:{folder}")))
    await scheduler.start()
    body = json.dumps({"prompt": "a"}).encode()
    asked = await Call(app, "/v1/images/generations", "POST", body, prefer="respond-async").begun()
    try:
        yield app, json.loads(asked)["id"]
    finally:
        await queue.close()
        await scheduler.close()


class Call:
    """One call of an application, as a server makes it; its client stays until the end."""

    def __init__(
        self, app: Any, path: str, method: str = "GET", body: bytes = b"", more: bool = False, **headers: str
    ) -> None:
        given = {"host": "localhost", "content-type": "application/json", **headers}
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "state": {},
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 9),
        }
        self._first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._received = [{"type": "http.request", "body": body, "more_body": more}]
        self.task = asyncio.create_task(app(self._scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        return self._received.pop() if self._received else await asyncio.Future()

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and not self._first.done():
            self._first.set_result(message["body"])

    @property
    def has_begun(self) -> bool:
        """Whether it took the server's time."""
        return "router" in self._scope

    async def begun(self) -> bytes:
        """The first that is answered."""
        return await self._first


async def test_health_check_is_served_while_many_streams_open(tmp_path: Path) -> None:
    """Given a thousand streams that open, when the server's health is asked for, then few of them come first."""
    async with gateway(tmp_path) as (app, id):
        streams = [Call(app, f"/v1/requests/{id}/events") for _ in range(1000)]
        for _ in range(3):
            before = sum(stream.has_begun for stream in streams)
            assert json.loads(await Call(app, "/health").begun()) == {"status": "ok"}
            assert sum(stream.has_begun for stream in streams) - before < 50
        for stream in streams:
            assert b"queued" in await stream.begun()
        for stream in streams:
            stream.task.cancel()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)


async def test_calls_are_started_in_order_of_arrival(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (app, _):
        calls = [Call(app, "/v1/models") for _ in range(20)]
        calls[3].task.cancel()
        await calls[10].begun()
        assert calls[3].task.cancelled()
        assert [call.has_begun for call in calls[:3] + calls[4:10]] == [True] * 9
        await asyncio.gather(*(call.begun() for call in calls[10:]))


FORM = {"content-type": "multipart/form-data; boundary=x"}
PART = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n'


@pytest.mark.parametrize(("headers", "begins"), [({}, b'{"prompt":'), (FORM, PART)], ids=["json", "form"])
async def test_concurrent_body_reads_have_a_total_size_limit(
    tmp_path: Path, headers: dict[str, str], begins: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a client in the middle of a large body, when another one's does not fit beside it, then that client is to
    try again; small ones are served, and once the first has left there is room."""
    async with gateway(tmp_path) as (app, _):
        monkeypatch.setattr("unfuse.server.body.MAX_READING", 1000)
        first = Call(app, EDITS, "POST", begins + b" " * 800, more=True, **headers)
        while not app.state.body_bytes:
            await asyncio.sleep(0)
        second = await Call(app, EDITS, "POST", begins + b" " * 300, **headers).begun()
        small = await Call(app, EDITS, "POST", b"{}").begun()
        assert [json.loads(told)["error"]["code"] for told in (second, small)] == [
            "too_many_bodies",
            "invalid_parameter",
        ]
        assert app.state.body_bytes == len(begins) + 800
        first.task.cancel()
        await asyncio.gather(first.task, return_exceptions=True)
        third = await Call(app, EDITS, "POST", begins + b" " * 300, **headers).begun()
        assert json.loads(third)["error"]["code"] == "invalid_parameter"
        assert app.state.body_bytes == 0
