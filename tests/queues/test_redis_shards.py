"""Shards in Redis: where each is, that nobody takes them for something else, and what holds when a server is killed."""

import asyncio
import re
from collections import Counter
from contextlib import suppress
from random import Random

import msgspec
import pytest

from tests.queues.conftest import Server
from tests.queues.sharded import Spread, TickingClock, Together
from tests.queues.test_shards import BETWEEN, OF_ALL
from unfuse import queues
from unfuse.core.errors import ConfigError, Conflict, LeaseLost, Overloaded, TransientError
from unfuse.core.request import Caller, request_ids
from unfuse.core.task import Lease
from unfuse.queues.base import QueueBackend, RequestFilter
from unfuse.queues.connection import parse_address
from unfuse.queues.shards import ShardedQueue
from unfuse.testing import ManualClock
from unfuse.testing.queue_samples import (
    LIMITS,
    TTL,
    change,
    completion,
    lease_next,
    lease_request,
    request,
    start_task,
    submit,
    task,
    worker_info,
)
from unfuse.testing.queue_suite import RULES, Rule, check_rule

SHORT = 2.0
"""Seconds of a lease here: nobody renews them."""

A_FEW = {
    "an_id_is_submitted_once",
    "a_repeated_commit_succeeds_once",
    "a_push_wakes_a_waiting_caller",
    "an_expired_lease_lasts_until_a_commit",
    "the_registry_follows_heartbeats",
    "a_cancelled_caller_leases_nothing",
    "ended_and_unknown_requests_are_found",
    "an_ended_request_can_be_dropped",
}
"""Rules that are held by day; all are by night."""


AT_ONCE = {
    "a_call_can_require_a_higher_priority",
    "a_commit_can_lease_in_the_same_call",
    "waiting_callers_are_served_by_rank",
    "waiting_ends_at_its_limit",
    "delays_and_returned_tasks_wake_callers",
}
"""Rules that go on as soon as somebody begins to wait: who waits for shards has asked each of them first."""


def rules(but: set[str]) -> list[object]:
    marks = {True: (), False: pytest.mark.nightly}
    return [
        pytest.param(rule, marks=marks[rule.__name__ in A_FEW], id=rule.__name__)
        for rule in RULES
        if rule.__name__ not in but
    ]


class TestAnAddress:
    def test_shards_are_assigned_to_servers_of_the_address(self) -> None:
        found = parse_address("redis://me:s@a,b:7000/2?shards=4&prefix=blue&replicas=1")
        assert [one.server for one in found] == ["redis://me:s@a/2", "redis://me:s@b:7000/2"] * 2
        assert [one.tag for one in found] == [f"{{blue:{shard}}}" for shard in range(4)]
        assert {one.replicas for one in found} == {1}
        assert [(one.unsharded.tag, one.unsharded.part) for one in found if one.unsharded] == [
            ("{blue}", "shards 0, 2 of 4"),
            ("{blue}", "shards 1, 3 of 4"),
        ] * 2
        assert found[1].display_name == "b:7000/2 (shard 1 of 4)"

    def test_shards_are_assigned_to_sentinel_services(self) -> None:
        found = parse_address("redis+sentinel://s1,s2/one,other/1?shards=3")
        assert [one.service for one in found] == ["one", "other", "one"]
        assert {one.hosts for one in found} == {(("s1", 26379), ("s2", 26379))}
        assert found[0].server == "redis://s1:26379/1"

    def test_cluster_address_is_parsed(self) -> None:
        found = parse_address("rediss+cluster://u:p@a,[::1]:7001?shards=2")
        assert [(one.kind, one.server, one.tag) for one in found] == [
            ("cluster", "rediss://u:p@a:6379", f"{{unfuse:{shard}}}") for shard in range(2)
        ]
        assert found[0].hosts == (("a", 6379), ("::1", 7001))
        pool = found[0].connect().connection_pool
        assert pool.connection_kwargs["username"] == "u"
        assert "SSL" in pool.connection_class.__name__
        (whole,) = parse_address("redis+cluster://a")
        assert (whole.tag, whole.part, whole.unsharded) == ("{unfuse}", "", None)

    @pytest.mark.parametrize(
        "url",
        [
            "redis://a?shards=0",
            "redis://a?shards=x",
            "redis://a?shards=65",
            "redis://a,b",
            "redis://a,b,c?shards=2",
            "redis://a,a?shards=2",
            "redis+sentinel://s/one,other",
            "redis+sentinel://s/one,one?shards=2",
            "redis+cluster://a/name",
        ],
    )
    def test_malformed_sharded_address_raises_config_error(self, url: str) -> None:
        with pytest.raises(ConfigError, match="the address of a Redis queue must be redis://"):
            queues.open(url)


@pytest.fixture
def pair(both: tuple[Server, Server]) -> tuple[Server, Server]:
    for server in both:
        server.sync("no")
        server.client.flushall()
    return both


