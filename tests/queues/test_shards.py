"""A queue over several: what a request is promised holds wherever it lives, and what is promised between them."""

import asyncio
from collections import Counter

import pytest

from tests.queues import sharded
from tests.queues.sharded import Cut, ShardedTwins, Spread, TickingClock, Together, ids, memories
from tests.queues.test_twins import FEW, MANY, Record, compared
from unfuse.core.errors import NotFound, Overloaded, TransientError
from unfuse.core.request import Caller, Event, TenantLimits, request_ids
from unfuse.core.task import OutputDeltas
from unfuse.queues import shard_health
from unfuse.queues.base import DeclaredModels, QueueBackend, QueueLimits, RequestFilter
from unfuse.queues.memory import MemoryQueue
from unfuse.queues.shards import ShardedQueue
from unfuse.testing import ManualClock
from unfuse.testing.queue_lists import check_lists
from unfuse.testing.queue_samples import (
    LIMITS,
    TTL,
    change,
    completion,
    count_waiting,
    expect_error,
    lease_next,
    lease_request,
    next_event,
    object_ref,
    request,
    start_task,
    submit,
    task,
    worker_info,
)
from unfuse.testing.queue_suite import RULES, Rule, check_rule

OF_ALL = {"admission_control_refuses_overload", "admission_control_refuses_excessive_cost"}
"""Rules of limits that each shard has a part of."""

BETWEEN = OF_ALL | {
    "equal_tasks_are_leased_in_order_of_arrival",
    "a_higher_priority_is_leased_first",
    "a_lower_order_number_is_leased_first",
    "several_pools_merge_into_one_queue",
    "a_call_leases_at_most_its_slots",
    "a_lease_has_worker_expiry_and_token",
    "leasing_stops_at_a_task_that_does_not_fit",
    "a_returned_task_keeps_its_position",
    "repeated_refusals_exclude_a_worker",
    "a_preference_does_not_override_refusals",
    "a_preference_applies_behind_a_refused_task",
    "a_delayed_task_waits_for_its_time",
    "a_call_can_require_a_higher_priority",
    "a_preference_selects_among_equal_priorities",
    "a_full_pool_holds_back_its_feeders",
    "later_pools_are_leased_first",
    "a_preference_does_not_cross_pools",
    "a_task_that_does_not_fit_blocks_only_earlier_pools",
    "a_pool_leaves_its_reserve_free",
    "resources_are_counted_separately",
    "a_refused_commit_leases_nothing",
    "stats_count_requests_tasks_and_work",
    "an_ended_request_can_be_updated",
    "a_request_can_be_submitted_as_ended",
    "concurrent_requests_of_a_tenant_are_limited",
    "a_repeated_commit_changes_a_tenant_s_count_once",
    "concurrent_submits_respect_a_tenant_s_limit",
    "a_rate_limit_refills_with_time",
    "a_request_refused_by_the_queue_uses_no_rate",
    "filters_find_exactly_the_matching_requests",
    "concurrent_repeats_store_one_request",
    "a_gap_between_deltas_is_refused",
    "one_call_appends_to_several_tasks",
    "new_deltas_publish_their_total",
    "an_idempotency_key_is_submitted_once_a_tenant",
    "a_pushed_task_replaces_the_one_of_its_key",
    "a_record_has_position_stage_and_step",
    "events_are_numbered_and_end",
    "stats_and_peek_leave_out_leased_tasks",
    "a_commit_can_lease_in_the_same_call",
}
"""Rules between requests, whose names here are not placed as they have to be, and of one reading of the clock."""


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.__name__ not in OF_ALL], ids=lambda rule: rule.__name__
)
async def test_queue_rules_hold_for_requests_of_one_shard(rule: Rule, count: int) -> None:
    clock = ManualClock()
    await check_rule(rule, Together(memories(count, clock)), clock)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.__name__ not in BETWEEN], ids=lambda rule: rule.__name__
)
async def test_queue_rules_hold_for_requests_spread_over_shards(rule: Rule, count: int) -> None:
    clock = TickingClock()
    await check_rule(rule, Spread(memories(count, clock)), clock)


def test_excluded_rule_names_exist_in_the_suite() -> None:
    assert {rule.__name__ for rule in RULES} >= BETWEEN


def test_random_histories_match_the_memory_queue(record_property: Record) -> None:
    compared(ShardedTwins, FEW, "shards", record_property)


@pytest.mark.nightly
def test_long_random_histories_match_the_memory_queue(record_property: Record) -> None:
    compared(ShardedTwins, MANY, "shards", record_property)


