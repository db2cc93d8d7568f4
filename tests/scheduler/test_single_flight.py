"""Encodes that are equal and under way are one, and whoever waits for another comes to an end, whatever happens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from tests.scheduler.model import DECODE, DENOISE, ENCODE, SHARING, params
from tests.scheduler.test_encoder_cache import done
from tests.scheduler.test_scheduler import info
from tools.asking import asking
from tools.redis_server import RedisServer
from unfuse import queues
from unfuse.core.errors import LeaseLost, NotFound
from unfuse.core.messages import TaskFailed
from unfuse.core.request import RequestContext, RequestRecord
from unfuse.core.task import Lease
from unfuse.queues.base import QueueBackend
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.queue_samples import count_waiting, lease_request
from unfuse.testing.virtual_time import VirtualClock, in_virtual_time

WORKER, TTL = "worker-1", 5.0
ENCODED = "text_encode"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a queue is: of each kind that there is."""
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis")
        server.client.flushall()
        return server.url
    return {"memory": "memory", "sqlite": f"sqlite:{tmp_path}/queue.db"}[request.param]


@asynccontextmanager
async def scheduling(queue: QueueBackend, **options: Any) -> AsyncIterator[Scheduler]:
    """A scheduler on a queue, with a live worker of all pools; it looks through the queue when it is told to."""
    scheduler = Scheduler(queue, specs=[SHARING], cache_bytes=1000, lease_ttl=TTL, **options)
    await queue.register(info(WORKER, ENCODE, DENOISE, DECODE), [SHARING])
    try:
        yield scheduler
    finally:
        await scheduler.close()


@asynccontextmanager
async def one(url: str) -> AsyncIterator[Scheduler]:
    queue = queues.open(url)
    try:
        async with scheduling(queue) as scheduler:
            yield scheduler
    finally:
        await queue.close()


async def ask(scheduler: Scheduler, seed: int = 1, **more: Any) -> RequestRecord:
    given = {name: more.pop(name) for name in ("prompt",) if name in more}
    return await scheduler.submit(*asking(SHARING, params(seed, **given), **more))


async def lease(scheduler: Scheduler, *pools: str, slots: int = 1, wait: float = 5.0) -> list[Lease]:
    offer = lease_request(*(pools or (ENCODE, DENOISE, DECODE)), slots=slots)
    return await scheduler.queue.lease(WORKER, offer, TTL, wait=wait)


async def context(scheduler: Scheduler, record: RequestRecord) -> RequestContext:
    return (await scheduler.queue.load(record.context.id)).context


async def run(scheduler: Scheduler, *records: RequestRecord) -> Counter[str]:
    """Do what there is to do until these requests are over: how often each stage ran."""
    ran = Counter[str]()
    while not all([(await context(scheduler, record)).is_over for record in records]):
        for one in await lease(scheduler, wait=0.2):
            ran[one.task.stage.partition(".")[0]] += 1
            await scheduler.complete(done(one), WORKER)
    return ran


async def statuses(scheduler: Scheduler, *records: RequestRecord) -> list[str]:
    return [(await context(scheduler, record)).status for record in records]


async def test_request_shares_a_running_encode_of_the_same_prompt(url: str) -> None:
    async with one(url) as scheduler:
        first = await ask(scheduler, 1)
        (encode,) = await lease(scheduler)
        others = [await ask(scheduler, seed) for seed in (2, 3)]
        assert {record.context.stages[ENCODED].shares_with_request for record in others} == {first.context.id}
        assert await count_waiting(scheduler.queue, ENCODE) == 0

        await scheduler.complete(done(encode), WORKER)

        tasks = [one.task for _ in range(3) for one in await lease(scheduler, DENOISE)]
        assert {task.inputs for task in tasks} == {(done(encode).output,)}
        assert {task.request for task in tasks} == {record.context.id for record in (first, *others)}
        for record in others:
            state = (await context(scheduler, record)).stages[ENCODED]
            assert (state.status, state.attempt, state.worker, state.shares_with_request) == ("done", 0, WORKER, "")
            told = [event.type async for event in until(scheduler, record, "stage_started")]
            assert told == ["queued", "stage_completed", "stage_started"]


async def test_tiled_encode_is_neither_cached_nor_shared(url: str) -> None:
    async with one(url) as scheduler:
        first = await ask(scheduler, 1)
        (encode,) = await lease(scheduler)
        second = await ask(scheduler, 2)
        assert second.context.stages[ENCODED].shares_with_request == first.context.id

        await scheduler.complete(msgspec.structs.replace(done(encode), vae="tiled"), WORKER)
        ran = await run(scheduler, first, second)
        assert (await context(scheduler, first)).stages[ENCODED].vae == "tiled"
        assert ran[ENCODED] == 1, "the second request encodes by itself"

        third = await ask(scheduler, 3)
        assert (await run(scheduler, third))[ENCODED] == 0, "and its output is cached"
        states = [(await context(scheduler, record)).stages[ENCODED] for record in (second, third)]
        assert [(state.vae, state.output == done(encode).output) for state in states] == [("", False)] * 2


