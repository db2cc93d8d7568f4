"""Language models on ranks, served: chats get the tokens of one rank, also where ranks die amid them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.integration.test_chat_faults import attempts, seen
from tools.server import Server, computes_of, environment, serving, unfuse
from tools.tiny_language import TEXT, make_language_model

LONG = [{"role": "user", "content": f"{TEXT} " * 40}]
"""Messages whose prompt is prefilled in several chunks, of which some are kept for others."""

GREEDY: dict[str, Any] = {
    "model": "tiny",
    "messages": LONG,
    "max_tokens": 200,
    "temperature": 0,
    "logit_bias": {"2": -100, "0": -100},
}
WORDS = {"type": "regex", "regex": "(yes|no), [0-9]{2} %"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("model") / "tiny", positions=2048)


@contextmanager
def chatting(folder: Path, where: Path, *more: str) -> Iterator[tuple[Server, openai.OpenAI]]:
    where.mkdir(exist_ok=True)
    flags = ["--served-model-name", "tiny", "--kv", "8MiB", "--threads", "1", *more]
    with (
        serving(where, str(folder), *flags) as server,
        openai.OpenAI(base_url=f"{server.ready().url}/v1", api_key="none", max_retries=0) as ai,
    ):
        yield server, ai


@pytest.fixture(scope="module")
def calm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of one rank."""
    with chatting(folder, tmp_path_factory.mktemp("calm")) as (_, ai):
        return str(ai.chat.completions.create(**GREEDY).choices[0].message.content)


def ranks_of(server: Server) -> dict[str, list[psutil.Process]]:
    """The compute processes of each worker, by its role."""
    return {one["role"]: computes_of(one["pid"]) for one in server.get("/v1/workers")["data"]}


@pytest.mark.nightly
def test_two_ranks_match_one_rank_and_survive_a_crash_of_either(folder: Path, tmp_path: Path, calm: str) -> None:
    """Given one worker of two ranks for prefill and decode, named by one word, when texts are asked for, alone and
    several at a time, drawn, held to a format, then they are as one rank makes them, or as they have to be; when one
    rank and then the other is killed amid texts, then these are whole, each token once."""
    with chatting(folder, tmp_path, "--parallel", "language=tensor:2", "--device", "cpu+cpu") as (server, ai):
        assert {role: len(ranks) for role, ranks in ranks_of(server).items()} == {"language": 2}
        create = ai.chat.completions.create
        assert create(**GREEDY).choices[0].message.content == calm
        again = create(**GREEDY | {"n": 3, "max_tokens": 40}, stop=["zzz"]).choices
        assert len({calm.startswith(one.message.content) for one in again}) == 1
        drawn = {**GREEDY, "temperature": 1, "seed": 5, "max_tokens": 40}
        assert create(**drawn).choices[0].message.content == create(**drawn).choices[0].message.content
        held = create(**drawn | {"logit_bias": {}}, extra_body={"response_format": WORDS}).choices[0]
        assert re.fullmatch(WORDS["regex"], held.message.content)
        for rank in (1, 0):
            saw, id = list[str](), ""
            for chunk in create(**GREEDY, stream=True):
                id = chunk.id
                saw += [choice.delta.content or "" for choice in chunk.choices]
                if len(saw) == 30:
                    sorted(ranks_of(server)["language"], key=lambda process: process.pid)[rank].kill()
            assert attempts(server, id) > 1
            assert "".join(saw) == calm


@pytest.mark.parametrize("spread", ["prefill=tensor:2", pytest.param("decode=tensor:2", marks=pytest.mark.nightly)])
def test_kv_is_transferred_between_different_tensor_parallel_degrees(
    folder: Path, tmp_path: Path, calm: str, spread: str
) -> None:
    """Also those that are found again."""
    with chatting(folder, tmp_path, "--parallel", spread) as (server, ai):
        role = spread.partition("=")[0]
        sizes = {"prefill": 1, "decode": 1, role: 2}
        assert {role: len(ranks) for role, ranks in ranks_of(server).items()} == sizes
        first = ai.chat.completions.create(**GREEDY)
        assert first.choices[0].message.content == calm
        again = ai.chat.completions.create(**GREEDY)
        assert again.choices[0].message.content == calm
        assert again.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--parallel", "language=tensor:4"], "tensor:4 does not divide 2: use tensor:2"),
        (["--parallel", "decode=shard:2"], "shard is not supported for this role; supported: tensor"),
        (["--parallel", "decode=tensor:2", "--workers", "language=1"], "set language=KIND:N for both"),
    ],
)
def test_invalid_parallel_flags_are_rejected_at_startup(
    folder: Path, tmp_path: Path, flags: list[str], says: str
) -> None:
    done = subprocess.run(
        unfuse("serve", str(folder), "--port", "0", *flags), capture_output=True, text=True, env=environment(tmp_path)
    )
    assert done.returncode != 0
    assert says in " ".join((done.stdout + done.stderr).split())


@pytest.mark.nightly
def test_exact_pool_on_ranks_is_bit_identical_after_a_rank_crash(folder: Path, tmp_path: Path) -> None:
    with chatting(folder, tmp_path, "--parallel", "language=tensor:2", "--batching", "exact") as (server, _):
        calm = [told for _, told in seen(server)]
        again = list[dict[str, Any]]()
        for _, told in seen(server):
            again.append(told)
            if len(again) == 20:
                ranks_of(server)["language"][1].kill()
    assert again == calm
