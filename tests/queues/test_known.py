"""What a queue in Redis remembers of its records: some of them, until something else happens, and never the truth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from tests.queues.conftest import Server
from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE, params
from tests.scheduler.test_scheduler import WORKER, done
from tools.asking import asking
from unfuse.core.errors import LeaseLost
from unfuse.core.request import Change, Delivery, RequestRecord, RunningStage
from unfuse.core.task import Claim, Lease
from unfuse.queues.memory import MemoryQueue
from unfuse.queues.redis import RedisQueue
from unfuse.queues.script import CACHED_RECORD_S, MAX_CACHED_RECORDS, RecordCache
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import lease_request, request, task

LEASE = Lease(task("a"), "w", b"t" * 16, 5.0)


class TestKnownRecords:
    def test_leased_task_is_running_in_the_cached_record(self) -> None:
        known = RecordCache(ManualClock())
        known.put(RequestRecord(request("a"), position=3))
        assert known.of(LEASE.claim) is None
        known.leased([LEASE], since=7.0)
        record = known.of(LEASE.claim)
        assert record is not None and record.position is None
        assert [(run.stage, run.attempt, run.worker, run.since) for run in record.running] == [("s", 1, "w", 7.0)]

    def test_cached_record_is_returned_only_for_the_current_claim(self) -> None:
        known = RecordCache(ManualClock())
        known.put(RequestRecord(request("a")))
        known.leased([LEASE], since=7.0)
        for other in ({"attempt": 2}, {"stage": "t"}, {"request": "b"}):
            claim = msgspec.structs.replace(LEASE.claim, **other)
            assert known.of(claim) is None
        assert known.of(LEASE.claim) is not None

    def test_cached_record_expires(self) -> None:
        """Given a stage that runs, then how long it has run grows with time, and after a while the queue is asked."""
        clock = ManualClock()
        known = RecordCache(clock)
        known.put(RequestRecord(request("a")))
        known.leased([LEASE], since=7.0)
        clock.advance(CACHED_RECORD_S)
        record = known.of(LEASE.claim)
        assert record is not None and [run.ran_s for run in record.running] == [CACHED_RECORD_S]
        clock.advance(0.5)
        assert known.of(LEASE.claim) is None

    def test_ended_requests_are_not_cached(self) -> None:
        known = RecordCache(ManualClock())
        known.put(RequestRecord(request("a")))
        known.leased([LEASE], since=7.0)
        for number in range(MAX_CACHED_RECORDS):
            known.put(RequestRecord(request(f"r{number}", status="cancelled")))
        assert known.of(LEASE.claim) is not None
        known.put(RequestRecord(request("a", status="cancelled"), known.of(LEASE.claim).running))  # type: ignore[union-attr]
        assert known.of(LEASE.claim) is None

    def test_cache_evicts_least_recently_stored_records(self) -> None:
        known = RecordCache(ManualClock())
        names = [f"r{number}" for number in range(MAX_CACHED_RECORDS + 2)]
        for name in [*names[:MAX_CACHED_RECORDS], names[0], *names[MAX_CACHED_RECORDS:]]:
            known.put(RequestRecord(request(name)))
        leases = {name: Lease(task(name), "w", b"t" * 16, 5.0) for name in names}
        known.leased(leases.values(), since=7.0)
        assert [name for name in names if known.of(leases[name].claim) is None] == names[1:3]


class Counting(RedisQueue):
    """A queue that counts what it asks the server for."""

    asked: list[str]

    async def _execute(self, calls):  # type: ignore[no-untyped-def]
        self.asked = [*getattr(self, "asked", []), *(verb for verb, _ in calls)]
        return await super()._execute(calls)


@asynccontextmanager
async def schedulers(server: Server) -> AsyncIterator[tuple[Scheduler, Scheduler]]:
    """Two over one server."""
    clock = ManualClock()
    both = [Scheduler(Counting.open(server.url, clock), specs=[CARD], clock=clock) for _ in range(2)]
    try:
        yield both[0], both[1]
    finally:
        for scheduler in both:
            await scheduler.queue.close()


async def take(scheduler: Scheduler, slots: int = 1) -> list[Lease]:
    return await scheduler.queue.lease(WORKER, lease_request(ENCODE, DENOISE, DECODE, slots=slots), scheduler.lease_ttl)


class TestTwoSchedulersOverOneServer:
    async def test_scheduler_completes_its_own_leases_without_loading_the_record(self, server: Server) -> None:
        async with schedulers(server) as (one, _):
            record = await one.submit(*asking(CARD, params()))
            while leases := await take(one):
                record, _leases = await one.complete(done(leases[0]), WORKER)
            assert record.context.status == "completed"
            assert isinstance(one.queue, Counting) and "load" not in one.queue.asked

    async def test_completion_by_cached_record_equals_completion_by_loaded_one(self, server: Server) -> None:
        """Timings among it: when the lease was given is known from the lease."""
        found = []
        for forgets in (False, True):
            server.client.flushall()
            async with schedulers(server) as (one, _):
                clock = one.clock
                assert isinstance(clock, ManualClock)
                await one.submit(*asking(CARD, params(), id="img_1"))
                while leases := await take(one):
                    await one.queue.sweep_expired(one.lease_ttl)
                    clock.advance(2.0)
                    if forgets:
                        one.queue._known = RecordCache(clock)  # type: ignore[attr-defined]
                    record, _leases = await one.complete(done(leases[0]), WORKER)
                    clock.advance(1.0)
                plain = {name: msgspec.structs.replace(s, token=b"") for name, s in record.context.stages.items()}
                found.append(msgspec.structs.replace(record.context, stages=plain, created_at=0.0, completed_at=0.0))
        assert found[0] == found[1]

    async def test_task_leased_by_one_scheduler_can_be_completed_by_another(self, server: Server) -> None:
        async with schedulers(server) as (one, other):
            await one.submit(*asking(CARD, params()))
            turns = [one, other, one]
            for turn, scheduler in enumerate(turns):
                (lease,) = await take(scheduler)
                record, _ = await turns[turn - 1].complete(done(lease), WORKER)
            assert record.context.status == "completed"

    async def test_outdated_cached_record_does_not_overwrite_newer_changes(self, server: Server) -> None:
        """Given a record that is known and out of date, then the other's change stays, and this one follows it."""
        async with schedulers(server) as (one, other):
            await one.submit(*asking(CARD, params(), id="img_1"))
            (lease,) = await take(one)
            known = one.queue.cached_record(lease.claim)
            await other._apply("img_1", lambda record, _: renamed(record))
            assert one.queue.cached_record(lease.claim) == known
            record, _ = await one.complete(done(lease), WORKER)
            assert (record.context.delivery.metadata, record.context.version) == ({"by": "other"}, 2)
            assert record.context.stages[lease.task.stage].status == "done"

    async def test_completion_is_rejected_after_another_scheduler_ended_the_lease(self, server: Server) -> None:
        """A late answer is refused, and a repeat is answered as the first was, whoever is asked."""
        async with schedulers(server) as (one, other):
            for name, end in (("img_1", other.cancel), ("img_2", other.queue.drop)):
                await one.submit(*asking(CARD, params(), id=name))
                (lease,) = await take(one)
                await other.cancel(name)
                await end(name)
                with pytest.raises((LeaseLost, Exception), match="not current|does not exist|not leased|has its lease"):
                    await one.complete(done(lease), WORKER)
            await one.submit(*asking(CARD, params(), id="img_3"))
            (lease,) = await take(one)
            first, _ = await other.complete(done(lease), WORKER)
            again, _ = await one.complete(done(lease), WORKER)
            assert again.context == first.context

    async def test_cached_record_does_not_let_another_worker_complete(self, server: Server) -> None:
        async with schedulers(server) as (one, _):
            await one.submit(*asking(CARD, params()))
            (lease,) = await take(one)
            with pytest.raises(LeaseLost):
                await one.complete(done(lease), "worker-2")
            guessed = msgspec.structs.replace(done(lease), claim=Claim(*lease.claim.key, lease.task.attempt, b"g" * 16))
            with pytest.raises(LeaseLost):
                await one.complete(guessed, WORKER)
            record, _ = await one.complete(done(lease), WORKER)
            assert record.context.version == 1

    async def test_concurrent_requests_complete_across_two_schedulers(self, server: Server) -> None:
        """Each request of three stages completes once, wherever its leases and its outcomes went."""
        async with schedulers(server) as both:
            names = [f"img_{number}" for number in range(12)]
            await asyncio.gather(
                *(both[n % 2].submit(*asking(CARD, params(), id=name)) for n, name in enumerate(names))
            )
            while leases := [lease for scheduler in both for lease in await take(scheduler, slots=8)]:
                await asyncio.gather(
                    *(both[(n // 2) % 2].complete(done(lease), WORKER) for n, lease in enumerate(leases))
                )
            records = [await both[0].queue.load(name) for name in names]
            assert {record.context.status for record in records} == {"completed"}


class Mistaken(MemoryQueue):
    """A queue that takes another worker for the one to whom a task is leased."""

    def cached_record(self, claim: Claim) -> RequestRecord | None:
        record = self._record(self._entry(claim.request))
        return msgspec.structs.replace(record, running=(RunningStage(claim.stage, claim.attempt, "another", 0.0),))


async def test_rejection_by_a_cached_record_is_rechecked_by_the_stored_one() -> None:
    clock = ManualClock()
    scheduler = Scheduler(Mistaken(clock), specs=[CARD], clock=clock)
    await scheduler.submit(*asking(CARD, params()))
    (lease,) = await take(scheduler)
    record, _ = await scheduler.complete(done(lease), WORKER)
    assert record.context.stages[lease.task.stage].status == "done"
    with pytest.raises(LeaseLost):
        await scheduler.complete(done(lease), "another")


def renamed(record: RequestRecord) -> Change:
    context = record.context
    return Change(
        msgspec.structs.replace(context, version=context.version + 1, delivery=Delivery(metadata={"by": "other"}))
    )
