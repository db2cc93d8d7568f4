"""Pictures that a model's safety checker flags are an error, or marked, and never black."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest

from tests.answers.sampled import SEED, SIZE, TOGETHER, called, drawn, pixels_of
from tools.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.row("P21", "K7")]

ASKED = {"size": "32x32", "num_inference_steps": 4}


@pytest.fixture
def server(sampled: Callable[[str], Path], served: Callable[..., Server]) -> Server:
    return served(*map(sampled, TOGETHER))


@pytest.fixture
def model(sampled: Callable[[str], Path]) -> Path:
    return sampled("checked")


def flagged_seed(model: Path, out: Path) -> tuple[int, dict[int, np.ndarray]]:
    """Of SEED and SEED + 1 the one that diffusers flags, and what it makes of both."""
    params = {"prompt": "cats", **SIZE}
    seeds = {str(seed): seed for seed in (SEED, SEED + 1)}
    folder = str(model)
    made = called(out, [{"name": n, "folder": folder, "params": params, "seed": s} for n, s in seeds.items()])
    flagged = [seed for name, seed in seeds.items() if made[name][1] == [True]]
    assert len(flagged) == 1
    return flagged[0], {seed: made[name][0] for name, seed in seeds.items()}


def test_flagged_images_are_marked_and_return_400_if_all_are(model: Path, server: Server, tmp_path: Path) -> None:
    flagged, wanted = flagged_seed(model, tmp_path)
    assert not wanted[flagged].any(), "diffusers makes a flagged picture black"

    both = drawn(server, model, n=2, **ASKED)
    for picture in both:
        if picture["seed"] == flagged:
            assert picture == {"seed": flagged, "b64_json": None, "flagged": True}
        else:
            assert np.array_equal(pixels_of(picture), wanted[picture["seed"]][0])
    with pytest.raises(HTTPError) as refused:
        drawn(server, model, seed=flagged, **ASKED)
    error = json.loads(refused.value.read())["error"]
    assert refused.value.code == 400
    assert (error["code"], error["type"]) == ("moderation_blocked", "image_generation_user_error")
    assert "safety checker flagged" in error["message"]


def test_flagged_images_are_marked_in_request_objects_and_streams(model: Path, server: Server, tmp_path: Path) -> None:
    flagged, _ = flagged_seed(model, tmp_path)
    body = {"model": str(model), "prompt": "cats", "seed": SEED, "n": 2, **ASKED}

    told = server.post("/v1/images/generations", body, prefer="respond-async")
    request = server.finished(told["id"])

    marks = [file.get("flagged", False) for file in request["result"]]
    assert (request["status"], marks) == ("completed", [flagged == SEED, flagged == SEED + 1])

    call = urllib.request.Request(
        f"{server.url}/v1/images/generations",
        json.dumps({**body, "stream": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(call) as answer:
        lines = [
            line.removeprefix("data: ") for line in answer.read().decode().splitlines() if line.startswith("data:")
        ]
    events = [json.loads(line) for line in lines if "completed" in line]
    assert [event.get("flagged", False) for event in events] == marks
    assert [bool(event["b64_json"]) for event in events] == [not mark for mark in marks]
