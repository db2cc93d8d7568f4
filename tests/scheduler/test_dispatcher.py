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


async def test_register_without_pools_returns_the_models_without_registering() -> None:
    async with dispatching() as (dispatcher, _):
        reply = await dispatcher.answer(OTHER, Register(info("worker-2")))
        assert isinstance(reply, Registered)
        assert (reply.models, reply.storage, reply.lease_ttl) == (
            ((CARD.name, CARD.source, "auto"),),
            StorageLocations("disk:/results"),
            5.0,
        )
        assert [member.info.id for member in await dispatcher.scheduler.registry.workers()] == ["worker-1"]


async def test_messages_of_an_unregistered_connection_return_unknown_worker() -> None:
    async with dispatching() as (dispatcher, _):
        await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        for message in (RequestTasks(1, None, 0.0), Heartbeat((lease.claim,)), done(lease), Unregister()):
            assert await dispatcher.answer(OTHER, message) == UnknownWorker()


@in_virtual_time
async def test_lease_request_waits_and_is_limited_to_the_worker_slots() -> None:
    async with dispatching() as (dispatcher, _):
        asking = asyncio.create_task(granted(dispatcher, slots=5, wait=20.0))
        await settle()
        for _ in range(3):
            await submit(dispatcher)
        assert len(await asking) == 1


@in_virtual_time
async def test_stopping_scheduler_grants_no_leases_and_notifies_workers() -> None:
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
async def test_new_lease_request_replaces_the_waiting_one() -> None:
    async with dispatching() as (dispatcher, _):
        older = asyncio.create_task(granted(dispatcher, wait=20.0))
        await settle()
        newer = asyncio.create_task(granted(dispatcher, wait=20.0))
        assert await older == []
        await submit(dispatcher)
        assert len(await newer) == 1


@in_virtual_time
async def test_cancelled_lease_request_leases_nothing() -> None:
    async with dispatching() as (dispatcher, _):
        asking = asyncio.create_task(granted(dispatcher, wait=20.0))
        await settle()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        request = await submit(dispatcher)
        await settle()
        assert (await dispatcher.scheduler.queue.load(request)).running == ()


@in_virtual_time
async def test_unregistered_worker_is_not_leased_tasks() -> None:
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


async def test_progress_publishes_each_step_and_reports_a_cancelled_task() -> None:
    async with dispatching() as (dispatcher, _):
        request = await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        assert await dispatcher.answer(PEER, stepped(lease.claim, 3, 9, 1)) == HeartbeatReply((), ())
        assert await dispatcher.answer(PEER, stepped(lease.claim, 4, 9, 4)) == HeartbeatReply((), ())
        await dispatcher.scheduler.cancel(request)
        assert await dispatcher.answer(PEER, stepped(lease.claim, 5, 9, 5)) == HeartbeatReply((lease.claim,), ())
        seen = [event async for event in dispatcher.scheduler.queue.watch(request)]
        assert [event.step for event in seen if event.type == "progress"] == [1, 2, 3, 4]


async def test_progress_report_for_several_tasks_returns_the_lost_leases() -> None:
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


async def test_progress_report_with_excessive_steps_is_cut_to_the_newest() -> None:
    async with dispatching() as (dispatcher, _):
        request = await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        assert await dispatcher.answer(PEER, stepped(lease.claim, 10**15, 10**15, 1)) == HeartbeatReply((), ())
        await dispatcher.scheduler.cancel(request)
        steps = [event.step async for event in dispatcher.scheduler.queue.watch(request) if event.type == "progress"]
        assert steps == list(range(10**15 - len(steps) + 1, 10**15 + 1))


async def test_heartbeat_renews_leases_and_returns_ended_claims_and_requests() -> None:
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


async def test_heartbeat_of_the_object_owner_returns_its_lost_outputs() -> None:
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
async def test_waiting_heartbeat_returns_immediately_after_a_cancel() -> None:
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


async def test_preview_event_follows_the_progress_event_of_its_step() -> None:
    async with dispatching() as (dispatcher, _):
        request = await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        await dispatcher.answer(PEER, stepped(lease.claim, 3, 9, 1, previews=(2,)))
        await dispatcher.scheduler.cancel(request)
        events = [(event.type, event.step) async for event in dispatcher.scheduler.queue.watch(request) if event.step]
        assert events == [("progress", 1), ("progress", 2), ("preview", 2), ("progress", 3)]


