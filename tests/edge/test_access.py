"""From where a server without keys may be used; tried on what `serve` composes, with its default settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.composed import Answer, call, composed, say
from unfuse.core.errors import ConfigError
from unfuse.edge.access import AccessPolicy

MODEL = "unfuse/shapes"
JSON, FORM = "Content-Type: application/json", "Content-Type: multipart/form-data; boundary=b"
EVIL = "Origin: http://evil.example"
VIDEO = '--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na red circle\r\n--b--\r\n'


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with composed(tmp_path_factory.mktemp("served")) as port:
        yield port


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server with names, websites and a proxy of its own."""
    folder = tmp_path_factory.mktemp("served")
    hosts, origins = ("pictures.example", ".inside.example", "[fd00::1]"), ("https://app.example",)
    with composed(folder, allowed_hosts=hosts, allowed_origins=origins, trusted_proxies=("127.0.0.1/32",)) as port:
        yield port


def ids(port: int) -> list[str]:
    return [one["id"] for one in json.loads(call(port, "/v1/requests").body)["data"]]


def refused(answer: Answer, code: str, *words: str) -> None:
    assert (answer.status, answer.error["code"]) == (403, code)
    assert all(word in answer.error["message"] for word in words)
    assert answer.headers["x-request-id"]


def test_cross_origin_page_cannot_create_cancel_or_list_requests(port: int) -> None:
    """Given a request, when a page of elsewhere sends what browsers let any page send, then nothing happens."""
    body = json.dumps({"prompt": "a red circle"})
    asked = call(port, "/v1/images/generations", JSON, "Prefer: respond-async", method="POST", body=body)
    assert asked.status == 202
    id = json.loads(asked.body)["id"]

    form = call(port, "/v1/videos", FORM, EVIL, method="POST", body=VIDEO)
    refused(form, "origin_not_allowed", "--allowed-origins http://evil.example")
    cancel = call(port, f"/v1/requests/{id}/cancel", EVIL, "Content-Type: text/plain", method="POST", body="x")
    refused(cancel, "origin_not_allowed")
    refused(call(port, "/v1/requests", "Host: evil.example"), "host_not_allowed", "--allowed-hosts evil.example")
    rebound = call(port, "/v1/requests", "Host: evil.example", EVIL)
    refused(rebound, "host_not_allowed")

    assert ids(port)[:1] == [id]
    assert json.loads(call(port, f"/v1/requests/{id}").body)["status"] == "queued"


@pytest.mark.parametrize(
    "host", ["127.0.0.1:{}", "localhost:{}", "LocalHost", "localhost.", "127.0.0.1", "[::1]:{}", "[0:0:0:0:0:0:0:1]"]
)
def test_loopback_host_headers_are_accepted(port: int, host: str) -> None:
    assert call(port, "/v1/models", "Host: " + host.format(port)).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "localhost.evil.example",
        "evil.example:80@localhost",
        "localhost/x",
        "0.0.0.0",
        "127.0.0.1x",
        "localhost:99999999",
        "10.0.0.1",
        "[::2]",
        "[::1",
        "local host",
        "2130706433",
    ],
)
def test_other_host_headers_return_403(port: int, host: str) -> None:
    refused(call(port, "/v1/models", "Host: " + host), "host_not_allowed", "--allowed-hosts")


def test_missing_or_repeated_host_header_is_rejected(port: int) -> None:
    end = "Connection: close\r\n\r\n"
    refused(say(port, "GET /v1/models HTTP/1.0\r\n\r\n"), "host_not_allowed")
    for head in ("", "Host: localhost\r\nHost: localhost\r\n", "Host: localhost\r\nHost: evil.example\r\n"):
        assert say(port, f"GET /v1/models HTTP/1.1\r\n{head}{end}").status == 400


@pytest.mark.parametrize("target", ["http://evil.example/v1/models", "http://localhost/v1/models", "*"])
def test_request_target_other_than_a_path_returns_400(port: int, target: str) -> None:
    answer = call(port, target, method="OPTIONS")
    assert (answer.status, answer.error["code"]) == (400, "bad_target")


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probe_paths_accept_any_host_header(port: int, path: str) -> None:
    assert call(port, path, "Host: 10.1.2.3:8000").status in (200, 503)
    assert "error" not in json.loads(call(port, "/health", "Host: 10.1.2.3").body)


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/version", "/health/", "//health", "/nowhere"])
def test_non_probe_paths_reject_an_unknown_host_header(port: int, path: str) -> None:
    refused(call(port, path, "Host: 10.1.2.3:8000"), "host_not_allowed")


def test_same_origin_pages_are_allowed(port: int) -> None:
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
        assert call(port, "/v1/models", f"Host: {host}", f"Origin: http://{host}").status == 200
    assert call(port, "/v1/models", "Host: localhost:80", "Origin: http://localhost").status == 200


@pytest.mark.parametrize(
    "origin", ["null", "", "https://localhost:{}", "http://localhost:1", "http://127.0.0.1:{}", "http://localhost:{}x"]
)
def test_other_origins_return_403(port: int, origin: str) -> None:
    host = f"Host: localhost:{port}"
    refused(call(port, "/v1/models", host, "Origin: " + origin.format(port)), "origin_not_allowed")
    twice = call(port, "/v1/models", host, f"Origin: http://localhost:{port}", "Origin: " + origin.format(port))
    refused(twice, "origin_not_allowed")


