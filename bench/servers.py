"""A Redis for a bench, with the same settings for every side."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.redis_server import RedisServer


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A server that is empty, and gone afterwards with all that it wrote."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        server = RedisServer(Path(folder))
        try:
            yield server
        finally:
            server.stop()
