"""What a worker is answered, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.scheduler.model import CARD, DENOISE, ENCODE, params
from tests.scheduler.test_scheduler import done, info, scheduling
from tools.asking import asking
from unfuse.core.errors import LeaseLost, TransientError
from unfuse.core.messages import (
    Accepted,
    AppendOutput,
    FailureKind,
    Heartbeat,
    HeartbeatReply,
    LeasesGranted,
    ReadOutput,
    RecordedOutput,
    Register,
    Registered,
    Rejected,
    ReportProgress,
    RequestTasks,
    StepProgress,
    StorageLocations,
    TaskCompleted,
    TaskFailed,
    ToWorker,
    UnknownWorker,
    Unregister,
)
from unfuse.core.request import Change, RequestRecord
from unfuse.core.task import Claim, Lease, OutputDeltas
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler import dispatcher as dispatcher_module
from unfuse.scheduler.dispatcher import MISSED_HEARTBEATS, Dispatcher
from unfuse.scheduler.maintenance import RETURN_S
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import count_waiting
from unfuse.testing.virtual_time import in_virtual_time

PEER, OTHER = b"peer-1", b"peer-2"
HELLO = Register(info("worker-1", ENCODE, DENOISE), (CARD,))


@asynccontextmanager
async def dispatching() -> AsyncIterator[tuple[Dispatcher, ManualClock]]:
    async with scheduling(lease_ttl=5.0) as (scheduler, clock):
        dispatcher = Dispatcher(scheduler, [(CARD.name, CARD.source, "auto")], StorageLocations("disk:/results"))
        await dispatcher.answer(PEER, HELLO)
        yield dispatcher, clock


async def submit(dispatcher: Dispatcher, **options: object) -> str:
    record = await dispatcher.scheduler.submit(*asking(CARD, params(), **options))  # type: ignore[arg-type]
    return record.context.id


async def granted(dispatcher: Dispatcher, slots: int = 1, wait: float = 0.0, peer: bytes = PEER) -> list[Lease]:
    reply = await dispatcher.answer(peer, RequestTasks(slots, None, wait))
    assert isinstance(reply, LeasesGranted)
    return list(reply.leases)


async def test_who_comes_without_pools_is_told_what_to_serve_and_not_registered() -> None:
    async with dispatching() as (dispatcher, _):
        reply = await dispatcher.answer(OTHER, Register(info("worker-2")))
        assert isinstance(reply, Registered)
        assert (reply.models, reply.storage, reply.lease_ttl) == (
            ((CARD.name, CARD.source, "auto"),),
            StorageLocations("disk:/results"),
            5.0,
        )
        assert [member.info.id for member in await dispatcher.scheduler.registry.workers()] == ["worker-1"]


async def test_an_unknown_connection_is_a_stranger_whatever_it_says() -> None:
    async with dispatching() as (dispatcher, _):
        await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        for message in (RequestTasks(1, None, 0.0), Heartbeat((lease.claim,)), done(lease), Unregister()):
            assert await dispatcher.answer(OTHER, message) == UnknownWorker()


@in_virtual_time
async def test_an_ask_waits_for_work_and_never_gets_more_than_the_worker_s_slots() -> None:
    async with dispatching() as (dispatcher, _):
        asking = asyncio.create_task(granted(dispatcher, slots=5, wait=20.0))
        await settle()
        for _ in range(3):
            await submit(dispatcher)
        assert len(await asking) == 1


@in_virtual_time
async def test_a_scheduler_that_stops_gives_nobody_a_task_and_says_so() -> None:
    """Given workers that wait for work and for news, when their scheduler is about to stop, then both are answered,
    no Ask gets anything from then on, nor does an outcome, and none is answered so soon that it would come at once."""
    async with dispatching() as (dispatcher, _):
        loop = asyncio.get_running_loop()
        await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        waiting = asyncio.create_task(granted(dispatcher, wait=20.0))
        beating = asyncio.create_task(dispatcher.answer(PEER, Heartbeat((), wait=1.0)))
        await settle()
        before = loop.time()
        dispatcher.stop_granting()
        assert await waiting == []
        assert isinstance(pulse := await beating, HeartbeatReply) and pulse.is_stopping
        assert loop.time() == before
        await submit(dispatcher)
        with_ask = msgspec.structs.replace(done(lease), next_request=RequestTasks(5, None, 20.0))
        assert await dispatcher.answer(PEER, with_ask) == LeasesGranted((), {})
        assert (await granted(dispatcher, wait=20.0), loop.time() - before) == ([], pytest.approx(20.0))


@in_virtual_time
async def test_a_newer_ask_replaces_the_one_that_waits() -> None:
    async with dispatching() as (dispatcher, _):
        older = asyncio.create_task(granted(dispatcher, wait=20.0))
        await settle()
        newer = asyncio.create_task(granted(dispatcher, wait=20.0))
        assert await older == []
        await submit(dispatcher)
        assert len(await newer) == 1


@in_virtual_time
async def test_an_ask_that_is_dropped_takes_nothing_any_more() -> None:
    async with dispatching() as (dispatcher, _):
        asking = asyncio.create_task(granted(dispatcher, wait=20.0))
        await settle()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        request = await submit(dispatcher)
        await settle()
        assert (await dispatcher.scheduler.queue.load(request)).running == ()


@in_virtual_time
async def test_who_says_goodbye_gets_nothing_more() -> None:
    async with dispatching() as (dispatcher, _):
        asking = asyncio.create_task(granted(dispatcher, wait=20.0))
        await settle()
        assert await dispatcher.answer(PEER, Unregister()) == Accepted()
        assert await asking == []
        assert await dispatcher.scheduler.registry.workers() == []
        assert await dispatcher.answer(PEER, Heartbeat()) == UnknownWorker()


def stepped(claim: Claim, step: int, steps: int, first: int, previews: tuple[int, ...] = ()) -> ReportProgress:
    """The message about the steps of one task."""
    return ReportProgress((StepProgress(claim, step, steps, first, previews),))


async def test_progress_is_published_step_by_step_and_answers_a_cancelled_task() -> None:
    async with dispatching() as (dispatcher, _):
        request = await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        assert await dispatcher.answer(PEER, stepped(lease.claim, 3, 9, 1)) == HeartbeatReply((), ())
        assert await dispatcher.answer(PEER, stepped(lease.claim, 4, 9, 4)) == HeartbeatReply((), ())
        await dispatcher.scheduler.cancel(request)
        assert await dispatcher.answer(PEER, stepped(lease.claim, 5, 9, 5)) == HeartbeatReply((lease.claim,), ())
        seen = [event async for event in dispatcher.scheduler.queue.watch(request)]
        assert [event.step for event in seen if event.type == "progress"] == [1, 2, 3, 4]


async def test_steps_of_several_tasks_come_together_and_whose_lease_is_lost_is_named() -> None:
    async with dispatching() as (dispatcher, _):
        requests = [await submit(dispatcher) for _ in range(3)]
        leases = [*await granted(dispatcher), *await granted(dispatcher)]
        await dispatcher.answer(OTHER, Register(info("worker-2", ENCODE, DENOISE), (CARD,)))
        (other,) = await granted(dispatcher, peer=OTHER)
        both = [StepProgress(lease.claim, 2, 9, 1) for lease in leases]
        assert await dispatcher.answer(PEER, ReportProgress(tuple(both))) == HeartbeatReply((), ())
        await dispatcher.scheduler.cancel(requests[0])
        claims = [lease.claim for lease in (*leases, other)]
        gone = await dispatcher.answer(PEER, ReportProgress(tuple(StepProgress(claim, 3, 9, 3) for claim in claims)))
        assert gone == HeartbeatReply((claims[0], claims[2]), ())
        steps = []
        for request in requests:
            await dispatcher.scheduler.cancel(request)
            events = [event async for event in dispatcher.scheduler.queue.watch(request)]
            steps.append([event.step for event in events if event.type == "progress"])
        assert steps == [[1, 2], [1, 2, 3], []]


async def test_a_message_that_lists_endless_steps_is_cut_to_the_newest() -> None:
    async with dispatching() as (dispatcher, _):
        request = await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        assert await dispatcher.answer(PEER, stepped(lease.claim, 10**15, 10**15, 1)) == HeartbeatReply((), ())
        await dispatcher.scheduler.cancel(request)
        steps = [event.step async for event in dispatcher.scheduler.queue.watch(request) if event.type == "progress"]
        assert steps == list(range(10**15 - len(steps) + 1, 10**15 + 1))


async def test_a_beat_renews_leases_and_answers_what_is_over() -> None:
    async with dispatching() as (dispatcher, clock):
        request, other = await submit(dispatcher), await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        clock.advance(2.9)
        assert await dispatcher.answer(PEER, Heartbeat((lease.claim,), (request,))) == HeartbeatReply((), ())
        clock.advance(2.9)
        assert await dispatcher.scheduler.queue.sweep_expired(5.0) == []
        await dispatcher.scheduler.cancel(request)
        assert await dispatcher.answer(PEER, Heartbeat((lease.claim,), (request, other))) == HeartbeatReply(
            (lease.claim,), (request,)
        )


async def test_whoever_holds_objects_of_a_request_hears_which_of_them_was_given_up() -> None:
    """Given an output that its reader cannot have, when its owner tells what it holds for, then it hears of it, at this
    scheduler and at one that learned of it from the queue, and nobody hears of another request's."""
    async with dispatching() as (dispatcher, clock):
        request, other = await submit(dispatcher), await submit(dispatcher)
        (first,) = await granted(dispatcher)
        await dispatcher.answer(PEER, made := done(first))
        assert isinstance(made, TaskCompleted) and made.output
        (lease,) = await granted(dispatcher)
        assert lease.task.request == request
        beat, gone = Heartbeat((), (request,)), (made.output.id,)
        assert await dispatcher.answer(PEER, beat) == HeartbeatReply((), ())
        lost = TaskFailed(lease.claim, "object_lost", "cannot be fetched", object_id=made.output.id)
        assert await dispatcher.answer(PEER, lost) == Accepted()
        assert await dispatcher.answer(PEER, beat) == HeartbeatReply((), (), gone)
        assert await dispatcher.answer(PEER, Heartbeat((), (other,))) == HeartbeatReply((), ())
        elsewhere = Scheduler(dispatcher.scheduler.queue, clock=clock)
        assert elsewhere.in_flight.lost_outputs([request]) == []
        await elsewhere.maintenance.requests()
        assert elsewhere.in_flight.lost_outputs([request, other]) == [*gone]
        await elsewhere.cancel(request)
        assert elsewhere.in_flight.lost_outputs([request]) == []


