"""What a queue promises when another server becomes the primary: by Sentinels, by a name that moves, by hand."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from tests.queues.conftest import Server
from tools.redis_server import Service
from unfuse import queues
from unfuse.core.errors import ConfigError, LeaseLost, NotFound, TransientError
from unfuse.core.request import Event
from unfuse.queues import connection
from unfuse.queues.base import QueueBackend
from unfuse.queues.connection import parse_address
from unfuse.testing.queue_samples import (
    TTL,
    completion,
    expect_error,
    lease_next,
    lease_request,
    next_event,
    start_task,
    submit,
    task,
)

SENTINELS = "redis+sentinel://a,b:7000,[::1]:7001"


def test_sentinel_address_is_parsed() -> None:
    (found,) = parse_address("rediss+sentinel://me:s%40t@a,b:7000,[::1]:7001/tasks-1/3?prefix=blue&replicas=2")
    assert found.hosts == (("a", 26379), ("b", 7000), ("::1", 7001))
    assert (found.service, found.tag, found.replicas) == ("tasks-1", "{blue}", 2)
    assert found.display_name == "a:26379/3 (tasks-1)"
    options = found.connect().connection_pool.connection_kwargs
    assert {name: options[name] for name in ("username", "password", "db")} == {
        "username": "me",
        "password": "s@t",
        "db": 3,
    }
    assert parse_address("redis://me:s@h/2")[0].connect().connection_pool.connection_kwargs["db"] == 2


@pytest.mark.parametrize(
    "url",
    [
        SENTINELS,
        f"{SENTINELS}/",
        f"{SENTINELS}/tasks/x",
        f"{SENTINELS}/tasks/0/1",
        f"{SENTINELS}/tasks?replicas=-1",
        f"{SENTINELS}/tasks?replicas=x",
        "redis+sentinel://a,/tasks",
        "redis+sentinel://a,b:0/tasks",
        "redis://a,b/0",
        "redis+sentinel:///tasks",
        "redis+sentinel",
    ],
)
def test_malformed_sentinel_address_raises_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="the address of a Redis queue must be redis://"):
        queues.open(url)


@pytest.fixture
def pair(both: tuple[Server, Server]) -> tuple[Server, Server]:
    """An empty primary, and a replica that follows it."""
    primary, replica = both
    primary.follow(None)
    primary.client.flushall()
    replica.follow(primary)
    return primary, replica


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[QueueBackend]:
    queue = queues.open(url)
    try:
        yield queue
    finally:
        await queue.close()


@pytest.mark.slow
async def test_write_with_too_few_replicas_raises_transient_error(
    pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    primary, replica = pair
    async with opened(f"{primary.url}?replicas=1") as queue, opened(f"{primary.url}?replicas=2") as wanting:
        await submit(queue, "a")
        assert replica.client.exists("{unfuse}:request:a")
        monkeypatch.setattr(connection, "REPLICATED_MS", 10)
        error = await expect_error(TransientError, submit(wanting, "b"))
        assert "1 replicas received the changes, but 2 are required" in str(error)
        replica.follow(None)
        await expect_error(TransientError, queue.check())


class Name:
    """An address behind which one server is, and then another."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._writers: list[asyncio.StreamWriter] = []

    def close(self) -> None:
        """End the connections that are left: a server that stands still does not end its own."""
        for writer in self._writers:
            writer.close()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(far_writer)

        async def one_way(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(2**16):
                sink.write(data)
            sink.close()

        await asyncio.gather(one_way(reader, far_writer), one_way(far_reader, writer), return_exceptions=True)


@asynccontextmanager
async def named(primary: Server) -> AsyncIterator[tuple[Name, QueueBackend]]:
    name = Name(primary.port)
    server = await asyncio.start_server(name.carry, "127.0.0.1", 0)
    async with opened(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0") as queue:
        yield name, queue
    server.close()
    name.close()


@pytest.mark.slow
async def test_queue_reconnects_when_its_address_moves_to_a_new_primary(pair: tuple[Server, Server]) -> None:
    """Given an address behind which another server is the primary now, while the first answers on as its replica, then
    what that one refuses is asked again of the other."""
    primary, replica = pair
    async with named(primary) as (name, queue):
        await submit(queue, "a")
        name.port = replica.port
        replica.follow(None)
        primary.follow(replica)
        await expect_error(TransientError, submit(queue, "b"))
        await submit(queue, "b")
        assert replica.client.exists("{unfuse}:request:b")


@pytest.mark.slow
async def test_subscription_moves_to_the_new_primary_if_the_old_one_hangs(
    pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a primary that stands still with its connections open, then the subscription goes to the other."""
    primary, replica = pair
    monkeypatch.setattr(connection, "SWEEP_S", 0.05)
    async with named(primary) as (name, queue):
        waiting = await start_task(queue.lease("w", lease_request("p"), TTL, wait=60.0))
        while not heard(primary):
            await asyncio.sleep(0.01)
        name.port = replica.port
        replica.follow(None)
        primary.pause()
        try:
            while not heard(replica):
                await asyncio.sleep(0.01)
        finally:
            primary.go_on()
            waiting.cancel()


def heard(server: Server) -> bool:
    """Whether somebody hears there what changes."""
    ((_, number),) = server.client.pubsub_numsub("{unfuse}:news")
    return bool(number)


@pytest.mark.nightly
async def test_unreplicated_writes_are_lost_when_a_replica_is_promoted(pair: tuple[Server, Server]) -> None:
    """Given a primary that does not know that it is none any more, then what it acknowledges is unknown to the other: a
    request is not there, a stage is leased again, and what its first worker did counts where it was leased alone."""
    primary, replica = pair
    async with opened(primary.url) as old, opened(replica.url) as new, opened(f"{primary.url}?replicas=1") as careful:
        record = await submit(careful, "a")
        replica.follow(None)
        await submit(old, "b")
        first = await lease_next(old)
        await expect_error(TransientError, submit(careful, "c"))
        await expect_error(NotFound, new.load("b"))
        assert (await new.load("a")).context == record.context
        second = await lease_next(new)
        assert first.task.key == second.task.key == ("a", "s")
        await expect_error(LeaseLost, new.commit(completion(record, first)))
        assert (await new.commit(completion(record, second))).context.stages["s"].status == "done"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"))
    yield service
    service.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("freeze", [False, True], ids=["killed", "stopped"])
async def test_waiting_and_watching_callers_continue_after_failover(service: Service, freeze: bool) -> None:
    """Given a lease, a waiter and a watcher, when the primary is killed, or stands still and comes back, then all go on
    at the new one, and who submits finds it by itself."""
    service.primary.client.flushall()
    async with opened(f"{service.url}?replicas=1") as queue:
        await queue.check_address()
        record = await submit(queue, "a")
        lease = await lease_next(queue)
        watching = await start_task(next_event(queue.watch("a", after=2)))
        waiting = await start_task(queue.lease("w", lease_request("p"), TTL, wait=300.0))
        was = service.primary.port
        await asyncio.to_thread(service.fail_over, freeze)
        assert service.primary.port != was
        change = completion(record, lease, push=(task("a", "t"),), events=(Event("stage_completed"),))
        while True:
            try:
                await queue.commit(change)
                break
            except TransientError:
                await asyncio.sleep(0.05)
        assert [lease.task.stage for lease in await waiting] == ["t"]
        event = await watching
        assert event is not None and (event.type, event.seq) == ("stage_completed", 3)
