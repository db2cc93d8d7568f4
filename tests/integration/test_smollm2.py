"""A real language model, served: real weights from a GGUF file, and an answer that is known to be right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import unfuse
from tests.integration.test_nodes import keys, moved, other_host
from tests.netns import SecondHost
from tests.smollm2 import CAPITAL, NAME, smollm
from tools.redis_server import RedisServer
from tools.server import serving, until
from unfuse.client import Client, connect

__all__ = ["keys", "other_host", "smollm"]
pytestmark = pytest.mark.usefixtures("smollm")

CAPITALS = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 20}},
    "required": ["capital"],
    "additionalProperties": False,
}
CITY = {"type": "json_schema", "json_schema": {"name": "city", "schema": CAPITALS}}
CITIES = {**CAPITALS, "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": CITIES}}
KV = ("--kv", "512MiB", "--threads", "1")


def answer(client: Client) -> str:
    return "".join(client.chat(CAPITAL, temperature=0, max_tokens=12))


@pytest.mark.nightly
def test_smollm2_chat_json_and_tool_call_are_correct_in_local_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """In workers of this process's own, as a script has them."""
    monkeypatch.setenv("UNFUSE_SERVE__WORKERS", "all=1")
    monkeypatch.setenv("UNFUSE_KV__BYTES", "512MiB")
    with unfuse.local(NAME, threads=1) as client:
        assert "Paris" in answer(client)
        asked = f"{CAPITAL} Answer as JSON with the key capital."
        said = json.loads("".join(client.chat(asked, temperature=0, max_tokens=40, response_format=CITY)))
        assert said == {"capital": "Paris"}
        chat = client.chat("What is the weather in Rome?", temperature=0, tools=[WEATHER], tool_choice="required")
        assert "".join(chat) == "" and chat.finish_reason == "tool_calls"
        (call, *_) = chat.tool_calls
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Rome"})


@pytest.mark.nightly
def test_smollm2_completion_is_correct_with_split_prefill_and_decode(tmp_path: Path) -> None:
    with (
        serving(tmp_path, NAME, "--workers", "prefill=1,decode=1", *KV) as server,
        connect(server.ready().url) as client,
    ):
        assert "Paris" in answer(client)
        roles = {worker["role"] for worker in server.get("/v1/workers")["data"]}
        assert roles == {"prefill", "decode"}


@pytest.mark.nightly
def test_smollm2_completion_is_correct_when_kv_crosses_hosts(
    tmp_path: Path, other_host: SecondHost, keys: list[str], redis_server: RedisServer
) -> None:
    """Given a gateway without workers whose queue is in Redis, when one host prefills and the other decodes, then the
    keys and values cross between them, and the answer is right."""
    options = [*keys, "--queue", redis_server.url, "--workers", "prefill=1", *KV]
    with serving(tmp_path, NAME, *options, at=other_host.near) as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        server.worker("decode", *keys, *KV, within=other_host.enter)
        with connect(server.ready().url) as client:
            assert "Paris" in answer(client)
        until(lambda: moved(server).get("tcp", 0) > 0, "what was moved to be told", server.process)
