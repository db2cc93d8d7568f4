"""Rules of the queue port about admission control, retention, statistics and the encoder index."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from unfuse.core.errors import Conflict, NotFound, Overloaded
from unfuse.core.plan import readable_pool
from unfuse.core.request import Event
from unfuse.queues.base import FRONT_TASKS, MAX_CACHED, PoolStats, QueueBackend, QueueLimits, QueueStats, RequestFilter
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import (
    LIMITS,
    TTL,
    change,
    completion,
    count_waiting,
    expect_error,
    history,
    lease_next,
    lease_request,
    object_ref,
    plan_with_costs,
    request,
    submit,
    task,
)


async def requests_are_listed_newest_first(queue: QueueBackend, clock: ManualClock) -> None:
    """Requests are listed newest first, in pages, filtered by state, tenant and idempotency key."""

    async def names(which: RequestFilter, after: str | None = None, limit: int = 100) -> Sequence[str]:
        return [record.context.id for record in await queue.list(which, after=after, limit=limit)]

    for name, tenant, key in (("c", "t", "k"), ("a", "u", "k"), ("d", "t", ""), ("b", "t", "l")):
        await queue.submit(request(name, tenant=tenant, idempotency_key=key), [], [], LIMITS)
    await queue.commit(change(await queue.load("d"), status="failed"))
    assert await names(RequestFilter()) == list("bdac")
    assert await names(RequestFilter(), limit=2) == list("bd")
    assert await names(RequestFilter(), after="d", limit=2) == list("ac")
    assert await names(RequestFilter(), after="c") == []
    assert (await names(RequestFilter(is_over=True)), await names(RequestFilter(is_over=False))) == (["d"], list("bac"))
    assert await names(RequestFilter(tenant="t", is_over=False)) == list("bc")
    assert await names(RequestFilter(tenant="t", idempotency_key="k")) == ["c"]
    await expect_error(NotFound, queue.list(RequestFilter(), after="nobody"))


async def old_ended_requests_are_dropped(queue: QueueBackend, clock: ManualClock) -> None:
    """`drop_ended_before` drops ended requests with their idempotency keys, and no active ones."""
    for name in ("old", "new", "active"):
        await queue.submit(request(name, idempotency_key=name), [task(name)], [Event("queued")], LIMITS)
    for name, at in (("old", 99.0), ("new", 100.0)):
        await queue.commit(change(await queue.load(name), status="completed", completed_at=at))
    assert await queue.drop_ended_before(100.0) == ["old"]
    await expect_error(NotFound, queue.load("old"))
    assert [record.context.id for record in await queue.list(RequestFilter())] == ["active", "new"]
    again = await queue.submit(request("old", idempotency_key="old"), [], [], LIMITS)
    assert again.context.status == "queued"


async def the_first_proposed_secret_is_stored(queue: QueueBackend, clock: ManualClock) -> None:
    """All callers get the first proposed secret of a name, even concurrent ones."""
    proposed = [f"{number:02}" * 16 for number in range(8)]
    secrets = await asyncio.gather(*(queue.secret("links", secret) for secret in proposed))
    assert len({*secrets}) == 1 and secrets[0] in proposed
    assert await queue.secret("other", "b" * 32) == "b" * 32
    assert await queue.drop_ended_before(1e12) == []
    assert await queue.secret("links", "c" * 32) == secrets[0]


async def an_ended_request_can_be_dropped(queue: QueueBackend, clock: ManualClock) -> None:
    """`drop` removes an ended request with its idempotency key, idempotently; an active one stays."""
    await queue.submit(request("a", idempotency_key="k"), [task("a")], [], LIMITS)
    await queue.drop("a")
    await queue.commit(change(await queue.load("a"), status="completed"))
    for _ in range(2):
        await queue.drop("a")
    await expect_error(NotFound, queue.load("a"))
    assert (await queue.submit(request("b", idempotency_key="k"), [], [], LIMITS)).context.id == "b"


async def ended_and_unknown_requests_are_found(queue: QueueBackend, clock: ManualClock) -> None:
    """`ended_among` returns the ended and unknown ids of many, in the given order."""
    for name in ("completed", "failed", "running", "queued", "dropped"):
        await submit(queue, name, pool="q" if name == "running" else "p")
    assert await queue.ended_among(["queued", "completed", "nobody", "running"]) == ["nobody"]
    await queue.lease("w", lease_request("q"), TTL)
    for name in ("completed", "failed", "dropped"):
        await queue.commit(change(await queue.load(name), status="completed" if name == "completed" else "failed"))
    await queue.drop("dropped")
    names = ["dropped", "queued", "failed", "", "running", "completed", "failed"]
    assert await queue.ended_among(names) == ["dropped", "failed", "", "completed", "failed"]
    assert await queue.ended_among([]) == []
    many = [f"{number:04}" for number in range(1200)]
    assert await queue.ended_among([*many, "queued", *many, "failed"]) == [*many, *many, "failed"]


async def stats_count_requests_tasks_and_work(queue: QueueBackend, clock: ManualClock) -> None:
    """`stats` has active requests, and for each pool waiting tasks, age and predicted work.

    The age is that of the oldest of the first FRONT ready tasks, and survives a hand-back. The work is the predicted
    seconds of stages that are not done.
    """
    assert await queue.stats(["p"]) == QueueStats(0, {"p": PoolStats()})
    later = await queue.now() + 60
    for name, plan in (("a", {"p": 0.1, "q": 0.2}), ("b", {"p": 0.7, "p2": 1.0, "q": 0.1})):
        tasks = [task(name, "p"), task(name, "later", pool="r", not_before=later)]
        await queue.submit(request(name, plan=plan_with_costs(**plan)), tasks, [Event("queued")], LIMITS)
        clock.advance(8)
    everything = {
        "p": PoolStats(2, 16.0, 1.8),
        "q": PoolStats(0, 0.0, 0.3),
        "r": PoolStats(2, 0.0),
        "nowhere": PoolStats(),
    }
    assert await queue.stats([*everything]) == QueueStats(2, everything)
    lease = await lease_next(queue)
    assert (await queue.stats(["p"])).pools == {"p": PoolStats(1, 8.0, 1.8)}
    await queue.hand_back(lease.claim)
    clock.advance(8)
    assert (await queue.stats(["p"])).pools == {"p": PoolStats(2, 24.0, 1.8)}
    await queue.commit(completion(await queue.load("a"), await lease_next(queue), push=(task("a", "q", pool="q"),)))
    assert await queue.stats(["q", "p"]) == QueueStats(2, {"q": PoolStats(1, 0.0, 0.3), "p": PoolStats(1, 16.0, 1.7)})
    await queue.commit(change(await queue.load("b"), status="failed", completed_at=1.0))
    assert await queue.stats(["p", "q"]) == QueueStats(1, {"p": PoolStats(), "q": PoolStats(1, 0.0, 0.2)})
    await queue.commit(change(await queue.load("b"), is_dead_letter=False))
    await queue.drop_ended_before(2.0)
    for number in range(FRONT_TASKS + 1):
        clock.advance(8)
        await submit(queue, f"urgent{number}", pool="q", priority=1)
    assert (await queue.stats(["q"])).pools["q"] == PoolStats(FRONT_TASKS + 2, 8.0 * FRONT_TASKS, 0.2)
    await queue.commit(change(await queue.load("a"), status="cancelled"))
    assert (await queue.stats(["q"])).pools["q"] == PoolStats(FRONT_TASKS + 1, 8.0 * FRONT_TASKS)


async def an_invalid_prediction_counts_as_zero(queue: QueueBackend, clock: ManualClock) -> None:
    """A prediction that is NaN, infinite, negative or too long counts as 0."""
    costs = {f"p{n}": cost for n, cost in enumerate((float("nan"), float("inf"), -1.0, 1e300, 1e-12, 2.0))}
    record = await queue.submit(request("a", plan=plan_with_costs(**costs)), [], [], LIMITS)
    assert (await queue.stats(["p"])).pools == {"p": PoolStats(0, 0.0, 2.0)}
    await queue.commit(change(record, status="cancelled"))
    assert (await queue.stats(["p"])).pools == {"p": PoolStats()}


async def dead_letters_are_found(queue: QueueBackend, clock: ManualClock) -> None:
    """Dead letters are found among ended requests."""
    for name in "abc":
        await submit(queue, name)
        await queue.commit(change(await queue.load(name), status="failed", is_dead_letter=name != "b"))
    assert [record.context.id for record in await queue.list(RequestFilter(is_dead_letter=True))] == ["c", "a"]
    assert [record.context.id for record in await queue.list(RequestFilter(is_dead_letter=False))] == ["b"]


async def an_ended_request_can_be_updated(queue: QueueBackend, clock: ManualClock) -> None:
    """A change may update an ended request, by its version, and queues nothing.

    An example is a dead letter that was dealt with.
    """
    record = await submit(queue, "a")
    over = await queue.commit(
        change(record, status="failed", is_dead_letter=True, completed_at=5.0, events=(Event("failed"),))
    )
    await expect_error(Conflict, queue.commit(change(record, status="failed", is_dead_letter=False)))
    revised = await queue.commit(change(over, is_dead_letter=False, push=(task("a", "t"),)))
    assert (revised.context.version, revised.context.is_dead_letter, revised.position) == (2, False, None)
    assert (await queue.load("a")).context == revised.context
    assert await queue.list(RequestFilter(is_dead_letter=True)) == []
    assert [record.context.id for record in await queue.list(RequestFilter(is_over=True, is_dead_letter=False))] == [
        "a"
    ]
    assert (await count_waiting(queue, "p"), list(await queue.peek("p"))) == (0, [])
    assert [event.type for event in await history(queue, "a")] == ["queued", "failed"]
    tight = QueueLimits(max_active=1)
    await queue.submit(request("b"), [], [], tight)
    await expect_error(Overloaded, queue.submit(request("c"), [], [], tight))
    assert await queue.drop_ended_before(5.1) == ["a"]


async def a_request_can_be_submitted_as_ended(queue: QueueBackend, clock: ManualClock) -> None:
    """A request that is over when it is submitted is stored like any ended one.

    It can be found, listed, watched, submitted again and dropped, and does not count toward limits.
    """
    tight, events = QueueLimits(max_active=1), (Event("queued"), Event("completed"))
    over = request(
        "a", status="completed", completed_at=5.0, idempotency_key="k", cost=9.0, plan=plan_with_costs(p=9.0)
    )
    stored = await queue.submit(over, [], events, tight)
    assert (stored.context, stored.running, stored.position) == (over, (), None)
    assert (await queue.load("a")).context == (await queue.submit(over, [], events, tight)).context == over
    assert (await queue.submit(request("b", idempotency_key="k"), [], [], tight)).context.id == "a"
    assert [event.type for event in await history(queue, "a")] == ["queued", "completed"]
    assert await queue.stats(["p"]) == QueueStats(0, {"p": PoolStats()})
    assert (await queue.ended_among(["a"]), await queue.list(RequestFilter(is_over=False))) == (["a"], [])
    assert [record.context.id for record in await queue.list(RequestFilter(status="completed"))] == ["a"]
    await queue.submit(request("c"), [], [], tight)
    assert await queue.drop_ended_before(5.1) == ["a"]
    await expect_error(NotFound, queue.load("a"))


async def admission_control_refuses_overload(queue: QueueBackend, clock: ManualClock) -> None:
    """Admission control refuses too many requests, or tasks of one pool, with nothing stored.

    The error has the pool's readable name. Ended requests free their share, and a repeated submit always succeeds.
    """
    tight = QueueLimits(max_active=2, max_queue=2)
    await queue.submit(request("a"), [task("a", pool="q")], [], tight)
    refused = queue.submit(request("b"), [task("b", stage) for stage in "xyz"], [Event("queued")], tight)
    error = await expect_error(Overloaded, refused)
    assert error.retry_after > 0 and f"tasks wait in pool {readable_pool('p')}, the limit is 2" in str(error)
    await expect_error(NotFound, queue.load("b"))
    assert await count_waiting(queue, "p") == 0
    await queue.submit(request("b"), [task("b", stage) for stage in "xy"], [], tight)
    await expect_error(Overloaded, queue.submit(request("c"), [task("c", pool="r")], [], tight))
    assert (await queue.submit(request("a"), [], [], tight)).context.id == "a"
    await queue.commit(change(await queue.load("b"), status="failed"))
    await queue.submit(request("c"), [task("c")], [], tight)


async def admission_control_refuses_excessive_cost(queue: QueueBackend, clock: ManualClock) -> None:
    """Admission control refuses a request if the sum of costs would exceed `max_cost`.

    Ended requests free their cost. A request that exceeds it alone is accepted when no other is active.
    """
    tight = QueueLimits(max_cost=10.0)
    await queue.submit(request("huge", cost=99.0), [], [], tight)
    await expect_error(Overloaded, queue.submit(request("b", cost=0.5), [], [], tight))
    await queue.commit(change(await queue.load("huge"), status="completed"))
    for name, cost in (("b", 4.5), ("c", 5.5)):
        await queue.submit(request(name, cost=cost), [], [], tight)
    await expect_error(Overloaded, queue.submit(request("d", cost=0.1), [], [], tight))
    await queue.commit(change(await queue.load("b"), status="cancelled"))
    await queue.submit(request("d", cost=4.5), [], [], tight)


async def the_encoder_index_finds_outputs_by_key(queue: QueueBackend, clock: ManualClock) -> None:
    """The encoder index has the newest output of each key, until that object is removed."""
    for key, id in (("k", "a"), ("l", "b"), ("k", "c")):
        await queue.put_encoding(key, object_ref(id), 100)
    assert await queue.find_encoding(["nothing", "l", "k"]) == {"l": object_ref("b"), "k": object_ref("c")}
    assert await queue.find_encoding([]) == {}
    for key, id in (("k", "a"), ("l", "b"), ("l", "b"), ("nothing", "c")):
        await queue.remove_encoding(key, id)
    assert await queue.find_encoding(["k", "l"]) == {"k": object_ref("c")}


async def the_encoder_index_evicts_the_least_recently_used(queue: QueueBackend, clock: ManualClock) -> None:
    """The encoder index evicts the least recently used outputs beyond its room.

    An output larger than the whole room is not indexed, and evicts no other. A lookup without `use` is no use.
    """

    async def indexed(*keys: str) -> list[str]:
        return sorted(await queue.find_encoding(keys, use=False))

    assert await queue.cached_bytes() == 0
    for key, nbytes in (("a", 40), ("b", 30), ("c", 30)):
        await queue.put_encoding(key, object_ref(key, nbytes), 100)
    assert await queue.cached_bytes() == 100
    await queue.find_encoding(["b", "a"])
    await queue.find_encoding(["c"], use=False)
    await queue.put_encoding("d", object_ref("d", 1), 100)
    assert await indexed("a", "b", "c", "d") == ["a", "b", "d"]
    await queue.put_encoding("e", object_ref("e", 31), 100)
    assert await indexed("a", "b", "d", "e") == ["a", "d", "e"]
    await queue.put_encoding("f", object_ref("f", 101), 100)
    await queue.put_encoding("d", object_ref("d2", 101), 100)
    assert await indexed("a", "d", "e", "f") == ["a", "e"]
    await queue.put_encoding("g", object_ref("g", 100), 100)
    assert await indexed("a", "e", "g") == ["g"]
    await queue.remove_encoding("g", "g")
    assert await queue.cached_bytes() == 0
    await queue.put_encoding("h", object_ref("h", 60), 100)
    await queue.put_encoding("i", object_ref("i", 40), 100)
    assert await indexed("h", "i") == ["h", "i"]


async def the_encoder_index_is_bounded(queue: QueueBackend, clock: ManualClock) -> None:
    """The encoder index has at most MAX_CACHED outputs, however small."""
    keys = [str(number) for number in range(MAX_CACHED + 1)]
    for key in keys:
        await queue.put_encoding(key, object_ref(key, 0), 100)
    assert list(await queue.find_encoding(keys)) == keys[1:]


RECORD_RULES = (
    requests_are_listed_newest_first,
    old_ended_requests_are_dropped,
    an_ended_request_can_be_dropped,
    the_first_proposed_secret_is_stored,
    ended_and_unknown_requests_are_found,
    stats_count_requests_tasks_and_work,
    an_invalid_prediction_counts_as_zero,
    dead_letters_are_found,
    an_ended_request_can_be_updated,
    a_request_can_be_submitted_as_ended,
    admission_control_refuses_overload,
    admission_control_refuses_excessive_cost,
    the_encoder_index_finds_outputs_by_key,
    the_encoder_index_evicts_the_least_recently_used,
    the_encoder_index_is_bounded,
)
