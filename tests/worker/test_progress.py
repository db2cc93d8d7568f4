"""What outputs have grown by, from compute to the scheduler, and back to the next attempt."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest

from unfuse.core.messages import (
    Accepted,
    AppendOutput,
    HeartbeatReply,
    ReadOutput,
    RecordedOutput,
    Rejected,
    ToScheduler,
    ToWorker,
)
from unfuse.core.supervisor import Supervisor
from unfuse.core.task import MAX_DELTA_BYTES, MAX_DELTAS_PER_MESSAGE, Claim, Lease, OutputDeltas
from unfuse.testing.queue_samples import task_of
from unfuse.testing.virtual_time import in_virtual_time
from unfuse.worker.compute_messages import CancelTask, ComputeChannel, ParentChannel, RunTask
from unfuse.worker.link import APPEND_S, OutputRecorder


def claim(name: str) -> Claim:
    return Claim(name, "s", 1, b"token")


def lease(appended: int) -> Lease:
    return Lease(task_of("a", "s", 1, "p", "k", "m", {}), "w", b"token", 0.0, recorded_deltas=appended)


class Scheduler:
    """Keeps what it is told, unless it says otherwise, and takes a while over it."""

    def __init__(self) -> None:
        self.kept: dict[str, list[bytes]] = {}
        self.said: list[ToScheduler] = []
        self.refusals: list[ToWorker] = []
        self.lost: list[Claim] = []
        self.ended: list[Claim] = []

    async def call(self, message: AppendOutput | ReadOutput) -> ToWorker:
        self.said.append(message)
        await asyncio.sleep(0.01)
        if self.refusals:
            return self.refusals.pop(0)
        if isinstance(message, ReadOutput):
            return RecordedOutput(tuple(self.kept[message.claim.request][message.after :][:3]))
        for one in message.deltas:
            if one.claim not in self.lost:
                kept = self.kept.setdefault(one.claim.request, [])
                assert one.offset == len(kept)
                kept += one.deltas
        return HeartbeatReply(tuple(one.claim for one in message.deltas if one.claim in self.lost), ())

    async def end(self, claim: Claim) -> None:
        self.ended.append(claim)


def growing() -> tuple[OutputRecorder, Scheduler]:
    scheduler = Scheduler()
    return OutputRecorder(scheduler, Supervisor(), scheduler.end), scheduler  # type: ignore[arg-type]


def grow(growing: OutputRecorder, name: str, offset: int, pieces: Sequence[bytes]) -> None:
    growing.add(OutputDeltas(claim(name), offset, tuple(pieces)))


@in_virtual_time
async def test_output_deltas_of_several_tasks_share_messages() -> None:
    made, scheduler = growing()
    for step in range(100):
        for name in "abc":
            grow(made, name, step, [b"%d" % step])
        await asyncio.sleep(0.005)
    for name in "abc":
        await made.wait_until_recorded(claim(name))
    assert scheduler.kept == {name: [b"%d" % step for step in range(100)] for name in "abc"}
    assert 0.5 / (APPEND_S + 0.01) - 1 <= len(scheduler.said) <= 0.5 / APPEND_S + 2
    first = scheduler.said[0]
    assert isinstance(first, AppendOutput) and len(first.deltas) == 3 and len(first.deltas[0].deltas) <= 3


@in_virtual_time
async def test_ending_task_flushes_its_output_deltas_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.worker.link.APPEND_S", 3600.0)
    made, scheduler = growing()
    began = asyncio.get_running_loop().time()
    await made.wait_until_recorded(claim("a"))
    for step in range(3):
        grow(made, "a", step, [b"x"])
        await asyncio.sleep(0.1)
    assert scheduler.kept == {"a": [b"x"]}
    await made.wait_until_recorded(claim("a"))
    assert scheduler.kept == {"a": [b"x"] * 3}
    assert asyncio.get_running_loop().time() - began < 1.0


@in_virtual_time
async def test_long_output_is_split_and_does_not_block_other_tasks() -> None:
    made, scheduler = growing()
    grow(made, "long", 0, [b"%d" % number for number in range(4 * MAX_DELTAS_PER_MESSAGE)])
    grow(made, "short", 0, [b"a", b"b"])
    await made.wait_until_recorded(claim("short"))
    assert 0 < len(scheduler.kept["long"]) < 3 * MAX_DELTAS_PER_MESSAGE
    await made.wait_until_recorded(claim("long"))
    assert scheduler.kept["long"] == [b"%d" % number for number in range(4 * MAX_DELTAS_PER_MESSAGE)]
    sizes = [sum(len(one.deltas) for one in said.deltas) for said in scheduler.said if isinstance(said, AppendOutput)]
    assert max(sizes) == MAX_DELTAS_PER_MESSAGE


@in_virtual_time
async def test_rejected_output_deltas_are_resent_with_newer_ones() -> None:
    made, scheduler = growing()
    scheduler.refusals = [Rejected("the disk is full"), Rejected("it still is"), Accepted()]
    grow(made, "a", 0, [b"0"])
    settled = asyncio.create_task(made.wait_until_recorded(claim("a")))
    await asyncio.sleep(0.5)
    grow(made, "a", 1, [b"1"])
    await settled
    assert scheduler.kept == {"a": [b"0", b"1"]}
    assert len(scheduler.said) == 4


@in_virtual_time
async def test_lost_lease_ends_only_its_own_task() -> None:
    made, scheduler = growing()
    scheduler.lost = [claim("a")]
    for name, messages in (("a", 3), ("b", 1)):
        grow(made, name, 0, [b"0"] * MAX_DELTAS_PER_MESSAGE * messages)
    await made.wait_until_recorded(claim("a"))
    await made.wait_until_recorded(claim("b"))
    assert (scheduler.ended, scheduler.kept) == ([claim("a")], {"b": [b"0"] * MAX_DELTAS_PER_MESSAGE})
    assert len(scheduler.said) == 2
    grow(made, "a", MAX_DELTAS_PER_MESSAGE, [b"1"])  # said before compute heard of it
    await made.wait_until_recorded(claim("a"))
    assert scheduler.kept.keys() == {"b"}


@in_virtual_time
async def test_next_attempt_reads_the_recorded_output() -> None:
    made, scheduler = growing()
    assert await made.read(lease(0)) == ()
    assert scheduler.said == []
    scheduler.kept["a"] = [b"%d" % number for number in range(8)]
    scheduler.refusals = [Rejected("not now")]
    assert await made.read(lease(8)) == tuple(scheduler.kept["a"])
    assert scheduler.said[1:] == [ReadOutput(claim("a"), after) for after in (0, 3, 6)]
    scheduler.refusals = [Rejected("it is not yours", lease_lost=True)]
    assert await made.read(lease(8)) is None
    assert await made.read(lease(9)) is None  # the queue has lost some


async def test_recorded_output_larger_than_a_message_reaches_compute() -> None:
    """Each task with its own, whatever comes between."""
    here, there = socket.socketpair()
    parent, compute = await ParentChannel.open(here), ComputeChannel(there)
    many = tuple(b"%d" % number + bytes(MAX_DELTA_BYTES - 9) for number in range(3 * MAX_DELTAS_PER_MESSAGE + 1))
    sent = [
        RunTask(lease(0), {}, many),
        CancelTask(claim("b")),
        RunTask(lease(0), {}),
        RunTask(lease(0), {}, (b"one",)),
    ]
    for message in sent:
        await parent.send(message)
    assert [await asyncio.to_thread(compute.receive) for _ in sent] == sent
    parent.close()
    there.close()