@in_virtual_time
async def test_a_beat_that_waits_hears_of_a_cancellation_at_once() -> None:
    async with dispatching() as (dispatcher, _):
        request, other = await submit(dispatcher), await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        beat = Heartbeat((lease.claim,), (request, other), wait=3600.0)
        waiting = asyncio.create_task(dispatcher.answer(PEER, beat))
        await settle()
        assert not waiting.done()
        await dispatcher.scheduler.cancel(request)
        assert await waiting == HeartbeatReply((), ())  # something happened: beat again
        assert await dispatcher.answer(PEER, beat) == HeartbeatReply((lease.claim,), (request,))


async def test_a_step_with_a_preview_publishes_it_behind_the_step() -> None:
    async with dispatching() as (dispatcher, _):
        request = await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        await dispatcher.answer(PEER, stepped(lease.claim, 3, 9, 1, previews=(2,)))
        await dispatcher.scheduler.cancel(request)
        events = [(event.type, event.step) async for event in dispatcher.scheduler.queue.watch(request) if event.step]
        assert events == [("progress", 1), ("progress", 2), ("preview", 2), ("progress", 3)]


async def test_a_busy_worker_gets_what_is_more_urgent_only() -> None:
    async with dispatching() as (dispatcher, _):
        await submit(dispatcher)
        urgent = await submit(dispatcher, priority=2)
        reply = await dispatcher.answer(PEER, RequestTasks(1, None, 0.0, min_priority=1))
        assert isinstance(reply, LeasesGranted)
        assert [lease.task.request for lease in reply.leases] == [urgent]
        assert await dispatcher.answer(PEER, RequestTasks(1, None, 0.0, min_priority=0)) == LeasesGranted((), {})


