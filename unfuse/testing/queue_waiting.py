"""Rules of the queue port about waiting for tasks."""

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


async def each_push_finds_its_waiter(queue: QueueBackend, clock: ManualClock) -> None:
    """Several workers wait, several tasks come at once: all are taken, by whom there is room."""
    waiting = [await started(queue.lease(f"w{n}", wanted("p"), TTL, wait=60.0)) for n in range(3)]
    await queue.submit(request("a"), [task("a", stage) for stage in "xyz"], [], LIMITS)
    leases = [lease for one in waiting for lease in await one]
    assert sorted(lease.task.stage for lease in leases) == ["x", "y", "z"]
    assert {lease.worker for lease in leases} == {"w0", "w1", "w2"}


async def time_and_hand_backs_wake_too(queue: QueueBackend, clock: ManualClock) -> None:
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


async def who_waits_is_served_by_rank(queue: QueueBackend, clock: ManualClock) -> None:
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


async def nobody_waits_beside_a_task_they_could_take(queue: QueueBackend, clock: ManualClock) -> None:
    """Also if who was woken for it takes another one."""
    both = await started(queue.lease("both", wanted("p", "q"), TTL, wait=60.0))
    one, other = [await started(queue.lease(pool, wanted(pool), TTL, wait=60.0)) for pool in "pq"]
    await asyncio.gather(submitted(queue, "a", pool="q"), submitted(queue, "b", pool="p", priority=1))
    assert len(await both) == 1
    left = one if (await both)[0].task.planned.pool == "q" else other
    assert len(await left) == 1
    (one if left is other else other).cancel()


async def waiting_ends_in_time(queue: QueueBackend, clock: ManualClock) -> None:
    """With nothing, once `wait` seconds have passed."""
    waiting = await started(queue.lease("w", wanted("p"), TTL, wait=3.0))
    clock.advance(2.9)
    assert not (await started(asyncio.wait({waiting}))).done()
    clock.advance(0.1)
    assert await waiting == []
    await submitted(queue, "a")
    assert await drained(queue) == ["a"]


async def a_cancelled_waiter_has_claimed_nothing(queue: QueueBackend, clock: ManualClock) -> None:
    """Also if the push came first and it was woken already: the next waiter gets the task."""
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
    """Who waits for work or for events gets nothing more."""
    await submitted(queue, "a", pool="q")
    waiting = await started(queue.lease("w", wanted("p"), TTL, wait=60.0))
    events = queue.watch("a")
    assert (await anext(events)).type == "queued"
    watching = await started(following(events))
    await queue.close()
    assert await waiting == []
    assert await watching is None


async def an_outcome_and_an_ask_are_one_call(queue: QueueBackend, clock: ManualClock) -> None:
    """What the change pushes is leased with it, by the usual order, and the record tells of it; who waits gets the
    rest.
    """
    record = await submitted(queue, "a")
    await submitted(queue, "b", priority=-1)
    lease = await leased(queue)
    waiting = await started(queue.lease("v", wanted("q"), TTL, wait=60))
    push = (task("a", "t"), task("a", "u"), task("a", "v", pool="q", priority=1))
    record, leases = await queue.commit_and_lease(done(record, lease, push=push), "w", wanted("p", "q", slots=2), TTL)
    assert [(one.task.stage, one.worker) for one in leases] == [("v", "w"), ("t", "w")]
    assert {(run.stage, run.worker) for run in record.running} == {("v", "w"), ("t", "w")}
    assert record == await queue.load("a")
    assert (await queue.renew([one.claim for one in leases], TTL)).ended == ()
    await submitted(queue, "c", pool="q")
    assert [one.task.request for one in await waiting] == ["c"]
    one, other = leases
    beside = await started(queue.lease("v", wanted("p"), TTL, wait=60))
    assert [one.task.stage for one in await beside] == ["u"]
    waiting = await started(queue.lease("v", wanted("r"), TTL, wait=60))
    more = (task("a", "x", pool="r"), task("a", "y", pool="r"))
    _, leases = await queue.commit_and_lease(done(record, one, push=more), "w", wanted("r"), TTL)
    assert [one.task.stage for one in (*leases, *await waiting)] == ["x", "y"]
    ended, leases = await queue.commit_and_lease(
        done(await queue.load("a"), other, status="failed"), "w", wanted("p"), TTL
    )
    assert (ended.running, [one.task.request for one in leases]) == ((), ["b"])


async def what_raises_has_claimed_nothing(queue: QueueBackend, clock: ManualClock) -> None:
    """Neither a stale version nor a lost claim; a repeat of what was applied asks anew."""
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
        assert [one.task.request for one in leases] == expected
        assert record.context == good.context
    assert (await queue.commit_and_lease(change(record), "w", wanted("p", slots=0), TTL))[1] == []


async def a_repeat_tells_how_its_request_stands(queue: QueueBackend, clock: ManualClock) -> None:
    """With what is leased with it, whatever else it would have changed."""
    record = await submitted(queue, "a")
    lease = await leased(queue)
    await queue.commit(done(record, lease, push=(task("a", "t"),)))
    over = done(record, lease, status="completed")
    repeated, leases = await queue.commit_and_lease(over, "w", wanted("p"), TTL)
    assert [run.stage for run in repeated.running] == [one.task.stage for one in leases] == ["t"]
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
