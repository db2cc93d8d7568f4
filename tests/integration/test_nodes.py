"""Stages on several nodes: their tensors are pulled from owner to reader, and survive whoever made them."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.oracle import expected
from tests.integration.pictures import PAIR, digest, made_pair
from tests.integration.test_restarts import installed
from tests.netns import SecondHost, second_host
from tests.transfer.conftest import needed
from tools.server import Server, environment, family_of, own_run_folder, serving, unfuse, until


@pytest.fixture(scope="module")
def other_host() -> Iterator[SecondHost]:
    """Of the same name as this one."""
    with second_host() as host:
        yield host


@pytest.fixture(scope="module")
def pod() -> Iterator[SecondHost]:
    """A container of another name beside this one, which sees the same run folder at a path of its own."""
    with second_host("pod", shared=True) as host:
        yield host


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("nodes") / "keys"
    subprocess.run(unfuse("keys", "new", str(folder)), env=environment(folder.parent), check=True, capture_output=True)
    return ["--keys", str(folder)]


@contextmanager
def waiting(folder: Path, host: SecondHost, *arguments: str) -> Iterator[Server]:
    """A server that waits for denoisers of that host, at an address they reach it by."""
    with serving(folder, "--workers", "encoder=1,decoder=1", "--arena", "64MiB", *arguments, at=host.near) as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, other_host: SecondHost, keys: list[str]) -> Iterator[Server]:
    with waiting(tmp_path_factory.mktemp("serve"), other_host, *keys) as server:
        yield server


def moved(server: Server) -> dict[str, float]:
    """Bytes that workers pulled, by engine."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        lines = re.findall(r'^unfuse_transfer_bytes_total{engine="(.+)"} (.+)$', page.read().decode(), re.MULTILINE)
    return {engine: float(count) for engine, count in lines}


def stage(server: Server, id: str, name: str) -> dict[str, Any]:
    return next(stage for stage in server.get(f"/v1/requests/{id}")["stages"] if stage["name"] == name)


def denoised_elsewhere(server: Server, host: SecondHost, *arguments: str, pulled: str = "") -> list[str]:
    """The pixels of PAIR with a denoiser of that host, once workers have told that they pulled the tensors for it."""
    worker = server.worker("denoiser", *arguments, within=host.enter)
    before = moved(server).get(pulled, 0.0)
    try:
        pixels = made_pair(server.ready())
        until(
            lambda: not pulled or moved(server).get(pulled, 0.0) >= before + 2 * len(PAIR) * 1024,
            "what was moved to be told",
        )
    finally:
        worker.terminate()
        worker.wait(600)
    until(lambda: server.get("/ready") is None, "the denoiser to have left")
    return pixels


@pytest.mark.parametrize(
    ("engine", "node"),
    [
        ("tcp", []),
        pytest.param("zmq", [], marks=pytest.mark.nightly),
        pytest.param("tcp", ["--node", "same"], marks=pytest.mark.nightly),
    ],
    ids=["tcp", "zmq", "told the same node"],
)
def test_denoiser_on_another_host_pulls_tensors_by_the_common_engine(
    engine: str, node: list[str], server: Server, other_host: SecondHost, keys: list[str], expected_pair: list[str]
) -> None:
    """Given encoder and decoder on one host, when the denoiser of another one joins, which calls itself the same, then
    pictures come out that have the undivided pipeline's pixels, and their tensors have crossed the border by the engine
    that both have."""
    assert denoised_elsewhere(server, other_host, *keys, "--engine", engine, *node, pulled=engine) == expected_pair


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["gloo", "mooncake"])
def test_denoiser_pulls_tensors_by_gloo_and_mooncake(
    engine: str, tmp_path: Path, other_host: SecondHost, keys: list[str], expected_pair: list[str]
) -> None:
    needed(engine)
    arguments = [*keys, "--engine", engine, "--trusted-network"]
    with waiting(tmp_path, other_host, *arguments) as server:
        assert denoised_elsewhere(server, other_host, *arguments, pulled=engine) == expected_pair


@pytest.mark.nightly
def test_nccl_engine_on_a_cpu_worker_is_rejected(tmp_path: Path, keys: list[str]) -> None:
    command = unfuse("serve", "unfuse/shapes", *keys, "--engine", "nccl", "--trusted-network", "--port", "0")
    ended = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=110)
    assert ended.returncode == 1
    assert "nccl requires a GPU" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("whose", ["the owner's", "the reader's"])
