"""A model that sees, served: pictures of chats are encoded apart from prefill, and that apart from decoding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.seen import SIZES, as_templates_read, draw, said, shown, undivided
from tools.server import Server, serving
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
def chats(pictures: list[Path]) -> list[list[dict[str, Any]]]:
    """One with two pictures, and one with none."""
    parts = [said("what is "), shown(pictures[0]), said(" and what is "), shown(pictures[1])]
    return [[{"role": "system", "content": "the lazy dog"}, {"role": "user", "content": parts}], TEXT]


@pytest.fixture(scope="module")
def expected(folder: Path, pictures: list[Path], chats: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    each = [[str(file) for file in pictures], []]
    return undivided([
        {"folder": str(folder), "messages": as_templates_read(chat), "pictures": files, "most": MOST}
        for chat, files in zip(chats, each, strict=True)
    ])  # fmt: skip


@pytest.fixture(scope="module", params=[(), ("--workers", SPLIT)], ids=["default", "split"])
def server(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    named = "--served-model-name", "tiny"
    with serving(tmp_path_factory.mktemp("serve"), str(folder), *named, *request.param) as server:
        yield server.ready()


def asked(server: Server, messages: Any, **more: Any) -> Any:
    given = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": MOST, **more}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai:
        return ai.chat.completions.create(**given)


def test_chats_with_pictures_and_without_get_the_tokens_of_the_undivided_model(
    server: Server, chats: list[list[dict[str, Any]]], expected: list[dict[str, Any]]
) -> None:
    for chat, whole in zip(chats, expected, strict=True):
        made = asked(server, chat)
        assert made.choices[0].message.content == whole["text"]
        assert made.usage.prompt_tokens == len(whole["prompt"])
