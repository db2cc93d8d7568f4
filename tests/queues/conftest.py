"""Real servers for the queues that need one, started when a test first asks and empty for each."""

from collections.abc import Iterator

import pytest

from tools.redis_server import KINDS, Address, RedisServer as Server

__all__ = ["Address", "Server"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """By day Valkey is asked for random histories alone: rule by rule it is Redis, and by night both."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if parameters.get("shared_server") == "valkey" and not item.name.startswith("test_random_histories"):
        item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="module", params=KINDS)
def shared_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp(request.param), request.param)
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: Server) -> Server:
    """An empty Redis, then an empty Valkey."""
    shared_server.client.flushall()
    return shared_server
