"""Two models on a device that has room for one at a time: real servers and clients, tiny weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pictures import SHAPES, digest
from tools.server import Server, all_gone, computes_of, family_of, serving, until
from unfuse.planning.placement import PROCESS

ONE = f"cpu={PROCESS + (64 << 20) + (18 << 20)}"
"""Room for a worker of one of the models, which take 15 MiB, and for no second denoiser of 8 MiB."""

ASKED = {"prompt": "a red circle on white", "size": "64x64", "num_inference_steps": 2}
MODELS = "plain", "shifted"


@pytest.fixture(scope="module")
def sibling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with another noise scheduler: it shares the encoder and the VAE, and not the denoiser."""
    return shifted(tmp_path_factory.mktemp("models") / "sibling", 6.0)


def shifted(folder: Path, shift: float) -> Path:
    shutil.copytree(SHAPES, folder)
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shift": shift}))
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
    (found,) = workers(server)
    return found


def swaps(server: Server) -> int:
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        page = answer.read().decode()
    return int(sum(map(float, re.findall(r"^unfuse_swaps_total{.*} (.*)$", page, re.MULTILINE))))


def workers(server: Server) -> list[dict[str, Any]]:
    return [one for one in server.get("/v1/workers")["data"] if one["healthy"]]


def all_held(server: Server) -> set[str]:
    """The models that workers have loaded."""
    return {one["loaded_model"] for one in workers(server) if one["loaded_model"]}


def resting(server: Server) -> str:
    """The model that is not loaded, once one is."""
    held = until(lambda: worker(server)["loaded_model"], "a model to be loaded", server.process)
    return MODELS[0] if held == MODELS[1] else MODELS[1]


def made(server: Server, model: str, seed: int) -> str:
    request = server.submit(model=model, seed=seed, **ASKED)
    assert server.finished(request)["status"] == "completed"
    return digest(server.result(request))


