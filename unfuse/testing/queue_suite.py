"""The conformance suite of queue backends: run `check_queue` on a new backend."""

from __future__ import annotations

from asyncio import gather, timeout
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from unfuse.core.errors import Conflict, LeaseLost, NotFound, UnfuseError
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Pipeline
from unfuse.core.request import Change, DeviceFailure, Event, StageState, Timings
from unfuse.queues.base import DeclaredModels, QueueBackend
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_growth import GROWTH_RULES
from unfuse.testing.queue_leases import LEASE_RULES
from unfuse.testing.queue_limits import LIMIT_RULES
from unfuse.testing.queue_lists import LIST_RULES
from unfuse.testing.queue_records import RECORD_RULES
from unfuse.testing.queue_samples import (
    LIMITS,
    TTL,
    change,
    completion,
    count_waiting,
    expect_error,
    history,
    lease_all,
    lease_next,
    lease_request,
    next_event,
    request,
    start_task,
    submit,
    task,
    worker_info,
)
from unfuse.testing.queue_waiting import WAITING_RULES

#: A rule of the port: a coroutine function that raises AssertionError, or another error, if the queue breaks it.
Rule = Callable[[QueueBackend, ManualClock], Awaitable[None]]

#: Timeout of one rule, in seconds.
PATIENCE_S = 30.0

T = TypeVar("T", bound=UnfuseError)


async def check_queue(open: Callable[[], Awaitable[QueueBackend]], clock: ManualClock) -> None:
    """Check every rule of the queue port, each on a new queue.

    `open`: returns an empty queue, which must read its time from `clock`. Raises an ExceptionGroup with one error for
    each broken rule. A note on the error has the rule's name and text.
    """
    broken: list[Exception] = []
    for rule in RULES:
        try:
            await check_rule(rule, await open(), clock)
        except Exception as error:
            error.add_note(f"rule {rule.__name__}: {rule.__doc__}")
            broken.append(error)
    if broken:
        raise ExceptionGroup(f"{len(broken)} of {len(RULES)} rules of the queue port are broken", broken)


async def check_rule(rule: Rule, queue: QueueBackend, clock: ManualClock) -> None:
    """Check one rule on an empty queue, then close the queue."""
    try:
        async with timeout(PATIENCE_S):
            await rule(queue, clock)
    finally:
        await queue.close()


async def an_id_is_submitted_once(queue: QueueBackend, clock: ManualClock) -> None:
    """A second submit with the same id changes nothing and returns the stored record."""
    first = await submit(queue, "a")
    again = await queue.submit(request("a", priority=7), [task("a", "t")], [Event("queued")], LIMITS)
    assert again.context == first.context
    assert await count_waiting(queue, "p") == 1


async def an_idempotency_key_is_submitted_once_a_tenant(queue: QueueBackend, clock: ManualClock) -> None:
    """A second submit with the same tenant and idempotency key returns the first request.

    This also holds once that request is over. An empty key never matches.
    """
    for name, tenant, key in (("a", "t", "k"), ("b", "t", "k"), ("c", "u", "k"), ("d", "t", ""), ("e", "t", "")):
        record = await queue.submit(request(name, tenant=tenant, idempotency_key=key), [task(name)], [], LIMITS)
        assert record.context.id == ("a" if name == "b" else name)
    assert await lease_all(queue) == list("acde")
    await queue.commit(change(await queue.load("a"), status="cancelled"))
    again = await queue.submit(request("f", tenant="t", idempotency_key="k"), [task("f")], [], LIMITS)
    assert (again.context.id, again.context.status) == ("a", "cancelled")


async def a_repeated_commit_succeeds_once(queue: QueueBackend, clock: ManualClock) -> None:
    """A commit with the same task, attempt and token succeeds again without any effect.

    It adds no push, event or version, however late it comes, even after the request is over.
    """
    record = await submit(queue, "a")
    lease = await lease_next(queue)
    first = completion(record, lease, push=(task("a", "t"),), events=(Event("stage_completed"),))
    record = await queue.commit(first)
    assert (await queue.commit(first)).context == record.context
    last = await lease_next(queue)
    assert await count_waiting(queue, "p") == 0
    ending = completion(record, last, status="completed", events=(Event("completed"),))
    await queue.commit(ending)
    assert (await queue.commit(ending)).context.version == 2
    assert (await queue.commit(first)).context.version == 2
    kinds = [event.type for event in await history(queue, "a")]
    assert kinds == ["queued", "stage_started", "stage_completed", "stage_started", "completed"]


