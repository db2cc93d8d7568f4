"""How calls reach Redis: together, and as one message for all that they changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tests.queues.conftest import Server
from unfuse import queues
from unfuse.core.request import Event
from unfuse.queues.base import QueueBackend
from unfuse.queues.connection import SWEEP_S, Call, PipelinedCalls
from unfuse.queues.remote_waiters import MAX_BATCH, NamedTasks
from unfuse.testing.queue_samples import TTL, change, lease_request, next_event, start_task, submit


class Slow:
    """What executes calls when it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.ends: list[asyncio.Future[None]] = []

    async def execute(self, calls: Sequence[Call]) -> list[Any]:
        self.batches.append([verb for verb, _ in calls])
        self.ends.append(asyncio.get_running_loop().create_future())
        await self.ends[-1]
        return [verb for verb, _ in calls]


async def asked(calls: PipelinedCalls, *verbs: str) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(calls.call(verb, b"")) for verb in verbs]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


class TestCalls:
    async def test_concurrent_calls_are_sent_in_one_batch(self) -> None:
        slow = Slow()
        tasks = await asked(PipelinedCalls(slow.execute, NamedTasks()), "a", "b", "c")
        assert slow.batches == [["a", "b", "c"]]
        slow.ends[0].set_result(None)
        assert await asyncio.gather(*tasks) == ["a", "b", "c"]

    async def test_calls_during_a_running_batch_form_the_next_batch(self) -> None:
        slow = Slow()
        calls = PipelinedCalls(slow.execute, NamedTasks())
        first = await asked(calls, "a")
        others = [*await asked(calls, "b"), *await asked(calls, "c")]
        assert slow.batches == [["a"]]
        slow.ends[0].set_result(None)
        await asyncio.gather(*first)
        await asked(calls)
        assert slow.batches == [["a"], ["b", "c"]]
        slow.ends[1].set_result(None)
        assert await asyncio.gather(*others) == ["b", "c"]

    async def test_follow_up_calls_of_a_batch_form_the_next_batch(self) -> None:
        """Also with what waited already."""
        slow = Slow()
        calls = PipelinedCalls(slow.execute, NamedTasks())

        async def caller(*verbs: str) -> None:
            for verb in verbs:
                await calls.call(verb, b"")

        callers = [asyncio.create_task(caller("a", "b")) for _ in range(3)]
        await asked(calls)
        waits = await asked(calls, "c")
        slow.ends[0].set_result(None)
        await asked(calls)
        assert slow.batches == [["a"] * 3, ["c", *["b"] * 3]]
        slow.ends[1].set_result(None)
        await asyncio.gather(*callers, *waits)

    async def test_batch_has_at_most_max_batch_calls(self) -> None:
        slow = Slow()
        tasks = await asked(PipelinedCalls(slow.execute, NamedTasks()), *["a"] * (MAX_BATCH + 1))
        assert [len(batch) for batch in slow.batches] == [MAX_BATCH]
        for _ in range(2):
            slow.ends[-1].set_result(None)
            await asyncio.sleep(0.01)
        assert len(await asyncio.gather(*tasks)) == MAX_BATCH + 1

    async def test_batch_error_is_raised_to_every_caller_and_next_batch_runs(self) -> None:
        async def broken(calls: Sequence[Call]) -> list[Any]:
            raise ConnectionError("gone")

        calls = PipelinedCalls(broken, NamedTasks())
        for _ in range(2):
            for task in await asked(calls, "a", "b"):
                with pytest.raises(ConnectionError, match="gone"):
                    await task

    async def test_cancelled_call_does_not_affect_the_rest_of_the_batch(self) -> None:
        slow = Slow()
        one, other = await asked(PipelinedCalls(slow.execute, NamedTasks()), "a", "b")
        one.cancel()
        slow.ends[0].set_result(None)
        assert await other == "b"
        assert one.cancelled()


class TestMessages:
    @pytest.fixture
    async def queue(self, server: Server) -> AsyncIterator[QueueBackend]:
        queue = queues.open(server.url)
        yield queue
        await queue.close()

    async def test_changes_of_one_batch_are_published_as_one_message(self, queue: QueueBackend, server: Server) -> None:
        waiting = await start_task(queue.lease("w", lease_request("elsewhere"), TTL, wait=30.0))
        while server.client.pubsub_numsub("{unfuse}:news") != [(b"{unfuse}:news", 1)]:
            await asyncio.sleep(0.01)
        before = published(server)
        await asyncio.gather(*(submit(queue, name) for name in "abcdefgh"))
        assert published(server) - before == 1
        waiting.cancel()

    async def test_one_message_notifies_the_watchers_of_all_its_changes(
        self, queue: QueueBackend, server: Server
    ) -> None:
        records = [await submit(queue, name) for name in "abc"]
        watching = [asyncio.create_task(next_event(queue.watch(name, after=1))) for name in "abc"]
        while server.client.pubsub_numsub("{unfuse}:news") != [(b"{unfuse}:news", 1)]:
            await asyncio.sleep(0.01)
        await asyncio.gather(*(queue.commit(change(record, events=(Event("retrying"),))) for record in records))
        events = await asyncio.wait_for(asyncio.gather(*watching), SWEEP_S / 2)
        assert [event.type for event in events if event] == ["retrying"] * 3


def published(server: Server) -> int:
    counted = server.client.info("commandstats")
    return int(counted.get("cmdstat_publish", {"calls": 0})["calls"])
