"""Whatever happens to a request, in whatever order and at the same moment: it ends, once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import permutations

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from tests.core.graphs import object_for, pipelines
from tests.examples import examples
from tests.scheduler.model import CARD, Racing, params
from tests.scheduler.test_scheduler import done, take
from tools.asking import asking
from unfuse.core.errors import LeaseLost, NotFound
from unfuse.core.messages import OutputAnnounced, TaskCompleted, TaskFailed
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Pipeline
from unfuse.core.request import TERMINAL_EVENTS, Event, RequestContext, RequestRecord, ResultFile, Timings
from unfuse.core.task import Lease
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler import change_builder
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import count_waiting, lease_request

TTL = 15.0


async def events_of(scheduler: Scheduler, request: str) -> list[Event]:
    return [event async for event in scheduler.queue.watch(request)]


ENDS = ("complete", "fail", "crash", "expire", "cancel", "time out")


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    "order",
    [*permutations(ENDS, 2), *(pytest.param(order, marks=pytest.mark.nightly) for order in permutations(ENDS, 3))],
)
async def test_cancel_fail_expire_and_complete_end_a_request_once(order: tuple[str, ...], at_once: bool) -> None:
    clock = ManualClock()
    scheduler = Scheduler(Racing(clock), specs=[CARD], clock=clock)
    request = (await scheduler.submit(*asking(CARD, params()))).context.id
    for _ in range(2):
        (lease,) = await take(scheduler)
        await scheduler.complete(done(lease), lease.worker)
    (lease,) = await take(scheduler)
    acts: dict[str, Callable[[], Awaitable[object]]] = {
        "complete": lambda: scheduler.complete(done(lease), lease.worker),
        "fail": lambda: scheduler.fail(TaskFailed(lease.claim, "permanent", "no"), lease.worker),
        "crash": lambda: scheduler.fail(TaskFailed(lease.claim, "crash", "bang", had_companions=True), lease.worker),
        "expire": lambda: scheduler.maintenance.expire_lease(lease),
        "cancel": lambda: scheduler.cancel(request),
        "time out": lambda: scheduler.maintenance.expire_deadline(request),
    }
    if at_once:
        await asyncio.gather(*(acts[name]() for name in order), return_exceptions=True)
    else:
        for name in order:
            with suppress(LeaseLost):
                await acts[name]()
    await scheduler.cancel(request)
    assert [event.type in TERMINAL_EVENTS for event in await events_of(scheduler, request)].count(True) == 1
    assert await take(scheduler) == []


class Observed(Observer):
    """What an observer heard, by request."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def on_submitted(self, context: RequestContext) -> None:
        self.heard.append(("submitted", context.id))

    def on_ended(self, context: RequestContext) -> None:
        self.heard.append((context.status, context.id))

    def on_lease_expired(self, pool: str) -> None:
        self.heard.append(("expired", pool))


async def test_observers_receive_each_transition_once_across_schedulers() -> None:
    clock, observed = ManualClock(), Observed()
    first = Scheduler(Racing(clock), specs=[CARD], clock=clock)
    second = Scheduler(first.queue, specs=[CARD], clock=ManualClock(wall=clock.wall() + 0.001))
    for scheduler in (first, second):
        scheduler.observers.add(observed)
    context = (await first.submit(*asking(CARD, params(), idempotency_key="k"))).context
    await second.submit(*asking(CARD, params(), idempotency_key="k"))
    for _ in range(3):
        (lease,) = await take(first)
        await asyncio.gather(*(scheduler.complete(done(lease), lease.worker) for scheduler in (first, second)))
    await asyncio.gather(first.cancel(context.id), second.cancel(context.id))
    assert observed.heard == [("submitted", context.id), ("completed", context.id)]


async def test_observers_receive_an_expired_lease_once_across_schedulers() -> None:
    clock, observed = ManualClock(), Observed()
    first = Scheduler(Racing(clock), specs=[CARD], clock=clock)
    second = Scheduler(first.queue, specs=[CARD], clock=ManualClock(wall=clock.wall() + 0.001))
    for scheduler in (first, second):
        scheduler.observers.add(observed)
    await first.submit(*asking(CARD, params()))
    (lease,) = await take(first)
    await asyncio.gather(first.maintenance.expire_lease(lease), second.maintenance.expire_lease(lease))
    assert observed.heard[1:] == [("expired", lease.task.planned.pool)]


