"""A Redis, or a Valkey, of one's own."""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tools.addresses import free_port
from tools.programs import program

START_S = 600.0
KINDS = ("redis", "valkey")


@dataclass
class Address:
    """Where a server is, and how to come in."""

    url: str
    port: int


class RedisServer(Address):
    """A server that keeps what it holds in its folder, on a port that was free; raises Missing where there is none."""

    def __init__(self, folder: Path, kind: str = "redis", host: str = "127.0.0.1") -> None:
        self._program, self._folder, self.name, self._host = program(f"{kind}-server"), folder, kind, host
        self.port = free_port()
        self.url = f"redis://{host}:{self.port}/0"
        self.client = redis.Redis(host, self.port, retry=Retry(NoBackoff(), 0))
        self.start()

    def on(self, folder: Path) -> RedisServer:
        """Another server of this kind, on what a folder holds."""
        return RedisServer(folder, self.name, self._host)

    def start(self) -> None:
        where = ["--port", str(self.port), "--bind", self._host, "--protected-mode", "no", "--dir", str(self._folder)]
        log = ["--save", "", "--appendonly", "yes", "--appendfsync", "everysec"]
        self._process = subprocess.Popen([self._program, *where, *log], stdout=subprocess.DEVNULL)
        until = time.monotonic() + START_S
        while not self._answers():
            assert self.running, f"{self._program} ended with {self._process.returncode}"
            assert time.monotonic() < until, f"{self._program} does not answer"
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def used(self) -> int:
        """Bytes of what it holds."""
        return int(self.client.info("memory")["used_memory"])

    def at(self, options: str) -> Address:
        return Address(self.url + options, self.port)

    def as_user(self, name: str, password: str) -> Address:
        return Address(self.url.replace("//", f"//{name}:{password}@"), self.port)

    def sync(self, when: str = "always") -> None:
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
