"""A server behind nginx with TLS, as docs/guides/nginx.md has it."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.server.composed import TIMEOUT_S, composed
from tools.addresses import free_port
from tools.snippets import ROOT, blocks
from unfuse.client import connect

NAME = "pictures.example"
AROUND = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  {said}
}}
"""
"""What Debian's nginx.conf says around the files of conf.d, as a user of its own."""


def said(folder: Path, port: int, behind: int) -> str:
    """The server that the how-to has, whole, at these ports and with a certificate of its own."""
    (block,) = [one for one in blocks(ROOT / "docs" / "guides" / "nginx.md") if one.startswith("server {")]
    for theirs, ours in (
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("/etc/ssl/pictures.pem", f"{folder}/cert.pem"),
        ("/etc/ssl/pictures.key", f"{folder}/key.pem"),
        ("127.0.0.1:8000", f"127.0.0.1:{behind}"),
    ):
        assert block.count(theirs) == 1
        block = block.replace(theirs, ours)
    return block


@contextmanager
def nginx(folder: Path, behind: int) -> Iterator[int]:
    """The port of a proxy with a certificate of its own for a server."""
    binary = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if binary is None or shutil.which("openssl") is None:
        missing = "no nginx or no openssl here: install Debian's nginx-light and openssl"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            f"/CN={NAME}",
            "-addext",
            f"subjectAltName=DNS:{NAME},DNS:localhost",
            "-keyout",
            folder / "key.pem",
            "-out",
            folder / "cert.pem",
        ],
        check=True,
        capture_output=True,
    )
    port = free_port()
    (folder / "conf").write_text(AROUND.format(folder=folder, said=said(folder, port, behind)))
    process = subprocess.Popen([binary, "-p", folder, "-c", folder / "conf", "-e", folder / "error.log"])
    try:
        until = time.monotonic() + TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until, (folder / "error.log").read_text()
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """A client that knows the server by its public name; the Host header has the port that nginx was given."""
    folder = tmp_path_factory.mktemp("nginx")
    with (
        composed(folder, allowed_hosts=(NAME,), trusted_proxies=("127.0.0.1",)) as behind,
        nginx(folder, behind) as port,
        httpx2.Client(
            base_url=f"https://localhost:{port}",
            verify=ssl.create_default_context(cafile=str(folder / "cert.pem")),
            headers={"host": f"{NAME}:{port}"},
            timeout=TIMEOUT_S,
            trust_env=False,
        ) as client,
    ):
        yield client


def code(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.slow
def test_pages_of_the_public_host_are_allowed_through_nginx(proxied: httpx2.Client) -> None:
    public = f"https://{proxied.headers['host']}"
    body, asked = {"prompt": "a red circle"}, {"origin": public, "prefer": "respond-async"}
    answer = proxied.post("/v1/images/generations", json=body, headers=asked)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"].startswith(f"{public}/v1/requests/req_")


@pytest.mark.slow
def test_other_origins_and_hosts_get_403_through_nginx(proxied: httpx2.Client) -> None:
    plain = f"http://{proxied.headers['host']}"
    for origin in ("https://evil.example", f"https://{NAME}.evil.example", plain, "null"):
        assert code(proxied.get("/v1/models", headers={"origin": origin})) == (403, "origin_not_allowed")
    for host in ("evil.example", f"{NAME}.evil.example"):
        assert code(proxied.get("/v1/models", headers={"host": host})) == (403, "host_not_allowed")
        hidden = {"host": host, "x-forwarded-host": NAME, "x-forwarded-proto": "http"}
        assert code(proxied.get("/v1/models", headers=hidden)) == (403, "host_not_allowed")
        assert proxied.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.slow
def test_nginx_passes_events_without_delay(proxied: httpx2.Client) -> None:
    """Given a stream of events through the proxy, then the first comes while its request goes on."""
    asked = {"prefer": "respond-async"}
    id = proxied.post("/v1/images/generations", json={"prompt": "a"}, headers=asked).json()["id"]
    with proxied.stream("GET", f"/v1/requests/{id}/events") as stream:
        lines = stream.iter_lines()
        assert next(line for line in lines if line.startswith("event:")) == "event: queued"
        assert proxied.post(f"/v1/requests/{id}/cancel").json()["status"] == "cancelled"
        assert [line for line in lines if line.startswith("event:")] == ["event: cancelled"]


@pytest.mark.slow
def test_origin_error_behind_an_untrusted_proxy_names_the_proxy(tmp_path: Path) -> None:
    with composed(tmp_path) as behind, nginx(tmp_path, behind) as port:
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        with httpx2.Client(base_url=f"https://localhost:{port}", verify=context, trust_env=False) as client:
            answer = client.get("/v1/models", headers={"origin": f"https://localhost:{port}"})
            assert code(answer) == (403, "origin_not_allowed")
            assert "your proxy at 127.0.0.1" in answer.json()["error"]["message"]
            assert client.get("/v1/models").status_code == 200


@pytest.mark.slow
def test_api_key_is_accepted_directly_and_through_nginx(tmp_path: Path) -> None:
    """Given a server with keys behind a proxy, when the client shows its key, then it is answered."""
    with composed(tmp_path, api_key=("a-secret-of-tests",), trusted_proxies=("127.0.0.1",)) as behind:
        with connect(f"http://127.0.0.1:{behind}", "a-secret-of-tests") as client:
            assert client.submit("a red circle", num_inference_steps=1).id.startswith("req_")
        with nginx(tmp_path, behind) as port:
            context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
            with httpx2.Client(base_url=f"https://localhost:{port}", verify=context, trust_env=False) as http:
                assert http.get("/v1/models").status_code == 401
                key = {"authorization": "Bearer a-secret-of-tests", "host": "anything.example"}
                assert http.get("/v1/models", headers=key).status_code == 200


@pytest.mark.slow
def test_nginx_passes_uploads_up_to_the_size_limit(proxied: httpx2.Client) -> None:
    """What nginx lets through, the server reads: a form of 20 MiB is refused for what it holds, not for its size."""
    files = {"image": ("image", b"\0" * (20 << 20))}
    answer = proxied.post("/v1/images/edits", data={"prompt": "a red circle"}, files=files)
    assert code(answer) == (400, "invalid_parameter"), answer.text
    assert proxied.post("/v1/images/edits", content=b"\0" * (33 << 20)).status_code == 413