@pytest.mark.slow
def test_models_that_fit_one_at_a_time_are_swapped_and_report_loading(
    capped: Server,
) -> None:
    """Given two models and a device with room for one, when clients ask for both, then a request for the one that rests
    is accepted as loading, with an eta, all are completed, and each model makes the bytes that it made before."""
    assert (
        "layout all=1 --max-loaded-models 1: each worker loads one model at a time, since not all fit at the same time"
        in said(capped)
    )
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
def test_requests_complete_when_worker_is_killed_during_swap(capped: Server) -> None:
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
def test_other_model_is_served_after_a_swap_fails_to_load(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Given a resting model whose weights have vanished, when it is asked for, then its request fails with the reason,
    and the other model goes on."""
    folder = shifted(tmp_path / "sibling", 6.0)
    arguments = [
        "unfuse/shapes",
        str(folder),
        "--arena",
        "64MiB",
        "--workers",
        "all=1",
        "--max-loaded-models",
        "1",
        "--log-level",
        "info",
    ]
    with serving(tmp_path_factory.mktemp("broken"), *arguments) as server:
        server.ready()
        shutil.rmtree(folder / "transformer")
        over = server.finished(server.submit(model=str(folder), seed=1, **ASKED))
        assert (over["status"], over["error"]["code"]) == ("failed", "weights_changed")
        assert made(server, "unfuse/shapes", 1)


@pytest.mark.nightly
@pytest.mark.slow
def test_worker_swaps_roles_to_complete_a_whole_request(bare_server: Server) -> None:
    """Given a worker that may have any role and has one at a time, when a picture is asked for, then it changes to
    what waits until that is made."""
    bare_server.worker("encoder,denoiser,decoder", "--log-level", "info", own_forks=True)
    until(lambda: bare_server.get("/ready") is not None, "the worker", bare_server.process)
    assert worker(bare_server)["loaded_model"] == "encoder"
    request = bare_server.submit(seed=1, **ASKED)
    assert bare_server.finished(request)["status"] == "completed"
    assert worker(bare_server)["loaded_model"] == "decoder"
    assert swaps(bare_server) == 2
    (by_hand,) = bare_server.workers
    (compute,) = computes_of(by_hand.pid)
    (server,) = [one for one in family_of(by_hand.pid) if one.pid == compute.ppid() != by_hand.pid]
    assert "unfuse.worker.fork_server" in server.cmdline(), "it had not to import everything anew"
    server.kill()
    again = bare_server.submit(seed=2, **ASKED)
    assert bare_server.finished(again)["status"] == "completed"
    everyone = [*family_of(by_hand.pid), compute]
    bare_server.killed(by_hand)
    until(lambda: all_gone(everyone), "what it had started to be gone")


def loads(server: Server) -> list[tuple[str, str]]:
    """Each change of what is loaded that has begun: of what, into what."""
    lines = (json.loads(line) for line in said(server).splitlines() if '"swapping"' in line)
    return [(one["out"], one["into"]) for one in lines]


@pytest.mark.nightly
@pytest.mark.slow
def test_added_model_shares_worker_by_swapping_until_removed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, sibling: Path
) -> None:
    """Given a model that fills its device, which clients ask for all the time, when another is added, then both are
    served by one worker; one whose files vanish before they are loaded is served no more, and leaves those two; one
    that is removed does its requests, and leaves the other; and no request of those that stay is lost."""
    arguments = ["unfuse/shapes", "--arena", "64MiB", "--device-memory", ONE, "--log-level", "info"]
    with serving(tmp_path_factory.mktemp("adding"), *arguments) as server:
        server.ready()
        ends = list[str]()
        over, broken = threading.Event(), shifted(tmp_path / "broken", 9.0)

        def client() -> None:
            while not over.is_set():
                request = server.submit(model="unfuse/shapes", seed=len(ends), **ASKED)
                ends.append(server.finished(request)["status"])

        with ThreadPoolExecutor(2) as clients:
            asking = [clients.submit(client) for _ in range(2)]
            try:
                before = worker(server)
                assert before["loaded_model"] == "all"
                server.post("/v1/models", {"model": str(sibling)})
                bytes_made = {made(server, "sibling", seed) for seed in range(2)}
                assert len(bytes_made) == 2
                now = worker(server)
                assert {*now["models"]} == {"unfuse/shapes", "sibling"} and now["pid"] != before["pid"]

                server.post("/v1/models", {"model": str(broken)})
                shutil.rmtree(broken / "transformer")
                lost = server.submit(model="broken", seed=1, **ASKED)
                assert server.finished(lost)["status"] == "failed"
                assert made(server, "sibling", 0) in bytes_made

                requests = [server.submit(model="sibling", seed=seed, **ASKED) for seed in range(4)]
                call = urllib.request.Request(f"{server.url}/v1/models/sibling", method="DELETE")
                urllib.request.urlopen(call, timeout=60).close()
                assert {server.finished(request)["status"] for request in requests} == {"completed"}
                until(
                    lambda: [one["loaded_model"] for one in workers(server)] == ["all"],
                    "a worker of the one that stays",
                )
                enough = len(ends) + 4
                until(lambda: len(ends) >= enough, "its clients to go on", server.process)
            finally:
                over.set()
        for one in asking:
            one.result()
    assert {*ends} == {"completed"}


class Clients:
    """Clients of both models at these servers, who ask until the block ends, each for as many steps; what became of it.

    They are never all between two requests, so that each model has something to do all the time.
    """

    STEPS = (2, 7, 13)

    def __init__(self, *servers: Server) -> None:
        self._servers, self._over, self._seeds = servers, threading.Event(), count()
        self.made: list[tuple[str, str]] = []

    def __enter__(self) -> Clients:
        works = [(server, name, steps) for server in self._servers for name in MODELS for steps in self.STEPS]
        self._pool = ThreadPoolExecutor(len(works))
        self._asking = [self._pool.submit(self._ask, *work) for work in works]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        for asking in self._asking:
            asking.result()

    def _ask(self, server: Server, name: str, steps: int) -> None:
        while not self._over.is_set():
            request = server.submit(model=name, seed=next(self._seeds), **ASKED | {"num_inference_steps": steps})
            self.made.append((name, server.finished(request)["status"]))

    def more(self, number: int) -> None:
        """Wait until so many more pictures of each model were made."""
        for name in MODELS:
            enough = self._of(name) + number
            until(lambda name=name, enough=enough: self._of(name) >= enough, f"pictures of {name}")

    def _of(self, name: str) -> int:
        return [asked for asked, _ in self.made].count(name)


@pytest.mark.nightly
@pytest.mark.slow
def test_workers_of_two_servers_never_swap_to_the_same_model(tmp_path: Path, redis_server: Any) -> None:
    """Given two servers of two models over one Redis, each with a worker that has one of them at a time, when clients
    ask both for both, then nothing is lost, both workers are not sent to one model, and as soon as each has one of its
    own, no worker goes from what the other has not; also after one of the workers was killed."""
    sibling = shifted(tmp_path / "sibling", 6.0)
    for file in sibling.glob("*/*.safetensors"):  # which shares no component, so that either does all of its requests
        with file.open("r+b") as weights:
            weights.seek(-4, os.SEEK_END)
            weights.write(bytes(4))
    names = [text for name in MODELS for text in ("--served-model-name", name)]
    shared = ["--queue", redis_server.url, "--results", f"disk:{tmp_path}/results", "--arena", "64MiB"]
    arguments = [
        "unfuse/shapes",
        str(sibling),
        *names,
        "--workers",
        "all=1",
        "--max-loaded-models",
        "1",
        "--threads",
        "1",
        "--log-level",
        "info",
    ]
    with ExitStack() as stack:
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
        servers = [
            stack.enter_context(serving(tmp_path / name, *arguments, *shared)).ready() for name in ("one", "other")
        ]
        until(lambda: len(workers(servers[0])) == len(servers), "the workers of both", servers[1].process)
        with Clients(*servers) as clients:
            until(lambda: all_held(servers[0]) == {*MODELS}, "each model to be loaded", servers[0].process)
            clients.more(40)
            went = [one for server in servers for one in loads(server)]
            (killed,) = [one["pid"] for one in workers(servers[0]) if one["loaded_model"] == MODELS[1]]
            os.kill(killed, signal.SIGKILL)
            until(lambda: killed not in {one["pid"] for one in workers(servers[0])}, "the worker to be away")
            until(lambda: all_held(servers[0]) == {*MODELS}, "each model to be loaded", servers[0].process)
            clients.more(10)
    assert {status for _, status in clients.made} == {"completed"}
    assert went == [("unfuse/shapes", str(sibling))], "one of the two went to what waited, and then both had work"
