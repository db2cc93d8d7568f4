"""A transfer engine has a compute process move bytes: every call ends, with its answer or with the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from unfuse.worker.compute import PairServer
from unfuse.worker.compute_messages import PairCall, PairDone
from unfuse.worker.executor import ComputePairs


class Process:
    """A compute process that answers when it is told to."""

    def __init__(self) -> None:
        self.runs, self.asked = True, asyncio.Queue[PairCall]()
        self.pairs = ComputePairs(self.send)

    async def send(self, message: PairCall) -> bool:
        await self.asked.put(message)
        return self.runs


@pytest.fixture
async def process() -> AsyncIterator[Process]:
    yield Process()


async def test_call_returns_its_own_reply(process: Process) -> None:
    offering = asyncio.create_task(asyncio.to_thread(process.pairs.offer, "a", "gloo", "127.0.0.1", 1.0))
    joining = asyncio.create_task(asyncio.to_thread(process.pairs.join, "b", "gloo", "127.0.0.1", 1.0, ("h", 7)))
    assert {(await process.asked.get()).method for _ in range(2)} == {"offer", "join"}
    process.pairs.finish_call(PairDone("b", error="nobody is there"))
    process.pairs.finish_call(PairDone("a", 4711))
    assert await offering == 4711
    with pytest.raises(ConnectionError, match="nobody is there"):
        await joining


async def test_pending_call_raises_connection_error_when_the_process_ends(process: Process) -> None:
    """Not before: until then it may write to the arena."""
    moving = asyncio.create_task(asyncio.to_thread(process.pairs.move, "a", 0, 10))
    assert await process.asked.get() == PairCall("move", "a", (0, 10))
    process.pairs.part("a")
    assert await process.asked.get() == PairCall("part", "a")
    assert not moving.done()
    process.pairs.fail_all()
    with pytest.raises(ConnectionError, match="ended"):
        await moving


async def test_call_without_a_compute_process_raises_connection_error(process: Process) -> None:
    process.runs = False
    with pytest.raises(ConnectionError, match="no compute process"):
        await asyncio.to_thread(process.pairs.move, "a", 0, 10)


def test_parting_a_pair_after_the_event_loop_ended_is_ignored() -> None:
    """Connections may live longer than the worker."""

    async def made() -> ComputePairs:
        return Process().pairs

    asyncio.run(made()).part("a")


async def test_error_in_the_compute_process_is_returned_to_the_caller(process: Process) -> None:
    """Given a library that cannot be imported there, when it is asked to move, then it says so, and lives on."""
    told, loop = asyncio.Queue[object](), asyncio.get_running_loop()

    def missing() -> ComputePairs:
        raise ImportError("no torch")

    server = PairServer(missing, lambda message: loop.call_soon_threadsafe(told.put_nowait, message))
    for _ in range(2):
        server.serve(PairCall("move", "a", (0, 10)))
        assert await told.get() == PairDone("a", error="ImportError: no torch")
