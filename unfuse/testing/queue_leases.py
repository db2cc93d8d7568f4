"""Rules of the queue port about task order, leases and preferences."""

from __future__ import annotations

import asyncio

from unfuse.core.errors import LeaseLost
from unfuse.core.request import Event
from unfuse.queues.base import MAX_REFUSALS, PREFERENCE_S, PREFERENCE_TASKS, QueueBackend
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import (
    TTL,
    advance_clock,
    change,
    completion,
    count_waiting,
    expect_error,
    lease_all,
    lease_next,
    lease_request,
    start_task,
    submit,
    task,
)


async def equal_tasks_are_leased_in_order_of_arrival(queue: QueueBackend, clock: ManualClock) -> None:
    """Tasks of equal priority and order are leased first in, first out."""
    for name in "abcde":
        await submit(queue, name)
    assert await lease_all(queue) == list("abcde")


async def a_higher_priority_is_leased_first(queue: QueueBackend, clock: ManualClock) -> None:
    """A higher priority is leased first, whatever the order number."""
    for name, priority in zip("abcdef", (0, 5, -1, 5, 0, 1), strict=True):
        await submit(queue, name, priority=priority, order=float(-priority))
    assert await lease_all(queue) == list("bdfaec")


async def a_lower_order_number_is_leased_first(queue: QueueBackend, clock: ManualClock) -> None:
    """Within one priority, a lower order number is leased first, whatever the arrival."""
    for name, order in zip("abcd", (3.5, 1.0, 2.0, 1.0), strict=True):
        await submit(queue, name, order=order)
    assert await lease_all(queue) == list("bdca")


async def several_pools_merge_into_one_queue(queue: QueueBackend, clock: ManualClock) -> None:
    """A lease over several pools merges only their queues, in the same order."""
    for name, pool, priority in (("a", "p", 0), ("b", "q", 0), ("c", "r", 9), ("d", "p", 1), ("e", "q", 1)):
        await submit(queue, name, pool=pool, priority=priority)
    assert await lease_all(queue, "q", "p", "nobody's") == list("deab")
    assert await lease_all(queue, "r") == ["c"]


async def a_call_leases_at_most_its_slots(queue: QueueBackend, clock: ManualClock) -> None:
    """A call leases at most `slots` tasks, and each task only once."""
    for name in "abc":
        await submit(queue, name)
    first = await queue.lease("w", lease_request("p", slots=2), TTL)
    second = await queue.lease("w", lease_request("p", slots=2), TTL)
    assert [lease.task.request for lease in first] == ["a", "b"]
    assert [lease.task.request for lease in second] == ["c"]
    assert await queue.lease("w", lease_request("p", slots=2), TTL) == []


async def a_lease_has_worker_expiry_and_token(queue: QueueBackend, clock: ManualClock) -> None:
    """A lease has its task, worker, expiry and a unique token of 128 bits."""
    await submit(queue, "a", output_size=7, deadline=5.0)
    await submit(queue, "b")
    first, second = await queue.lease("worker", lease_request("p", slots=2), TTL)
    assert first.task == task("a", output_size=7, deadline=5.0)
    assert (first.worker, first.expires) == ("worker", await queue.now() + TTL)
    assert len(first.token) == len(second.token) == 16
    assert first.token != second.token


async def a_cached_record_equals_the_stored_one(queue: QueueBackend, clock: ManualClock) -> None:
    """`cached_record` returns None or the record that `load` returns, except for steps.

    It returns None for a request that is over.
    """
    record = await submit(queue, "a")
    clock.advance(1.0)
    lease = await lease_next(queue)
    assert queue.cached_record(lease.claim) in (None, await queue.load("a"))
    clock.advance(1.0)
    record = await queue.commit(completion(record, lease, push=(task("a", "t"), task("a", "u"))))
    assert queue.cached_record(lease.claim) is None
    _, leases = await queue.commit_and_lease(change(record), "w", lease_request("p", slots=2), TTL)
    for lease in leases:
        assert queue.cached_record(lease.claim) in (None, await queue.load("a"))
    await queue.commit(change(await queue.load("a"), status="cancelled"))
    assert [queue.cached_record(lease.claim) for lease in leases] == [None, None]


