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
    done,
    drained,
    following,
    leased,
    raised,
    request,
    started,
    submitted,
    task,
    wanted,
)


async def a_push_wakes_who_waits(queue: QueueBackend, clock: ManualClock) -> None:
    """A push wakes one waiting caller that can lease the task, without a delay."""
    elsewhere = await started(queue.lease("elsewhere", wanted("q"), TTL, wait=60.0))
    small = await started(queue.lease("small", wanted("p", room=1), TTL, wait=60.0))
    waiting = await started(queue.lease("w", wanted("p", room=100), TTL, wait=60.0))
    await submitted(queue, "a", output_size=10)
    assert [(lease.worker, lease.task.request) for lease in await waiting] == [("w", "a")]
    assert not elsewhere.done()
    assert not small.done()
    await submitted(queue, "b", output_size=1)
    assert [lease.task.request for lease in await small] == ["b"]
    await submitted(queue, "c", pool="q")
    assert [lease.task.request for lease in await elsewhere] == ["c"]


async def each_push_finds_its_waiter(queue: QueueBackend, clock: ManualClock) -> None:
    """Several tasks pushed at once are leased by several waiting callers."""
    waiting = [await started(queue.lease(f"w{n}", wanted("p"), TTL, wait=60.0)) for n in range(3)]
    await queue.submit(request("a"), [task("a", stage) for stage in "xyz"], [], LIMITS)
    leases = [lease for call in waiting for lease in await call]
    assert sorted(lease.task.stage for lease in leases) == ["x", "y", "z"]
    assert {lease.worker for lease in leases} == {"w0", "w1", "w2"}


async def time_and_hand_backs_wake_too(queue: QueueBackend, clock: ManualClock) -> None:
    """A `not_before`, a hand-back, and the removal of a task ahead wake waiting callers."""
    await submitted(queue, "a", not_before=await queue.now() + 5)
    waiting = await started(queue.lease("w", wanted("p"), TTL, wait=60.0))
    clock.advance(5)
    (lease,) = await waiting
    waiting = await started(queue.lease("w", wanted("p"), TTL, wait=60.0))
    await queue.hand_back(lease.claim)
    assert [again.task.attempt for again in await waiting] == [2]
    await submitted(queue, "large", output_size=100)
    await submitted(queue, "b", output_size=1)
    waiting = await started(queue.lease("w", wanted("p", room=1), TTL, wait=60.0))
    assert (await leased(queue)).task.request == "large"
    assert [lease.task.request for lease in await waiting] == ["b"]


async def who_waits_is_served_by_rank(queue: QueueBackend, clock: ManualClock) -> None:
    """Waiting callers are served by lowest rank, then longest wait; those with `above` last."""
    ranks = {
        "last": (0.0, 0),
        "third": (2.0, None),
        "first": (-1.5, None),
        "second": (1.0, None),
        "fourth": (2.0, None),
    }
    waiting = [
        await started(queue.lease(name, wanted("p", rank=rank, priority_above=above), TTL, wait=60.0))
        for name, (rank, above) in ranks.items()
    ]
    for number, name in enumerate(("first", "second", "third", "fourth", "last")):
        await submitted(queue, f"r{number}", priority=1)
        served = waiting[list(ranks).index(name)]
        assert [(lease.worker, lease.task.request) for lease in await served] == [(name, f"r{number}")]


async def nobody_waits_beside_a_task_they_could_take(queue: QueueBackend, clock: ManualClock) -> None:
    """No caller waits while a task is available to it.

    This also holds if the woken caller leases another task.
    """
    both = await started(queue.lease("both", wanted("p", "q"), TTL, wait=60.0))
    first, second = [await started(queue.lease(pool, wanted(pool), TTL, wait=60.0)) for pool in "pq"]
    await asyncio.gather(submitted(queue, "a", pool="q"), submitted(queue, "b", pool="p", priority=1))
    assert len(await both) == 1
    served = first if (await both)[0].task.planned.pool == "q" else second
    assert len(await served) == 1
    (first if served is second else second).cancel()


async def waiting_ends_in_time(queue: QueueBackend, clock: ManualClock) -> None:
    """A wait returns an empty list after `wait` seconds."""
    waiting = await started(queue.lease("w", wanted("p"), TTL, wait=3.0))
    clock.advance(2.9)
    assert not (await started(asyncio.wait({waiting}))).done()
    clock.advance(0.1)
    assert await waiting == []
    await submitted(queue, "a")
    assert await drained(queue) == ["a"]


async def a_cancelled_waiter_has_claimed_nothing(queue: QueueBackend, clock: ManualClock) -> None:
    """A caller cancelled while waiting leases nothing, and the next one gets the task.

    This also holds if a push has woken it already.
    """
    first = await started(queue.lease("first", wanted("p"), TTL, wait=60.0))
    second = await started(queue.lease("second", wanted("p"), TTL, wait=60.0))
    await submitted(queue, "a")
    first.cancel()
    await asyncio.wait({first})
    waits = second if first.cancelled() else first
    assert [lease.task.request for lease in await waits] == ["a"]
    second.cancel()
    third = await started(queue.lease("third", wanted("p"), TTL, wait=60.0))
    third.cancel()
    await asyncio.wait({third})
    await submitted(queue, "b")
    assert await drained(queue) == ["b"]