def at(*servers: Server, shards: int = 2) -> str:
    return f"redis://{','.join(f'127.0.0.1:{server.port}' for server in servers)}?shards={shards}"


def shards_of(url: str, clock: ManualClock) -> list[QueueBackend]:
    queue = queues.open(url, clock)
    assert isinstance(queue, ShardedQueue)
    return list(queue._health.shards)


@pytest.mark.slow
@pytest.mark.parametrize("rule", rules(OF_ALL | AT_ONCE))
async def test_requests_on_one_shard_satisfy_each_queue_rule(rule: Rule, pair: tuple[Server, Server]) -> None:
    clock = ManualClock()
    await check_rule(rule, Together(shards_of(at(*pair), clock)), clock)


@pytest.mark.slow
@pytest.mark.parametrize("rule", rules(BETWEEN | AT_ONCE))
async def test_requests_on_several_shards_satisfy_each_queue_rule(rule: Rule, pair: tuple[Server, Server]) -> None:
    clock = TickingClock()
    await check_rule(rule, Spread(shards_of(at(*pair, shards=3), clock)), clock)


async def refused(url: str) -> str:
    queue = queues.open(url)
    try:
        await queue.check_address()
    except ConfigError as error:
        return str(error)
    finally:
        await queue.close()
    return ""


@pytest.mark.slow
async def test_wrong_shard_count_or_server_order_raises_config_error(pair: tuple[Server, Server]) -> None:
    """Given shards that were begun with, then another number, another order, other servers or none are refused."""
    one, other = pair
    assert await refused(at(one, other, shards=4)) == ""
    assert "shards 0, 2 of 4, not of a queue without shards: use the same number of shards" in await refused(one.url)
    assert "shards 1, 3 of 4, not of a queue without shards" in await refused(other.url)
    assert re.search(
        "shards (1, 3 of 4, not of shards 0, 2|0, 2 of 4, not of shards 1, 3) of 4",
        await refused(at(other, one, shards=4)),
    )
    assert "of 4, not of shards" in await refused(at(one, other, shards=2))
    assert "of 4, not of shards 0, 1, 2, 3 of 4" in await refused(at(one, shards=4))
    assert await refused(at(one, other, shards=4) + "&prefix=blue") == ""
    assert await refused(at(one, other, shards=4)) == ""


@pytest.mark.slow
async def test_mixing_sharded_and_unsharded_queues_raises_config_error(pair: tuple[Server, Server]) -> None:
    """Given a queue without shards, then none are begun beside it, and who runs already is refused what is not its."""
    one, other = pair
    whole = queues.open(other.url)
    await submit(whole, "a")
    assert "a queue without shards, not of shards 1 of 2" in await refused(at(one, other))
    other.client.flushall()
    assert await refused(at(one, other)) == ""
    with pytest.raises(ConfigError, match="shards 1 of 2, not of a queue without shards"):
        await whole.load("a")
    await whole.close()


async def until_done(work: object) -> object:
    """Try again while the queue does not answer."""
    while True:
        try:
            return await work()  # type: ignore[operator]
        except TransientError:
            await asyncio.sleep(0.02)


