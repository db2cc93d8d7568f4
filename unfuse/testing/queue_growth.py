"""Rules of the queue port about output deltas: recording, reading and following them."""

from __future__ import annotations

import asyncio

import msgspec

from unfuse.core.errors import NotFound, ProtocolError
from unfuse.core.request import Event
from unfuse.core.task import MAX_DELTA_BYTES, MAX_DELTAS, MAX_DELTAS_PER_MESSAGE, Claim, OutputDeltas
from unfuse.queues.base import QueueBackend
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import (
    LIMITS,
    TTL,
    advance_clock,
    append,
    change,
    completion,
    expect_error,
    history,
    lease_next,
    lease_request,
    next_event,
    request,
    start_task,
    submit,
    task,
)


async def deltas_are_read_from_any_offset(queue: QueueBackend, clock: ManualClock) -> None:
    """Output deltas are read unchanged, by stage, from any number, in pages.

    A stage without deltas has an empty list.
    """
    await queue.submit(request("a"), [task("a"), task("a", "t")], [], LIMITS)
    first, second = await lease_next(queue), await lease_next(queue)
    assert await append(queue, first.claim, 0, [b"\0\xff", b"", "é".encode()])
    assert await append(queue, second.claim, 0, [b"other"])
    assert await append(queue, first.claim, 3, [bytes(MAX_DELTA_BYTES)])
    assert await append(queue, first.claim, 4, [])
    whole = [b"\0\xff", b"", "é".encode(), bytes(MAX_DELTA_BYTES)]
    assert await queue.read_deltas("a", "s") == whole
    assert [await queue.read_deltas("a", "s", after) for after in range(6)] == [whole[after:] for after in range(6)]
    assert await queue.read_deltas("a", "s", 1, limit=2) == whole[1:3]
    assert (await queue.read_deltas("a", "t"), await queue.read_deltas("a", "u")) == ([b"other"], [])
    await expect_error(NotFound, queue.read_deltas("nobody", "s"))
    many = [b"%d" % number for number in range(4, 3000)]
    for at in range(0, len(many), MAX_DELTAS_PER_MESSAGE):
        assert await append(queue, first.claim, 4 + at, many[at : at + MAX_DELTAS_PER_MESSAGE])
    assert await queue.read_deltas("a", "s", 2900, limit=50) == many[2896:2946]
    assert len(await queue.read_deltas("a", "s")) == MAX_DELTAS_PER_MESSAGE


async def appending_requires_a_lease(queue: QueueBackend, clock: ManualClock) -> None:
    """Deltas are recorded only with the lease, even an expired one.

    A claim that differs in any field, or whose lease has ended, changes nothing.
    """
    record = await submit(queue, "a")
    lease = await lease_next(queue)
    wrong = ({"token": bytes(16)}, {"token": b""}, {"attempt": 2}, {"stage": "t"}, {"request": "z"})
    for fields in wrong:
        assert not await append(queue, msgspec.structs.replace(lease.claim, **fields), 0, [b"forged"])
    assert await queue.read_deltas("a", "s") == await queue.read_deltas("a", "t") == []
    assert await advance_clock(queue, clock, TTL) == [lease]
    assert await append(queue, lease.claim, 0, [b"late"])
    record = await queue.commit(change(record, lease.claim, push=(task("a", attempt=2),)))
    assert not await append(queue, lease.claim, 1, [b"too late"])
    assert not await append(queue, lease.claim, 99, [b"much too late"])
    again = await lease_next(queue)
    await queue.commit(completion(record, again, status="completed", events=(Event("completed"),)))
    assert not await append(queue, again.claim, 1, [b"after the end"])
    assert await queue.read_deltas("a", "s") == [b"late"]
    assert [event.step for event in await history(queue, "a") if event.type == "appended"] == [1]


