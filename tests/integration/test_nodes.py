"""Stages on several nodes: their tensors are pulled from owner to reader, and survive whoever made them."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import PAIR, Server, digest, environment, serving, unfuse, until
from tests.netns import SecondHost, second_host


@pytest.fixture(scope="module")
def other_host() -> Iterator[SecondHost]:
    with second_host() as host:
        yield host


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("nodes") / "keys"
    subprocess.run(unfuse("keys", "new", str(folder)), env=environment(folder.parent), check=True, capture_output=True)
    return str(folder)


ENGINES = ("tcp", "zmq", "mooncake")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, other_host: SecondHost, keys: str) -> Iterator[Server]:
    """A server that waits for denoisers of other machines, at an address they reach it by."""
    engines = [argument for name in ENGINES for argument in ("--engine", name)]
    folder = tmp_path_factory.mktemp("serve")
    arguments = ["--denoisers", "0", "--arena", "64MiB", "--keys", keys, *engines, "--trusted-network"]
    with serving(folder, *arguments, at=other_host.near) as server:
        yield server


def moved(server: Server) -> dict[str, float]:
    """Bytes that workers pulled, by engine."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        lines = re.findall(r'^unfuse_transfer_bytes_total{engine="(.+)"} (.+)$', page.read().decode(), re.MULTILINE)
    return {engine: float(count) for engine, count in lines}


def stage(server: Server, id: str, name: str) -> dict[str, Any]:
    return next(stage for stage in server.get(f"/v1/requests/{id}")["stages"] if stage["name"] == name)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_denoiser_on_another_host_has_its_tensors_pulled(
    engine: str, server: Server, other_host: SecondHost, keys: str, expected_pair: list[str]
) -> None:
    """Given encoder and decoder on one host, when the denoiser of another one joins, then pictures come out that have
    the undivided pipeline's pixels, and their tensors have crossed the border by the engine that both have."""
    trust = ["--trusted-network"] if engine == "mooncake" else []
    worker = server.worker(
        "denoiser", "--node", "other", "--keys", keys, "--engine", engine, *trust, within=other_host.enter
    )
    try:
        server.ready()
        before = moved(server).get(engine, 0.0)
        assert server.pair() == expected_pair
        until(lambda: moved(server).get(engine, 0.0) >= before + 2 * len(PAIR) * 1024, "what was moved to be told")
    finally:
        worker.terminate()
        worker.wait(600)
    until(lambda: server.get("/ready") is None, "the denoiser to have left")


@pytest.mark.parametrize("durable", [True, False], ids=["from the durable copy", "by recompute"])
def test_the_owner_of_latents_is_killed_before_they_are_read(
    durable: bool, tmp_path: Path, expected_pair: list[str]
) -> None:
    """Given a denoiser that has finished its stage and is killed, when a decoder comes, then the request completes with
    the same bytes: from the durable copy without another attempt, else by one."""
    copies = tmp_path / "copies"
    kept = ["--durable", f"disk:{copies}"] if durable else []
    with serving(tmp_path, "--no-workers", *kept, UNFUSE_LEASE__TTL_S="2") as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        server.worker("encoder", "--node", "a")
        denoiser = server.worker("denoiser", "--node", "b")
        id = server.submit(**PAIR[0])
        until(lambda: stage(server, id, "denoise.0")["status"] == "done", "the latents to be made")
        if durable:
            until(lambda: [path for path in copies.rglob("*") if path.is_file()], "their copy to be written")
        server.killed(denoiser)
        server.worker("decoder", "--node", "c")
        if not durable:
            server.worker("denoiser", "--node", "b")
        assert server.finished(id)["status"] == "completed"
        assert digest(server.result(id)) == expected_pair[0]
        assert stage(server, id, "denoise.0")["attempt"] == (1 if durable else 2)
        until(lambda: not [path for path in copies.rglob("*") if path.is_file()], "the copy to be dropped")


def test_no_fault_on_the_way_reaches_a_picture(tmp_path: Path, expected_pair: list[str]) -> None:
    """Given workers on three nodes whose transfers are dropped, cut and corrupted, when pictures are made, then all of
    them have the undivided pipeline's pixels."""
    faults = {f"UNFUSE_FAULT__{name}": "0.2" for name in ("DROP", "CUT", "CORRUPT", "DELAY")}
    with serving(tmp_path, "--no-workers") as server:
        for node, role in enumerate(("encoder", "denoiser", "decoder")):
            server.worker(role, "--node", str(node), UNFUSE_FAULT__SEED=str(node), **faults)
        server.ready()
        for _ in range(5):
            assert server.pair() == expected_pair
