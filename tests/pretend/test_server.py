"""A whole server on a pretended GPU answers with the CPU's bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pretend.machine import PretendedMachine
from tests.pretend.process import read_report
from tests.pretend.running import GPU, load, run_request
from tools.server import computes_of, serving
from tools.tiny import build

pytestmark = pytest.mark.slow

REQUEST = {"prompt": "a red circle", "seed": 1}


def test_server_on_second_gpu_answers_with_bytes_of_cpu(tmp_path: Path) -> None:
    folder = build("flux", tmp_path / "flux")
    expected = run_request(load(folder), REQUEST).outputs["vae_decode 0"]
    machine = PretendedMachine.create(tmp_path / "machine")
    (tmp_path / "serve").mkdir()
    options = ["--device", GPU, "--dtype", "float32", "--workers", "all=1"]
    with serving(tmp_path / "serve", str(folder), *options, **machine.variables) as server:
        request = server.finished(server.ready().submit(**REQUEST))
        (worker,) = server.get("/v1/workers")["data"]
        assert (request["status"], worker["device"]) == ("completed", "Pretended GPU")
        assert server.result(request["id"]) == expected
        (compute,) = computes_of(worker["pid"])
        report = read_report(compute.pid)
        assert report["held"].keys() == {GPU} and report["waits"]


@pytest.mark.nightly
def test_server_on_a_gpu_without_bfloat16_computes_in_float16_where_it_is_safe(tmp_path: Path) -> None:
    folder = build("flux", tmp_path / "flux")
    dtypes = "text_encoder=float16,text_encoder_2=float32,transformer=float16,vae=float32"
    expected = run_request(load(folder, dtype=dtypes), REQUEST).outputs["vae_decode 0"]
    machine = PretendedMachine.create(tmp_path / "machine", name="Tesla T4", capability="7.5")
    (tmp_path / "serve").mkdir()
    with serving(tmp_path / "serve", str(folder), "--workers", "all=1", **machine.variables) as server:
        request = server.finished(server.ready().submit(**REQUEST))
        (worker,) = server.get("/v1/workers")["data"]
        assert (request["status"], worker["device"]) == ("completed", "Tesla T4")
        assert server.result(request["id"]) == expected
        assert "without bfloat16, so dtypes are: " in server.log()
