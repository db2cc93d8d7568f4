"""Models that are added and removed while a server runs: real processes, as `serve` starts them."""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

import pytest

from tests.once import once
from tools.server import Server, all_gone, computes_of, family_of, serving, until
from tools.tiny import build

pytestmark = pytest.mark.slow

CLIENTS, SOME = 16, 4
PICTURE = {"prompt": "a red circle on white", "seed": 3, "num_inference_steps": 2, "size": "32x32"}


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    return once("tiny-flux", tmp_path_factory, lambda folder: build("flux-schnell", folder) and None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve"), "--workers", "all=1", "--arena", "64MiB") as server:
        yield server.ready()


def model(server: Server, name: str) -> Any:
    return server.get(f"/v1/models/{quote(name)}")


def add(server: Server, name: object, **more: Any) -> dict[str, Any]:
    return dict(server.post("/v1/models", {"model": name, **more}))


def remove(server: Server, name: str) -> dict[str, Any]:
    call = urllib.request.Request(f"{server.url}/v1/models/{quote(name)}", method="DELETE")
    with urllib.request.urlopen(call, timeout=60) as answer:
        return dict(json.loads(answer.read()))


def refused(status: int, call: Any, *arguments: Any, **more: Any) -> str:
    """What a call is refused with, by that status."""
    with pytest.raises(HTTPError) as error:
        call(*arguments, **more)
    assert error.value.code == status
    return str(json.loads(error.value.read())["error"]["message"])


def live(server: Server) -> list[dict[str, Any]]:
    """The workers that are there; one that had to be killed is listed for longer."""
    return [worker for worker in server.get("/v1/workers")["data"] if worker["healthy"]]


def gone(server: Server, name: str) -> None:
    """Wait until no worker of a model is left."""
    until(lambda: all(name not in one["models"] for one in live(server)), f"no worker of {name}")


def asked_of(server: Server, **more: Any) -> str:
    return server.submit(**{**PICTURE, **more})


def test_a_model_is_added_and_removed_while_clients_load_another(server: Server, flux: Path) -> None:
    """Given 16 clients of one model, when another is added, asked at once, and removed while it draws, then every
    request of both is completed, no answer is an error, and its processes are gone with what they held."""
    name, over, made = str(flux), threading.Event(), list[dict[str, Any]]()

    def client(number: int) -> None:
        while not over.is_set():
            made.append(server.finished(asked_of(server, seed=number, model="unfuse/shapes")))

    before = {process.pid for process in family_of(server.process.pid)}
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            until(lambda: len(made) >= SOME, "the clients to be at work")
            added = add(server, name)
            assert added["id"] == name and added["state"] == "loading"
            assert server.get("/ready"), "the model that was there is"
            early = asked_of(server, model=name)
            assert server.finished(early)["status"] == "completed"
            assert model(server, name)["state"] == "ready"
            assert {name, "unfuse/shapes"} == {one["id"] for one in server.get("/v1/models")["data"]}
            workers = [one for one in server.get("/v1/workers")["data"] if name in one["models"]]
            assert all(one["models"] == [name] for one in workers)
            computes = computes_of(*(one["pid"] for one in workers))
            late = [asked_of(server, model=name, seed=seed, num_inference_steps=8) for seed in range(4)]
            assert remove(server, name) == {"id": name, "object": "model", "deleted": True}
            assert "is served: one of unfuse/shapes" in refused(404, asked_of, server, model=name)
            assert [server.finished(request)["status"] for request in late] == ["completed"] * 4
            gone(server, name)
            until(lambda: all_gone(computes), "its compute processes to end")
            done = len(made)
            until(lambda: len(made) >= done + SOME, "the clients to go on")
        finally:
            over.set()
        for one in clients:
            one.result()
    assert {one["status"] for one in made} == {"completed"}
    until(lambda: {process.pid for process in family_of(server.process.pid)} <= before, "its processes to be gone")


def test_what_is_no_model_is_refused_and_nothing_changes(server: Server, flux: Path, tmp_path: Path) -> None:
    """Given names of what is not there, is no model, or is served, when they are added or removed, then each is refused
    with a sentence, and what is served stays."""
    before = {process.pid for process in family_of(server.process.pid)}
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    (tmp_path / "closed").mkdir(mode=0)
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "model_index.json").write_text("[" * 10_000)
    for name in ("nowhere", "empty", "pickled", "strange", "closed/within", "n" * 300, "\U0001f600"):
        assert name in refused(400, add, server, str(tmp_path / name)) or name == "strange", name
    for name in ("", "~root", "-x", "a\nb", "x" * 1025, "\x00", None, 7, ["a"], {}):
        assert "send only model, a folder of the server" in refused(400, add, server, name)
    assert "send only model" in refused(400, add, server, str(flux), extra=1)
    assert "is served already" in refused(409, add, server, "unfuse/shapes")
    assert "is served: one of unfuse/shapes" in refused(404, remove, server, str(flux))
    assert {"unfuse/shapes"} == {one["id"] for one in server.get("/v1/models")["data"]}
    assert {process.pid for process in family_of(server.process.pid)} == before