@pytest.fixture
def clock() -> TickingClock:
    return TickingClock()


async def test_request_lists_are_merged_over_shards(clock: TickingClock) -> None:
    """In any pages, while some requests run, are over or gone."""
    queue = Spread(memories(3, clock))
    for name in "cabgfedh":
        fields = {"tenant": "tu"[ord(name) % 2], "fingerprint": "xyz"[ord(name) % 3]}
        await queue.submit(request(name, **fields), [task(name)], [], LIMITS)
    assert [one.context.id for one in await queue.list(RequestFilter(), oldest_first=True)] == [*"cabgfedh"]
    await check_lists(queue)
    await lease_next(queue)
    for name in "bg":
        await queue.commit(change(await queue.load(name), status="failed", is_dead_letter=True))
    await queue.drop("g")
    await check_lists(queue)
    assert await queue.ended_among([*"hgba", "nobody"]) == ["g", "b", "nobody"]


async def test_requests_submitted_at_one_instant_are_listed_once() -> None:
    """Given a clock that stands still, so that numbers are the same in several shards, then pages are the whole."""
    clock = ManualClock()
    queue = Spread(memories(3, clock))
    for name in "abcdefgh":
        await submit(queue, name)
    for oldest_first in (False, True):
        everything = [one.context.id for one in await queue.list(RequestFilter(), oldest_first=oldest_first)]
        assert sorted(everything) == [*"abcdefgh"]
        for at, name in enumerate(everything):
            page = await queue.list(RequestFilter(), after=name, limit=3, oldest_first=oldest_first)
            assert [one.context.id for one in page] == everything[at + 1 : at + 4]


async def test_request_id_determines_its_shard(clock: TickingClock) -> None:
    queue = ShardedQueue(memories(4, clock))
    homes = Counter(queue.shard_of(queue.choose_id(request_ids(), Caller(tenant="t"))) for _ in range(400))
    assert set(homes) == set(range(4))
    assert min(homes.values()) > 50
    keyed = [queue.shard_of(queue.choose_id(request_ids(), Caller("t", f"k{number}"))) for number in range(50)]
    assert len({*keyed}) == 4
    for who in (
        Caller("t", "k1"),
        Caller("t", limits=TenantLimits(1)),
        Caller("t", "k9", limits=TenantLimits(rate=1)),
    ):
        assert len({queue.shard_of(queue.choose_id(request_ids(), who)) for _ in range(20)}) == 1
    again = [queue.choose_id(request_ids(after="img_1"), Caller("t", "retry of img_1")) for _ in range(2)]
    assert again[0] == again[1]


async def test_requests_of_a_limited_tenant_are_counted_on_one_shard(clock: TickingClock) -> None:
    queue = ShardedQueue(memories(4, clock))
    limits = QueueLimits(1000, 1000, tenant=TenantLimits(concurrent=3))
    who = Caller("t", limits=limits.tenant)
    for number in range(3):
        name = queue.choose_id(iter(ids(f"{number}.")), who)
        await queue.submit(request(name, tenant="t"), [task(name)], [], limits)
    name = queue.choose_id(iter(ids("x")), who)
    await expect_error(Overloaded, queue.submit(request(name, tenant="t"), [task(name)], [], limits))


async def test_idempotency_key_is_found_with_and_without_tenant_limits(clock: TickingClock) -> None:
    queue = ShardedQueue(memories(4, clock))
    for may, key in ((TenantLimits(), "k"), (TenantLimits(5), "l")):
        name = queue.choose_id(iter(ids(key)), Caller("t", key, limits=may))
        await queue.submit(request(name, tenant="t", idempotency_key=key), [task(name)], [], LIMITS)
        found = await queue.list(RequestFilter(tenant="t", idempotency_key=key))
        assert [one.context.id for one in found] == [name]


async def test_each_shard_enforces_its_share_of_the_queue_limits(clock: TickingClock) -> None:
    """Rounded up, of requests and of tasks that wait; what costs more than a part is accepted where nothing else is."""
    queue = Spread(memories(2, clock))
    limits = QueueLimits(3, 1000, 10.0)
    for name in "abcd":
        await queue.submit(request(name, cost=2.0), [task(name)], [], limits)
    for name in "ef":
        await expect_error(Overloaded, queue.submit(request(name), [], [], limits))
    queue = Spread(memories(2, clock))
    await queue.submit(request("a", cost=9.0), [task("a")], [], limits)
    await expect_error(Overloaded, queue.submit(request("c", cost=1.0), [], [], limits))
    await queue.submit(request("b", cost=5.0), [task("b")], [], QueueLimits(100, 1))
    await expect_error(Overloaded, queue.submit(request("d"), [task("d")], [], QueueLimits(100, 1)))


