"""A Redis for a bench: Debian's `redis-server` on a free loopback port, with the same settings for every side."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import redis

from tests.integration.harness import free_port

SETTINGS = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "yes", "--appendfsync", "everysec")
START_S = 20.0


@dataclass
class RedisServer:
    """A server, and a client to look into it."""

    url: str
    process: psutil.Process
    client: redis.Redis

    @property
    def used(self) -> int:
        """Bytes of what it holds."""
        return int(self.client.info("memory")["used_memory"])


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A server that is empty, and gone afterwards with all that it wrote."""
    port = free_port()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        command = ["redis-server", "--port", str(port), "--dir", folder, *SETTINGS]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        client = redis.Redis(port=port)
        try:
            _answering(client, process)
            yield RedisServer(f"redis://127.0.0.1:{port}/0", psutil.Process(process.pid), client)
        finally:
            client.close()
            process.kill()
            process.wait()


def _answering(client: redis.Redis, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            client.ping()
            return
        except redis.ConnectionError:
            assert process.poll() is None, f"redis-server ended with {process.returncode}"
            time.sleep(0.02)
    raise AssertionError(f"redis-server did not answer within {START_S:.0f} s")
