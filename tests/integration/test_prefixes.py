"""Prompts that begin alike: what others have computed is mapped or pulled, and the texts are the same."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_chat import whole_words
from tests.integration.test_nodes import keys, moved, other_host
from tests.netns import SecondHost
from tools.redis_server import RedisServer
from tools.server import Server, serving, until
from tools.tiny_language import TEXT, make_language_model

__all__ = ["keys", "other_host"]

LONG = f"{TEXT} " * 50
"""Some chunks of a prompt."""
CHUNK = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("model") / "tiny", positions=4096)


def flags(folder: Path, *more: str) -> list[str]:
    return [str(folder), "--served-model-name", "tiny", "--kv", "16MiB", "--threads", "1", *more]


@pytest.fixture(scope="module", params=["exact", "batched"])
def server(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two prefill workers, two tenants: what one has computed the other maps."""
    where = tmp_path_factory.mktemp("serve")
    (where / "keys").write_text("one 1111\ntwo 2222\n")
    more = "--workers", "prefill=2,decode=1", "--batching", request.param, "--api-keys", str(where / "keys")
    with serving(where, *flags(folder, *more)) as server:
        yield server.ready()


def chat(server: Server, said: str, key: str = "1111", **more: Any) -> tuple[str, int, int]:
    """The text, tokens of the prompt, and those of them that were there."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": said}], "temperature": 1, "seed": 4}
    made = server.post("/v1/chat/completions", {**body, "max_tokens": 24, **more}, authorization=f"Bearer {key}")
    usage = made["usage"]
    return (
        made["choices"][0]["message"]["content"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


def test_common_prefix_is_reused_and_the_text_is_unchanged(server: Server) -> None:
    """Given a prompt, when others begin alike, on whichever worker, then whole chunks of it are found, as many as they
    have in common, and what is written is what is written without."""
    first, tokens, cached = chat(server, LONG)
    assert tokens > 3 * CHUNK
    assert cached == 0
    for _ in range(4):
        assert chat(server, LONG) == (first, tokens, (tokens - 1) // CHUNK * CHUNK)
    branch = LONG[: len(LONG) // 2] + "and then something else " * 20
    apart, tokens, cached = chat(server, branch)
    assert 0 < cached <= tokens / 2
    assert cached % CHUNK == 0
    assert chat(server, branch, cache=False) == (apart, tokens, 0)


def test_request_with_cache_false_stores_no_prefix(server: Server) -> None:
    said = "who said that " * 100
    assert chat(server, said, cache=False)[2] == 0
    assert chat(server, said)[2] == 0
    assert chat(server, said)[2] > 0


def test_prefixes_are_not_shared_between_tenants(server: Server) -> None:
    said = "over the lazy dog " * 100
    mine = chat(server, said)
    assert chat(server, said)[2] > 0
    assert chat(server, said, "2222") == mine
    assert chat(server, said, "2222")[2] > 0


def test_cached_completions_are_not_shared_between_tenants(server: Server, folder: Path) -> None:
    """Given a chat of two turns, when a tenant has had the first one answered, then that tenant alone finds the answer
    in the second, and what is written is the same."""
    asked = {"role": "user", "content": "what does the fox say"}
    said, tokens, _ = chat(server, asked["content"], logit_bias=whole_words(folder), max_tokens=300)
    talk = [asked, {"role": "assistant", "content": said}, {"role": "user", "content": "and the dog"}]
    theirs, mine = (chat(server, "", key, messages=talk) for key in ("2222", "1111"))
    assert (theirs[2], mine[2]) == (0, (tokens + 300 - 1) // CHUNK * CHUNK)
    assert theirs[:2] == mine[:2]
    assert chat(server, "", messages=talk, cache=False) == theirs


def test_cached_prompt_tokens_are_counted_in_metrics(server: Server) -> None:
    chat(server, LONG)
    asked = urllib.request.Request(f"{server.url}/metrics", headers={"authorization": "Bearer 1111"})
    with urllib.request.urlopen(asked) as answer:
        lines = answer.read().decode().splitlines()
    (counted,) = (
        float(line.split()[-1]) for line in lines if line.startswith("unfuse_tokens_total") and "cached" in line
    )
    assert counted >= 3 * CHUNK


def test_text_is_unchanged_after_the_prefix_owner_is_killed(folder: Path, tmp_path: Path) -> None:
    """Given a prompt that one worker has computed, when that is killed and another takes its place, then the text is
    the same, computed anew."""
    with serving(tmp_path, *flags(folder, "--workers", "language=1", "--batching", "exact")) as server:
        first = chat(server.ready(), LONG)
        assert chat(server, LONG)[2] > 0
        (worker,) = server.get("/v1/workers")["data"]
        os.kill(worker["pid"], signal.SIGKILL)
        assert chat(server, LONG) == first
        assert chat(server, LONG)[2] > 0


@pytest.mark.nightly
def test_prefix_is_pulled_from_another_host(
    folder: Path, tmp_path: Path, other_host: SecondHost, keys: list[str], redis_server: RedisServer
) -> None:
    """Given a prompt that was computed here, when the only worker that takes prompts is on another host, then that
    begins with what it pulls, while its owner lives."""
    own = "--kv", "16MiB", "--threads", "1"
    options = [*keys, "--queue", redis_server.url, "--workers", "decode=1"]
    with serving(tmp_path, *flags(folder, *options), at=other_host.near) as server:
        here = server.worker("prefill", *keys, *own)
        first = chat(server.ready(), LONG)
        away = server.worker("prefill", *keys, *own, "--engine", "tcp", within=other_host.enter)
        until(lambda: len(server.get("/v1/workers")["data"]) == 3, "the worker of the other host")
        took = set[str]()
        while len(took) < 2:
            assert chat(server, LONG) == (*first[:2], (first[1] - 1) // CHUNK * CHUNK)
            shown = server.get("/v1/requests?limit=1")["data"][0]
            took |= {stage["worker"] for stage in shown["stages"] if stage["name"] == "prefill"}
        until(lambda: moved(server).get("tcp", 0) > 0, "it to be told that something was pulled")
        assert here.poll() is None
        assert away.poll() is None
