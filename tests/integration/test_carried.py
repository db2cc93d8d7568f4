"""What one device can, ranks can: adapters, previews, batches, videos that are read while they are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.pictures import SHAPES
from tests.integration.test_ranks import alike
from tests.integration.test_stream import content, frames
from tools.server import Server, serving
from tools.tiny import adapter

LORAS: list[dict[str, Any]] = [{"lora": "plain"}, {"lora": "plain", "lora_scale": 0.4}, {}]
ADAPTED = [{"seed": seed, **lora} for seed, lora in enumerate(LORAS * 2)]
ALIKE: list[dict[str, Any]] = [{"seed": seed, "negative_prompt": "blue" if seed % 2 else ""} for seed in range(8)]
FILM = {"prompt": "a red circle on white", "seed": 3, "num_frames": 17, "num_inference_steps": 4, "size": "64x64"}
SPREAD = "--parallel", "denoiser=ulysses:2", "--collective-s", "20"


def server_of(folder: Path, *arguments: str) -> Iterator[Server]:
    loras = folder / "loras"
    loras.mkdir()
    adapter(SHAPES, loras, "plain", 1)
    with serving(folder, "--threads", "1", "--loras", str(loras), *arguments) as server:
        yield server.ready()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from server_of(tmp_path_factory.mktemp("one"), "--workers", "all=1")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A worker with all stages, of which only denoising is spread: the others are the same on both ranks."""
    yield from server_of(tmp_path_factory.mktemp("ranks"), "--workers", "all=1", *SPREAD)


def made(server: Server, cases: list[dict[str, Any]]) -> list[bytes]:
    """Their pictures, asked for at once."""
    asked = [server.submit("a red circle on white", num_inference_steps=6, **case) for case in cases]
    assert {server.finished(request)["status"] for request in asked} == {"completed"}
    return [server.result(request) for request in asked]


@pytest.mark.nightly
def test_lora_and_batches_on_two_ranks_match_one_rank(one: Server, ranks: Server) -> None:
    for cases in (ADAPTED, ALIKE):
        alone = [made(ranks, [case])[0] for case in cases]
        assert len({*alone}) == len(cases)
        assert all(map(alike, alone, made(one, cases)))
        assert made(ranks, cases) == alone
        assert made(ranks, cases) == alone, "and again, with what is known by then of sharing forwards"
    shares = [
        pool["batch_invariance"]["largest"]
        for pool in ranks.get("/v1/pools")["data"]
        if pool["id"].startswith("denoise")
    ]
    assert max(shares) > 1


def test_previews_are_emitted_by_ulysses_ranks(ranks: Server) -> None:
    request = ranks.submit("a red circle on white", num_inference_steps=6, preview_every=2)
    shown = [event["step"] for event in ranks.events(request) if event["type"] == "preview"]
    assert shown == [2, 4]


def test_streamed_video_of_two_ranks_matches_one_rank(one: Server, ranks: Server) -> None:
    streamed = []
    for server in (one, ranks):
        with content(server, str(server.post("/v1/videos", FILM)["id"]), "?stream=1") as answer:
            streamed.append(answer.read())
    on_one, on_ranks = map(frames, streamed)
    assert on_one.shape == on_ranks.shape == (17, 64, 64, 3)
    assert np.abs(on_one.astype(int) - on_ranks).mean() < 1, "files differ by what rounding does to their encoding"


@pytest.mark.nightly
@pytest.mark.parametrize("spread", ["ulysses:2", "ring:2", "cfg:2"])
def test_batched_pool_on_two_ranks_shares_forwards(spread: str, one: Server, tmp_path: Path) -> None:
    alone = [made(one, [case])[0] for case in ALIKE]
    for ranks in server_of(tmp_path, "--batching", "batched", "--parallel", f"denoiser={spread}"):
        asked = made(ranks, ALIKE)
        assert all(map(alike, asked, alone))
        stages = [stage for request in ranks.get("/v1/requests?limit=8")["data"] for stage in request["stages"]]
        assert max(stage["batch"] for stage in stages if stage["name"] == "denoise.0") > 1
