"""More texts than there is room for, clients that read slowly, and models that are refused: as a client sees it."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.integration.test_chat import ASKED
from tests.integration.test_text_metrics import KV_TOKENS, LONG, TOKEN_BYTES, scraped
from tools.server import START_S, Server, environment, serving, unfuse, until
from tools.tiny_language import TEMPLATE, make_language_model

TEXTS = 12
TELLS_OFF = "{% if 'be kind' in messages[0]['content'] %}{{ raise_exception('not so here') }}{% endif %}" + TEMPLATE
ROOM = "--kv", str(KV_TOKENS * TOKEN_BYTES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_language_model(tmp_path_factory.mktemp("model") / "tiny", positions=300)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TELLS_OFF}))
    return folder


WORKERS = {"language": "language=1", "decode": "prefill=1,decode=1"}


@pytest.fixture(scope="module", params=["language", pytest.param("decode", marks=pytest.mark.nightly)])
def role(request: pytest.FixtureRequest) -> str:
    """That of the worker that decodes."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(role: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    where = tmp_path_factory.mktemp("serve")
    with serving(where, str(folder), "--workers", WORKERS[role], "--threads", "1", *ROOM) as server:
        yield server.ready()


def ask(server: Server, **asked: Any) -> str:
    """Have a text made; returns the id of its request."""
    body = {"messages": ASKED, **LONG, "temperature": 1, **asked}
    return str(server.post("/v1/chat/completions", body, prefer="respond-async")["id"])


def test_overcommitted_kv_cache_completes_all_texts_in_arrival_order(server: Server, role: str) -> None:
    """Given room for one text and some of another, when twelve are asked for at once, then none fails or is begun
    anew, those that gave up what they had end before whoever came later, and the page of metrics tells of it."""
    before = scraped(server)
    texts = [ask(server, seed=seed) for seed in range(TEXTS)]
    until(lambda: scraped(server)["unfuse_kv_blocks", role, "used"] > KV_TOKENS // 32, "the room to be taken")
    ended = [server.finished(text) for text in texts]
    assert [(one["status"], one["stages"][-1]["attempt"]) for one in ended] == [("completed", 1)] * TEXTS
    assert [one["completed_at"] for one in ended] == sorted(one["completed_at"] for one in ended)
    until(lambda: not scraped(server)["unfuse_kv_blocks", role, "used"], "what texts had to be free")
    after = scraped(server)
    gave = after["unfuse_retractions_total",] - before.get(("unfuse_retractions_total",), 0)
    assert gave >= TEXTS // 2
    assert after["unfuse_kv_blocks", role, "free"] == KV_TOKENS // 16
    assert len({server.result(text) for text in texts}) > 1
    alone = server.finished(ask(server, seed=TEXTS - 1))
    assert json.loads(server.result(alone["id"]))["text"] == json.loads(server.result(texts[-1]))["text"]


def test_slow_stream_reader_does_not_block_other_requests(server: Server) -> None:
    """Given a client that has read some bytes of a stream and reads on only when others have their texts, then these
    come, and it has its own in the end."""
    address = urlsplit(server.url)
    body = json.dumps({"messages": ASKED, **LONG, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
    head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(START_S)
        client.connect((address.hostname, address.port))
        client.sendall(head.encode() + body)
        said = client.recv(1)
        for seed in range(3):
            assert server.finished(ask(server, seed=seed))["status"] == "completed"
            said += client.recv(1)
        while data := client.recv(1 << 16):
            said += data
    assert said.startswith(b"HTTP/1.1 200")
    assert said.count(b'"finish_reason":"length"') == 1
    assert b"data: [DONE]" in said


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        ({"messages": [{"role": "user", "content": "word " * 10**6}]}, (400, 413), ""),
        ({"messages": [{"role": "user", "content": ""}] * 2000}, (400,), "maximum context length"),
        ({"messages": [{"role": "system", "content": "be kind"}]}, (400,), "not so here"),
        ({"messages": ["hello"]}, (400,), "messages"),
        ({"messages": [*ASKED, {"role": "user"}]}, (400,), "messages[1] of role user needs a content"),
        ({"messages": ASKED, "stop": ["x" * 1000] * 10**4}, (400, 413), ""),
        ({"messages": ASKED, "logit_bias": {str(token): 1 for token in range(10**5)}}, (400, 413), ""),
        ({"messages": ASKED, "logit_bias": {"2": 1e300}}, (400,), "logit_bias"),
        ({"messages": ASKED, "logit_bias": {"-1": 1}}, (400,), "logit_bias"),
        ({"messages": ASKED, "n": 10**6}, (400,), "1 to 128"),
        ({"messages": ASKED, "seed": 10**30}, (400,), "seed"),
        ({"messages": ASKED, "temperature": "hot"}, (400,), "temperature"),
    ],
)
def test_invalid_chat_requests_are_rejected_before_they_are_queued(
    server: Server, asked: dict[str, Any], status: tuple[int, ...], says: str
) -> None:
    before = server.get("/v1/requests?limit=1")["data"]
    with pytest.raises(urllib.error.URLError) as refused:
        server.post("/v1/chat/completions", asked)
    if isinstance(refused.value, urllib.error.HTTPError):  # else it was refused before all of it was sent
        assert refused.value.code in status
        assert says in json.load(refused.value)["error"]["message"]
    else:
        assert 413 in status
    assert server.get("/v1/requests?limit=1")["data"] == before


@pytest.mark.nightly
def test_kv_cache_smaller_than_the_context_length_fails_the_start(folder: Path, tmp_path: Path) -> None:
    """It says how much there is, how much is needed, and what to do."""
    small = "--kv", str((KV_TOKENS - 64) * TOKEN_BYTES)
    made = subprocess.run(
        unfuse("serve", str(folder), "--workers", "language=1", "--threads", "1", *small, "--port", "0"),
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert made.returncode
    assert "increase --kv" in made.stdout + made.stderr
