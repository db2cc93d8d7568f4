"""Workers started by hand, workers that die, and what is left when everything ends: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_restarts import SLOW, installed
from tools.addresses import free_port
from tools.server import START_S, Server, all_gone, environment, family_of, serving, unfuse, until


def is_denoising(event: dict[str, Any]) -> bool:
    return event["type"] == "progress" and bool(event["stage"] == "denoise.0")


@pytest.mark.nightly
def test_killed_worker_is_replaced_and_result_is_identical(bare_server: Server) -> None:
    server = bare_server
    until(lambda: server.get("/health") is not None, "the gateway", server.process)
    assert server.get("/ready") is None
    request = server.submit("a red circle on white", seed=4, num_inference_steps=100)
    first = {role: server.worker(role) for role in ("encoder", "denoiser", "decoder")}["denoiser"]
    server.ready()
    family = family_of(first.pid)
    for event in server.events(request):
        if event["type"] == "progress" and event["stage"] == "denoise.0" and event["step"] >= 3:
            first.kill()
            break
    first.wait()
    until(lambda: all_gone(family), "the killed worker's compute to end")
    server.worker("denoiser")
    killed = server.finished(request)
    assert killed["status"] == "completed"
    assert killed["attempts"] >= 2  # a grant to the dead worker may have come back before
    calm = server.submit("a red circle on white", seed=4, num_inference_steps=100)
    assert server.finished(calm)["status"] == "completed"
    assert server.result(request) == server.result(calm)


@pytest.mark.parametrize("built_in", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["fast", "built-in"])
def test_worker_checkpoints_running_task_on_sigterm_and_exits_0(built_in: bool, tmp_path: Path) -> None:
    model, variables = ("unfuse/shapes", {}) if built_in else installed(tmp_path)
    with serving(tmp_path, model, "--workers", "none", **variables) as server:
        until(lambda: server.get("/health") is not None, "the gateway", server.process)
        server.worker("encoder+decoder", **variables)
        worker = server.worker("denoiser", **variables)
        server.ready()
        request = server.submit(SLOW, num_inference_steps=100)
        next(event for event in server.events(request) if is_denoising(event))
        worker.terminate()
        assert worker.wait(600) == 0
        assert server.get(f"/v1/requests/{request}")["status"] != "completed"
        server.worker("denoiser", **variables)
        shown = server.finished(request)
        assert (shown["status"], shown["attempts"]) == ("completed", 2)
        steps = [event["step"] for event in server.events(request) if is_denoising(event)]
        assert all(later >= earlier - 1 for earlier, later in pairwise(steps))
        assert steps[-1] == 100


@pytest.mark.nightly
def test_outputs_of_stopped_worker_are_read_without_recompute(tmp_path: Path) -> None:
    """Given latents that nobody has read yet, then a decoder that comes later reads a copy: nothing is made again."""
    model, variables = installed(tmp_path)
    with serving(tmp_path, model, "--workers", "none", **variables) as server:
        until(lambda: server.get("/health") is not None, "the gateway", server.process)
        server.worker("encoder", **variables)
        worker = server.worker("denoiser", **variables)
        request = server.submit("a circle", num_inference_steps=4)

        def denoised() -> bool:
            stages = {one["name"]: one["status"] for one in server.get(f"/v1/requests/{request}")["stages"]}
            return stages["denoise.0"] == "done"

        until(denoised, "the latents", server.process)
        worker.terminate()
        assert worker.wait(600) == 0
        server.worker("decoder", **variables)
        shown = server.finished(request)
        assert (shown["status"], shown["attempts"]) == ("completed", 1)


@pytest.mark.parametrize(
    ("built_in", "layout", "processes"),
    [
        (False, "split", 7),
        pytest.param(True, "all=1", 3, marks=pytest.mark.nightly),
        pytest.param(True, "split", 7, marks=pytest.mark.nightly),
    ],
)
def test_ctrl_c_during_request_leaves_no_process(built_in: bool, layout: str, processes: int, tmp_path: Path) -> None:
    model, variables = ("unfuse/shapes", {}) if built_in else installed(tmp_path)
    arguments = ["--workers", layout, "--arena", "64MiB", "--drain-timeout", "1"]
    with serving(tmp_path, model, *arguments, **variables) as server:
        server.ready()
        request = server.submit(SLOW, num_inference_steps=100)
        for event in server.events(request):
            if event["type"] == "progress":
                break
        everyone = family_of(server.process.pid)
        assert len(everyone) >= processes  # serve, and two of each worker
        os.killpg(server.process.pid, signal.SIGINT)  # as Ctrl-C does
        assert server.process.wait(600) == 130
        until(lambda: all_gone(everyone), "every process to end")


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_no_process_is_left_after_serve_gets_sigterm_or_sigkill(
    tmp_path: Path, ending: signal.Signals, code: int
) -> None:
    model, variables = installed(tmp_path)
    with serving(tmp_path, model, "--workers", "split", "--arena", "16MiB", **variables) as server:
        everyone = family_of(server.ready().process.pid)
        assert len(everyone) == 8  # serve, two of each worker, and the fork server
        server.process.send_signal(ending)
        assert server.process.wait(600) == code
        until(lambda: all_gone(everyone), "every process to end")


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(unfuse(*arguments), cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)


def test_oversized_arena_is_reported_without_traceback(bare_server: Server, tmp_path: Path) -> None:
    failed = run(tmp_path, "worker", "--role", "encoder", "--scheduler", bare_server.control, "--arena", "100TiB")
    assert failed.returncode == 1
    assert "--arena" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_missing_component_file_is_reported_without_traceback(tmp_path: Path) -> None:
    shapes = Path(__file__).parents[2] / "unfuse" / "models" / "shapes"
    copy = tmp_path / "model"
    for file in shapes.rglob("*"):
        if file.is_file() and not (file.parent.name == "vae" and file.suffix == ".safetensors"):
            (copy / file.relative_to(shapes)).parent.mkdir(parents=True, exist_ok=True)
            (copy / file.relative_to(shapes)).write_bytes(file.read_bytes())
    failed = run(tmp_path, "generate", "a red circle", "-m", str(copy), "-o", "out.png")
    assert failed.returncode == 1
    assert "vae" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_serve_on_public_host_requires_api_key(tmp_path: Path) -> None:
    failed = run(tmp_path, "serve", "--host", "0.0.0.0", "--port", str(free_port()), "--workers", "none")
    assert failed.returncode == 2
    assert "--api-key" in failed.stderr


def test_ended_request_is_deleted_after_retention(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "none", UNFUSE_SERVE__RETENTION_S="0.5") as server:
        until(lambda: server.get("/health") is not None, "the gateway", server.process)
        kept, ended = server.submit("a red circle on white"), server.submit("a red circle on white")
        server.post(f"/v1/requests/{ended}/cancel", {})
        until(lambda: server.get(f"/v1/requests/{ended}") is None, "the cancelled request to be forgotten")
        assert server.get(f"/v1/requests/{kept}")["status"] == "queued"
        server.post(f"/v1/requests/{kept}/cancel", {})


def test_worker_with_different_numerics_exits_and_logs_required_flags(bare_server: Server) -> None:
    worker = bare_server.worker("encoder", "--batching", "batched")
    assert worker.wait(START_S) == 1
    assert "start this one with --batching exact --noise-device cpu --vae whole" in bare_server.log()
