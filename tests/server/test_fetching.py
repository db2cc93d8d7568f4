"""Pictures in messages by their address: fetched from hosts that are allowed, and from no other."""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests.server.composed import composed
from tools.tiny_language import make_language_model
from tools.tiny_vision import KINDS, make_vision_model

pytestmark = pytest.mark.slow


def png(width: int = 64, height: int = 96) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (9, 90, 200)).save(file, "PNG")
    return file.getvalue()


class Host(BaseHTTPRequestHandler):
    """A host of pictures, and of what is none."""

    asked: list[str]

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "/sky.png")
            self.end_headers()
        elif self.path == "/slow":
            self.server.over.wait(20)  # type: ignore[attr-defined]
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"\0" * (1 << 20))
            except OSError:
                return
        elif self.path in ("/sky.png", "/text"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(png() if self.path == "/sky.png" else b"<html>")
        else:
            self.send_error(404)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    server.asked, server.over = [], threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.over.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("models")
    return str(make_vision_model(root / "sees", KINDS[1])), str(make_language_model(root / "blind"))


@pytest.fixture(scope="module")
def ai(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    own = {
        "models": folders,
        "served_model_name": ("sees", "blind"),
        "image_hosts": ("127.0.0.0/8", "pictures.example"),
    }
    with (
        composed(tmp_path_factory.mktemp("served"), **own) as port,
        openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0) as ai,
    ):
        yield ai


def asked(ai: openai.OpenAI, url: str, model: str = "sees") -> dict[str, Any]:
    """The request that a chat becomes which shows what is there."""
    messages: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    answer = ai.chat.completions.with_raw_response.create(
        model=model, messages=messages, extra_headers={"prefer": "respond-async"}
    )
    made: dict[str, Any] = json.loads(answer.content)
    return made


def refused(ai: openai.OpenAI, url: str, model: str = "sees") -> str:
    with pytest.raises(openai.BadRequestError) as error:
        asked(ai, url, model)
    return str(error.value)


def test_image_url_of_an_allowed_host_equals_its_data_url(ai: openai.OpenAI, host: ThreadingHTTPServer) -> None:
    named = asked(ai, f"http://127.0.0.1:{host.server_port}/sky.png")
    sent = asked(ai, f"data:image/png;base64,{base64.b64encode(png()).decode()}")
    assert json.loads(named["params"]["shown"]) == json.loads(sent["params"]["shown"])
    assert named["params"]["prompt_tokens"] == sent["params"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/moved", "has status 302"),
        ("/none.png", "has status 404"),
        ("/text", "is not a PNG, JPEG, WebP"),
        ("/endless", "more than"),
    ],
)
def test_unfetchable_image_url_returns_400_with_the_reason(
    ai: openai.OpenAI, host: ThreadingHTTPServer, path: str, says: str
) -> None:
    assert says in refused(ai, f"http://127.0.0.1:{host.server_port}{path}")


def test_image_host_timeout_returns_400(
    ai: openai.OpenAI, host: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unfuse.server.outbound_http.CALL_S", 0.5)
    assert "no response within 0.5 s" in refused(ai, f"http://127.0.0.1:{host.server_port}/slow")


def test_host_name_resolving_to_a_private_address_is_not_fetched(
    ai: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a host that is allowed by name, when its name leads to a private address, then nothing connects to that."""
    found = [(0, 0, 0, "", ("10.1.2.3", 80))]
    monkeypatch.setattr("unfuse.server.outbound_http.socket.getaddrinfo", lambda *_, **__: found)
    assert "10.1.2.3, which may not be called" in refused(ai, "http://pictures.example/sky.png")


def test_dns_rebinding_does_not_reach_a_private_address(
    ai: openai.OpenAI, host: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a name that leads to an allowed address once, and to a private one from then on, then a picture is fetched
    with a single look, and the next one is not."""
    real, looked_up = socket.getaddrinfo, list[str]()

    def rebound(name: str, port: int, *more: Any, **how: Any) -> Any:
        if name != "pictures.example":
            return real(name, port, *more, **how)
        looked_up.append("10.1.2.3" if looked_up else "127.0.0.1")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (looked_up[-1], port))]

    monkeypatch.setattr(socket, "getaddrinfo", rebound)
    url = f"http://pictures.example:{host.server_port}/sky.png"
    assert json.loads(asked(ai, url)["params"]["shown"])
    assert looked_up == ["127.0.0.1"]
    before = [*host.asked]  # type: ignore[attr-defined]
    assert "10.1.2.3, which may not be called" in refused(ai, url)
    assert host.asked == before  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest", "http://other.example/a.png", "http://user@pictures.example/a.png"]
)
def test_image_url_of_a_disallowed_host_returns_400(ai: openai.OpenAI, url: str) -> None:
    said = refused(ai, url)
    assert "--image-hosts" in said or "without user" in said


def test_image_url_is_not_fetched_for_a_text_only_model(ai: openai.OpenAI, host: ThreadingHTTPServer) -> None:
    before = [*host.asked]  # type: ignore[attr-defined]
    refused(ai, f"http://127.0.0.1:{host.server_port}/sky.png", "blind")
    assert host.asked == before  # type: ignore[attr-defined]


def test_more_than_16_images_return_400(ai: openai.OpenAI, host: ThreadingHTTPServer) -> None:
    parts = [{"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{host.server_port}/{n}"}} for n in range(17)]
    with pytest.raises(openai.BadRequestError, match="at most 16"):
        ai.chat.completions.create(model="sees", messages=[{"role": "user", "content": parts}])  # type: ignore[typeddict-item]


def test_image_url_is_not_fetched_without_image_hosts(
    folders: tuple[str, str], tmp_path: Path, host: ThreadingHTTPServer
) -> None:
    before = [*host.asked]  # type: ignore[attr-defined]
    with (
        composed(tmp_path, models=folders[:1], served_model_name=("sees",)) as port,
        openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0) as own,
    ):
        assert "--image-hosts" in refused(own, f"http://127.0.0.1:{host.server_port}/sky.png")
    assert host.asked == before  # type: ignore[attr-defined]