class TestLeasing:
    async def test_worker_leases_from_all_shards_in_turn(self, clock: TickingClock) -> None:
        """Given work in all shards, then one who asks serves all alike."""
        queue = Spread(memories(3, clock))
        for name in "abcdefghi":
            await submit(queue, name)
        homes = [queue.shard_of((await lease_next(queue)).task.request) for _ in range(9)]
        assert [sorted(homes[at : at + 3]) for at in (0, 3, 6)] == [[0, 1, 2]] * 3

    async def test_commit_and_lease_serves_all_shards_evenly(self, clock: TickingClock) -> None:
        """Given a shard that always has a next task, then a worker that asks with its outcomes alone serves all."""
        queue = Spread(memories(3, clock))
        for name in "abcdefghijkl":
            await submit(queue, name)
        lease = await lease_next(queue)
        seen = [queue.shard_of(lease.task.request)]
        for _ in range(11):
            finished = completion(await queue.load(lease.task.request), lease)
            record, (lease,) = await queue.commit_and_lease(finished, "w", lease_request("p"), TTL)
            assert record.context.stages["s"].status == "done"
            seen.append(queue.shard_of(lease.task.request))
        assert Counter(seen) == {0: 4, 1: 4, 2: 4}
        assert len({*seen[:4]}) > 1

    async def test_commit_and_lease_leases_from_another_shard_if_one_is_empty(self, clock: TickingClock) -> None:
        queue = Spread(memories(2, clock))
        await submit(queue, "a")
        lease = await lease_next(queue)
        await submit(queue, "b")
        _, leases = await queue.commit_and_lease(completion(await queue.load("a"), lease), "w", lease_request("p"), TTL)
        assert [one.task.request for one in leases] == ["b"]

    async def test_commit_succeeds_if_leasing_from_another_shard_fails(self, clock: TickingClock) -> None:
        shards = memories(2, clock, Cut)
        queue = Spread(shards)
        await submit(queue, "a")
        lease = await lease_next(queue)
        shards[queue.shard_of("b")].gone = True
        record, leases = await queue.commit_and_lease(
            completion(await queue.load("a"), lease), "w", lease_request("p"), TTL
        )
        assert (record.context.stages["s"].status, leases) == ("done", [])
        await queue.close()

    async def test_large_task_is_not_starved_by_small_tasks_of_another_shard(self, clock: TickingClock) -> None:
        """Given a worker that is never empty, and another shard with small tasks without end, then nothing more of its
        pool is taken until there is room for a large one whose turn it is."""
        queue = Spread(memories(2, clock))
        for name in "acegikmoqsuwy":
            await submit(queue, name, output_size=1)
        (held,) = await queue.lease("w", lease_request("p", arena_bytes=10), TTL)
        await submit(queue, "b", output_size=10)
        assert await queue.lease("w", lease_request("p", arena_bytes=9), TTL) == []
        waiting = await start_task(queue.lease("w", lease_request("p", arena_bytes=9), TTL, wait=60.0))
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait({waiting})
        finished = completion(await queue.load(held.task.request), held)
        _, leases = await queue.commit_and_lease(finished, "w", lease_request("p", arena_bytes=10), TTL)
        assert [one.task.request for one in leases] == ["b"]
        assert [
            one.task.planned.output_size for one in await queue.lease("w", lease_request("p", arena_bytes=5), TTL)
        ] == [1]

    async def test_later_pools_are_leased_while_a_large_task_waits_for_memory(self, clock: TickingClock) -> None:
        """Given a large task, then tasks of later pools in another shard are taken; so they are while it is waited."""
        queue = Spread(memories(2, clock))
        await submit(queue, "b", output_size=10)
        await submit(queue, "a", pool="q", output_size=1)
        offered = lease_request("p", "q", arena_bytes=9, stage_depths={"q": 1})
        assert [one.task.request for one in await queue.lease("w", offered, TTL)] == ["a"]
        waiting = await start_task(queue.lease("w", offered, TTL, wait=60.0))
        await submit(queue, "c", output_size=1)
        assert not (await start_task(asyncio.wait({waiting}))).done()
        await submit(queue, "e", pool="q", output_size=1)
        assert [one.task.request for one in await waiting] == ["e"]

    async def test_waiting_lease_call_gets_one_task_from_simultaneous_pushes(self, clock: TickingClock) -> None:
        """Given a push to each shard at one moment, then who waits gets one task, and the other waits on."""
        queue = Spread(memories(2, clock))
        waiting = await start_task(queue.lease("w", lease_request("p"), TTL, wait=60.0))
        await asyncio.gather(submit(queue, "a"), submit(queue, "b"))
        (lease,) = await waiting
        other = "b" if lease.task.request == "a" else "a"
        while await count_waiting(queue, "p") != 1:
            await asyncio.sleep(0)
        assert (await lease_next(queue, worker="v")).task.request == other


