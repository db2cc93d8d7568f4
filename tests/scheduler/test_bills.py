"""What requests cost: every second that a device was used is on a bill, or lost, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from hypothesis import given, settings

from tests.examples import examples
from tests.scheduler.fleet import Act, Fleet, lengths, seeds
from tests.scheduler.model import Racing
from unfuse.core.codec import decode, encode
from unfuse.core.errors import ProtocolError
from unfuse.core.messages import ReportProgress, StepProgress, TaskCompleted, TaskFailed, TaskStopped, ToScheduler
from unfuse.core.request import RequestContext, Timings, billed_seconds, lost_seconds
from unfuse.core.task import Claim, Lease
from unfuse.queues.memory import MemoryQueue
from unfuse.testing.clock import ManualClock


@given(seeds, lengths)
@settings(max_examples=examples(60), deadline=None)
def test_billed_and_lost_seconds_equal_worker_usage(seed: int, length: int) -> None:
    async def run() -> None:
        async with fleet() as workers:
            await workers.live(seed, length)

    asyncio.run(run())


@asynccontextmanager
async def fleet(queue: type[MemoryQueue] = MemoryQueue) -> AsyncIterator[Fleet]:
    clock = ManualClock()
    shared = queue(clock)
    fleet = Fleet([shared, shared], clock)
    yield fleet
    await fleet.close()


async def one(fleet: Fleet, worker: str = "worker-0") -> Lease:
    """A new lease of the only request."""
    if not fleet.requests:
        await fleet.act("submit", 0, 1)
    (lease,) = await fleet.ask(worker, 1)
    return lease


async def bill(fleet: Fleet) -> tuple[dict[str, float], dict[str, float], RequestContext]:
    record = await fleet.schedulers[0].queue.load(fleet.requests[0])
    return (
        billed_seconds(record.context, record.running, fleet.clock.wall()),
        lost_seconds(record.context),
        record.context,
    )


END: dict[str, Callable[[Fleet], Awaitable[object]]] = {
    "cancelled": lambda fleet: fleet.schedulers[1].cancel(fleet.requests[0]),
    "expired": lambda fleet: fleet.schedulers[1].maintenance.expire_deadline(fleet.requests[0]),
    "left": lambda fleet: fleet.schedulers[1].client_disconnected(fleet.requests[0]),
}


@pytest.mark.parametrize("end", END)
async def test_request_ended_by_its_client_is_billed_for_its_usage(end: str) -> None:
    async with fleet() as workers:
        lease = await one(workers)
        await workers.compute(lease, 4.0, tell=True)
        assert (await bill(workers))[0] == {"cpu": 4.0}, "it grows while it runs"

        await workers.compute(lease, 1.0, tell=False)
        await END[end](workers)
        assert (await bill(workers))[0] == {"cpu": 4.0}, "its worker has not said more yet"

        await workers.end("notice", lease)
        billed, lost, context = await bill(workers)
        assert (billed, lost) == ({"cpu": 5.0}, {})
        assert context.stages["text_encode"].steps == 3
        await workers.check()


async def test_reported_usage_stays_billed_if_the_worker_dies_after_a_cancel() -> None:
    async with fleet() as workers:
        lease = await one(workers)
        await workers.compute(lease, 4.0, tell=True)
        await workers.compute(lease, 2.0, tell=False)
        await END["cancelled"](workers)
        await workers.kill(lease.worker)
        assert (await bill(workers))[:2] == ({"cpu": 4.0}, {})


@pytest.mark.parametrize("end", ["fail", "crash", "hand back", "kill"])
async def test_lost_attempt_is_not_billed_and_counts_as_lost_seconds(end: Act) -> None:
    async with fleet() as workers:
        lease = await one(workers)
        await workers.compute(lease, 4.0, tell=True)
        if end == "kill":
            await workers.kill(lease.worker)
        else:
            await workers.end(end, lease)
        assert (await bill(workers))[:2] == ({}, {"cpu": 4.0})

        workers.clock.advance(10)
        again = await one(workers, "worker-2")
        await workers.compute(again, 1.0, tell=False)
        await workers.end("complete", again)
        assert (await bill(workers))[:2] == ({"cpu": 2.0}, {"cpu": 4.0}), "it computes on two devices"


async def test_invalid_request_is_billed_for_its_usage() -> None:
    async with fleet() as workers:
        lease = await one(workers)
        await workers.compute(lease, 4.0, tell=False)
        await workers.end("refuse", lease)
        billed, lost, context = await bill(workers)
        assert (billed, lost, context.status) == ({"cpu": 4.0}, {}, "failed")


async def test_late_report_of_a_lost_lease_adds_to_lost_seconds() -> None:
    async with fleet() as workers:
        lease = await one(workers)
        await workers.compute(lease, 4.0, tell=True)
        await workers.schedulers[0].maintenance.expire_lease(lease)
        assert (await bill(workers))[:2] == ({}, {"cpu": 4.0})

        again = await one(workers, "worker-1")
        await workers.compute(lease, 2.0, tell=True)
        await workers.end("complete", lease)
        assert (await bill(workers))[:2] == ({}, {"cpu": 6.0})
        await workers.end("complete", again)
        await workers.check()


@pytest.mark.parametrize("first", ["cancel", "complete"])
async def test_a_cancel_that_races_a_completion_bills_the_attempt_once(first: str) -> None:
    async with fleet(Racing) as workers:
        lease = await one(workers)
        await workers.compute(lease, 4.0, tell=False)
        acts = [lambda: END["cancelled"](workers), lambda: workers.end("complete", lease)]
        await asyncio.gather(*(act() for act in (acts if first == "cancel" else reversed(acts))))
        assert (await bill(workers))[:2] == ({"cpu": 4.0}, {})
        await workers.settle()
        await workers.check()


async def test_task_leased_during_a_cancel_is_billed() -> None:
    """The cancel is decided of a record in which nothing runs yet."""
    async with fleet() as workers:
        await workers.act("submit", 0, 1)
        queue = workers.schedulers[0].queue
        before = await queue.load(workers.requests[0])
        lease = await one(workers)
        await workers.compute(lease, 3.0, tell=True)

        async def stale(_: str) -> object:
            return before

        queue.load, load = stale, queue.load  # type: ignore[method-assign, assignment]
        await END["cancelled"](workers)
        queue.load = load  # type: ignore[method-assign]
        assert (await bill(workers))[0] == {}
        await workers.end("notice", lease)
        assert (await bill(workers))[0] == {"cpu": 3.0}


async def test_reported_seconds_are_capped_by_elapsed_time() -> None:
    async with fleet() as workers:
        lease = await one(workers)
        workers.clock.advance(5.0)
        await workers.say(lease.worker, ReportProgress((StepProgress(lease.claim, 1, 3, 1, share_s=1e8),)))
        assert (await bill(workers))[0] == {"cpu": 5.0}
        await END["cancelled"](workers)
        workers.clock.advance(2.0)
        for _ in range(3):
            await workers.say(lease.worker, TaskStopped(lease.claim, Timings(share_s=1e9)))
        assert (await bill(workers))[0] == {"cpu": 7.0}


async def test_usage_reports_for_other_workers_attempts_are_ignored() -> None:
    async with fleet() as workers:
        lease = await one(workers)
        await workers.compute(lease, 2.0, tell=True)
        claimed = msgspec.structs.replace(lease.claim, token=b"guessed")
        await workers.say("worker-1", TaskStopped(claimed, Timings(share_s=1.0)))
        assert (await bill(workers))[:2] == ({"cpu": 2.0}, {})
        await END["cancelled"](workers)
        for number in (1, 2, 1 << 40):
            other = msgspec.structs.replace(claimed, attempt=number, stage="text_encode")
            await workers.say("worker-1", TaskStopped(other, Timings(share_s=1.0)))
        await workers.say("worker-1", TaskStopped(msgspec.structs.replace(claimed, stage="none"), Timings(share_s=1.0)))
        assert (await bill(workers))[0] == {"cpu": 2.0}


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e12])
def test_impossible_seconds_raise_protocol_error_when_decoding(seconds: float) -> None:
    claim = Claim("req_0", "denoise", 1, b"token")
    for message in (
        ReportProgress((StepProgress(claim, 1, 2, 1, share_s=seconds),)),
        TaskStopped(claim, Timings(share_s=seconds)),
        TaskFailed(claim, "transient", "no", timings=Timings(run_s=seconds)),
        TaskCompleted(claim, None, (), Timings(share_s=seconds)),
    ):
        with pytest.raises(ProtocolError):
            decode(encode(message), ToScheduler)


async def test_start_time_and_attempt_count_survive_lost_attempts() -> None:
    async with fleet() as workers:
        lease = await one(workers)
        begun = workers.clock.wall()
        await workers.compute(lease, 1.0, tell=True)
        await workers.end("hand back", lease)
        workers.clock.advance(100.0)
        again = await one(workers, "worker-1")
        await workers.kill(again.worker)
        third = await one(workers, "worker-2")
        await workers.end("complete", third)
        _, _, context = await bill(workers)
        assert context.started_at == begun
        assert context.stages["text_encode"].attempts_started == 3
