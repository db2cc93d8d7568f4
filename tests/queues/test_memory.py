"""The memory backend: the suite, that the suite can fail, and what is particular to it."""

import asyncio
import math
from collections import OrderedDict
from importlib import import_module
from inspect import getmembers, iscoroutinefunction, signature
from pkgutil import iter_modules
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from unfuse import queues, testing
from unfuse.core.clock import SystemClock
from unfuse.core.errors import ConfigError
from unfuse.core.registry import resolve
from unfuse.core.request import Change, Event
from unfuse.core.task import Claim, Lease
from unfuse.queues.base import LeaseRequest, PoolOffer
from unfuse.queues.index import MAX_EVENTS, EventHistory, IndexEntry
from unfuse.queues.memory import MemoryQueue
from unfuse.queues.tasks import LeasedTask, Leases, QueuedTask
from unfuse.testing import ManualClock, check_queue
from unfuse.testing.queue_samples import (
    LIMITS,
    TTL,
    change,
    count_waiting,
    lease_all,
    lease_next,
    lease_request,
    object_ref,
    request,
    start_task,
    submit,
    task,
)
from unfuse.testing.queue_suite import RULES, Rule, check_rule


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def queue(clock: ManualClock) -> MemoryQueue:
    return MemoryQueue(clock)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
async def test_memory_queue_satisfies_each_queue_rule(rule: Rule, clock: ManualClock) -> None:
    await check_rule(rule, MemoryQueue(clock), clock)


async def test_memory_queue_passes_check_queue(clock: ManualClock) -> None:
    async def fresh() -> MemoryQueue:
        return MemoryQueue(clock)

    await check_queue(fresh, clock)