async def test_an_outcome_is_accepted_once_and_again_but_not_after_the_request_is_over() -> None:
    async with dispatching() as (dispatcher, _):
        request = await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        assert await dispatcher.answer(PEER, done(lease)) == Accepted()
        assert await dispatcher.answer(PEER, done(lease)) == Accepted()
        (lease,) = await granted(dispatcher)
        await dispatcher.scheduler.cancel(request)
        reply = await dispatcher.answer(PEER, done(lease))
        assert isinstance(reply, Rejected)
        assert reply.lease_lost


async def test_what_could_not_be_delivered_is_queued_again_uncharged() -> None:
    async with dispatching() as (dispatcher, _):
        request = await submit(dispatcher)
        reply: ToWorker | None = await dispatcher.answer(PEER, RequestTasks(1, None, 0.0))
        assert isinstance(reply, LeasesGranted)
        await dispatcher.handle_undelivered(PEER, reply)
        assert await dispatcher.answer(PEER, Heartbeat()) == UnknownWorker()
        await dispatcher.answer(OTHER, HELLO)
        (lease,) = await granted(dispatcher, peer=OTHER)
        assert lease.task.attempt == 2
        assert (await dispatcher.scheduler.queue.load(request)).context.stages["text_encode"].failures == 0


@in_virtual_time
async def test_tasks_of_a_worker_whose_connection_broke_go_to_others_unless_it_comes_back() -> None:
    for comes_back in (True, False):
        async with dispatching() as (dispatcher, clock):
            await submit(dispatcher)
            await granted(dispatcher)
            await dispatcher.handle_undelivered(PEER, HeartbeatReply((), ()))
            await settle()
            clock.advance(RETURN_S / 2)
            if comes_back:
                await dispatcher.answer(b"again", HELLO)
            await asyncio.sleep(RETURN_S + 1.0)
            members = [member.info.id for member in await dispatcher.scheduler.registry.workers()]
            assert members == ["worker-1"] * comes_back
            await dispatcher.answer(OTHER, Register(info("worker-2", ENCODE, DENOISE), (CARD,)))
            assert [lease.task.attempt for lease in await granted(dispatcher, peer=OTHER)] == [2] * (not comes_back)


