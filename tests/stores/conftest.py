"""Servers, started when a test of a module first asks."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.stores.processes import Process, Start
from tests.stores.servers import AWS, S3Server
from tools.redis_server import RedisServer


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in AWS.items():
            patch.setenv(name, value)
        try:
            server = S3Server(tmp_path_factory.mktemp("s3"))
        except RuntimeError:  # somebody else took one of its ports meanwhile
            server = S3Server(tmp_path_factory.mktemp("s3"))
        yield server
        server.kill()


@pytest.fixture
def start() -> Iterator[Start]:
    """Start children that end with the test."""
    children: list[Process] = []

    def start(**options: Any) -> Process:
        children.append(Process(**options))
        return children[-1]

    yield start
    for child in children:
        if child.process.poll() is None:
            child.kill()