async def a_claim_must_match_in_every_field(queue: QueueBackend, clock: ManualClock) -> None:
    """A claim that differs from the lease in any field or bit is not accepted.

    It is not accepted as a repeat of an applied commit either.
    """
    record = await queue.submit(request("a"), [task("a"), task("a", "t")], [], LIMITS)
    lease, other = await lease_next(queue), await lease_next(queue)
    token = lease.token
    tokens = [bytes([token[0] ^ 1]) + token[1:], token[:-1] + bytes([token[-1] ^ 1]), token[:-1], token + b"\0", b""]
    wrong: list[dict[str, Any]] = [{"token": token} for token in (*tokens, other.token)]
    wrong += [{"attempt": 2}, {"attempt": 0}, {"stage": "t"}, {"stage": "nowhere"}]
    forged = [msgspec.structs.replace(lease.claim, **fields) for fields in wrong]
    for _ in range(2):
        for claim in forged:
            await expect_error(LeaseLost, queue.commit(change(record, claim)))
            assert not await queue.progress(claim, [Event("progress")])
            assert not await queue.hand_back(claim)
        assert (await queue.renew(forged, TTL)).renewed == ()
        if record.context.version == 0:
            record = await queue.commit(completion(record, lease))
    assert (await queue.renew([lease.claim, other.claim], TTL)).renewed == (other.claim,)


async def a_refused_commit_has_no_effect(queue: QueueBackend, clock: ManualClock) -> None:
    """A refused commit changes no context, lease, queue or event."""
    record = await queue.submit(request("a"), [task("a"), task("a", "u")], [Event("queued")], LIMITS)
    lease = await lease_next(queue)
    good = completion(record, lease, push=(task("a", "t"),), close=(("a", "u"),), events=(Event("stage_completed"),))
    skipping = msgspec.structs.replace(good, context=msgspec.structs.replace(good.context, version=2))
    stale = msgspec.structs.replace(good, context=msgspec.structs.replace(good.context, version=0))
    forged = msgspec.structs.replace(good, claim=msgspec.structs.replace(lease.claim, token=bytes(16)))
    other = msgspec.structs.replace(good.context, request=request("z").request)
    unknown = msgspec.structs.replace(good, context=other)
    refusals: tuple[tuple[Change, type[UnfuseError]], ...] = (
        (skipping, Conflict),
        (stale, Conflict),
        (forged, LeaseLost),
        (unknown, NotFound),
    )
    for bad, error in refusals:
        await expect_error(error, queue.commit(bad))
    assert (await queue.load("a")).context == record.context
    assert [waiting.key for waiting in await queue.peek("p")] == [("a", "u")]
    assert (await queue.renew([lease.claim], TTL)).renewed == (lease.claim,)
    await queue.commit(good)
    assert [waiting.key for waiting in await queue.peek("p")] == [("a", "t")]
    await queue.commit(change(await queue.load("a"), status="cancelled", events=(Event("cancelled"),)))
    assert [event.type for event in await history(queue, "a", after=2)] == ["stage_completed", "cancelled"]


async def concurrent_changes_conflict(queue: QueueBackend, clock: ManualClock) -> None:
    """A second change from the same version is refused with Conflict.

    It is accepted once it is made from the new version.
    """
    record = await submit(queue, "a")
    await queue.commit(change(record, order=1.0))
    await expect_error(Conflict, queue.commit(change(record, order=2.0)))
    after = await queue.commit(change(await queue.load("a"), order=2.0))
    assert (after.context.version, after.context.order) == (2, 2.0)


async def a_pushed_task_replaces_the_one_of_its_key(queue: QueueBackend, clock: ManualClock) -> None:
    """A pushed task replaces the queued task of its key, or ends its lease.

    It is queued behind all others.
    """
    record = await submit(queue, "a")
    await submit(queue, "b")
    record = await queue.commit(change(record, push=(task("a", attempt=2),)))
    assert [(waiting.request, waiting.attempt) for waiting in await queue.peek("p")] == [("b", 1), ("a", 2)]
    await lease_next(queue)
    lease = await lease_next(queue)
    await queue.commit(change(record, push=(task("a", attempt=3),)))
    assert (await queue.renew([lease.claim], TTL)).ended == (lease.claim,)
    assert (await lease_next(queue)).task.attempt == 3


async def a_new_deadline_moves_a_task(queue: QueueBackend, clock: ManualClock) -> None:
    """A task pushed again with another order number moves there, and the reason is stored.

    The reason here is that it waited for a pool that was scaled to zero.
    """
    record = await submit(queue, "a", order=10.0)
    await submit(queue, "b", order=60.0)
    slept = {"s": msgspec.structs.replace(record.context.stages["s"], cold_start=(0.5, 60.5))}
    moved = change(record, push=(task("a", order=70.0),), stages=slept, order=70.0, deadline=70.0)
    assert (await queue.commit(moved)).context == moved.context == (await queue.load("a")).context
    assert [waiting.request for waiting in await queue.peek("p")] == ["b", "a"]


