"""Prompts that come again are not encoded again, and nobody can tell it from the pictures."""

from __future__ import annotations

import hashlib
import os
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tools.server import Server, serving, until

PROMPT = "a blue star on black"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose arenas are smaller than all that is encoded for it."""
    arguments = ["--workers", "encoder=1,denoiser+decoder=1", "--arena", "256KiB"]
    with serving(tmp_path_factory.mktemp("shared"), *arguments, UNFUSE_LEASE__TTL_S="2") as server:
        yield server.ready()


def made(server: Server, prompt: str = PROMPT, **parameters: Any) -> tuple[str, dict[str, Any]]:
    """SHA-256 of the first picture of a request, and its text encoding as the request object has it."""
    request = server.submit(prompt, **{"num_inference_steps": 2, **parameters})
    ended = server.finished(request)
    assert ended["status"] == "completed", ended
    (encoding,) = [stage for stage in ended["stages"] if stage["name"] == "text_encode"]
    return hashlib.sha256(server.result(request)).hexdigest(), encoding


def counts(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    return {
        name: float(line.split()[1])
        for name in ("hits", "misses")
        for line in lines
        if line.startswith(f"unfuse_cache_{name}_total ")
    }


def used(server: Server) -> int:
    return sum(worker["used"] for worker in server.get("/v1/workers")["data"])


def test_repeated_prompt_reuses_the_cached_text_encoding(shared: Server) -> None:
    before = counts(shared)
    first, ran = made(shared, seed=1)
    second, found = made(shared, seed=2)
    assert (ran["cached"], ran["attempt"]) == (False, 1)
    assert (found["cached"], found["attempt"], found["worker"], found["run_s"]) == (True, 0, ran["worker"], 0.0)
    assert counts(shared) == {"hits": before["hits"] + 1, "misses": before["misses"] + 1}

    anew = [made(shared, seed=seed, cache=False) for seed in (1, 2)]

    assert [encoding["attempt"] for _, encoding in anew] == [1, 1]
    assert [picture for picture, _ in anew] == [first, second]
    assert first != second


def test_concurrent_requests_with_one_prompt_are_encoded_once(shared: Server) -> None:
    prompt, seeds = "a green ring on black", (1, 2, 3, 4)
    requests = [shared.submit(prompt, seed=seed, num_inference_steps=2) for seed in seeds]
    ended = [shared.finished(request) for request in requests]
    assert {one["status"] for one in ended} == {"completed"}
    encodings = [stage for one in ended for stage in one["stages"] if stage["name"] == "text_encode"]
    assert [(one["cached"], one["attempt"]) for one in encodings] == [(False, 1)] + [(True, 0)] * 3
    pictures = [hashlib.sha256(shared.result(request)).hexdigest() for request in requests]
    assert pictures == [made(shared, prompt, seed=seed, cache=False)[0] for seed in seeds]


@pytest.mark.parametrize(
    "other", [{"negative_prompt": "a ring on gray"}, {"guidance_scale": 1.0}, {"prompt": "a blue star on white"}]
)
def test_changed_prompt_or_guidance_misses_the_encoder_cache(shared: Server, other: dict[str, Any]) -> None:
    made(shared, seed=1)
    picture, encoding = made(shared, seed=1, **other)
    assert not encoding["cached"]
    assert made(shared, seed=1, cache=False, **other)[0] == picture
    assert made(shared, seed=1, **other)[1]["cached"]


@pytest.mark.nightly
def test_cached_encodings_are_evicted_when_the_arena_is_full(shared: Server) -> None:
    """Given more encodings than the arena holds, then all requests complete; one that is gone is made again."""
    prompts = [f"{PROMPT} {number}" for number in range(1, 61)]
    requests = [shared.submit(prompt, num_inference_steps=1, n=2) for prompt in prompts]
    assert {shared.finished(request)["status"] for request in requests} == {"completed"}
    until(lambda: used(shared) == 0, "the memory of requests to be free")
    again = [shared.submit(prompt, num_inference_steps=1) for prompt in prompts[::10]]
    assert {shared.finished(request)["status"] for request in again} == {"completed"}


def test_encoder_crash_loses_its_cache_and_images_stay_identical(shared: Server) -> None:
    picture, ran = made(shared, seed=5)
    (encoder,) = [worker for worker in shared.get("/v1/workers")["data"] if worker["id"] == ran["worker"]]
    os.kill(encoder["pid"], signal.SIGKILL)
    again, encoding = made(shared, seed=5)
    assert again == picture
    assert encoding["worker"] != ran["worker"] and not encoding["cached"]
    assert encoding["recomputes"] <= 1
    assert made(shared, seed=6)[1]["cached"]
