"""What `serve` makes on a GPU: `make gpu` runs these. GPU_DEVICE=cpu runs them elsewhere, to see that they run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.pictures import digest
from tools.server import Server, computes_of, serving
from tools.tiny import build

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("GPU_DEVICE", "cuda:0")
KINDS = ("flux", "wan", "hunyuan-video", "qwen-image")
LAYOUTS = ("all=1", "split")
PROMPTS = ("a red circle", "a blue star and a moon", "b")
MIXED: list[dict[str, Any]] = [
    {"prompt": PROMPTS[n % len(PROMPTS)], "seed": n, "num_inference_steps": 6 + n % 3} for n in range(16)
]


@pytest.fixture(scope="module", params=LAYOUTS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    models = [str(build(kind, root / kind)) for kind in KINDS]
    names = [argument for kind in KINDS for argument in ("--served-model-name", kind)]
    options = ["--device", DEVICE, "--workers", request.param, "--arena", "64MiB"]
    with serving(tmp_path_factory.mktemp("serve"), *models, *names, *options) as server:
        yield server.ready()


def made(server: Server, requests: list[str]) -> list[list[str]]:
    """SHA-256 of every picture of each request."""
    shown = [server.finished(request) for request in requests]
    assert [one["error"] for one in shown] == [None] * len(requests)
    return [[digest(server.result(one["id"], place)) for place in range(len(one["result"]))] for one in shown]


@pytest.mark.parametrize("kind", KINDS)
def test_batched_images_are_byte_identical_also_after_compute_crashes(kind: str, server: Server) -> None:
    """Given requests of other prompts, seeds and steps: what each has alone, all have at once, and when the compute
    processes are killed amid them."""
    alone = [made(server, [server.submit(model=kind, **case)])[0] for case in MIXED]

    at_once = [server.submit(model=kind, **case) for case in MIXED]
    assert made(server, at_once) == alone

    killed = [server.submit(model=kind, **case) for case in MIXED]
    assert any(event["type"] == "progress" for event in server.events(killed[0]))
    for compute in computes_of(*(worker["pid"] for worker in server.get("/v1/workers")["data"])):
        compute.kill()
    assert made(server, killed) == alone


def test_workers_report_their_device_and_pools_batch_invariance(server: Server) -> None:
    """Given pools of denoisers whose requests shared forwards, then each says how large batches became in which no byte
    changed, or which sizes changed some."""
    assert all((worker["device"] == "cpu") == (DEVICE == "cpu") for worker in server.get("/v1/workers")["data"])
    shares = {
        pool["id"]: pool["batch_invariance"] for pool in server.get("/v1/pools")["data"] if "denoise" in pool["id"]
    }
    print(shares)
    assert len(shares) == len(KINDS)
    assert all(found["largest"] > 1 or found["differences"] for found in shares.values())