class TestTheSuiteCanFail:
    """A backend with one defect breaks the rule that speaks of it."""

    @staticmethod
    async def broken_rules(
        queue: type[MemoryQueue] = MemoryQueue, *, patience: float = 30.0, leases: type[Leases] = Leases
    ) -> set[str]:
        """The rules that a queue breaks which has these leases. One that hangs breaks a rule after `patience`
        seconds: few where many do, and else as many as a rule that looks through everything takes on a busy machine."""
        clock = ManualClock()

        async def fresh() -> MemoryQueue:
            with patch("unfuse.queues.memory.Leases", leases):
                return queue(clock)

        with patch("unfuse.testing.queue_suite.PATIENCE_S", patience), pytest.raises(ExceptionGroup) as failure:
            await check_queue(fresh, clock)
        return {error.__notes__[-1].split(":")[0].removeprefix("rule ") for error in failure.value.exceptions}

    async def test_suite_detects_unordered_leasing(self) -> None:
        class Unordered(MemoryQueue):
            def _put(self, queued: QueuedTask) -> None:
                rank = property(lambda queued: (0.0, 0.0, queued.arrival, queued))
                with patch.object(QueuedTask, "sort_key", rank):
                    super()._put(queued)

        broken = await self.broken_rules(Unordered, patience=2.0)
        assert {"a_higher_priority_is_leased_first", "a_lower_order_number_is_leased_first"} <= broken
        assert "equal_tasks_are_leased_in_order_of_arrival" not in broken

    async def test_suite_detects_unchecked_lease_tokens(self) -> None:
        class Trusting(Leases):
            def find(self, claim: Claim) -> LeasedTask | None:
                return self.get(claim.key)

        broken = await self.broken_rules(leases=Trusting)
        assert {"an_old_claim_is_refused", "progress_requires_a_lease"} <= broken

    async def test_suite_detects_partially_checked_lease_tokens(self) -> None:
        class Hurried(Leases):
            def find(self, claim: Claim) -> LeasedTask | None:
                held = self.get(claim.key)
                alike = held is not None and held.lease.token[:15] == claim.token[:15]
                return held if alike and held and held.lease.task.attempt == claim.attempt else None

        assert await self.broken_rules(leases=Hurried) == {"a_claim_must_match_in_every_field"}

    @pytest.mark.parametrize(
        ("ignored", "rules"),
        [
            ({"backpressure": {}}, {"a_full_pool_holds_back_its_feeders"}),
            (
                {"stage_depth": 0},
                {
                    "later_pools_are_leased_first",
                    "a_preference_does_not_cross_pools",
                    "a_task_that_does_not_fit_blocks_only_earlier_pools",
                    "a_pool_leaves_its_reserve_free",
                    "resources_are_counted_separately",
                },
            ),
        ],
    )
    async def test_suite_detects_ignored_fields_of_a_pool_offer(
        self, ignored: dict[str, object], rules: set[str]
    ) -> None:
        class Deaf(MemoryQueue):
            async def lease(self, worker: str, wanted: LeaseRequest, ttl: float, wait: float = 0.0) -> list[Lease]:
                replace = msgspec.structs.replace
                pools = {pool: replace(offer, **ignored) for pool, offer in wanted.pools.items()}
                return await super().lease(worker, replace(wanted, pools=pools), ttl, wait)

        assert await self.broken_rules(Deaf) == rules

    async def test_suite_detects_ignored_rank_of_waiting_callers(self) -> None:
        class Deaf(MemoryQueue):
            async def lease(self, worker: str, wanted: LeaseRequest, ttl: float, wait: float = 0.0) -> list[Lease]:
                return await super().lease(worker, msgspec.structs.replace(wanted, rank=0.0), ttl, wait)

        assert await self.broken_rules(Deaf, patience=2.0) == {"waiting_callers_are_served_by_rank"}

    @pytest.mark.parametrize("lacks", [set(), {"slots", "kv"}], ids=["none is counted", "all count as one"])
    async def test_suite_detects_resources_that_are_not_counted_separately(self, lacks: set[str]) -> None:
        lacking = PoolOffer.missing_resources

        def confused(offer: PoolOffer, needs: dict[str, int], used: dict[str, int]) -> set[str]:
            found = lacking(offer, needs, used)
            return lacks if "kv" in found else found

        with patch.object(PoolOffer, "missing_resources", confused):
            assert await self.broken_rules() == {"resources_are_counted_separately"}

    @pytest.mark.parametrize("swept", [-math.inf, math.inf])
    async def test_suite_detects_wrong_lease_extension_after_sweep_gaps(self, swept: float) -> None:
        class Blind(Leases):
            def expired(self, now: float, ttl: float) -> list[Lease]:
                self._swept = swept
                return super().expired(now, ttl)

        assert "a_gap_in_sweeping_extends_leases" in await self.broken_rules(leases=Blind)

    async def test_suite_detects_missing_wake_ups_of_unleased_pools(self) -> None:
        class Absent(MemoryQueue):
            def _claim(self, worker: str, wanted: LeaseRequest, ttl: float) -> list[Lease]:
                leases = super()._claim(worker, wanted, ttl)
                self._changed_pools = dict.fromkeys(lease.task.planned.pool for lease in leases)
                return leases

        broken = await self.broken_rules(Absent, patience=2.0)
        assert broken == {"no_caller_waits_while_a_task_is_available"}

    async def test_suite_detects_effects_of_a_rejected_commit(self) -> None:
        class Hasty(MemoryQueue):
            def _commit(self, change: Change) -> IndexEntry:
                for id, stage in change.close:
                    self._remove_task(self._requests[id], stage)
                return super()._commit(change)

        assert await self.broken_rules(Hasty) == {"a_refused_commit_has_no_effect"}

    async def test_suite_detects_missing_wake_ups(self) -> None:
        class Sleepy(MemoryQueue):
            def _wake_first(self, pool: str) -> None:
                pass

        broken = await self.broken_rules(Sleepy, patience=0.5)
        assert broken >= {
            "a_push_wakes_a_waiting_caller",
            "delays_and_returned_tasks_wake_callers",
            "each_push_wakes_one_caller",
        }

    async def test_suite_detects_leases_to_cancelled_callers(self) -> None:
        class Claiming(MemoryQueue):
            async def lease(self, *args: object, **kwargs: object) -> list[Lease]:
                return await asyncio.shield(super().lease(*args, **kwargs))  # type: ignore[arg-type]

        assert await self.broken_rules(Claiming, patience=2.0) == {"a_cancelled_caller_leases_nothing"}

    async def test_suite_detects_leases_that_end_without_a_commit(self) -> None:
        class Impatient(Leases):
            def expired(self, now: float, ttl: float) -> list[Lease]:
                late = super().expired(now, ttl)
                for lease in late:
                    self.end(lease.claim.key)
                return late

        assert "an_expired_lease_lasts_until_a_commit" in await self.broken_rules(leases=Impatient)

    async def test_suite_detects_an_unbounded_event_log(self) -> None:
        with patch("unfuse.queues.index.MAX_EVENTS", 10_000):
            assert await self.broken_rules() == {"old_progress_is_dropped_first"}


