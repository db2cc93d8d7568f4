"""The scheduler over the memory queue: what it accepts, hands on, ends and refuses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE, Racing, params
from tools.asking import asking
from unfuse.core.errors import LeaseLost, NotFound, Overloaded, TransientError
from unfuse.core.messages import CheckpointSaved, TaskCompleted, TaskFailed, WorkerInfo
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Event, ResultFile, Timings
from unfuse.core.task import Lease
from unfuse.core.worker_status import WorkerStatus
from unfuse.queues.base import MAX_REFUSALS, QueueLimits, RequestFilter
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.lifecycle import MAX_HAND_BACK_WORKERS, UNLIMITED_HAND_BACKS
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import count_waiting, lease_request
from unfuse.testing.virtual_time import VirtualClock, in_virtual_time

WORKER = "worker-1"


def info(identity: str, *pools: str) -> WorkerInfo:
    return WorkerInfo(identity, "node-1", "all", pools, 1, f"unix:@{identity}", 1 << 20)


def output(lease: Lease, owner: str = WORKER) -> ObjectRef:
    task = lease.task
    return ObjectRef(
        f"{task.stage}-{task.attempt}", owner, "node-1", task.request, task.stage, task.attempt, 1, 0, (), (), b"", 0.0
    )


def done(lease: Lease) -> TaskCompleted:
    results = (ResultFile(int(lease.task.params.get("index") or 0), "image/png", 3, "0" * 64),)
    return (
        TaskCompleted(lease.claim, None, results, Timings())
        if lease.task.planned.final
        else TaskCompleted(lease.claim, output(lease), (), Timings())
    )


@asynccontextmanager
async def scheduling(**options: object) -> AsyncIterator[tuple[Scheduler, ManualClock]]:
    clock = ManualClock()
    scheduler = Scheduler(MemoryQueue(clock), specs=[CARD], clock=clock, **options)  # type: ignore[arg-type]
    await scheduler.start()
    try:
        yield scheduler, clock
    finally:
        await scheduler.close()
        await scheduler.queue.close()


async def take(scheduler: Scheduler, *pools: str, slots: int = 1) -> list[Lease]:
    return await scheduler.queue.lease(
        WORKER, lease_request(*(pools or (ENCODE, DENOISE, DECODE)), slots=slots), scheduler.lease_ttl
    )


async def pass_by(scheduler: Scheduler, clock: ManualClock, seconds: float) -> None:
    """Let time pass no faster than leases are looked after."""
    await scheduler.queue.sweep_expired(scheduler.lease_ttl)
    for _ in range(10):
        clock.advance(seconds / 10)
        await scheduler.queue.sweep_expired(scheduler.lease_ttl)


async def run_to_the_end(scheduler: Scheduler) -> list[str]:
    """Do whatever there is to do; the stages in the order in which they ran."""
    ran = []
    while leases := await take(scheduler):
        ran.append(leases[0].task.stage)
        await scheduler.complete(done(leases[0]), WORKER)
    return ran


async def test_request_runs_its_stages_and_completes_with_results() -> None:
    async with scheduling() as (scheduler, _):
        record = await scheduler.submit(*asking(CARD, params()))
        assert await run_to_the_end(scheduler) == ["text_encode", "denoise.0", "vae_decode.0"]
        context = (await scheduler.queue.load(record.context.id)).context
        assert (context.status, [file.index for file in context.result]) == ("completed", [0])


async def test_n_images_share_one_encoding_and_have_consecutive_seeds() -> None:
    async with scheduling() as (scheduler, _):
        record = await scheduler.submit(*asking(CARD, params(seed=40), n=3))
        (encode,) = await take(scheduler)
        await scheduler.complete(done(encode), WORKER)
        denoise = await take(scheduler, DENOISE, slots=9)
        assert [lease.task.params["seed"] for lease in denoise] == [40, 41, 42]
        assert {lease.task.inputs[0].id for lease in denoise} == {"text_encode-1"}
        for lease in reversed(denoise):
            await scheduler.complete(done(lease), WORKER)
        await run_to_the_end(scheduler)
        context = (await scheduler.queue.load(record.context.id)).context
        assert [file.index for file in context.result] == [0, 1, 2]


async def test_task_has_the_size_of_its_output() -> None:
    async with scheduling() as (scheduler, _):
        await scheduler.submit(*asking(CARD, params()))
        (encode,) = await take(scheduler)
        await scheduler.complete(done(encode), WORKER)
        (denoise,) = await take(scheduler)
        assert (encode.task.planned.output_size, denoise.task.planned.output_size) == (100, 64 * 64 // 2)


async def test_repeated_idempotency_key_returns_the_first_request() -> None:
    async with scheduling() as (scheduler, _):
        first = await scheduler.submit(*asking(CARD, params(), idempotency_key="k"))
        second = await scheduler.submit(*asking(CARD, params(), idempotency_key="k"))
        other = await scheduler.submit(*asking(CARD, params(), idempotency_key="k", tenant="somebody"))
        assert second.context.id == first.context.id != other.context.id
        assert await count_waiting(scheduler.queue, ENCODE) == 2


async def test_submit_beyond_max_active_or_while_draining_raises_overloaded() -> None:
    async with scheduling(limits=QueueLimits(max_active=1)) as (scheduler, _):
        await scheduler.submit(*asking(CARD, params()))
        with pytest.raises(Overloaded):
            await scheduler.submit(*asking(CARD, params()))
        await run_to_the_end(scheduler)
        await scheduler.submit(*asking(CARD, params()))
        scheduler.draining = True
        with pytest.raises(Overloaded, match="shutting down"):
            await scheduler.submit(*asking(CARD, params()))


async def test_cancel_is_idempotent_and_fences_running_tasks() -> None:
    async with scheduling() as (scheduler, _):
        record = await scheduler.submit(*asking(CARD, params()))
        (lease,) = await take(scheduler)
        first = await scheduler.cancel(record.context.id)
        again = await scheduler.cancel(record.context.id)
        assert first.context == again.context
        assert first.context.status == "cancelled"
        with pytest.raises(LeaseLost):
            await scheduler.complete(done(lease), WORKER)
        with pytest.raises(NotFound):
            await scheduler.cancel("req_unknown")


async def test_task_of_a_silent_worker_is_leased_to_another() -> None:
    async with scheduling(lease_ttl=5.0) as (scheduler, clock):
        await scheduler.submit(*asking(CARD, params()))
        (first,) = await take(scheduler)
        await pass_by(scheduler, clock, 5.1)
        (second,) = await scheduler.queue.lease("worker-2", lease_request(ENCODE), 5.0, wait=60.0)
        assert second.task.attempt == first.task.attempt + 1
        with pytest.raises(LeaseLost):
            await scheduler.complete(done(first), WORKER)
        await scheduler.complete(done(second), "worker-2")


async def test_repeated_completion_has_no_second_effect() -> None:
    async with scheduling() as (scheduler, _):
        await scheduler.submit(*asking(CARD, params()))
        (lease,) = await take(scheduler)
        first, _ = await scheduler.complete(done(lease), WORKER)
        assert (await scheduler.complete(done(lease), WORKER))[0].context == first.context
        assert await count_waiting(scheduler.queue, DENOISE) == 1


async def test_passed_deadline_expires_a_queued_request() -> None:
    async with scheduling() as (scheduler, clock):
        record = await scheduler.submit(*asking(CARD, params(), timeout=30))
        clock.advance(31)
        seen = [event.type async for event in scheduler.queue.watch(record.context.id)]
        context = (await scheduler.queue.load(record.context.id)).context
        assert (seen[-1], context.status) == ("failed", "expired")
        assert context.error is not None and context.error.stage == "text_encode"
        assert context.stages["text_encode"].timings.queued_s == pytest.approx(31, abs=0.1)
        assert await count_waiting(scheduler.queue, ENCODE) == 0


async def test_restarted_scheduler_enforces_earlier_deadlines() -> None:
    async with scheduling() as (scheduler, clock):
        record = await scheduler.submit(*asking(CARD, params(), timeout=30))
        await scheduler.close()
        clock.advance(31)
        heir = Scheduler(scheduler.queue, clock=clock)
        await heir.start()
        assert [event.type async for event in heir.queue.watch(record.context.id)][-1] == "failed"
        await heir.close()


@pytest.mark.parametrize("reason", sorted(UNLIMITED_HAND_BACKS))
async def test_hand_back_for_an_accepted_reason_is_not_charged(reason: str) -> None:
    async with scheduling() as (scheduler, _):
        record = await scheduler.submit(*asking(CARD, params()))
        for _ in range(10):
            (lease,) = await take(scheduler)
            await scheduler.fail(TaskFailed(lease.claim, "hand_back", "leaving", reason=reason), WORKER)
        context = (await scheduler.queue.load(record.context.id)).context
        assert (context.status, context.stages["text_encode"].failures) == ("queued", 0)
        with pytest.raises(LeaseLost):
            await scheduler.fail(TaskFailed(lease.claim, "hand_back", "again"), WORKER)


async def take_as(scheduler: Scheduler, worker: str) -> list[Lease]:
    return await scheduler.queue.lease(worker, lease_request(ENCODE, DENOISE, DECODE), scheduler.lease_ttl)


@given(
    st.lists(
        st.tuples(st.sampled_from("uvwxy"), st.sampled_from(["", "", "", "any", "drain", "full", "step"])), max_size=40
    )
)
@settings(deadline=None)
async def test_repeated_hand_backs_exclude_a_worker_and_then_fail_the_request(
    acts: list[tuple[str, str]],
) -> None:
    """Given workers that hand one task back in any order and for any reason, then one that did so MOST_RETURNS times
    without a reason that counts, and without a step, is not leased it again, and what GIVEN_UP workers gave up is dead;
    other requests are leased to all of them throughout.
    """
    async with scheduling() as (scheduler, _):
        request = (await scheduler.submit(*asking(CARD, params()))).context.id
        returned: Counter[str] = Counter()
        for worker, reason in acts:
            shunned = {name for name, times in returned.items() if times >= MAX_REFUSALS}
            leases = await take_as(scheduler, worker)
            assert len(leases) == (worker not in shunned and len(shunned) < MAX_HAND_BACK_WORKERS)
            for lease in leases:
                if reason == "step":
                    await scheduler.queue.progress(lease.claim, [Event("progress", step=1, steps=2)])
                elif reason not in UNLIMITED_HAND_BACKS:
                    returned[worker] += 1
                await scheduler.fail(TaskFailed(lease.claim, "hand_back", "no", reason=reason), worker)
            other = await scheduler.submit(*asking(CARD, params(), priority=-1))
            (lease,) = (
                await take_as(scheduler, worker)
                if worker in shunned or len(shunned) >= MAX_HAND_BACK_WORKERS
                else [None]
            )
            assert lease is None or lease.task.request == other.context.id
            await scheduler.cancel(other.context.id)
        context = (await scheduler.queue.load(request)).context
        over = sum(times >= MAX_REFUSALS for times in returned.values()) >= MAX_HAND_BACK_WORKERS
        assert (context.status, context.is_dead_letter) == (("failed", True) if over else ("queued", False))
        assert (context.error is not None and context.error.code) == (over and "handed_back")
        assert context.stages["text_encode"].failures == 0


async def test_retried_task_receives_its_newest_checkpoint() -> None:
    """Handed back or tried again, at its old place or at a new one; a first attempt has none, and is not looked up."""
    async with scheduling() as (scheduler, clock):
        await scheduler.submit(*asking(CARD, params()))
        (encode,) = await take(scheduler)
        await scheduler.complete(done(encode), WORKER)
        (denoise,) = await take(scheduler)
        assert await scheduler.add_resume_data(denoise) is denoise
        for step, end in ((10, "hand_back"), (20, "transient"), (30, "hand_back")):
            ref = msgspec.structs.replace(output(denoise), id=f"at {step}")
            await scheduler.save_checkpoint(CheckpointSaved(denoise.claim, ref, step), WORKER)
            await scheduler.fail(TaskFailed(denoise.claim, end, "elsewhere"), WORKER)  # type: ignore[arg-type]
            clock.advance(2)
            (denoise,) = await take(scheduler)
            denoise = await scheduler.add_resume_data(denoise)
            assert denoise.checkpoint == ref
            assert WORKER in {ref.owner for ref in denoise.input_objects}
        stale = msgspec.structs.replace(denoise.claim, attempt=1)
        with pytest.raises(LeaseLost):
            await scheduler.save_checkpoint(
                CheckpointSaved(stale, msgspec.structs.replace(output(denoise), attempt=1), 40), WORKER
            )
        await scheduler.complete(done(denoise), WORKER)
        assert await run_to_the_end(scheduler) == ["vae_decode.0"]


async def test_lost_object_is_recomputed_and_the_request_completes() -> None:
    async with scheduling() as (scheduler, _):
        record = await scheduler.submit(*asking(CARD, params()))
        (encode,) = await take(scheduler)
        await scheduler.complete(done(encode), WORKER)
        (denoise,) = await take(scheduler)
        lost = TaskFailed(denoise.claim, "object_lost", "the owner is gone", object_id="text_encode-1")
        await scheduler.fail(lost, WORKER)
        assert await run_to_the_end(scheduler) == ["text_encode", "denoise.0", "vae_decode.0"]
        assert (await scheduler.queue.load(record.context.id)).context.status == "completed"


async def test_conflicting_commits_are_retried_until_applied() -> None:
    clock = ManualClock()
    scheduler = Scheduler(Racing(clock), specs=[CARD], clock=clock)
    record = await scheduler.submit(*asking(CARD, params(), n=8))
    (encode,) = await take(scheduler)
    await scheduler.complete(done(encode), WORKER)
    denoise = await take(scheduler, DENOISE, slots=8)
    await asyncio.gather(*(scheduler.complete(done(lease), WORKER) for lease in denoise))
    context = (await scheduler.queue.load(record.context.id)).context
    assert context.version == 9
    assert all(context.stages[f"denoise.{index}"].status == "done" for index in range(8))


async def test_unavailable_pools_lists_pools_without_a_live_worker() -> None:
    async with scheduling(lease_ttl=5.0) as (scheduler, clock):
        assert await scheduler.registry.unavailable_pools() == {CARD.name: sorted([ENCODE, DENOISE, DECODE])}
        await scheduler.queue.register(info("a", ENCODE, DENOISE), [CARD])
        await scheduler.queue.register(info("b", DECODE), [CARD])
        assert await scheduler.registry.unavailable_pools() == {}
        clock.advance(4)
        await scheduler.queue.register(info("a", ENCODE, DENOISE), [CARD])
        clock.advance(2)
        assert await scheduler.registry.unavailable_pools() == {CARD.name: [DECODE]}


async def test_owners_returns_the_registered_workers_of_the_inputs() -> None:
    async with scheduling() as (scheduler, _):
        await scheduler.queue.register(info(WORKER, ENCODE), [CARD])
        await scheduler.submit(*asking(CARD, params()))
        (encode,) = await take(scheduler)
        assert await scheduler.registry.owners([encode]) == {}
        await scheduler.complete(done(encode), WORKER)
        (denoise,) = await take(scheduler)
        assert await scheduler.registry.owners([denoise]) == {WORKER: info(WORKER, ENCODE)}


async def test_releasable_lists_ended_and_unknown_requests() -> None:
    async with scheduling() as (scheduler, _):
        running = (await scheduler.submit(*asking(CARD, params()))).context.id
        ended = (await scheduler.submit(*asking(CARD, params()))).context.id
        await scheduler.cancel(ended)
        with patch.object(scheduler.queue, "load", side_effect=AssertionError("a record was loaded")):
            assert await scheduler.releasable([running, ended, "req_forgotten"]) == [ended, "req_forgotten"]


async def test_retrying_a_dead_letter_creates_a_new_request_and_clears_it() -> None:
    async with scheduling() as (scheduler, _):
        old = (
            await scheduler.submit(*asking(CARD, params(), n=2, tenant="t", priority=3, metadata={"a": "b"}))
        ).context
        for _ in range(2):
            (lease,) = await take(scheduler)
            await scheduler.fail(TaskFailed(lease.claim, "crash", "bang", "SIGSEGV"), WORKER)
        assert (await scheduler.queue.load(old.id)).context.is_dead_letter
        new = (await scheduler.retry(old.id)).context
        assert new.id != old.id
        assert (new.request.params, new.plan) == (old.request.params, old.plan)
        assert (new.caller.tenant, new.delivery.priority) == ("t", 3)
        assert new.delivery.metadata == {"a": "b", "retry_of": old.id}
        assert (new.caller.idempotency_key, new.deadline) == ("", None)
        assert not (await scheduler.queue.load(old.id)).context.is_dead_letter
        with pytest.raises(NotFound, match="not a dead letter"):
            await scheduler.retry(old.id)
        await run_to_the_end(scheduler)
        assert (await scheduler.queue.load(new.id)).context.status == "completed"


async def test_retry_of_a_dead_letter_accepts_a_given_request_id() -> None:
    async with scheduling() as (scheduler, _):
        dead = (await scheduler.submit(*asking(CARD, params(), id="video_1"))).context.id
        for _ in range(2):
            (lease,) = await take(scheduler)
            await scheduler.fail(TaskFailed(lease.claim, "crash", "bang"), WORKER)
        assert (await scheduler.retry(dead, id="video_2")).context.id == "video_2"


async def test_deadline_of_a_dead_scheduler_is_enforced_by_another() -> None:
    async with scheduling() as (dead, clock):
        other = Scheduler(dead.queue, clock=clock)
        record = await dead.submit(*asking(CARD, params(), timeout=30))
        await dead.close()
        clock.advance(31)
        await other.maintenance.requests()
        assert [event.type async for event in other.queue.watch(record.context.id)][-1] == "failed"
        await other.close()


class Away(MemoryQueue):
    """A queue whose server is away as long as `away`."""

    unreachable_parts = False

    async def sweep_expired(self, ttl: float) -> list[Lease]:
        if self.unreachable_parts:
            raise TransientError("the queue does not answer")
        return await super().sweep_expired(ttl)


@in_virtual_time
async def test_lease_sweep_resumes_after_a_queue_outage() -> None:
    clock = VirtualClock()
    queue = Away(clock)
    scheduler = Scheduler(queue, clock=clock, lease_ttl=5.0)
    queue.unreachable_parts = True
    await scheduler.start()
    await scheduler.submit(*asking(CARD, params()))
    await take(scheduler)
    await asyncio.sleep(20)
    queue.unreachable_parts = False
    (again,) = await queue.lease("worker-2", lease_request(ENCODE), 5.0, wait=60.0)
    assert again.task.attempt == 2
    await scheduler.close()


async def test_long_silent_worker_is_removed_from_the_registry() -> None:
    async with scheduling(lease_ttl=5.0) as (scheduler, clock):
        await scheduler.queue.register(info("gone", ENCODE), [CARD])
        clock.advance(60)
        await scheduler.queue.register(info("here", ENCODE), [CARD])
        clock.advance(60)
        await scheduler.maintenance.workers()
        assert [member.info.id for member in await scheduler.queue.workers()] == ["gone", "here"]
        clock.advance(6)
        await scheduler.maintenance.workers()
        assert [member.info.id for member in await scheduler.queue.workers()] == ["here"]


async def test_time_limit_is_at_least_five_times_the_predicted_time() -> None:
    async with scheduling() as (scheduler, clock):
        unknown = await scheduler.submit(*asking(CARD, params(), time_limit_s=1.0))
        assert (
            unknown.context.request.time_limit_s is None
        )  # nothing was measured: a slow machine's first picture is not ended
        while leases := await take(scheduler):
            timings = Timings(run_s=2.0)
            await scheduler.complete(msgspec.structs.replace(done(leases[0]), timings=timings), WORKER)
        assert (
            await scheduler.submit(*asking(CARD, params(), time_limit_s=1.0))
        ).context.request.time_limit_s == pytest.approx(30.0)
        assert (
            await scheduler.submit(*asking(CARD, params(), time_limit_s=300.0))
        ).context.request.time_limit_s == 300.0
        assert (await scheduler.submit(*asking(CARD, params()))).context.request.time_limit_s is None

        await take(scheduler)
        await pass_by(scheduler, clock, 31.0)
        await scheduler.maintenance.requests()

        statuses = [record.context.status for record in await scheduler.queue.list(RequestFilter(), limit=9)]
        assert statuses == ["queued", "queued", "expired", "completed"]


def unknown(lease: Lease, error: str = "AssertionError") -> TaskFailed:
    return TaskFailed(lease.claim, "transient", f"{error}: /srv/models/secret/x.bin", "Traceback", error=error)


async def test_unknown_error_is_retried_once_on_another_worker() -> None:
    async with scheduling() as (scheduler, _):
        for worker in ("a", "b"):
            await scheduler.queue.register(info(worker, ENCODE, DENOISE, DECODE))
        record = await scheduler.submit(*asking(CARD, params()))
        (first,) = await take_as(scheduler, "a")
        await scheduler.fail(unknown(first), "a")
        assert await take_as(scheduler, "a") == []
        (second,) = await take_as(scheduler, "b")
        await scheduler.fail(unknown(second), "b")
        context = (await scheduler.queue.load(record.context.id)).context
        assert context.error is not None
        assert (context.status, context.is_dead_letter, context.error.code) == ("failed", True, "model_error")
        assert context.error.message == "failed twice, on a and b: AssertionError: …/x.bin"
        assert context.stages["text_encode"].attempt == 2


async def test_unknown_error_is_retried_on_the_same_worker_if_it_is_the_only_one() -> None:
    async with scheduling() as (scheduler, _):
        await scheduler.queue.register(info(WORKER, ENCODE, DENOISE, DECODE))
        record = await scheduler.submit(*asking(CARD, params()))
        for _ in range(2):
            (lease,) = await take(scheduler)
            await scheduler.fail(unknown(lease), WORKER)
        context = (await scheduler.queue.load(record.context.id)).context
        assert context.error is not None
        assert context.error.message.startswith(f"failed twice, on {WORKER} and {WORKER}: ")


async def test_request_completes_if_the_retry_on_another_worker_succeeds() -> None:
    async with scheduling() as (scheduler, _):
        for worker in ("a", WORKER):
            await scheduler.queue.register(info(worker, ENCODE, DENOISE, DECODE))
        record = await scheduler.submit(*asking(CARD, params()))
        (lease,) = await take_as(scheduler, "a")
        await scheduler.fail(unknown(lease), "a")
        assert await run_to_the_end(scheduler) == ["text_encode", "denoise.0", "vae_decode.0"]
        assert (await scheduler.queue.load(record.context.id)).status == "completed"


async def test_alternating_error_types_use_the_failure_budget() -> None:
    async with scheduling() as (scheduler, _):
        record = await scheduler.submit(*asking(CARD, params()))
        for error in ("KeyError", "ValueError", "KeyError", "ValueError"):
            (lease,) = await take(scheduler)
            await scheduler.fail(unknown(lease, error), WORKER)
        context = (await scheduler.queue.load(record.context.id)).context
        assert context.error is not None
        assert (context.error.code, context.is_dead_letter) == ("stage_failed", True)
        assert context.error.message.endswith("(failed 4 times)")


async def test_avoided_worker_is_leased_the_task_after_the_others_unregister() -> None:
    """Given a task that avoids one of two workers, when the other one leaves, then the first tries it again."""
    async with scheduling() as (scheduler, _):
        for worker in ("a", "b"):
            await scheduler.queue.register(info(worker, ENCODE, DENOISE, DECODE))
        record = await scheduler.submit(*asking(CARD, params()))
        (lease,) = await take_as(scheduler, "a")
        await scheduler.fail(unknown(lease), "a")
        await scheduler.maintenance.requests()
        assert await take_as(scheduler, "a") == []
        await scheduler.queue.unregister("b")
        await scheduler.maintenance.workers()
        await scheduler.maintenance.requests()
        (again,) = await take_as(scheduler, "a")
        assert again.task.attempt == 2
        await scheduler.fail(unknown(again), "a")
        error = (await scheduler.queue.load(record.context.id)).context.error
        assert error is not None and error.code == "model_error"


async def test_worker_with_another_model_loaded_is_no_retry_alternative() -> None:
    """Given two workers of which one has another model loaded, then the one that failed tries it again at once."""
    async with scheduling() as (scheduler, _):
        pools = (ENCODE, DENOISE, DECODE)
        await scheduler.queue.register(info("a", *pools))
        swapping = msgspec.structs.replace(
            info("b", *pools), swappable_models={"this": pools, "that": ()}, status=WorkerStatus(loaded="that")
        )
        await scheduler.queue.register(swapping)
        await scheduler.submit(*asking(CARD, params()))
        (lease,) = await take_as(scheduler, "a")
        await scheduler.fail(unknown(lease), "a")
        (again,) = await take_as(scheduler, "a")
        assert (again.task.attempt, again.task.avoid_worker) == (2, "")
