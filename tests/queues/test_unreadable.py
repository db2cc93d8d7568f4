"""Garbage in Redis costs the record that it is in: all else is answered, and somebody can find it and drop it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.examples import examples
from tests.queues.conftest import Server
from unfuse import queues
from unfuse.core.errors import NotFound, Overloaded, RecordDamaged
from unfuse.core.request import Event
from unfuse.queues.base import PoolStats, QueueBackend, QueueLimits, RequestFilter
from unfuse.testing import ManualClock
from unfuse.testing.queue_samples import (
    LIMITS,
    TTL,
    change,
    completion,
    count_waiting,
    history,
    lease_request,
    object_ref,
    plan_with_costs,
    request,
    submit,
    task,
    worker_info,
)

BAD, RUNS, OVER, HEALTHY = "bad", "runs", "over", ("a", "b", "c")
P = "{unfuse}"
TASK = f"{P}:task:3:bad:s"

Client = redis.Redis
garbage = st.binary(min_size=1, max_size=20) | st.sampled_from(
    [b"\x01\xc1", b"\x01" + b"\x91" * 600, b"nan", b"-1", b"\xff"]
)


def wrong_type(key: str) -> Callable[[Client, bytes], object]:
    return lambda client, data: (client.delete(key), client.set(key, data))


def wrong_list(key: str) -> Callable[[Client, bytes], object]:
    return lambda client, data: (client.delete(key), client.rpush(key, data))


def field(key: str, name: str) -> Callable[[Client, bytes], object]:
    return lambda client, data: client.hset(key, name, data)


def without(key: str, name: str) -> Callable[[Client, bytes], object]:
    return lambda client, data: client.hdel(key, name)


def member(key: str) -> Callable[[Client, bytes], object]:
    return lambda client, data: client.zadd(key, {data: 0})


RECORDS = [f"{P}:{kind}:bad" for kind in ("request", "stages", "events", "droppable")] + [TASK]
FIELDS = ("context", "done", "number", "is_over", "version", "tenant", "left")
LINES = ("requests", "active", "over", "leases", "joined", "ready:p")
DAMAGES: dict[str, Callable[[Client, bytes], object]] = {
    **{f"{key} is a string": wrong_type(key) for key in RECORDS},
    **{f"{key} is a list": wrong_list(key) for key in RECORDS if "droppable" not in key},
    **{f"{key} is gone": lambda client, _, key=key: client.delete(key) for key in RECORDS},
    **{f"its {name} is garbage": field(f"{P}:request:bad", name) for name in FIELDS},
    **{f"its {name} is gone": without(f"{P}:request:bad", name) for name in FIELDS},
    **{f"its task's {name} is garbage": field(TASK, name) for name in ("task", "attempt", "room", "priority", "since")},
    **{f"its task's {name} is gone": without(TASK, name) for name in ("task", "request", "pool", "room", "member")},
    **{f"a worker's {name} is garbage": field(f"{P}:{name}", "w") for name in ("workers", "cards", "seen")},
    **{f"a stranger in {name}": member(f"{P}:{name}") for name in LINES},
    "an event is garbage": member(f"{P}:events:bad"),
    "a cached output is garbage": field(f"{P}:cached", "k"),
    "an idempotency key leads nowhere": field(f"{P}:keyed", "1:tk"),
    "what is left is garbage": lambda client, data: client.hset(f"{P}:left", "z", b"no number" + data),
    "all that is left is a string": wrong_type(f"{P}:left"),
    "what all costs is garbage": field(f"{P}:meta", "cost"),
    "the news are garbage": lambda client, data: client.publish(f"{P}:news", b"\xff\xfe:" + data),
}


async def filled(server: Server, clock: ManualClock) -> QueueBackend:
    """A queue with one request and one worker that are to be damaged, among others."""
    server.client.flushall()
    queue = queues.open(server.url, clock)
    for name in ("v", "w"):
        await queue.register(worker_info(name))
    await submit(queue, OVER)
    await queue.commit(change(await queue.load(OVER), status="completed", completed_at=1.0))
    await submit(queue, RUNS, priority=9)
    assert (await queue.stats([])).active == 1
    for name in (BAD, *HEALTHY):
        context = request(name, tenant="t", idempotency_key=name, plan=plan_with_costs(**{f"{'zy'[name == BAD]}": 0.1}))
        await queue.submit(context, [task(name)], [Event("queued")], LIMITS)
    for key in "kl":
        await queue.put_encoding(key, object_ref(key), 100)
    return queue


async def test_damaged_task_is_skipped_when_leasing_by_locality(server: Server) -> None:
    """Though its inputs are the nearest: what is whole goes, and the other is put aside when it is the first."""
    server.client.flushall()
    queue = queues.open(server.url)
    for name, near in (("a", ""), ("bad", "node")):
        await submit(queue, name, preferred_node=near)
    server.client.hdel(TASK, "stage")
    (lease,) = await queue.lease("v", lease_request("p", slots=2, preferred_node="node"), TTL)
    assert lease.task.request == "a"
    assert [(one.id, one.kind) for one in await queue.damaged()] == [("3:bad:s", "task")]
    await queue.close()


async def all_answers(queue: QueueBackend, clock: ManualClock) -> None:
    """Whoever asks for what is whole gets it."""
    (lease,) = await queue.lease("v", lease_request("p"), TTL)
    assert lease.task.request == RUNS

    await queue.check()
    healthy = [record.context.id for record in await queue.list(RequestFilter()) if record.context.id != BAD]
    assert healthy == [*reversed(HEALTHY), RUNS, OVER]
    active = [record.context.id for record in await queue.list(RequestFilter(is_over=False), limit=4)]
    assert [name for name in active if name != BAD][:3] == [*reversed(HEALTHY)]
    assert {"v"} <= {found.info.id for found in await queue.workers()} <= {"v", "w"}
    assert (await queue.find_encoding(["l", "k"]))["l"] == object_ref("l")
    await queue.put_encoding("m", object_ref("m"), 100)
    assert set(await queue.ended_among([OVER, BAD, *HEALTHY, RUNS, "nobody"])) - {BAD} == {OVER, "nobody"}
    assert (await queue.stats(["y"])).pools["y"].left_s in (0.0, 0.1)
    assert (await queue.stats(["z"])).pools == {"z": PoolStats(0, 0.0, 0.3)}
    for name in (*HEALTHY, RUNS):
        assert (await queue.load(name)).context.id == name
        assert (await anext(queue.watch(name))).type == "queued"
    assert [event.type for event in await history(queue, OVER)] == ["queued"]
    assert {found.request for found in await queue.peek("p")} >= set(HEALTHY)
    assert await count_waiting(queue, "p") >= len(HEALTHY)
    assert (await queue.submit(request("again", tenant="t", idempotency_key="a"), [], [], LIMITS)).context.id == "a"
    await queue.submit(request("new", tenant="t", idempotency_key="k"), [task("new", pool="q")], [], LIMITS)

    assert await queue.progress(lease.claim, [Event("progress", step=1, steps=2)])
    assert (await queue.renew([lease.claim], TTL)).renewed == (lease.claim,)
    assert await queue.hand_back(lease.claim)
    (lease,) = await queue.lease("v", lease_request("p"), TTL)
    assert await queue.refuse(lease.claim) == 0
    leases = {lease.task.request: lease for lease in await queue.lease("v", lease_request("p", slots=9), TTL)}
    assert leases.keys() - {BAD} == {RUNS, *HEALTHY}
    await queue.commit(completion(await queue.load(RUNS), leases[RUNS], status="completed", completed_at=2.0))
    await queue.sweep_expired(TTL)
    for _ in range(8):
        clock.advance(TTL / 4)
        late = await queue.sweep_expired(TTL)
    assert {lease.task.request for lease in late} - {BAD} == set(HEALTHY)
    assert {OVER, RUNS} <= set(await queue.drop_ended_before(5.0))


@given(st.lists(st.tuples(st.sampled_from(sorted(DAMAGES)), garbage), min_size=1, max_size=4))
@settings(deadline=None, max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_corruption_affects_only_the_damaged_records(
    shared_server: Server, damages: list[tuple[str, bytes]]
) -> None:
    """Given a filled queue, when garbage is written to random places of one request and one worker, then every verb
    answers for all others; once what is listed as damaged is dropped, nothing is."""
    asyncio.run(checked(shared_server, damages))


async def checked(server: Server, damages: list[tuple[str, bytes]]) -> None:
    clock = ManualClock()
    queue = await filled(server, clock)
    try:
        for what, data in damages:
            try:
                DAMAGES[what](server.client, data)
            except redis.ResponseError:  # an earlier one has made it something else
                continue
        await all_answers(queue, clock)
        for one in await queue.damaged():
            await queue.discard(one.id)
        assert [one for one in await queue.damaged() if one.kind in ("request", "worker", "task", "lease")] == []
    finally:
        await queue.close()


@pytest.mark.parametrize("what", sorted(DAMAGES))
async def test_each_kind_of_corruption_affects_only_the_damaged_record(what: str, shared_server: Server) -> None:
    for data in (b"\xc1garbage", b"7"):
        await checked(shared_server, [(what, data)])


async def test_unreadable_request_is_listed_as_damaged_until_discarded(server: Server) -> None:
    """Given a context that is garbage, then asking for it says so, dead letters name it, and dropping it frees all of
    it: its place among what is active, its task, its idempotency key."""
    queue = await filled(server, ManualClock())
    server.client.hset(f"{P}:request:bad", "context", b"\xc1")
    with pytest.raises(RecordDamaged, match="request bad cannot be read"):
        await queue.load(BAD)
    assert [(one.id, one.kind) for one in await queue.damaged()] == [(BAD, "request")]
    await queue.discard(BAD)
    assert await queue.damaged() == []
    with pytest.raises(NotFound):
        await queue.load(BAD)
    assert [found.request for found in await queue.peek("p")] == [RUNS, *HEALTHY]
    assert (await queue.submit(request(BAD, tenant="t", idempotency_key=BAD), [], [], LIMITS)).context.version == 0
    assert not [key for key in server.client.scan_iter() if b"task:3:bad" in key]
    await queue.close()


async def test_discarding_the_last_active_request_frees_its_cost(server: Server) -> None:
    """Given one active request, whose record is garbage, when it is discarded, then no cost counts any more."""
    limits = QueueLimits(max_cost=15.0)
    queue = queues.open(server.url, ManualClock())
    await queue.submit(request(BAD, cost=10.0), [], [], limits)
    server.client.hset(f"{P}:request:bad", "context", b"\xc1")
    await queue.discard(BAD)
    for name, cost in (("a", 1.0), ("b", 10.0)):
        await queue.submit(request(name, cost=cost), [], [], limits)
    with pytest.raises(Overloaded):
        await queue.submit(request("c", cost=5.0), [], [], limits)
    await queue.close()


async def test_unreadable_request_is_not_reported_as_ended(server: Server) -> None:
    """Given a record that is garbage, or does not say whether it is over, then what belongs to it is kept, until it is
    dropped."""
    for what in (
        "its context is garbage",
        "its is_over is garbage",
        "its is_over is gone",
        f"{P}:request:bad is a string",
    ):
        queue = await filled(server, ManualClock())
        DAMAGES[what](server.client, b"\xc1")
        assert await queue.ended_among([BAD, OVER]) == [OVER], what
        await queue.discard(BAD)
        assert await queue.ended_among([BAD, OVER]) == [BAD, OVER], what
        await queue.close()


async def test_waiting_lease_call_survives_garbage_in_the_pubsub_channel(server: Server) -> None:
    queue: Any = await filled(server, ManualClock())
    waiting = asyncio.create_task(queue.lease("v", lease_request("q"), TTL, wait=60.0))
    while not server.client.pubsub_numsub(f"{P}:news")[0][1]:
        await asyncio.sleep(0.01)
    server.client.publish(f"{P}:news", b"request:\xff\xfe")
    await submit(queue, "new", pool="q")
    assert [lease.task.request for lease in await waiting] == ["new"]
    await queue.close()
