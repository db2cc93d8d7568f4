"""Random histories: the lifecycle drives random graphs through the queue, beside an oracle made of one list."""

import asyncio
import math
import tempfile
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.core.graphs import object_for, pipelines, request_for
from tests.examples import examples
from unfuse.core.errors import LeaseLost
from unfuse.core.messages import TaskCompleted, TaskFailed
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import ExecutionPlan, Pipeline
from unfuse.core.request import Change, RequestContext, ResultFile, Timings
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import QueueBackend, QueueLimits
from unfuse.queues.memory import MemoryQueue
from unfuse.queues.sqlite import SqliteQueue
from unfuse.scheduler import deadlines, lifecycle
from unfuse.testing import ManualClock
from unfuse.testing.queue_samples import append, lease_request

POOLS = ("pool0", "pool1")
TTL = 10.0

T = TypeVar("T")


@dataclass
class Entry:
    """A task as the oracle remembers it: queued, or leased under a token."""

    task: Task
    arrival: int
    token: bytes | None = None
    expires: float = 0.0
    restored: bool = False

    def hand_back(self) -> None:
        """It stands where it stood, under the next attempt."""
        self.token, self.restored = None, False
        self.task = msgspec.structs.replace(self.task, attempt=self.task.attempt + 1)


class Oracle:
    """What a queue should do, said with one list that is searched and sorted every time."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.arrived = 0
        self.swept = -math.inf

    def push(self, task: Task) -> None:
        self.remove(task.key)
        self.entries.append(Entry(task, self.arrived))
        self.arrived += 1

    def remove(self, key: tuple[str, str]) -> None:
        self.entries = [entry for entry in self.entries if entry.task.key != key]

    def line(self, pools: tuple[str, ...], now: float) -> list[Entry]:
        free = [
            e for e in self.entries if e.token is None and e.task.planned.pool in pools and e.task.not_before <= now
        ]
        return sorted(free, key=lambda e: (-e.task.priority, e.task.order, e.arrival))

    def held(self, claim: Claim) -> Entry | None:
        for entry in self.entries:
            if (*entry.task.key, entry.task.attempt, entry.token) == (*claim.key, claim.attempt, claim.token):
                return entry
        return None

    def sweep(self, now: float) -> list[Entry]:
        """What has expired; after a gap everything first gets a full time."""
        leased = [entry for entry in self.entries if entry.token is not None]
        if now - self.swept > TTL / 2:
            for entry in leased:
                entry.expires = max(entry.expires, now + TTL)
        self.swept = now
        return [entry for entry in leased if entry.expires <= now]

    def apply(self, change: Change) -> None:
        for key in change.close + ((change.claim.key,) if change.claim else ()):
            self.remove(key)
        for task in change.push:
            self.push(task)
        if change.context.is_over:
            self.entries = [entry for entry in self.entries if entry.task.request != change.context.id]


def priced(context: RequestContext) -> RequestContext:
    """A request whose stages were predicted to take 0.1 s, 0.2 s and so on."""
    stages = [msgspec.structs.replace(stage, cost=n / 10) for n, stage in enumerate(context.plan.stages, 1)]
    return msgspec.structs.replace(context, plan=ExecutionPlan(tuple(stages)))


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.queue = self.opened()
        self.oracle = Oracle()
        self.contexts: dict[str, RequestContext] = {}
        self.leases: list[Lease] = []
        self.accepted: list[TaskCompleted] = []
        self.applied: Counter[tuple[str, str]] = Counter()
        self.lost: Counter[tuple[str, str]] = Counter()
        self.grown: dict[tuple[str, str], list[bytes]] = {}

    def opened(self) -> QueueBackend:
        return MemoryQueue(self.clock)

    def teardown(self) -> None:
        self.do(self.queue.close())
        self.loop.close()

    def now(self) -> float:
        return self.do(self.queue.now())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def commit(self, change: Change | None) -> None:
        """Commit on both sides; the version rises by one."""
        if change is None:
            return
        before = self.contexts[change.context.id]
        record = self.do(self.queue.commit(change))
        self.oracle.apply(change)
        assert not before.is_over
        assert record.context == change.context
        assert record.context.version == before.version + 1
        self.contexts[before.id] = record.context

    def live_lease(self, data: st.DataObject) -> Lease | None:
        """A lease that was granted at some time, and whether it is still held is the oracle's word."""
        lease = data.draw(st.sampled_from(self.leases))
        if self.oracle.held(lease.claim) is None:
            self.refused(lease)
            return None
        return lease

    def refused(self, lease: Lease) -> None:
        """Whatever a claim that is not held is used for, nothing happens."""
        context = self.contexts[lease.task.request]
        state = context.stages[lease.task.stage]
        done = TaskCompleted(lease.claim, None, (), Timings())
        if (state.status, state.attempt, state.token) == ("done", lease.task.attempt, lease.token):
            again = self.do(self.queue.commit(lifecycle.complete_stage(context, done, "w", 0.0)))
            assert again.context == context
            return
        with pytest.raises(LeaseLost):
            self.do(self.queue.commit(lifecycle.complete_stage(context, done, "w", 0.0)))
        assert not self.do(self.queue.hand_back(lease.claim))
        assert not self.do(self.queue.progress(lease.claim, []))
        assert not self.do(append(self.queue, lease.claim, 0, [b"by whom?"] * 9))
        assert self.do(self.queue.renew([lease.claim], TTL)).ended == (lease.claim,)

    @rule(pipeline=pipelines(), samples=st.integers(1, 2), priority=st.integers(-1, 1))
    def submit(self, pipeline: Pipeline, samples: int, priority: int) -> None:
        request = priced(request_for(pipeline, samples, id=f"request{len(self.contexts):03}", priority=priority))
        admitted = lifecycle.admit(request, self.clock.wall())
        limits = QueueLimits(max_active=10_000, max_queue=10_000)
        record = self.do(self.queue.submit(admitted.context, admitted.push, admitted.events, limits))
        for task in admitted.push:
            self.oracle.push(task)
        self.contexts[record.context.id] = record.context

    @rule(pools=st.lists(st.sampled_from(POOLS), min_size=1, unique=True).map(tuple), slots=st.integers(1, 4))
    def lease(self, pools: tuple[str, ...], slots: int) -> None:
        expected = self.oracle.line(pools, self.now())[:slots]
        leases = self.do(self.queue.lease("w", lease_request(*pools, slots=slots), TTL))
        assert [lease.task for lease in leases] == [entry.task for entry in expected]
        for lease, entry in zip(leases, expected, strict=True):
            entry.token, entry.expires = lease.token, lease.expires
            assert lease.recorded_deltas == len(self.grown.get(entry.task.key, []))
        self.leases += leases

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        if (lease := self.live_lease(data)) is None:
            return
        task = lease.task
        results = (ResultFile(task.params.get("index", 0), "image/png", 1, "hash"),) if task.planned.final else ()
        done = TaskCompleted(lease.claim, None if task.planned.final else object_for(task), results, Timings(run_s=1.0))
        self.applied[task.key] += 1
        self.commit(lifecycle.complete_stage(self.contexts[task.request], done, "w", self.clock.wall()))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), kind=st.sampled_from(["transient", "transient", "crash", "permanent"]))
    def fail(self, data: st.DataObject, kind: Any) -> None:
        if (lease := self.live_lease(data)) is not None:
            failed = TaskFailed(lease.claim, kind, "it went wrong")
            context = self.contexts[lease.task.request]
            self.commit(lifecycle.fail_stage(context, failed, "w", self.clock.wall(), self.now()))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def lose_an_input(self, data: st.DataObject) -> None:
        if (lease := self.live_lease(data)) is None or not lease.task.inputs:
            return
        ref: ObjectRef = data.draw(st.sampled_from(lease.task.inputs))
        context = self.contexts[lease.task.request]
        if context.stages[ref.stage].output == ref:
            self.lost[context.id, ref.stage] += 1
        failed = TaskFailed(lease.claim, "object_lost", "it is gone", object_id=ref.id)
        running = self.do(self.queue.load(context.id)).running
        self.commit(lifecycle.fail_stage(context, failed, "w", self.clock.wall(), self.now(), running))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        if (lease := self.live_lease(data)) is None:
            return
        entry = self.oracle.held(lease.claim)
        assert entry is not None
        assert self.do(self.queue.hand_back(lease.claim))
        entry.hand_back()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), behind=st.integers(0, 2), length=st.integers(0, 3))
    def grow(self, data: st.DataObject, behind: int, length: int) -> None:
        """As an attempt would that has heard of most of what is recorded, and makes other bytes."""
        if (lease := self.live_lease(data)) is None:
            return
        kept = self.grown.setdefault(lease.task.key, [])
        offset = max(0, len(kept) - behind)
        pieces = [b"%d of attempt %d" % (offset + piece, lease.task.attempt) for piece in range(length)]
        assert self.do(append(self.queue, lease.claim, offset, pieces))
        kept += pieces[len(kept) - offset :]

    @rule(seconds=st.sampled_from([0.3, 1.0, 4.0, TTL]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def sweep(self) -> None:
        late = self.do(self.queue.sweep_expired(TTL))
        entries = self.oracle.sweep(self.now())
        for entry in [entry for entry in entries if entry.restored]:
            entries.remove(entry)
            entry.hand_back()
        assert {lease.claim.key for lease in late} == {entry.task.key for entry in entries}
        for lease in late:
            context = self.contexts[lease.task.request]
            if not context.is_over:
                self.commit(lifecycle.expire_lease(context, lease, self.clock.wall()))

    @precondition(lambda self: self.contexts)
    @rule(data=st.data(), end=st.sampled_from([lifecycle.cancel, deadlines.expire_deadline]))
    def end(self, data: st.DataObject, end: Any) -> None:
        context = self.contexts[data.draw(st.sampled_from(sorted(self.contexts)))]
        self.commit(end(context, self.clock.wall()))

    @invariant()
    def both_hold_the_same_tasks(self) -> None:
        now = self.now()
        for pool in POOLS:
            line = self.oracle.line((pool,), now)
            assert list(self.do(self.queue.peek(pool, 10_000))) == [entry.task for entry in line]
            waiting = [
                entry for entry in self.oracle.entries if entry.token is None and entry.task.planned.pool == pool
            ]
            assert self.do(self.queue.stats([pool])).pools[pool].waiting == len(waiting)

    @invariant()
    def what_is_told_of_all_is_what_looking_at_each_would_find(self) -> None:
        """To the nanosecond, however often it was added and taken away."""
        stats = self.do(self.queue.stats(POOLS))
        active = [self.do(self.queue.load(id)).context for id, context in self.contexts.items() if not context.is_over]
        assert stats.active == len(active)
        for pool in POOLS:
            left = [
                Fraction(str(stage.cost))
                for context in active
                for stage in context.plan.stages
                if stage.pool == pool and context.stages[stage.name].status != "done"
            ]
            assert stats.pools[pool].left_s == float(sum(left))

    @invariant()
    def nothing_is_lost_and_nothing_is_there_twice(self) -> None:
        tasks = Counter(entry.task.key for entry in self.oracle.entries)
        assert not tasks or max(tasks.values()) == 1
        for context in self.contexts.values():
            record = self.do(self.queue.load(context.id))
            assert record.context == context
            leased = [e for e in self.oracle.entries if e.task.request == context.id and e.token is not None]
            assert {run.stage for run in record.running} == {entry.task.stage for entry in leased}
            queued = {(context.id, name) for name, state in context.stages.items() if state.status == "queued"}
            assert queued == {key for key in tasks if key[0] == context.id}
            assert bool(queued) != context.is_over

    @invariant()
    def what_has_grown_is_there(self) -> None:
        for (request, stage), pieces in self.grown.items():
            assert self.do(self.queue.read_deltas(request, stage)) == pieces

    @invariant()
    def every_effect_is_there_once(self) -> None:
        for context in self.contexts.values():
            for name, state in context.stages.items():
                key = context.id, name
                assert self.applied[key] <= 1 + self.lost[key]
                assert (state.status == "done") == (self.applied[key] == 1 + self.lost[key]) or context.is_over
            if context.status == "completed":
                finals = [stage for stage in context.plan.stages if stage.final]
                assert len(context.result) == len(finals)
                assert all(context.stages[stage.name].status == "done" for stage in finals)


class RestartedHistories(Histories):
    """The queue on disk, closed and opened again at any time."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        super().__init__()

    def opened(self) -> QueueBackend:
        return SqliteQueue(Path(self.folder.name) / "queue.db", self.clock)

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()

    @rule()
    def restart(self) -> None:
        """Nobody has swept since, so leases get a full time; one that nobody renews is handed back."""
        self.do(self.queue.close())
        self.queue = self.opened()
        self.oracle.swept = -math.inf
        for entry in self.oracle.entries:
            entry.restored = entry.token is not None


Histories.TestCase.settings = settings(
    max_examples=examples(20), stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestHistories = Histories.TestCase

RestartedHistories.TestCase.settings = settings(Histories.TestCase.settings, max_examples=examples(10))
TestRestartedHistories = RestartedHistories.TestCase
