"""An in-memory queue for tests and small installations: the reference that every other backend matches.

A method is a transaction because it does not await between its first check and its last effect, and the event loop runs
one task at a time.
"""

from __future__ import annotations

import asyncio
import builtins
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, islice
from math import ceil

import msgspec
from typing_extensions import override

from unfuse.core.clock import Clock, SystemClock
from unfuse.core.errors import Conflict, LeaseLost, LimitReached, NotFound, Overloaded
from unfuse.core.messages import WorkerInfo
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import readable_pool
from unfuse.core.request import Change, Event, RequestContext, RequestRecord, TenantLimits, Timings
from unfuse.core.task import MAX_DELTAS_PER_MESSAGE, Claim, Lease, OutputDeltas, Task, check_deltas, check_gap
from unfuse.queues.base import (
    FRONT_TASKS,
    MAX_REFUSALS,
    NANOSECONDS,
    DeclaredModels,
    LeaseRequest,
    PoolStats,
    QueueBackend,
    QueueLimits,
    QueueStats,
    RegisteredWorker,
    RenewalResult,
    RequestFilter,
    check_storable,
    remaining_of,
)
from unfuse.queues.index import IndexEntry, MemoryEncoderIndex, RequestIndex
from unfuse.queues.tasks import Leases, PoolQueues, QueuedTask

#: Rate limits count whole microseconds, which every backend adds exactly.
MICROSECONDS = 10**6


