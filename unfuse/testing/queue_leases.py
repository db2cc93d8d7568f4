"""Rules of the queue port about task order, leases and preferences."""

from __future__ import annotations

import asyncio

from unfuse.core.errors import LeaseLost
from unfuse.core.request import Event
from unfuse.queues.base import MAX_REFUSALS, PREFERENCE_S, PREFERENCE_TASKS, QueueBackend
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import (
    TTL,
    change,
    count_waiting,
    done,
    drained,
    leased,
    passing,
    raised,
    started,
    submitted,
    task,
    wanted,
)


async def tasks_of_one_priority_leave_as_they_arrived(queue: QueueBackend, clock: ManualClock) -> None:
    """Tasks of equal priority and order are leased first in, first out."""
    for name in "abcde":
        await submitted(queue, name)
    assert await drained(queue) == list("abcde")


async def a_higher_priority_goes_first(queue: QueueBackend, clock: ManualClock) -> None:
    """A higher priority is leased first, whatever the order number."""
    for name, priority in zip("abcdef", (0, 5, -1, 5, 0, 1), strict=True):
        await submitted(queue, name, priority=priority, order=float(-priority))
    assert await drained(queue) == list("bdfaec")


async def a_lower_order_number_goes_first(queue: QueueBackend, clock: ManualClock) -> None:
    """Within one priority, a lower order number is leased first, whatever the arrival."""
    for name, order in zip("abcd", (3.5, 1.0, 2.0, 1.0), strict=True):
        await submitted(queue, name, order=order)
    assert await drained(queue) == list("bdca")


async def several_pools_are_one_line(queue: QueueBackend, clock: ManualClock) -> None:
    """A lease over several pools merges only their queues, in the same order."""
    for name, pool, priority in (("a", "p", 0), ("b", "q", 0), ("c", "r", 9), ("d", "p", 1), ("e", "q", 1)):
        await submitted(queue, name, pool=pool, priority=priority)
    assert await drained(queue, "q", "p", "nobody's") == list("deab")
    assert await drained(queue, "r") == ["c"]


async def no_more_than_slots_are_leased(queue: QueueBackend, clock: ManualClock) -> None:
    """A call leases at most `slots` tasks, and each task only once."""
    for name in "abc":
        await submitted(queue, name)
    first = await queue.lease("w", wanted("p", slots=2), TTL)
    second = await queue.lease("w", wanted("p", slots=2), TTL)
    assert [lease.task.request for lease in first] == ["a", "b"]
    assert [lease.task.request for lease in second] == ["c"]
    assert await queue.lease("w", wanted("p", slots=2), TTL) == []


async def a_lease_says_what_it_is(queue: QueueBackend, clock: ManualClock) -> None:
    """A lease has its task, worker, expiry and a unique token of 128 bits."""
    await submitted(queue, "a", output_size=7, deadline=5.0)
    await submitted(queue, "b")
    first, second = await queue.lease("worker", wanted("p", slots=2), TTL)
    assert first.task == task("a", output_size=7, deadline=5.0)
    assert (first.worker, first.expires) == ("worker", await queue.now() + TTL)
    assert len(first.token) == len(second.token) == 16
    assert first.token != second.token


async def what_is_known_of_a_lease_is_its_record(queue: QueueBackend, clock: ManualClock) -> None:
    """`known` returns None or the record that `load` returns, except for steps.

    It returns None for a request that is over.
    """
    record = await submitted(queue, "a")
    clock.advance(1.0)
    lease = await leased(queue)
    assert queue.cached_record(lease.claim) in (None, await queue.load("a"))
    clock.advance(1.0)
    record = await queue.commit(done(record, lease, push=(task("a", "t"), task("a", "u"))))
    assert queue.cached_record(lease.claim) is None
    _, leases = await queue.commit_and_lease(change(record), "w", wanted("p", slots=2), TTL)
    for lease in leases:
        assert queue.cached_record(lease.claim) in (None, await queue.load("a"))
    await queue.commit(change(await queue.load("a"), status="cancelled"))
    assert [queue.cached_record(lease.claim) for lease in leases] == [None, None]


async def claiming_stops_where_room_ends(queue: QueueBackend, clock: ManualClock) -> None:
    """Leasing stops at the first task without room, even if a smaller one follows."""
    for name, room in (("a", 40), ("b", 50), ("c", 30), ("d", 1)):
        await submitted(queue, name, output_size=room)
    first = await queue.lease("w", wanted("p", slots=9, room=100), TTL)
    assert [lease.task.request for lease in first] == ["a", "b"]
    assert await queue.lease("w", wanted("p", slots=9, room=29), TTL) == []
    assert [lease.task.request for lease in await queue.lease("w", wanted("p", slots=9, room=31), TTL)] == ["c", "d"]


