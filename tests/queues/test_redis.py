"""The Redis backend, on Redis and on Valkey: the suite, and what several queues over one server owe each other."""

import asyncio
import re
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import run_state_machine_as_test
from redis.asyncio.connection import SSLConnection

from tests.examples import examples
from tests.queues.conftest import Address, Server
from tests.queues.test_stateful import Histories
from unfuse import queues
from unfuse.core.clock import SystemClock
from unfuse.core.errors import ConfigError, LeaseLost, NotFound, RecordDamaged, TransientError
from unfuse.core.request import Event, RequestRecord
from unfuse.queues import script
from unfuse.queues.base import QueueBackend, QueueLimits, RequestFilter
from unfuse.queues.connection import RUN_BYTES, RUN_CALLS, runs
from unfuse.queues.redis import SCANNED, RedisQueue
from unfuse.queues.remote_waiters import MAX_BATCH
from unfuse.queues.script import task_fields
from unfuse.testing import ManualClock
from unfuse.testing.queue_samples import (
    LIMITS,
    TTL,
    append,
    change,
    completion,
    count_waiting,
    expect_error,
    history,
    lease_all,
    lease_next,
    lease_request,
    next_event,
    request,
    start_task,
    submit,
    task,
    worker_info,
)
from unfuse.testing.queue_suite import RULES, Rule, check_rule


@pytest.fixture
async def queue(server: Server) -> AsyncIterator[QueueBackend]:
    async with opened(server) as queue:
        yield queue


@pytest.fixture
async def other(server: Server) -> AsyncIterator[QueueBackend]:
    """Another scheduler's queue over the same server."""
    async with opened(server) as queue:
        yield queue


@pytest.fixture
def unsteady(server: Server) -> Iterator[Server]:
    """A server that may be killed, since it writes every change down before it answers."""
    server.sync("always")
    yield server
    if not server.running:
        server.start()
    server.sync("everysec")


@asynccontextmanager
async def opened(server: Address) -> AsyncIterator[QueueBackend]:
    queue = queues.open(server.url)
    try:
        yield queue
    finally:
        await queue.close()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
async def test_redis_queue_satisfies_each_queue_rule(rule: Rule, least: Address) -> None:
    clock = ManualClock()
    await check_rule(rule, queues.open(least.url, clock), clock)


def test_random_histories_of_two_redis_queues_match_the_model(server: Server) -> None:
    class SharedHistories(Histories):
        """Every command goes through another of two queues over one server."""

        def opened(self) -> QueueBackend:
            server.client.flushall()
            self.both = [queues.open(server.url, self.clock) for _ in range(2)]
            return self.both[0]

        def do(self, work):  # type: ignore[no-untyped-def]
            self.both.reverse()
            self.queue = self.both[0]
            return super().do(work)

        def teardown(self) -> None:
            for queue in self.both:
                self.loop.run_until_complete(queue.close())
            self.loop.close()

    few = settings(Histories.TestCase.settings, max_examples=examples(10))
    run_state_machine_as_test(SharedHistories, settings=few)


