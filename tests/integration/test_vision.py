"""A model that sees, served: pictures of chats are encoded apart from prefill, and that apart from decoding."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.seen import SIZES, as_templates_read, data_url, draw, said, shown, undivided
from tools.server import Server, computes_of, serving
from tools.tiny_vision import KINDS, make_vision_model

pytestmark = pytest.mark.slow
MOST = 10
TEXT = [{"role": "user", "content": "what is the capital of France"}]
SPLIT = "vision=1,prefill=1,decode=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model") / "tiny", KINDS[0])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    return [draw(folder / f"{number}.png", *size, number) for number, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Eight frames of a video."""
    folder = tmp_path_factory.mktemp("frames")
    return [draw(folder / f"{number}.png", 112, 112, number) for number in range(8)]


@pytest.fixture(scope="module")
def chats(pictures: list[Path], frames: list[Path]) -> list[list[dict[str, Any]]]:
    """One with two pictures and a video of eight frames, and one with text alone."""
    video = {"type": "video", "video": [data_url(frame) for frame in frames], "fps": 2}
    parts = [said("what is "), shown(pictures[0]), said(" and what is "), shown(pictures[1]), video]
    return [[{"role": "system", "content": "the lazy dog"}, {"role": "user", "content": parts}], TEXT]


@pytest.fixture(scope="module")
def expected(
    folder: Path, pictures: list[Path], frames: list[Path], chats: list[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    seen = {"pictures": [str(file) for file in pictures], "frames": [str(file) for file in frames], "fps": 2}
    cases = zip(chats, (seen, {}), strict=True)
    return undivided(
        [{"folder": str(folder), "messages": as_templates_read(chat), "most": MOST, **shows} for chat, shows in cases]
    )


@pytest.fixture(scope="module", params=[(), ("--workers", SPLIT)], ids=["default", "split"])
def server(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    named = "--served-model-name", "tiny"
    with serving(tmp_path_factory.mktemp("serve"), str(folder), *named, *request.param) as server:
        yield server.ready()


def asked(server: Server, messages: Any, **more: Any) -> Any:
    given = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": MOST, **more}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai:
        return ai.chat.completions.create(**given)


def test_chats_with_and_without_images_match_undivided_model(
    server: Server, chats: list[list[dict[str, Any]]], expected: list[dict[str, Any]]
) -> None:
    for chat, whole in zip(chats, expected, strict=True):
        made = asked(server, chat)
        assert made.choices[0].message.content == whole["text"]
        assert made.usage.prompt_tokens == len(whole["prompt"])


def hits(server: Server) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("unfuse_cache_hits_total"))


def test_equal_images_of_several_chats_are_encoded_once(server: Server, pictures: list[Path]) -> None:
    """Given two chats at one time and one later, which show a picture in other places, then it is encoded once."""
    before = hits(server)
    seldom = draw(pictures[0].with_name("seldom.webp"), 77, 77, 5)
    one = [{"role": "user", "content": [shown(seldom), said("what is it")]}]
    other = [{"role": "user", "content": [said("the fox and"), shown(pictures[0]), shown(seldom)]}]
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda chat: asked(server, chat), (one, other))
    assert asked(server, one).choices[0].message.content == first.choices[0].message.content
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert hits(server) >= before + 2


def test_prefix_before_image_is_cached_across_different_images(server: Server) -> None:
    """Given a long text, when chats show different pictures behind it, then whole chunks of it are found; those before
    a picture alone, and with it where it is the same."""
    lead = {"role": "system", "content": "the quick brown fox jumps over the lazy dog " * 30}
    folder = server.folder
    one, other = (draw(folder / f"behind{number}.png", 64, 64, 90 + number) for number in range(2))
    chats = [[lead, {"role": "user", "content": [shown(file), said("what is it")]}] for file in (one, other, one)]
    cached = [asked(server, chat).usage.prompt_tokens_details.cached_tokens for chat in chats]
    text = asked(server, [lead, {"role": "user", "content": "what is it"}]).usage
    assert cached[0] == 0 < cached[1] == cached[2] == text.prompt_tokens_details.cached_tokens


def test_image_chat_stream_is_complete_after_decode_process_kill(
    server: Server, chats: list[list[dict[str, Any]]]
) -> None:
    """Given a stream that has begun, when the compute process that decodes is killed, then the rest of the text
    follows, of which keys and values are made again from what was encoded."""
    more = {"max_tokens": 200, "logit_bias": {"2": -100, "0": -100}}
    calm = asked(server, chats[0], **more).choices[0].message.content
    said = ""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai:
        made: Any = {"model": "tiny", "messages": chats[0], "temperature": 0, "stream": True, **more}
        for chunk in ai.chat.completions.create(**made):
            text = chunk.choices[0].delta.content or ""
            if text and not said:
                workers = [one for one in server.get("/v1/workers")["data"] if one["role"] in ("decode", "all")]
                for process in computes_of(*(one["pid"] for one in workers)):
                    process.kill()
            said += text
    assert said == calm


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags",
    [
        ["--parallel", "vision=tensor:2,language=tensor:2"],
        ["--parallel", "vision=tensor:2", "--workers", "all=1"],
        ["--parallel", "language=tensor:2", "--workers", "all=1"],
    ],
    ids=["both", "what sees", "what speaks"],
)
def test_tensor_parallel_vision_chats_match_undivided_model(
    folder: Path, tmp_path: Path, chats: list[list[dict[str, Any]]], expected: list[dict[str, Any]], flags: list[str]
) -> None:
    """Also where only some of a worker's stages are spread over its ranks, and the others are whole on each."""
    with serving(tmp_path, str(folder), "--served-model-name", "tiny", "--threads", "1", *flags) as server:
        for messages, whole in zip(chats, expected, strict=True):
            assert asked(server.ready(), messages).choices[0].message.content == whole["text"]