uses = st.lists(st.tuples(st.sampled_from("klmn"), st.integers(-1, 70), st.booleans()), max_size=60)


@settings(deadline=None)
@given(uses)
def test_encoding_cache_evicts_least_recently_used_entries(history: list[tuple[str, int, bool]]) -> None:
    """Beside an oracle: all that was kept in order of its last use, cut where the room of 100 ends."""

    async def live() -> None:
        queue, kept = MemoryQueue(ManualClock()), OrderedDict[str, int]()
        for key, nbytes, lost in history:
            if nbytes < 0 and lost:
                await queue.remove_encoding(key, key)
                kept.pop(key, None)
            elif nbytes < 0:
                await queue.find_encoding([key])
                kept.move_to_end(key) if key in kept else None
            else:
                await queue.put_encoding(key, object_ref(key, nbytes), 100)
                kept.pop(key, None)
                kept[key] = nbytes
                while sum(kept.values()) > 100:
                    kept.popitem(last=False)
            found = await queue.find_encoding("klmn", use=False)
            assert {key: ref.nbytes for key, ref in found.items()} == dict(kept)

    asyncio.run(live())


async def test_long_queue_preserves_order_and_positions(queue: MemoryQueue) -> None:
    """Given a long line, then places, withdrawals and leases are right at its head, middle and end."""
    limits = queues.base.QueueLimits(max_active=50_000, max_queue=50_000)
    for number in reversed(range(20_000)):
        await queue.submit(request(f"{number:05}"), [task(f"{number:05}", order=float(number))], [], limits)
    assert (await queue.load("10000")).position == 10_000
    await queue.commit(change(await queue.load("00001"), status="cancelled"))
    assert [lease.task.request for lease in await queue.lease("w", lease_request("p", slots=3), TTL)] == [
        "00000",
        "00002",
        "00003",
    ]
    assert (await queue.load("19999")).position == 19_995
    assert await count_waiting(queue, "p") == 19_996


async def test_system_clock_wakes_waiting_callers_on_time() -> None:
    """Given no manual clock, when a task's time comes or a wait ends, then the waiting caller is woken."""
    queue = MemoryQueue(SystemClock())
    await submit(queue, "a", not_before=await queue.now() + 0.05)
    (lease,) = await queue.lease("w", lease_request("p"), TTL, wait=30.0)
    assert lease.task.request == "a"
    assert await queue.lease("w", lease_request("p"), TTL, wait=0.01) == []
    await submit(queue, "b", not_before=await queue.now() + 1000)
    await queue.close()


async def test_closed_queue_leases_nothing(queue: MemoryQueue) -> None:
    await queue.close()
    assert await queue.lease("w", lease_request("p"), TTL, wait=60.0) == []


async def test_lease_call_with_zero_slots_returns_nothing(queue: MemoryQueue) -> None:
    assert await queue.lease("w", lease_request("p", slots=0), TTL, wait=60.0) == []
    await submit(queue, "a")
    assert await queue.lease("w", lease_request("p", slots=0), TTL, wait=60.0) == []
    assert await lease_all(queue) == ["a"]


async def test_oversized_urgent_task_blocks_tasks_of_other_pools(queue: MemoryQueue) -> None:
    """Given a large urgent task in one pool, then a small one of the other pool waits until it is gone."""
    await submit(queue, "large", pool="p", output_size=100, priority=1)
    await submit(queue, "small", pool="q", output_size=1)
    waiting = await start_task(queue.lease("w", lease_request("p", "q", arena_bytes=10), TTL, wait=60.0))
    assert not waiting.done()
    await queue.commit(change(await queue.load("large"), status="cancelled"))
    assert [lease.task.request for lease in await waiting] == ["small"]


async def test_finished_and_cancelled_lease_waits_are_removed(queue: MemoryQueue, clock: ManualClock) -> None:
    waiting = [await start_task(queue.lease("w", lease_request("p"), TTL, wait=60.0)) for _ in range(3)]
    waiting[0].cancel()
    await submit(queue, "a")
    clock.advance(60)
    await asyncio.wait(waiting)
    assert sorted(len(one.result()) for one in waiting[1:]) == [0, 1]
    assert not queue._waiters


