"""Who is no worker of ours gets nothing from a server as it is started: no task, no prompt."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import unfuse
from tests import stranger
from tests.launch.test_keys import UNFUSE, data, first_warning, serving
from tests.worker import outside
from unfuse.client import Client, connect
from unfuse.wire.keys import create_keys
from unfuse.wire.unix_socket import SERVER_SOCKET_NAME, running_servers

__all__ = ["data"]

ROLES = ["decoder", "denoiser", "encoder"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    outside.install(monkeypatch)
    return outside.model(tmp_path / "model")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="run-") as made:
        monkeypatch.setenv("UNFUSE_RUN_DIR", made)
        yield Path(made)


def said(model: Path) -> str:
    return (model / "serve.log").read_text()


def roles(client: Client) -> list[str]:
    return sorted(worker["role"] for worker in client.workers())


def tcp_of(model: Path) -> str:
    (address,) = re.findall(r"tcp://127\.0\.0\.1:\d+", said(model))
    return str(address)


@contextmanager
def working(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*UNFUSE, "worker", "--role", "encoder", "--arena", "1MiB", *arguments]
    worker = subprocess.Popen(command, env=os.environ | variables)
    try:
        yield worker
    finally:
        worker.terminate()
        worker.wait()


def joined(client: Client, count: int) -> list[str]:
    """The roles once there are so many workers."""
    while len(found := roles(client)) < count:
        time.sleep(0.05)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_other_user_of_machine_is_rejected_by_default(model: Path, run: Path) -> None:
    with serving(model) as (_, url), connect(url) as client:
        assert client.generate("hello").data == [b"olleh"]
        (socket,) = run.glob("serve-*")
        assert socket.name == f"serve-{url.rpartition(':')[2]}.sock"
        assert not stranger.HEARD & {*await stranger.says(f"ipc://{socket}", uid=4321)}
        assert (await stranger.says(f"ipc://{socket}"))[-1] in stranger.HEARD, "this user's would be heard"
        assert client.generate("again").data == [b"niaga"]
        assert {*roles(client)} == {"all"}
    assert not [path for path in run.iterdir() if SERVER_SOCKET_NAME.fullmatch(path.name)]


async def test_tcp_worker_is_admitted_only_with_the_key(model: Path, run: Path, data: Path, tmp_path: Path) -> None:
    with (
        serving(model, "--listen", "tcp://127.0.0.1:0", "--workers", "denoiser=1,decoder=1") as (_, url),
        connect(url) as client,
    ):
        address = tcp_of(model)
        assert not stranger.HEARD & {*await stranger.says(address)}
        assert f"copy {data}/keys/worker.key" in said(model)
        assert "scheduler.key" not in said(model)
        copied = tmp_path / "copied"
        copied.mkdir(mode=0o700)
        shutil.copy(data / "keys" / "worker.key", copied)
        elsewhere = {"UNFUSE_RUN_DIR": str(run / "r"), "UNFUSE_DATA_DIR": str(tmp_path / "d")}
        with working("--scheduler", address, "--keys", str(copied), **elsewhere):
            assert client.generate("hello").data == [b"olleh"]
            assert roles(client) == ROLES
        create_keys(tmp_path / "others")
        shutil.copy(tmp_path / "others" / "worker.key", copied)
        waits = first_warning([*UNFUSE, "worker", "--scheduler", address], **elsewhere)
        assert "copy worker.key from the scheduler's machine" in waits


@pytest.mark.nightly
async def test_insecure_listen_admits_any_worker_and_logs_warning(model: Path, run: Path, data: Path) -> None:
    arguments = ("--listen", "tcp://127.0.0.1:0", "--insecure-listen", "--workers", "denoiser=1,decoder=1")
    with serving(model, *arguments) as (_, url), connect(url) as client:
        address = tcp_of(model)
        assert f"WARNING: {address} is open: anyone who can connect can act as a worker" in said(model)
        assert (await stranger.says(address))[-1] == "Registered"
        assert not (data / "keys").exists()
        with working("--scheduler", address, "--insecure-listen"):
            assert client.generate("hello").data == [b"olleh"]


def test_worker_discovers_local_server_and_reconnects_after_kill(model: Path, run: Path) -> None:
    with (
        serving(model, "--workers", "denoiser=1,decoder=1") as (server, url),
        connect(url) as client,
        working() as worker,
    ):
        assert client.generate("hello").data == [b"olleh"]
        port = url.rpartition(":")[2]
        server.kill()
        server.wait()
        assert (run / f"serve-{port}.sock").is_socket(), "a killed one leaves it"
        with serving(model, "--workers", "denoiser=1,decoder=1", "--port", port) as (_, again), connect(again) as other:
            assert again == url
            assert other.generate("again").data == [b"niaga"]
            assert worker.poll() is None


def test_unfuse_local_is_undiscoverable_and_leaves_no_socket(model: Path, run: Path) -> None:
    with unfuse.local(str(model), threads=1) as client:
        assert client.generate("hello").data == [b"olleh"]
        assert any(path.is_socket() for path in run.glob("own-*"))
        assert running_servers(run) == {}
        assert not list(run.glob("serve-*"))
        assert {*roles(client)} == {"all"}
    assert not [path for path in run.iterdir() if SERVER_SOCKET_NAME.fullmatch(path.name)]


@pytest.mark.nightly
def test_second_server_on_used_port_exits_1_without_side_effects(model: Path, run: Path) -> None:
    with serving(model) as (_, url), connect(url) as client:
        port = url.rpartition(":")[2]
        for host in ("127.0.0.1", "127.0.0.2"):  # the second would have the port
            command = [
                *UNFUSE,
                "serve",
                str(model),
                "--workers",
                "none",
                "--queue",
                "memory",
                "--port",
                port,
                "--host",
                host,
            ]
            refused = subprocess.run(command, capture_output=True, text=True)
            assert refused.returncode == 1
            assert "cannot listen" in refused.stderr
            assert "Traceback" not in refused.stderr
        assert client.generate("hello").data == [b"olleh"]
        with working():
            while "encoder" not in roles(client):
                time.sleep(0.05)


@pytest.mark.nightly
def test_worker_requires_scheduler_flag_with_two_local_servers(model: Path, run: Path, tmp_path: Path) -> None:
    other = outside.model(tmp_path / "other")
    with serving(model, "--workers", "none") as (_, url), serving(other, "--workers", "none") as (_, second):
        ports = sorted(int(one.rpartition(":")[2]) for one in (url, second))
        refused = subprocess.run([*UNFUSE, "worker"], capture_output=True, text=True)
        assert refused.returncode == 2
        assert f"of {ports[0]}, {ports[1]}" in refused.stderr
        with connect(url) as client, connect(second) as idle, working("--scheduler", url.rpartition(":")[2]):
            assert joined(client, 1) == ["encoder"]
            assert roles(idle) == []