async def test_leases_of_all_shards_are_renewed_and_expire(clock: TickingClock) -> None:
    queue = Spread(memories(2, clock))
    for name in "ab":
        await submit(queue, name)
    leases = [await lease_next(queue) for _ in range(2)]
    forged = [*(one.claim for one in leases), leases[0].claim.__class__("a", "s", 9, b"")]
    renewed = await queue.renew(forged, TTL)
    assert (renewed.renewed, renewed.ended) == (tuple(forged[:2]), tuple(forged[2:]))
    grown = [OutputDeltas(one.claim, 0, (one.task.request.encode(),)) for one in leases]
    assert await queue.append_deltas(grown) == [True, True]
    assert [await queue.read_deltas(name, "s") for name in "ab"] == [[b"a"], [b"b"]]
    await queue.register(worker_info("w"))
    assert [(one.info.id, one.leased) for one in await queue.workers()] == [("w", 2)]
    await queue.sweep_expired(TTL)
    await queue.unregister("w")
    assert {one.task.request for one in await queue.sweep_expired(TTL)} == {"a", "b"}
    assert await queue.workers() == []


class TestOneAway:
    """Given a shard that does not answer, then its requests wait for it, and all else goes on."""

    @pytest.fixture
    def shards(self, clock: TickingClock) -> list[Cut]:
        return memories(2, clock, Cut)

    @pytest.fixture
    async def queue(self, shards: list[Cut], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
        monkeypatch.setattr(shard_health, "LOOK_S", 0.001)
        queue = Spread(shards)
        for name in "ab":
            await submit(queue, name)
        yield queue
        await queue.close()

    @staticmethod
    def away(queue: Spread, shards: list[Cut], name: str = "a") -> Cut:
        return shards[queue.shard_of(name)]

    async def test_requests_of_an_unreachable_shard_raise_transient_error(
        self, queue: Spread, shards: list[Cut]
    ) -> None:
        self.away(queue, shards).gone = True
        await expect_error(TransientError, queue.load("a"))
        await expect_error(TransientError, queue.submit(request("c"), [], [], LIMITS))
        assert len(queue.unreachable_parts()) == 1
        assert "of 2: it does not answer" in queue.unreachable_parts()[0]
        await queue.check()

    async def test_other_shards_stay_usable_while_one_is_unreachable(self, queue: Spread, shards: list[Cut]) -> None:
        self.away(queue, shards).gone = True
        lease = await lease_next(queue)
        assert lease.task.request == "b"
        await queue.register(worker_info("w"))
        assert [one.leased for one in await queue.workers()] == [1]
        assert [one.context.id for one in await queue.list(RequestFilter())] == ["b"]
        assert (await queue.stats(["p"])).active == 1
        assert await queue.ended_among(["a", "b", "d"]) == ["d"]
        assert await queue.sweep_expired(TTL) == []
        await queue.commit(completion(await queue.load("b"), lease))
        assert {queue.shard_of(queue.choose_id(iter("abcdef"), Caller())) for _ in range(3)} == {queue.shard_of("b")}
        assert await queue.now() > 0

    async def test_leases_on_an_unreachable_shard_are_not_reported_as_ended(
        self, queue: Spread, shards: list[Cut]
    ) -> None:
        """Nobody else can have it, and who has it goes on."""
        leases = {one.task.request: one.claim for one in [await lease_next(queue) for _ in range(2)]}
        self.away(queue, shards).gone = True
        await expect_error(TransientError, queue.load("a"))
        assert (await queue.renew([*leases.values()], TTL)).ended == ()
        self.away(queue, shards).gone = False
        while queue.unreachable_parts():
            await asyncio.sleep(0.001)
        assert (await queue.renew([*leases.values()], TTL)).ended == ()

    async def test_idempotent_repeat_is_not_duplicated_while_a_shard_is_unreachable(
        self, queue: Spread, shards: list[Cut]
    ) -> None:
        """Given a key whose request may be there, then nobody is told that there is none; ids with it stay there."""
        home = queue.shard_of("a")
        key = next(key for key in "abcdef" if home in queue._shared_homes("t", key))
        self.away(queue, shards).gone = True
        await expect_error(TransientError, queue.load("a"))
        await expect_error(TransientError, queue.list(RequestFilter(tenant="t", idempotency_key=key)))
        who = Caller("t", next(key for key in "abcdef" if queue._shared_homes("t", key)[1] == home))
        assert queue.shard_of(queue.choose_id(iter("abcdef"), who)) == home

    async def test_waiting_lease_call_is_served_by_reachable_shards(self, queue: Spread, shards: list[Cut]) -> None:
        await lease_next(queue)
        await lease_next(queue)
        self.away(queue, shards).gone = True
        waiting = await start_task(queue.lease("w", lease_request("p"), TTL, wait=60.0))
        await submit(queue, "d")
        assert [one.task.request for one in await waiting] == ["d"]

    async def test_hanging_shard_is_treated_as_unreachable(
        self, queue: Spread, shards: list[Cut], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shard_health, "PATIENCE_S", 0.01)
        self.away(queue, shards).frozen = True
        assert [one.context.id for one in await queue.list(RequestFilter())] == ["b"]
        assert "no response within" in queue.unreachable_parts()[0]
        assert (await lease_next(queue)).task.request == "b"

    async def test_returning_shard_receives_declarations_written_while_unreachable(
        self, queue: Spread, shards: list[Cut]
    ) -> None:
        await queue.put_encoding("k", object_ref("o"), 100)
        shards[0].gone = True
        await expect_error(TransientError, queue.load(next(name for name in "ab" if queue.shard_of(name) == 0)))
        await queue.declare("serve", DeclaredModels((), {"p": 1}))
        assert await queue.declarations() == {"serve": DeclaredModels((), {"p": 1})}
        assert (await queue.find_encoding(["k"]), await queue.cached_bytes()) == ({}, 0)
        await expect_error(TransientError, queue.find_encoding(["k"], use=False))
        shards[0].gone = False
        while queue.unreachable_parts():
            await asyncio.sleep(0.001)
        assert await shards[0].declarations() == {"serve": DeclaredModels((), {"p": 1})}
        assert list(await queue.find_encoding(["k"])) == ["k"]

    async def test_shard_that_returns_with_another_identity_stays_excluded(
        self, queue: Spread, shards: list[Cut]
    ) -> None:
        """Given a server that first has the keys of another, then that is said, and it comes back when it is right."""
        one = self.away(queue, shards)
        one.gone = True
        await expect_error(TransientError, queue.load("a"))
        one.gone, one.other = False, "name the same servers in the same order"
        while "name the same servers" not in queue.unreachable_parts()[0]:
            await asyncio.sleep(0.001)
        assert [found.context.id for found in await queue.list(RequestFilter())] == ["b"]
        one.other = ""
        while queue.unreachable_parts():
            await asyncio.sleep(0.001)
        assert len(await queue.list(RequestFilter())) == 2

    async def test_all_calls_raise_transient_error_if_every_shard_is_unreachable(
        self, queue: Spread, shards: list[Cut]
    ) -> None:
        for shard in shards:
            shard.gone = True
        for ask in (
            queue.check(),
            queue.now(),
            queue.lease("w", lease_request("p"), TTL),
            queue.list(RequestFilter()),
            queue.load("b"),
        ):
            await expect_error(TransientError, ask)
        assert len(queue.unreachable_parts()) == 2
        for shard in shards:
            shard.gone = False
        assert len(await queue.list(RequestFilter())) == 2


async def test_watch_streams_events_from_the_shard_of_the_request(clock: TickingClock) -> None:
    queue = Spread(memories(2, clock))
    await submit(queue, "a")
    events = queue.watch("a")
    assert (await anext(events)).type == "queued"
    watching = await start_task(next_event(events))
    await queue.commit(change(await queue.load("a"), status="cancelled", events=(Event("cancelled"),)))
    event = await watching
    assert event is not None
    assert event.type == "cancelled"
    await expect_error(NotFound, queue.load("nobody"))


def test_sharded_queue_cannot_be_opened_by_a_single_address() -> None:
    with pytest.raises(NotImplementedError):
        ShardedQueue.open("memory")
    assert sharded.ShardedTwins.shards > 1
    assert not ShardedQueue([MemoryQueue(ManualClock())]).shared
    assert isinstance(ShardedQueue([]), QueueBackend)
