"""Chats that show pictures and a video over two hosts: encoders and decode on one, prefill on the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.seen import SIZES, as_templates_read, data_url, draw, said, shown, undivided
from tests.integration.test_nodes import keys, moved, other_host
from tests.netns import SecondHost
from tools.redis_server import RedisServer
from tools.server import computes_of, serving, until
from tools.tiny_vision import make_vision_model

__all__ = ["keys", "other_host"]
pytestmark = pytest.mark.nightly
MOST = 12


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VLMoe"])
def test_vision_chat_across_hosts_matches_the_undivided_model(
    kind: str, tmp_path: Path, other_host: SecondHost, keys: list[str], redis_server: RedisServer
) -> None:
    """Given two pictures and a video of eight frames, encoded on one host, when they are prefilled on another and
    decoded on the first, then the tokens are the undivided model's; also when one of the encoders dies amid twenty
    pictures, of which both have encoded some."""
    folder, side = make_vision_model(tmp_path / "tiny", kind), 112 if kind == "Qwen2_5_VL" else 128
    stills = [draw(tmp_path / f"still{number}.png", *size, number) for number, size in enumerate(SIZES)]
    frames = [draw(tmp_path / f"frame{number}.png", side, side, number) for number in range(8)]
    many = [draw(tmp_path / f"one{number}.png", 60, 60, 50 + number) for number in range(20)]
    video = {"type": "video", "video": [data_url(frame) for frame in frames], "fps": 2}
    parts = [said("what is "), shown(stills[0]), said(" and "), shown(stills[1]), video, said("the fox")]
    chat, crowd = ([{"role": "user", "content": content}] for content in (parts, [shown(file) for file in many]))
    shows = {"pictures": [str(file) for file in stills], "frames": [str(file) for file in frames], "fps": 2}
    whole, crowded = undivided(
        [
            {"folder": str(folder), "messages": as_templates_read(messages), "most": MOST, **each}
            for messages, each in ((chat, shows), (crowd, {"pictures": [str(file) for file in many]}))
        ]
    )
    options = [*keys, "--queue", redis_server.url, "--workers", "prefill=1", "--threads", "1"]
    with (
        serving(tmp_path, str(folder), *options, "--served-model-name", "tiny", at=other_host.near) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai,
    ):
        until(lambda: server.get("/health"), "the server to answer", server.process)
        there = [
            server.worker(role, *keys, "--threads", "1", within=other_host.enter)
            for role in ("vision", "vision", "decode")
        ]
        until(lambda: len(server.get("/v1/workers")["data"]) == 4, "all workers", server.process)
        server.ready()

        def answered(messages: Any) -> Any:
            asked = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": MOST}
            return ai.chat.completions.create(**asked, extra_body={"cache": False})

        def encoders() -> list[str]:
            """Who encoded the newest chat's pictures."""
            stages = server.get("/v1/requests?limit=1")["data"][0]["stages"]
            return [stage["worker"] for stage in stages if stage["name"].startswith("vision_encode")]

        def both_encode_some() -> bool:
            assert answered(crowd).choices[0].message.content == crowded["text"]
            return len({*encoders()}) == 2

        made = answered(chat)
        assert made.choices[0].message.content == whole["text"]
        assert made.usage.prompt_tokens == len(whole["prompt"])
        until(lambda: moved(server).get("tcp", 0) > 0, "it to be told that something was pulled")
        until(both_encode_some, "both encoders to have some of one chat's pictures", server.process)
        assert len(encoders()) == 20
        for process in computes_of(there[0].pid):
            process.kill()
        server.killed(there[0])
        assert answered(crowd).choices[0].message.content == crowded["text"]
        assert answered(chat).choices[0].message.content == whole["text"]
