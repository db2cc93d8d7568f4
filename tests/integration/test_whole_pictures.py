"""Pipelines without a family that see several pictures, undivided: the pixels of diffusers' own call.

Their processors are transformers', which need torchvision; without it, tests/models/test_whole.py has what is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.pictures import digest, undivided
from tests.models.conftest import draw_pictures
from tools.server import START_S, Server, serving
from tools.tiny import SERVING
from tools.tiny_whole import build

MISSING = not find_spec("torchvision")
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(MISSING, reason="these processors need torchvision")]

KINDS = ("flux2", "qwen-edit-plus")

PLAIN = {"prompt": "a ring", "seed": 1}
CASES: list[dict[str, Any]] = [
    {**PLAIN, "model": "flux2"},
    {**PLAIN, "model": "flux2", "image": ["sea.png"]},
    {**PLAIN, "model": "flux2", "image": ["sea.png", "wall.jpg"]},
    {**PLAIN, "model": "flux2", "image": ["wall.jpg", "sea.png", "sea.png"], "guidance_scale": 2.0},
    {**PLAIN, "model": "qwen-edit-plus", "image": ["wall.jpg"]},
    {**PLAIN, "model": "qwen-edit-plus", "image": ["wall.jpg", "sea.png"]},
    {**PLAIN, "model": "qwen-edit-plus", "image": ["sea.png", "wall.jpg"], "negative_prompt": "blurred"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    draw_pictures(root)
    return root


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = [argument for kind in KINDS for argument in (str(folder / kind), "--served-model-name", kind)]
    for kind in KINDS:
        build(kind, folder / kind)
    with serving(tmp_path_factory.mktemp("serve"), *models, "--arena", "64MiB", OMP_NUM_THREADS="1") as server:
        yield server.ready()


def test_requests_with_several_images_match_diffusers_pixels(server: Server, folder: Path) -> None:
    """Of both models, which take turns, by the client of OpenAI."""
    expected = undivided(Path(), folder, [{**SERVING, **case} for case in CASES])
    assert len({tuple(one) for one in expected}) == len(CASES)

    made = []
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=START_S) as client:
        for case in CASES:
            own = {"model": case["model"], "prompt": case["prompt"], "size": "32x32"}
            extra = {name: str(case[name]) for name in case.keys() - {"model", "prompt", "image"}}
            if "image" in case:
                reply = client.images.edit(**own, image=[folder / one for one in case["image"]], extra_body=extra)
            else:
                reply = client.images.generate(**own, extra_body=extra)
            made.append((reply.model_extra or {})["id"])
        with pytest.raises(openai.BadRequestError, match="qwen-edit-plus needs a picture to start from"):
            client.images.generate(prompt="a ring", model="qwen-edit-plus")

    assert [[digest(server.result(request))] for request in made] == expected
    stages = [server.get(f"/v1/requests/{request}")["stages"] for request in made]
    assert {stage["name"] for told in stages for stage in told} == {"whole.0"}


def test_model_object_lists_number_of_reference_images(server: Server) -> None:
    said = {one["id"]: (one["takes_image"], one["references"]) for one in server.get("/v1/models")["data"]}
    assert said == {"flux2": (False, 8), "qwen-edit-plus": (True, 8)}
