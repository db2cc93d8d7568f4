"""Rules of the queue port about order, leases and waiting."""

from __future__ import annotations

import asyncio

from unfuse.core.errors import LeaseLost
from unfuse.queues.base import PREFERENCE_S, TaskQueue
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import (
    LIMITS,
    TTL,
    change,
    done,
    drained,
    following,
    leased,
    request,
    started,
    submitted,
    task,
    wanted,
)


async def tasks_of_one_priority_leave_as_they_arrived(queue: TaskQueue, clock: ManualClock) -> None:
    """First in, first out."""
    for name in "abcde":
        await submitted(queue, name)
    assert await drained(queue) == list("abcde")


async def a_higher_priority_goes_first(queue: TaskQueue, clock: ManualClock) -> None:
    """Whatever the order number; within one priority it is first in, first out."""
    for name, priority in zip("abcdef", (0, 5, -1, 5, 0, 1), strict=True):
        await submitted(queue, name, priority=priority, order=float(-priority))
    assert await drained(queue) == list("bdfaec")


async def a_lower_order_number_goes_first(queue: TaskQueue, clock: ManualClock) -> None:
    """Within one priority, before arrival."""
    for name, order in zip("abcd", (3.5, 1.0, 2.0, 1.0), strict=True):
        await submitted(queue, name, order=order)
    assert await drained(queue) == list("bdca")


async def several_pools_are_one_line(queue: TaskQueue, clock: ManualClock) -> None:
    """A lease over several pools merges them by the same order, and leaves the other pools alone."""
    for name, pool, priority in (("a", "p", 0), ("b", "q", 0), ("c", "r", 9), ("d", "p", 1), ("e", "q", 1)):
        await submitted(queue, name, pool=pool, priority=priority)
    assert await drained(queue, "q", "p", "nobody's") == list("deab")
    assert await drained(queue, "r") == ["c"]


async def no_more_than_slots_are_leased(queue: TaskQueue, clock: ManualClock) -> None:
    """And each task only once."""
    for name in "abc":
        await submitted(queue, name)
    first = await queue.lease("w", wanted("p", slots=2), TTL)
    second = await queue.lease("w", wanted("p", slots=2), TTL)
    assert [lease.task.request for lease in first] == ["a", "b"]
    assert [lease.task.request for lease in second] == ["c"]
    assert await queue.lease("w", wanted("p", slots=2), TTL) == []


async def a_lease_says_what_it_is(queue: TaskQueue, clock: ManualClock) -> None:
    """Task, worker, end and 128 secret bits, which differ from lease to lease."""
    await submitted(queue, "a", room=7, deadline=5.0)
    await submitted(queue, "b")
    first, second = await queue.lease("worker", wanted("p", slots=2), TTL)
    assert first.task == task("a", room=7, deadline=5.0)
    assert (first.worker, first.expires) == ("worker", await queue.now() + TTL)
    assert len(first.token) == len(second.token) == 16
    assert first.token != second.token


async def claiming_stops_where_room_ends(queue: TaskQueue, clock: ManualClock) -> None:
    """At the first task that does not fit, although a smaller one behind it would."""
    for name, room in (("a", 40), ("b", 50), ("c", 30), ("d", 1)):
        await submitted(queue, name, room=room)
    first = await queue.lease("w", wanted("p", slots=9, room=100), TTL)
    assert [lease.task.request for lease in first] == ["a", "b"]
    assert await queue.lease("w", wanted("p", slots=9, room=29), TTL) == []
    assert [lease.task.request for lease in await queue.lease("w", wanted("p", slots=9, room=31), TTL)] == ["c", "d"]


async def a_lease_is_held_until_it_is_closed(queue: TaskQueue, clock: ManualClock) -> None:
    """Its time passes, `expired` lists it, and still it may complete and nobody else has the task."""
    record = await submitted(queue, "a")
    lease = await leased(queue)
    assert await queue.expired() == []
    clock.advance(TTL)
    assert await queue.expired() == [lease]
    assert await drained(queue) == []
    assert (await queue.commit(done(record, lease))).context.stages["s"].status == "done"
    assert await queue.expired() == []


async def renewing_extends_a_lease(queue: TaskQueue, clock: ManualClock) -> None:
    """To a full time from now, also after its time has passed; a claim that is not held is answered as ended."""
    await submitted(queue, "a")
    lease = await leased(queue)
    stranger = task("a", attempt=2)
    other = type(lease.claim)("a", "s", stranger.attempt, lease.token)
    clock.advance(TTL + 1)
    renewal = await queue.renew([lease.claim, other], TTL)
    assert (renewal.held, renewal.ended) == ((lease.claim,), (other,))
    clock.advance(TTL - 1)
    assert await queue.expired() == []
    clock.advance(1)
    assert [late.claim for late in await queue.expired()] == [lease.claim]


async def an_old_claim_is_worth_nothing(queue: TaskQueue, clock: ManualClock) -> None:
    """Once its lease was ended and the task leased again: it cannot commit, renew, report or hand back."""
    record = await submitted(queue, "a")
    old = await leased(queue)
    clock.advance(TTL)
    record = await queue.commit(change(record, old.claim, push=(task("a", attempt=2),)))
    new = await leased(queue)
    assert new.task.attempt == 2
    try:
        await queue.commit(done(record, old))
    except LeaseLost:
        assert (await queue.load("a")).context == record.context
    else:
        raise AssertionError("a claim whose lease has ended was accepted")
    assert (await queue.renew([old.claim], TTL)).ended == (old.claim,)
    assert not await queue.progress(old.claim, [])
    assert not await queue.hand_back(old.claim)
    await queue.commit(done(record, new))


