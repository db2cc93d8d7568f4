"""Links to results: who can open them, for how long, and where they begin."""

from __future__ import annotations

import re
import urllib.request
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.answers.conftest import Serve
from tests.worker import outside
from tools.server import START_S, Server

KEY = "k" * 40
PICTURE = {"prompt": "drawn", "n": 2, "response_format": "url"}
"""Two pictures of a model that writes its prompt backwards."""
PUBLIC = "https://pictures.example/studio"


@pytest.fixture(scope="module")
def server(served: Serve, tmp_path_factory: pytest.TempPathFactory) -> Server:
    model = outside.model(tmp_path_factory.mktemp("outside") / "outside")
    return served(str(model), "--api-key", KEY, "--public-url", f"{PUBLIC}/", PYTHONPATH=str(outside.HERE))


def status(server: Server, link: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    """Ask as a proxy does that takes the prefix away."""
    path = link.removeprefix(PUBLIC)
    request = urllib.request.Request(server.url + path, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.row("P25", "K9")
def test_signed_result_urls_work_without_an_api_key(server: Server) -> None:
    answer: dict[str, Any] = server.post("/v1/images/generations", PICTURE, Authorization=f"Bearer {KEY}")
    first, second = (one["url"] for one in answer["data"])
    assert first.startswith(f"{PUBLIC}/v1/requests/{answer['id']}/result/0?expires=")

    assert status(server, first) == (200, b"nward")
    assert status(server, first, "HEAD") == (200, b"")
    assert status(server, first, "DELETE")[0] == 405
    assert status(server, first.replace("/result/0", "/result/1"))[0] == 403
    assert status(server, re.sub(r"expires=\d", "expires=9", second))[0] == 403
    assert status(server, re.sub(r"signature=....", "signature=0000", second))[0] == 403
    assert status(server, first.partition("?")[0])[0] == 401
    assert status(server, f"/v1/requests/{answer['id']}?{first.partition('?')[2]}")[0] == 401


@pytest.mark.nightly
@pytest.mark.row("P25", "K9")
def test_signed_result_urls_survive_a_server_restart(server: Server) -> None:
    answer = server.post("/v1/images/generations", PICTURE, Authorization=f"Bearer {KEY}")
    link = answer["data"][0]["url"]
    before = status(server, link)
    server.killed_and_started_again().ready()
    assert status(server, link) == before