async def closing_keys_removes_their_tasks(queue: QueueBackend, clock: ManualClock) -> None:
    """`close` removes queued and delayed tasks and ends leases. Unknown keys are ignored."""
    stages = ("queued", "later", "leased")
    soon = await queue.now() + 5
    tasks = [task("a", stages[2]), task("a", stages[0]), task("a", stages[1], not_before=soon)]
    record = await queue.submit(request("a"), tasks, [], LIMITS)
    lease = await lease_next(queue)
    record = await queue.commit(change(record, close=(*(("a", stage) for stage in stages), ("a", "nowhere"))))
    clock.advance(6)
    assert (await count_waiting(queue, "p"), await lease_all(queue)) == (0, [])
    assert (await queue.renew([lease.claim], TTL)).ended == (lease.claim,)
    assert (record.running, record.position) == ((), None)


async def a_terminal_change_removes_all_tasks(queue: QueueBackend, clock: ManualClock) -> None:
    """After a terminal change, nothing is queued or leased, and old claims are lost.

    The request is cancelled while its task is queued, delayed or leased, and with a task pushed by the same change.
    """
    later = await queue.now() + 5
    for name in ("queued", "delayed", "held", "pushed"):
        record = await submit(queue, name, not_before=later if name == "delayed" else 0.0)
        leases = await queue.lease("w", lease_request("p"), TTL) if name in ("held", "pushed") else []
        push = (task(name, "t"),) if name == "pushed" else ()
        ended = await queue.commit(change(record, status="cancelled", push=push, events=(Event("cancelled"),)))
        assert (ended.running, ended.position) == ((), None)
        clock.advance(6)
        assert (await count_waiting(queue, "p"), await lease_all(queue), await queue.sweep_expired(TTL)) == (0, [], [])
        for lease in leases:
            assert (await queue.renew([lease.claim], TTL)).ended == (lease.claim,)
            await expect_error(LeaseLost, queue.commit(completion(ended, lease)))
        assert (await queue.load(name)).context.status == "cancelled"


async def a_record_has_position_stage_and_step(queue: QueueBackend, clock: ManualClock) -> None:
    """A record has the position while it waits, then stage, attempt, worker and step."""
    for name, priority in (("a", 0), ("b", 1), ("c", 0)):
        await submit(queue, name, priority=priority)
    assert [(await queue.load(name)).position for name in "abc"] == [1, 0, 2]
    lease = await lease_next(queue, worker="worker")
    assert await queue.progress(lease.claim, [Event("progress", step=1, steps=8), Event("progress", step=2, steps=8)])
    record = await queue.load("b")
    (running,) = record.running
    assert (running.stage, running.attempt, running.worker) == ("s", 1, "worker")
    assert (running.step, running.steps, running.since) == (2, 8, clock.wall())
    assert (record.position, record.context.version) == (None, 0)
    assert [(await queue.load(name)).position for name in "ac"] == [0, 1]


async def a_record_has_the_timings_of_its_attempt(queue: QueueBackend, clock: ManualClock) -> None:
    """A record has the largest timings that the running attempt reported, and no other attempt's."""
    await submit(queue, "a")
    lease = await lease_next(queue, worker="worker")
    for seconds in (0.1, 2.5, 0.3):
        used = Timings(share_s=seconds, device="cuda:0", devices=2)
        assert await queue.progress(lease.claim, [Event("progress", step=1, steps=8)] if seconds > 1 else [], used)
    await queue.progress(lease.claim, [Event("progress", step=2, steps=8)])
    (running,) = (await queue.load("a")).running
    assert (running.timings, running.step) == (Timings(share_s=2.5, device="cuda:0", devices=2), 2)

    assert await queue.hand_back(lease.claim)
    assert not await queue.progress(lease.claim, [], Timings(share_s=9.0))
    again = await lease_next(queue, worker="worker")
    assert (await queue.load("a")).running[0].timings == Timings()
    assert await queue.progress(again.claim, [], Timings(share_s=0.5))
    assert (await queue.load("a")).running[0].timings == Timings(share_s=0.5)