async def a_lease_is_held_until_it_is_closed(queue: QueueBackend, clock: ManualClock) -> None:
    """An expired lease is still held until a commit closes it.

    Its worker may commit, and no other worker gets the task.
    """
    record = await submitted(queue, "a")
    lease = await leased(queue)
    assert await passing(queue, clock, TTL - 1) == []
    assert await passing(queue, clock, 1) == await queue.sweep_expired(TTL) == [lease]
    assert await drained(queue) == []
    assert (await queue.commit(done(record, lease))).context.stages["s"].status == "done"
    assert await queue.sweep_expired(TTL) == []


async def a_gap_in_sweeping_is_forgiven(queue: QueueBackend, clock: ManualClock) -> None:
    """After a long gap between calls of `expired`, all leases are extended once.

    The gap is more than ttl / 2. With regular calls leases expire. A lease that expires later than now + ttl keeps its
    expiry.
    """
    await submitted(queue, "a")
    await submitted(queue, "b")
    lease = await leased(queue)
    await queue.lease("w", wanted("p"), 9 * TTL)
    for gap in (3 * TTL, 2 * TTL):
        clock.advance(gap)
        assert await passing(queue, clock, TTL - 1) == []
        (expired,) = await passing(queue, clock, 1)
        assert (expired.claim, expired.expires) == (lease.claim, await queue.now())
        clock.advance(TTL / 2 - 1)
        assert await queue.sweep_expired(TTL) == [expired]
    assert await passing(queue, clock, TTL + 1) == [expired]
    assert len(await passing(queue, clock, 1)) == 2


async def time_limits_leave_out_gaps_in_sweeping(queue: QueueBackend, clock: ManualClock) -> None:
    """`ran_s` counts at most ttl / 2 of a gap between two calls of `expired`.

    So neither a pause of all schedulers nor a step of the clock uses up a time limit.
    """

    async def ran_s() -> float:
        (run,) = (await queue.load("a")).running
        return run.ran_s

    await submitted(queue, "a")
    await queue.sweep_expired(TTL)
    lease = await leased(queue)
    await passing(queue, clock, TTL)
    assert await ran_s() == TTL
    clock.advance(3600.0)
    assert await ran_s() == 1.5 * TTL
    assert await queue.sweep_expired(TTL) == []
    assert await ran_s() == 1.5 * TTL
    clock.advance(1.0)
    assert await ran_s() == 1.5 * TTL + 1
    await queue.hand_back(lease.claim)
    await leased(queue)
    assert await ran_s() == 0


async def renewing_extends_a_lease(queue: QueueBackend, clock: ManualClock) -> None:
    """`renew` extends a lease to now + ttl, even an expired one.

    A claim without a lease is returned as ended.
    """
    await submitted(queue, "a")
    lease = await leased(queue)
    stranger = task("a", attempt=2)
    other = type(lease.claim)("a", "s", stranger.attempt, lease.token)
    await passing(queue, clock, TTL + 1)
    renewal = await queue.renew([lease.claim, other], TTL)
    assert (renewal.renewed, renewal.ended) == ((lease.claim,), (other,))
    assert await passing(queue, clock, TTL - 1) == []
    assert [expired.claim for expired in await passing(queue, clock, 1)] == [lease.claim]


async def an_old_claim_is_worth_nothing(queue: QueueBackend, clock: ManualClock) -> None:
    """The claim of an ended lease cannot commit, renew, report progress or hand back."""
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
        raise AssertionError("a claim of an ended lease was accepted")
    assert (await queue.renew([old.claim], TTL)).ended == (old.claim,)
    assert not await queue.progress(old.claim, [])
    assert not await queue.hand_back(old.claim)
    await queue.commit(done(record, new))


async def handing_back_keeps_the_place(queue: QueueBackend, clock: ManualClock) -> None:
    """A task that is handed back has its old place, as the next attempt.

    Its old claim is lost, and its context does not change.
    """
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