async def settle() -> None:
    """In virtual time: let everything go on until all that there is waits."""
    await asyncio.sleep(0.001)


def secretly(name: str, secret: bytes) -> Register:
    return Register(info(name, ENCODE, DENOISE), (CARD,), secret)


async def test_an_id_is_its_first_owner_s_on_every_scheduler() -> None:
    async with dispatching() as (dispatcher, clock):
        mine, stolen = secretly("worker-9", b"a" * 16), secretly("worker-9", b"b" * 16)
        assert isinstance(await dispatcher.answer(OTHER, mine), Registered)
        elsewhere = Dispatcher(
            Scheduler(dispatcher.scheduler.queue, clock=clock, lease_ttl=5.0), [], StorageLocations("")
        )
        for place in (dispatcher, elsewhere):
            for hello in (stolen, Register(mine.worker, mine.model_specs)):
                reply = await place.answer(b"thief", hello)
                assert isinstance(reply, Rejected)
                assert "registered with another secret" in reply.message
                assert await place.answer(b"thief", RequestTasks(1, None, 0.0)) == UnknownWorker()
        assert isinstance(await elsewhere.answer(OTHER, mine), Registered)
        (member,) = [m for m in await dispatcher.scheduler.queue.workers() if m.info.id == "worker-9"]
        assert member.info.secret_hash
        assert member.info.secret_hash != b"a" * 16


