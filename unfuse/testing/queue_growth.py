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
    append,
    change,
    done,
    following,
    history,
    leased,
    passing,
    raised,
    request,
    started,
    submitted,
    task,
    wanted,
)


async def what_grows_is_read_from_any_number(queue: QueueBackend, clock: ManualClock) -> None:
    """Output deltas are read unchanged, by stage, from any number, in pages.

    A stage without deltas has an empty list.
    """
    await queue.submit(request("a"), [task("a"), task("a", "t")], [], LIMITS)
    first, second = await leased(queue), await leased(queue)
    assert await append(queue, first.claim, 0, [b"\0\xff", b"", "é".encode()])
    assert await append(queue, second.claim, 0, [b"other"])
    assert await append(queue, first.claim, 3, [bytes(MAX_DELTA_BYTES)])
    assert await append(queue, first.claim, 4, [])
    whole = [b"\0\xff", b"", "é".encode(), bytes(MAX_DELTA_BYTES)]
    assert await queue.read_deltas("a", "s") == whole
    assert [await queue.read_deltas("a", "s", after) for after in range(6)] == [whole[after:] for after in range(6)]
    assert await queue.read_deltas("a", "s", 1, limit=2) == whole[1:3]
    assert (await queue.read_deltas("a", "t"), await queue.read_deltas("a", "u")) == ([b"other"], [])
    await raised(NotFound, queue.read_deltas("nobody", "s"))
    many = [b"%d" % number for number in range(4, 3000)]
    for at in range(0, len(many), MAX_DELTAS_PER_MESSAGE):
        assert await append(queue, first.claim, 4 + at, many[at : at + MAX_DELTAS_PER_MESSAGE])
    assert await queue.read_deltas("a", "s", 2900, limit=50) == many[2896:2946]
    assert len(await queue.read_deltas("a", "s")) == MAX_DELTAS_PER_MESSAGE


async def growing_needs_a_lease(queue: QueueBackend, clock: ManualClock) -> None:
    """Deltas are recorded only with the lease, even an expired one.

    A claim that differs in any field, or whose lease has ended, changes nothing.
    """
    record = await submitted(queue, "a")
    lease = await leased(queue)
    wrong = ({"token": bytes(16)}, {"token": b""}, {"attempt": 2}, {"stage": "t"}, {"request": "z"})
    for fields in wrong:
        assert not await append(queue, msgspec.structs.replace(lease.claim, **fields), 0, [b"forged"])
    assert await queue.read_deltas("a", "s") == await queue.read_deltas("a", "t") == []
    assert await passing(queue, clock, TTL) == [lease]
    assert await append(queue, lease.claim, 0, [b"late"])
    record = await queue.commit(change(record, lease.claim, push=(task("a", attempt=2),)))
    assert not await append(queue, lease.claim, 1, [b"too late"])
    assert not await append(queue, lease.claim, 99, [b"much too late"])
    again = await leased(queue)
    await queue.commit(done(record, again, status="completed", events=(Event("completed"),)))
    assert not await append(queue, again.claim, 1, [b"after the end"])
    assert await queue.read_deltas("a", "s") == [b"late"]
    assert [event.step for event in await history(queue, "a") if event.type == "appended"] == [1]


async def what_was_recorded_first_stays(queue: QueueBackend, clock: ManualClock) -> None:
    """A repeated delta is not recorded again; deltas beyond the recorded ones are.

    This holds across attempts: the next lease has the number of recorded deltas.
    """
    await submitted(queue, "a")
    lease = await leased(queue)
    assert lease.recorded_deltas == 0
    for offset, pieces in ((0, b"ab"), (0, b"ab"), (1, b"bc"), (0, b"xyzd"), (2, b"!"), (4, b"")):
        assert await append(queue, lease.claim, offset, [bytes([byte]) for byte in pieces])
    assert b"".join(await queue.read_deltas("a", "s")) == b"abcd"
    await queue.hand_back(lease.claim)
    lease = await leased(queue)
    assert (lease.task.attempt, lease.recorded_deltas) == (2, 4)
    assert await append(queue, lease.claim, 2, [b"C", b"D", b"e"])
    assert b"".join(await queue.read_deltas("a", "s")) == b"abcde"
    counts = [event.step for event in await seen(queue, "a") if event.type == "appended"]
    assert counts == [5]


async def a_gap_is_refused(queue: QueueBackend, clock: ManualClock) -> None:
    """An offset beyond the recorded deltas is refused, together with the whole call."""
    for name in "ab":
        await submitted(queue, name)
    first, second = await leased(queue), await leased(queue)
    await raised(ProtocolError, append(queue, first.claim, 1, [b"b"]))
    together = [OutputDeltas(first.claim, 0, (b"a",)), OutputDeltas(second.claim, 1, (b"b",))]
    await raised(ProtocolError, queue.append_deltas(together))
    await raised(ProtocolError, queue.append_deltas(together[::-1]))
    assert await queue.read_deltas("a", "s") == await queue.read_deltas("b", "s") == []
    assert await append(queue, first.claim, 0, [b"a"])
    await raised(ProtocolError, append(queue, first.claim, 2, [b"c"]))
    assert await queue.read_deltas("a", "s") == [b"a"]