async def recorded_deltas_are_not_replaced(queue: QueueBackend, clock: ManualClock) -> None:
    """A repeated delta is not recorded again; deltas beyond the recorded ones are.

    This holds across attempts: the next lease has the number of recorded deltas.
    """
    await submit(queue, "a")
    lease = await lease_next(queue)
    assert lease.recorded_deltas == 0
    for offset, pieces in ((0, b"ab"), (0, b"ab"), (1, b"bc"), (0, b"xyzd"), (2, b"!"), (4, b"")):
        assert await append(queue, lease.claim, offset, [bytes([byte]) for byte in pieces])
    assert b"".join(await queue.read_deltas("a", "s")) == b"abcd"
    await queue.hand_back(lease.claim)
    lease = await lease_next(queue)
    assert (lease.task.attempt, lease.recorded_deltas) == (2, 4)
    assert await append(queue, lease.claim, 2, [b"C", b"D", b"e"])
    assert b"".join(await queue.read_deltas("a", "s")) == b"abcde"
    counts = [event.step for event in await seen(queue, "a") if event.type == "appended"]
    assert counts == [5]


async def a_gap_between_deltas_is_refused(queue: QueueBackend, clock: ManualClock) -> None:
    """An offset beyond the recorded deltas is refused, together with the whole call."""
    for name in "ab":
        await submit(queue, name)
    first, second = await lease_next(queue), await lease_next(queue)
    await expect_error(ProtocolError, append(queue, first.claim, 1, [b"b"]))
    together = [OutputDeltas(first.claim, 0, (b"a",)), OutputDeltas(second.claim, 1, (b"b",))]
    await expect_error(ProtocolError, queue.append_deltas(together))
    await expect_error(ProtocolError, queue.append_deltas(together[::-1]))
    assert await queue.read_deltas("a", "s") == await queue.read_deltas("b", "s") == []
    assert await append(queue, first.claim, 0, [b"a"])
    await expect_error(ProtocolError, append(queue, first.claim, 2, [b"c"]))
    assert await queue.read_deltas("a", "s") == [b"a"]


async def deltas_are_bounded(queue: QueueBackend, clock: ManualClock) -> None:
    """Bytes of a delta, deltas of a call, and deltas of a stage are bounded.

    A call has each task once, and no negative offset.
    """
    await submit(queue, "a")
    claim = (await lease_next(queue)).claim
    await expect_error(ProtocolError, append(queue, claim, 0, [b"a", bytes(MAX_DELTA_BYTES + 1)]))
    await expect_error(ProtocolError, append(queue, claim, 0, [b"a"] * (MAX_DELTAS_PER_MESSAGE + 1)))
    await expect_error(ProtocolError, append(queue, claim, -1, [b"a"]))
    await expect_error(ProtocolError, append(queue, claim, MAX_DELTAS, [b"a"]))
    await expect_error(
        ProtocolError, queue.append_deltas([OutputDeltas(claim, 0, (b"a",)), OutputDeltas(claim, 1, (b"b",))])
    )
    assert await queue.read_deltas("a", "s") == []
    assert await append(queue, claim, 0, [bytes(MAX_DELTA_BYTES)] * MAX_DELTAS_PER_MESSAGE)
    assert await queue.append_deltas([]) == []


async def one_call_appends_to_several_tasks(queue: QueueBackend, clock: ManualClock) -> None:
    """One call records deltas of several tasks. A lost lease does not affect the others."""
    for name in "abcd":
        await submit(queue, name)
    leases = await queue.lease("w", lease_request("p", slots=4), TTL)
    await queue.hand_back(leases[1].claim)
    deltas = [OutputDeltas(lease.claim, 0, (lease.task.request.encode(), b"!")) for lease in leases[:3]]
    nobody = Claim("nobody", "s", 1, bytes(16))
    assert await queue.append_deltas([*deltas, OutputDeltas(nobody, 0, (b"n",))]) == [True, False, True, False]
    outputs = [b"".join(await queue.read_deltas(name, "s")) for name in "abcd"]
    assert outputs == [b"a!", b"", b"c!", b""]


async def new_deltas_publish_their_total(queue: QueueBackend, clock: ManualClock) -> None:
    """New deltas publish an event with their total number.

    A repeat publishes none. Neither changes the version or the running step.
    """
    await submit(queue, "a")
    lease = await lease_next(queue)
    stream = queue.watch("a", 2)
    coming = await start_task(next_event(stream))
    await append(queue, lease.claim, 0, [b"a", b"b"])
    event = await coming
    assert event is not None
    assert (event.type, event.stage, event.attempt, event.step) == ("appended", "s", 1, 2)
    assert (event.seq, event.at, event.message) == (3, clock.wall(), "")
    await append(queue, lease.claim, 0, [b"a", b"b"])
    await append(queue, lease.claim, 1, [b"b", b"c"])
    event = await next_event(stream)
    assert event is not None
    assert (event.seq, event.step) == (4, 3)
    record = await queue.load("a")
    assert (record.context.version, record.running[0].step) == (0, 0)


