"""Servers for benches: a Redis with the same settings for every side, and what the workers of one of ours pulled."""

from __future__ import annotations

import re
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.redis_server import RedisServer
from tools.server import Server

TOLD_S = 5.0
"""Seconds within which every worker has told what it pulled, and how full its arena was: some heartbeats."""


def pulled(server: Server) -> float:
    """Bytes that workers have pulled from others, as far as they have told."""
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        found = re.findall(r"^unfuse_transfer_bytes_total{.*} (.+)$", page.read().decode(), re.MULTILINE)
    return sum(map(float, found))


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A server that is empty, and gone afterwards with all that it wrote."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        server = RedisServer(Path(folder))
        try:
            yield server
        finally:
            server.stop()