async def until(scheduler: Scheduler, record: RequestRecord, kind: str) -> AsyncIterator[Any]:
    """The events of a request up to the first of a kind."""
    async for event in scheduler.queue.watch(record.context.id):
        yield event
        if event.type == kind:
            return


async def test_requests_share_a_queued_encode_and_all_complete(url: str) -> None:
    async with one(url) as scheduler:
        records = [await ask(scheduler, seed, prompt="ab"[seed % 2]) for seed in range(6)]
        assert await count_waiting(scheduler.queue, ENCODE) == 2
        assert await run(scheduler, *records) == {"text_encode": 2, "denoise": 6, "vae_decode": 6}
        assert await statuses(scheduler, *records) == ["completed"] * 6


@pytest.mark.parametrize("other", [{"tenant": "another"}, {"cache": False}, {"prompt": "another"}, {"priority": 1}])
async def test_encode_is_not_shared_if_inputs_differ_or_priority_is_higher(url: str, other: dict[str, Any]) -> None:
    """Given an encode that waits, then what is more urgent does not wait behind it, and nothing that differs."""
    async with one(url) as scheduler:
        records = [await ask(scheduler), await ask(scheduler, **other)]
        assert await count_waiting(scheduler.queue, ENCODE) == 2
        assert not (await context(scheduler, records[1])).stages[ENCODED].shares_with_request
        assert (await run(scheduler, *records))["text_encode"] == 2


@pytest.mark.parametrize("fate", ["cancel", "permanent", "transient", "crash", "expire", "forged"])
async def test_waiting_request_encodes_itself_if_the_shared_encode_fails(url: str, fate: str) -> None:
    """Given a request whose encoder fails, dies, or is no longer wanted, then the one that waits runs at once."""
    async with one(url) as scheduler:
        first = await ask(scheduler, 1)
        (encode,) = await lease(scheduler)
        second = await ask(scheduler, 2)
        assert second.context.stages[ENCODED].shares_with_request

        if fate == "cancel":
            await scheduler.cancel(first.context.id)
        elif fate == "expire":
            await scheduler.maintenance.expire_lease(encode)
        elif fate == "forged":
            forged = msgspec.structs.replace(done(encode).output, attempt=9)  # type: ignore[type-var]
            await scheduler.complete(msgspec.structs.replace(done(encode), output=forged), WORKER)
        else:
            await scheduler.fail(TaskFailed(encode.claim, fate, "it went wrong"), WORKER)  # type: ignore[arg-type]

        leases = [one for _ in range(2) for one in await lease(scheduler, ENCODE, wait=1.0)]
        assert second.context.id in {one.task.request for one in leases}
        for one_ in leases:
            await scheduler.complete(done(one_), WORKER)
        await run(scheduler, second)
        assert await statuses(scheduler, second) == ["completed"]
        assert (await context(scheduler, second)).stages[ENCODED].attempt == 1


async def test_cancelling_a_waiting_request_does_not_affect_the_others(url: str) -> None:
    async with one(url) as scheduler:
        records = [await ask(scheduler, seed) for seed in (1, 2, 3)]
        await scheduler.cancel(records[1].context.id)
        assert (await run(scheduler, records[0], records[2]))["text_encode"] == 1
        assert await statuses(scheduler, *records) == ["completed", "cancelled", "completed"]


async def test_uncached_encoding_is_reused_while_its_request_is_active(url: str) -> None:
    """Given an output that the cache has not yet, or no more, then the next one has it, until its maker is over."""
    async with one(url) as scheduler:
        first = await ask(scheduler, 1)
        (encode,) = await lease(scheduler)
        await scheduler.complete(done(encode), WORKER)
        made = done(encode).output
        assert made
        await scheduler.queue.remove_encoding(encode.task.planned.cache_key, made.id)
        second = await ask(scheduler, 2)
        assert [event.type async for event in until(scheduler, second, "stage_completed")]
        assert (await run(scheduler, first, second))["text_encode"] == 0

        await scheduler.queue.remove_encoding(encode.task.planned.cache_key, made.id)
        third = await ask(scheduler, 3)
        assert not third.context.stages[ENCODED].shares_with_request
        assert (await run(scheduler, third))["text_encode"] == 1


