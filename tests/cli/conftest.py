"""A real server without workers: what is asked of it waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from unfuse.cli.main import run
from unfuse.client import Client, connect

KEY = "open-sesame-open"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a server whose every request stays queued; when it is told to end, it does."""
    command = [sys.executable, "-m", "unfuse", "serve", "--workers", "none", "--port", "0"]
    environment = {**os.environ, "UNFUSE_API_KEY": KEY, "UNFUSE_DATA_DIR": str(tmp_path_factory.mktemp("idle"))}
    with subprocess.Popen([*command, "--drain-timeout", "0"], env=environment, stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        said = next(line for line in server.stderr if b" at http://" in line).decode()
        with connect(said.split()[-1], KEY) as client:
            yield client
        server.terminate()
        server.stderr.read()
    assert server.returncode == 0


@pytest.fixture
def unfuse(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line; returns exit code, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            run(arguments)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def asking(idle: Client, unfuse: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line whose server is the idle one."""
    monkeypatch.setenv("UNFUSE_SERVER", idle.url)
    monkeypatch.setenv("UNFUSE_API_KEY", KEY)
    return unfuse
