"""The output stream of a request, read while it grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import TypeVar

import pytest

from unfuse.core.errors import NotFound, TransientError
from unfuse.core.request import Event
from unfuse.core.task import MAX_DELTAS_PER_MESSAGE, Lease
from unfuse.edge.access import ResponseAborted
from unfuse.queues.memory import MemoryQueue
from unfuse.server import chat
from unfuse.server.chat_stream import output_stream
from unfuse.testing import ManualClock
from unfuse.testing.queue_samples import LIMITS, append, change, expect_error, lease_next, request, start_task, task

T = TypeVar("T")


@pytest.fixture
async def queue() -> AsyncIterator[MemoryQueue]:
    queue = MemoryQueue(ManualClock())
    yield queue
    await queue.close()


async def running(queue: MemoryQueue) -> tuple[Lease, Lease]:
    """Two stages of one request, as of two choices."""
    await queue.submit(request("a"), [task("a"), task("a", "t")], [Event("queued")], LIMITS)
    return await lease_next(queue), await lease_next(queue)


async def end(queue: MemoryQueue) -> None:
    record = await queue.load("a")
    await queue.commit(change(record, status="completed", completed_at=1.0, events=(Event("completed"),)))


async def chunks(queue: MemoryQueue, request: str, stage: str, after: int = 0) -> AsyncIterator[bytes]:
    """The chunks of one stage."""
    async for name, chunk in output_stream(queue, request, {stage: after}):
        assert name == stage
        yield chunk


async def rest(stream: AsyncIterator[T]) -> list[T]:
    return [chunk async for chunk in stream]


async def test_output_deltas_are_streamed_in_order_from_any_offset(queue: MemoryQueue) -> None:
    """Given readers of before the first, of between, and of after the end, then each gets all from its number on, and
    none of another stage."""
    mine, other = await running(queue)
    early = chunks(queue, "a", "s")
    first = await start_task(anext(early))  # type: ignore[arg-type]
    await append(queue, other.claim, 0, [b"other"])
    assert not (await start_task(asyncio.wait({first}))).done()
    await append(queue, mine.claim, 0, [b"0", b"1"])
    assert (await first, await anext(early)) == (b"0", b"1")
    between = await start_task(rest(chunks(queue, "a", "s", 1)))
    ahead = await start_task(rest(chunks(queue, "a", "s", 3)))
    for number in range(2, 5):
        await append(queue, mine.claim, number, [b"%d" % number])
        assert await anext(early) == b"%d" % number
    await end(queue)
    assert (await rest(early), await between, await ahead) == ([], [b"1", b"2", b"3", b"4"], [b"3", b"4"])
    assert await rest(chunks(queue, "a", "s", 2)) == [b"2", b"3", b"4"]
    assert await rest(chunks(queue, "a", "t")) == [b"other"]
    assert await rest(chunks(queue, "a", "s", 9)) == await rest(chunks(queue, "a", "u")) == []
    await expect_error(NotFound, rest(chunks(queue, "nobody", "s")))


async def test_one_stream_merges_deltas_of_stages_each_from_its_offset(queue: MemoryQueue) -> None:
    """In one watch of the request: what each stage adds comes when it is recorded."""
    mine, other = await running(queue)
    await append(queue, other.claim, 0, [b"t0", b"t1"])
    stream = output_stream(queue, "a", {"s": 0, "t": 1})
    assert await anext(stream) == ("t", b"t1")
    for number, lease in enumerate((mine, other, mine, mine)):
        stage = lease.task.stage
        offset = len(await queue.read_deltas("a", stage))
        await append(queue, lease.claim, offset, [b"%d" % number])
        assert await anext(stream) == (stage, b"%d" % number)
    await append(queue, other.claim, 3, [b"t3"])
    await end(queue)
    assert await rest(stream) == [("t", b"t3")]


async def test_chat_stream_is_aborted_if_the_queue_cannot_be_read(queue: MemoryQueue) -> None:
    """So that its client notices, and continues with the id of the last event; no traceback is logged."""
    await running(queue)

    async def away(*_: object) -> list[bytes]:
        raise TransientError("the queue does not answer")

    queue.read_deltas = away  # type: ignore[method-assign]
    plan = SimpleNamespace(stages=[SimpleNamespace(name="s", final=True)])
    gateway, context = SimpleNamespace(queue=queue), SimpleNamespace(id="a", plan=plan)
    await expect_error(ResponseAborted, rest(chat._token_deltas(gateway, context, [0])))  # type: ignore[arg-type]


async def test_slow_reader_blocks_nothing_and_reads_the_rest_in_few_calls(queue: MemoryQueue) -> None:
    """Given one that stops after a chunk, then all goes on to the end, at which it gets the rest, in few calls."""
    mine, _ = await running(queue)
    await append(queue, mine.claim, 0, [b"0"])
    slow = chunks(queue, "a", "s")
    assert await anext(slow) == b"0"
    for number in range(1, 3000):
        await append(queue, mine.claim, number, [b"%d" % number])
    await end(queue)
    calls, read = list[int](), queue.read_deltas

    async def counted(request: str, stage: str, after: int = 0, limit: int = MAX_DELTAS_PER_MESSAGE) -> list[bytes]:
        calls.append(after)
        return await read(request, stage, after, limit)

    queue.read_deltas = counted  # type: ignore[method-assign]
    assert await rest(slow) == [b"%d" % number for number in range(1, 3000)]
    assert len(calls) <= 3000 // MAX_DELTAS_PER_MESSAGE + 3


async def test_deltas_are_read_even_if_their_events_are_lost(queue: MemoryQueue) -> None:
    """As after a restart, or in a long history: by who comes at once, by who is there at the end."""
    mine, _ = await running(queue)
    history, stream = queue._entry("a").history, chunks(queue, "a", "s")
    for number in range(2):
        await append(queue, mine.claim, number, [b"%d" % number])
        history._events = {seq: event for seq, event in history._events.items() if event.type != "appended"}
        if number == 0:
            assert await anext(stream) == b"0"
    await end(queue)
    assert await rest(stream) == [b"1"]