@in_virtual_time
async def test_a_worker_has_one_connection_the_newest() -> None:
    async with dispatching() as (dispatcher, _):
        asking = asyncio.create_task(granted(dispatcher, wait=20.0))
        await settle()
        await dispatcher.answer(OTHER, HELLO)
        assert await asking == []
        assert await dispatcher.answer(PEER, RequestTasks(1, None, 0.0)) == UnknownWorker()
        await submit(dispatcher)
        assert len(await granted(dispatcher, peer=OTHER)) == 1


@in_virtual_time
async def test_a_connection_that_registers_another_worker_drops_the_first() -> None:
    """Given a waiting lease request, when its connection registers another worker, then the request ends, and so does
    the first worker's alarm."""
    async with dispatching() as (dispatcher, clock):
        asking = asyncio.create_task(granted(dispatcher, wait=20.0))
        await settle()
        welcome = await dispatcher.answer(PEER, Register(info("worker-2", ENCODE, DENOISE), (CARD,)))
        assert isinstance(welcome, Registered)
        assert await asyncio.wait_for(asking, 10.0) == []
        await dispatcher.answer(PEER, Unregister())
        clock.advance(2 * MISSED_HEARTBEATS * welcome.heartbeat_s)


async def test_what_a_worker_says_of_another_s_task_has_no_effect() -> None:
    async with dispatching() as (dispatcher, clock):
        await dispatcher.answer(OTHER, Register(info("worker-2", ENCODE, DENOISE), (CARD,)))
        request = await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        before = await dispatcher.scheduler.queue.load(request)
        stolen = msgspec.structs.replace(done(lease), output=None)
        kinds = ("transient", "permanent", "crash", "object_lost", "hand_back")
        failures = [TaskFailed(lease.claim, kind, "no") for kind in kinds]
        for message in (done(lease), stolen, *failures):
            reply = await dispatcher.answer(OTHER, message)
            assert isinstance(reply, Rejected)
            assert reply.lease_lost
        clock.advance(2.9)
        assert await dispatcher.answer(OTHER, stepped(lease.claim, 1, 9, 1)) == HeartbeatReply((lease.claim,), ())
        assert await dispatcher.answer(OTHER, Heartbeat((lease.claim,))) == HeartbeatReply((lease.claim,), ())
        after = await dispatcher.scheduler.queue.load(request)
        assert after == before
        assert await dispatcher.answer(PEER, stepped(lease.claim, 1, 9, 1)) == HeartbeatReply((), ())
        assert await dispatcher.answer(PEER, done(lease)) == Accepted()


async def test_what_has_grown_is_recorded_for_who_has_the_task_and_read_by_the_next() -> None:
    """Given pieces of several tasks in one message, then one that is another's, lost, or has a gap costs none of the
    others anything."""
    async with dispatching() as (dispatcher, _):
        await dispatcher.answer(OTHER, Register(info("worker-2", ENCODE, DENOISE), (CARD,)))
        requests = [await submit(dispatcher) for _ in range(4)]
        first, second, gone = [lease for _ in range(3) for lease in await granted(dispatcher)]
        (others,) = await granted(dispatcher, peer=OTHER)
        await dispatcher.scheduler.cancel(gone.task.request)
        claims = [lease.claim for lease in (first, gone, others, second)]

        async def append(*offsets: int) -> ToWorker | None:
            told = [OutputDeltas(claim, at, (b"%d" % at, b"!")) for claim, at in zip(claims, offsets, strict=True)]
            return await dispatcher.answer(PEER, AppendOutput(tuple(told)))

        assert await append(0, 0, 0, 0) == HeartbeatReply((gone.claim, others.claim), ())
        assert await append(2, 0, 0, 9) == HeartbeatReply((gone.claim, others.claim, second.claim), ())
        queue, stage = dispatcher.scheduler.queue, first.task.stage
        found = {request: await queue.read_deltas(request, stage) for request in requests}
        assert {request: kept for request, kept in found.items() if kept} == {
            first.task.request: [b"0", b"!", b"2", b"!"],
            second.task.request: [b"0", b"!"],
        }
        assert await dispatcher.answer(PEER, TaskFailed(first.claim, "hand_back", "no", reason="full")) == Accepted()
        (again,) = await granted(dispatcher, peer=OTHER)
        assert again.recorded_deltas == 4
        assert await dispatcher.answer(OTHER, ReadOutput(again.claim, 1)) == RecordedOutput((b"!", b"2", b"!"))
        await queue.drop(gone.task.request)
        for claim in (again.claim, gone.claim, msgspec.structs.replace(first.claim, request="nobody")):
            answer = await dispatcher.answer(PEER, ReadOutput(claim))
            assert isinstance(answer, Rejected) and answer.lease_lost


