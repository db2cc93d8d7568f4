"""What one request has encoded serves others, and what may go wrong then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from tests.scheduler.model import DECODE, DENOISE, ENCODE, SHARING, params
from tests.scheduler.test_scheduler import done as plain, info, pass_by, take
from tools.asking import asking
from unfuse.core.errors import LeaseLost, Overloaded, TransientError
from unfuse.core.messages import TaskCompleted, TaskFailed
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import RequestContext, RequestRecord, Timings
from unfuse.core.task import Lease, cache_owner_name
from unfuse.queues.base import QueueLimits
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import count_waiting, lease_request

WORKER, ROOM, SIZE = "worker-1", 100, 40


class Counts(Observer):
    """What an observer heard of the cache."""

    def __init__(self) -> None:
        self.hits = self.misses = 0

    def on_cache_lookup(self, hits: int, misses: int) -> None:
        self.hits, self.misses = self.hits + hits, self.misses + misses


@asynccontextmanager
async def caching(
    queue: MemoryQueue | None = None, clock: ManualClock | None = None, cache_bytes: int = ROOM, **options: Any
) -> AsyncIterator[tuple[Scheduler, Counts]]:
    """A scheduler with a cache, a live worker of all pools, and what it was told of the cache."""
    clock = clock or ManualClock()
    scheduler = Scheduler(queue or MemoryQueue(clock), specs=[SHARING], clock=clock, cache_bytes=cache_bytes, **options)
    counts = Counts()
    scheduler.observers.add(counts)
    await scheduler.queue.register(info(WORKER, ENCODE, DENOISE, DECODE), [SHARING])
    try:
        yield scheduler, counts
    finally:
        await scheduler.close()


def done(lease: Lease, nbytes: int = SIZE) -> TaskCompleted:
    """What the worker makes of a task: objects of their own names."""
    report = plain(lease)
    if report.output is None:
        return report
    name = f"{lease.task.request}/{report.output.id}"
    return msgspec.structs.replace(report, output=msgspec.structs.replace(report.output, id=name, nbytes=nbytes))


async def ran(scheduler: Scheduler, nbytes: int = SIZE, pools: tuple[str, ...] = ()) -> list[str]:
    """Do whatever there is to do; the stages in the order in which they ran."""
    stages = []
    while leases := await take(scheduler, *pools):
        stages.append(leases[0].task.stage)
        await scheduler.complete(done(leases[0], nbytes), WORKER)
    return stages


async def loaded(scheduler: Scheduler, record: RequestRecord) -> RequestContext:
    return (await scheduler.queue.load(record.context.id)).context


ALL, REST = ["text_encode", "denoise.0", "vae_decode.0"], ["denoise.0", "vae_decode.0"]


async def test_second_request_for_the_same_prompt_uses_the_cached_encoding() -> None:
    async with caching() as (scheduler, counts):
        first = await scheduler.submit(*asking(SHARING, params(seed=1)))
        (encode,) = await take(scheduler)
        made = done(encode).output
        await scheduler.complete(done(encode), WORKER)
        assert await ran(scheduler) == REST
        assert (counts.hits, counts.misses) == (0, 1)

        second = await scheduler.submit(*asking(SHARING, params(seed=2), n=2))

        assert await count_waiting(scheduler.queue, ENCODE) == 0
        state = second.context.stages["text_encode"]
        assert (state.status, state.attempt, state.worker, state.output) == ("done", 0, WORKER, made)
        tasks = await scheduler.queue.peek(DENOISE)
        assert [task.inputs for task in tasks] == [(made,), (made,)]
        assert {task.preferred_node for task in tasks} == {"node-1"}
        assert sorted(await ran(scheduler)) == ["denoise.0", "denoise.1", "vae_decode.0", "vae_decode.1"]
        assert [(await loaded(scheduler, record)).status for record in (first, second)] == ["completed", "completed"]
        assert (counts.hits, counts.misses) == (1, 1)


async def test_cached_stage_emits_stage_completed_without_stage_started() -> None:
    async with caching() as (scheduler, _):
        await scheduler.submit(*asking(SHARING, params()))
        await ran(scheduler)
        record = await scheduler.submit(*asking(SHARING, params()))
        await ran(scheduler)
        told = [event async for event in scheduler.queue.watch(record.context.id)]
        assert [(event.type, event.stage, event.message, event.worker) for event in told[:2]] == [
            ("queued", "", "", ""),
            ("stage_completed", "text_encode", "cached", WORKER),
        ]
        assert "text_encode" not in {event.stage for event in told if event.type == "stage_started"}


@pytest.mark.parametrize(
    "other",
    [
        {"params": params(prompt="a blue circle")},
        {"params": params(guidance_scale=3.0)},
        {"tenant": "somebody else"},
        {"cache": False},
    ],
)
async def test_request_with_other_cache_key_inputs_is_encoded(other: dict[str, Any]) -> None:
    async with caching() as (scheduler, _):
        for asked, stages in (({}, ALL), (other, ALL), ({}, REST)):
            await scheduler.submit(*asking(SHARING, **{"params": params(), **asked}))
            assert await ran(scheduler) == stages


async def test_encoding_with_cache_disabled_is_not_cached() -> None:
    async with caching() as (scheduler, counts):
        record = await scheduler.submit(*asking(SHARING, params(), cache=False))
        assert (await scheduler.queue.peek(ENCODE))[0].planned.cache_key == ""
        await ran(scheduler)
        await scheduler.submit(*asking(SHARING, params()))
        assert await ran(scheduler) == ALL
        assert (counts.hits, counts.misses) == (0, 1)
        assert "cache" not in (await loaded(scheduler, record)).request.params


async def test_schedulers_share_the_cache_unless_worker_numerics_differ() -> None:
    clock = ManualClock()
    async with caching(clock=clock) as (first, _):
        await first.submit(*asking(SHARING, params()))
        await ran(first)
        async with caching(first.queue, clock) as (other, _):  # type: ignore[arg-type]
            await other.submit(*asking(SHARING, params()))
            assert await ran(other) == REST
            await first.queue.register(info(WORKER, f"{ENCODE}@1", DENOISE, DECODE), [SHARING])
            await other.registry.workers()
            await other.submit(*asking(SHARING, params()))
            assert await ran(other, pools=(f"{ENCODE}@1", DENOISE, DECODE)) == ALL


async def test_zero_cache_bytes_disables_the_cache() -> None:
    async with caching(cache_bytes=0) as (scheduler, counts):
        for _ in range(2):
            await scheduler.submit(*asking(SHARING, params()))
            assert await ran(scheduler) == ALL
        assert (counts.hits, counts.misses) == (0, 0)


async def test_least_recently_used_encoding_is_evicted_if_the_cache_is_full() -> None:
    async with caching() as (scheduler, _):
        for prompt, stages in zip("ababcab", (ALL, ALL, REST, REST, ALL, ALL, ALL), strict=True):
            await scheduler.submit(*asking(SHARING, params(prompt=prompt)))
            assert await ran(scheduler) == stages, prompt


async def test_encoding_of_a_dead_worker_is_recomputed() -> None:
    clock = ManualClock()
    async with caching(clock=clock, lease_ttl=5.0) as (scheduler, counts):
        await scheduler.submit(*asking(SHARING, params()))
        await ran(scheduler)
        await pass_by(scheduler, clock, 5.1)
        record = await scheduler.submit(*asking(SHARING, params()))
        assert record.context.stages["text_encode"].status == "queued"
        await scheduler.queue.register(info(WORKER, ENCODE, DENOISE, DECODE), [SHARING])
        await scheduler.cancel(record.context.id)
        await scheduler.submit(*asking(SHARING, params()))
        assert await ran(scheduler) == ALL
        assert (counts.hits, counts.misses) == (0, 3)


async def test_lost_cached_object_is_recomputed_once() -> None:
    async with caching() as (scheduler, _):
        await scheduler.submit(*asking(SHARING, params()))
        await ran(scheduler)
        record = await scheduler.submit(*asking(SHARING, params(), n=2))
        first, second = await take(scheduler, DENOISE, slots=2)
        gone = first.task.inputs[0]

        await scheduler.fail(TaskFailed(first.claim, "object_lost", "it is gone", object_id=gone.id), WORKER)

        assert await take(scheduler, DENOISE) == []
        (encode,) = await take(scheduler, ENCODE)
        assert (encode.task.attempt, encode.task.planned.cache_key) == (
            1,
            record.context.plan.stage("text_encode").cache_key,
        )
        await scheduler.complete(done(encode), WORKER)
        await scheduler.fail(TaskFailed(second.claim, "object_lost", "it is gone", object_id=gone.id), WORKER)
        again = await take(scheduler, DENOISE, slots=9)
        assert [lease.task.inputs for lease in again] == [(done(encode).output,)] * 2
        for lease in again:
            await scheduler.complete(done(lease), WORKER)
        assert await ran(scheduler) == ["vae_decode.0", "vae_decode.1"]
        context = await loaded(scheduler, record)
        assert (context.status, context.stages["text_encode"].recomputes) == ("completed", 1)
        await scheduler.submit(*asking(SHARING, params()))
        (task,) = await scheduler.queue.peek(DENOISE)
        assert task.inputs == (done(encode).output,)


async def test_unreadable_cached_object_is_not_served_to_the_next_request() -> None:
    async with caching() as (scheduler, _):
        await scheduler.submit(*asking(SHARING, params()))
        await ran(scheduler)
        await scheduler.submit(*asking(SHARING, params()))
        (denoise,) = await take(scheduler)
        gone = denoise.task.inputs[0].id
        await scheduler.fail(TaskFailed(denoise.claim, "object_lost", "it is gone", object_id=gone), WORKER)
        record = await scheduler.submit(*asking(SHARING, params()))
        assert record.context.stages["text_encode"].status == "queued"


async def test_losing_an_older_object_leaves_the_newer_one_in_the_cache() -> None:
    clock = ManualClock()
    async with (
        caching(clock=clock) as (scheduler, _),
        caching(scheduler.queue, clock) as (other, _),  # type: ignore[arg-type]
    ):
        for one in (scheduler, other):  # side by side: the second encodes, too, and what it made is what is found
            await one.submit(*asking(SHARING, params()))
        for lease in await take(scheduler, ENCODE, slots=2):
            await scheduler.complete(done(lease), WORKER)
        older, newer = await take(scheduler, DENOISE, slots=2)
        lost = older.task.inputs[0].id
        await scheduler.fail(TaskFailed(older.claim, "object_lost", "it is gone", object_id=lost), WORKER)
        record = await scheduler.submit(*asking(SHARING, params()))
        assert record.context.stages["text_encode"].output == newer.task.inputs[0]


async def test_only_outputs_of_accepted_completions_are_cached() -> None:
    async with caching() as (scheduler, _):
        record = await scheduler.submit(*asking(SHARING, params()))
        (encode,) = await take(scheduler)
        forged = msgspec.structs.replace(done(encode).output, attempt=9)  # type: ignore[type-var]
        await scheduler.complete(TaskCompleted(encode.claim, forged, (), Timings()), WORKER)
        assert (await loaded(scheduler, record)).status == "failed"

        record = await scheduler.submit(*asking(SHARING, params()))
        (encode,) = await take(scheduler)
        await scheduler.cancel(record.context.id)
        with pytest.raises(LeaseLost):
            await scheduler.complete(done(encode), WORKER)
        await scheduler.submit(*asking(SHARING, params()))
        assert await ran(scheduler) == ALL


async def test_repeated_completion_is_cached_once() -> None:
    async with caching() as (scheduler, _):
        await scheduler.submit(*asking(SHARING, params()))
        (encode,) = await take(scheduler)
        for _ in range(2):
            await scheduler.complete(done(encode), WORKER)
        record = await scheduler.submit(*asking(SHARING, params()))
        assert record.context.stages["text_encode"].output == done(encode).output


async def test_rejected_and_repeated_requests_are_not_counted_as_cache_lookups() -> None:
    async with caching(limits=QueueLimits(max_active=1)) as (scheduler, counts):
        await scheduler.submit(*asking(SHARING, params(), idempotency_key="k"))
        with pytest.raises(Overloaded):
            await scheduler.submit(*asking(SHARING, params()))
        await scheduler.submit(*asking(SHARING, params(), idempotency_key="k"))
        assert (counts.hits, counts.misses) == (0, 1)


async def test_releasable_lists_objects_evicted_from_the_cache() -> None:
    async with caching() as (scheduler, _):
        names = []
        for prompt in "abc":
            record = await scheduler.submit(*asking(SHARING, params(prompt=prompt)))
            (encode,) = await take(scheduler)
            report = done(encode)
            assert report.output
            await scheduler.complete(report, WORKER)
            names.append(cache_owner_name(encode.task.planned.cache_key, report.output.id))
            await ran(scheduler)
        key = encode.task.planned.cache_key
        running = (await scheduler.submit(*asking(SHARING, params(prompt="c")))).context.id
        unknown = [cache_owner_name(key, "another"), "cache:", "cache:nonsense", "cache::"]

        over = await scheduler.releasable([running, record.context.id, *names, *unknown])

        assert over == [record.context.id, names[0], *unknown]
        assert await scheduler.releasable([]) == []
        assert await scheduler.releasable(names[::-1]) == names[:1]
        # and that was no use of them: "b" is still the next to go
        await scheduler.submit(*asking(SHARING, params(prompt="d")))
        await ran(scheduler)
        assert await scheduler.releasable(names) == names[:2]


class Absent(MemoryQueue):
    """A queue that is away whenever something is to be cached or given up."""

    async def put_encoding(self, key: str, ref: ObjectRef, room: int) -> None:
        raise TransientError("away")

    async def remove_encoding(self, key: str, id: str) -> None:
        raise TransientError("away")


async def test_request_completes_if_the_cache_index_cannot_be_written() -> None:
    clock = ManualClock()
    async with caching(Absent(clock), clock) as (scheduler, _):
        record = await scheduler.submit(*asking(SHARING, params()))
        (encode,) = await take(scheduler)
        await scheduler.complete(done(encode), WORKER)
        (denoise,) = await take(scheduler)
        lost = denoise.task.inputs[0].id
        await scheduler.fail(TaskFailed(denoise.claim, "object_lost", "it is gone", object_id=lost), WORKER)
        assert await ran(scheduler) == ALL
        assert (await loaded(scheduler, record)).status == "completed"


class Unread(MemoryQueue):
    """A queue whose index does not answer."""

    async def find_encoding(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        if not use:
            raise TransientError("away")
        return {}


async def test_cached_objects_are_not_released_if_the_index_is_unreachable() -> None:
    clock = ManualClock()
    async with caching(Unread(clock), clock) as (scheduler, _):
        assert await scheduler.releasable([cache_owner_name("key", "id"), "nobody"]) == ["nobody"]


async def test_cache_hits_do_not_lower_the_predicted_cost() -> None:
    async with caching() as (scheduler, _):
        for _ in range(30):
            await scheduler.submit(*asking(SHARING, params()))
            while leases := await take(scheduler):
                report = msgspec.structs.replace(done(leases[0]), timings=Timings(run_s=1.0, batch=1.0))
                await scheduler.complete(report, WORKER)
        assert (await scheduler.submit(*asking(SHARING, params()))).context.cost == pytest.approx(3.0)


async def test_retried_dead_letter_uses_the_cache() -> None:
    async with caching() as (scheduler, _):
        dead = await scheduler.submit(*asking(SHARING, params()))
        for _ in range(2):
            (lease,) = await take(scheduler)
            await scheduler.fail(TaskFailed(lease.claim, "crash", "bang"), WORKER)
        await scheduler.submit(*asking(SHARING, params()))
        await ran(scheduler)
        await scheduler.retry(dead.context.id)
        assert await ran(scheduler) == REST


async def test_concurrent_requests_with_shared_prompts_survive_lost_inputs() -> None:
    """Given a cache with room for two of three prompts, when any input may be lost, then each request completes and
    no stage of it ran more often than it was lost, and once.
    """
    async with caching(limits=QueueLimits(1000, 1000)) as (scheduler, counts):
        requests: list[str] = []
        losses: set[tuple[str, str]] = set()
        for number in range(60):
            record = await scheduler.submit(*asking(SHARING, params(number, prompt="abc"[number * number % 3])))
            requests.append(record.context.id)
            for lease in await scheduler.queue.lease(WORKER, lease_request(ENCODE, DENOISE, DECODE, slots=3), 60.0):
                if lease.task.inputs and number % 4 == 0 and lease.task.key not in losses:
                    losses.add(lease.task.key)
                    lost = lease.task.inputs[0].id
                    await scheduler.fail(TaskFailed(lease.claim, "object_lost", "gone", object_id=lost), WORKER)
                else:
                    await scheduler.complete(done(lease), WORKER)
            await asyncio.sleep(0)
        await ran(scheduler)
        contexts = [(await scheduler.queue.load(request)).context for request in requests]
        assert {context.status for context in contexts} == {"completed"}
        assert losses and counts.hits and counts.misses
        for context in contexts:
            assert context.stages["text_encode"].attempt <= 1 + ((context.id, "denoise.0") in losses)