class Fate:
    """A scheduler over the memory queue, some requests, and everything that may become of their tasks."""

    def __init__(self, scheduler: Scheduler, pools: frozenset[str], clock: ManualClock, dice: random.Random) -> None:
        self.scheduler, self.pools, self.clock, self.dice = scheduler, pools, clock, dice
        self.leases: list[Lease] = []
        self.reported: list[Lease] = []

    async def step(self, trouble: float) -> None:
        worker = self.dice.choice(["w", "v"])
        wants = lease_request(*self.pools, slots=self.dice.randint(1, 3))
        self.leases += await self.scheduler.queue.lease(worker, wants, TTL)
        self.clock.advance(1)
        if not self.leases:
            return
        lease = self.leases.pop(self.dice.randrange(len(self.leases)))
        if self.reported and self.dice.random() < trouble:
            await self.act(self.dice.choice(self.reported), trouble)
        self.reported.append(lease)
        await self.act(lease, trouble)

    async def act(self, lease: Lease, trouble: float) -> None:
        acts = [self.fail, self.lose, self.expire, self.hand_back, self.impersonate, self.repeat, self.announce]
        act = self.dice.choice(acts) if self.dice.random() < trouble else self.complete
        with suppress(LeaseLost, NotFound):
            await act(lease)

    async def complete(self, lease: Lease) -> None:
        await self.report(lease, lease.worker)

    async def report(self, lease: Lease, worker: str) -> RequestRecord:
        task = lease.task
        index = task.params.get("index", 0)
        files = (ResultFile(int(str(index)), "image/png", 1, "h"),) if task.planned.final else ()
        output = None if task.planned.final else msgspec.structs.replace(object_for(task), owner=worker)
        wants = lease_request(*self.pools, slots=1) if self.dice.random() < 0.5 else None
        done = TaskCompleted(lease.claim, output, files, Timings(run_s=1.0))
        record, leases = await self.scheduler.complete(done, worker, wants)
        self.leases += leases
        return record

    async def fail(self, lease: Lease) -> None:
        kind = self.dice.choice(["transient", "crash", "permanent"])
        company = self.dice.random() < 0.5
        await self.scheduler.fail(TaskFailed(lease.claim, kind, "so", had_companions=company), lease.worker)

    async def lose(self, lease: Lease) -> None:
        lost = self.dice.choice(lease.task.inputs).id if lease.task.inputs else "unknown"
        await self.scheduler.fail(TaskFailed(lease.claim, "object_lost", "gone", object_id=lost), lease.worker)

    async def expire(self, lease: Lease) -> None:
        await self.scheduler.maintenance.expire_lease(lease)

    async def hand_back(self, lease: Lease) -> None:
        await self.scheduler.fail(TaskFailed(lease.claim, "hand_back", "leaving", reason="drain"), lease.worker)

    async def announce(self, lease: Lease) -> None:
        """It goes on, and its readers may be leased."""
        self.leases.append(lease)
        output = msgspec.structs.replace(object_for(lease.claim), owner=lease.worker)
        await self.scheduler.announce_output(OutputAnnounced(lease.claim, output), lease.worker)

    async def impersonate(self, lease: Lease) -> None:
        self.leases.append(lease)
        before = await self.scheduler.queue.load(lease.task.request)
        with pytest.raises(LeaseLost):
            await self.report(lease, "thief")
        assert (await self.scheduler.queue.load(lease.task.request)).context == before.context

    async def repeat(self, lease: Lease) -> None:
        first = await self.report(lease, lease.worker)
        assert (await self.report(lease, lease.worker)).context == first.context


@settings(deadline=None, max_examples=examples(40))
@given(
    pipelines(),
    st.integers(1, 3),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.2, 0.6]),
    st.integers(0, 40),
)
def test_every_request_ends_once_under_random_failures(
    pipeline: Pipeline, n: int, seed: int, trouble: float, cancel_at: int
) -> None:
    names = {stage.components[0] for stage in pipeline.stages}
    card = msgspec.structs.replace(
        CARD, pipeline=pipeline, weights=dict.fromkeys(names, "0" * 12), dtypes=dict.fromkeys(names, "float32")
    )
    asyncio.run(_live(card, n, random.Random(seed), trouble, cancel_at))


async def _live(card: ModelSpec, n: int, dice: random.Random, trouble: float, cancel_at: int) -> None:
    clock = ManualClock()
    scheduler = Scheduler(MemoryQueue(clock), clock=clock)
    pools = frozenset(card.pools().values())
    fate = Fate(scheduler, pools, clock, dice)
    requests = [(await scheduler.submit(*asking(card, params(), n=n))).context.id for _ in range(2)]
    for step in range(10_000):
        records = [await scheduler.queue.load(request) for request in requests]
        if all(record.context.is_over for record in records):
            break
        if step == cancel_at and trouble:
            await scheduler.cancel(requests[0])
        await fate.step(trouble)
    contexts = [(await scheduler.queue.load(request)).context for request in requests]
    assert all(context.is_over for context in contexts)
    assert trouble or all(context.status == "completed" for context in contexts)
    for request in requests:
        kinds = [event.type for event in await events_of(scheduler, request)]
        assert kinds[-1] in TERMINAL_EVENTS
        assert sum(kind in TERMINAL_EVENTS for kind in kinds) == 1
    assert [await count_waiting(scheduler.queue, pool) for pool in pools] == [0] * len(pools)
    assert not (await scheduler.queue.renew([lease.claim for lease in fate.leases + fate.reported], TTL)).renewed
    for context in contexts:
        assert all(
            getattr(state, name) <= most + 1
            for name, most in change_builder.BUDGETS.items()
            for state in context.stages.values()
        )