async def test_a_worker_goes_on_at_another_scheduler() -> None:
    async with dispatching() as (dispatcher, clock):
        await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        other = Dispatcher(Scheduler(dispatcher.scheduler.queue, clock=clock, lease_ttl=5.0), [], StorageLocations(""))
        await other.answer(OTHER, HELLO)
        assert await other.answer(OTHER, stepped(lease.claim, 1, 9, 1)) == HeartbeatReply((), ())
        assert await other.answer(OTHER, Heartbeat((lease.claim,))) == HeartbeatReply((), ())
        assert await other.answer(OTHER, done(lease)) == Accepted()


async def test_a_heartbeat_at_another_scheduler_renews_the_others_while_one_request_cannot_be_looked_at() -> None:
    """Given a worker with two tasks that has moved, while the shard of one is away, then both leases live on; and once
    it is back, the worker reports them."""

    class Away(Scheduler):
        gone = ""

        async def is_leased_to(self, worker: str, claim: Claim) -> bool:
            if claim.request == self.gone:
                raise TransientError("away")
            return await super().is_leased_to(worker, claim)

    async with dispatching() as (dispatcher, clock):
        for _ in "12":
            await submit(dispatcher)
        leases = [*await granted(dispatcher), *await granted(dispatcher)]
        claims = tuple(lease.claim for lease in leases)
        scheduler = Away(dispatcher.scheduler.queue, clock=clock, lease_ttl=5.0)
        other = Dispatcher(scheduler, [], StorageLocations(""))
        await other.answer(OTHER, HELLO)
        scheduler.gone = claims[0].request
        for _ in range(4):
            clock.advance(2.0)
            assert await other.answer(OTHER, Heartbeat(claims)) == HeartbeatReply((), ())
        scheduler.gone = ""
        for lease in leases:
            assert await other.answer(OTHER, done(lease)) == Accepted()


@in_virtual_time
async def test_a_cancellation_at_one_scheduler_reaches_a_worker_at_another_with_its_next_heartbeat() -> None:
    async with dispatching() as (dispatcher, clock):
        other = Scheduler(dispatcher.scheduler.queue, clock=clock, lease_ttl=5.0)
        request = await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        beat = Heartbeat((lease.claim,), (request,), wait=3600.0)
        waiting = asyncio.create_task(dispatcher.answer(PEER, beat))
        await settle()
        await other.cancel(request)
        assert await waiting == HeartbeatReply((), ())  # its time is up after a beat, whatever it asked for
        assert await dispatcher.answer(PEER, beat) == HeartbeatReply((lease.claim,), (request,))


@in_virtual_time
async def test_who_misses_beats_is_given_nothing_until_it_is_heard_again() -> None:
    async with dispatching() as (dispatcher, clock):
        welcome = await dispatcher.answer(PEER, HELLO)
        assert isinstance(welcome, Registered)
        assert MISSED_HEARTBEATS * welcome.heartbeat_s < welcome.lease_ttl
        asking = asyncio.create_task(granted(dispatcher, wait=20.0))
        await settle()
        clock.advance(MISSED_HEARTBEATS * welcome.heartbeat_s)
        assert await asking == []
        await submit(dispatcher)
        assert await count_waiting(dispatcher.scheduler.queue, ENCODE) == 1
        assert await dispatcher.answer(PEER, RequestTasks(1, None, 0.0)) == UnknownWorker()
        await dispatcher.answer(PEER, HELLO)
        assert len(await granted(dispatcher)) == 1


