"""The encoder cache as clients see it: a switch, a mark on the stage, and two counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.server.served import MOVING, PICTURES, Served, picture, serve

IMAGES, VIDEOS = "/v1/images/generations", "/v1/videos"


@pytest.fixture(scope="module")
def caching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("results")
    with serve(folder, keys=["a key-a", "b key-b"], cards=(PICTURES, MOVING), cache_bytes=1000) as running:
        yield running


@pytest.fixture
def http(caching: Served) -> Iterator[httpx2.Client]:
    headers = {"authorization": "Bearer key-a"}
    with httpx2.Client(base_url=caching.url, headers=headers, timeout=600, trust_env=False) as client:
        yield client


def cached(http: httpx2.Client, id: str) -> dict[str, tuple[bool, int, str]]:
    """Of each stage of a request: whether it was cached, its attempt, and whose output it has."""
    stages = http.get(f"/v1/requests/{id}").json()["stages"]
    return {stage["name"]: (stage["cached"], stage["attempt"], stage["worker"]) for stage in stages}


def made(http: httpx2.Client, prompt: str, **more: Any) -> dict[str, tuple[bool, int, str]]:
    answer = http.post(IMAGES, json={"model": PICTURES.name, "prompt": prompt, **more})
    assert answer.status_code == 200, answer.text
    return cached(http, answer.json()["id"])


RUN, HIT = (False, 1, "worker-1"), (True, 0, "worker-1")


def counts(http: httpx2.Client) -> list[float]:
    lines = http.get("/metrics").text.splitlines()
    return [
        float(line.split()[1])
        for line in lines
        if line.startswith(("unfuse_cache_hits", "unfuse_cache_misses")) and "_total " in line
    ]


def test_cached_stage_is_marked_in_the_request_and_counted(caching: Served, http: httpx2.Client) -> None:
    hits, misses = counts(http)
    assert made(http, "a cat") == {"text_encode": RUN, "denoise.0": RUN, "vae_decode.0": RUN}
    assert made(http, "a cat", seed=7) == {"text_encode": HIT, "denoise.0": RUN, "vae_decode.0": RUN}
    assert counts(http) == [hits + 1, misses + 1]
    lines = http.get("/metrics").text.splitlines()
    ran = 'unfuse_stage_latency_seconds_count{model="test/pictures",stage="text_encode"} 1.0'
    assert ran in lines, "what was not run took no time"


@pytest.mark.parametrize("off", [False, "false"])
def test_cache_false_bypasses_the_encoder_cache(http: httpx2.Client, off: object) -> None:
    prompt, before = f"a dog {off!r}", counts(http)
    assert made(http, prompt, cache=off)["text_encode"] == RUN
    assert counts(http) == before
    assert made(http, prompt, cache=True)["text_encode"] == RUN
    assert made(http, prompt, cache=off)["text_encode"] == RUN
    assert made(http, prompt, cache=None)["text_encode"] == HIT


def test_encoder_cache_is_separate_for_each_tenant(caching: Served, http: httpx2.Client) -> None:
    made(http, "a secret")
    with httpx2.Client(base_url=caching.url, headers={"authorization": "Bearer key-b"}, trust_env=False) as other:
        assert made(other, "a secret")["text_encode"] == RUN


def test_cache_parameter_works_in_video_forms(caching: Served, http: httpx2.Client) -> None:
    def asked(**fields: str) -> tuple[bool, int, str]:
        answer = http.post(
            VIDEOS,
            data={"model": MOVING.name, "prompt": "it moves", **fields},
            files={"input_reference": ("a.png", picture(3), "image/png")},
        )
        id = answer.json()["id"]
        caching.next_event(id, "completed")
        return cached(http, id)["text_encode"]

    assert [asked(), asked(cache="false"), asked(cache="true")] == [RUN, RUN, HIT]


def test_invalid_cache_value_returns_400(http: httpx2.Client) -> None:
    answer = http.post(IMAGES, json={"model": PICTURES.name, "prompt": "a", "cache": "sometimes"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache")
    assert "cache must be one of true, false" in answer.json()["error"]["message"]
