"""Links to results that open without a key for a while, each for one result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.server.served import PICTURES, SECRET, Served, picture, serve, until
from tools.receiver import Receiver
from tools.redis_server import RedisServer
from unfuse.core.errors import UsageError
from unfuse.server.links import LINK_TTL_S, WEBHOOK_LINK_TTL_S, parse_public_url

URL = "/v1/images/generations"
ASKED = {"model": PICTURES.name, "prompt": "a red circle", "seed": 5, "n": 2, "response_format": "url"}
KEYS = ("anna " + "a" * 40, "bert " + "b" * 40)
ANNA = {"authorization": "Bearer " + "a" * 40}
BERT = {"authorization": "Bearer " + "b" * 40}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("keyed"), keys=KEYS) as served:
        yield served


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def http(keyed: Served) -> Iterator[httpx2.Client]:
    """A client without a key."""
    with httpx2.Client(base_url=keyed.url, timeout=600, trust_env=False) as client:
        yield client


def links(http: httpx2.Client, **more: Any) -> list[str]:
    """The links of two pictures that anna asked for."""
    answer = http.post(URL, json=ASKED | more, headers=ANNA)
    assert answer.status_code == 200, answer.text
    return [one["url"] for one in answer.json()["data"]]


def code(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.row("P25", "K9")
def test_signed_link_opens_its_result_without_a_key(http: httpx2.Client) -> None:
    for index, link in enumerate(links(http)):
        answer = http.get(link)
        assert (answer.status_code, answer.content) == (200, picture(5 + index))
        head = http.head(link)
        assert (head.status_code, head.headers["content-length"]) == (200, str(len(answer.content)))
        assert http.get(link, headers={"range": "bytes=0-3"}).content == answer.content[:4]
        assert http.get(link, headers={"authorization": "Bearer wrong"}).status_code == 200


def test_signed_link_works_with_the_key_of_another_tenant(http: httpx2.Client) -> None:
    link = links(http)[0]
    assert http.get(link, headers=BERT).content == picture(5)
    forged = link.replace("signature=", "signature=x")
    assert (http.get(forged, headers=ANNA).status_code, http.get(forged, headers=BERT).status_code) == (200, 404)


def test_links_in_the_request_object_open_without_a_key(http: httpx2.Client) -> None:
    id = urlsplit(links(http)[0]).path.split("/")[3]
    for path in (f"/v1/requests/{id}", "/v1/requests?limit=1"):
        told = http.get(path, headers=ANNA).json()
        (first, _) = (told["data"][0] if "data" in told else told)["result"]
        assert http.get(first["url"]).content == picture(5)


def test_signed_link_opens_no_other_path_or_method(http: httpx2.Client) -> None:
    first, second = (urlsplit(link) for link in links(http))
    (other, _) = (urlsplit(link) for link in links(http, seed=6))
    request = first.path.rpartition("/result/")[0]
    for path in (second.path, other.path, first.path.replace("/result/0", "/result/00")):
        assert code(http.get(f"{path}?{first.query}")) == (403, "invalid_link"), path
    for path in (request, f"{request}/events", "/v1/requests", "/v1/workers", "/v1/models"):
        assert http.get(f"{path}?{first.query}").status_code in (401, 404), path
    for method in ("POST", "DELETE", "PUT"):
        assert http.request(method, f"{first.path}?{first.query}").status_code == 405
    assert http.post(f"{request}/cancel?{first.query}").status_code == 401


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"signature=.", "signature=x"),
        (r"signature=(.*)$", "signature="),
        (r"signature=(.*)$", r"signature=\1\1"),
        (r"expires=(\d)", r"expires=9\1"),
        (r"expires=\d+", "expires="),
        (r"expires=\d+&", ""),
        (r"expires=(\d+)", r"expires=0\1"),
        (r"expires=(\d+)", r"expires=+\1"),
        (r"signature=", "signature=é"),
    ],
)
def test_modified_link_returns_403(http: httpx2.Client, pattern: str, replacement: str) -> None:
    forged = re.sub(pattern, replacement, links(http)[0])
    assert code(http.get(forged)) == (403, "invalid_link")


def test_link_without_signature_needs_an_api_key(http: httpx2.Client) -> None:
    address = links(http)[0].partition("?")[0]
    assert code(http.get(address)) == (401, "invalid_api_key")
    assert http.get(address, headers=ANNA).status_code == 200
    assert http.get(address, headers=BERT).status_code == 404


def test_signed_link_expires_after_its_ttl_by_the_server_clock(
    keyed: Served, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, now = links(http)[0], keyed.scheduler.clock.wall()
    monkeypatch.setattr(keyed.scheduler.clock, "wall", lambda: now + LINK_TTL_S - 5)
    assert http.get(link).status_code == 200
    monkeypatch.setattr(keyed.scheduler.clock, "wall", lambda: now + LINK_TTL_S + 5)
    assert code(http.get(link)) == (403, "link_expired")
    assert "new link" in http.get(link).json()["error"]["message"]
    assert http.get(link, headers=ANNA).status_code == 200
    monkeypatch.setattr(keyed.scheduler.clock, "wall", lambda: now)
    assert http.get(link).status_code == 200


def test_link_of_a_deleted_request_returns_404(keyed: Served, http: httpx2.Client) -> None:
    link = links(http)[0]
    (id,) = re.findall(r"requests/(req_\w+)/", link)
    keyed.run(keyed.queue.drop(id))
    assert code(http.get(link)) == (404, "not_found")


def test_webhook_links_are_valid_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = Receiver()
    try:
        with (
            serve(tmp_path, keys=KEYS, webhook_hosts=("127.0.0.0/8",)) as served,
            httpx2.Client(base_url=served.url, timeout=600, trust_env=False) as http,
        ):
            body = {**ASKED, "webhook": receiver.url}
            assert http.post(URL, json=body, headers=ANNA | {"prefer": "respond-async"}).status_code == 202
            until(lambda: bool(receiver.calls))
            (message,) = receiver.verified(SECRET)
            link, now = message["data"]["result"][0]["url"], served.scheduler.clock.wall()
            monkeypatch.setattr(served.scheduler.clock, "wall", lambda: now + WEBHOOK_LINK_TTL_S - 60)
            assert http.get(link).content == picture(5)
            monkeypatch.setattr(served.scheduler.clock, "wall", lambda: now + WEBHOOK_LINK_TTL_S + 60)
            assert code(http.get(link)) == (403, "link_expired")
    finally:
        receiver.close()


def test_links_are_unsigned_without_api_keys(tmp_path: Path) -> None:
    with serve(tmp_path) as served, httpx2.Client(base_url=served.url, timeout=600, trust_env=False) as open_to_all:
        (first, _) = links(open_to_all)
        assert urlsplit(first).query == ""
        assert open_to_all.get(first).content == picture(5)


def test_gateways_of_one_queue_accept_each_others_links(redis: RedisServer, tmp_path: Path) -> None:
    with (
        serve(tmp_path, keys=KEYS, queue=redis.url) as near,
        serve(tmp_path, keys=KEYS, queue=redis.url, works=False) as far,
        httpx2.Client(base_url=near.url, timeout=600, trust_env=False) as http,
    ):
        link = urlsplit(links(http)[0])
        assert http.get(f"{far.url}{link.path}?{link.query}").content == picture(5)
        assert code(http.get(f"{far.url}{link.path}?{link.query}0")) == (403, "invalid_link")


@pytest.mark.parametrize("url", ["https://pictures.example", "http://example.com:8080/a/b"])
def test_links_start_with_the_public_url(tmp_path: Path, url: str) -> None:
    """Given a proxy that takes a prefix away, then what is behind it in a link opens here."""
    with (
        serve(tmp_path, keys=KEYS, public_url=url) as served,
        httpx2.Client(base_url=served.url, timeout=600, trust_env=False) as http,
    ):
        link = links(http)[0]
        assert link.startswith(f"{url}/v1/requests/req_")
        assert http.get(link.removeprefix(url)).content == picture(5)
        later = http.post(URL, json=ASKED, headers=ANNA | {"prefer": "respond-async"})
        assert later.headers["location"] == f"{url}/v1/requests/{later.json()['id']}"


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("", ""),
        ("https://a.example", "https://a.example"),
        ("https://a.example/", "https://a.example"),
        ("http://[::1]:8000/x/", "http://[::1]:8000/x"),
    ],
)
def test_trailing_slash_of_public_url_is_removed(given: str, base: str) -> None:
    assert parse_public_url(given) == base


@pytest.mark.parametrize(
    "url",
    [
        "pictures.example",
        "//pictures.example",
        "ftp://pictures.example",
        "https://",
        "https:///x",
        "https://a b",
        "https://a.example?x=1",
        "https://a.example?",
        "https://a.example#x",
        "https://u:p@a.example",
        "https://a:99999",
        "https://a.example/\n",
        "https://[::1",
        "javascript:alert(1)",
        "https://a.example/<x>",
    ],
)
def test_invalid_public_url_raises_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match="--public-url"):
        parse_public_url(url)