async def leasing_stops_at_a_task_that_does_not_fit(queue: QueueBackend, clock: ManualClock) -> None:
    """Leasing stops at the first task without room, even if a smaller one follows."""
    for name, room in (("a", 40), ("b", 50), ("c", 30), ("d", 1)):
        await submit(queue, name, output_size=room)
    first = await queue.lease("w", lease_request("p", slots=9, arena_bytes=100), TTL)
    assert [lease.task.request for lease in first] == ["a", "b"]
    assert await queue.lease("w", lease_request("p", slots=9, arena_bytes=29), TTL) == []
    assert [
        lease.task.request for lease in await queue.lease("w", lease_request("p", slots=9, arena_bytes=31), TTL)
    ] == ["c", "d"]


async def an_expired_lease_lasts_until_a_commit(queue: QueueBackend, clock: ManualClock) -> None:
    """An expired lease is still held until a commit closes it.

    Its worker may commit, and no other worker gets the task.
    """
    record = await submit(queue, "a")
    lease = await lease_next(queue)
    assert await advance_clock(queue, clock, TTL - 1) == []
    assert await advance_clock(queue, clock, 1) == await queue.sweep_expired(TTL) == [lease]
    assert await lease_all(queue) == []
    assert (await queue.commit(completion(record, lease))).context.stages["s"].status == "done"
    assert await queue.sweep_expired(TTL) == []


async def a_gap_in_sweeping_extends_leases(queue: QueueBackend, clock: ManualClock) -> None:
    """After a long gap between calls of `sweep_expired`, all leases are extended once.

    The gap is more than ttl / 2. With regular calls leases expire. A lease that expires later than now + ttl keeps its
    expiry.
    """
    await submit(queue, "a")
    await submit(queue, "b")
    lease = await lease_next(queue)
    await queue.lease("w", lease_request("p"), 9 * TTL)
    for gap in (3 * TTL, 2 * TTL):
        clock.advance(gap)
        assert await advance_clock(queue, clock, TTL - 1) == []
        (expired,) = await advance_clock(queue, clock, 1)
        assert (expired.claim, expired.expires) == (lease.claim, await queue.now())
        clock.advance(TTL / 2 - 1)
        assert await queue.sweep_expired(TTL) == [expired]
    assert await advance_clock(queue, clock, TTL + 1) == [expired]
    assert len(await advance_clock(queue, clock, 1)) == 2


async def running_time_leaves_out_gaps_in_sweeping(queue: QueueBackend, clock: ManualClock) -> None:
    """`ran_s` counts at most ttl / 2 of a gap between two calls of `sweep_expired`.

    So neither a pause of all schedulers nor a step of the clock uses up a time limit.
    """

    async def ran_s() -> float:
        (run,) = (await queue.load("a")).running
        return run.ran_s

    await submit(queue, "a")
    await queue.sweep_expired(TTL)
    lease = await lease_next(queue)
    await advance_clock(queue, clock, TTL)
    assert await ran_s() == TTL
    clock.advance(3600.0)
    assert await ran_s() == 1.5 * TTL
    assert await queue.sweep_expired(TTL) == []
    assert await ran_s() == 1.5 * TTL
    clock.advance(1.0)
    assert await ran_s() == 1.5 * TTL + 1
    await queue.hand_back(lease.claim)
    await lease_next(queue)
    assert await ran_s() == 0


async def renewing_extends_a_lease(queue: QueueBackend, clock: ManualClock) -> None:
    """`renew` extends a lease to now + ttl, even an expired one.

    A claim without a lease is returned as ended.
    """
    await submit(queue, "a")
    lease = await lease_next(queue)
    stranger = task("a", attempt=2)
    other = type(lease.claim)("a", "s", stranger.attempt, lease.token)
    await advance_clock(queue, clock, TTL + 1)
    renewal = await queue.renew([lease.claim, other], TTL)
    assert (renewal.renewed, renewal.ended) == ((lease.claim,), (other,))
    assert await advance_clock(queue, clock, TTL - 1) == []
    assert [expired.claim for expired in await advance_clock(queue, clock, 1)] == [lease.claim]


async def an_old_claim_is_refused(queue: QueueBackend, clock: ManualClock) -> None:
    """The claim of an ended lease cannot commit, renew, report progress or hand back."""
    record = await submit(queue, "a")
    old = await lease_next(queue)
    clock.advance(TTL)
    record = await queue.commit(change(record, old.claim, push=(task("a", attempt=2),)))
    new = await lease_next(queue)
    assert new.task.attempt == 2
    try:
        await queue.commit(completion(record, old))
    except LeaseLost:
        assert (await queue.load("a")).context == record.context
    else:
        raise AssertionError("a claim of an ended lease was accepted")
    assert (await queue.renew([old.claim], TTL)).ended == (old.claim,)
    assert not await queue.progress(old.claim, [])
    assert not await queue.hand_back(old.claim)
    await queue.commit(completion(record, new))