class Away(MemoryQueue):
    """A queue whose server is away for some commits, and does not say whether it applied them, or applies none."""

    commits, applies = 0, True

    async def commit(self, change: Change) -> RequestRecord:
        self.commits -= 1
        is_away = self.commits >= 0
        if is_away and not self.applies:
            raise TransientError("the queue does not answer")
        record = await super().commit(change)
        if is_away:
            raise TransientError("the queue does not answer")
        return record


async def leased_from(queue: Away, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> tuple[Dispatcher, Lease]:
    """A dispatcher that does not pause between tries, and the task that its worker has."""
    monkeypatch.setattr(dispatcher_module, "QUEUE_PAUSE_S", 0.0)
    dispatcher = Dispatcher(Scheduler(queue, clock=clock), [], StorageLocations(""))
    await dispatcher.answer(PEER, HELLO)
    await submit(dispatcher)
    (lease,) = await granted(dispatcher)
    return dispatcher, lease


@pytest.mark.parametrize("away, answer", [(3, Accepted()), (99, None)])
async def test_an_outcome_waits_for_the_queue_to_be_back(
    monkeypatch: pytest.MonkeyPatch, away: int, answer: Accepted | None
) -> None:
    clock = ManualClock()
    queue = Away(clock)
    dispatcher, lease = await leased_from(queue, clock, monkeypatch)
    queue.commits = away
    assert await dispatcher.answer(PEER, done(lease)) == answer
    queue.commits = 0
    assert await dispatcher.answer(PEER, done(lease)) == Accepted()
    assert await count_waiting(queue, DENOISE) == 1


@pytest.mark.parametrize(
    ("kind", "reason", "event"), [("crash", "", "task failed"), ("hand_back", "drain", "task handed back")]
)
async def test_a_failure_that_waits_for_the_queue_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, kind: FailureKind, reason: str, event: str
) -> None:
    clock = ManualClock()
    queue = Away(clock)
    dispatcher, lease = await leased_from(queue, clock, monkeypatch)
    queue.commits, queue.applies = 3, False
    with capture_logs() as logs:
        assert await dispatcher.answer(PEER, TaskFailed(lease.claim, kind, "ended", reason=reason)) == Accepted()
    assert [line["event"] for line in logs if line.get("reason") == "ended"] == [event]


async def test_a_task_that_another_took_over_is_answered_as_lost() -> None:
    async with dispatching() as (dispatcher, _):
        await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        await dispatcher.scheduler.fail(TaskFailed(lease.claim, "hand_back", ""), "worker-1")
        (second,) = await granted(dispatcher)
        reply = await dispatcher.answer(PEER, done(lease))
        assert isinstance(reply, Rejected)
        assert reply.lease_lost
        with pytest.raises(LeaseLost):
            await dispatcher.scheduler.complete(done(lease), "worker-1")
        assert await dispatcher.answer(PEER, done(second)) == Accepted()


async def test_a_worker_that_says_it_leaves_gets_nothing_more() -> None:
    """Given a worker that hands back as it leaves, which never counts, then it is given no other task, ever so often
    as it asks; another worker is."""
    async with dispatching() as (dispatcher, _):
        request = await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        answer = await dispatcher.answer(PEER, TaskFailed(lease.claim, "hand_back", "leaving", reason="drain"))
        assert answer == Accepted()
        assert await granted(dispatcher) == []
        await dispatcher.answer(OTHER, Register(info("worker-2", ENCODE), (CARD,)))
        assert [lease.task.request for lease in await granted(dispatcher, peer=OTHER)] == [request]


def asking_on(lease: Lease, slots: int = 1) -> TaskCompleted:
    return msgspec.structs.replace(done(lease), next_request=RequestTasks(slots, None, 0.0))


