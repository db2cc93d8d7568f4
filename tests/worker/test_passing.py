"""What passes into the compute process in pieces, and what becomes of that when the process is gone."""

from __future__ import annotations

import asyncio
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.worker.refs import ref
from unfuse.arena.arena import Arena
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import TransientError
from unfuse.core.object_ref import CHUNK_BYTES
from unfuse.core.task import Lease
from unfuse.testing.queue_samples import task_of
from unfuse.transfer.session import RingBuffer
from unfuse.worker.compute_messages import CancelTask, InputArrived, InputTaken
from unfuse.worker.remote_inputs import InputStreams

KV = replace(ref(8 * CHUNK_BYTES), stage="prefill")
TASK = task_of(
    "req_a", "decode.0", 1, "decode:abc:float32@12", "decode", "m", {}, (KV,), derived=DerivedFacts(prompt_tokens=100)
)
WANTED: Any = SimpleNamespace(cancelled=False)  # the session of a transfer that goes on
ARRIVED = InputArrived(Lease(TASK, "w", b"t", 0.0), KV, 0, 0, 10)


class Process:
    def __init__(self, there: bool = True) -> None:
        self.there, self.sent = there, list[InputArrived | CancelTask]()

    async def send(self, message: InputArrived | CancelTask) -> bool:
        self.sent.append(message)
        return self.there


async def test_inputs_of_long_prompts_are_streamed_through_a_window() -> None:
    """Given a buffer of fifty tokens, then each input of a prompt of a hundred has a window of a half of its bytes, or
    a chunk if that is more, or all of what is less; a shorter prompt, what has none, and a buffer of any length have no
    window."""
    passing = InputStreams(50, Process().send)
    assert passing.window(TASK, KV) == 4 * CHUNK_BYTES
    assert passing.window(replace(TASK, derived=DerivedFacts(prompt_tokens=5000)), KV) == CHUNK_BYTES
    assert passing.window(replace(TASK, derived=DerivedFacts(prompt_tokens=50)), KV) == 0
    assert passing.window(TASK, replace(ref(1000), stage="vision_encode.0")) == 1000
    assert passing.window(replace(TASK, derived=DerivedFacts()), KV) == 0
    endless = InputStreams(0, Process().send)
    assert endless.window(TASK, KV) == 0
    for one in (passing, endless):
        one.close()


async def test_piece_that_compute_cannot_accept_raises_transient_error() -> None:
    """Given a process that is not there, one that cannot take it, and one that dies, then each is an error that passes;
    what is dropped is told to the process."""
    gone, process = InputStreams(50, Process(there=False).send), Process()
    with pytest.raises(TransientError, match="no compute process is running"):
        await gone._pass(ARRIVED, WANTED)
    passing = InputStreams(50, process.send)
    answers = (
        ("no room", lambda: passing.record_answer(InputTaken(ARRIVED.lease.claim, KV.id, "no room"))),
        ("ended", passing.fail_all),
    )
    for says, happens in answers:
        passing._loop.call_later(0.01, happens)
        with pytest.raises(TransientError, match=says):
            await passing._pass(ARRIVED, WANTED)
    assert not passing.is_received(ARRIVED.lease.claim)
    passing._loop.call_later(0.01, passing.record_answer, InputTaken(ARRIVED.lease.claim, KV.id))
    passing._loop.call_later(0.005, passing.record_answer, InputTaken(ARRIVED.lease.claim, "another", "of no matter"))
    await passing._pass(ARRIVED, WANTED)
    await passing.drop(ARRIVED.lease.claim)
    assert process.sent == [ARRIVED] * 3 + [CancelTask(ARRIVED.lease.claim)]
    for one in (gone, passing):
        one.close()


async def test_piece_is_complete_when_all_processes_have_replied() -> None:
    """Also where one of them cannot take it, since the others may still read it; and where they are gone."""
    process = Process()
    passing, taken = InputStreams(50, process.send, 3), InputTaken(ARRIVED.lease.claim, KV.id)
    for error in ("", "no memory"):
        piece = asyncio.create_task(passing._pass(ARRIVED, WANTED))
        for answer in (replace(taken, error=error), taken):
            await asyncio.sleep(0)
            passing.record_answer(answer)
            await asyncio.sleep(0)
            assert not piece.done()
        passing.record_answer(taken)
        if error:
            with pytest.raises(TransientError, match=error):
                await piece
        else:
            await piece
    piece = asyncio.create_task(passing._pass(ARRIVED, WANTED))
    await asyncio.sleep(0)
    passing.record_answer(taken)
    passing.fail_all()
    with pytest.raises(TransientError, match="ended"):
        await piece
    passing.close()


async def test_pieces_received_by_a_dead_process_are_not_reused() -> None:
    """Given a task of whose input a piece was taken when the process died, then the next process gets no later piece of
    it, and the task does not begin; its next attempt, and others, do."""
    process = Process()
    passing, claim = InputStreams(50, process.send), ARRIVED.lease.claim
    other = replace(ARRIVED, lease=replace(ARRIVED.lease, token=b"another"))
    for arrived in (ARRIVED, other):
        piece = asyncio.create_task(passing._pass(arrived, WANTED))
        await asyncio.sleep(0)
        passing.record_answer(InputTaken(arrived.lease.claim, KV.id))
        await piece
    assert passing.is_received(other.lease.claim)
    passing.fail_all()
    with pytest.raises(TransientError, match="the compute process ended"):
        await passing._pass(replace(ARRIVED, start=10, stop=20), WANTED)
    assert process.sent == [ARRIVED, other]
    assert passing.is_received(other.lease.claim) and not passing.is_received(claim)
    assert passing.is_received(claim)
    passing.close()


class Slow:
    """A store, and a transfer into it that brings nothing, and ends only when it may."""

    def __init__(self) -> None:
        self.arena, self.may_end, self.cancelled = Arena(1 << 26), Event(), False
        self.reserve = self.arena.create

    def fetch(self, ref: object, window: RingBuffer) -> Slow:
        self.window = window
        return self

    def cancel(self) -> None:
        self.cancelled = True

    def wait(self) -> None:
        self.may_end.wait()

    def end(self) -> None:
        self.window.fail(TransientError("it was cancelled"))
        self.may_end.set()


async def test_stream_window_is_freed_if_the_task_is_cancelled_twice() -> None:
    """Given an input on its way, when its task is cancelled, and again while the transfer still ends, then its room is
    free when that has ended, and nothing more is passed on."""
    slow, process = Slow(), Process()
    passing, store = InputStreams(50, process.send), cast(Any, slow)
    task = asyncio.create_task(passing.ranks(ARRIVED.lease, KV, store, store, 1.0))
    try:
        while not passing.extents:
            await asyncio.sleep(0)
        (window,) = passing.extents
        for _ in range(2):
            task.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
        assert task.cancelled() and slow.cancelled
        assert slow.arena.unfinished() == [window], "the transfer may still write there"
        with pytest.raises(TransientError, match="no longer needed"):
            await passing._pass(ARRIVED, store)
    finally:
        slow.end()
    async with asyncio.timeout(60):
        while slow.arena.unfinished() or passing.extents:
            await asyncio.sleep(0)
    assert process.sent == []
    passing.close()
    slow.arena.close()
