"""Models that are added and removed while a server runs: real processes, as `serve` starts them."""

from __future__ import annotations

import json
import math
import random
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

import pytest

from tests.integration.pictures import SHAPES
from tests.once import once
from tools.redis_server import RedisServer
from tools.server import Server, all_gone, computes_of, family_of, serving, until
from tools.tiny import build
from unfuse.service.loading import PHASES

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


def shifted(folder: Path, shift: float = 3.0) -> Path:
    """A copy of the built-in model with a noise scheduler of its own."""
    shutil.copytree(SHAPES, folder)
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shift": shift}))
    return folder


def model(server: Server, name: str) -> Any:
    return server.get(f"/v1/models/{quote(name)}")


def add(server: Server, source: object, **more: Any) -> dict[str, Any]:
    return dict(server.post("/v1/models", {"model": source, **more}))


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


def test_model_is_added_and_removed_under_load_of_another_model(server: Server, flux: Path) -> None:
    """Given 16 clients of one model, when another is added, asked at once, and removed while it draws, then every
    request of both is completed, no answer is an error, and its processes are gone with what they held."""
    name, over, made = "tiny", threading.Event(), list[dict[str, Any]]()

    def client(number: int) -> None:
        while not over.is_set():
            made.append(server.finished(asked_of(server, seed=number, model="unfuse/shapes")))

    before = {process.pid for process in family_of(server.process.pid)}
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            until(lambda: len(made) >= SOME, "the clients to be at work")
            added = add(server, str(flux), name=name)
            assert added["id"] == name and added["state"] == "loading" and added["progress"]["phase"] in PHASES
            assert server.get("/ready")["loading"] == [name], "the model that was there is ready"
            early = asked_of(server, model=name)
            assert asked_of(server) and server.finished(early)["model"] == name
            assert server.finished(early)["status"] == "completed"
            assert [one["id"] for one in server.get("/v1/models")["data"] if one["default"]] == ["unfuse/shapes"]
            assert model(server, name)["state"] == "ready"
            assert {name, "unfuse/shapes"} == {one["id"] for one in server.get("/v1/models")["data"]}
            workers = [one for one in server.get("/v1/workers")["data"] if name in one["models"]]
            assert all(one["models"] == [name] for one in workers)
            computes = computes_of(*(one["pid"] for one in workers))
            late = [asked_of(server, model=name, seed=seed, num_inference_steps=8) for seed in range(4)]
            assert remove(server, name) == {"id": name, "object": "model", "deleted": True}
            assert "is not served: send one of unfuse/shapes" in refused(404, asked_of, server, model=name)
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


def test_adding_or_removing_an_invalid_model_is_rejected(server: Server, flux: Path, tmp_path: Path) -> None:
    """Given names of what is not there, is no model, or is served, when they are added or removed, then each is refused
    with a sentence, and what is served stays."""
    before = {process.pid for process in family_of(server.process.pid)}
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    (tmp_path / "closed").mkdir(mode=0)
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "model_index.json").write_text("[" * 10_000)
    for name in ("nowhere", "empty", "pickled", "strange", "closed/within", "n" * 128, "\U0001f600"):
        said = refused(400, add, server, str(tmp_path / name), name="new")
        assert str(tmp_path) not in said and ("new" in said or name == "strange"), said
    for name in ("", "~root", "-x", "a\nb", "x" * 1025, "\x00", None, 7, ["a"], {}):
        assert "model must be a folder on the server" in refused(400, add, server, name)
    assert "model must be" in refused(400, add, server, str(flux), extra=1)
    assert "is served already" in refused(409, add, server, "unfuse/shapes")
    assert "is not served: send one of unfuse/shapes" in refused(404, remove, server, str(flux))
    assert {"unfuse/shapes"} == {one["id"] for one in server.get("/v1/models")["data"]}
    assert {process.pid for process in family_of(server.process.pid)} == before


