"""HEAD wherever GET is, OPTIONS, and the Allow header of a 405."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.server.served import PICTURES, Served
from tools.snippets import PAGES

VIDEO = {"model": PICTURES.name, "prompt": "a red circle", "num_frames": 5}
PICTURE = {"model": PICTURES.name, "prompt": "a red circle", "seed": 3}
PER_CALL = ("x-request-id", "date")
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def made(served: Served) -> dict[str, str]:
    """A picture and a video that are completed, by the names that paths here use."""
    with httpx2.Client(base_url=served.url, timeout=600, trust_env=False) as http:
        video = http.post("/v1/videos", json=VIDEO).json()["id"]
        picture = http.post("/v1/images/generations", json=PICTURE).json()["id"]
    served.next_event(video, "completed")
    return {"id": picture, "video": video, "name": PICTURES.name}


def paths(http: httpx2.Client) -> dict[str, Any]:
    """The paths of /openapi.json, with their methods."""
    return dict(http.get("/openapi.json").json()["paths"])


@pytest.mark.row("P35", "P37", "C55")
def test_head_returns_the_headers_of_get_on_every_path(http: httpx2.Client, made: dict[str, str]) -> None:
    described = [path for path, methods in paths(http).items() if "get" in methods]
    assert len(described) > 12
    for path in [*described, "/docs", "/openapi.json", "/static-offline-docs/swagger-ui.css", "/nowhere"]:
        names = {"id": made["video"] if "videos" in path else made["id"], "name": made["name"]}
        target = path.replace(":path", "").format(**names, index=0, step=1)
        with http.stream("GET", target) as whole:
            head = http.head(target)
        assert head.content == b""
        assert head.status_code == whole.status_code, target
        expected = {name: value for name, value in whole.headers.items() if name not in PER_CALL}
        if path in ("/metrics", "/v1/workers"):  # their numbers change between two calls
            expected.pop("content-length")
        found = {name: value for name, value in head.headers.items() if name in expected}
        assert found == expected, target


@pytest.mark.parametrize("stream", ["/v1/requests/{id}/events", "/v1/videos/{video}/content?stream=1"])
def test_head_of_a_running_stream_returns_at_once(served: Served, http: httpx2.Client, stream: str) -> None:
    with served.held():
        video = http.post("/v1/videos", json=VIDEO).json()["id"]
        head = http.head(stream.format(id=video, video=video))
        assert (head.status_code, head.content) == (200, b"")
        assert http.get(f"/v1/videos/{video}").json()["status"] in ("queued", "in_progress")
        assert http.head(stream.format(id=video, video=video)).status_code == 200
    served.next_event(video, "completed")


def test_every_api_path_is_called_by_some_test(http: httpx2.Client) -> None:
    """Named with any value for its parameters, in another file than this one, which goes through all."""
    text = "".join(file.read_text() for file in TESTS.rglob("test_*.py") if file != Path(__file__))
    for path in paths(http):
        named = re.sub(r"\\{[^}]*\\}", r"[^\\s\"'?/]+", re.escape(path)) + r"[\"'?\s]"
        assert re.search(named, text), path


def test_every_call_in_the_docs_is_in_the_openapi_schema(http: httpx2.Client) -> None:
    """As in `GET /v1/requests/{id}`, or `/v1/pools`; a parameter may have any name."""
    described = {
        re.sub(r"{[^}]*}", "[^ ]+", path): {name.upper() for name in methods} for path, methods in paths(http).items()
    }
    call = re.compile(r"(?:\b(GET|POST|PUT|PATCH|DELETE) |`)(/v1/[\w/{}.:-]*[\w}])(?=[`?\s,;)|])")
    for page in PAGES:
        for method, path in call.findall(page.read_text()):
            allowed = [methods for pattern, methods in described.items() if re.fullmatch(pattern, path)]
            assert any(not method or method in methods for methods in allowed), f"{page.name}: {method} {path}"


def test_head_of_a_path_without_get_returns_405(http: httpx2.Client) -> None:
    assert http.head("/v1/images/generations").status_code == 405


def test_openapi_lists_no_head_or_options(http: httpx2.Client) -> None:
    assert not [path for path, methods in paths(http).items() if methods.keys() & {"head", "options"}]


@pytest.mark.row("N6")
@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/videos", "GET POST HEAD OPTIONS"),
        ("/v1/videos/video_1", "GET DELETE HEAD OPTIONS"),
        ("/v1/videos/video_1/content", "GET HEAD OPTIONS"),
        ("/v1/videos/generations", "GET POST DELETE HEAD OPTIONS"),
        ("/v1/models", "GET POST HEAD OPTIONS"),
        ("/v1/models/a/b", "GET DELETE HEAD OPTIONS"),
        ("/v1/chat/completions", "POST OPTIONS"),
        ("/v1/dead/req_1", "GET DELETE HEAD OPTIONS"),
        ("/v1/requests/req_1/cancel", "POST OPTIONS"),
        ("/health", "GET HEAD OPTIONS"),
        ("/docs", "GET HEAD OPTIONS"),
    ],
)
def test_options_and_405_name_all_methods_of_the_resource(http: httpx2.Client, path: str, methods: str) -> None:
    options = http.options(path)
    assert (options.status_code, options.content) == (204, b"")
    assert set(options.headers["allow"].split(", ")) == {*methods.split()}
    refused = http.request("PROPFIND", path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed")
    assert refused.headers["allow"] == options.headers["allow"]


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "GET"])
def test_unknown_path_returns_404(http: httpx2.Client, method: str) -> None:
    assert http.request(method, "/v1/nothing").status_code == 404


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/images/generations", "did you mean /v1/images/generations?"),
        ("/v1//images/generations", "did you mean /v1/images/generations?"),
        ("//v1/images/edits", "did you mean /v1/images/edits?"),
        ("/v1/completions", "nothing is served at /v1/completions: see /docs"),
        ("/", "nothing is served at /: see /docs"),
    ],
)
def test_404_message_suggests_a_similar_path(served: Served, path: str, says: str) -> None:
    with socket.create_connection(("127.0.0.1", urlsplit(served.url).port or 0), timeout=60) as connection:
        connection.sendall(f"POST {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65_536), b"")).decode()
    assert answer.startswith("HTTP/1.1 404 ")
    assert says in json.loads(answer.partition("\r\n\r\n")[2])["error"]["message"]


def test_405_message_lists_the_allowed_methods(http: httpx2.Client) -> None:
    for method, path, says in (
        ("DELETE", "/v1/videos", "DELETE is not allowed at /v1/videos: send GET, POST, HEAD"),
        ("GET", "/v1/images/edits", "GET is not allowed at /v1/images/edits: send POST"),
    ):
        answer = http.request(method, path)
        assert answer.status_code == 405
        assert answer.json()["error"]["message"] == says