async def who_turns_a_task_down_for_ever_gets_it_no_more(queue: QueueBackend, clock: ManualClock) -> None:
    """A worker that turns a task down MAX_REFUSALS times is excluded from it.

    It gets later tasks, and others get the task in its old place. A task with a reported step, or handed back by
    `hand_back`, is not counted. A task that is pushed again counts anew. `refuse` returns the number of excluded
    workers.
    """
    await submitted(queue, "a")
    await submitted(queue, "b")
    for times in range(MAX_REFUSALS):
        lease = await leased(queue, worker="v")
        assert (lease.task.request, lease.task.attempt) == ("a", 1 + times)
        assert await queue.refuse(lease.claim) == (times == MAX_REFUSALS - 1)
    await raised(LeaseLost, queue.refuse(lease.claim))
    assert [waiting.request for waiting in await queue.peek("p")] == ["a", "b"]
    behind = await queue.lease("v", wanted("p", slots=9, affinity="x", preferred_node="n"), TTL)
    assert [lease.task.request for lease in behind] == ["b"]
    for _ in range(MAX_REFUSALS):
        assert await queue.hand_back((await leased(queue, worker="w")).claim)
        lease = await leased(queue, worker="w")
        assert await queue.progress(lease.claim, [Event("progress", step=1, steps=2)])
        assert await queue.refuse(lease.claim) == 1
    assert (await leased(queue, worker="w")).task == task("a", attempt=1 + 3 * MAX_REFUSALS)
    await queue.commit(change(await queue.load("a"), push=(task("a", attempt=99),)))
    assert (await leased(queue, worker="v")).task.attempt == 99


async def a_task_is_not_leased_to_the_worker_that_it_avoids(queue: QueueBackend, clock: ManualClock) -> None:
    """A task is not leased to the worker in `avoids`, despite preferences and hand-backs.

    It is once it is pushed again without `avoids`.
    """
    record = await submitted(queue, "a", avoid_worker="w", preferred_node="here", affinity="red")
    await submitted(queue, "b")
    assert await drained(queue) == ["b"]
    assert await queue.lease("w", wanted("p", preferred_node="here", affinity="red"), TTL) == []
    assert await count_waiting(queue, "p") == 1
    lease = await leased(queue, worker="other")
    assert await queue.hand_back(lease.claim)
    assert await queue.lease("w", wanted("p"), TTL) == []
    lease = await leased(queue, worker="other")
    await queue.commit(change(record, lease.claim, push=(task("a", attempt=3),)))
    assert (await leased(queue)).task.request == "a"


async def a_preference_does_not_bring_back_what_was_turned_down(queue: QueueBackend, clock: ManualClock) -> None:
    """A preference never selects tasks from which the worker is excluded.

    A task behind many of these is still leased.
    """
    names = [f"{number:02}" for number in range(PREFERENCE_TASKS + 4)]
    for name in names:
        await submitted(queue, name, affinity="x")
    for _ in range(MAX_REFUSALS):
        for lease in await queue.lease("v", wanted("p", slots=len(names)), TTL):
            await queue.refuse(lease.claim)
    assert await queue.lease("v", wanted("p", affinity="x"), TTL) == []
    await submitted(queue, "new", affinity="x")
    assert (await leased(queue, worker="v")).task.request == "new"
    assert await drained(queue) == names


async def a_preference_chooses_behind_what_was_turned_down(queue: QueueBackend, clock: ManualClock) -> None:
    """A preference applies behind an urgent task from which the worker is excluded."""
    await submitted(queue, "urgent", priority=1)
    for _ in range(MAX_REFUSALS):
        (lease,) = await queue.lease("v", wanted("p"), TTL)
        await queue.refuse(lease.claim)
    await submitted(queue, "a")
    await submitted(queue, "b", affinity="x")
    assert [lease.task.request for lease in await queue.lease("v", wanted("p", affinity="x"), TTL)] == ["b"]


async def a_task_waits_for_its_time(queue: QueueBackend, clock: ManualClock) -> None:
    """A delayed task is passed over until its `not_before`.

    Then it has its place in the order. It counts as waiting all the time.
    """
    soon = await queue.now() + 5
    await submitted(queue, "a", not_before=soon, priority=1)
    await submitted(queue, "b")
    await submitted(queue, "c")
    assert await count_waiting(queue, "p") == 3
    assert [waiting.request for waiting in await queue.peek("p")] == ["b", "c"]
    assert (await leased(queue)).task.request == "b"
    clock.advance(5)
    assert [waiting.request for waiting in await queue.peek("p")] == ["a", "c"]
    assert await drained(queue) == ["a", "c"]