async def a_returned_task_keeps_its_position(queue: QueueBackend, clock: ManualClock) -> None:
    """A task that is handed back has its old place, as the next attempt.

    Its old claim is lost, and its context does not change.
    """
    for name in "abc":
        await submit(queue, name)
    first = await lease_next(queue)
    second = await lease_next(queue)
    assert await queue.hand_back(second.claim)
    assert await queue.hand_back(first.claim)
    assert not await queue.hand_back(first.claim)
    assert [waiting.request for waiting in await queue.peek("p")] == list("abc")
    again = await lease_next(queue)
    assert again.task == task("a", attempt=2)
    assert (await queue.load("a")).context.version == 0


async def repeated_refusals_exclude_a_worker(queue: QueueBackend, clock: ManualClock) -> None:
    """A worker that turns a task down MAX_REFUSALS times is excluded from it.

    It gets later tasks, and others get the task in its old place. A task with a reported step, or handed back by
    `hand_back`, is not counted. A task that is pushed again counts anew. `refuse` returns the number of excluded
    workers.
    """
    await submit(queue, "a")
    await submit(queue, "b")
    for times in range(MAX_REFUSALS):
        lease = await lease_next(queue, worker="v")
        assert (lease.task.request, lease.task.attempt) == ("a", 1 + times)
        assert await queue.refuse(lease.claim) == (times == MAX_REFUSALS - 1)
    await expect_error(LeaseLost, queue.refuse(lease.claim))
    assert [waiting.request for waiting in await queue.peek("p")] == ["a", "b"]
    behind = await queue.lease("v", lease_request("p", slots=9, affinity="x", preferred_node="n"), TTL)
    assert [lease.task.request for lease in behind] == ["b"]
    for _ in range(MAX_REFUSALS):
        assert await queue.hand_back((await lease_next(queue, worker="w")).claim)
        lease = await lease_next(queue, worker="w")
        assert await queue.progress(lease.claim, [Event("progress", step=1, steps=2)])
        assert await queue.refuse(lease.claim) == 1
    assert (await lease_next(queue, worker="w")).task == task("a", attempt=1 + 3 * MAX_REFUSALS)
    await queue.commit(change(await queue.load("a"), push=(task("a", attempt=99),)))
    assert (await lease_next(queue, worker="v")).task.attempt == 99


async def a_task_is_not_leased_to_an_avoided_worker(queue: QueueBackend, clock: ManualClock) -> None:
    """A task is not leased to the worker in `avoid_worker`, despite preferences and hand-backs.

    It is once it is pushed again without `avoid_worker`.
    """
    record = await submit(queue, "a", avoid_worker="w", preferred_node="here", affinity="red")
    await submit(queue, "b")
    assert await lease_all(queue) == ["b"]
    assert await queue.lease("w", lease_request("p", preferred_node="here", affinity="red"), TTL) == []
    assert await count_waiting(queue, "p") == 1
    lease = await lease_next(queue, worker="other")
    assert await queue.hand_back(lease.claim)
    assert await queue.lease("w", lease_request("p"), TTL) == []
    lease = await lease_next(queue, worker="other")
    await queue.commit(change(record, lease.claim, push=(task("a", attempt=3),)))
    assert (await lease_next(queue)).task.request == "a"


async def a_preference_does_not_override_refusals(queue: QueueBackend, clock: ManualClock) -> None:
    """A preference never selects tasks from which the worker is excluded.

    A task behind many of these is still leased.
    """
    names = [f"{number:02}" for number in range(PREFERENCE_TASKS + 4)]
    for name in names:
        await submit(queue, name, affinity="x")
    for _ in range(MAX_REFUSALS):
        for lease in await queue.lease("v", lease_request("p", slots=len(names)), TTL):
            await queue.refuse(lease.claim)
    assert await queue.lease("v", lease_request("p", affinity="x"), TTL) == []
    await submit(queue, "new", affinity="x")
    assert (await lease_next(queue, worker="v")).task.request == "new"
    assert await lease_all(queue) == names


async def a_preference_applies_behind_a_refused_task(queue: QueueBackend, clock: ManualClock) -> None:
    """A preference applies behind an urgent task from which the worker is excluded."""
    await submit(queue, "urgent", priority=1)
    for _ in range(MAX_REFUSALS):
        (lease,) = await queue.lease("v", lease_request("p"), TTL)
        await queue.refuse(lease.claim)
    await submit(queue, "a")
    await submit(queue, "b", affinity="x")
    assert [lease.task.request for lease in await queue.lease("v", lease_request("p", affinity="x"), TTL)] == ["b"]


