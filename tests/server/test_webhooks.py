"""Webhooks: who is told what, signed; targets that fail, hang or lie; and where none may lead."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from standardwebhooks.webhooks import WebhookVerificationError

from tests.server.served import BROKEN, SECRET, Served, serve, until
from tools.cards import IDLE, PICTURES
from tools.receiver import Receiver, saying
from tools.redis_server import RedisServer
from tools.snippets import ROOT, blocks
from unfuse.core.errors import ConfigError, InvalidParameter, TransientError
from unfuse.server.outbound_http import OutboundHttp
from unfuse.server.webhooks import Webhooks

URL = "/v1/images/generations"
HERE = ("127.0.0.0/8",)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that are short, so that nobody waits for them."""
    monkeypatch.setattr("unfuse.scheduler.transitions.PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr("unfuse.scheduler.transitions.ATTEMPT_S", 2.0)
    monkeypatch.setattr("unfuse.server.webhooks.REVIEW_S", 0.1)
    monkeypatch.setattr("unfuse.server.outbound_http.CALL_S", 1.0)


def asked(served: Served, url: str, model: str = PICTURES.name, **more: Any) -> httpx2.Response:
    body = {"model": model, "prompt": "a circle", "webhook": url, **more}
    return httpx2.post(served.url + URL, json=body, headers={"prefer": "respond-async"}, trust_env=False, timeout=60)


def shown(served: Served, request: str) -> dict[str, Any]:
    return dict(httpx2.get(f"{served.url}/v1/requests/{request}", trust_env=False, timeout=60).json()["webhook"])


def ended(served: Served, request: str, state: str) -> dict[str, Any]:
    until(lambda: shown(served, request)["state"] == state)
    return shown(served, request)


def test_webhooks_are_signed_for_completed_failed_and_cancelled(tmp_path: Path, receiver: Receiver) -> None:
    with serve(tmp_path, webhook_hosts=HERE) as served:
        done, failed = (asked(served, receiver.url, prompt=prompt).json()["id"] for prompt in ("a circle", BROKEN))
        cancelled = asked(served, receiver.url, IDLE.name).json()["id"]
        assert shown(served, cancelled) == {"url": receiver.url, "state": "waiting", "attempts": 0, "reason": ""}
        httpx2.post(f"{served.url}/v1/requests/{cancelled}/cancel", trust_env=False)
        for request in (done, failed, cancelled):
            assert ended(served, request, "delivered")["attempts"] == 1
        told = {message["data"]["id"]: message for message in receiver.verified(SECRET)}
        kinds = {id: message["type"] for id, message in told.items()}
        assert kinds == {done: "request.completed", failed: "request.failed", cancelled: "request.cancelled"}
        assert told[failed]["data"]["error"]["message"] == "the circle is broken"
        link = told[done]["data"]["result"][0]["url"]
        assert httpx2.get(link, trust_env=False).content.startswith(b"\x89PNG"), "links lead back to the gateway"
        assert all(headers["webhook-id"] in told for headers, _ in receiver.calls)
        page = httpx2.get(f"{served.url}/metrics", trust_env=False).text
        assert 'unfuse_webhooks_total{state="delivered"} 3.0' in page


def test_verification_code_in_the_docs_checks_a_webhook(tmp_path: Path, receiver: Receiver) -> None:
    (lines,) = [
        one for one in blocks(ROOT / "docs" / "guides" / "webhooks.md") if one.startswith("from standardwebhooks")
    ]
    with serve(tmp_path, webhook_hosts=HERE) as served:
        request = asked(served, receiver.url).json()["id"]
        ended(served, request, "delivered")
    ((headers, body),) = receiver.calls
    names: dict[str, Any] = {"secret": SECRET, "headers": headers, "body": body}
    exec(compile(lines, "webhooks.md", "exec"), names)
    assert (names["message"]["type"], names["message"]["data"]["id"]) == ("request.completed", request)
    with pytest.raises(WebhookVerificationError):
        exec(compile(lines, "webhooks.md", "exec"), names | {"body": body.replace(b"completed", b"cancelled")})


def test_failed_webhook_is_retried_with_the_same_id(tmp_path: Path, receiver: Receiver) -> None:
    receiver.answers = [saying(b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n"), saying(b"garbage\r\n\r\n")]
    with serve(tmp_path, webhook_hosts=HERE) as served:
        request = asked(served, receiver.url).json()["id"]
        assert ended(served, request, "delivered") == {
            "url": receiver.url,
            "state": "delivered",
            "attempts": 3,
            "reason": "",
        }
        assert [message["data"]["id"] for message in receiver.verified(SECRET)] == [request] * 3
        assert {headers["webhook-id"] for headers, _ in receiver.calls} == {request}


@pytest.mark.parametrize(("status", "attempts"), [(503, 3), (410, 1)])
def test_webhook_is_given_up_after_the_last_attempt_or_status_410(
    tmp_path: Path, receiver: Receiver, status: int, attempts: int
) -> None:
    receiver.answers = [saying(b"HTTP/1.1 %d No\r\ncontent-length: 0\r\n\r\n" % status)] * 9
    with serve(tmp_path, webhook_hosts=HERE) as served:
        end = ended(served, asked(served, receiver.url).json()["id"], "given_up")
    assert (end["attempts"], end["reason"]) == (attempts, f"the receiver responded with status {status}")
    assert len(receiver.calls) == attempts


def test_slow_or_hostile_webhook_targets_do_not_delay_others(tmp_path: Path, receiver: Receiver) -> None:
    """Given a target that never answers, one that redirects, and one that answers without end, then each fails within
    its time, nothing is read or followed, and another one is told at once."""
    other, elsewhere = Receiver("127.0.0.2"), Receiver("127.0.0.3")
    poured: list[int] = []

    def pour(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n")
        try:
            for _ in range(1000):
                poured.append(connection.send(bytes(1_000_000)))
        except OSError:
            return

    receiver.answers = [receiver.hang] * 20
    other.answers = [pour, saying(f"HTTP/1.1 307 X\r\nlocation: {elsewhere.url}\r\n\r\n".encode())]
    with serve(tmp_path, webhook_hosts=HERE) as served:
        hanging = [asked(served, receiver.url).json()["id"] for _ in range(6)]
        until(lambda: len(receiver.calls) >= 4)
        assert ended(served, asked(served, other.url).json()["id"], "delivered")["attempts"] == 1, (
            "its body is not read"
        )
        assert ended(served, asked(served, other.url).json()["id"], "delivered")["attempts"] == 2
        for request in hanging:
            assert "no response within 1 s" in ended(served, request, "given_up")["reason"]
    assert sum(poured) < 100_000_000
    assert elsewhere.calls == []


def test_webhook_host_that_resolves_to_a_private_address_is_blocked(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, looked_up = socket.getaddrinfo, list[str]()

    def rebound(host: str, *rest: Any, **more: Any) -> Any:
        if host == "hooks.example":
            looked_up.append(host)
        return real("127.0.0.1" if host == "hooks.example" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", rebound)
    with serve(tmp_path, webhook_hosts=("hooks.example",)) as served:
        request = asked(served, f"http://hooks.example:{receiver.port}/").json()["id"]
        assert "resolves to 127.0.0.1, which may not be called" in ended(served, request, "given_up")["reason"]
    assert receiver.calls == []
    with serve(tmp_path / "allowed", webhook_hosts=("hooks.example", *HERE)) as served:
        looked_up.clear()
        request = asked(served, f"http://hooks.example:{receiver.port}/").json()["id"]
        assert ended(served, request, "delivered")["attempts"] == 1
    assert looked_up == ["hooks.example"], "what was looked at is what was connected to"
    assert receiver.calls[0][0]["host"] == f"hooks.example:{receiver.port}"


def test_pending_webhook_is_delivered_by_the_next_gateway(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a gateway that ended while it told, when one begins over the same queue, then it tells once more."""
    monkeypatch.setattr("unfuse.server.outbound_http.CALL_S", 600.0)
    receiver.answers = [receiver.hang]
    queue = f"sqlite:{tmp_path}/queue.db"
    with serve(tmp_path, webhook_hosts=HERE, queue=queue) as served:
        request = asked(served, receiver.url).json()["id"]
        until(lambda: len(receiver.calls) == 1)
    with serve(tmp_path, webhook_hosts=HERE, queue=queue, works=False) as served:
        assert ended(served, request, "delivered")["attempts"] == 2
    assert [message["data"]["id"] for message in receiver.verified(SECRET)] == [request] * 2


@pytest.mark.slow
def test_only_one_of_several_gateways_delivers_a_webhook(tmp_path: Path, receiver: Receiver) -> None:
    server = RedisServer(tmp_path)
    try:
        with (
            serve(tmp_path, webhook_hosts=HERE, queue=server.url) as one,
            serve(tmp_path, webhook_hosts=HERE, queue=server.url, works=False),
        ):
            ids = [asked(one, receiver.url).json()["id"] for _ in range(12)]
            for request in ids:
                assert ended(one, request, "delivered")["attempts"] == 1
        assert sorted(message["data"]["id"] for message in receiver.verified(SECRET)) == sorted(ids)
    finally:
        server.stop()


@pytest.mark.parametrize(
    "url",
    [
        "ftp://hooks.example/",
        "hooks.example",
        "//hooks.example",
        "http:///path",
        "http://user@hooks.example/",
        "http://hooks.example/#x",
        "http://hooks.example:0/",
        "http://hooks.example:99999/",
        "http://hooks.example:x/",
        "http://höoks.example/",
        "http://hooks.example\\@evil/",
        "http://hooks.example/a b",
        "http://hooks.example/\n",
        "http://[::1/",
        "http://hooks.example.evil/",
        "http://evilhooks.example/",
        "http://example/",
        "http://127.0.0.1/",
        "http://10.1.2.3/",
        "http://[::ffff:10.0.0.1]/",
        "http://169.254.169.254/latest",
        "http://2130706433/",
        "http://8.8.8.8/",
        "http://[fd00::1]/",
    ],
)
def test_invalid_or_disallowed_webhook_url_raises_invalid_parameter(url: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        OutboundHttp(["hooks.example", ".sub.example", "192.168.7.0/24"]).require(url)
    assert refused.value.param == "webhook"


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example/done",
        "http://HOOKS.example:8080",
        "https://a.b.sub.example/?x=1",
        "http://sub.example",
        "http://192.168.7.9/x",
    ],
)
def test_allowed_webhook_url_is_accepted(url: str) -> None:
    OutboundHttp(["hooks.example", ".sub.example", "192.168.7.0/24"]).require(url)


def test_webhook_host_wildcard_allows_only_public_addresses() -> None:
    targets = OutboundHttp(["*"])
    for url in ("http://8.8.8.8/", "https://anything.example/", "http://[2001:4860:4860::8888]/"):
        targets.require(url)
    for url in ("http://127.0.0.1/", "http://[::1]/", "http://192.168.1.1/", "http://[64:ff9b::7f00:1]/"):
        with pytest.raises(InvalidParameter):
            targets.require(url)
    for address in ("10.0.0.1", "224.0.1.1", "0.0.0.0", "192.0.0.8", "192.88.99.1", "fe80::1%lo", "fec0::1", ""):
        assert not targets.check(address), address
    assert targets.check("8.8.8.8") and targets.check("2606:4700::1111")


@pytest.mark.parametrize(
    ("form", "is_for_public_ones"),
    [
        ("::{0}", False),  # IPv4-compatible
        ("::ffff:{0}", True),  # IPv4-mapped
        ("::ffff:0:{0}", False),  # IPv4-translated
        ("64:ff9b::{0}", True),  # NAT64
        ("64:ff9b:1::{0}", False),  # NAT64 of a network of one's own
        ("2002:{0}::1", True),  # 6to4
        ("2001:0:{0}::f7f7:f7f7", False),  # Teredo: its server; the client is 8.8.8.8
        ("2001:0:808:808::{1}", False),  # Teredo: its client, with all bits inverted
        ("2600::5efe:{0}", True),  # ISATAP
        ("2600::200:5efe:{0}", True),
    ],
)
def test_ipv6_address_that_embeds_a_private_ipv4_is_blocked(form: str, is_for_public_ones: bool) -> None:
    """Given an IPv6 address that leads to an IPv4 address, then it is called at most where that one may be called."""
    targets = OutboundHttp(["*"])
    for private in ("127.0.0.1", "10.0.0.1", "169.254.169.254", "192.168.1.1"):
        assert not targets.check(in_ipv6(form, private)), private
    assert targets.check(in_ipv6(form, "8.8.8.8")) is is_for_public_ones


def in_ipv6(form: str, address: str) -> str:
    """An IPv6 address of that form for an IPv4 address, whose bits it has, or their inverse."""
    value = int.from_bytes(map(int, address.split(".")))
    words = (f"{bits >> 16:x}:{bits & 0xFFFF:x}" for bits in (value, value ^ 0xFFFFFFFF))
    return form.format(*words)


async def test_other_spellings_of_localhost_are_blocked(receiver: Receiver) -> None:
    targets = OutboundHttp(["*"])
    for name in ("127.1", "2130706433", "0x7f000001", "localhost"):
        with pytest.raises(TransientError, match="may not be called"):
            await targets.call(f"http://{name}:{receiver.port}/", {}, b"")
    assert receiver.calls == []


def test_webhook_without_allowed_hosts_returns_400(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        answer = asked(served, "https://hooks.example/")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "webhook")
        assert "--webhook-hosts" in answer.json()["error"]["message"]
        assert httpx2.get(f"{served.url}/v1/requests", trust_env=False).json()["data"] == []


@pytest.mark.parametrize(
    ("hosts", "secrets", "said"),
    [
        (("hooks.example",), (), "needs --webhook-secret"),
        (("http://hooks.example",), (SECRET,), "write names like"),
        ((), ("short",), "as base64|shorter than"),
        ((), ("whsec_MfKQ9r8G",), "shorter than 24 bytes"),
        ((), ("no base 64 at all, but long enough",), "as base64"),
        ((), ("/etc/unfuse/secrets/of/webhooks/secret",), "looks like a file path, but there is no such file"),
        ((), ("./secrets/of/webhooks/of/the/studio/x",), "looks like a file path"),
    ],
)
def test_invalid_webhook_settings_raise_config_error(
    hosts: tuple[str, ...], secrets: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        Webhooks(hosts, secrets)
    assert not any(secret in str(refused.value) for secret in secrets)


def test_webhook_is_signed_with_several_secrets_for_rotation(tmp_path: Path, receiver: Receiver) -> None:
    file, next_one = tmp_path / "secret", "whsec_" + "QUJD" * 8
    file.write_text(f"{SECRET}\n")
    with serve(tmp_path, webhook_hosts=HERE, webhook_secrets=[str(file), next_one]) as served:
        ended(served, asked(served, receiver.url).json()["id"], "delivered")
    assert receiver.verified(SECRET) == receiver.verified(next_one)
    with pytest.raises(WebhookVerificationError):
        receiver.verified("whsec_" + "QUJE" * 8)


def test_retried_dead_letter_gets_a_webhook_of_its_own(tmp_path: Path, receiver: Receiver) -> None:
    with serve(tmp_path, webhook_hosts=HERE) as served:
        first = asked(served, receiver.url, prompt="a poisonous circle").json()["id"]
        ended(served, first, "delivered")
        again = httpx2.post(f"{served.url}/v1/dead/{first}/retry", trust_env=False, timeout=60).json()["id"]
        ended(served, again, "delivered")
        assert [message["data"]["id"] for message in receiver.verified(SECRET)] == [first, again]
