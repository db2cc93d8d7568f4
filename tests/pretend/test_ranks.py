"""Servers whose workers have ranks on two pretended GPUs answer with the CPU's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pretend.machine import PretendedMachine
from tests.pretend.process import read_report
from tests.pretend.running import load, run_request
from tools import tiny
from tools.server import computes_of, serving
from unfuse.weights.adapters import AdapterFolder

pytestmark = pytest.mark.nightly

REQUEST = {"prompt": "a red circle", "seed": 1}
SPREADS = [
    *(f"denoiser={kind}:2" for kind in ("ulysses", "ring", "cfg", "tensor", "layers", "shard")),
    "decoder=tiles:2",
]
PINNED = "copy cpu to cuda of pinned memory"


def reports(folder: Path, place: Path, spread: str, expected: bytes, *options: str, **params: Any) -> list[Any]:
    """What each rank did with its GPU for a request, whose result is as expected."""
    machine, role = PretendedMachine.create(place / "machine"), spread.partition("=")[0]
    (place / "serve").mkdir()
    places = {"encoder": "cuda:0", "denoiser": "cuda:1", "decoder": "cuda:0"} | {role: "cuda:0+cuda:1"}
    named = ",".join(f"{name}={devices}" for name, devices in places.items())
    options = ("--place", named, "--parallel", spread, "--dtype", "float32", *options)
    with serving(place / "serve", str(folder), *options, **machine.variables) as server:
        request = server.finished(server.ready().submit(**REQUEST, **params))
        assert (request["status"], request["error"]) == ("completed", None)
        (worker,) = [worker for worker in server.get("/v1/workers")["data"] if worker["role"] == role]
        found = [read_report(compute.pid) for compute in computes_of(worker["pid"])]
        assert sorted([*report["held"]] for report in found) == [["cuda:0"], ["cuda:1"]]
        assert server.result(request["id"]) == expected
    return found


@pytest.mark.parametrize("spread", SPREADS)
def test_ranks_on_two_gpus_answer_with_bytes_of_cpu(spread: str, tmp_path: Path) -> None:
    folder = tiny.build("wan", tmp_path / "wan")
    expected = run_request(load(folder), REQUEST | {"num_frames": 1}).outputs["vae_decode 0"]
    reports(folder, tmp_path, spread, expected)


@pytest.mark.parametrize(
    ("spread", "offload"),
    [("denoiser=shard:2", "model"), ("denoiser=shard:2", "sequential"), ("denoiser=ulysses:2+shard:2", "model")],
)
def test_offloaded_shards_on_two_gpus_answer_with_bytes_of_cpu(spread: str, offload: str, tmp_path: Path) -> None:
    folder = tiny.build("wan", tmp_path / "wan")
    expected = run_request(load(folder), REQUEST | {"num_frames": 1}).outputs["vae_decode 0"]
    size = sum(file.stat().st_size for file in (folder / "transformer").glob("*.safetensors"))
    for report in reports(folder, tmp_path, spread, expected, "--offload", offload):
        copies = {name for name, *_ in report["calls"] if name.startswith("copy cpu to cuda")}
        assert PINNED in copies
        assert report["copied"]["cpu to cuda"] > size, "the shards are copied for each step"
        assert report["pinned"] < size // 10, "they are pinned in one buffer, and not by torch"


def test_adapters_of_offloaded_shards_make_the_bytes_of_cpu(tmp_path: Path) -> None:
    folder, loras = tiny.build("wan", tmp_path / "wan"), tmp_path / "loras"
    tiny.adapter(folder, loras, "first", 0)
    adapted = {"lora": "first", "lora_scale": 0.8}
    lora_id = AdapterFolder(str(loras)).ids_of("first")
    model = load(folder, loras=str(loras))
    plain, expected = (
        run_request(model, REQUEST | {"num_frames": 1} | params, lora_id=id).outputs["vae_decode 0"]
        for params, id in (({}, ""), (adapted, lora_id))
    )
    assert plain != expected
    reports(folder, tmp_path, "denoiser=shard:2", expected, "--offload", "model", "--loras", str(loras), **adapted)