def test_forwarded_headers_of_untrusted_clients_are_ignored(port: int) -> None:
    forwarded = ("X-Forwarded-Host: localhost", "X-Forwarded-Proto: https")
    refused(call(port, "/v1/models", "Host: evil.example", *forwarded), "host_not_allowed")
    answer = call(port, "/v1/models", "Host: localhost", "Origin: https://localhost", *forwarded)
    refused(answer, "origin_not_allowed", "127.0.0.1", "--trusted-proxies")


def test_403_body_stays_small_for_a_huge_origin_header(port: int) -> None:
    answer = call(port, "/v1/models", "Host: localhost", "Origin: " + "x" * 4000)
    refused(answer, "origin_not_allowed")
    assert len(answer.body) < 600


def test_allowed_hosts_match_names_subdomains_and_addresses(opened: int) -> None:
    names = ("pictures.example", "PICTURES.example:8443", "inside.example", "a.b.inside.example", "[fd00::1]:80")
    for name in (*names, "localhost"):
        assert call(opened, "/v1/models", f"Host: {name}").status == 200
    for name in ("xinside.example", "sub.pictures.example", "example", "[fd00::2]"):
        refused(call(opened, "/v1/models", f"Host: {name}"), "host_not_allowed")


def test_allowed_origins_get_cors_headers_on_every_response(opened: int) -> None:
    site = "Origin: https://app.example"
    answer = call(opened, "/v1/models", site)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
    exposed = answer.headers["access-control-expose-headers"].lower()
    assert "x-request-id" in exposed and "content-range" in exposed
    missing = call(opened, "/v1/requests/req_1", site)
    assert (missing.status, missing.headers["access-control-allow-origin"]) == (404, "https://app.example")
    refused(call(opened, "/v1/models", "Origin: https://app.example.evil.example"), "origin_not_allowed")


def test_cors_preflight_returns_allowed_methods_and_headers(opened: int) -> None:
    asks = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization, content-type")
    there = "Access-Control-Request-Private-Network: true"
    answer = call(opened, "/v1/videos", "Origin: https://app.example", *asks, there, method="OPTIONS")
    assert answer.status == 200
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-private-network"] == "true"
    refused(call(opened, "/v1/videos", EVIL, *asks, method="OPTIONS"), "origin_not_allowed")


def test_trusted_proxy_sets_the_public_host_and_scheme(opened: int) -> None:
    """Given a trusted proxy with TLS, then pages of the public name may use it, and addresses are the public ones."""
    proxied = ("Host: 127.0.0.1:8000", "X-Forwarded-Host: pictures.example", "X-Forwarded-Proto: https")
    body = json.dumps({"prompt": "a red circle"})
    asked = ("Origin: https://pictures.example", JSON, "Prefer: respond-async")
    answer = call(opened, "/v1/images/generations", *proxied, *asked, method="POST", body=body)
    assert answer.status == 202
    assert answer.headers["location"].startswith("https://pictures.example/v1/requests/req_")
    refused(call(opened, "/v1/models", *proxied, "Origin: http://pictures.example"), "origin_not_allowed")


def test_every_host_behind_a_trusted_proxy_is_checked(opened: int) -> None:
    """Given a proxy that passes on what it was sent, when a rebound page adds a header, then it is refused."""
    for names in (
        ("Host: evil.example", "X-Forwarded-Host: localhost"),
        ("Host: localhost", "X-Forwarded-Host: evil.example"),
        ("Host: localhost", "X-Forwarded-Host: localhost, evil.example"),
        ("Host: localhost", "X-Forwarded-Host: localhost", "X-Forwarded-Host: evil.example"),
    ):
        refused(call(opened, "/v1/models", *names), "host_not_allowed")


def test_api_key_replaces_the_host_and_origin_checks(tmp_path: Path) -> None:
    with composed(tmp_path, api_key=("a-secret-of-tests",)) as port:
        elsewhere = ("Host: 192.0.2.7:8000", EVIL)
        assert call(port, "/v1/models", *elsewhere).status == 401
        answer = call(port, "/v1/models", *elsewhere, "Authorization: Bearer a-secret-of-tests")
        assert (answer.status, answer.headers.get("access-control-allow-origin")) == (200, None)
        assert call(port, "/health", *elsewhere).status == 200


def test_ipv6_loopback_bind_accepts_loopback_host_headers(tmp_path: Path) -> None:
    with composed(tmp_path, host="::1") as port:
        for host in (f"[::1]:{port}", "localhost", "127.0.0.1"):
            answer = say(port, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n", "::1")
            assert answer.status == 200


def test_non_loopback_bind_requires_an_api_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--api-key"), composed(tmp_path, host="0.0.0.0"):
        pass


def test_wildcard_allows_every_host_and_origin(tmp_path: Path) -> None:
    with composed(tmp_path, allowed_hosts=("*",), allowed_origins=("*",)) as port:
        answer = call(port, "/v1/models", "Host: evil.example", EVIL)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"hosts": ["http://a.example"]}, "--allowed-hosts"),
        ({"hosts": ["*.example"]}, "--allowed-hosts"),
        ({"origins": ["a.example"]}, "--allowed-origins"),
        ({"proxies": ["nginx"]}, "--trusted-proxies"),
        ({"proxies": ["10.0.0.1/8"]}, "--trusted-proxies"),
    ],
)
def test_malformed_access_settings_raise_config_error(given: dict[str, list[str]], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        AccessPolicy(**given)