@in_virtual_time
async def test_who_asks_with_an_outcome_is_given_what_follows_from_it_before_anybody_who_waits() -> None:
    """Given another worker that waits for the next stage, then who made its input gets it in the same answer, and an
    Ask of before is answered with nothing."""
    async with dispatching() as (dispatcher, _):
        request = await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        await dispatcher.answer(OTHER, Register(info("worker-2", ENCODE, DENOISE), (CARD,)))
        waits = asyncio.create_task(granted(dispatcher, wait=20.0, peer=OTHER))
        before = asyncio.create_task(granted(dispatcher, wait=20.0))
        await settle()
        reply = await dispatcher.answer(PEER, asking_on(lease))
        assert isinstance(reply, LeasesGranted)
        assert [given.task.stage for given in reply.leases] == ["denoise.0"]
        assert await before == []
        assert (await dispatcher.scheduler.queue.load(request)).context.stages["text_encode"].status == "done"
        assert not waits.done()
        waits.cancel()


async def test_who_asks_with_an_outcome_that_nothing_follows_for_it_hears_that_it_is_recorded() -> None:
    async with dispatching() as (dispatcher, _):
        await submit(dispatcher)
        (encode,) = await granted(dispatcher)
        reply = await dispatcher.answer(PEER, asking_on(encode))
        assert isinstance(reply, LeasesGranted)
        (denoise,) = reply.leases
        assert await dispatcher.answer(PEER, asking_on(denoise)) == LeasesGranted((), {})  # it decodes nothing
        assert await dispatcher.answer(PEER, asking_on(denoise)) == LeasesGranted((), {})


async def test_an_outcome_that_is_refused_brings_no_work() -> None:
    async with dispatching() as (dispatcher, _):
        first, second = await submit(dispatcher), await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        await dispatcher.scheduler.cancel(first)
        assert isinstance(await dispatcher.answer(PEER, asking_on(lease)), Rejected)
        assert (await dispatcher.scheduler.queue.load(second)).running == ()
        assert [lease.task.request for lease in await granted(dispatcher)] == [second]


async def test_what_was_given_with_an_outcome_and_could_not_be_delivered_is_queued_again() -> None:
    async with dispatching() as (dispatcher, _):
        await submit(dispatcher)
        (encode,) = await granted(dispatcher)
        reply = await dispatcher.answer(PEER, asking_on(encode))
        assert isinstance(reply, LeasesGranted) and reply.leases
        await dispatcher.handle_undelivered(PEER, reply)
        await dispatcher.answer(OTHER, HELLO)
        (lease,) = await granted(dispatcher, peer=OTHER)
        assert (lease.task.stage, lease.task.attempt) == ("denoise.0", 2)


@in_virtual_time
async def test_who_waits_with_fewer_tasks_gets_the_next_one_and_not_who_has_just_made_what_it_reads() -> None:
    async with dispatching() as (dispatcher, _):
        await submit(dispatcher)
        everything = msgspec.structs.replace(info("worker-1", ENCODE, DENOISE), slots=4)
        await dispatcher.answer(PEER, Register(everything, (CARD,)))
        (encode,) = await granted(dispatcher)
        await dispatcher.answer(OTHER, Register(msgspec.structs.replace(everything, id="worker-2"), (CARD,)))
        waits = asyncio.create_task(granted(dispatcher, 4, wait=20.0, peer=OTHER))
        await settle()
        busy = msgspec.structs.replace(
            asking_on(encode), next_request=RequestTasks(1, None, 20.0)
        )  # it holds three others
        assert await dispatcher.answer(PEER, busy) == LeasesGranted((), {})
        assert [lease.task.stage for lease in await waits] == ["denoise.0"]


@in_virtual_time
async def test_where_workers_take_turns_nobody_goes_before_who_has_waited() -> None:
    async with dispatching() as (whoever, clock):
        await submit(whoever)
        dispatcher = Dispatcher(
            Scheduler(whoever.scheduler.queue, clock=clock), [], StorageLocations(""), dispatch="round_robin"
        )
        await dispatcher.answer(PEER, HELLO)
        await dispatcher.answer(OTHER, Register(info("worker-2", DENOISE), (CARD,)))
        (encode,) = await granted(dispatcher)
        waits = asyncio.create_task(granted(dispatcher, wait=20.0, peer=OTHER))
        await settle()
        assert await dispatcher.answer(PEER, asking_on(encode)) == LeasesGranted((), {})
        assert [lease.task.stage for lease in await waits] == ["denoise.0"]