@dataclass(eq=False, slots=True)
class _Waiter:
    """A caller of `lease` that waits for a task."""

    worker: str
    wanted: LeaseRequest
    #: Pools whose changes may make a task available to it.
    pools: frozenset[str]
    #: Done when the caller should try to lease again.
    woken: asyncio.Future[None]

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class MemoryQueue(MemoryEncoderIndex, QueueBackend):
    """A queue backend in the memory of one process and one event loop.

    Its state is lost with the process. A backend that also stores the state elsewhere overrides `_on_change`,
    `_wait_until_stored`, `_check_writable` and `_check_readable`, which do nothing here.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._requests: dict[str, IndexEntry] = {}
        self._index = RequestIndex()
        self._pools = PoolQueues()
        self._leases = Leases()
        self._arrivals = 0
        #: Sums over all active requests: their cost, and predicted nanoseconds by pool.
        self._cost = 0.0
        self._remaining = Counter[str]()
        #: When each tenant has its whole rate limit again, in microseconds of the queue's clock.
        self._rate_whole_at: dict[str, int] = {}
        self._members: dict[str, RegisteredWorker] = {}
        self._declared: dict[str, DeclaredModels] = {}
        self._secrets: dict[str, str] = {}
        #: Recorded output deltas, by request and stage.
        self._pieces = defaultdict[str, defaultdict[str, list[bytes]]](lambda: defaultdict(list))
        self._waiters: dict[_Waiter, None] = {}
        #: Pools that have changed since waiters were woken, as an ordered set.
        self._changed_pools: dict[str, None] = {}
        #: The time for which the alarm is set, or None.
        self._due: float | None = None
        self._withdraw_alarm: Callable[[], None] = lambda: None
        self._closed = False

    @classmethod
    def open(cls, url: str, clock: Clock | None = None) -> MemoryQueue:
        """Return a new, empty queue. The address is ignored."""
        return cls(clock or SystemClock())

    def _on_change(self, entry: IndexEntry) -> None:
        """React to a change of a request, other than its progress."""

    async def _wait_until_stored(self, entry: IndexEntry, durable: bool = False) -> None:
        """Wait until a request's present state is stored (`durable`: safe from a power loss)."""

    def _check_writable(self) -> None:
        """Raise TransientError while changes are impossible."""

    def _check_readable(self) -> None:
        """Raise TransientError once changes in memory can no longer be stored."""

    @override
    async def now(self) -> float:
        return self._clock.now()

    @override
    async def check(self) -> None:
        self._check_writable()

    @override
    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: QueueLimits
    ) -> RequestRecord:
        self._check_writable()
        check_storable(context, *tasks, *events)
        entry = self._requests.get(context.id) or self._index.find_repeated(context)
        if entry is None:
            whole_at = self._require_allowance(context.caller.tenant, limits.tenant)
            self._require_capacity(context, tasks, limits)

            if limits.tenant.rate:
                self._rate_whole_at[context.caller.tenant] = whole_at
            # Unix microseconds, so that a queue of several shards can merge their lists by number.
            self._arrivals = max(self._arrivals, int(self._clock.wall() * 1e6))
            entry = self._requests[context.id] = IndexEntry(context, self._arrival())
            self._apply(entry, tasks, events)
            self._account(entry, None)
        return await self._stored_record(entry)

    def _require_allowance(self, tenant: str, allowance: TenantLimits) -> int:
        """Apply the tenant's limits to one more request. Raises LimitReached.

        Returns when the tenant has its whole rate again if the request is accepted, in microseconds.
        """
        concurrent = allowance.concurrent
        if concurrent and (active := self._index.count_active(tenant)) >= concurrent:
            message = f"tenant {tenant} has {active} requests in progress, its key allows {concurrent}"
            raise LimitReached(f"{message}: try again when one has ended")

        # A token bucket, stored as the time at which it is full. Each request moves that time by period / rate.
        now = int(self._clock.now() * MICROSECONDS)
        period = allowance.per_s * MICROSECONDS
        refill = period // allowance.rate if allowance.rate else 0
        whole_at = max(self._rate_whole_at.get(tenant, 0), now) + refill
        excess = whole_at - now - period
        if allowance.rate and excess > 0:
            wait = ceil(excess / MICROSECONDS)
            limit = f"{allowance.rate} requests in {allowance.per_s} s"
            raise LimitReached(f"the key of {tenant} allows {limit}: try again in {wait} s", excess / MICROSECONDS)
        return whole_at

    def _require_capacity(self, context: RequestContext, tasks: Sequence[Task], limits: QueueLimits) -> None:
        """Apply admission control to one more request with these tasks. Raises Overloaded."""
        active = self._index.count_active()
        if active >= limits.max_active:
            raise Overloaded(f"{active} requests are in progress, which is the limit: try again later")
        if limits.max_cost is not None and active and self._cost + context.cost > limits.max_cost:
            raise Overloaded(
                f"the predicted cost of all active requests would exceed {limits.max_cost:g} s: try again later"
            )
        for pool, added in Counter(task.planned.pool for task in tasks).items():
            size, label = self._pools.size(pool), readable_pool(pool)
            if size + added > limits.max_queue:
                raise Overloaded(f"{size} tasks wait in pool {label}, the limit is {limits.max_queue}: try again later")

    @override
    async def lease(self, worker: str, wanted: LeaseRequest, ttl: float, wait: float = 0.0) -> list[Lease]:
        """Return leases before they are stored: after a crash, tasks may be leased again."""
        self._check_writable()
        deadline = self._clock.now() + wait
        while True:
            leases = self._claim(worker, wanted, ttl)
            self._wake()
            if leases or wanted.slots < 1 or self._closed or self._clock.now() >= deadline:
                self._check_readable()
                return leases
            await self._wait(worker, wanted, deadline)

    def _claim(self, worker: str, wanted: LeaseRequest, ttl: float) -> builtins.list[Lease]:
        """Lease tasks, without waiting."""
        leases: list[Lease] = []
        used = Counter[str]()
        while len(leases) < wanted.slots and (queued := self._next_task(worker, wanted, used)) is not None:
            task = queued.task
            used.update(task.resources)
            self._pools.remove(queued)

            now, wall = self._clock.now(), self._clock.wall()
            entry = self._requests[task.request]
            lease = Lease(task, worker, secrets.token_bytes(16), now + ttl)
            self._leases.add(queued, lease, now, wall)
            leases.append(msgspec.structs.replace(lease, recorded_deltas=entry.appended.get(task.stage, 0)))
            self._publish(entry, [Event("stage_started", wall, task.stage, task.attempt, worker)])
            self._note_change(entry)
        if leases:  # all pools: the caller may have been woken for another task than it leased
            self._changed_pools |= dict.fromkeys(wanted.pools)
        return leases

    def _next_task(self, worker: str, wanted: LeaseRequest, used: Counter[str]) -> QueuedTask | None:
        self._release_due()
        return self._pools.next(worker, wanted, self._clock.now(), used)

    async def _wait(self, worker: str, wanted: LeaseRequest, deadline: float) -> None:
        """Wait until there may be a task for a worker, or the clock reaches `deadline`."""
        waiter = _Waiter(worker, wanted, wanted.watched_pools(), asyncio.get_running_loop().create_future())
        self._waiters[waiter] = None
        withdraw_alarm = self._clock.call_at(deadline, waiter.wake)
        try:
            await waiter.woken
        except asyncio.CancelledError:  # it may have been woken: then the task is for another waiter
            self._changed_pools |= dict.fromkeys(wanted.pools)
            self._wake()
            raise
        finally:
            withdraw_alarm()
            del self._waiters[waiter]

    def _wake(self) -> None:
        """Wake, for each changed pool, the first waiter that can lease a task now.

        One waiter is enough, since its lease changes the pool again. This also sets the alarm, which wakes waiters for
        delayed tasks. Methods that change the state call this before their first await.
        """
        changed_pools, self._changed_pools = self._changed_pools, {}
        for pool in changed_pools:
            self._wake_first(pool)

        due = None if self._closed else self._pools.next_due()
        if due != self._due:
            self._withdraw_alarm()
            self._due = due
            self._withdraw_alarm = lambda: None
            if due is not None:
                self._withdraw_alarm = self._clock.call_at(due, partial(self._wake_at, due))

    def _wake_first(self, pool: str) -> None:
        for waiter in sorted(
            self._waiters, key=lambda waiter: (waiter.wanted.priority_above is not None, waiter.wanted.rank)
        ):
            is_waiting = pool in waiter.pools and not waiter.woken.done()
            if is_waiting and self._next_task(waiter.worker, waiter.wanted, Counter()):
                waiter.wake()
                return

    def _wake_at(self, due: float) -> None:
        self._release_due(due)
        self._wake()

    @override
    async def renew(self, claims: Sequence[Claim], ttl: float) -> RenewalResult:
        if claims:
            self._check_writable()
        return self._leases.renew(claims, self._clock.now() + ttl)

    @override
    async def progress(self, claim: Claim, events: Sequence[Event], used: Timings | None = None) -> bool:
        self._check_writable()
        check_storable(*events)
        leased = self._leases.find(claim)
        if leased is None:
            return False
        for event in events[-1:]:
            leased.running = msgspec.structs.replace(leased.running, step=event.step, steps=event.steps)
        if used is not None and used.share_s >= leased.running.timings.share_s:
            leased.running = msgspec.structs.replace(leased.running, timings=used)
        self._publish(self._requests[claim.request], events)
        return True

    @override
    async def append_deltas(self, outputs: Sequence[OutputDeltas]) -> builtins.list[bool]:
        self._check_writable()
        check_deltas(outputs)
        has_lease = [self._leases.find(output.claim) is not None for output in outputs]
        leased = [(output, self._requests[output.claim.request]) for output in compress(outputs, has_lease)]
        # All checks before the first effect: a call changes everything or nothing.
        for output, entry in leased:
            check_gap(output, entry.appended.get(output.claim.stage, 0))

        for output, entry in leased:
            claim = output.claim
            recorded = entry.appended.get(claim.stage, 0)
            if new := output.deltas[recorded - output.offset :]:
                self._store_pieces(entry, OutputDeltas(claim, recorded, new))
                count = entry.appended[claim.stage] = recorded + len(new)
                self._publish(entry, [Event("appended", stage=claim.stage, attempt=claim.attempt, step=count)])
        for _, entry in leased:  # also if nothing is new: the call that is repeated may not be stored yet
            await self._wait_until_stored(entry)
        return has_lease

    def _store_pieces(self, entry: IndexEntry, output: OutputDeltas) -> None:
        """Store new output deltas. To be called before their event is published."""
        self._pieces[entry.context.id][output.claim.stage] += output.deltas

    @override
    async def read_deltas(
        self, request: str, stage: str, after: int = 0, limit: int = MAX_DELTAS_PER_MESSAGE
    ) -> builtins.list[bytes]:
        self._entry(request)
        return self._pieces[request][stage][after : after + limit]

    @override
    async def commit(self, change: Change) -> RequestRecord:
        self._check_writable()
        return await self._stored_record(self._commit(change))

    @override
    async def commit_and_lease(
        self, change: Change, worker: str, wanted: LeaseRequest, ttl: float
    ) -> tuple[RequestRecord, builtins.list[Lease]]:
        self._check_writable()
        entry = self._commit(change)
        leases = self._claim(worker, wanted, ttl)
        try:
            return await self._stored_record(entry), leases
        except BaseException:  # the caller does not get these leases
            for lease in leases:
                self._hand_back(lease.claim)
            raise

    def _commit(self, change: Change) -> IndexEntry:
        """Apply a transition in memory. Raises what `commit` raises."""
        context, claim = change.context, change.claim
        check_storable(context, *change.push, *change.events)
        entry = self._entry(context.id)
        before = entry.context

        if claim is not None:
            state = before.stages.get(claim.stage)
            if state and (state.status, state.attempt, state.token) == ("done", claim.attempt, claim.token):
                return entry  # this commit was applied already
            if self._leases.find(claim) is None:
                raise _lost(claim)
        if context.version != before.version + 1:
            raise Conflict(f"request {context.id} is at version {before.version}, not {context.version - 1}")

        entry.context = context
        for request, stage in (claim.key, *change.close) if claim is not None else change.close:
            if closed := self._requests.get(request):
                self._remove_task(closed, stage)
        self._apply(entry, change.push, change.events)
        self._account(entry, before)
        return entry

    @override
    async def hand_back(self, claim: Claim) -> bool:
        self._check_writable()
        entry = self._hand_back(claim)
        if entry is not None:
            await self._wait_until_stored(entry)
        return entry is not None

    @override
    async def refuse(self, claim: Claim) -> int:
        self._check_writable()
        leased = self._leases.find(claim)
        if leased is None:
            raise _lost(claim)
        refusals, worker = leased.queued.returned, leased.lease.worker
        if not leased.running.step:
            refusals[worker] = refusals.get(worker, 0) + 1
        excluded = sum(count >= MAX_REFUSALS for count in refusals.values())
        await self.hand_back(claim)
        return excluded

    def _hand_back(self, claim: Claim) -> IndexEntry | None:
        """Requeue a leased task as its next attempt. Returns its request, None without the lease."""
        leased = self._leases.find(claim)
        if leased is None:
            return None
        self._leases.end(claim.key)
        queued = leased.queued
        entry = self._requests[claim.request]
        queued.task = msgspec.structs.replace(queued.task, attempt=queued.task.attempt + 1)
        self._put(queued)
        self._note_change(entry)
        self._wake()
        return entry

    @override
    async def sweep_expired(self, ttl: float) -> builtins.list[Lease]:
        self._check_writable()
        return self._leases.expired(self._clock.now(), ttl)

    @override
    async def stats(self, pools: Sequence[str]) -> QueueStats:
        self._release_due()
        return QueueStats(self._index.count_active(), {pool: self._pool_stats(pool) for pool in pools})

    def _pool_stats(self, pool: str) -> PoolStats:
        wall = self._clock.wall()
        oldest = max((wall - queued.pushed for queued in self._pools.front(pool, FRONT_TASKS)), default=0.0)
        return PoolStats(self._pools.size(pool), max(0.0, oldest), self._remaining[pool] / NANOSECONDS)

    @override
    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        self._release_due()
        return [queued.task for queued in self._pools.front(pool, limit)]

    @override
    async def load(self, request: str) -> RequestRecord:
        return self._record(self._entry(request))

    @override
    async def ended_among(self, requests: Sequence[str]) -> builtins.list[str]:
        self._check_readable()
        return [id for id in requests if (entry := self._requests.get(id)) is None or entry.context.is_over]

    @override
    async def list(
        self, which: RequestFilter, *, after: str | int | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[RequestRecord]:
        self._check_readable()
        if isinstance(after, str):
            start = self._entry(after)
            if which.tenant not in (None, start.context.caller.tenant):
                raise _unknown(after)
            after = start.number
        return [self._record(entry) for entry in islice(self._index.find(which, after, oldest_first), limit)]

    @override
    def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        return self._entry(request).history.follow(after)

    @override
    async def drop_ended_before(self, before: float) -> Sequence[str]:
        dropped = [entry.context.id for entry in self._index.ended_before(before)]
        for request in dropped:
            await self.drop(request)
        return dropped

    @override
    async def drop(self, request: str) -> None:
        entry = self._requests.get(request)
        if entry is None or not entry.context.is_over:
            return
        del self._requests[request]
        self._pieces.pop(request, None)
        self._index.remove(entry)
        entry.history.end()
        self._on_change(entry)
        await self._wait_until_stored(entry)

    @override
    async def register(self, worker: WorkerInfo, specs: Sequence[ModelSpec] = ()) -> None:
        earlier = self._members.get(worker.id)
        self._members[worker.id] = RegisteredWorker(
            worker, tuple(specs) or (earlier.models if earlier else ()), self._clock.now()
        )

    @override
    async def unregister(self, worker: str) -> None:
        self._members.pop(worker, None)
        self._leases.expire_worker(worker, self._clock.now())

    @override
    async def workers(self) -> Sequence[RegisteredWorker]:
        self._check_readable()
        leased = self._leases.by_worker()
        return [msgspec.structs.replace(member, leased=leased[name]) for name, member in self._members.items()]

    @override
    async def declare(self, by: str, declaration: DeclaredModels, *, new: bool = False) -> bool:
        if new and by in self._declared and self._declared[by].is_current:
            return False
        self._declared[by] = declaration
        return True

    @override
    async def declarations(self) -> dict[str, DeclaredModels]:
        return dict(self._declared)

    @override
    async def secret(self, name: str, proposed: str) -> str:
        return self._secrets.setdefault(name, proposed)

    @override
    async def close(self) -> None:
        self._end()

    def _end(self) -> None:
        """Return an empty list to all waiting callers, and end all event streams."""
        self._closed = True
        for waiter in self._waiters:
            waiter.wake()
        self._wake()
        for entry in self._requests.values():
            entry.history.end()

    def _entry(self, request: str) -> IndexEntry:
        """Return the stored request. Raises NotFound."""
        self._check_readable()
        entry = self._requests.get(request)
        if entry is None:
            raise _unknown(request)
        return entry

    def _record(self, entry: IndexEntry) -> RequestRecord:
        """Return the record of a request, with its running stages or its position."""
        tasks = entry.queued
        running = self._leases.running([queued.task.key for queued in tasks], self._clock.now())
        if running:
            return RequestRecord(entry.context, running, None, entry.number)
        self._release_due()
        position = min((self._pools.position(queued) for queued in tasks), default=None)
        return RequestRecord(entry.context, (), position, entry.number)

    async def _stored_record(self, entry: IndexEntry) -> RequestRecord:
        """Return a changed request's record as of now, once the request is stored."""
        self._wake()
        record = self._record(entry)
        await self._wait_until_stored(entry, durable=True)
        return record

    def _apply(self, entry: IndexEntry, tasks: Sequence[Task], events: Sequence[Event]) -> None:
        """Push tasks and publish events of a new or changed request."""
        for task in tasks:
            self._remove_task(entry, task.stage)
            excluded = {task.avoid_worker: MAX_REFUSALS} if task.avoid_worker else {}
            queued = QueuedTask(task, self._arrival(), self._clock.wall(), excluded)
            entry.tasks[task.stage] = queued
            self._put(queued)
        for stage in entry.tasks if entry.context.is_over else ():
            self._remove_task(entry, stage)
        self._publish(entry, events)
        self._note_change(entry)

    def _arrival(self) -> int:
        """Return the next number of arrival, which orders requests and tasks."""
        self._arrivals += 1
        return self._arrivals - 1

    def _put(self, queued: QueuedTask) -> None:
        self._pools.put(queued, self._clock.now())
        self._changed_pools[queued.task.planned.pool] = None

    def _remove_task(self, entry: IndexEntry, stage: str) -> None:
        """Remove a queued task, or end the lease of a leased one."""
        queued = entry.tasks.get(stage)
        if queued is None:
            return
        entry.tasks[stage] = None
        if self._leases.end(queued.task.key) is None:
            self._pools.remove(queued)
            self._changed_pools[queued.task.planned.pool] = None

    def _release_due(self, now: float | None = None) -> None:
        """Queue the delayed tasks whose `not_before` has passed."""
        self._changed_pools |= dict.fromkeys(self._pools.release_due(self._clock.now() if now is None else now))

    def _publish(self, entry: IndexEntry, events: Sequence[Event]) -> None:
        for event in events:
            entry.history.publish(event, self._clock.wall())
        if entry.context.is_over:
            entry.history.end()

    def _note_change(self, entry: IndexEntry) -> None:
        self._update_index(entry)
        self._on_change(entry)

    def _update_index(self, entry: IndexEntry) -> None:
        context = entry.context
        is_running = any(self._leases.get(queued.task.key) for queued in entry.queued)
        self._index.put(entry, "in_progress" if is_running and context.status == "queued" else context.status)

    def _account(self, entry: IndexEntry, before: RequestContext | None) -> None:
        """Update the sums over active requests, after the index. `before`: the last context, if any."""
        change = (not entry.context.is_over) - (before is not None and not before.is_over)
        # Without active requests exactly 0, since sums of floats drift.
        self._cost = self._cost + change * entry.context.cost if self._index.count_active() else 0.0
        self._remaining.update(remaining_of(entry.context))
        self._remaining.subtract(remaining_of(before) if before is not None else {})
        self._remaining = +self._remaining  # drops pools whose sum is 0


def _unknown(request: str) -> NotFound:
    return NotFound(f"request {request} does not exist")


def _lost(claim: Claim) -> LeaseLost:
    return LeaseLost(f"attempt {claim.attempt} of {claim.stage} of {claim.request} no longer has its lease")
