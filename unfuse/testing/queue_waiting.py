"""Rules of the queue port about callers that wait for tasks."""

from __future__ import annotations

import asyncio

import msgspec

from unfuse.core.errors import Conflict, LeaseLost
from unfuse.queues.base import QueueBackend
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import (
    LIMITS,
    TTL,
    change,
    completion,
    expect_error,
    lease_all,
    lease_next,
    lease_request,
    next_event,
    request,
    start_task,
    submit,
    task,
)


async def a_push_wakes_a_waiting_caller(queue: QueueBackend, clock: ManualClock) -> None:
    """A push wakes one waiting caller that can lease the task, without a delay."""
    elsewhere = await start_task(queue.lease("elsewhere", lease_request("q"), TTL, wait=60.0))
    small = await start_task(queue.lease("small", lease_request("p", arena_bytes=1), TTL, wait=60.0))
    waiting = await start_task(queue.lease("w", lease_request("p", arena_bytes=100), TTL, wait=60.0))
    await submit(queue, "a", output_size=10)
    assert [(lease.worker, lease.task.request) for lease in await waiting] == [("w", "a")]
    assert not elsewhere.done()
    assert not small.done()
    await submit(queue, "b", output_size=1)
    assert [lease.task.request for lease in await small] == ["b"]
    await submit(queue, "c", pool="q")
    assert [lease.task.request for lease in await elsewhere] == ["c"]


async def each_push_wakes_one_caller(queue: QueueBackend, clock: ManualClock) -> None:
    """Several tasks pushed at once are leased by several waiting callers."""
    waiting = [await start_task(queue.lease(f"w{n}", lease_request("p"), TTL, wait=60.0)) for n in range(3)]
    await queue.submit(request("a"), [task("a", stage) for stage in "xyz"], [], LIMITS)
    leases = [lease for call in waiting for lease in await call]
    assert sorted(lease.task.stage for lease in leases) == ["x", "y", "z"]
    assert {lease.worker for lease in leases} == {"w0", "w1", "w2"}


async def delays_and_returned_tasks_wake_callers(queue: QueueBackend, clock: ManualClock) -> None:
    """A `not_before`, a hand-back, and the removal of a task ahead wake waiting callers."""
    await submit(queue, "a", not_before=await queue.now() + 5)
    waiting = await start_task(queue.lease("w", lease_request("p"), TTL, wait=60.0))
    clock.advance(5)
    (lease,) = await waiting
    waiting = await start_task(queue.lease("w", lease_request("p"), TTL, wait=60.0))
    await queue.hand_back(lease.claim)
    assert [again.task.attempt for again in await waiting] == [2]
    await submit(queue, "large", output_size=100)
    await submit(queue, "b", output_size=1)
    waiting = await start_task(queue.lease("w", lease_request("p", arena_bytes=1), TTL, wait=60.0))
    assert (await lease_next(queue)).task.request == "large"
    assert [lease.task.request for lease in await waiting] == ["b"]


async def waiting_callers_are_served_by_rank(queue: QueueBackend, clock: ManualClock) -> None:
    """Waiting callers are served by lowest rank, then longest wait; those with `priority_above` last."""
    ranks = {
        "last": (0.0, 0),
        "third": (2.0, None),
        "first": (-1.5, None),
        "second": (1.0, None),
        "fourth": (2.0, None),
    }
    waiting = [
        await start_task(queue.lease(name, lease_request("p", rank=rank, priority_above=above), TTL, wait=60.0))
        for name, (rank, above) in ranks.items()
    ]
    for number, name in enumerate(("first", "second", "third", "fourth", "last")):
        await submit(queue, f"r{number}", priority=1)
        served = waiting[list(ranks).index(name)]
        assert [(lease.worker, lease.task.request) for lease in await served] == [(name, f"r{number}")]


async def no_caller_waits_while_a_task_is_available(queue: QueueBackend, clock: ManualClock) -> None:
    """No caller waits while a task is available to it.

    This also holds if the woken caller leases another task.
    """
    both = await start_task(queue.lease("both", lease_request("p", "q"), TTL, wait=60.0))
    first, second = [await start_task(queue.lease(pool, lease_request(pool), TTL, wait=60.0)) for pool in "pq"]
    await asyncio.gather(submit(queue, "a", pool="q"), submit(queue, "b", pool="p", priority=1))
    assert len(await both) == 1
    served = first if (await both)[0].task.planned.pool == "q" else second
    assert len(await served) == 1
    (first if served is second else second).cancel()


async def waiting_ends_at_its_limit(queue: QueueBackend, clock: ManualClock) -> None:
    """A wait returns an empty list after `wait` seconds."""
    waiting = await start_task(queue.lease("w", lease_request("p"), TTL, wait=3.0))
    clock.advance(2.9)
    assert not (await start_task(asyncio.wait({waiting}))).done()
    clock.advance(0.1)
    assert await waiting == []
    await submit(queue, "a")
    assert await lease_all(queue) == ["a"]


