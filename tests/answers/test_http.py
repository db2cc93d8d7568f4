"""What HTTP says of methods, ranges, orders and shutdowns, by a server with its defaults."""

from __future__ import annotations

import json
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests.answers.chats import HELLO, NAMES, serve_arguments
from tests.answers.conftest import Serve
from tools.server import Server, serving, until

Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture(scope="module")
def server(served: Serve, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return served(*serve_arguments(tmp_path_factory))


def lowered(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def ask(server: Server, method: str, path: str, **headers: str) -> Answer:
    request = urllib.request.Request(server.url + path, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, lowered(answer.headers), answer.read()
    except HTTPError as error:
        with error:
            return error.code, lowered(error.headers), error.read()


@pytest.fixture(scope="module")
def video(server: Server) -> str:
    """The id of a video that is completed."""
    body = {"model": "alpha", "prompt": "a red circle moving right", "num_frames": 5, "num_inference_steps": 1}
    request = str(server.post("/v1/videos", body)["id"])
    assert server.finished(request)["status"] == "completed"
    return request


@pytest.mark.row("P35", "P37", "C55", "K14")
def test_head_returns_the_headers_of_get_on_every_path(server: Server, video: str) -> None:
    content = f"/v1/videos/{video}/content"
    listed = ["/health", "/ready", "/version", "/docs", "/openapi.json", "/v1/models", "/v1/models/alpha", "/v1/videos"]
    listed += [f"/v1/videos/{video}", content, f"{content}?variant=thumbnail", f"/v1/requests/{video}/result/0"]
    for path in [*listed, f"/v1/requests/{video}", f"/v1/requests/{video}/events"]:
        whole, head = ask(server, "GET", path), ask(server, "HEAD", path)
        assert (head[0], head[2]) == (200, b"") == (whole[0], b""), path
        for name in ("content-length", "content-type", "etag", "accept-ranges", "last-modified"):
            assert head[1].get(name) == whole[1].get(name), (path, name)
    assert ask(server, "HEAD", content)[1]["accept-ranges"] == "bytes"
    assert ask(server, "HEAD", "/v1/videos/video_none/content")[0] == 404


@pytest.mark.row("N6")
def test_options_and_405_list_the_allowed_methods(server: Server, video: str) -> None:
    expected = {"/v1/videos": {"GET", "POST"}, f"/v1/videos/{video}": {"GET", "DELETE"}}
    for path, methods in {**expected, f"/v1/dead/{video}": {"GET", "DELETE"}}.items():
        assert {*ask(server, "OPTIONS", path)[1]["allow"].split(", ")} == methods | {"HEAD", "OPTIONS"}
        status, headers, body = ask(server, "PATCH", path)
        assert (status, json.loads(body)["error"]["code"]) == (405, "method_not_allowed")
        assert {*headers["allow"].split(", ")} == methods | {"HEAD", "OPTIONS"}


@pytest.mark.row("P38", "K16")
def test_range_requests_follow_rfc_9110(server: Server, video: str) -> None:
    path = f"/v1/videos/{video}/content"
    whole = ask(server, "GET", path)[2]
    size = len(whole)
    for ignored in ("items=0-1", "bytes=oops", "bytes=5-2", "nonsense"):
        assert ask(server, "GET", path, Range=ignored)[::2] == (200, whole)
    assert ask(server, "GET", path, Range="bytes=2-5")[::2] == (206, whole[2:6])
    assert ask(server, "GET", path, Range="bytes=-3")[::2] == (206, whole[-3:])
    status, headers, body = ask(server, "GET", path, Range=f"bytes={size}-")
    assert (status, headers["content-range"]) == (416, f"bytes */{size}")
    assert json.loads(body)["error"]["code"] == "range_not_satisfiable"


@pytest.mark.row("N8")
def test_models_are_listed_in_configured_order(server: Server) -> None:
    assert [model["id"] for model in server.get("/v1/models")["data"]] == [*NAMES]


@pytest.mark.row("N5")
def test_draining_server_returns_503_with_retry_after(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Given a server that waits for a caller's request after SIGTERM, then new calls get 503 and Retry-After."""
    arguments = [*serve_arguments(tmp_path_factory), "--workers", "none", "--drain-timeout", "600"]
    with ThreadPoolExecutor(1) as callers, serving(tmp_path, *arguments) as server:
        until(lambda: server.get("/v1/models"), "the server to answer", server.process)
        asked = {"model": "alpha", "prompt": "a red circle"}
        caller = callers.submit(server.post, "/v1/images/generations", asked)
        until(lambda: server.get("/v1/requests")["data"], "the call to be accepted", server.process)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: ask(server, "GET", "/ready")[2].count(b"shutting down"), "the server to shut down")
        for path, body in (
            ("/v1/chat/completions", {"model": "zeta", "messages": HELLO}),
            ("/v1/images/generations", {"model": "alpha", "prompt": "a red circle"}),
            ("/v1/videos", {"model": "alpha", "prompt": "a red circle"}),
        ):
            with pytest.raises(HTTPError) as refused:
                server.post(path, body)
            assert (refused.value.code, int(refused.value.headers["retry-after"]) > 0) == (503, True)
            assert json.loads(refused.value.read())["error"]["code"] == "stopping"
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
        with pytest.raises(HTTPError) as told:
            caller.result()
        assert json.loads(told.value.read())["error"]["code"] == "stopping"
