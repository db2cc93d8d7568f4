"""Random histories of one queue beside the memory queue, which is what the port means: all verbs, every answer.

Both are asked the same at the same virtual time. What has to differ is made equal before it is compared: tokens are
numbered as they are met, and times are counted from where a queue's clock was at the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from unfuse.core.errors import NotFound, UnfuseError
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import ExecutionPlan, Pipeline, PlannedStage
from unfuse.core.request import Change, Event, RequestContext, RequestRecord, StageState, TenantLimits
from unfuse.core.task import Claim, Lease, OutputDeltas, Task
from unfuse.queues.base import DeclaredModels, LeaseRequest, QueueBackend, QueueLimits, QueueStats, RequestFilter
from unfuse.queues.memory import MemoryQueue
from unfuse.testing import ManualClock
from unfuse.testing.queue_samples import lease_request, object_ref, request, task_of, worker_info

POOLS = ("p", "q", "r")
STAGES = ("a", "b", "c", "d")
TTL = 8.0
LIMITS = st.sampled_from(
    [QueueLimits(10**6, 10**6)] * 6
    + [QueueLimits(3, 10**6), QueueLimits(10**6, 2), QueueLimits(10**6, 10**6, 4.0)]
    + [
        QueueLimits(10**6, 10**6, tenant=may)
        for may in (TenantLimits(2), TenantLimits(4), TenantLimits(0, 2, 7), TenantLimits(3, 5, 1))
    ]
)
PLANS = [
    ExecutionPlan(tuple(PlannedStage(name, "k", pool, (), {}, 0, False, cost=cost) for name, pool, cost in stages))
    for stages in ([("a", "p", 0.1), ("b", "q", 1 / 3), ("c", "r", 7.0)], [("a", "q", 1e-4), ("d", "q", 0.7)], [])
]
CARDS = [ModelSpec("m", "/m", "f", Pipeline(()), {}, {}, {}, {})]

T = TypeVar("T")

some_pools = st.sets(st.sampled_from(POOLS), min_size=1)
passing_s = st.sampled_from([0.015625, 0.015625, 0.25, 1.0, 3.0, 4.0, 8.0])
"""Sums of these are exact, so that equal times stay equal on clocks that began at different numbers."""

tasks = st.fixed_dictionaries(
    {
        "pool": st.sampled_from(POOLS),
        "output_size": st.sampled_from([0, 1, 5, 9]),
        "priority": st.sampled_from([0, 0, 1, -1]),
        "order": st.sampled_from([0.0, 0.0, 1.5, -2.5, 1e15]),
        "not_before": st.sampled_from([0.0, 0.0, 0.0, 1.0, 6.0]),
        "preferred_node": st.sampled_from(["", "here"]),
        "affinity": st.sampled_from(["", "alike"]),
        "alone": st.booleans(),
        "needs": st.sampled_from([{}, {}, {"kv": 3}, {"kv": 7, "io": 1}]),
    }
)
pushes = st.dictionaries(st.sampled_from(STAGES), tasks, max_size=3)
wants = st.builds(
    lambda pools, **more: lease_request(*pools, **more),
    pools=some_pools.map(sorted),
    amounts=st.sampled_from([{}, {}, {"p": {"kv": 4}, "q": {"kv": 6}}, {"q": {"kv": 0}}, {"r": {"kv": 9, "io": 1}}]),
    slots=st.sampled_from([1, 1, 2, 4]),
    arena_bytes=st.sampled_from([None, None, 4, 9, 14]),
    priority_above=st.sampled_from([None, None, None, -1, 0]),
    backpressure=st.dictionaries(
        st.sampled_from(POOLS), st.dictionaries(st.sampled_from(POOLS), st.integers(0, 3), max_size=2), max_size=1
    ),
    stage_depths=st.sampled_from([{}, {"q": 1, "r": 2}, {"p": 1}, {"q": 1, "r": 1}, {"p": -1, "q": 1}]),
    reserves=st.sampled_from([{}, {"p": 5}, {"p": 1, "q": 9}, {"r": 5}]),
    preferred_node=st.sampled_from(["", "here"]),
    affinity=st.sampled_from(["", "", "alike"]),
    rank=st.floats(-1, 1),
)
filters = st.builds(
    RequestFilter,
    is_over=st.sampled_from([None, True, False]),
    tenant=st.sampled_from([None, None, "t", "u"]),
    idempotency_key=st.sampled_from([None, None, None, "k", ""]),
    fingerprint=st.sampled_from([None, None, None, "f", ""]),
    status=st.sampled_from([None, None, "queued", "in_progress", "failed"]),
    is_dead_letter=st.sampled_from([None, None, True, False]),
    video=st.sampled_from([None, None, True, False]),
    webhook_pending=st.sampled_from([None, None, None, True]),
)


class Side:
    """One of the two queues, and what it calls things."""

    def __init__(self, queue: QueueBackend, now: float) -> None:
        self.queue, self.began = queue, now
        self.tokens: dict[bytes, bytes] = {b"": b""}
        self.leases: list[Lease] = []

    def met(self, leases: list[Lease]) -> list[Lease]:
        """Number the tokens of new leases."""
        for lease in leases:
            self.tokens.setdefault(lease.token, b"%d" % len(self.tokens))
        self.leases += leases
        return leases

    def chosen(self, number: int) -> Lease:
        """One of the last leases, which may still be held; now and then one of long ago."""
        return self.leases[-1 - number % (len(self.leases) if number % 9 == 0 else min(len(self.leases), 5))]

    def claim(self, number: int, damage: str = "") -> Claim:
        claim = self.chosen(number).claim
        damaged = {"token": claim.token[:-1], "attempt": claim.attempt + 1, "stage": "elsewhere"}
        return msgspec.structs.replace(claim, **{damage: damaged[damage]} if damage else {})

    def plain(self, answer: Any) -> Any:
        """An answer without what only this queue could give."""
        match answer:
            case list() | tuple():
                return [self.plain(one) for one in answer]
            case Lease(task, name, token, expires):
                return self.plain(task), name, self.tokens[token], expires - self.began, answer.recorded_deltas
            case Claim():
                return msgspec.structs.replace(answer, token=self.tokens.get(answer.token, b"damaged"))
            case Task():
                at = answer.not_before - self.began if answer.not_before else 0.0
                return msgspec.structs.replace(answer, not_before=at)
            case RequestRecord(context, running, position):
                return self.plain(context), running, position
            case RequestContext(stages=stages):
                known = {n: msgspec.structs.replace(s, token=self.tokens[s.token]) for n, s in stages.items()}
                return msgspec.structs.replace(answer, stages=known)
            case msgspec.Struct():
                fields = msgspec.structs.asdict(answer)
                return {
                    n: value - self.began if n == "last_heartbeat" else self.plain(value) for n, value in fields.items()
                }
        return answer


class Twins(RuleBasedStateMachine):
    """Subclasses open the other queue."""

    lengths: list[int] = []
    """The steps of each history that was run."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths.append(0)
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        queues = [MemoryQueue(self.clock), self.opened()]
        self.sides = [Side(queue, self.do(queue.now())) for queue in queues]
        self.names: list[str] = []
        self.submitted = 0

    def opened(self) -> QueueBackend:
        raise NotImplementedError

    def named(self, name: str, tenant: str, key: str, limits: QueueLimits) -> tuple[str, QueueLimits]:
        """What a new request is called, and the limits under which it comes."""
        return name, limits

    def asked(self, wanted: LeaseRequest, with_outcome_of: str = "") -> LeaseRequest:
        """What a worker wants; with its outcome of a task of this request, if any."""
        return wanted

    def pools(self) -> Sequence[str]:
        """What is looked at after each step."""
        return POOLS

    def teardown(self) -> None:
        try:
            self.look_at_everything()
        finally:
            self.close(*(side.queue for side in self.sides))

    def close(self, *queues: QueueBackend) -> None:
        for queue in queues:
            self.do(queue.close())
        self.loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def both(self, ask: Callable[[Side], Awaitable[T]]) -> list[T]:
        """Ask both; their answers, or their errors, must be the same."""

        async def answered(side: Side) -> Any:
            try:
                return await ask(side)
            except UnfuseError as error:
                return error

        answers = [self.do(answered(side)) for side in self.sides]
        mine, other = (
            type(answer) if isinstance(answer, UnfuseError) else side.plain(answer)
            for side, answer in zip(self.sides, answers, strict=True)
        )
        assert mine == other
        return answers

    def step(self) -> None:
        self.lengths[-1] += 1

    def pushed(self, side: Side, name: str, pushed: dict[str, Any]) -> list[Task]:
        now = self.clock.now() + side.began - self.sides[0].began
        return [
            task_of(name, stage, 1, kind="k", model="m", params={}, **fields | {"not_before": at and now + at})
            for stage, fields in pushed.items()
            for at in [fields["not_before"]]
        ]

    def chosen(self, number: int) -> str:
        return self.names[number % len(self.names)] if self.names and number % 17 else "nobody"

    @rule(pushed=pushes, limits=LIMITS, key=st.sampled_from(["", "", "k", "l"]), again=st.integers(0, 40))
    def submit(self, pushed: dict[str, Any], limits: QueueLimits, key: str, again: int) -> None:
        self.step()
        name = self.names[again] if again < len(self.names) else f"{('r', 'video_')[again % 2]}{self.submitted:03}"
        self.submitted += 1
        tenant = "tu"[again // 2 % 2]
        name, limits = self.named(name, tenant, key, limits)
        fields = {
            "tenant": tenant,
            "idempotency_key": key,
            "fingerprint": "fg"[again % 3 : again % 3 + 1],
            "cost": float(again % 3),
            "plan": PLANS[again % 3],
            "order": again / 4,
            "webhook": "http://h" if again % 2 else "",
        }
        context = request(name, **fields)
        self.both(lambda side: side.queue.submit(context, self.pushed(side, name, pushed), [Event("queued")], limits))
        if name not in self.names:
            self.names.append(name)

    @rule(wanted=wants, name=st.sampled_from(["v", "w"]), ttl=st.sampled_from([1.0, TTL, 3 * TTL]))
    def lease(self, wanted: LeaseRequest, name: str, ttl: float) -> None:
        self.step()

        async def ask(side: Side) -> list[Lease]:
            return side.met(await side.queue.lease(name, self.asked(wanted), ttl))

        self.both(ask)

    @precondition(lambda self: self.sides[0].leases)
    @rule(
        number=st.integers(0, 1000),
        damage=st.sampled_from(["", "", "", "", "token", "attempt", "stage"]),
        verb=st.sampled_from(["renew", "progress", "progress", "hand_back", "refuse", "refuse"]),
    )
    def use_a_claim(self, number: int, damage: str, verb: str) -> None:
        self.step()

        async def ask(side: Side) -> Any:
            claim = side.claim(number, damage)
            match verb:
                case "renew":
                    claims = [claim, *(side.claim(number + more) for more in range(1, 3))]
                    return await side.queue.renew(claims, TTL)
                case "progress":
                    events = [Event("progress", step=number % 5, steps=5), Event("preview", message="x")][: number % 3]
                    return await side.queue.progress(claim, events)
                case "refuse":
                    return await side.queue.refuse(claim)
            return await side.queue.hand_back(claim)

        self.both(ask)

    @precondition(lambda self: self.sides[0].leases)
    @rule(
        number=st.integers(0, 1000),
        damage=st.sampled_from(["", "", "", "", "token", "attempt", "stage"]),
        shift=st.sampled_from([0, 0, 0, 0, -1, -2, 1]),
        length=st.integers(0, 4),
        mate=st.integers(0, 3),
    )
    def grow(self, number: int, damage: str, shift: int, length: int, mate: int) -> None:
        """Record pieces behind what is there, or over it, or beyond; alone, or with those of another task."""
        self.step()
        pieces = tuple(b"%d:%d" % (self.lengths[-1], piece) for piece in range(length))

        async def ask(side: Side) -> list[bool]:
            claims = [side.claim(number, damage), *(side.claim(number + more) for more in range(1, mate))]
            grown = []
            for claim in {claim.key: claim for claim in claims}.values():
                recorded = list[bytes]()
                with suppress(NotFound):
                    recorded = await side.queue.read_deltas(claim.request, claim.stage)
                grown.append(OutputDeltas(claim, len(recorded) + shift, pieces))
            return await side.queue.append_deltas(grown)

        self.both(ask)

    @rule(number=st.integers(0, 1000), after=st.integers(0, 5), limit=st.integers(1, 4))
    def read_pieces(self, number: int, after: int, limit: int) -> None:
        self.step()
        name, stage = self.chosen(number), STAGES[number % 4]
        self.both(lambda side: side.queue.read_deltas(name, stage, after, limit))

    @precondition(lambda self: self.sides[0].leases)
    @rule(
        number=st.integers(0, 1000),
        damage=st.sampled_from(["", "", "", "", "", "token", "attempt", "stage"]),
        pushed=pushes,
        is_last=st.booleans(),
        skipped=st.sampled_from([0, 0, 0, 0, 1]),
        wanted=st.none() | wants,
    )
    def complete(
        self, number: int, damage: str, pushed: dict[str, Any], is_last: bool, skipped: int, wanted: LeaseRequest | None
    ) -> None:
        """Commit with a claim, which may be an old one, or one that was committed already; or ask for more with it."""
        self.step()

        async def ask(side: Side) -> Any:
            claim = side.claim(number, damage)
            context = (await side.queue.load(claim.request)).context
            state = StageState("done", claim.attempt, side.chosen(number).token)
            status = "completed" if is_last and number % 3 == 0 else context.status
            context = msgspec.structs.replace(
                context,
                stages=context.stages | {claim.stage: state},
                status=status,
                version=context.version + 1 + skipped,
            )
            events = (Event("stage_completed", stage=claim.stage),)
            push = () if context.is_over else tuple(self.pushed(side, claim.request, pushed))
            change = Change(context, claim, push=push, events=events)
            if wanted is None:
                return await side.queue.commit(change)
            record, leases = await side.queue.commit_and_lease(change, "w", self.asked(wanted, claim.request), TTL)
            return record, side.met(leases)

        self.both(ask)

    @rule(
        number=st.integers(0, 1000),
        close=st.lists(st.sampled_from(STAGES), max_size=2),
        pushed=pushes,
        end=st.sampled_from(["", "", "cancelled", "failed", "looked at"]),
        skipped=st.sampled_from([0, 0, 0, 0, -1, 1]),
    )
    def decide(self, number: int, close: list[str], pushed: dict[str, Any], end: str, skipped: int) -> None:
        """Commit without a claim: close, push, end, or mark one that is over."""
        self.step()
        name = self.chosen(number)

        async def ask(side: Side) -> RequestRecord:
            context = (await side.queue.load(name)).context
            fields: dict[str, Any] = {"order": float(number % 3), "version": context.version + 1 + skipped}
            if end == "looked at":
                fields |= {"is_dead_letter": False}
            elif end and not context.is_over:
                fields |= {"status": end, "is_dead_letter": number % 2 == 0, "completed_at": self.clock.wall()}
            changed = msgspec.structs.replace(context, **fields)
            keys = tuple((name, stage) for stage in close)
            return await side.queue.commit(
                Change(changed, close=keys, push=tuple(self.pushed(side, name, pushed)), events=(Event("retrying"),))
            )

        self.both(ask)

    @rule(seconds=passing_s, sweeps=st.sampled_from(["before", "after", "both", "no"]))
    def let_time_pass(self, seconds: float, sweeps: str) -> None:
        self.step()
        if sweeps in ("before", "both"):
            self.sweep()
        self.clock.advance(seconds)
        if sweeps in ("after", "both"):
            self.sweep()

    def sweep(self) -> None:
        async def ask(side: Side) -> list[Any]:
            return sorted(await side.queue.sweep_expired(TTL), key=lambda late: late.task.key)

        self.both(ask)

    @rule(
        verb=st.sampled_from(["list", "load", "follow", "hello", "brings", "bye", "drop", "forget", "over", "declare"]),
        number=st.integers(0, 1000),
        which=filters,
        limit=st.integers(1, 4),
    )
    def read_or_clean_up(self, verb: str, number: int, which: RequestFilter, limit: int) -> None:
        self.step()
        name, member = self.chosen(number), "vw"[number % 2]

        async def ask(side: Side) -> Any:
            match verb:
                case "list":
                    after, oldest_first = None if number % 2 else name, number % 3 == 0
                    return await side.queue.list(which, after=after, limit=limit, oldest_first=oldest_first)
                case "load":
                    return await side.queue.load(name)
                case "follow":
                    return await self.followed(side, name, number % 4)
                case "bye":
                    return await side.queue.unregister(member)
                case "drop":
                    return await side.queue.drop(name)
                case "declare":
                    await side.queue.declare(member, DeclaredModels(tuple(CARDS[: number % 3]), {"p": number}))
                    return await side.queue.declarations()
                case "over":
                    return await side.queue.ended_among([name, "nobody", *self.names[number % 5 :: 3]])
                case "forget":
                    return sorted(await side.queue.drop_ended_before(self.clock.wall() - 4.0 * (number % 2)))
            cards = CARDS if verb == "brings" else ()
            return await side.queue.register(worker_info(member, pid=number, secret_hash=b"\0\xff"), cards)

        self.both(ask)

    @rule(
        verb=st.sampled_from(["cache", "cache", "cached", "look", "uncache"]),
        keys=st.lists(st.sampled_from("klmn"), min_size=1, max_size=3),
        id=st.sampled_from("ab"),
        nbytes=st.sampled_from([0, 1, 30, 50, 101]),
        room=st.sampled_from([100, 100, 60]),
    )
    def share_outputs(self, verb: str, keys: list[str], id: str, nbytes: int, room: int) -> None:
        self.step()

        async def ask(side: Side) -> Any:
            match verb:
                case "cache":
                    return await side.queue.put_encoding(keys[0], object_ref(id, nbytes), room)
                case "uncache":
                    return await side.queue.remove_encoding(keys[0], id)
            return await side.queue.find_encoding(keys, use=verb == "cached")

        self.both(ask)

    async def followed(self, side: Side, name: str, after: int) -> list[Event]:
        """What is there of the events of one that is over; of another, as many as there are."""
        entry = self.sides[0].queue._requests.get(name)  # type: ignore[attr-defined]
        last = None if entry is None or entry.context.is_over else entry.history.last
        if last is not None and after >= last:
            return []
        found: list[Event] = []
        async with aclosing(side.queue.watch(name, after)) as stream:  # type: ignore[type-var]
            async for event in stream:
                found.append(event)
                if event.seq == last:
                    break
        return found

    @invariant()
    def they_stand_alike(self) -> None:
        for pool in self.pools():
            self.both(lambda side, pool=pool: side.queue.peek(pool, 100))  # type: ignore[misc]
        self.both(self.stats)

    async def stats(self, side: Side) -> QueueStats:
        """How much there is to do."""
        return await side.queue.stats(self.pools())

    def look_at_everything(self) -> None:
        self.both(lambda side: side.queue.list(RequestFilter(), limit=1000))
        self.both(lambda side: side.queue.workers())
        self.both(lambda side: side.queue.find_encoding(list("klmn")))
        for name in self.names:
            for stage in STAGES:
                self.both(lambda side, name=name, stage=stage: side.queue.read_deltas(name, stage))  # type: ignore[misc]
        self.they_stand_alike()