async def test_waiting_request_uses_an_encoding_larger_than_the_cache(url: str) -> None:
    """Given an output that is larger than the cache, then who waited for it has it all the same."""
    async with one(url) as scheduler:
        records = [await ask(scheduler, seed) for seed in (1, 2)]
        (encode,) = await lease(scheduler)
        await scheduler.complete(done(encode, nbytes=2000), WORKER)
        assert [event.type async for event in until(scheduler, records[1], "stage_completed")]
        assert (await run(scheduler, *records))["text_encode"] == 0


@pytest.mark.parametrize("left", ["running", "done", "over"])
async def test_another_scheduler_resumes_waiting_requests_of_a_dead_one(url: str, left: str) -> None:
    """Given a scheduler that is gone with all that it waited for, then the next look through the queue finds it."""
    queue = queues.open(url)
    try:
        async with scheduling(queue) as dies:
            first = await ask(dies, 1)
            (encode,) = await lease(dies)
            second = await ask(dies, 2)
        async with scheduling(queue) as lives:
            if left == "done":
                await lives.complete(done(encode), WORKER)
            if left == "over":
                await lives.cancel(first.context.id)
            await lives.maintenance.requests()
            expected = {"running": "waiting", "done": "done", "over": "queued"}[left]
            assert (await context(lives, second)).stages[ENCODED].status == expected
            if left == "running":
                await lives.complete(done(encode), WORKER)
                await lives.maintenance.requests()
                assert (await context(lives, second)).stages[ENCODED].status == "done"
            await run(lives, second)
    finally:
        await queue.close()


@pytest.mark.slow
async def test_two_schedulers_over_redis_complete_shared_encodes(redis: RedisServer) -> None:
    """Given requests at both, and workers that report to either, then each scheduler's own are one encode."""
    redis.client.flushall()
    async with one(redis.url) as near, one(redis.url) as far:
        first = await ask(near, 1)
        (encode,) = await lease(near)
        waits, other = await ask(near, 2), await ask(far, 3)
        assert (
            waits.context.stages[ENCODED].shares_with_request,
            other.context.stages[ENCODED].shares_with_request,
        ) == (first.context.id, "")
        await far.complete(done(encode), WORKER)
        assert (await run(far, first, waits, other))["text_encode"] == 1
        assert await statuses(near, first, waits, other) == ["completed"] * 3


HAPPENS = ["ask", "ask", "ask", "do", "do", "cancel", "fail", "crash", "lose", "expire", "die", "review"]


@given(st.lists(st.sampled_from(HAPPENS), max_size=40), st.randoms(use_true_random=False))
def test_every_request_ends_under_random_failures(happens: list[str], dice: random.Random) -> None:
    """Given schedulers that die, workers that fail and requests that are cancelled, of two prompts in any order, then
    all that nobody cancelled complete, unless they used up a budget of their own."""
    in_virtual_time(_whatever)(happens, dice)


async def _whatever(happens: list[str], dice: random.Random) -> None:
    clock, asked = VirtualClock(), list[RequestRecord]()
    queue = MemoryQueue(clock)
    async with AsyncExitStack() as stack:
        both = [await stack.enter_async_context(scheduling(queue, clock=clock)) for _ in range(2)]
        for what in happens:
            scheduler = dice.choice(both)
            if what == "ask":
                asked.append(await ask(scheduler, len(asked), prompt=dice.choice("ab"), priority=dice.randrange(2)))
            elif what == "die":
                await scheduler.close()
                both[both.index(scheduler)] = await stack.enter_async_context(scheduling(queue, clock=clock))
            elif what == "review":
                await scheduler.maintenance.requests()
            elif what == "cancel" and asked:
                await scheduler.cancel(dice.choice(asked).context.id)
            else:
                await _something(scheduler, what)
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
        for _ in range(200):
            await both[0].maintenance.requests()
            for one in await lease(both[0], slots=8, wait=10.0):
                await both[0].complete(done(one), WORKER)
        ended = [await context(both[0], record) for record in asked]
    await queue.close()
    assert {one.status for one in ended} <= {"completed", "cancelled", "failed"}
    assert all(one.is_dead_letter for one in ended if one.status == "failed")


async def _something(scheduler: Scheduler, what: str) -> None:
    """What becomes of the next task."""
    for one in await lease(scheduler, wait=0.0):
        lost = one.task.inputs[0].id if one.task.inputs else ""
        with suppress(LeaseLost, NotFound):
            if what == "expire":
                await scheduler.maintenance.expire_lease(one)
            elif what == "fail" or (what == "lose" and not lost):
                await scheduler.fail(TaskFailed(one.claim, "transient", "later"), WORKER)
            elif what == "crash":
                await scheduler.fail(TaskFailed(one.claim, "crash", "bang"), WORKER)
            elif what == "lose":
                await scheduler.fail(TaskFailed(one.claim, "object_lost", "gone", object_id=lost), WORKER)
            else:
                await scheduler.complete(done(one), WORKER)