async def what_is_more_urgent_can_be_asked_for(queue: QueueBackend, clock: ManualClock) -> None:
    """With `above`, only tasks of a higher priority are leased.

    Waiting callers without `above` are served first.
    """
    for name, priority in zip("abc", (0, 3, 7), strict=True):
        await submitted(queue, name, priority=priority)
    assert await queue.lease("w", wanted("p", slots=9, priority_above=7), TTL) == []
    assert [lease.task.request for lease in await queue.lease("w", wanted("p", slots=9, priority_above=0), TTL)] == [
        "c",
        "b",
    ]
    assert await drained(queue) == ["a"]
    busy = await started(queue.lease("busy", wanted("p", priority_above=0), TTL, wait=60.0))
    await submitted(queue, "d")
    assert not (await started(asyncio.wait({busy}))).done()
    assert await drained(queue) == ["d"]
    idle = await started(queue.lease("idle", wanted("p"), TTL, wait=60.0))
    await submitted(queue, "e", priority=5)
    assert [lease.task.request for lease in await idle] == ["e"]
    await submitted(queue, "f", priority=1)
    assert [lease.task.request for lease in await busy] == ["f"]


async def a_preference_chooses_among_equals_for_a_moment(queue: QueueBackend, clock: ManualClock) -> None:
    """Among tasks of one priority, near inputs are preferred, then equal affinity.

    A task that has been ready for PREFERENCE_S is not passed over.
    """
    await submitted(queue, "a", preferred_node="here")
    await submitted(queue, "b", affinity="alike")
    await submitted(queue, "c", preferred_node="there", affinity="alike")
    await submitted(queue, "d", preferred_node="there")
    await submitted(queue, "e", priority=1)
    query = wanted("p", preferred_node="there", affinity="alike")
    order = [(await queue.lease("w", query, TTL))[0].task.request for _ in range(5)]
    assert order == list("ecdba")
    for name in ("f", "g"):
        await submitted(queue, name, preferred_node="there" if name == "g" else "here")
    clock.advance(2 * PREFERENCE_S)
    assert [lease.task.request for lease in await queue.lease("w", query, TTL)] == ["f"]
    assert await drained(queue) == ["g"]


async def a_pool_waits_behind_one_that_is_full(queue: QueueBackend, clock: ManualClock) -> None:
    """Back-pressure: a pool is held back while a pool that it feeds is full.

    Its waiting workers are woken when that one has room again.
    """
    for name, pool in (("a", "p"), ("b", "q"), ("c", "q")):
        await submitted(queue, name, pool=pool)
    query = wanted("p", behind={"p": {"q": 1, "r": 0}})
    assert await queue.lease("w", query, TTL) == []
    waiting = await started(queue.lease("w", query, TTL, wait=60.0))
    assert (await leased(queue, "q")).task.request == "b"
    assert [lease.task.request for lease in await waiting] == ["a"]


async def later_pools_go_first(queue: QueueBackend, clock: ManualClock) -> None:
    """Within one priority, pools with a higher `later` go first, whatever order and arrival.

    The default is 0.
    """
    for name, pool, priority, order in (
        ("a", "p", 0, -1.0),
        ("b", "q", 0, 0.0),
        ("c", "r", 0, 9.0),
        ("d", "p", 1, 0.0),
        ("e", "q", 0, -1.0),
        ("f", "r", 1, 0.0),
        ("g", "s", 0, 0.0),
    ):
        await submitted(queue, name, pool=pool, priority=priority, order=order)
    query = wanted("p", "q", "r", "s", slots=9, later={"q": 1, "r": 2, "s": -1})
    assert [lease.task.request for lease in await queue.lease("w", query, TTL)] == list("fdcebag")


async def a_preference_does_not_reach_over_pools(queue: QueueBackend, clock: ManualClock) -> None:
    """A preference selects only among pools with the same `later`."""
    for name, pool, near in (("a", "p", "here"), ("b", "q", ""), ("c", "q", "here"), ("d", "r", "here")):
        await submitted(queue, name, pool=pool, preferred_node=near)
    query = wanted("p", "q", "r", slots=9, later={"q": 1, "r": 1}, preferred_node="here")
    assert [lease.task.request for lease in await queue.lease("w", query, TTL)] == list("cdba")