async def growth_is_bounded(queue: QueueBackend, clock: ManualClock) -> None:
    """Bytes of a delta, deltas of a call, and deltas of a stage are bounded.

    A call has each task once, and no negative offset.
    """
    await submitted(queue, "a")
    claim = (await leased(queue)).claim
    await raised(ProtocolError, append(queue, claim, 0, [b"a", bytes(MAX_DELTA_BYTES + 1)]))
    await raised(ProtocolError, append(queue, claim, 0, [b"a"] * (MAX_DELTAS_PER_MESSAGE + 1)))
    await raised(ProtocolError, append(queue, claim, -1, [b"a"]))
    await raised(ProtocolError, append(queue, claim, MAX_DELTAS, [b"a"]))
    await raised(ProtocolError, queue.append_deltas([OutputDeltas(claim, 0, (b"a",)), OutputDeltas(claim, 1, (b"b",))]))
    assert await queue.read_deltas("a", "s") == []
    assert await append(queue, claim, 0, [bytes(MAX_DELTA_BYTES)] * MAX_DELTAS_PER_MESSAGE)
    assert await queue.append_deltas([]) == []


async def several_grow_in_one_call(queue: QueueBackend, clock: ManualClock) -> None:
    """One call records deltas of several tasks. A lost lease does not affect the others."""
    for name in "abcd":
        await submitted(queue, name)
    leases = await queue.lease("w", wanted("p", slots=4), TTL)
    await queue.hand_back(leases[1].claim)
    deltas = [OutputDeltas(lease.claim, 0, (lease.task.request.encode(), b"!")) for lease in leases[:3]]
    nobody = Claim("nobody", "s", 1, bytes(16))
    assert await queue.append_deltas([*deltas, OutputDeltas(nobody, 0, (b"n",))]) == [True, False, True, False]
    outputs = [b"".join(await queue.read_deltas(name, "s")) for name in "abcd"]
    assert outputs == [b"a!", b"", b"c!", b""]


async def who_watches_is_told_how_many_there_are(queue: QueueBackend, clock: ManualClock) -> None:
    """New deltas publish an event with their total number.

    A repeat publishes none. Neither changes the version or the running step.
    """
    await submitted(queue, "a")
    lease = await leased(queue)
    stream = queue.watch("a", 2)
    coming = await started(following(stream))
    await append(queue, lease.claim, 0, [b"a", b"b"])
    event = await coming
    assert event is not None
    assert (event.type, event.stage, event.attempt, event.step) == ("appended", "s", 1, 2)
    assert (event.seq, event.at, event.message) == (3, clock.wall(), "")
    await append(queue, lease.claim, 0, [b"a", b"b"])
    await append(queue, lease.claim, 1, [b"b", b"c"])
    event = await following(stream)
    assert event is not None
    assert (event.seq, event.step) == (4, 3)
    record = await queue.load("a")
    assert (record.context.version, record.running[0].step) == (0, 0)


async def of_a_stage_only_the_last_count_is_kept(queue: QueueBackend, clock: ManualClock) -> None:
    """The history has only the last `appended` event of each stage, and all lifecycle events."""
    record = await queue.submit(request("a"), [task("a"), task("a", "t")], [Event("queued")], LIMITS)
    first, second = await leased(queue), await leased(queue)
    for number in range(600):
        await queue.append_deltas([OutputDeltas(lease.claim, number, (b"x",)) for lease in (first, second)])
    await append(queue, first.claim, 600, [b"x"])
    record = await queue.commit(done(record, first, events=(Event("stage_completed", stage="s"),)))
    await queue.commit(done(record, second, status="completed", events=(Event("completed"),)))
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


async def what_has_grown_goes_with_its_request(queue: QueueBackend, clock: ManualClock) -> None:
    """Deltas are dropped with their request, and not with its task, output or end.

    A new request of the same id has none.
    """
    for name in "ab":
        record = await submitted(queue, name)
        lease = await leased(queue)
        await append(queue, lease.claim, 0, [b"kept"])
        record = await queue.commit(done(record, lease, push=(task(name, "t"),)))
        record = await queue.commit(change(record, push=(task(name, attempt=2),), close=((name, "t"),)))
        lease = await leased(queue)
        assert lease.recorded_deltas == 1
        assert await append(queue, lease.claim, 1, [b"more"])
        await queue.refuse(lease.claim)
        await queue.commit(change(record, status="cancelled", completed_at=5.0))
        assert await queue.read_deltas(name, "s") == [b"kept", b"more"]
    await queue.drop("a")
    assert await queue.drop_ended_before(6.0) == ["b"]
    for name in "ab":
        await raised(NotFound, queue.read_deltas(name, "s"))
        await submitted(queue, name)
        assert (await leased(queue)).recorded_deltas == 0
        assert await queue.read_deltas(name, "s") == []


async def who_grows_it_at_once_agrees(queue: QueueBackend, clock: ManualClock) -> None:
    """Concurrent calls record each number once, and never replace recorded deltas."""
    await submitted(queue, "a")
    claim = (await leased(queue)).claim
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
    what_grows_is_read_from_any_number,
    growing_needs_a_lease,
    what_was_recorded_first_stays,
    a_gap_is_refused,
    growth_is_bounded,
    several_grow_in_one_call,
    who_watches_is_told_how_many_there_are,
    of_a_stage_only_the_last_count_is_kept,
    what_has_grown_goes_with_its_request,
    who_grows_it_at_once_agrees,
)