async def test_stream_of_an_ended_request_ends_without_terminal_event(queue: MemoryQueue) -> None:
    """Given a request that was over without a terminal event, then its stream still ends."""
    record = await submit(queue, "a")
    stream = queue.watch("a")
    await anext(stream)
    await queue.commit(change(record, status="cancelled", completed_at=1.0))
    assert await anext(stream, None) is None
    assert await queue.drop_ended_before(2.0) == ["a"]


async def test_cancelled_watcher_does_not_affect_other_watchers(queue: MemoryQueue) -> None:
    await submit(queue, "a")
    streams = [queue.watch("a", after=1) for _ in range(2)]
    leaving, staying = [await start_task(_next(stream)) for stream in streams]
    leaving.cancel()
    await asyncio.wait({leaving})
    await lease_next(queue)
    assert (await staying).type == "stage_started"


async def _next(stream: object) -> Event:
    return await anext(stream)  # type: ignore[call-overload]


async def test_event_log_without_progress_events_is_bounded() -> None:
    """Given more hand-backs than the log holds, then the oldest events go."""
    history = EventHistory()
    for number in range(MAX_EVENTS + 10):
        history.publish(Event("stage_started", attempt=number), wall=5.0)
    history.end()
    events = [event async for event in history.follow(0)]
    assert [event.seq for event in events] == list(range(11, MAX_EVENTS + 11))
    assert {event.at for event in events} == {5.0}


async def test_event_timestamp_is_preserved_if_set(queue: MemoryQueue) -> None:
    await queue.submit(request("a"), [], [Event("queued", at=7.0), Event("retrying")], LIMITS)
    stream = queue.watch("a")
    assert [(await anext(stream)).at, (await anext(stream)).at] == [7.0, 1_700_000_000.0]


async def test_replaced_delayed_task_is_not_leased(queue: MemoryQueue, clock: ManualClock) -> None:
    """Given a delayed task that was replaced, when its alarm would have rung, then only the new one is there."""
    record = await submit(queue, "a", not_before=clock.now() + 5)
    record = await queue.commit(change(record, push=(task("a", attempt=2, not_before=clock.now() + 9),)))
    clock.advance(5)
    assert await lease_all(queue) == []
    clock.advance(4)
    assert (await lease_next(queue)).task.attempt == 2


def test_queues_are_opened_by_name() -> None:
    assert isinstance(queues.open("memory"), MemoryQueue)
    assert isinstance(queues.open("memory:"), MemoryQueue)
    assert isinstance(queues.open("unfuse.queues.memory:MemoryQueue"), MemoryQueue)
    assert isinstance(queues.open("unfuse.queues.memory:MemoryQueue://somewhere"), MemoryQueue)
    with pytest.raises(ConfigError, match="unknown queue 'memmory': did you mean memory"):
        queues.open("memmory")


def test_every_registered_backend_is_a_queue_backend() -> None:
    for name in queues.BACKENDS:
        assert issubclass(resolve(queues.BACKENDS, name, "queue"), queues.QueueBackend)


def test_queue_parameter_structs_are_frozen() -> None:
    for kind in (queues.base.QueueLimits, queues.base.RequestFilter):
        with pytest.raises(AttributeError):
            setattr(kind(), msgspec.structs.fields(kind)[0].name, None)


async def test_cancelled_watchers_are_removed_from_the_event_log() -> None:
    """Given followers who leave before anything happens, as clients of event streams do, then none is kept."""
    history = EventHistory()
    for _ in range(3):
        waiting = asyncio.ensure_future(anext(history.follow(0)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert not history._followers


def test_all_rule_functions_are_listed_in_rules() -> None:
    """Given the modules of the suite, then each public coroutine function of a queue and a clock is a rule."""
    modules = [
        import_module(f"{testing.__name__}.{module.name}")
        for module in iter_modules(testing.__path__)
        if module.name.startswith("queue_") and module.name != "queue_samples"
    ]
    written = {
        function.__name__
        for module in modules
        for name, function in getmembers(module, iscoroutinefunction)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and [*signature(function).parameters] == ["queue", "clock"]
    }
    assert written == {rule.__name__ for rule in RULES}
