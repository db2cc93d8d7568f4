"""Keys of a real `serve`: made, used, stored as hashes and removed while it runs."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tools.server import Server, serving, until
from unfuse.cli.main import run
from unfuse.client import Client, connect

PLAIN = "plain-key-of-bob"


def status(server: Server, path: str, key: str = "") -> int:
    return asked(server, path, key)[0]


def asked(server: Server, path: str, key: str = "") -> tuple[int, str]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture
def keys(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `unfuse keys`; returns what it prints on standard output."""

    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            run(["keys", *arguments])
        out, err = capsys.readouterr()
        assert not ended.value.code, err
        return out.strip()

    return call


def followed(client: Client, request: str) -> tuple[threading.Thread, list[str]]:
    """A thread that reads the events of a request to their end, and what ended them."""
    end: list[str] = []

    def read() -> None:
        try:
            end.extend(event.type for event in client.request(request).events())
        except Exception as error:
            end.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    return thread, end


def test_api_keys_are_added_hashed_and_removed_on_a_running_server(tmp_path: Path, keys: Callable[..., str]) -> None:
    """Given a plain key, a server warns once; the key's streams continue when it is hashed, and end when it goes."""
    file = tmp_path / "keys.txt"
    root = keys("add", "root", "--admin", "--file", str(file))
    file.write_text(f"{file.read_text()}# by hand\nbob {PLAIN} rate=100/s\n")
    with serving(tmp_path, "--workers", "none", "--api-keys", str(file)) as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        until(lambda: "at http://" in server.log(), "the address to be printed", server.process)
        assert server.log().count("unfuse keys hash") == 1 and PLAIN not in server.log()
        assert "no API key has admin rights" not in server.log() and "the only API key" not in server.log()
        assert [status(server, "/v1/workers", key) for key in ("", "wrong", PLAIN, root)] == [401, 401, 403, 200]
        assert "--api-key or UNFUSE_API_KEY" in asked(server, "/v1/models")[1]
        assert "is not valid for this server" in asked(server, "/v1/models", "wrong")[1]

        with connect(server.url, PLAIN) as bob:
            request = bob.submit("a red circle on white").id
            thread, end = followed(bob, request)
            keys("hash", str(file))
            assert PLAIN not in file.read_text() and "# by hand\nbob sha256:" in file.read_text()
            see = keys("add", "prometheus", "--read", "--file", str(file))
            until(lambda: status(server, "/v1/models", see) == 200, "the new key to be known", server.process)
            assert thread.is_alive() and {*end} <= {"queued"}, "the key is the same"
            assert "tenant" not in asked(server, "/metrics")[1] and "shapes" not in asked(server, "/ready")[1]
            assert status(server, "/metrics", see) == status(server, "/health") == 200
            assert "shapes" in asked(server, "/ready", see)[1]

            keys("rm", "bob", "--file", str(file))
            thread.join(60)
            assert "the API key is no" in end[-1]
        (one,) = json.loads(asked(server, "/v1/requests", root)[1])["data"]
        assert (one["id"], one["tenant"], one["status"]) == (request, "bob", "queued"), "its request goes on"
        file.unlink()
        until(lambda: "API keys are unchanged" in server.log(), "the missing file to be logged", server.process)
        assert [status(server, "/v1/models", key) for key in (root, see, PLAIN)] == [200, 200, 401]


def test_serve_exits_2_if_the_api_key_variable_has_a_file_path(tmp_path: Path) -> None:
    path = "/etc/unfuse/keys.txt"
    with serving(tmp_path, "--workers", "none", "--host", "0.0.0.0", UNFUSE_API_KEY=path) as server:
        assert server.process.wait(60) == 2
        assert "looks like a file path" in server.log()
        assert path not in server.log() and "Traceback" not in server.log()
