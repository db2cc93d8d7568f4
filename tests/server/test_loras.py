"""Adapters (LoRA) as a client asks for them: by name from a folder, and known by their content from then on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from tests.server.served import Served, serve
from tools.cards import PICTURES, STILL
from unfuse.core.plan import Params
from unfuse.weights.adapters import AdapterFolder

ADAPTED = msgspec.structs.replace(PICTURES, takes_lora=True)
ASYNC = {"prefer": "respond-async"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    for name in ("ink", "oil"):
        (folder / f"{name}.safetensors").write_bytes(name.encode())
    return folder


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("results"), cards=(ADAPTED, STILL), idle=False, loras=str(folder)) as running:
        yield running


def ask(http: httpx2.Client, **given: Any) -> httpx2.Response:
    body = {"model": ADAPTED.name, "prompt": "a red circle", **given}
    return http.post("/v1/images/generations", json=body, headers=ASYNC)


def params_of(served: Served, reply: httpx2.Response) -> Params:
    assert reply.status_code == 202, reply.text
    context = served.run(served.queue.load(reply.json()["id"])).context
    return context.request.params | context.request.derived.values()


def error_of(reply: httpx2.Response) -> dict[str, Any]:
    assert reply.status_code == 400, reply.text
    found: dict[str, Any] = reply.json()["error"]
    return found


def test_request_stores_lora_name_content_id_and_scale(served: Served, http: httpx2.Client, folder: Path) -> None:
    plain = params_of(served, ask(http, lora="ink"))
    scaled = params_of(served, ask(http, lora="oil", lora_scale=-0.5))
    none = params_of(served, ask(http, lora=None))

    loras = AdapterFolder(str(folder))
    assert [plain[name] for name in ("lora", "lora_id", "lora_scale")] == ["ink", loras.id_of("ink"), 1.0]
    assert [scaled[name] for name in ("lora", "lora_id", "lora_scale")] == ["oil", loras.id_of("oil"), -0.5]
    assert not {"lora", "lora_id", "lora_scale"} & none.keys()


@pytest.mark.row("K1")
def test_lora_id_changes_with_the_content_despite_an_equal_mtime(tmp_path: Path) -> None:
    file, loras = tmp_path / "ink.safetensors", AdapterFolder(str(tmp_path))
    file.write_bytes(b"one")
    before, times = loras.id_of("ink"), file.stat()

    file.write_bytes(b"two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert loras.id_of("ink") != before


@pytest.mark.parametrize(
    "asked",
    [
        "ink,oil:-0.5",
        ["ink", "oil:-0.5"],
        [{"name": "ink"}, {"name": "oil", "scale": -0.5}],
        [{"name": "ink", "scale": None}, {"name": "oil", "scale": "-0.5"}],
        ["ink,oil:-0.50"],
    ],
)
def test_several_loras_are_stored_in_order_with_their_scales(
    asked: object, served: Served, http: httpx2.Client, folder: Path
) -> None:
    loras = AdapterFolder(str(folder))
    kept = params_of(served, ask(http, lora=asked, lora_scale=2))
    assert kept["lora"] == "ink,oil:-0.5"
    assert kept["lora_id"] == f"{loras.id_of('ink')},{loras.id_of('oil')}"
    assert kept["lora_scale"] == 2


def test_two_lora_names_with_equal_content_return_400(http: httpx2.Client, folder: Path) -> None:
    (folder / "twin.safetensors").write_bytes((folder / "ink.safetensors").read_bytes())
    message = error_of(ask(http, lora="ink,twin"))["message"]
    (folder / "twin.safetensors").unlink()
    assert "'ink' and 'twin' are equal" in message


def test_replaced_lora_file_gets_a_new_lora_id(served: Served, http: httpx2.Client, folder: Path) -> None:
    (folder / "new.safetensors").write_bytes(b"one")
    first = params_of(served, ask(http, lora="new"))
    (folder / "new.safetensors").write_bytes(b"two")
    second = params_of(served, ask(http, lora="new"))
    (folder / "new.safetensors").unlink()

    assert first["lora_id"] != second["lora_id"]
    assert "lora 'new' does not exist" in error_of(ask(http, lora="new"))["message"]


def test_video_requests_accept_a_lora(served: Served, http: httpx2.Client) -> None:
    body = {"model": ADAPTED.name, "prompt": "a red circle", "lora": "ink", "lora_scale": "0.5"}
    made = http.post("/v1/videos", json=body, headers=ASYNC)

    assert params_of(served, made)["lora_scale"] == 0.5


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        ({"lora": "sand"}, "lora", "lora 'sand' does not exist; available: ink, oil"),
        ({"lora": "../ink"}, "lora", "lora '../ink' does not exist"),
        ({"lora": ""}, "lora", "characters long"),
        ({"lora": 7}, "lora", "must be text"),
        ({"lora": []}, "lora", "1 to 8 names"),
        ({"lora": [f"a{number}" for number in range(9)]}, "lora", "1 to 8 names"),
        ({"lora": "ink," * 2000}, "lora", "characters long"),
        ({"lora": "ink,ink:2"}, "lora", "'ink' twice"),
        ({"lora": "ink,sand"}, "lora", "lora 'sand' does not exist"),
        ({"lora": ",ink"}, "lora", "NAME or NAME:SCALE"),
        ({"lora": "ink:"}, "lora", "NAME or NAME:SCALE"),
        ({"lora": "ink:much"}, "lora", "must be a number"),
        ({"lora": "ink:11"}, "lora", "-10 to 10, not 11"),
        ({"lora": [["ink"]]}, "lora", "must be text"),
        ({"lora": {"scale": 1}}, "lora", "must be text"),
        ({"lora": [{"name": "ink:1"}]}, "lora", "NAME or NAME:SCALE"),
        ({"lora": [{"name": ["ink"]}]}, "lora", "NAME or NAME:SCALE"),
        ({"lora": [{"name": "ink", "weight": 1}]}, "lora", "must be text"),
        ({"lora": [{"name": "ink", "scale": True}]}, "lora", "must be a number"),
        ({"lora": "ink", "lora_scale": 11}, "lora_scale", "-10 to 10, not 11"),
        ({"lora": "ink", "lora_scale": "nan"}, "lora_scale", "must be a number"),
        ({"lora_scale": 1}, "lora_scale", "send its name as lora"),
        ({"lora": "ink", "lora_id": "f00"}, "lora_id", "unknown parameter"),
        ({"lora": "ink", "model": STILL.name}, "lora", "does not support LoRA adapters"),
    ],
)
def test_invalid_lora_returns_400_with_the_valid_choices(
    given: dict[str, Any], param: str, says: str, http: httpx2.Client
) -> None:
    error = error_of(ask(http, **given))
    assert error["param"] == param
    assert says in error["message"]


def test_models_endpoint_lists_lora_adapters(http: httpx2.Client) -> None:
    listed = {model["id"]: model["loras"] for model in http.get("/v1/models").json()["data"]}
    assert listed == {ADAPTED.name: ["ink", "oil"], STILL.name: []}
    assert http.get(f"/v1/models/{ADAPTED.name}").json()["loras"] == ["ink", "oil"]


def test_lora_without_an_adapter_folder_returns_400_naming_the_flag(tmp_path: Path) -> None:
    with (
        serve(tmp_path, cards=(ADAPTED,), idle=False) as bare,
        httpx2.Client(base_url=bare.url, timeout=600, trust_env=False) as http,
    ):
        assert "--loras" in error_of(ask(http, lora="ink"))["message"]
        assert http.get("/v1/models").json()["data"][0]["loras"] == []