async def test_min_priority_leases_only_tasks_of_higher_priority() -> None:
    async with dispatching() as (dispatcher, _):
        await submit(dispatcher)
        urgent = await submit(dispatcher, priority=2)
        reply = await dispatcher.answer(PEER, RequestTasks(1, None, 0.0, min_priority=1))
        assert isinstance(reply, LeasesGranted)
        assert [lease.task.request for lease in reply.leases] == [urgent]
        assert await dispatcher.answer(PEER, RequestTasks(1, None, 0.0, min_priority=0)) == LeasesGranted((), {})


async def test_completion_is_idempotent_but_rejected_after_the_request_ended() -> None:
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


async def test_undelivered_lease_is_requeued_uncharged() -> None:
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
async def test_tasks_are_requeued_unless_a_disconnected_worker_reconnects() -> None:
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


async def test_worker_id_with_another_secret_is_rejected_on_every_scheduler() -> None:
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
async def test_new_connection_of_a_worker_replaces_the_old_one() -> None:
    async with dispatching() as (dispatcher, _):
        asking = asyncio.create_task(granted(dispatcher, wait=20.0))
        await settle()
        await dispatcher.answer(OTHER, HELLO)
        assert await asking == []
        assert await dispatcher.answer(PEER, RequestTasks(1, None, 0.0)) == UnknownWorker()
        await submit(dispatcher)
        assert len(await granted(dispatcher, peer=OTHER)) == 1


@in_virtual_time
async def test_registering_another_worker_on_a_connection_drops_the_first() -> None:
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


async def test_reports_about_another_workers_task_are_rejected_without_effect() -> None:
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


async def test_output_deltas_are_recorded_per_lease_and_read_by_the_next_attempt() -> None:
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


async def test_worker_continues_its_task_on_another_scheduler() -> None:
    async with dispatching() as (dispatcher, clock):
        await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        other = Dispatcher(Scheduler(dispatcher.scheduler.queue, clock=clock, lease_ttl=5.0), [], StorageLocations(""))
        await other.answer(OTHER, HELLO)
        assert await other.answer(OTHER, stepped(lease.claim, 1, 9, 1)) == HeartbeatReply((), ())
        assert await other.answer(OTHER, Heartbeat((lease.claim,))) == HeartbeatReply((), ())
        assert await other.answer(OTHER, done(lease)) == Accepted()


async def test_heartbeat_renews_leases_while_one_request_is_unreachable() -> None:
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
async def test_cancel_reaches_a_worker_of_another_scheduler_by_next_heartbeat() -> None:
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
async def test_worker_missing_heartbeats_is_not_leased_tasks_until_it_registers() -> None:
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
async def test_completion_is_retried_while_the_queue_is_unreachable(
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
async def test_failure_retried_while_the_queue_is_unreachable_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, kind: FailureKind, reason: str, event: str
) -> None:
    clock = ManualClock()
    queue = Away(clock)
    dispatcher, lease = await leased_from(queue, clock, monkeypatch)
    queue.commits, queue.applies = 3, False
    with capture_logs() as logs:
        assert await dispatcher.answer(PEER, TaskFailed(lease.claim, kind, "ended", reason=reason)) == Accepted()
    assert [line["event"] for line in logs if line.get("reason") == "ended"] == [event]


async def test_completion_of_a_superseded_attempt_returns_lease_lost() -> None:
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


async def test_draining_worker_is_not_leased_further_tasks() -> None:
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
async def test_completion_with_lease_request_leases_the_next_stage_first() -> None:
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


async def test_completion_with_lease_request_returns_no_leases_if_none_follow() -> None:
    async with dispatching() as (dispatcher, _):
        await submit(dispatcher)
        (encode,) = await granted(dispatcher)
        reply = await dispatcher.answer(PEER, asking_on(encode))
        assert isinstance(reply, LeasesGranted)
        (denoise,) = reply.leases
        assert await dispatcher.answer(PEER, asking_on(denoise)) == LeasesGranted((), {})  # it decodes nothing
        assert await dispatcher.answer(PEER, asking_on(denoise)) == LeasesGranted((), {})


async def test_rejected_completion_leases_no_further_task() -> None:
    async with dispatching() as (dispatcher, _):
        first, second = await submit(dispatcher), await submit(dispatcher)
        (lease,) = await granted(dispatcher)
        await dispatcher.scheduler.cancel(first)
        assert isinstance(await dispatcher.answer(PEER, asking_on(lease)), Rejected)
        assert (await dispatcher.scheduler.queue.load(second)).running == ()
        assert [lease.task.request for lease in await granted(dispatcher)] == [second]


async def test_undelivered_lease_granted_with_a_completion_is_requeued() -> None:
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
async def test_less_loaded_waiting_worker_gets_the_next_stage_over_its_producer() -> None:
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
async def test_round_robin_serves_the_waiting_worker_before_the_producer() -> None:
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