async def handing_back_keeps_the_place(queue: TaskQueue, clock: ManualClock) -> None:
    """The task stands where it stood, under the next attempt; its old claim ends and its context does not move."""
    for name in "abc":
        await submitted(queue, name)
    first = await leased(queue)
    second = await leased(queue)
    assert await queue.hand_back(second.claim)
    assert await queue.hand_back(first.claim)
    assert not await queue.hand_back(first.claim)
    assert [waiting.request for waiting in await queue.peek("p")] == list("abc")
    again = await leased(queue)
    assert again.task == task("a", attempt=2)
    assert (await queue.load("a")).context.version == 0


async def a_task_waits_for_its_time(queue: TaskQueue, clock: ManualClock) -> None:
    """Passed over before `not_before`, in its place of the order from then on, counted all along."""
    soon = await queue.now() + 5
    await submitted(queue, "a", not_before=soon, priority=1)
    await submitted(queue, "b")
    await submitted(queue, "c")
    assert await queue.size("p") == 3
    assert [waiting.request for waiting in await queue.peek("p")] == ["b", "c"]
    assert (await leased(queue)).task.request == "b"
    clock.advance(5)
    assert [waiting.request for waiting in await queue.peek("p")] == ["a", "c"]
    assert await drained(queue) == ["a", "c"]


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


async def what_is_more_urgent_can_be_asked_for(queue: TaskQueue, clock: ManualClock) -> None:
    """With `above`, only tasks of a higher priority are leased; who waits without it is served first."""
    for name, priority in zip("abc", (0, 3, 7), strict=True):
        await submitted(queue, name, priority=priority)
    assert await queue.lease("w", wanted("p", slots=9, above=7), TTL) == []
    assert [lease.task.request for lease in await queue.lease("w", wanted("p", slots=9, above=0), TTL)] == ["c", "b"]
    assert await drained(queue) == ["a"]
    busy = await started(queue.lease("busy", wanted("p", above=0), TTL, wait=60.0))
    await submitted(queue, "d")
    assert not (await started(asyncio.wait({busy}))).done()
    assert await drained(queue) == ["d"]
    idle = await started(queue.lease("idle", wanted("p"), TTL, wait=60.0))
    await submitted(queue, "e", priority=5)
    assert [lease.task.request for lease in await idle] == ["e"]
    await submitted(queue, "f", priority=1)
    assert [lease.task.request for lease in await busy] == ["f"]


async def a_preference_chooses_among_equals_for_a_moment(queue: TaskQueue, clock: ManualClock) -> None:
    """Inputs that are near, then company, but never before a higher priority nor past a task that has waited."""
    await submitted(queue, "a", near="here")
    await submitted(queue, "b", affinity="alike")
    await submitted(queue, "c", near="there", affinity="alike")
    await submitted(queue, "d", near="there")
    await submitted(queue, "e", priority=1)
    takes = wanted("p", near="there", affinity="alike")
    order = [(await queue.lease("w", takes, TTL))[0].task.request for _ in range(5)]
    assert order == list("ecdba")
    for name in ("f", "g"):
        await submitted(queue, name, near="there" if name == "g" else "here")
    clock.advance(2 * PREFERENCE_S)
    assert [lease.task.request for lease in await queue.lease("w", takes, TTL)] == ["f"]
    assert await drained(queue) == ["g"]


async def a_pool_waits_behind_one_that_is_full(queue: TaskQueue, clock: ManualClock) -> None:
    """And its workers are woken when that one has room again."""
    for name, pool in (("a", "p"), ("b", "q"), ("c", "q")):
        await submitted(queue, name, pool=pool)
    takes = wanted("p", behind={"p": {"q": 1, "r": 0}})
    assert await queue.lease("w", takes, TTL) == []
    waiting = await started(queue.lease("w", takes, TTL, wait=60.0))
    assert (await leased(queue, "q")).task.request == "b"
    assert [lease.task.request for lease in await waiting] == ["a"]


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


LEASE_RULES = (
    tasks_of_one_priority_leave_as_they_arrived,
    a_higher_priority_goes_first,
    a_lower_order_number_goes_first,
    several_pools_are_one_line,
    no_more_than_slots_are_leased,
    a_lease_says_what_it_is,
    claiming_stops_where_room_ends,
    a_lease_is_held_until_it_is_closed,
    renewing_extends_a_lease,
    an_old_claim_is_worth_nothing,
    handing_back_keeps_the_place,
    a_task_waits_for_its_time,
    a_push_wakes_who_waits,
    each_push_finds_its_waiter,
    what_is_more_urgent_can_be_asked_for,
    a_preference_chooses_among_equals_for_a_moment,
    a_pool_waits_behind_one_that_is_full,
    time_and_hand_backs_wake_too,
    waiting_ends_in_time,
    a_cancelled_waiter_has_claimed_nothing,
    closing_wakes_everyone,
)