async def closing_wakes_everyone(queue: QueueBackend, clock: ManualClock) -> None:
    """`close` ends all waits for tasks and all event streams."""
    await submitted(queue, "a", pool="q")
    waiting = await started(queue.lease("w", wanted("p"), TTL, wait=60.0))
    events = queue.watch("a")
    assert (await anext(events)).type == "queued"
    watching = await started(following(events))
    await queue.close()
    assert await waiting == []
    assert await watching is None


async def an_outcome_and_an_ask_are_one_call(queue: QueueBackend, clock: ManualClock) -> None:
    """`commit_and_lease` leases what its change pushes, in queue order, before waiting callers.

    The record shows the new leases. Waiting callers get the rest.
    """
    record = await submitted(queue, "a")
    await submitted(queue, "b", priority=-1)
    lease = await leased(queue)
    waiting = await started(queue.lease("v", wanted("q"), TTL, wait=60))
    push = (task("a", "t"), task("a", "u"), task("a", "v", pool="q", priority=1))
    record, leases = await queue.commit_and_lease(done(record, lease, push=push), "w", wanted("p", "q", slots=2), TTL)
    assert [(lease.task.stage, lease.worker) for lease in leases] == [("v", "w"), ("t", "w")]
    assert {(run.stage, run.worker) for run in record.running} == {("v", "w"), ("t", "w")}
    assert record == await queue.load("a")
    assert (await queue.renew([lease.claim for lease in leases], TTL)).ended == ()
    await submitted(queue, "c", pool="q")
    assert [lease.task.request for lease in await waiting] == ["c"]

    first, second = leases
    rest = await started(queue.lease("v", wanted("p"), TTL, wait=60))
    assert [lease.task.stage for lease in await rest] == ["u"]
    waiting = await started(queue.lease("v", wanted("r"), TTL, wait=60))
    more = (task("a", "x", pool="r"), task("a", "y", pool="r"))
    _, leases = await queue.commit_and_lease(done(record, first, push=more), "w", wanted("r"), TTL)
    assert [lease.task.stage for lease in (*leases, *await waiting)] == ["x", "y"]

    ending = done(await queue.load("a"), second, status="failed")
    ended, leases = await queue.commit_and_lease(ending, "w", wanted("p"), TTL)
    assert (ended.running, [lease.task.request for lease in leases]) == ((), ["b"])


async def what_raises_has_claimed_nothing(queue: QueueBackend, clock: ManualClock) -> None:
    """A `commit_and_lease` that raises leases nothing. A repeated one leases again."""
    record = await submitted(queue, "a")
    lease = await leased(queue)
    for name in "bc":
        await submitted(queue, name)
    good = done(record, lease)
    stale = msgspec.structs.replace(good, context=msgspec.structs.replace(good.context, version=3))
    forged = msgspec.structs.replace(good, claim=msgspec.structs.replace(lease.claim, token=bytes(16)))
    await raised(Conflict, queue.commit_and_lease(stale, "w", wanted("p"), TTL))
    await raised(LeaseLost, queue.commit_and_lease(forged, "w", wanted("p"), TTL))
    assert [waiting.request for waiting in await queue.peek("p")] == ["b", "c"]
    for expected in (["b"], ["c"], []):
        record, leases = await queue.commit_and_lease(good, "w", wanted("p"), TTL)
        assert [lease.task.request for lease in leases] == expected
        assert record.context == good.context
    assert (await queue.commit_and_lease(change(record), "w", wanted("p", slots=0), TTL))[1] == []


async def a_repeat_tells_how_its_request_stands(queue: QueueBackend, clock: ManualClock) -> None:
    """A repeated `commit_and_lease` returns the stored record with the new leases."""
    record = await submitted(queue, "a")
    lease = await leased(queue)
    await queue.commit(done(record, lease, push=(task("a", "t"),)))
    over = done(record, lease, status="completed")
    repeated, leases = await queue.commit_and_lease(over, "w", wanted("p"), TTL)
    assert [run.stage for run in repeated.running] == [lease.task.stage for lease in leases] == ["t"]
    assert repeated == await queue.load("a")


WAITING_RULES = (
    an_outcome_and_an_ask_are_one_call,
    what_raises_has_claimed_nothing,
    a_repeat_tells_how_its_request_stands,
    a_push_wakes_who_waits,
    each_push_finds_its_waiter,
    time_and_hand_backs_wake_too,
    who_waits_is_served_by_rank,
    nobody_waits_beside_a_task_they_could_take,
    waiting_ends_in_time,
    a_cancelled_waiter_has_claimed_nothing,
    closing_wakes_everyone,
)