@pytest.mark.nightly
def test_a_model_that_cannot_be_loaded_is_served_no_more_and_says_so(
    server: Server, flux: Path, tmp_path: Path
) -> None:
    """Given a folder whose weights are found to be incomplete only when they are loaded, when it is added and asked,
    then its requests are cancelled, it is not served, and the server goes on; once it is whole it can be added."""
    folder = tmp_path / "damaged"
    shutil.copytree(flux, folder)
    config = json.loads((flux / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(json.dumps(config | {"num_layers": 5}))
    name = str(folder)
    assert add(server, name)["state"] == "loading"
    request = asked_of(server, model=name)
    assert server.finished(request)["status"] == "cancelled"
    assert "it was added, and a worker could not start" in refused(404, model_or_error, server, name)
    assert server.process.poll() is None
    shutil.copy(flux / "transformer" / "config.json", folder / "transformer" / "config.json")
    add(server, name)
    assert server.finished(asked_of(server, model=name))["status"] == "completed"
    remove(server, name)
    gone(server, name)


def model_or_error(server: Server, name: str) -> Any:
    with urllib.request.urlopen(f"{server.url}/v1/models/{quote(name)}", timeout=60) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, redis_server: Any, flux: Path) -> Iterator[tuple[Server, Server]]:
    """A server of two models whose workers have both, and a gateway without workers, over one Redis."""
    folder = tmp_path_factory.mktemp("both")
    shared = ["--queue", redis_server.url, "--results", f"disk:{folder}/results", "--arena", "64MiB"]
    (folder / "one").mkdir()
    (folder / "other").mkdir()
    with (
        serving(folder / "one", "unfuse/shapes", str(flux), "--workers", "all=1", *shared) as one,
        serving(folder / "other", "unfuse/shapes", "--no-workers", *shared) as other,
    ):
        yield one.ready(), other.ready()


@pytest.mark.nightly
def test_who_stays_is_served_all_the_time_while_workers_are_exchanged(
    flux: Path, tmp_path: Path, record_property: Callable[[str, str], None]
) -> None:
    """Given 16 clients of a model that has its workers together with another one, when that is removed, then new
    workers come before the old ones go: every request is completed, and the server says at no moment that a pool of
    what it serves has nobody."""
    over, told, asked = threading.Event(), list[tuple[float, float]](), list[dict[str, Any]]()
    missed = list[object]()
    with serving(tmp_path, "unfuse/shapes", str(flux), "--workers", "all=1", "--arena", "64MiB") as server:
        server.ready()

        def client(number: int) -> None:
            while not over.is_set():
                began = time.monotonic()
                asked.append(server.finished(asked_of(server, seed=number, model="unfuse/shapes")))
                told.append((began, time.monotonic()))

        def watch() -> None:
            while not over.wait(0.1):
                if missing := server.get("/health") and not server.get("/ready"):
                    missed.append(missing)

        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            running = [pool.submit(client, number) for number in range(CLIENTS)] + [pool.submit(watch)]
            try:
                until(lambda: len(told) >= CLIENTS, "the clients to be at work")
                old, removed = {worker["pid"] for worker in live(server)}, time.monotonic()
                remove(server, str(flux))
                until(lambda: not old.intersection(one["pid"] for one in live(server)), "the old workers to go")
                exchanged, done = time.monotonic(), len(told)
                until(lambda: len(told) >= done + CLIENTS, "the clients to go on")
            finally:
                over.set()
            for one in running:
                one.result()
    assert {one["status"] for one in asked} == {"completed"} and not missed
    phases = {"before": (0.0, removed), "during": (removed, exchanged), "after": (exchanged, math.inf)}
    for name, (first, last) in phases.items():
        waits = sorted(end - began for began, end in told if first <= end < last)
        most = waits[int(0.95 * len(waits))], waits[-1]
        record_property(
            "counted", f"{len(waits)} requests {name} an exchange: p95 {most[0]:.2f} s, max {most[1]:.2f} s"
        )


@pytest.mark.nightly
def test_over_redis_each_gateway_tells_what_comes_and_goes_at_the_other(
    both: tuple[Server, Server], flux: Path, tmp_path: Path
) -> None:
    """Given workers with two models, when one is removed at the gateway that has no workers, then both gateways refuse
    it at once, and requests for the other model, which are asked all the time, are completed by new workers; a model
    that is added at one gateway is asked for at the other."""
    one, other = both
    name = str(flux)
    shared = {worker["pid"] for worker in one.get("/v1/workers")["data"]}
    remove(other, name)
    for gateway in both:
        assert "is served: one of unfuse/shapes" in refused(404, asked_of, gateway, model=name)
    assert "is leaving" in refused(409, add, one, name)
    while shared & {worker["pid"] for worker in live(one)}:
        assert one.finished(asked_of(other, model="unfuse/shapes"))["status"] == "completed"
    assert one.finished(asked_of(one, model="unfuse/shapes"))["status"] == "completed"
    until(lambda: [worker["models"] for worker in live(one)] == [["unfuse/shapes"]], "new workers")
    again = tmp_path / "again"
    shutil.copytree(flux, again)
    add(one, str(again))
    assert "is served already" in refused(409, add, other, str(again))
    assert other.finished(asked_of(other, model=str(again)))["status"] == "completed"
    remove(other, str(again))
    gone(one, str(again))
    assert all(len(gateway.get("/v1/models")["data"]) == 1 for gateway in both)
    add(one, str(again))
    assert len(other.get("/v1/models")["data"]) == 2
    one.process.terminate()
    assert one.process.wait(600) == 0, "also while what was added still loads"
    assert len(other.get("/v1/models")["data"]) == 1, "it went with the server that it was added at"
