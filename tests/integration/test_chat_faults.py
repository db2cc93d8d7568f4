"""Chats whose workers die in the middle: what a client saw, and what is kept, beside a text that nobody disturbed."""

from __future__ import annotations

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tools.server import Server, computes_of, serving, until
from tools.tiny_language import TEXT, make_language_model

LONG = [{"role": "user", "content": f"{TEXT} " * 12}]
"""Messages whose prompt is prefilled in several chunks."""

TRIES = 5
"""How many texts are disturbed until one of them was, twice: on a busy machine the rest may be made before a kill."""

ASKED: dict[str, Any] = {
    "messages": LONG,
    "max_tokens": 400,
    "temperature": 1,
    "seed": 7,
    "logprobs": True,
    "top_logprobs": 3,
    "logit_bias": {"2": -100, "0": -100},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("model") / "tiny", positions=2048)


def serving_texts(folder: Path, where: Path, workers: str, batching: str) -> Any:
    flags = [
        "--served-model-name",
        "tiny",
        "--workers",
        workers,
        "--batching",
        batching,
        "--kv",
        "8MiB",
        "--threads",
        "1",
    ]
    return serving(where, str(folder), *flags)


def decoders(server: Server) -> list[psutil.Process]:
    """The workers that decode."""
    workers = server.get("/v1/workers")["data"]
    return [psutil.Process(one["pid"]) for one in workers if one["role"] in ("decode", "language")]


def kill_computes(server: Server) -> None:
    for process in computes_of(*(worker.pid for worker in decoders(server))):
        process.kill()


def kill_workers(server: Server) -> None:
    for worker in decoders(server):
        worker.kill()


def seen(server: Server, **asked: Any) -> Iterator[tuple[str, Any]]:
    """The tokens of a stream as its client gets them: (id of the request, what is told of a token)."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai:
        for chunk in ai.chat.completions.create(model="tiny", stream=True, **{**ASKED, **asked}):
            for told in chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []:
                yield chunk.id, told.model_dump()


def last_stage(server: Server, id: str) -> dict[str, Any]:
    return dict(server.get(f"/v1/requests/{id}")["stages"][-1])


def attempts(server: Server, id: str) -> int:
    """How often the text was begun."""
    return int(last_stage(server, id)["attempt"])


def begun_again(server: Server, id: str) -> bool:
    """Whether a second attempt has begun, or the text has ended before anybody could see that."""
    found = last_stage(server, id)
    return found["status"] == "done" or (found["status"] == "leased" and found["attempt"] > 1)


def disturbed(server: Server) -> list[tuple[str, Any]]:
    """The tokens of a text whose compute process is killed in the middle, and then the whole worker."""
    came = list[tuple[str, Any]]()
    for one in seen(server):
        came.append(one)
        if len(came) == 20:
            kill_computes(server)
            until(lambda: begun_again(server, came[0][0]), "a second attempt, which the next kill is to end")
        if len(came) == 100:
            kill_workers(server)
    return came


@pytest.mark.parametrize("workers", [pytest.param("language=1", marks=pytest.mark.nightly), "prefill=1,decode=1"])
def test_exact_pool_logprobs_are_bit_identical_after_decoder_crashes(
    folder: Path, tmp_path: Path, workers: str
) -> None:
    """Given a text drawn at random, and how probable each of its tokens was, when it is asked for again, and first the
    compute process is killed in the middle, then the whole worker, then its client sees the same, bit by bit."""
    with serving_texts(folder, tmp_path, workers, "exact") as server:
        calm = [told for _, told in seen(server.ready())]
        assert len(calm) == ASKED["max_tokens"]
        for _ in range(TRIES):
            again = disturbed(server.ready())
            assert [told for _, told in again] == calm
            if attempts(server, again[0][0]) > 2:
                break
        else:
            pytest.fail("each text ended before the second kill")


@pytest.mark.nightly
def test_batched_pool_streams_match_the_stored_result_after_crashes(folder: Path, tmp_path: Path) -> None:
    """Given texts that share forwards, when their compute process is killed in the middle, then their worker, then each
    client has seen every token that is kept, once, in its order."""
    came = Counter[int]()

    def read(server: Server, seed: int) -> tuple[str, list[Any]]:
        made = list[tuple[str, Any]]()
        for one in seen(server, seed=seed):
            made.append(one)
            came[seed] += 1
        return made[0][0], [told for _, told in made]

    with serving_texts(folder, tmp_path, "language=1", "batched") as server, ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(read, server.ready(), seed) for seed in range(4)]
        for count, kill in ((20, kill_computes), (100, kill_workers)):
            until(lambda count=count: all(came[seed] >= count for seed in range(4)), "some tokens of each text")
            kill(server)
        for id, saw in (one.result() for one in reading):
            assert attempts(server, id) > 1
            answer = json.loads(server.result(id))
            assert len(saw) == ASKED["max_tokens"]
            assert [(told["bytes"], told["logprob"]) for told in saw] == [
                ([*b64decode(own[0])], logprob) for _, _, logprob, _, own in answer["pieces"]
            ]
