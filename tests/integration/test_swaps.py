"""Two models on a device that has room for one at a time: real servers and clients, tiny weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pictures import SHAPES, digest
from tools.server import Server, serving, until
from unfuse.launch.placement import PROCESS

ONE = f"cpu={PROCESS + (64 << 20) + (18 << 20)}"
"""Room for a worker of one of the models, which take 15 MiB, and for no second denoiser of 8 MiB."""

ASKED = {"prompt": "a red circle on white", "size": "64x64", "num_inference_steps": 2}
MODELS = "plain", "shifted"


@pytest.fixture(scope="module")
def sibling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with another noise scheduler: it shares the encoder and the VAE, and not the denoiser."""
    folder = shutil.copytree(SHAPES, tmp_path_factory.mktemp("models") / "sibling")
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shift": 6.0}))
    return folder


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory, sibling: Path) -> Iterator[Server]:
    names = [text for name in MODELS for text in ("--served-model-name", name)]
    arguments = ["unfuse/shapes", str(sibling), *names, "--arena", "64MiB", "--device-memory", ONE]
    with serving(tmp_path_factory.mktemp("capped"), *arguments, "--log-level", "info") as server:
        yield server.ready()


def said(server: Server) -> str:
    return (server.folder / "serve.log").read_text()


def worker(server: Server) -> dict[str, Any]:
    (found,) = [one for one in server.get("/v1/workers")["data"] if one["healthy"]]
    return dict(found)


def swaps(server: Server) -> int:
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        page = answer.read().decode()
    return int(sum(map(float, re.findall(r"^unfuse_swaps_total{.*} (.*)$", page, re.MULTILINE))))


def resting(server: Server) -> str:
    """The model that is not loaded, once one is."""
    held = until(lambda: worker(server)["holds"], "a model to be loaded", server.process)
    return MODELS[0] if "sibling" in held else MODELS[1]


def made(server: Server, model: str, seed: int) -> str:
    request = server.submit(model=model, seed=seed, **ASKED)
    assert server.finished(request)["status"] == "completed"
    return digest(server.result(request))


@pytest.mark.slow
def test_two_models_of_which_one_fits_at_a_time_are_served_by_turns_and_a_resting_one_says_that_it_loads(
    capped: Server,
) -> None:
    """Given two models and a device with room for one, when clients ask for both, then a request for the one that rests
    is accepted as loading, with an eta, all are completed, and each model makes the bytes that it made before."""
    assert "layout swap: all models do not fit at one time" in said(capped)
    before, model = swaps(capped), resting(capped)
    first = capped.post("/v1/images/generations", {"model": model, "seed": 1, **ASKED}, prefer="respond-async")
    assert (first["status"], first["state"]) == ("queued", "loading")
    assert first["eta_s"] > 0
    over = capped.finished(first["id"])
    assert (over["status"], over["state"]) == ("completed", "completed")
    works = [(name, seed) for seed in range(2) for name in MODELS]
    with ThreadPoolExecutor(4) as clients:
        digests = dict(zip(works, clients.map(lambda work: made(capped, *work), works), strict=True))
    assert len({*digests.values()}) == len(works)
    assert digests[model, 1] == digest(capped.result(first["id"]))
    assert swaps(capped) >= before + 2


@pytest.mark.nightly
@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_swaps_loses_nothing(capped: Server) -> None:
    """Given requests for both models, when the worker is killed while it loads the other one, then all are made."""
    model, count = resting(capped), said(capped).count('"swapping"')
    requests = [capped.submit(model=name, seed=7, **ASKED) for name in (*MODELS, model)]
    pid = worker(capped)["pid"]
    until(lambda: said(capped).count('"swapping"') > count, "a swap", capped.process)
    os.kill(pid, signal.SIGKILL)
    assert {capped.finished(request)["status"] for request in requests} == {"completed"}
    assert worker(capped)["pid"] != pid


@pytest.mark.nightly
@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_again_leaves_the_other_one_served(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Given a resting model whose weights have vanished, when it is asked for, then the one before is loaded again and
    goes on."""
    folder = shutil.copytree(SHAPES, tmp_path / "sibling")
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shift": 6.0}))
    arguments = ["unfuse/shapes", str(folder), "--arena", "64MiB", "--workers", "swap", "--log-level", "info"]
    with serving(tmp_path_factory.mktemp("broken"), *arguments) as server:
        server.ready()
        shutil.rmtree(folder / "transformer")
        server.submit(model=str(folder), seed=1, **ASKED)
        until(lambda: "compute did not start" in said(server), "the model to fail to load", server.process)
        assert made(server, "unfuse/shapes", 1)


@pytest.mark.nightly
@pytest.mark.slow
def test_one_worker_has_one_role_at_a_time_and_does_all_of_a_request(bare_server: Server) -> None:
    """Given a worker that may have any role and has one at a time, when a picture is asked for, then it changes to
    what waits until that is made."""
    bare_server.worker("encoder,denoiser,decoder", "--log-level", "info")
    until(lambda: bare_server.get("/ready") is not None, "the worker", bare_server.process)
    assert worker(bare_server)["holds"] == "encoder"
    request = bare_server.submit(seed=1, **ASKED)
    assert bare_server.finished(request)["status"] == "completed"
    assert worker(bare_server)["holds"] == "decoder"
    assert swaps(bare_server) == 2
