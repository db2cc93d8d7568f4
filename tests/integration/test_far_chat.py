"""Chats with all that may stand between: a queue in Redis, prefill on one host and decode on another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.test_chat import ASKED, GREEDY
from tests.integration.test_nodes import keys, moved, other_host
from tests.netns import SecondHost
from tools.redis_server import RedisServer
from tools.server import computes_of, serving, until
from tools.tiny_language import make_language_model
from unfuse.client import connect

__all__ = ["keys", "other_host"]
pytestmark = pytest.mark.nightly

LONG = {**GREEDY, "max_tokens": 300, "logit_bias": {"2": -100, "0": -100}}


def test_chat_across_hosts_is_identical_also_after_decoder_crashes(
    tmp_path: Path, other_host: SecondHost, keys: list[str], redis_server: RedisServer
) -> None:
    """Given a text made on one host, when the next is prefilled there and decoded on another host, then its tokens are
    the same; also when the decoder's compute process, or the decoder itself, is killed amid it."""
    folder = make_language_model(tmp_path / "tiny", positions=1024)
    options = [*keys, "--queue", redis_server.url, "--workers", "prefill=1", "--kv", "8MiB", "--threads", "1"]
    with serving(tmp_path, str(folder), *options, at=other_host.near) as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        here = server.worker("decode", *keys, "--kv", "8MiB", "--threads", "1")
        with connect(server.ready().url) as client:
            calm = "".join(client.chat(ASKED, **LONG))
            server.killed(here)
            away = server.worker("decode", *keys, "--kv", "8MiB", "--threads", "1", within=other_host.enter)
            assert "".join(client.chat(ASKED, **LONG)) == calm
            assert moved(server).get("tcp", 0) > 0
            held = {"type": "regex", "regex": "[a-f]{20}"}
            assert re.fullmatch("[a-f]{20}", "".join(client.chat(ASKED, response_format=held, max_tokens=60)))
            for how in ("compute", "worker"):
                said = ""
                for part in client.chat(ASKED, **LONG):
                    if part and not said:
                        if how == "compute":
                            workers = [one for one in server.get("/v1/workers")["data"] if one["role"] == "decode"]
                            for process in computes_of(*(one["pid"] for one in workers)):
                                process.kill()
                        else:
                            server.killed(away)
                            server.worker("decode", *keys, "--kv", "8MiB", within=other_host.enter)
                    said += part
                assert said == calm