@pytest.mark.nightly
def test_unloadable_model_fails_its_requests_and_reports_the_reason(server: Server, flux: Path, tmp_path: Path) -> None:
    """Given a folder whose weights are found to be incomplete only when they are loaded, when it is added and asked,
    then its requests are cancelled, it is not served, and the server goes on; once it is whole it can be added."""
    folder = tmp_path / "damaged"
    shutil.copytree(flux, folder)
    config = json.loads((flux / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(json.dumps(config | {"num_layers": 5}))
    assert add(server, str(folder))["id"] == "damaged"
    request = asked_of(server, model="damaged")
    over = server.finished(request)
    assert (over["status"], over["error"]["code"]) == ("failed", "model_failed")
    failed = model(server, "damaged")
    assert failed["state"] == "failed" and failed["reason"] in over["error"]["message"]
    assert "transformer" in failed["reason"] and str(tmp_path) not in failed["reason"]
    assert failed["reason"] in refused(503, asked_of, server, model="damaged")
    assert server.process.poll() is None
    shutil.copy(flux / "transformer" / "config.json", folder / "transformer" / "config.json")
    add(server, str(folder))
    assert server.finished(asked_of(server, model="damaged"))["status"] == "completed"
    remove(server, "damaged")
    gone(server, "damaged")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, redis_server: Any, flux: Path) -> Iterator[tuple[Server, Server]]:
    """A server of two models whose workers have both, and a gateway without workers, over one Redis."""
    folder = tmp_path_factory.mktemp("both")
    shared = ["--queue", redis_server.url, "--results", f"disk:{folder}/results", "--arena", "64MiB"]
    (folder / "one").mkdir()
    (folder / "other").mkdir()
    with (
        serving(folder / "one", "unfuse/shapes", str(flux), "--workers", "all=1", *shared) as one,
        serving(folder / "other", "unfuse/shapes", "--workers", "none", *shared) as other,
    ):
        yield one.ready(), other.ready()


@pytest.mark.nightly
def test_removing_a_model_replaces_shared_workers_without_downtime(
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
def test_gateways_on_one_redis_share_added_and_removed_models(
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
        assert "is not served: send one of unfuse/shapes" in refused(404, asked_of, gateway, model=name)
    while shared & {worker["pid"] for worker in live(one)}:
        assert one.finished(asked_of(other, model="unfuse/shapes"))["status"] == "completed"
    assert one.finished(asked_of(one, model="unfuse/shapes"))["status"] == "completed"
    until(lambda: [worker["models"] for worker in live(one)] == [["unfuse/shapes"]], "new workers")
    again = tmp_path / "again"
    shutil.copytree(flux, again)
    add(one, str(again))
    assert "is served already" in refused(409, add, other, str(again))
    assert other.finished(asked_of(other, model="again"))["status"] == "completed"
    remove(other, "again")
    gone(one, "again")
    assert all(len(gateway.get("/v1/models")["data"]) == 1 for gateway in both)
    add(one, str(again))
    assert len(other.get("/v1/models")["data"]) == 2
    one.process.terminate()
    assert one.process.wait(600) == 0, "also while what was added still loads"
    waiting = asked_of(other, model="again")
    one.killed_and_started_again().ready()
    assert other.finished(waiting)["status"] == "completed", "its server serves it again"
    remove(other, "again")


SERVE = ["--workers", "all=1", "--arena", "64MiB"]


@pytest.fixture
def queued(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The arguments of a server that keeps its queue there, where nothing else was declared."""
    if request.param == "sqlite":
        yield SERVE
        return
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield [*SERVE, "--queue", server.url]
    server.stop()


@pytest.mark.parametrize("queued", ["sqlite", pytest.param("redis", marks=pytest.mark.nightly)], indirect=True)
def test_requests_of_an_added_model_complete_after_a_server_crash(queued: list[str], tmp_path: Path) -> None:
    """Given requests of a model that was added, when the server is killed with -9 and started again, then the model is
    served again and all of them complete under their ids. Where its folder is gone meanwhile, `/ready` names the model,
    and they fail with the reason; added again, it is served."""
    folder = shifted(tmp_path / "shifted")
    (tmp_path / "data").mkdir()
    with serving(tmp_path / "data", *queued) as server:
        server.ready()
        add(server, str(folder), name="added")
        requests = [asked_of(server, model="added", seed=seed, num_inference_steps=20) for seed in range(3)]
        keyed = PICTURE | {"model": "added", "seed": 9}
        call = partial(server.post, "/v1/images/generations", keyed, prefer="respond-async", idempotency_key="k")
        requests.append(call()["id"])
        server.killed_and_started_again().ready()
        assert call()["id"] == requests[-1]
        assert [server.finished(request)["status"] for request in requests] == ["completed"] * 4
        until(lambda: model(server, "added")["state"] == "ready", "it to be ready", server.process)
        assert server.get("/ready").keys() == {"ready", "models"}

        waiting = [asked_of(server, model="added", seed=seed, num_inference_steps=100) for seed in range(8)]
        away = folder.rename(tmp_path / "away")
        server.killed_and_started_again().ready()
        overs = [server.finished(request) for request in waiting]
        lost = [over for over in overs if over["status"] != "completed"]
        reason = until(lambda: (server.get("/ready") or {}).get("failed"), "it to be named", server.process)["added"]
        assert lost and {(over["status"], over["error"]["code"]) for over in lost} == {("failed", "model_failed")}
        assert all(reason in over["error"]["message"] for over in lost)
        assert (model(server, "added")["state"], model(server, "added")["reason"]) == ("failed", reason)
        assert reason in refused(503, asked_of, server, model="added") and str(tmp_path) not in reason

        away.rename(folder)
        add(server, str(folder), name="added")
        assert server.finished(asked_of(server, model="added"))["status"] == "completed"
        remove(server, "added")
        server.killed_and_started_again().ready()
        assert [one["id"] for one in server.get("/v1/models")["data"]] == ["unfuse/shapes"]


@pytest.mark.nightly
@pytest.mark.parametrize("queued", ["sqlite", "redis"], indirect=True)
def test_repeated_server_crashes_lose_no_request_of_added_models(queued: list[str], tmp_path: Path) -> None:
    """Given a server that is killed again and again while added models load, run and are removed, then each request
    that was accepted is completed once, and no worker of a model that was removed stays."""
    rng = random.Random(40)
    folders = {name: str(shifted(tmp_path / name, shift)) for name, shift in (("a", 2.0), ("b", 4.0), ("c", 6.0))}
    accepted = dict[str, bytes]()
    (tmp_path / "data").mkdir()
    with serving(tmp_path / "data", *queued) as server:
        server.ready()
        for seed in range(6):
            served = {one["id"] for one in server.get("/v1/models")["data"]}
            for name in folders.keys() - served:
                with suppress(HTTPError):  # it is leaving
                    add(server, folders[name], name=name)
            served = {one["id"] for one in server.get("/v1/models")["data"]} - {"unfuse/shapes"}
            for name in served:
                accepted |= {asked_of(server, model=name, seed=seed * 10 + n): b"" for n in range(3)}
            if seed % 2:
                remove(server, rng.choice(sorted(served)))
            time.sleep(rng.random() * 4)
            server.killed_and_started_again()
            until(lambda: server.get("/health"), "it to answer", server.process)
        assert {server.finished(request)["status"] for request in accepted} == {"completed"}
        assert all(server.result(request) for request in accepted) and len(accepted) > 30
        for name in {one["id"] for one in server.get("/v1/models")["data"]} - {"unfuse/shapes"}:
            remove(server, name)
        until(lambda: [one["models"] for one in live(server)] == [["unfuse/shapes"]], "the others to leave")