async def events_are_numbered_and_end(queue: QueueBackend, clock: ManualClock) -> None:
    """Events are numbered from 1 without gaps. The stream ends after the terminal event.

    `after` skips earlier events.
    """
    record = await submit(queue, "a")
    stream = queue.watch("a")
    assert (await anext(stream)).seq == 1
    coming = await start_task(next_event(stream))
    lease = await lease_next(queue, worker="worker")
    event = await coming
    assert event is not None
    assert (event.type, event.stage, event.attempt, event.worker) == ("stage_started", "s", 1, "worker")
    assert (event.seq, event.at) == (2, clock.wall())
    await queue.commit(
        completion(record, lease, status="completed", events=(Event("stage_completed"), Event("completed")))
    )
    assert [(event.seq, event.type) async for event in stream] == [(3, "stage_completed"), (4, "completed")]
    assert [event.seq for event in await history(queue, "a", after=2)] == [3, 4]
    assert await history(queue, "a", after=4) == []
    assert [event.seq for event in await history(queue, "a")] == [1, 2, 3, 4]


async def watching_an_unknown_request_raises_not_found(queue: QueueBackend, clock: ManualClock) -> None:
    """Watching or loading an unknown request raises NotFound, at the first event at the latest."""

    async def watched() -> None:
        await anext(queue.watch("nobody"))

    await expect_error(NotFound, watched())
    await expect_error(NotFound, queue.load("nobody"))


async def progress_requires_a_lease(queue: QueueBackend, clock: ManualClock) -> None:
    """Progress is published only with a lease, and does not change the version."""
    record = await submit(queue, "a")
    lease = await lease_next(queue)
    step = Event("progress", step=1, steps=2)
    assert await queue.progress(lease.claim, [step])
    assert not await queue.progress(msgspec.structs.replace(lease.claim, token=bytes(16)), [step])
    await queue.commit(completion(record, lease, status="completed", events=(Event("completed"),)))
    assert not await queue.progress(lease.claim, [step])
    assert [event.type for event in await history(queue, "a")] == ["queued", "stage_started", "progress", "completed"]


async def old_progress_is_dropped_first(queue: QueueBackend, clock: ManualClock) -> None:
    """The history is bounded: old progress is dropped, lifecycle events and the latest progress stay."""
    record = await submit(queue, "a")
    lease = await lease_next(queue)
    for step in range(3000):
        await queue.progress(lease.claim, [Event("progress", step=step, steps=3000)])
    await queue.commit(completion(record, lease, status="completed", events=(Event("completed"),)))
    events = await history(queue, "a")
    assert len(events) <= 2000
    assert [event.type for event in events if event.type != "progress"] == ["queued", "stage_started", "completed"]
    assert events[-2].step == 2999
    assert [event.seq for event in events] == sorted({event.seq for event in events})
    assert events[-1].seq == 3003


async def declarations_outlive_workers(queue: QueueBackend, clock: ManualClock) -> None:
    """The last declaration of each name is stored, independently of workers."""
    spec = ModelSpec("m", "/m", "f", Pipeline(()), {}, {}, {}, {})
    assert await queue.declarations() == {}
    await queue.declare("serve", DeclaredModels((spec,)))
    sleepy = DeclaredModels((spec,), {"p": 3}, ("gone",))
    await queue.declare("operator", sleepy)
    await queue.register(worker_info("v"), [spec])
    await queue.unregister("v")
    assert await queue.declarations() == {"serve": DeclaredModels((spec,)), "operator": sleepy}
    await queue.declare("serve", DeclaredModels(()))
    assert await queue.declarations() == {"serve": DeclaredModels(()), "operator": sleepy}


async def a_new_declaration_replaces_no_current_one(queue: QueueBackend, clock: ManualClock) -> None:
    """A `new` declaration is refused while a current one exists.

    Of two at the same time one is refused. A declaration that is gone, failed or empty is replaced.
    """
    spec = ModelSpec("m", "/m", "f", Pipeline(()), {}, {}, {}, {})
    first = DeclaredModels((spec,), source="admin", server="one")
    second = msgspec.structs.replace(first, server="two")
    stored = await gather(*(queue.declare("model m", declaration, new=True) for declaration in (first, second)))
    assert sorted(stored) == [False, True]
    assert await queue.declarations() == {"model m": (first, second)[stored.index(True)]}
    gone = DeclaredModels((spec,), withdrawn=("m",))
    failed = DeclaredModels((spec,), failure="no room")
    empty = DeclaredModels(())
    for other in (gone, failed, empty):
        assert await queue.declare("model m", other)
        assert await queue.declare("model m", first, new=True)
        assert not await queue.declare("model m", second, new=True)
    assert await queue.declarations() == {"model m": first}