class TestTwoQueuesOverOneServer:
    async def test_submit_wakes_a_caller_waiting_at_another_scheduler(
        self, queue: QueueBackend, other: QueueBackend
    ) -> None:
        waiting = await start_task(other.lease("w", lease_request("p"), TTL, wait=30.0))
        await settled(other)
        await submit(queue, "a")
        assert [lease.task.request for lease in await waiting] == ["a"]

    async def test_task_leased_locally_sends_no_wake_up_to_other_schedulers(
        self, queue: QueueBackend, other: QueueBackend, server: Server
    ) -> None:
        """Then only what is left is told, by which the other's waiter gets it."""
        here = await start_task(queue.lease("here", lease_request("p"), TTL, wait=30.0))
        there = await start_task(other.lease("there", lease_request("p"), TTL, wait=30.0))
        await asyncio.gather(settled(queue), settled(other))
        with server.client.pubsub() as ears:
            ears.subscribe("{unfuse}:news")
            assert ears.get_message(timeout=5.0)["type"] == "subscribe"
            await submit(queue, "a")
            assert [lease.worker for lease in await here] == ["here"]
            await submit(queue, "b")
            assert [lease.task.request for lease in await there] == ["b"]
            heard = []
            while message := ears.get_message(timeout=0.5):
                heard.append(message["data"])
        assert [data for data in heard if b"pool" in data] == [b"pool:p"]

    async def test_concurrent_submits_with_one_idempotency_key_create_one_request(
        self, queue: QueueBackend, other: QueueBackend
    ) -> None:
        names = [f"{number:02}" for number in range(20)]
        same = (
            (queue, other)[number % 2].submit(request(name, idempotency_key="k"), [task(name)], [], LIMITS)
            for number, name in enumerate(names)
        )
        assert len({record.context.id for record in await asyncio.gather(*same)}) == 1
        assert (len(await other.list(RequestFilter())), await count_waiting(queue, "p")) == (1, 1)

    async def test_deltas_appended_by_both_schedulers_are_stored_once(
        self, queue: QueueBackend, other: QueueBackend
    ) -> None:
        """As one worker says them again to a second scheduler; and a lease that ended at one has ended at both."""
        await submit(queue, "a")
        claim = (await lease_next(queue)).claim
        for at in range(0, 60, 3):
            told = [b"%d" % number for number in range(at, at + 4)]
            both = (append(one, claim, at, told) for one in (queue, other) * 2)
            assert await asyncio.gather(*both) == [True] * 4
        assert [int(piece) for piece in await other.read_deltas("a", "s")] == list(range(61))
        assert await other.hand_back(claim)
        assert (await lease_next(queue)).recorded_deltas == 61
        assert await asyncio.gather(*(append(one, claim, 61, [b"late"]) for one in (queue, other))) == [False, False]

    async def test_each_task_is_leased_once_across_two_schedulers(
        self, queue: QueueBackend, other: QueueBackend
    ) -> None:
        waiting = [await start_task(q.lease("w", lease_request("p"), TTL, wait=30.0)) for q in (queue, other) * 10]
        for number in range(20):
            await submit(queue if number % 2 else other, f"{number:02}")
        leases = [lease for one in waiting for lease in await one]
        assert sorted(lease.task.request for lease in leases) == [f"{number:02}" for number in range(20)]

    async def test_events_are_streamed_across_schedulers(self, queue: QueueBackend, other: QueueBackend) -> None:
        record = await submit(queue, "a")
        stream = other.watch("a")
        assert (await anext(stream)).type == "queued"
        coming = await start_task(next_event(stream))
        lease = await lease_next(queue)
        event = await coming
        assert event is not None and event.type == "stage_started"
        await queue.commit(completion(record, lease, status="completed", events=(Event("completed"),)))
        assert [event.type async for event in stream] == ["completed"]

    async def test_cancellation_ends_a_lease_of_another_scheduler(
        self, queue: QueueBackend, other: QueueBackend
    ) -> None:
        record = await submit(queue, "a")
        lease = await lease_next(other)
        await queue.commit(change(record, status="cancelled"))
        assert (await other.renew([lease.claim], TTL)).ended == (lease.claim,)
        await expect_error(LeaseLost, other.commit(completion(record, lease)))

    async def test_both_schedulers_list_the_same_workers(self, queue: QueueBackend, other: QueueBackend) -> None:
        await queue.register(worker_info("v"))
        await other.register(worker_info("w"))
        await submit(queue, "a")
        await lease_next(queue, worker="w")
        assert [(m.info.id, m.leased) for m in await other.workers()] == [("v", 0), ("w", 1)]

    async def test_queues_with_different_prefixes_are_isolated(self, queue: QueueBackend, server: Server) -> None:
        await submit(queue, "a")
        async with opened(server.at("?prefix=elsewhere")) as elsewhere:
            assert await lease_all(elsewhere) == []
            await submit(elsewhere, "a")
        assert {key.partition(b"}")[0] for key in server.client.scan_iter()} == {b"{unfuse", b"{elsewhere"}

    async def test_stream_ends_when_another_scheduler_drops_the_request(
        self, queue: QueueBackend, other: QueueBackend
    ) -> None:
        record = await submit(queue, "a")
        stream = queue.watch("a", after=1)
        watching = await start_task(next_event(stream))
        await other.commit(change(record, status="cancelled", completed_at=1.0))
        assert await watching is None
        assert await other.drop_ended_before(2.0) == ["a"]
        for call in (history(queue, "a"), queue.load("a")):
            with pytest.raises(NotFound, match="request a does not exist"):
                await call
        assert not queue._subscription._followers

    async def test_sweep_gap_extends_leases_once_for_all_schedulers(self, server: Server) -> None:
        """Given leases that ran on while no scheduler was there, then the first sweep extends them, whoever makes it,
        and those of the others do not once more: the last one's time is kept on the server."""
        clock = ManualClock()
        one, other = (queues.open(server.url, clock) for _ in range(2))
        await submit(one, "a")
        lease = await lease_next(one)
        clock.advance(5 * TTL)
        assert await one.sweep_expired(TTL) == []
        for _ in range(3):
            clock.advance(TTL / 4)
            assert await other.sweep_expired(TTL) == []
        clock.advance(TTL / 4)
        assert [late.claim for late in await one.sweep_expired(TTL)] == [lease.claim]
        await other.close()
        newcomer = queues.open(server.url, clock)
        assert [late.claim for late in await newcomer.sweep_expired(TTL)] == [lease.claim]
        for queue in (one, newcomer):
            await queue.close()


