"""Rules of the queue port about waiting for tasks."""

from __future__ import annotations

import asyncio

from unfuse.queues.base import TaskQueue
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import (
    LIMITS,
    TTL,
    drained,
    following,
    leased,
    request,
    started,
    submitted,
    task,
    wanted,
)


async def a_push_wakes_who_waits(queue: TaskQueue, clock: ManualClock) -> None:
    """No time passes between; of those who can take it, one gets it."""
    elsewhere = await started(queue.lease("elsewhere", wanted("q"), TTL, wait=60.0))
    small = await started(queue.lease("small", wanted("p", room=1), TTL, wait=60.0))
    waiting = await started(queue.lease("w", wanted("p", room=100), TTL, wait=60.0))
    await submitted(queue, "a", room=10)
    assert [(lease.worker, lease.task.request) for lease in await waiting] == [("w", "a")]
    assert not elsewhere.done()
    assert not small.done()
    await submitted(queue, "b", room=1)
    assert [lease.task.request for lease in await small] == ["b"]
    await submitted(queue, "c", pool="q")
    assert [lease.task.request for lease in await elsewhere] == ["c"]


async def each_push_finds_its_waiter(queue: TaskQueue, clock: ManualClock) -> None:
    """Several workers wait, several tasks come at once: all are taken, by whom there is room."""
    waiting = [await started(queue.lease(f"w{n}", wanted("p"), TTL, wait=60.0)) for n in range(3)]
    await queue.submit(request("a"), [task("a", stage) for stage in "xyz"], [], LIMITS)
    leases = [lease for one in waiting for lease in await one]
    assert sorted(lease.task.stage for lease in leases) == ["x", "y", "z"]
    assert {lease.worker for lease in leases} == {"w0", "w1", "w2"}


async def time_and_hand_backs_wake_too(queue: TaskQueue, clock: ManualClock) -> None:
    """A `not_before` that comes, a task that is handed back, a large task ahead that goes."""
    await submitted(queue, "a", not_before=await queue.now() + 5)
    waiting = await started(queue.lease("w", wanted("p"), TTL, wait=60.0))
    clock.advance(5)
    (lease,) = await waiting
    waiting = await started(queue.lease("w", wanted("p"), TTL, wait=60.0))
    await queue.hand_back(lease.claim)
    assert [again.task.attempt for again in await waiting] == [2]
    await submitted(queue, "large", room=100)
    await submitted(queue, "b", room=1)
    waiting = await started(queue.lease("w", wanted("p", room=1), TTL, wait=60.0))
    assert (await leased(queue)).task.request == "large"
    assert [lease.task.request for lease in await waiting] == ["b"]


async def who_waits_is_served_by_rank(queue: TaskQueue, clock: ManualClock) -> None:
    """The lowest first, then who waits longest; who only waits for more urgent work comes behind all of them."""
    ranks = {
        "last": (0.0, 0),
        "third": (2.0, None),
        "first": (-1.5, None),
        "second": (1.0, None),
        "fourth": (2.0, None),
    }
    waiting = [
        await started(queue.lease(name, wanted("p", rank=rank, above=above), TTL, wait=60.0))
        for name, (rank, above) in ranks.items()
    ]
    for number, name in enumerate(("first", "second", "third", "fourth", "last")):
        await submitted(queue, f"r{number}", priority=1)
        over = next(one for at, one in enumerate(waiting) if list(ranks)[at] == name)
        assert [(lease.worker, lease.task.request) for lease in await over] == [(name, f"r{number}")]


async def nobody_waits_beside_a_task_they_could_take(queue: TaskQueue, clock: ManualClock) -> None:
    """Also if who was woken for it takes another one."""
    both = await started(queue.lease("both", wanted("p", "q"), TTL, wait=60.0))
    one, other = [await started(queue.lease(pool, wanted(pool), TTL, wait=60.0)) for pool in "pq"]
    await asyncio.gather(submitted(queue, "a", pool="q"), submitted(queue, "b", pool="p", priority=1))
    assert len(await both) == 1
    left = one if (await both)[0].task.pool == "q" else other
    assert len(await left) == 1
    (one if left is other else other).cancel()


async def waiting_ends_in_time(queue: TaskQueue, clock: ManualClock) -> None:
    """With nothing, once `wait` seconds have passed."""
    waiting = await started(queue.lease("w", wanted("p"), TTL, wait=3.0))
    clock.advance(2.9)
    assert not (await started(asyncio.wait({waiting}))).done()
    clock.advance(0.1)
    assert await waiting == []
    await submitted(queue, "a")
    assert await drained(queue) == ["a"]


async def a_cancelled_waiter_has_claimed_nothing(queue: TaskQueue, clock: ManualClock) -> None:
    """Also if the push came first and it was woken already: the next waiter gets the task."""
    first = await started(queue.lease("first", wanted("p"), TTL, wait=60.0))
    second = await started(queue.lease("second", wanted("p"), TTL, wait=60.0))
    await submitted(queue, "a")
    first.cancel()
    await asyncio.wait({first})
    keeper = second if first.cancelled() else first
    assert [lease.task.request for lease in await keeper] == ["a"]
    second.cancel()
    third = await started(queue.lease("third", wanted("p"), TTL, wait=60.0))
    third.cancel()
    await asyncio.wait({third})
    await submitted(queue, "b")
    assert await drained(queue) == ["b"]


async def closing_wakes_everyone(queue: TaskQueue, clock: ManualClock) -> None:
    """Who waits for work or for events gets nothing more."""
    await submitted(queue, "a", pool="q")
    waiting = await started(queue.lease("w", wanted("p"), TTL, wait=60.0))
    events = queue.watch("a")
    assert (await anext(events)).type == "queued"
    watching = await started(following(events))
    await queue.close()
    assert await waiting == []
    assert await watching is None


WAITING_RULES = (
    a_push_wakes_who_waits,
    each_push_finds_its_waiter,
    time_and_hand_backs_wake_too,
    who_waits_is_served_by_rank,
    nobody_waits_beside_a_task_they_could_take,
    waiting_ends_in_time,
    a_cancelled_waiter_has_claimed_nothing,
    closing_wakes_everyone,
)
