"""Keys from the command line: made once, given to `serve`, which gives them to its workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.worker import outside
from unfuse.client import connect

UNFUSE = [sys.executable, "-m", "unfuse"]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    outside.install(monkeypatch)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    made = subprocess.run([*UNFUSE, "keys", "new", str(tmp_path / "keys")], capture_output=True, text=True, check=True)
    assert made.stdout.split() == [str(tmp_path / "keys" / f"{side}.key") for side in ("scheduler", "worker")]
    return tmp_path / "keys"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder without keys."""
    monkeypatch.setenv("UNFUSE_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def refusal(*arguments: str) -> str:
    ended = subprocess.run([*UNFUSE, *arguments], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    return ended.stderr


def first_warning(command: list[str], **variables: str) -> str:
    """Return the first line that a command says, and end it."""
    with subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        line = process.stderr.readline()
        process.kill()
    return line


@contextmanager
def serving(model: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that is reached by workers of other machines, and its URL."""
    beside = ("--queue", "memory")  # others of one data folder
    command = [*UNFUSE, "serve", str(model), "--port", "0", "--arena", "1MiB", *beside, *arguments]
    log = (model / "serve.log").open("w+")
    with log, subprocess.Popen(command, stderr=log, text=True) as server:
        try:
            with (model / "serve.log").open() as said:
                line = ""
                while " at http://" not in line or not line.endswith("\n"):
                    line = line * (not line.endswith("\n")) + said.readline()
                    time.sleep(0.02)
                    assert server.poll() is None, (model / "serve.log").read_text()
            yield server, line.split()[-1]
        finally:
            server.terminate()


@pytest.mark.slow
def test_serve_with_keys_listens_on_all_hosts_and_passes_flags(tmp_path: Path, keys: Path) -> None:
    model = outside.model(tmp_path / "model")
    limits = ("--memory-limit", "1GiB", "--stall-s", "77")
    with serving(model, "--listen", "tcp://0.0.0.0:0", "--keys", str(keys), *limits) as (server, url):
        with connect(url) as client:
            assert client.generate("hello").data == [b"olleh"]
        started = [process.cmdline() for process in psutil.Process(server.pid).children()]
        workers = [command for command in started if "worker" in command]
        assert workers
        for command in workers:
            told = dict(zip(command, command[1:], strict=False))
            assert told["--keys"] == str(keys)
            assert (told["--memory-limit"], told["--stall-s"]) == (str(1 << 30), "77.0")
    assert server.returncode == 0


@pytest.mark.slow
def test_existing_keys_are_not_overwritten(keys: Path) -> None:
    before = (keys / "worker.key").read_text()
    assert "is there already" in refusal("keys", "new", str(keys))
    assert (keys / "worker.key").read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_tcp_worker_without_keys_waits_with_advice(host: str, tmp_path: Path, data: Path) -> None:
    asked = ["worker", "--scheduler", "8000", "--scheduler", f"tcp://{host}:8001", "--arena", "1MiB"]
    said = first_warning([*UNFUSE, *asked])
    assert "this machine has no worker key yet" in said
    assert "copy worker.key from the scheduler's machine" in said


@pytest.mark.slow
def test_worker_rejects_key_readable_by_others(tmp_path: Path, keys: Path) -> None:
    os.chmod(keys / "worker.key", 0o644)
    said = refusal("worker", "--scheduler", "tcp://127.0.0.1:9", "--keys", str(keys), "--arena", "1MiB")
    assert "can be read by others" in said