class TestTheServerGoesAway:
    async def test_waiting_and_watching_callers_continue_after_server_restart(self, unsteady: Server) -> None:
        """Given a lease, a waiter and a watcher, when the server is killed and started, then nothing was lost."""
        async with opened(unsteady) as queue:
            record = await submit(queue, "a")
            lease = await lease_next(queue)
            stream = queue.watch("a", after=2)
            watching = await start_task(next_event(stream))
            waiting = await start_task(queue.lease("w", lease_request("p"), TTL, wait=60.0))
            await settled(queue)
            unsteady.kill()
            with pytest.raises(TransientError, match="does not respond"):
                await queue.load("a")
            await asyncio.sleep(0.5)
            unsteady.start()
            await answering(queue)
            await queue.commit(completion(record, lease, push=(task("a", "t"),), events=(Event("stage_completed"),)))
            assert [lease.task.stage for lease in await waiting] == ["t"]
            event = await watching
            assert event is not None and (event.type, event.seq) == ("stage_completed", 3)

    async def test_calls_to_a_dead_server_raise_transient_error(self, unsteady: Server) -> None:
        async with opened(unsteady.as_user("name", "secret")) as queue:
            unsteady.kill()
            calls = (
                lambda: queue.submit(request("a"), [task("a")], [], LIMITS),
                lambda: queue.lease("w", lease_request("p"), TTL),
                lambda: queue.sweep_expired(TTL),
                lambda: queue.check(),
                lambda: queue.workers(),
                lambda: queue.now(),
            )
            for call in calls:
                error = await expect_error(TransientError, call())
                assert f"the queue at 127.0.0.1:{unsteady.port}/0 does not respond" in str(error)
                assert "secret" not in str(error)

    async def test_lease_wait_times_out_while_the_server_is_down(self, unsteady: Server) -> None:
        async with opened(unsteady) as queue:
            unsteady.kill()
            assert await queue.lease("w", lease_request("p"), TTL, wait=0.3) == []

    async def test_close_wakes_all_waiting_callers(self, unsteady: Server) -> None:
        async with opened(unsteady) as queue:
            await submit(queue, "a")
            watching = await start_task(next_event(queue.watch("a", after=1)))
            waiting = await start_task(queue.lease("w", lease_request("q"), TTL, wait=60.0))
            await settled(queue)
            unsteady.kill()
        assert (await waiting, await watching) == ([], None)

    async def test_scripts_are_reloaded_after_script_flush(self, queue: QueueBackend, server: Server) -> None:
        await submit(queue, "a")
        server.client.script_flush()
        names = [f"b{number}" for number in range(5)]
        await asyncio.gather(*(submit(queue, name) for name in names))
        assert await lease_all(queue) == ["a", *names]

    async def test_killed_connections_are_reopened(self, queue: QueueBackend, server: Server) -> None:
        waiting = await start_task(queue.lease("w", lease_request("p"), TTL, wait=60.0))
        await settled(queue)
        for kind in ("normal", "pubsub"):
            server.client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        async with opened(server) as other:
            await submit(other, "a")
        assert [lease.task.request for lease in await waiting] == ["a"]


