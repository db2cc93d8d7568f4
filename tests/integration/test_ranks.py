"""A denoiser of several ranks, served: same pictures, one cancel for all, and no rank's end loses a request."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.integration.pictures import SHAPES
from tools.server import Server, all_gone, computes_of, family_of, serving, unfuse, until
from unfuse.core.compute_options import ParallelDegrees
from unfuse.worker.executor import TRIED

WAIT_S = "4"
"""Seconds that ranks wait for each other; one that is stopped holds up its requests for so long."""
ROUNDING = 2
"""Of 255: what another order of sums may change, or products of fewer rows, which some processors make otherwise."""


@contextmanager
def ranks(folder: Path, spread: str, *arguments: str) -> Iterator[Server]:
    spread_so = ("--parallel", f"denoiser={spread}", "--collective-s", WAIT_S) if spread else ()
    shown = ("--log-level", "debug")
    with serving(folder, "--workers", "split", "--threads", "1", *shown, *spread_so, *arguments) as server:
        yield server.ready()


def picture(server: Server, seed: int, **more: object) -> bytes:
    request = server.submit("a red circle on white", seed=seed, **more)
    assert server.finished(request)["status"] == "completed"
    return server.result(request)


def pixels(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file))).astype(int)


def alike(one: bytes, other: bytes) -> bool:
    """Whether two pictures are equal but for rounding."""
    return int(np.abs(pixels(one) - pixels(other)).max()) <= ROUNDING


def metrics(server: Server) -> str:
    with urllib.request.urlopen(server.url + "/metrics") as page:
        return str(page.read().decode())


def of_denoiser(server: Server) -> dict[str, Any]:
    (worker,) = (one for one in server.get("/v1/workers")["data"] if one["role"] == "denoiser")
    found: dict[str, Any] = worker
    return found


def compute_of_denoiser(server: Server) -> list[psutil.Process]:
    return computes_of(of_denoiser(server)["pid"])


def loaded(server: Server) -> set[tuple[str, int | None]]:
    """By which ranks what of the denoiser was loaded, by the log."""
    lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    said = [line for line in lines if line["event"] == "loaded"]
    assert all("rank" not in line for line in said if line["role"] != "denoiser")
    return {(line["component"], line.get("rank")) for line in said if line["component"] == "transformer"}


def hold(server: Server, spread: str, equal: bool, alone: dict[int, bytes]) -> str:
    """Hold so many ranks to the pictures of one. Returns the last request."""
    assert len(compute_of_denoiser(server)) == ParallelDegrees.parse(spread).size
    asked = {seed: server.submit("a red circle on white", seed=seed, **own(seed)) for seed in alone}
    for seed, request in asked.items():
        assert server.finished(request)["status"] == "completed"
        made = server.result(request)
        assert made == alone[seed] or not equal
        assert alike(made, alone[seed])
    return request


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """Pictures by seed, of one rank; odd sizes and a negative prompt among them."""
    with ranks(tmp_path_factory.mktemp("alone"), "") as server:
        return {seed: picture(server, seed, **own(seed)) for seed in range(4)}


def own(seed: int) -> dict[str, object]:
    sizes = {0: "128x128", 1: "128x96", 2: "64x160", 3: "32x32"}
    return {"size": sizes[seed], "num_inference_steps": 6, "negative_prompt": "blue" if seed % 2 else ""}


@pytest.mark.parametrize(
    ("spread", "equal"),
    [
        pytest.param("ulysses:2", False, marks=pytest.mark.nightly),
        ("cfg:2", True),
        pytest.param("ring:3", False, marks=pytest.mark.nightly),
        pytest.param("ulysses:2+cfg:2", False, marks=pytest.mark.nightly),
    ],
)
def test_multi_rank_images_match_single_rank(spread: str, equal: bool, alone: dict[int, bytes], tmp_path: Path) -> None:
    with ranks(tmp_path, spread) as server:
        assert loaded(server) == {("transformer", rank) for rank in range(ParallelDegrees.parse(spread).size)}
        request = hold(server, spread, equal, alone)
        (denoise,) = (one for one in server.get(f"/v1/requests/{request}")["stages"] if one["name"] == "denoise.0")
        assert 0 < denoise["exchange_s"] < denoise["run_s"]
        until(lambda: all(rank["exchange_s"] > 0 < rank["compute_s"] for rank in of_denoiser(server)["ranks"]), "beats")


def begun(server: Server, **more: object) -> str:
    """A request that is being denoised."""
    request = server.submit("a red circle on white", **more)
    for event in server.events(request):
        if event["type"] == "progress" and event["stage"] == "denoise.0":
            break
    return request


def test_parallel_auto_uses_one_rank_per_device_and_logs_choice(alone: dict[int, bytes], tmp_path: Path) -> None:
    """As a pod of the chart and the operator with several GPUs does, by --parallel auto."""
    with serving(tmp_path, "--workers", "encoder=1,decoder=1", "--threads", "1") as server:
        server.worker("denoiser", "--device", "cpu+cpu", "--parallel", "auto", "--threads", "1")
        server.ready()
        hold(server, "ulysses:2", False, {0: alone[0]})
        (line,) = [line for line in server.log().splitlines() if "chose ranks by the number of devices" in line]
        said = json.loads(line)
        assert (said["devices"], said["ranks"], said["parallel"]) == (2, 2, "denoiser=ulysses:2")
        assert of_denoiser(server)["numerics"]["parallel-denoiser"] == "ulysses:2"
        ranks_of = re.findall(r"unfuse_node_ranks{.*} (\d+)", metrics(server))
        assert ranks_of == ["4"], "two of the denoiser, and one of either other"


@pytest.mark.nightly
def test_cancel_and_priority_preemption_apply_to_all_ranks(tmp_path: Path) -> None:
    with ranks(tmp_path, "ulysses:2") as server:
        calm = {seed: picture(server, seed, **own(seed)) for seed in range(2)}
        unhurried = picture(server, 9, num_inference_steps=60)
        slow, long = (begun(server, seed=9, num_inference_steps=steps) for steps in (60, 100))
        urgent = server.submit("a red circle on white", seed=0, priority=5, **own(0))
        assert server.finished(urgent)["status"] == "completed"
        assert server.result(urgent) == calm[0]
        assert {server.get(f"/v1/requests/{one}")["status"] for one in (slow, long)} == {"in_progress"}
        server.post(f"/v1/requests/{long}/cancel", {})
        assert server.finished(long)["status"] == "cancelled"
        assert server.finished(slow)["status"] == "completed", "it goes on where it stepped aside"
        assert server.result(slow) == unhurried
        assert picture(server, 1, **own(1)) == calm[1]


@pytest.mark.parametrize(
    ("rank", "how"),
    [
        pytest.param(0, signal.SIGKILL, id="first killed"),
        pytest.param(1, signal.SIGSTOP, id="second stopped", marks=pytest.mark.nightly),
        pytest.param(1, signal.SIGKILL, id="second killed", marks=pytest.mark.nightly),
        pytest.param(0, signal.SIGSTOP, id="first stopped", marks=pytest.mark.nightly),
    ],
)
def test_request_is_retried_with_same_bytes_when_rank_dies_or_hangs(
    rank: int, how: signal.Signals, tmp_path: Path
) -> None:
    with ranks(tmp_path, "ulysses:2") as server:
        calm = picture(server, 5, num_inference_steps=60)
        before = compute_of_denoiser(server)
        request = begun(server, seed=5, num_inference_steps=60)
        os.kill(before[rank].pid, how)
        shown = server.finished(request)
        assert shown["status"] == "completed"
        assert shown["attempts"] == 2
        assert server.result(request) == calm
        until(lambda: all_gone(before), "the ranks of before to end")


@pytest.mark.nightly
def test_no_rank_outlives_its_worker(tmp_path: Path) -> None:
    with ranks(tmp_path, "ulysses:2") as server:
        computes = compute_of_denoiser(server)
        computes[1].suspend()  # it cannot notice
        os.kill(of_denoiser(server)["pid"], signal.SIGKILL)
        until(lambda: all_gone(computes), "the ranks to end")
        assert picture(server, 1, num_inference_steps=4)


@pytest.mark.nightly
def test_worker_restarts_with_fewer_ranks_when_ranks_fail_to_start(alone: dict[int, bytes], tmp_path: Path) -> None:
    """As when a device is gone; here it is the model's folder, which comes back."""
    model, away = tmp_path / "shapes", tmp_path / "away"
    shutil.copytree(SHAPES, model)
    spread = "--parallel", "denoiser=ulysses:2", "--collective-s", WAIT_S
    with serving(tmp_path, str(model), "--workers", "split", "--threads", "1", *spread) as server:
        server.ready()
        model.rename(away)
        old = of_denoiser(server)["id"]
        compute_of_denoiser(server)[0].kill()
        until(lambda: "restarting it on others" in server.log(), "the launcher to change it")
        away.rename(model)
        until(
            lambda: old not in {one["id"] for one in server.get("/v1/workers")["data"]}, "the worker before to be gone"
        )
        server.ready()  # the other workers have seen that their files are back
        assert picture(server, 0, **own(0)) == alone[0]
        assert len(compute_of_denoiser(server)) == 1
        assert '"device": "cpu", "parallel": "", "event": "a worker cannot continue on its devices' in server.log()