async def the_registry_follows_heartbeats(queue: QueueBackend, clock: ManualClock) -> None:
    """The registry has each worker's last heartbeat, number of leases, and model specs.

    After `unregister`, the worker's leases, and no others, are returned as expired until a commit closes them.
    """
    spec = ModelSpec("m", "/m", "f", Pipeline(()), {}, {}, {}, {})
    await queue.register(worker_info("v"), [spec])
    await queue.register(worker_info("w"))
    await submit(queue, "a")
    await lease_next(queue, worker="w")
    assert await queue.sweep_expired(TTL) == []
    clock.advance(3)
    await queue.register(worker_info("v", pid=7))
    members = {member.info.id: member for member in await queue.workers()}
    assert sorted(members) == ["v", "w"]
    assert (members["v"].info, members["v"].models) == (worker_info("v", pid=7), (spec,))
    assert members["v"].last_heartbeat == members["w"].last_heartbeat + 3
    assert (members["v"].leased, members["w"].leased) == (0, 1)
    await queue.unregister("w")
    await queue.unregister("w")
    assert [member.info.id for member in await queue.workers()] == ["v"]
    await submit(queue, "b")
    await lease_next(queue, worker="v")
    for _ in range(2):
        assert [(lease.worker, lease.task.request) for lease in await queue.sweep_expired(TTL)] == [("w", "a")]
        clock.advance(1)


async def stats_and_peek_leave_out_leased_tasks(queue: QueueBackend, clock: ManualClock) -> None:
    """`stats` and `peek` leave out leased tasks. `peek` returns tasks in queue order."""
    assert (await count_waiting(queue, "p"), list(await queue.peek("p"))) == (0, [])
    for name, priority in (("a", 0), ("b", 2), ("c", 1)):
        await submit(queue, name, priority=priority)
    assert [waiting.request for waiting in await queue.peek("p", 2)] == ["b", "c"]
    await lease_next(queue)
    assert await count_waiting(queue, "p") == 2
    assert [waiting.request for waiting in await queue.peek("p")] == ["c", "a"]


async def stored_fields_are_read_unchanged(queue: QueueBackend, clock: ManualClock) -> None:
    """Every field of contexts and tasks survives storage unchanged."""
    state = StageState("queued", 1, b"\0\xff", "w", queued_at=0.1, failures=2, crashes=1, recomputes=3, alone=True)
    stages = {"s": msgspec.structs.replace(state, device_failures=(DeviceFailure("cuda:0", had_worked=True),))}
    params = {"s": "é", "i": 2**40, "most": 2**64 - 1, "least": -(2**63), "f": 0.1, "n": None, "b": True}
    caller = {"tenant": "ü", "fingerprint": "f"}
    fields = {"deadline": 1.5, "metadata": {"k": "v"}, "created_at": 0.1, "order": 0.3}
    context = request("a", params=params, stages=stages, **caller, **fields)
    sent = task("a", final=True, output_size=2**40, priority=-3, order=0.1, deadline=2.5, affinity="é", alone=True)
    await queue.submit(context, [sent], [], LIMITS)
    assert (await queue.load("a")).context == context
    assert (await lease_next(queue)).task == sent
    assert (await queue.commit(Change(msgspec.structs.replace(context, version=1)))).context.version == 1


async def check_succeeds_on_an_available_queue(queue: QueueBackend, clock: ManualClock) -> None:
    """`check` of an available queue returns."""
    await queue.check()


#: Every rule, in the order in which they are checked.
RULES: tuple[Rule, ...] = (
    *LEASE_RULES,
    *WAITING_RULES,
    *RECORD_RULES,
    *LIMIT_RULES,
    *LIST_RULES,
    *GROWTH_RULES,
    an_id_is_submitted_once,
    an_idempotency_key_is_submitted_once_a_tenant,
    a_repeated_commit_succeeds_once,
    a_claim_must_match_in_every_field,
    a_refused_commit_has_no_effect,
    concurrent_changes_conflict,
    a_pushed_task_replaces_the_one_of_its_key,
    a_new_deadline_moves_a_task,
    closing_keys_removes_their_tasks,
    a_terminal_change_removes_all_tasks,
    a_record_has_position_stage_and_step,
    a_record_has_the_timings_of_its_attempt,
    events_are_numbered_and_end,
    watching_an_unknown_request_raises_not_found,
    progress_requires_a_lease,
    old_progress_is_dropped_first,
    the_registry_follows_heartbeats,
    declarations_outlive_workers,
    a_new_declaration_replaces_no_current_one,
    stats_and_peek_leave_out_leased_tasks,
    stored_fields_are_read_unchanged,
    check_succeeds_on_an_available_queue,
)
