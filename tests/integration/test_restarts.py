"""`serve` as it comes keeps its queue in the data folder: what was accepted outlives it; the folder has one owner."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.chaos.cluster import install
from tools.addresses import free_port
from tools.server import all_gone, environment, family_of, serving, unfuse, until

SLOW = "a circle [sleep=0.05@denoise]"


def installed(folder: Path) -> tuple[str, dict[str, str]]:
    """A fast model without torch, and the variables it needs."""
    install(folder)
    return variables_of(folder)


def variables_of(folder: Path) -> tuple[str, dict[str, str]]:
    """The fast model that was installed there, and the variables it needs."""
    site, model = folder / "site", folder / "model"
    paths = [str(site), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return str(model), {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "UNFUSE_LEASE__TTL_S": "2"}


@pytest.mark.parametrize(
    "ending", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)], ids=["killed", "upgraded"]
)
def test_accepted_requests_complete_after_restart(ending: signal.Signals, tmp_path: Path) -> None:
    """Given requests that run and wait, when server and workers end, at once or in order, then the next server on the
    same data folder completes them all, under their ids, with the bytes an undisturbed server makes."""
    model, variables = installed(tmp_path)
    with serving(tmp_path, model, "--arena", "16MiB", "--drain-timeout", "0", **variables) as server:
        server.ready()
        before = server.submit(SLOW, seed=0, num_inference_steps=40)
        assert server.finished(before)["status"] == "completed"
        requests = [server.submit(SLOW, seed=seed, num_inference_steps=40) for seed in range(4)]
        until(lambda: server.get(f"/v1/requests/{requests[0]}")["step"] > 0, "it to make a step", server.process)
        started_at = server.get(f"/v1/requests/{requests[0]}")["started_at"]
        everyone = family_of(server.process.pid)
        server.process.send_signal(ending)
        server.process.wait()
        until(lambda: all_gone(everyone), "the server's processes to end")
        server.killed_and_started_again().ready()
        assert [server.finished(request)["status"] for request in requests] == ["completed"] * 4
        assert server.result(requests[0]) == server.result(before)
        ended = server.get(f"/v1/requests/{requests[0]}")
        assert (ended["started_at"], ended["attempts"]) == (started_at, 2)
        assert (tmp_path / "queue.db").exists()


def test_second_server_on_same_data_dir_exits_2_with_advice(tmp_path: Path) -> None:
    model, variables = installed(tmp_path)
    with serving(tmp_path, model, "--workers", "none", **variables) as server:
        until(lambda: server.get("/health"), "the gateway", server.process)
        ports = ("--port", str(free_port()), "--listen", f"tcp://127.0.0.1:{free_port()}")
        command = unfuse("serve", model, "--workers", "none", *ports)
        second = subprocess.run(
            command, env=environment(tmp_path) | variables, capture_output=True, text=True, timeout=110
        )
        assert second.returncode == 2
        said = second.stderr.splitlines()[-1]
        assert f"process {server.process.pid} uses it" in said
        assert "UNFUSE_DATA_DIR" in said and "--queue" in said
        assert "Traceback" not in second.stderr
        elsewhere = environment(tmp_path / "other") | variables
        with subprocess.Popen(command, env=elsewhere, stderr=subprocess.PIPE, text=True) as other:
            assert other.stderr is not None
            assert any(" at http://" in line for line in other.stderr)
            other.terminate()
            other.stderr.read()


def test_unfuse_local_works_beside_server_on_same_data_dir(tmp_path: Path) -> None:
    """Given a server on the data folder, then a one-shot verb beside it works, since its queue is its own."""
    model, variables = installed(tmp_path)
    code = f"import unfuse\nwith unfuse.local({model!r}) as u: print(len(u.generate('a star').data))"
    environ = environment(tmp_path) | variables
    with serving(tmp_path, model, "--workers", "none", **variables) as server:
        until(lambda: server.get("/health"), "the gateway", server.process)
        command = [*unfuse()[:1], "-c", code]
        made = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
        assert made.stdout == "1\n", made.stderr
        assert f"unfuse: inspecting {model}\n" in made.stderr, "it says what it does"


@pytest.mark.nightly
def test_worker_drops_orphaned_outputs_when_no_scheduler_responds(tmp_path: Path) -> None:
    """Given requests that are encoded and wait when the server ends, then its encoder gives the encodings up after a
    while, the denoiser finishes what it runs first, and with the next server all are made again and complete."""
    model, variables = installed(tmp_path)
    with serving(tmp_path, model, "--workers", "none", **variables) as server:
        until(lambda: server.get("/health"), "the gateway", server.process)
        for role in ("encoder", "denoiser", "decoder"):
            server.worker(role, **variables, UNFUSE_STORE__ORPHAN_S="2", UNFUSE_COMPUTE__MAX_BATCH="1")
        server.ready()
        requests = [server.submit(SLOW, seed=seed, num_inference_steps=100) for seed in range(3)]

        def encoded() -> bool:
            shown = [server.get(f"/v1/requests/{request}")["stages"][0]["status"] for request in requests]
            return shown == ["done"] * len(requests)

        until(encoded, "all to be encoded", server.process)
        server.process.kill()
        server.process.wait()
        alone = '"requests": 3, "seconds": 2.0, "event": "no scheduler answers'
        until(lambda: alone in server.log(), "the encoder to give them up")
        server.killed_and_started_again().ready()
        shown = [server.finished(request) for request in requests]
        assert {one["status"] for one in shown} == {"completed"}
        assert any(stage["recomputes"] for one in shown for stage in one["stages"])
