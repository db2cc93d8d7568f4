"""Pieces of what a stage makes, read while it grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from unfuse.core.errors import NotFound
from unfuse.core.event import Event
from unfuse.core.growth import PIECES_AT_ONCE
from unfuse.core.task import Lease
from unfuse.queues.memory import MemoryQueue
from unfuse.server.said import pieces
from unfuse.testing import ManualClock
from unfuse.testing.queue_samples import LIMITS, append, change, leased, raised, request, started, task


@pytest.fixture
async def queue() -> AsyncIterator[MemoryQueue]:
    queue = MemoryQueue(ManualClock())
    yield queue
    await queue.close()


async def running(queue: MemoryQueue) -> tuple[Lease, Lease]:
    """Two stages of one request, as of two choices."""
    await queue.submit(request("a"), [task("a"), task("a", "t")], [Event("queued")], LIMITS)
    return await leased(queue), await leased(queue)


async def end(queue: MemoryQueue) -> None:
    record = await queue.load("a")
    await queue.commit(change(record, status="completed", completed_at=1.0, events=(Event("completed"),)))


async def rest(stream: AsyncIterator[bytes]) -> list[bytes]:
    return [piece async for piece in stream]


async def test_they_come_as_they_are_recorded_to_whoever_reads_from_wherever(queue: MemoryQueue) -> None:
    """Given readers of before the first, of between, and of after the end, then each gets all from its number on, and
    none of another stage."""
    mine, other = await running(queue)
    early = pieces(queue, "a", "s")
    first = await started(anext(early))  # type: ignore[arg-type]
    await append(queue, other.claim, 0, [b"other"])
    assert not (await started(asyncio.wait({first}))).done()
    await append(queue, mine.claim, 0, [b"0", b"1"])
    assert (await first, await anext(early)) == (b"0", b"1")
    between = await started(rest(pieces(queue, "a", "s", 1)))
    ahead = await started(rest(pieces(queue, "a", "s", 3)))
    for number in range(2, 5):
        await append(queue, mine.claim, number, [b"%d" % number])
        assert await anext(early) == b"%d" % number
    await end(queue)
    assert (await rest(early), await between, await ahead) == ([], [b"1", b"2", b"3", b"4"], [b"3", b"4"])
    assert await rest(pieces(queue, "a", "s", 2)) == [b"2", b"3", b"4"]
    assert await rest(pieces(queue, "a", "t")) == [b"other"]
    assert await rest(pieces(queue, "a", "s", 9)) == await rest(pieces(queue, "a", "u")) == []
    await raised(NotFound, rest(pieces(queue, "nobody", "s")))


async def test_a_slow_reader_holds_nothing_up_and_has_nothing_kept_for_it(queue: MemoryQueue) -> None:
    """Given one that stops after a piece, then all goes on to the end, at which it gets the rest, in few calls."""
    mine, _ = await running(queue)
    await append(queue, mine.claim, 0, [b"0"])
    slow = pieces(queue, "a", "s")
    assert await anext(slow) == b"0"
    for number in range(1, 3000):
        await append(queue, mine.claim, number, [b"%d" % number])
    await end(queue)
    calls, read = list[int](), queue.appended

    async def counted(request: str, stage: str, after: int = 0, limit: int = PIECES_AT_ONCE) -> list[bytes]:
        calls.append(after)
        return await read(request, stage, after, limit)

    queue.appended = counted  # type: ignore[method-assign]
    assert await rest(slow) == [b"%d" % number for number in range(1, 3000)]
    assert len(calls) <= 3000 // PIECES_AT_ONCE + 3


async def test_what_is_recorded_is_read_also_when_its_event_is_gone(queue: MemoryQueue) -> None:
    """As after a restart, or in a long history: by who comes at once, by who is there at the end."""
    mine, _ = await running(queue)
    history, stream = queue.entry("a").history, pieces(queue, "a", "s")
    for number in range(2):
        await append(queue, mine.claim, number, [b"%d" % number])
        history._events = {seq: event for seq, event in history._events.items() if event.type != "appended"}
        if number == 0:
            assert await anext(stream) == b"0"
    await end(queue)
    assert await rest(stream) == [b"1"]