def crashed_alone(server: Server, request: str) -> bool:
    """Whether a request has been in a crash that may be its own doing: after a second one nobody tries it again."""
    return any(stage["crashes"] for stage in server.get(f"/v1/requests/{request}")["stages"])


def may_fail(server: Server) -> bool:
    """Whether ranks that do not start now are tried again: after the third time in turn there are fewer of them."""
    failed = server.log().rpartition('"restarting the compute process"')[2].count('"the compute process did not start"')
    served = '"event": "ended"' in server.log().rpartition('"the compute process did not start"')[2]
    return served or failed < TRIED - 1


@pytest.mark.nightly
def test_results_are_identical_after_fifty_rank_kills_and_stops(tmp_path: Path) -> None:
    chance = random.Random(7)
    with ranks(tmp_path, "ulysses:2") as server:
        calm = {seed: picture(server, seed, num_inference_steps=40) for seed in range(3)}
        ended, running = 0, dict[str, int]()
        while ended < 50:
            while len(running) < 3:
                seed = chance.randrange(3)
                running[server.submit("a red circle on white", seed=seed, num_inference_steps=40)] = seed
            time.sleep(chance.uniform(0.0, 2.5))
            spared = any(crashed_alone(server, one) for one in running) or not may_fail(server)
            if (found := compute_of_denoiser(server)) and not spared:
                os.kill(chance.choice(found).pid, chance.choice([signal.SIGKILL, signal.SIGSTOP]))
                ended += 1
            for request in [one for one in running if server.get(f"/v1/requests/{one}")["status"] == "completed"]:
                assert server.result(request) == calm[running.pop(request)]
        for request, seed in running.items():
            assert server.finished(request)["status"] == "completed"
            assert server.result(request) == calm[seed]
        family = family_of(server.process.pid)
    until(lambda: all_gone(family), "everything to end")


def test_indivisible_parallel_degree_is_rejected_before_load() -> None:
    command = unfuse("serve", "unfuse/shapes", "--port", "0", "--parallel", "denoiser=ulysses:5")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "ulysses:5 does not divide 4: use ulysses:4" in done.stderr
    assert "Traceback" not in done.stderr