class Load:
    """Clients that submit and a worker that completes, over one queue each; `made` has how often each was completed."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.random = url, Random(seed)
        self.accepted, self.made, self.refused = dict[str, float](), Counter[str](), 0
        self.over, self.running = False, set[asyncio.Task[None]]()

    async def submit(self, queue: QueueBackend) -> None:
        while not self.over:
            id = queue.choose_id(request_ids(), Caller())
            try:
                await queue.submit(request(id), [task(id)], [], LIMITS)
                self.accepted[id] = asyncio.get_running_loop().time()
            except (TransientError, Overloaded):
                self.refused += 1
            await asyncio.sleep(self.random.random() / 100)

    async def work(self, queue: QueueBackend, name: str) -> None:
        await queue.register(worker_info(name))
        while True:
            leases: list[Lease] = []
            with suppress(TransientError):
                leases = await queue.lease(name, lease_request("p", slots=4), SHORT, wait=0.2)
            for lease in leases:
                one = asyncio.create_task(self.complete(queue, lease))
                self.running.add(one)
                one.add_done_callback(self.running.discard)

    async def sweep(self, queue: QueueBackend) -> None:
        """What schedulers do: whose lease is over, of that the next attempt is queued."""
        while True:
            with suppress(TransientError):
                for lease in await queue.sweep_expired(SHORT):
                    with suppress(TransientError, LeaseLost, Conflict):
                        record = await queue.load(lease.task.request)
                        again = msgspec.structs.replace(lease.task, attempt=lease.task.attempt + 1)
                        await queue.commit(change(record, lease.claim, push=(again,)))
            await asyncio.sleep(0.1)

    async def complete(self, queue: QueueBackend, lease: Lease) -> None:
        async def commit() -> None:
            record = await queue.load(lease.task.request)
            with suppress(LeaseLost):
                await queue.commit(completion(record, lease, status="completed", completed_at=1.0))
                self.made[lease.task.request] += 1

        await until_done(commit)


@pytest.mark.nightly
@pytest.mark.parametrize("freeze", [False, True], ids=["killed", "stopped"])
async def test_accepted_requests_complete_once_after_a_shard_server_fails(
    pair: tuple[Server, Server], freeze: bool
) -> None:
    """Given two schedulers over two servers, when one server is killed and comes back, or stands still, then meanwhile
    others are accepted and completed, and in the end everything accepted is complete, once."""
    for server in pair:
        server.sync()
    load = Load(at(*pair, shards=4), 7)
    opened = [queues.open(load.url) for _ in range(2)]
    for queue in opened:
        await queue.check_address()
    clients = [asyncio.create_task(load.submit(queue)) for queue in opened]
    workers = [asyncio.create_task(load.work(queue, f"w{number}")) for number, queue in enumerate(opened)]
    workers += [asyncio.create_task(load.sweep(queue)) for queue in opened]
    while len(load.accepted) < 100:
        await asyncio.sleep(0.01)
    (pair[1].pause if freeze else pair[1].kill)()
    while not all(len(queue.unreachable_parts()) == 2 for queue in opened):
        await asyncio.sleep(0.01)
    accepted, completed = len(load.accepted), len(load.made)
    while len(load.accepted) < accepted + 100 or len(load.made) < completed + 100:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(pair[1].go_on if freeze else pair[1].start)
    while any(queue.unreachable_parts() for queue in opened):
        await asyncio.sleep(0.01)
    load.over = True
    await asyncio.gather(*clients)
    while await opened[0].list(RequestFilter(is_over=False), limit=1):
        await asyncio.sleep(0.05)
    for one in workers:
        one.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    records = [record.context for record in await opened[0].list(RequestFilter(), limit=10**5)]
    assert {context.id for context in records} >= load.accepted.keys()
    assert {context.status for context in records} == {"completed"}
    assert set(load.made.values()) == {1}
    assert {context.id for context in records} == load.made.keys()
    for queue in opened:
        await queue.close()


@pytest.mark.nightly
async def test_cluster_shards_are_followed_when_their_slot_moves(masters: list[Server]) -> None:
    """Given three servers and any two of them as address, then shards lie on all, by all rules, and one whose slot
    moves is followed."""
    for one in masters:
        one.client.flushall()
    url = f"redis+cluster://127.0.0.1:{masters[1].port},127.0.0.1:{masters[0].port}?shards=6"
    queue = queues.open(url)
    await queue.check_address()
    names = [queue.choose_id(request_ids(), Caller()) for _ in range(40)]
    for name in names:
        await submit(queue, name)
    found = [{re.sub(rb":meta$", b"", key) for key in one.client.keys("{unfuse:*:meta")} for one in masters]
    assert sum(map(len, found)) == 6
    assert sum(map(bool, found)) > 1
    assert "not 'shards'" not in await refused(url)
    assert "a queue without shards" in await refused(url.partition("?")[0])
    assert [record.context.id for record in await queue.list(RequestFilter(), oldest_first=True)] == names
    waiting = await start_task(queue.lease("w", lease_request("q"), TTL, wait=60.0))
    tag = min(found[0] | found[1] | found[2])
    source = next(one for one, tags in zip(masters, found, strict=True) if tag in tags)
    target = next(one for one in masters if one is not source)
    move(masters, source, target, tag)
    while len(await queue.list(RequestFilter(), limit=100)) < 40:
        await asyncio.sleep(0.02)
    moved = next(
        name for name in iter(lambda: queue.choose_id(request_ids(), Caller()), "") if home(queue, name) == tag
    )
    await until_done(lambda: submit(queue, moved, pool="q"))
    assert [lease.task.request for lease in await waiting] == [moved]
    await queue.commit(change(await queue.load(moved), status="cancelled"))
    assert (await lease_next(queue)).task.request in names
    await queue.close()
    for rule in RULES:
        if rule.__name__ not in BETWEEN | AT_ONCE:
            for one in masters:
                one.client.flushall()
            clock = TickingClock()
            await check_rule(rule, Spread(shards_of(url, clock)), clock)


def home(queue: QueueBackend, name: str) -> bytes:
    assert isinstance(queue, ShardedQueue)
    return b"{unfuse:%d}" % queue.shard_of(name)


def move(masters: list[Server], source: Server, target: Server, tag: bytes) -> None:
    """Give a slot to another server, with all keys, as `redis-cli --cluster` does."""
    slot = int(source.client.execute_command("CLUSTER", "KEYSLOT", tag))
    ids = {one.port: one.client.execute_command("CLUSTER", "MYID").decode() for one in (source, target)}
    target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port])
    source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.port])
    while keys := source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
        source.client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
    for one in (target, source, *masters):
        one.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target.port])