def test_gloo_transfers_recover_after_a_compute_crash(
    whose: str, tmp_path: Path, other_host: SecondHost, keys: list[str], expected_pair: list[str]
) -> None:
    """Given workers that pull by gloo, when the compute process of one end is killed, then its pairs are gone with it,
    new ones are made, and the next pictures are as they should be."""
    arguments = [*keys, "--engine", "gloo", "--trusted-network"]
    with waiting(tmp_path, other_host, *arguments) as server:
        reader = server.worker("denoiser", *arguments, within=other_host.enter)
        assert made_pair(server.ready()) == expected_pair
        of = reader.pid if whose == "the reader's" else server.process.pid
        computes = [process for process in family_of(of) if process.name().startswith("compute")]
        for process in computes:
            process.kill()
        assert computes
        assert made_pair(server) == expected_pair
        assert {"gloo"} == {*moved(server)}


@pytest.mark.nightly
def test_denoiser_in_a_pod_with_the_same_run_folder_maps_shared_memory(
    tmp_path: Path, pod: SecondHost, keys: list[str], expected_pair: list[str]
) -> None:
    """Whatever its node is called: it has no engine that another worker has."""
    with waiting(tmp_path, pod, *keys) as server:
        assert (
            denoised_elsewhere(
                server, pod, *keys, "--engine", "unfuse.testing.fake_transfer:FakeEngine", "--node", "other"
            )
            == expected_pair
        )
        assert moved(server) == {}


@pytest.mark.parametrize("built_in", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["fast", "built-in"])
@pytest.mark.parametrize(
    "durable", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["from the durable copy", "by recompute"]
)
def test_latents_of_a_killed_worker_are_restored_or_recomputed(
    durable: bool, built_in: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Given a denoiser that has finished its stage and is killed, when a decoder comes, then the request completes with
    the bytes it should have: from the durable copy, else by recomputing the stage once.

    How many attempts that takes is open: the call in which the dead one waited for tasks may be given it first."""
    copies = tmp_path / "copies"
    kept = ["--durable", f"disk:{copies}"] if durable else []
    model, variables = ("unfuse/shapes", {"UNFUSE_LEASE__TTL_S": "2"}) if built_in else installed(tmp_path)
    with serving(tmp_path, model, "--workers", "none", *kept, **variables) as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        server.worker("encoder", **variables)
        denoiser = server.worker("denoiser", **variables)
        id = server.submit(**PAIR[0], size="128x128")
        until(lambda: stage(server, id, "denoise.0")["status"] == "done", "the latents to be made")
        if durable:
            until(lambda: [path for path in copies.rglob("[!.]*") if path.is_file()], "their copy to be written")
        server.killed(denoiser)
        server.worker("decoder" if durable else "denoiser+decoder", **variables)
        assert server.finished(id)["status"] == "completed"
        made = server.result(id)
        if built_in:
            assert digest(made) == request.getfixturevalue("expected_pair")[0]
        else:
            assert made == expected(**PAIR[0], width=128, height=128)
        assert stage(server, id, "denoise.0")["recomputes"] == (0 if durable else 1)
        until(lambda: not [path for path in copies.rglob("[!.]*") if path.is_file()], "the copy to be dropped")


@pytest.mark.nightly
def test_transfer_faults_do_not_change_images(tmp_path: Path, keys: list[str], expected_pair: list[str]) -> None:
    """Given workers on three nodes whose transfers are dropped, cut and corrupted, when pictures are made, then all of
    them have the undivided pipeline's pixels."""
    faulty = ",".join(f"unfuse.testing.transfer_faults:Faulty{name}" for name in ("Tcp", "Zmq"))
    often = "drop=0.2,cut=0.2,corrupt=0.2,delay=0.2"
    with serving(tmp_path, "--workers", "none", *keys) as server:
        for node, role in enumerate(("encoder", "denoiser", "decoder")):
            bad = {"UNFUSE_TRANSFER__ENGINE": faulty, "TRANSFER_FAULTS": f"{often},seed={node}"}
            server.worker(role, *keys, **bad, **own_run_folder(role))
        server.ready()
        for _ in range(5):
            assert made_pair(server) == expected_pair
        until(lambda: sum(moved(server).values()) >= 10 * len(PAIR) * 1024, "what was moved to be told")