class TestTheServersClock:
    async def test_leases_expire_by_the_server_clock(self, queue: QueueBackend, server: Server) -> None:
        seconds, micros = server.client.time()
        assert await queue.now() == pytest.approx(seconds + micros / 1e6, abs=60)
        await submit(queue, "a")
        await queue.sweep_expired(TTL)
        (lease,) = await queue.lease("w", lease_request("p"), 0.01)
        await asyncio.sleep(0.05)
        assert await queue.sweep_expired(60 * TTL) == [lease]
        assert (await queue.load("a")).running[0].since == pytest.approx(lease.expires, abs=60)

    async def test_delayed_task_wakes_a_caller_at_another_scheduler(
        self, queue: QueueBackend, other: QueueBackend
    ) -> None:
        waiting = await start_task(other.lease("w", lease_request("p"), TTL, wait=30.0))
        await settled(other)
        await submit(queue, "a", not_before=await queue.now() + 0.2)
        assert await lease_all(queue) == []
        assert [lease.task.request for lease in await waiting] == ["a"]


async def test_task_of_a_cancelled_lease_call_returns_to_the_queue(queue: QueueBackend) -> None:
    """Given a call that was cancelled while it was under way, then the task is there, under its first attempt."""
    await submit(queue, "a")
    leaving = await start_task(queue.lease("w", lease_request("p"), TTL))
    leaving.cancel()
    await asyncio.wait({leaving})
    assert leaving.cancelled()
    assert (await lease_next(queue)).task == task("a")


async def test_more_waiting_callers_than_max_batch_all_get_tasks(queue: QueueBackend) -> None:
    names = [f"{number:03}" for number in range(MAX_BATCH + 10)]
    waiting = [await start_task(queue.lease("w", lease_request("p"), TTL, wait=30.0)) for _ in names]
    await asyncio.gather(*(submit(queue, name) for name in names))
    leases = [lease for one in waiting for lease in await one]
    assert sorted(lease.task.request for lease in leases) == names


async def test_long_lists_are_read_in_pages(queue: QueueBackend) -> None:
    names = [f"{number:04}" for number in range(2 * SCANNED + 1)]
    limits = QueueLimits(max_active=10_000)
    await asyncio.gather(*(queue.submit(request(n, tenant=n[-1]), [], [], limits) for n in names))
    found = await queue.list(RequestFilter(tenant="7"), limit=1000)
    assert [record.context.id for record in found] == [name for name in reversed(names) if name[-1] == "7"]
    for record in found:
        await queue.commit(change(record, status="completed", completed_at=1.0))
    assert len(await queue.list(RequestFilter(is_over=False), limit=5000)) == len(names) - len(found)
    assert sorted(await queue.drop_ended_before(2.0)) == [name for name in names if name[-1] == "7"]


