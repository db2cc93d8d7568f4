"""A model whose transformer and encoder torchao has quantized is served as others: pixels of undivided diffusers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pictures import digest, undivided
from tools.server import Server, serving
from tools.tiny import SERVING, adapter, build, quantized

CASES: list[dict[str, Any]] = [
    {"prompt": "a red circle", "seed": 3},
    {"prompt": "a ring", "seed": 5},
    {"prompt": "a ring", "seed": 6},
    {"prompt": "a star", "seed": 7, "num_inference_steps": 6},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    build("flux", folder / "flux")
    adapter(folder / "flux", folder / "loras", "plain", 1)
    quantized(folder / "flux", folder / "packed", "Int8WeightOnlyConfig")
    return folder


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    names = [word for name in ("packed", "flux") for word in (str(root / name), "--served-model-name", name)]
    own = "--loras", str(root / "loras"), "--arena", "64MiB"
    with serving(tmp_path_factory.mktemp("serve"), *names, *own) as server:
        yield server.ready()


@pytest.mark.nightly
def test_quantized_images_match_undivided_pipeline(server: Server, root: Path) -> None:
    arguments = [{"model": "packed", **SERVING, **case} for case in CASES]
    expected = [frames[0] for frames in undivided(Path(), root, arguments)]
    ids = [server.submit(model="packed", **case) for case in CASES]
    assert [server.finished(id)["status"] for id in ids] == ["completed"] * len(ids)
    assert [digest(server.result(id)) for id in ids] == expected


@pytest.mark.nightly
def test_loras_are_listed_only_for_unquantized_models(server: Server) -> None:
    listed = {model["id"]: model["loras"] for model in server.get("/v1/models")["data"]}
    assert listed == {"packed": [], "flux": ["plain"]}