async def the_history_keeps_one_appended_event_a_stage(queue: QueueBackend, clock: ManualClock) -> None:
    """The history has only the last `appended` event of each stage, and all lifecycle events."""
    record = await queue.submit(request("a"), [task("a"), task("a", "t")], [Event("queued")], LIMITS)
    first, second = await lease_next(queue), await lease_next(queue)
    for number in range(600):
        await queue.append_deltas([OutputDeltas(lease.claim, number, (b"x",)) for lease in (first, second)])
    await append(queue, first.claim, 600, [b"x"])
    record = await queue.commit(completion(record, first, events=(Event("stage_completed", stage="s"),)))
    await queue.commit(completion(record, second, status="completed", events=(Event("completed"),)))
    events = await history(queue, "a")
    stored = [(event.type, event.stage, event.step) for event in events]
    assert stored[:3] == [("queued", "", 0), ("stage_started", "s", 0), ("stage_started", "t", 0)]
    assert stored[3:] == [
        ("appended", "t", 600),
        ("appended", "s", 601),
        ("stage_completed", "s", 0),
        ("completed", "", 0),
    ]
    assert (events[3].seq, events[-1].seq) == (3 + 1200, 3 + 1203)


async def deltas_are_dropped_with_their_request(queue: QueueBackend, clock: ManualClock) -> None:
    """Deltas are dropped with their request, and not with its task, output or end.

    A new request of the same id has none.
    """
    for name in "ab":
        record = await submit(queue, name)
        lease = await lease_next(queue)
        await append(queue, lease.claim, 0, [b"kept"])
        record = await queue.commit(completion(record, lease, push=(task(name, "t"),)))
        record = await queue.commit(change(record, push=(task(name, attempt=2),), close=((name, "t"),)))
        lease = await lease_next(queue)
        assert lease.recorded_deltas == 1
        assert await append(queue, lease.claim, 1, [b"more"])
        await queue.refuse(lease.claim)
        await queue.commit(change(record, status="cancelled", completed_at=5.0))
        assert await queue.read_deltas(name, "s") == [b"kept", b"more"]
    await queue.drop("a")
    assert await queue.drop_ended_before(6.0) == ["b"]
    for name in "ab":
        await expect_error(NotFound, queue.read_deltas(name, "s"))
        await submit(queue, name)
        assert (await lease_next(queue)).recorded_deltas == 0
        assert await queue.read_deltas(name, "s") == []


async def concurrent_appends_agree(queue: QueueBackend, clock: ManualClock) -> None:
    """Concurrent calls record each number once, and never replace recorded deltas."""
    await submit(queue, "a")
    claim = (await lease_next(queue)).claim
    assert await append(queue, claim, 0, [b"0 first", b"1 first", b"2 first"])
    calls = [(at, [b"%d of %d" % (number, at) for number in range(at, at + 4)]) for at in (3, 0, 1, 2, 3, 3, 0)]
    assert all(await asyncio.gather(*(append(queue, claim, at, pieces) for at, pieces in calls)))
    output = await queue.read_deltas("a", "s")
    assert [int(piece.split()[0]) for piece in output] == list(range(7))
    assert output[:3] == [b"0 first", b"1 first", b"2 first"]


async def seen(queue: QueueBackend, name: str) -> list[Event]:
    """Cancel a request. Returns all of its events."""
    await queue.commit(change(await queue.load(name), status="cancelled", events=(Event("cancelled"),)))
    return [*await history(queue, name)]


GROWTH_RULES = (
    deltas_are_read_from_any_offset,
    appending_requires_a_lease,
    recorded_deltas_are_not_replaced,
    a_gap_between_deltas_is_refused,
    deltas_are_bounded,
    one_call_appends_to_several_tasks,
    new_deltas_publish_their_total,
    the_history_keeps_one_appended_event_a_stage,
    deltas_are_dropped_with_their_request,
    concurrent_appends_agree,
)