async def test_concurrent_calls_share_one_script_run(queue: QueueBackend, server: Server) -> None:
    """Given outcomes that come together, then they share a run, and each is applied or refused by itself."""
    names = ("a", "b", "c", "d")
    records = {name: await submit(queue, name) for name in names}
    leases = {lease.task.request: lease for lease in await queue.lease("w", lease_request("p", slots=4), TTL)}
    await queue.hand_back(leases["b"].claim)
    server.client.set("{unfuse}:stages:c", "no sorted set")
    runs = int(server.client.info("commandstats")["cmdstat_evalsha"]["calls"])
    outcomes = await asyncio.gather(
        *(queue.commit(completion(records[name], leases[name])) for name in names),
        queue.load("x"),
        return_exceptions=True,
    )
    assert int(server.client.info("commandstats")["cmdstat_evalsha"]["calls"]) == runs + 1
    assert [type(one) for one in outcomes] == [RequestRecord, LeaseLost, RecordDamaged, RequestRecord, NotFound]
    again = await asyncio.gather(*(queue.load(name) for name in ("a", "b", "d")))
    assert [one.context.version for one in again] == [1, 0, 1]


@given(st.lists(st.integers(0, 2**21), max_size=100))
def test_script_runs_are_limited_in_calls_and_bytes(sizes: list[int]) -> None:
    calls = [("load", bytes(size)) for size in sizes]
    found = runs(calls)
    assert [call for run in found for call in run] == calls
    lengths = [[len(arguments) for _, arguments in run] for run in found]
    assert all(len(run) == 1 or (len(run) <= RUN_CALLS and sum(run) <= RUN_BYTES) for run in lengths)
    assert all(len(one) == RUN_CALLS or sum(one) + other[0] > RUN_BYTES for one, other in pairwise(lengths))


async def test_names_with_any_characters_are_distinct_tasks(queue: QueueBackend) -> None:
    """Given names that would run into each other if they were only joined, then they are different tasks."""
    for name, stage in (("a:b", "c"), ("a", "b:c"), ("ü{x}\n", "\0 ")):
        await queue.submit(request(name), [task(name, stage, pool="p:ü\n")], [], LIMITS)
    leases = await queue.lease("w", lease_request("p:ü\n", slots=9), TTL)
    assert [lease.task.key for lease in leases] == [("a:b", "c"), ("a", "b:c"), ("ü{x}\n", "\0 ")]


async def test_watch_finds_requests_submitted_by_another_scheduler(queue: QueueBackend, other: QueueBackend) -> None:
    await submit(other, "a")
    assert (await anext(queue.watch("a"))).type == "queued"
    with pytest.raises(NotFound, match="request b does not exist"):
        await anext(queue.watch("b"))


async def test_closed_queue_leases_nothing(queue: QueueBackend) -> None:
    await queue.close()
    assert await queue.lease("w", lease_request("p"), TTL, wait=60.0) == []
    with pytest.raises(TransientError, match="is closed"):
        await queue.load("a")


