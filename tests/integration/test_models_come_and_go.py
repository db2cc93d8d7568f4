"""Models that are added and removed while a server runs: real processes, as `serve` starts them."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
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

CLIENTS = 16
PICTURE = {"prompt": "a red circle on white", "seed": 3, "num_inference_steps": 2}


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


def gone(server: Server, name: str) -> None:
    """Wait until no worker of a model is left."""
    until(lambda: all(name not in one["models"] for one in server.get("/v1/workers")["data"]), f"no worker of {name}")


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
            until(lambda: len(made) > CLIENTS, "the clients to be at work")
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
            until(lambda: len(made) > done + CLIENTS, "the clients to go on")
        finally:
            over.set()
        for one in clients:
            one.result()
    assert {one["status"] for one in made} == {"completed"}
    until(lambda: {process.pid for process in family_of(server.process.pid)} <= before, "its processes to be gone")
