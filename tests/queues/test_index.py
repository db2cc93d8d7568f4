"""What is asked costs what is answered, whatever else is stored, and what is forgotten leaves nothing behind."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.queues.conftest import Server
from unfuse import queues
from unfuse.queues.base import QueueBackend, QueueLimits, RequestFilter
from unfuse.queues.index import IndexEntry
from unfuse.queues.memory import MemoryQueue
from unfuse.queues.sqlite import SqliteQueue
from unfuse.testing import ManualClock
from unfuse.testing.queue_samples import (
    TTL,
    change,
    completion,
    lease_next,
    lease_request,
    plan_with_costs,
    request,
    task,
)

LIMITS = QueueLimits(max_active=10_000, max_queue=10_000)
ASKED = (
    RequestFilter(tenant="t", idempotency_key="k"),
    RequestFilter(tenant="t", fingerprint="f"),
    RequestFilter(tenant="t"),
    RequestFilter(tenant="t", is_over=False),
    RequestFilter(tenant="t", status="queued"),
    RequestFilter(tenant="t", status="in_progress"),
    RequestFilter(tenant="t", status="completed"),
    RequestFilter(tenant="t", is_dead_letter=True),
    RequestFilter(tenant="t", video=True),
    RequestFilter(is_over=False),
    RequestFilter(status="completed"),
)
"""All that the server asks."""


async def fill(queue: QueueBackend, more: int, first: int = 0) -> None:
    """Three requests of "t", of each kind one; then that many of others, half of them over, some of them dead."""
    if not first:
        for name, status in (("video_t", "completed"), ("dead_t", "failed"), ("t", "")):
            fields = {"tenant": "t", "idempotency_key": "k" * (name == "t"), "fingerprint": "f" * (name == "t")}
            await queue.submit(request(name, **fields), [task(name)], [], LIMITS)
            if status:
                record = await queue.load(name)
                await queue.commit(change(record, status=status, is_dead_letter=status == "failed", completed_at=2e9))

    async def one(number: int) -> None:
        name = f"{'video_' * (number % 2)}{number}"
        fields = {"tenant": "u", "idempotency_key": f"k{number}", "fingerprint": f"f{number % 7}"}
        record = await queue.submit(request(name, **fields), [], [], LIMITS)
        if number % 4 > 1:
            await queue.commit(
                change(record, status="failed", is_dead_letter=number % 8 == 7, completed_at=float(number))
            )

    await asyncio.gather(*(one(number) for number in range(first, first + more)))


@pytest.fixture
async def redis_queue(server: Server) -> AsyncIterator[QueueBackend]:
    queue = queues.open(server.url)
    yield queue
    await queue.close()


async def test_redis_list_command_count_is_independent_of_stored_requests(
    redis_queue: QueueBackend, server: Server
) -> None:
    """Given ten times as many stored requests of others, then it is the same commands, for every question."""

    async def commands(which: RequestFilter, oldest_first: bool) -> Counter[str]:
        server.client.config_resetstat()
        await redis_queue.list(which, limit=2, oldest_first=oldest_first)
        stats = server.client.info("commandstats")
        return Counter(
            {name: told["calls"] for name, told in stats.items() if "info" not in name and "config" not in name}
        )

    counted = []
    for first, more in ((0, 40), (40, 400)):
        await fill(redis_queue, more, first)
        counted.append([await commands(which, oldest) for which in ASKED for oldest in (False, True)])

    assert counted[0] == counted[1]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_list_in_memory_examines_as_many_entries_with_more_requests(kind: str, tmp_path: Path) -> None:
    """Given ten times as many stored requests of others, then it looks at as many, for every question."""
    clock = ManualClock()
    queue = MemoryQueue(clock) if kind == "memory" else SqliteQueue(tmp_path / "queue.db", clock)
    looked: list[IndexEntry] = []
    fits = IndexEntry.matches

    def counting(entry: IndexEntry, which: RequestFilter) -> bool:
        looked.append(entry)
        return fits(entry, which)

    counted = []
    for first, more in ((0, 40), (40, 1000)):
        await fill(queue, more, first)
        counted.append([])
        with patch.object(IndexEntry, "matches", counting):
            for which in ASKED:
                looked.clear()
                await queue.list(which, limit=2)
                counted[-1].append(len(looked))
    await queue.close()

    assert counted[0] == counted[1] and max(counted[0]) <= 2


async def test_redis_stats_command_count_is_independent_of_queue_length(
    redis_queue: QueueBackend, server: Server
) -> None:
    """Given ten times as many requests in progress and tasks in line, then it is the same commands, but for the first
    scrape of a queue."""

    async def commands() -> dict[str, int]:
        server.client.config_resetstat()
        assert (await redis_queue.stats(["p", "q"])).pools["p"].left_s > 0
        stats = server.client.info("commandstats")
        return {name: told["calls"] for name, told in stats.items() if "info" not in name and "config" not in name}

    counted = []
    for first, more in ((0, 10), (10, 100)):
        for number in range(first, first + more):
            await redis_queue.submit(request(f"{number}", plan=plan_with_costs(p=0.1)), [task(f"{number}")], [], LIMITS)
        await redis_queue.stats([])
        counted.append(await commands())

    assert counted[0] == counted[1]


async def test_each_queue_call_is_one_script_run(redis_queue: QueueBackend, server: Server) -> None:
    """Also an outcome with the next lease: nothing can come between."""
    for name in "ab":
        await redis_queue.submit(request(name), [task(name)], [], LIMITS)
    lease = await lease_next(redis_queue)
    outcome = completion(await redis_queue.load("a"), lease)
    server.client.config_resetstat()

    _, leases = await redis_queue.commit_and_lease(outcome, "w", lease_request("p"), TTL)

    assert [one.task.request for one in leases] == ["b"]
    assert server.client.info("commandstats")["cmdstat_evalsha"]["calls"] == 1
    await redis_queue.commit(completion(await redis_queue.load("b"), leases[0]))
    assert server.client.info("commandstats")["cmdstat_evalsha"]["calls"] == 3


async def test_ended_among_is_one_script_run_without_reading_contexts(
    redis_queue: QueueBackend, server: Server
) -> None:
    """Given hundreds of requests, as a heartbeat names them, then it costs one look at a field of each, and one at
    whose keys these are."""
    await fill(redis_queue, 300)
    names = [f"{'video_' * (number % 2)}{number}" for number in range(300)]
    server.client.config_resetstat()

    assert len(await redis_queue.ended_among(names)) == 150

    ran = {name: told["calls"] for name, told in server.client.info("commandstats").items()}
    assert (ran["cmdstat_evalsha"], ran["cmdstat_hget"], ran["cmdstat_hmget"]) == (1, 300, 1)
    assert not {"cmdstat_hgetall", "cmdstat_zrange"} & ran.keys()


async def test_dropped_requests_leave_no_keys_in_redis(redis_queue: QueueBackend, server: Server) -> None:
    """Given requests of every kind that ran, ended and were forgotten, then one key is left, of what is counted."""
    await fill(redis_queue, 20)
    lease = await lease_next(redis_queue)
    await redis_queue.hand_back(lease.claim)
    assert len(server.client.keys()) > 60
    for record in await redis_queue.list(RequestFilter(is_over=False)):
        await redis_queue.commit(change(record, status="cancelled", completed_at=1.0))
    await redis_queue.drop("t")
    await redis_queue.drop_ended_before(3e9)

    assert server.client.keys() == [b"{unfuse}:meta"]


async def test_dropped_requests_leave_nothing_in_memory() -> None:
    queue = MemoryQueue(ManualClock())
    await fill(queue, 20)
    for record in await queue.list(RequestFilter(is_over=False)):
        await queue.commit(change(record, status="cancelled", completed_at=1.0))
    await queue.drop("t")
    await queue.drop_ended_before(3e9)

    assert (queue._requests, queue._index._under, queue._index.ended_before(3e9)) == ({}, {}, [])