async def a_delayed_task_waits_for_its_time(queue: QueueBackend, clock: ManualClock) -> None:
    """A delayed task is passed over until its `not_before`.

    Then it has its place in the order. It counts as waiting all the time.
    """
    soon = await queue.now() + 5
    await submit(queue, "a", not_before=soon, priority=1)
    await submit(queue, "b")
    await submit(queue, "c")
    assert await count_waiting(queue, "p") == 3
    assert [waiting.request for waiting in await queue.peek("p")] == ["b", "c"]
    assert (await lease_next(queue)).task.request == "b"
    clock.advance(5)
    assert [waiting.request for waiting in await queue.peek("p")] == ["a", "c"]
    assert await lease_all(queue) == ["a", "c"]


async def a_call_can_require_a_higher_priority(queue: QueueBackend, clock: ManualClock) -> None:
    """With `priority_above`, only tasks of a higher priority are leased.

    Waiting callers without `priority_above` are served first.
    """
    for name, priority in zip("abc", (0, 3, 7), strict=True):
        await submit(queue, name, priority=priority)
    assert await queue.lease("w", lease_request("p", slots=9, priority_above=7), TTL) == []
    assert [
        lease.task.request for lease in await queue.lease("w", lease_request("p", slots=9, priority_above=0), TTL)
    ] == [
        "c",
        "b",
    ]
    assert await lease_all(queue) == ["a"]
    busy = await start_task(queue.lease("busy", lease_request("p", priority_above=0), TTL, wait=60.0))
    await submit(queue, "d")
    assert not (await start_task(asyncio.wait({busy}))).done()
    assert await lease_all(queue) == ["d"]
    idle = await start_task(queue.lease("idle", lease_request("p"), TTL, wait=60.0))
    await submit(queue, "e", priority=5)
    assert [lease.task.request for lease in await idle] == ["e"]
    await submit(queue, "f", priority=1)
    assert [lease.task.request for lease in await busy] == ["f"]


async def a_preference_selects_among_equal_priorities(queue: QueueBackend, clock: ManualClock) -> None:
    """Among tasks of one priority, near inputs are preferred, then equal affinity.

    A task that has been ready for PREFERENCE_S is not passed over.
    """
    await submit(queue, "a", preferred_node="here")
    await submit(queue, "b", affinity="alike")
    await submit(queue, "c", preferred_node="there", affinity="alike")
    await submit(queue, "d", preferred_node="there")
    await submit(queue, "e", priority=1)
    query = lease_request("p", preferred_node="there", affinity="alike")
    order = [(await queue.lease("w", query, TTL))[0].task.request for _ in range(5)]
    assert order == list("ecdba")
    for name in ("f", "g"):
        await submit(queue, name, preferred_node="there" if name == "g" else "here")
    clock.advance(2 * PREFERENCE_S)
    assert [lease.task.request for lease in await queue.lease("w", query, TTL)] == ["f"]
    assert await lease_all(queue) == ["g"]


async def a_full_pool_holds_back_its_feeders(queue: QueueBackend, clock: ManualClock) -> None:
    """Back-pressure: a pool is held back while a pool that it feeds is full.

    Its waiting workers are woken when that one has room again.
    """
    for name, pool in (("a", "p"), ("b", "q"), ("c", "q")):
        await submit(queue, name, pool=pool)
    query = lease_request("p", backpressure={"p": {"q": 1, "r": 0}})
    assert await queue.lease("w", query, TTL) == []
    waiting = await start_task(queue.lease("w", query, TTL, wait=60.0))
    assert (await lease_next(queue, "q")).task.request == "b"
    assert [lease.task.request for lease in await waiting] == ["a"]