async def a_cancelled_caller_leases_nothing(queue: QueueBackend, clock: ManualClock) -> None:
    """A caller cancelled while waiting leases nothing, and the next one gets the task.

    This also holds if a push has woken it already.
    """
    first = await start_task(queue.lease("first", lease_request("p"), TTL, wait=60.0))
    second = await start_task(queue.lease("second", lease_request("p"), TTL, wait=60.0))
    await submit(queue, "a")
    first.cancel()
    await asyncio.wait({first})
    waits = second if first.cancelled() else first
    assert [lease.task.request for lease in await waits] == ["a"]
    second.cancel()
    third = await start_task(queue.lease("third", lease_request("p"), TTL, wait=60.0))
    third.cancel()
    await asyncio.wait({third})
    await submit(queue, "b")
    assert await lease_all(queue) == ["b"]


async def closing_ends_all_waits(queue: QueueBackend, clock: ManualClock) -> None:
    """`close` ends all waits for tasks and all event streams."""
    await submit(queue, "a", pool="q")
    waiting = await start_task(queue.lease("w", lease_request("p"), TTL, wait=60.0))
    events = queue.watch("a")
    assert (await anext(events)).type == "queued"
    watching = await start_task(next_event(events))
    await queue.close()
    assert await waiting == []
    assert await watching is None


async def a_commit_can_lease_in_the_same_call(queue: QueueBackend, clock: ManualClock) -> None:
    """`commit_and_lease` leases what its change pushes, in queue order, before waiting callers.

    The record shows the new leases. Waiting callers get the rest.
    """
    record = await submit(queue, "a")
    await submit(queue, "b", priority=-1)
    lease = await lease_next(queue)
    waiting = await start_task(queue.lease("v", lease_request("q"), TTL, wait=60))
    push = (task("a", "t"), task("a", "u"), task("a", "v", pool="q", priority=1))
    record, leases = await queue.commit_and_lease(
        completion(record, lease, push=push), "w", lease_request("p", "q", slots=2), TTL
    )
    assert [(lease.task.stage, lease.worker) for lease in leases] == [("v", "w"), ("t", "w")]
    assert {(run.stage, run.worker) for run in record.running} == {("v", "w"), ("t", "w")}
    assert record == await queue.load("a")
    assert (await queue.renew([lease.claim for lease in leases], TTL)).ended == ()
    await submit(queue, "c", pool="q")
    assert [lease.task.request for lease in await waiting] == ["c"]

    first, second = leases
    rest = await start_task(queue.lease("v", lease_request("p"), TTL, wait=60))
    assert [lease.task.stage for lease in await rest] == ["u"]
    waiting = await start_task(queue.lease("v", lease_request("r"), TTL, wait=60))
    more = (task("a", "x", pool="r"), task("a", "y", pool="r"))
    _, leases = await queue.commit_and_lease(completion(record, first, push=more), "w", lease_request("r"), TTL)
    assert [lease.task.stage for lease in (*leases, *await waiting)] == ["x", "y"]

    ending = completion(await queue.load("a"), second, status="failed")
    ended, leases = await queue.commit_and_lease(ending, "w", lease_request("p"), TTL)
    assert (ended.running, [lease.task.request for lease in leases]) == ((), ["b"])


async def a_refused_commit_leases_nothing(queue: QueueBackend, clock: ManualClock) -> None:
    """A `commit_and_lease` that raises leases nothing. A repeated one leases again."""
    record = await submit(queue, "a")
    lease = await lease_next(queue)
    for name in "bc":
        await submit(queue, name)
    good = completion(record, lease)
    stale = msgspec.structs.replace(good, context=msgspec.structs.replace(good.context, version=3))
    forged = msgspec.structs.replace(good, claim=msgspec.structs.replace(lease.claim, token=bytes(16)))
    await expect_error(Conflict, queue.commit_and_lease(stale, "w", lease_request("p"), TTL))
    await expect_error(LeaseLost, queue.commit_and_lease(forged, "w", lease_request("p"), TTL))
    assert [waiting.request for waiting in await queue.peek("p")] == ["b", "c"]
    for expected in (["b"], ["c"], []):
        record, leases = await queue.commit_and_lease(good, "w", lease_request("p"), TTL)
        assert [lease.task.request for lease in leases] == expected
        assert record.context == good.context
    assert (await queue.commit_and_lease(change(record), "w", lease_request("p", slots=0), TTL))[1] == []


async def a_repeated_commit_returns_the_stored_record(queue: QueueBackend, clock: ManualClock) -> None:
    """A repeated `commit_and_lease` returns the stored record with the new leases."""
    record = await submit(queue, "a")
    lease = await lease_next(queue)
    await queue.commit(completion(record, lease, push=(task("a", "t"),)))
    over = completion(record, lease, status="completed")
    repeated, leases = await queue.commit_and_lease(over, "w", lease_request("p"), TTL)
    assert [run.stage for run in repeated.running] == [lease.task.stage for lease in leases] == ["t"]
    assert repeated == await queue.load("a")


WAITING_RULES = (
    a_commit_can_lease_in_the_same_call,
    a_refused_commit_leases_nothing,
    a_repeated_commit_returns_the_stored_record,
    a_push_wakes_a_waiting_caller,
    each_push_wakes_one_caller,
    delays_and_returned_tasks_wake_callers,
    waiting_callers_are_served_by_rank,
    no_caller_waits_while_a_task_is_available,
    waiting_ends_at_its_limit,
    a_cancelled_caller_leases_nothing,
    closing_ends_all_waits,
)