async def a_pool_that_has_no_room_lets_later_ones_go_on(queue: QueueBackend, clock: ManualClock) -> None:
    """When a task lacks room, only later pools are leased from.

    Small tasks of other pools do not overtake it, whatever their priority.
    """
    for name, pool, room, priority in (
        ("a", "q", 60, 9),
        ("b", "p", 1, 8),
        ("c", "r", 30, 0),
        ("d", "q", 1, 0),
        ("e", "s", 30, 0),
        ("f", "r", 30, 0),
    ):
        await submitted(queue, name, pool=pool, output_size=room, priority=priority)
    later = {"q": 1, "s": 1, "r": 2}
    query = wanted("p", "q", "r", "s", slots=9, room=59, later=later)
    assert [lease.task.request for lease in await queue.lease("w", query, TTL)] == ["c"]
    waiting = await started(queue.lease("w", wanted("p", "q", "s", room=59, later=later), TTL, wait=60.0))
    assert (await leased(queue, "q")).task.request == "a"
    assert [lease.task.request for lease in await waiting] == ["b"]


async def a_pool_keeps_room_for_others(queue: QueueBackend, clock: ManualClock) -> None:
    """Tasks of a pool are leased only while they leave its reserve free.

    Other pools may use the reserve.
    """
    for name, pool in (("a", "p"), ("b", "p"), ("c", "p"), ("d", "q"), ("e", "q"), ("f", "q")):
        await submitted(queue, name, pool=pool, output_size=30)
    query = wanted("p", "q", slots=9, room=120, keep={"p": 60}, later={"q": 1})
    assert [lease.task.request for lease in await queue.lease("w", query, TTL)] == list("def")
    query = wanted("p", slots=9, room=120, keep={"p": 60})
    assert [lease.task.request for lease in await queue.lease("w", query, TTL)] == list("ab")
    assert await queue.lease("w", wanted("p", room=89, keep={"p": 60}), TTL) == []
    assert await drained(queue) == ["c"]


async def every_resource_is_counted_for_itself(queue: QueueBackend, clock: ManualClock) -> None:
    """A task that lacks one resource stops only the pools that use this resource."""
    for name, pool, needs in (
        ("a", "p", {"kv": 3}),
        ("b", "p", {"kv": 3}),
        ("c", "q", {"kv": 1}),
        ("d", "r", {}),
        ("e", "s", {"kv": 2}),
        ("f", "s", {"kv": 1}),
        ("g", "r", {"io": 9}),
    ):
        await submitted(queue, name, pool=pool, needs=needs)
    kv = {"kv": 5}
    query = wanted("p", "q", "r", "s", slots=9, later={"s": 1}, amounts={"p": kv, "q": kv, "s": kv})
    assert [lease.task.request for lease in await queue.lease("w", query, TTL)] == list("efdg")
    query = wanted("p", "q", slots=9, amounts={"p": kv, "q": kv})
    (lease,) = await queue.lease("w", query, TTL)
    assert lease.task == task("a", needs={"kv": 3})
    await queue.hand_back(lease.claim)
    assert await queue.lease("w", wanted("p", "q", slots=9, amounts={"p": {"kv": 2}, "q": kv}), TTL) == []
    assert [lease.task.request for lease in await queue.lease("w", wanted("p", "q", slots=9), TTL)] == ["a", "b", "c"]


LEASE_RULES = (
    tasks_of_one_priority_leave_as_they_arrived,
    a_higher_priority_goes_first,
    a_lower_order_number_goes_first,
    several_pools_are_one_line,
    no_more_than_slots_are_leased,
    a_lease_says_what_it_is,
    what_is_known_of_a_lease_is_its_record,
    claiming_stops_where_room_ends,
    a_lease_is_held_until_it_is_closed,
    a_gap_in_sweeping_is_forgiven,
    time_limits_leave_out_gaps_in_sweeping,
    renewing_extends_a_lease,
    an_old_claim_is_worth_nothing,
    handing_back_keeps_the_place,
    who_turns_a_task_down_for_ever_gets_it_no_more,
    a_task_is_not_leased_to_the_worker_that_it_avoids,
    a_preference_does_not_bring_back_what_was_turned_down,
    a_preference_chooses_behind_what_was_turned_down,
    a_task_waits_for_its_time,
    what_is_more_urgent_can_be_asked_for,
    a_preference_chooses_among_equals_for_a_moment,
    a_pool_waits_behind_one_that_is_full,
    later_pools_go_first,
    a_preference_does_not_reach_over_pools,
    a_pool_that_has_no_room_lets_later_ones_go_on,
    a_pool_keeps_room_for_others,
    every_resource_is_counted_for_itself,
)