async def later_pools_are_leased_first(queue: QueueBackend, clock: ManualClock) -> None:
    """Within one priority, pools with a higher `stage_depth` go first, whatever order and arrival.

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
        await submit(queue, name, pool=pool, priority=priority, order=order)
    query = lease_request("p", "q", "r", "s", slots=9, stage_depths={"q": 1, "r": 2, "s": -1})
    assert [lease.task.request for lease in await queue.lease("w", query, TTL)] == list("fdcebag")


async def a_preference_does_not_cross_pools(queue: QueueBackend, clock: ManualClock) -> None:
    """A preference selects only among pools with the same `stage_depth`."""
    for name, pool, near in (("a", "p", "here"), ("b", "q", ""), ("c", "q", "here"), ("d", "r", "here")):
        await submit(queue, name, pool=pool, preferred_node=near)
    query = lease_request("p", "q", "r", slots=9, stage_depths={"q": 1, "r": 1}, preferred_node="here")
    assert [lease.task.request for lease in await queue.lease("w", query, TTL)] == list("cdba")


async def a_task_that_does_not_fit_blocks_only_earlier_pools(queue: QueueBackend, clock: ManualClock) -> None:
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
        await submit(queue, name, pool=pool, output_size=room, priority=priority)
    later = {"q": 1, "s": 1, "r": 2}
    query = lease_request("p", "q", "r", "s", slots=9, arena_bytes=59, stage_depths=later)
    assert [lease.task.request for lease in await queue.lease("w", query, TTL)] == ["c"]
    waiting = await start_task(
        queue.lease("w", lease_request("p", "q", "s", arena_bytes=59, stage_depths=later), TTL, wait=60.0)
    )
    assert (await lease_next(queue, "q")).task.request == "a"
    assert [lease.task.request for lease in await waiting] == ["b"]


async def a_pool_leaves_its_reserve_free(queue: QueueBackend, clock: ManualClock) -> None:
    """Tasks of a pool are leased only while they leave its reserve free.

    Other pools may use the reserve.
    """
    for name, pool in (("a", "p"), ("b", "p"), ("c", "p"), ("d", "q"), ("e", "q"), ("f", "q")):
        await submit(queue, name, pool=pool, output_size=30)
    query = lease_request("p", "q", slots=9, arena_bytes=120, reserves={"p": 60}, stage_depths={"q": 1})
    assert [lease.task.request for lease in await queue.lease("w", query, TTL)] == list("def")
    query = lease_request("p", slots=9, arena_bytes=120, reserves={"p": 60})
    assert [lease.task.request for lease in await queue.lease("w", query, TTL)] == list("ab")
    assert await queue.lease("w", lease_request("p", arena_bytes=89, reserves={"p": 60}), TTL) == []
    assert await lease_all(queue) == ["c"]


async def resources_are_counted_separately(queue: QueueBackend, clock: ManualClock) -> None:
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
        await submit(queue, name, pool=pool, needs=needs)
    kv = {"kv": 5}
    query = lease_request("p", "q", "r", "s", slots=9, stage_depths={"s": 1}, amounts={"p": kv, "q": kv, "s": kv})
    assert [lease.task.request for lease in await queue.lease("w", query, TTL)] == list("efdg")
    query = lease_request("p", "q", slots=9, amounts={"p": kv, "q": kv})
    (lease,) = await queue.lease("w", query, TTL)
    assert lease.task == task("a", needs={"kv": 3})
    await queue.hand_back(lease.claim)
    assert await queue.lease("w", lease_request("p", "q", slots=9, amounts={"p": {"kv": 2}, "q": kv}), TTL) == []
    assert [lease.task.request for lease in await queue.lease("w", lease_request("p", "q", slots=9), TTL)] == [
        "a",
        "b",
        "c",
    ]


LEASE_RULES = (
    equal_tasks_are_leased_in_order_of_arrival,
    a_higher_priority_is_leased_first,
    a_lower_order_number_is_leased_first,
    several_pools_merge_into_one_queue,
    a_call_leases_at_most_its_slots,
    a_lease_has_worker_expiry_and_token,
    a_cached_record_equals_the_stored_one,
    leasing_stops_at_a_task_that_does_not_fit,
    an_expired_lease_lasts_until_a_commit,
    a_gap_in_sweeping_extends_leases,
    running_time_leaves_out_gaps_in_sweeping,
    renewing_extends_a_lease,
    an_old_claim_is_refused,
    a_returned_task_keeps_its_position,
    repeated_refusals_exclude_a_worker,
    a_task_is_not_leased_to_an_avoided_worker,
    a_preference_does_not_override_refusals,
    a_preference_applies_behind_a_refused_task,
    a_delayed_task_waits_for_its_time,
    a_call_can_require_a_higher_priority,
    a_preference_selects_among_equal_priorities,
    a_full_pool_holds_back_its_feeders,
    later_pools_are_leased_first,
    a_preference_does_not_cross_pools,
    a_task_that_does_not_fit_blocks_only_earlier_pools,
    a_pool_leaves_its_reserve_free,
    resources_are_counted_separately,
)
