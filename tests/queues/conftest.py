"""Real servers for the queues that need one, started when a test first asks and empty for each."""

import shlex
import time
from collections.abc import Iterator

import pytest

from tools.addresses import free_port
from tools.redis_server import KINDS, Address, RedisServer as Server
from tools.snippets import ROOT, blocks

__all__ = ["Address", "Server"]


def users() -> list[list[str]]:
    """Return the commands of `docs/guides/choose-a-queue.md` that make a user of Redis, for a queue and for a store."""
    page = "\n".join(blocks(ROOT / "docs" / "guides" / "choose-a-queue.md")).replace("\\\n", "")
    return [shlex.split(line)[1:] for line in page.splitlines() if line.startswith("redis-cli ")]


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


@pytest.fixture
def least(server: Server) -> Iterator[Address]:
    """An empty server, for a user who has the rights that the documents give it; the server has refused it nothing."""
    server.client.execute_command(*users()[0])
    server.client.acl_log_reset()
    yield server.as_user("unfuse", "SECRET")
    assert {refused["object"] for refused in server.client.acl_log()} <= {"client|setinfo"}  # a library's name


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Two servers that know nothing of each other."""
    servers = [Server(tmp_path_factory.mktemp(f"redis-{number}")) for number in range(2)]
    yield servers[0], servers[1]
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Three servers of a Redis Cluster, each with a third of the slots."""
    buses = [free_port() for _ in range(3)]
    options = ("redis", "127.0.0.1", "--cluster-enabled", "yes", "--cluster-port")
    found = [Server(tmp_path_factory.mktemp(f"master-{bus}"), *options, str(bus)) for bus in buses]
    for number, one in enumerate(found):
        one.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 5462 * number, min(5462 * number + 5461, 16383))
        one.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for one in found[1:]:
        one.client.execute_command("CLUSTER", "MEET", "127.0.0.1", found[0].port, buses[0])
    while not all(knows_all(one) for one in found):
        time.sleep(0.05)
    yield found
    for one in found:
        one.stop()


def knows_all(server: Server) -> bool:
    told = server.client.execute_command("CLUSTER INFO")
    return (told["cluster_state"], told["cluster_known_nodes"]) == ("ok", "3")
