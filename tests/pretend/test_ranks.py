"""Servers whose workers have ranks on two pretended GPUs answer with the CPU's bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pretend.machine import PretendedMachine
from tests.pretend.process import read_report
from tests.pretend.running import load, run_request
from tools.server import computes_of, serving
from tools.tiny import build

pytestmark = pytest.mark.nightly

REQUEST = {"prompt": "a red circle", "seed": 1}
SPREADS = [
    *(f"denoiser={kind}:2" for kind in ("ulysses", "ring", "cfg", "tensor", "layers", "shard")),
    "decoder=tiles:2",
]


@pytest.mark.parametrize("spread", SPREADS)
def test_ranks_on_two_gpus_answer_with_bytes_of_cpu(spread: str, tmp_path: Path) -> None:
    folder, role = build("wan", tmp_path / "wan"), spread.partition("=")[0]
    expected = run_request(load(folder), REQUEST | {"num_frames": 1}).outputs["vae_decode 0"]
    machine = PretendedMachine.create(tmp_path / "machine")
    (tmp_path / "serve").mkdir()
    places = {"encoder": "cuda:0", "denoiser": "cuda:1", "decoder": "cuda:0"} | {role: "cuda:0+cuda:1"}
    place = ",".join(f"{name}={devices}" for name, devices in places.items())
    options = ["--place", place, "--parallel", spread, "--dtype", "float32"]
    with serving(tmp_path / "serve", str(folder), *options, **machine.variables) as server:
        request = server.finished(server.ready().submit(**REQUEST))
        assert (request["status"], request["error"]) == ("completed", None)
        (worker,) = [worker for worker in server.get("/v1/workers")["data"] if worker["role"] == role]
        held = [read_report(compute.pid)["held"].keys() for compute in computes_of(worker["pid"])]
        assert sorted(map(list, held)) == [["cuda:0"], ["cuda:1"]]
        assert server.result(request["id"]) == expected
