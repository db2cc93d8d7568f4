"""A video survives its worker: killed, crashed or told to leave, it goes on elsewhere from a checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from tests.integration.pictures import SHAPES, defaults, digest, undivided
from tools.server import Server, all_gone, computes_of, family_of, serving, until

STEPS, MORE, EVERY = 50, 100, 10
VIDEO = {
    "prompt": "a blue star on black",
    "seed": 3,
    "num_inference_steps": STEPS,
    "num_frames": 9,
    "height": 256,
    "width": 256,
}
"""Slow enough to be interrupted at a step of one's choice."""


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("copies")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, copies: Path) -> Iterator[Server]:
    """Encoder and decoder, on one node; tests bring the denoisers."""
    arguments = ["--workers", "none", "--durable", f"disk:{copies}", "--checkpoint", str(EVERY)]
    with serving(tmp_path_factory.mktemp("serve"), *arguments, UNFUSE_LEASE__TTL_S="2") as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        server.worker("encoder+decoder", "--node", "a")
        yield server


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[str]]:
    """The frames by the number of steps."""

    @cache
    def frames(steps: int) -> list[str]:
        case = defaults() | VIDEO | {"num_inference_steps": steps}
        return undivided(SHAPES, tmp_path_factory.mktemp("reference"), [case])[0]

    return frames


@pytest.fixture
def denoiser(server: Server) -> Iterator[Popen[bytes]]:
    worker = server.worker("denoiser", "--node", "b", "--drain-timeout", "2")
    yield worker
    for other in server.workers[1:]:
        if other.poll() is None:
            server.killed(other)
    del server.workers[1:]
    until(lambda: server.get("/ready") is None, "the denoisers to be missed")


def begun(server: Server, steps: int = STEPS) -> str:
    """The id of a video that is beyond its step 30, where a checkpoint was made."""
    body = {name: value for name, value in VIDEO.items() if name not in ("width", "height")}
    body["num_inference_steps"] = steps
    id = str(server.post("/v1/videos", {**body, "size": "256x256", "output_format": "png"})["id"])
    for event in server.events(id):
        if event["type"] == "progress" and event["step"] >= 3 * EVERY + 1:
            return id
    raise AssertionError("it was over before it was seen to run")


def denoised(server: Server, id: str) -> dict[str, Any]:
    """What the request says of its denoising once it is complete."""
    shown = server.finished(id)
    assert shown["status"] == "completed", shown["error"]
    return next(stage for stage in shown["stages"] if stage["name"] == "denoise.0")


def frames(server: Server, id: str) -> list[str]:
    return [digest(server.result(id, index)) for index in range(9)]


def nothing_is_left(server: Server, copies: Path) -> None:
    until(lambda: not [path for path in copies.rglob("*") if path.is_file()], "the checkpoints to be dropped")
    until(lambda: not any(worker["used"] for worker in server.get("/v1/workers")["data"]), "memory to be free again")


def test_video_resumes_from_checkpoint_on_other_node_after_worker_kill(
    server: Server, denoiser: Popen[bytes], copies: Path, expected: Callable[[int], list[str]]
) -> None:
    """Given a worker that is killed after step 30 of 50, when one on another node takes over, then that one makes 20
    or 30 steps at most, and the frames are the undivided pipeline's."""
    id = begun(server)
    server.killed(denoiser)
    server.worker("denoiser", "--node", "d")

    stage = denoised(server, id)

    assert (stage["attempt"], stage["resumed"] in (20, 30), stage["resumed"] + stage["steps"]) == (2, True, STEPS)
    assert frames(server, id) == expected(STEPS)
    nothing_is_left(server, copies)


@pytest.mark.nightly
def test_video_resumes_from_checkpoint_after_compute_crash(
    server: Server, denoiser: Popen[bytes], copies: Path, expected: Callable[[int], list[str]]
) -> None:
    """Given a compute process that is killed, when its worker has another one, then that goes on from the arena."""
    id = begun(server)
    (compute,) = computes_of(denoiser.pid)
    compute.send_signal(signal.SIGKILL)

    stage = denoised(server, id)

    assert (stage["attempt"], stage["crashes"], stage["resumed"] >= 20) == (2, 1, True)
    assert stage["resumed"] + stage["steps"] == STEPS
    assert frames(server, id) == expected(STEPS)
    nothing_is_left(server, copies)


@pytest.mark.nightly
def test_video_of_drained_worker_resumes_on_other_node_at_same_step(
    server: Server, denoiser: Popen[bytes], copies: Path, expected: Callable[[int], list[str]]
) -> None:
    """Given a worker that is told to leave and has not the time to finish, when another one takes over, then not one
    step is made twice, and nobody is charged."""
    id = begun(server, MORE)
    everyone = family_of(denoiser.pid)
    denoiser.terminate()
    until(lambda: denoiser.poll() is not None and all_gone(everyone), "the worker to leave")
    assert denoiser.returncode == 0
    server.worker("denoiser", "--node", "d")

    stage = denoised(server, id)

    assert (stage["failures"], stage["crashes"], stage["attempt"]) == (0, 0, 2)
    assert stage["resumed"] > 3 * EVERY
    assert stage["resumed"] + stage["steps"] == MORE
    assert frames(server, id) == expected(MORE)
    nothing_is_left(server, copies)