async def test_watch_on_a_closed_queue_ends_without_retrying(
    queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is heard any more, and that is not tried again and again."""
    heard: list[None] = []

    async def hear() -> None:
        heard.append(None)
        if len(heard) > 3:
            raise asyncio.CancelledError

    await queue.close()
    monkeypatch.setattr(queue._subscription, "_receive_messages", hear)
    assert [event async for event in queue.watch("a")] == []
    await asyncio.sleep(0.01)
    assert heard == []


@pytest.mark.nightly
async def test_redis_cluster_prefix_is_served_only_by_the_owner_of_its_slot(masters: list[Server]) -> None:
    """Given three servers, then the one that has a prefix serves every rule; the others name it."""
    homes = {}
    for prefix in ("unfuse", "blue", "green", "red"):
        slot = masters[0].client.execute_command("CLUSTER", "KEYSLOT", f"{{{prefix}}}")
        homes[prefix] = home = masters[int(slot) // 5462]
        for other in (one for one in masters if one is not home):
            queue = queues.open(f"redis://127.0.0.1:{other.port}?prefix={prefix}")
            with pytest.raises(ConfigError, match=f"this prefix on 127.0.0.1:{home.port}: use that server"):
                await queue.check_address()
            await queue.close()
    assert len({home.port for home in homes.values()}) > 1
    for rule in RULES:
        home.client.flushall()
        clock = ManualClock()
        await check_rule(rule, queues.open(f"redis://127.0.0.1:{home.port}?prefix=red", clock), clock)


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)), min_size=2))
def test_rank_bytes_sort_by_priority_and_order(pairs: list[tuple[int, float]]) -> None:
    ranks = {(-p, o + 0.0): bytes(task_fields(task("a", priority=p, order=o))["rank"]) for p, o in pairs}
    assert sorted(ranks.values()) == [ranks[pair] for pair in sorted(ranks)]


@pytest.mark.parametrize(
    "url",
    ["redis://h:x/0", "redis://h:0", "redis://h/name", "redis://h?prefix=", "redis://h?prefix={a}", "redis://h?db=1"],
)
def test_malformed_redis_address_raises_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="the address of a Redis queue must be redis://"):
        queues.open(url)


def test_valid_redis_addresses_are_accepted() -> None:
    for url in ("redis", "redis://h", "redis://u:p@[::1]:7000/3?prefix=a-b.c_d"):
        assert isinstance(RedisQueue.open(url, SystemClock()), RedisQueue)


def test_rediss_address_uses_tls() -> None:
    for url, is_private in (("redis://h", False), ("rediss://h:6380/1?prefix=a", True), ("rediss", True)):
        queue = queues.open(url)
        assert isinstance(queue, RedisQueue)
        assert issubclass(queue._redis.connection_pool.connection_class, SSLConnection) == is_private


def test_lua_scripts_are_packaged_in_the_wheel() -> None:
    """Given that hatchling packs the whole folder of a package but for what git ignores, then nothing takes the scripts
    out of it, and the files that the code reads are the files that there are."""
    root = Path(__file__).parents[2]
    build = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]
    assert build["build"]["targets"]["wheel"] == {"packages": ["unfuse"]}
    assert not {"exclude", "only-include", "include"} & build["build"].keys()
    files = sorted((root / "unfuse" / "queues" / "scripts").iterdir())
    assert [file.name for file in files] == sorted(f"{part}.lua" for part in script.PARTS)
    assert not {"lua", "scripts"} & set(re.findall(r"\w+", (root / ".gitignore").read_text()))


async def test_check_of_a_hanging_server_raises_transient_error(unsteady: Server) -> None:
    """Given a server that is there and does not answer, then whoever asks whether the queue works is told so soon."""
    async with opened(unsteady) as queue:
        await queue.check()
        unsteady.pause()
        try:
            with pytest.raises(TransientError, match="does not respond"):
                await queue.check()
        finally:
            unsteady.go_on()
        await queue.check()


async def test_server_out_of_memory_raises_transient_error(unsteady: Server) -> None:
    """Given a server that reads and refuses to write, then whoever asks whether the queue works is told so."""
    async with opened(unsteady) as queue:
        await queue.submit(request("a"), [task("a")], [], LIMITS)
        unsteady.client.config_set("maxmemory", 1)
        try:
            with pytest.raises(TransientError, match="is out of memory"):
                await queue.check()
            with pytest.raises(TransientError, match="is out of memory"):
                await queue.submit(request("b"), [task("b")], [], LIMITS)
            assert [record.context.id for record in await queue.list(RequestFilter())] == ["a"]
        finally:
            unsteady.client.config_set("maxmemory", 0)
        await queue.check()


@pytest.mark.slow
def test_missing_redis_library_raises_error_naming_the_extra() -> None:
    program = "import sys; sys.modules['redis'] = None; from unfuse import queues; queues.open('redis://h')"
    end = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ConfigError: a Redis queue needs the redis library: pip install 'unfuse[redis]'" in end.stderr


async def settled(queue: QueueBackend) -> None:
    """Until what the queue does in the background has been done: its waiters wait, and it listens."""
    await asyncio.sleep(0.1)
    await queue.now()


async def answering(queue: QueueBackend) -> None:
    """Until the server answers this queue again."""
    while True:
        try:
            await queue.now()
        except TransientError:
            await asyncio.sleep(0.05)
        else:
            return
