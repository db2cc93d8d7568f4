"""A queue over several shards, in which each request's id determines its shard.

All guarantees for one request are its shard's. Guarantees between requests hold within a shard, so requests of a tenant
with an allowance share one, as do repeats of an idempotency key. No transaction spans two shards.

While a shard is unreachable, its requests are too. Everything else continues: new requests go to other shards, and
lists, statistics and registries leave it out.
"""

from __future__ import annotations

import asyncio
import builtins
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from heapq import merge
from itertools import chain, islice
from operator import itemgetter
from typing import Any, Concatenate, ParamSpec, TypeVar
from zlib import crc32

import msgspec
import structlog
from typing_extensions import override

from unfuse.core.clock import Clock
from unfuse.core.errors import KeyUnavailable, NotFound, TransientError
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Caller, Change, Event, RequestContext, RequestRecord, TenantLimits
from unfuse.core.task import Claim, Lease, OutputDeltas, Task, check_deltas
from unfuse.queues.base import (
    DeclaredModels,
    LeaseRequest,
    PoolStats,
    QueueBackend,
    QueueLimits,
    QueueStats,
    RegisteredWorker,
    RenewalResult,
    RequestFilter,
)
from unfuse.queues.shard_health import ShardHealth, T, Work

#: Most listed requests whose number of arrival is remembered.
MAX_LISTED = 1024

P = ParamSpec("P")
Item = TypeVar("Item")

log = structlog.get_logger(__name__)


Asking = asyncio.Task[list[Lease]]


class ShardRotation:
    """Leases tasks from the shards round-robin, for each worker. One call leases from one shard.

    While a worker lacks resources for the next task of a shard, it leases from the others only tasks that may overtake
    that one: otherwise small tasks would starve a large one.
    """

    def __init__(self, health: ShardHealth) -> None:
        self._health = health
        self._count = len(health.shards)
        #: The first shard to ask, and the number of commits, by worker.
        self._next = Counter[str]()
        self._commits = Counter[str]()
        #: Workers that lack resources for the next task of a shard.
        self._blocked = set[str]()

    def of(self, worker: str, last: int = -1) -> list[int]:
        """Return the reachable shards in the worker's order, with shard `last` moved to the end."""
        first = self._next[worker]
        order = sorted(range(self._count), key=lambda shard: (shard == last, (shard - first) % self._count))
        return self._health.reachable(order)

    def is_due(self, worker: str) -> bool:
        """Count a commit, and return whether the worker should try the other shards first."""
        self._commits[worker] += 1
        return worker in self._blocked or self._commits[worker] % self._count == 0

    def forget(self, worker: str) -> None:
        """Drop the state of a worker."""
        del self._next[worker], self._commits[worker]
        self._blocked.discard(worker)

    async def claim(
        self, worker: str, wanted: LeaseRequest, ttl: float, among: Iterable[int]
    ) -> tuple[list[Lease], dict[int, LeaseRequest]]:
        """Lease tasks from the first of these shards that has any.

        Returns the leases and, by shard, the requests to wait with. Raises TransientError if no shard is reachable.
        """
        requests = dict[int, LeaseRequest]()
        failures = dict[int, TransientError]()
        leases = list[Lease]()
        blocking = None  # the first shard with a task for which the worker lacks resources
        for shard in among:
            requests[shard] = wanted
            try:
                leases = await self._health.call(shard, lambda queue: queue.lease(worker, requests[shard], ttl))  # noqa: B023
                if leases:
                    self._next[worker] = shard + 1
                    break
                wanted = await self._health.call(shard, partial(_restrict, wanted))
            except TransientError as error:
                failures[shard] = error
            if blocking is None and wanted is not requests[shard]:
                blocking = shard
            if not wanted.pools:
                break
        if failures and len(failures) == len(requests):
            raise failures.popitem()[1]

        self._blocked.discard(worker)
        if blocking is not None:
            # The worker calls this shard first until the large task is leased.
            self._blocked.add(worker)
            self._next[worker] = blocking
        return leases, requests

    async def wait(self, worker: str, requests: Mapping[int, LeaseRequest], ttl: float, wait: float) -> list[Lease]:
        """Lease tasks from the shard that has any first, within `wait` seconds.

        Leases of the other shards are handed back. Stops waiting when only calls to unreachable shards are
        left. Raises TransientError if every call failed.
        """
        calls = {
            asyncio.create_task(self._health.shards[shard].lease(worker, wanted, ttl, wait)): shard
            for shard, wanted in requests.items()
        }
        pending, winner = {*calls}, None
        try:
            while winner is None and pending and not self._are_unreachable(calls[call] for call in pending):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                winner = next((call for call in done if call.exception() is None and call.result()), None)
            failed = [call for call in calls if call.done() and call.exception()]
            return winner.result() if winner else failed[0].result() if len(failed) == len(calls) else []
        finally:
            losers = {call: shard for call, shard in calls.items() if call is not winner}
            for call in losers:
                call.cancel()
            cleanup = self._health.background.run(f"wait {id(losers)}", partial(self._hand_back_all, losers))
            # Without a winner the caller gets no lease, so none may exist when this returns or raises.
            if winner is None:
                await asyncio.shield(cleanup)

    def _are_unreachable(self, shards: Iterable[int]) -> bool:
        """Return whether all of these shards are unreachable, but not the whole queue."""
        unreachable = self._health.unreachable
        return len(unreachable) < self._count and all(shard in unreachable for shard in shards)

    async def _hand_back_all(self, calls: Mapping[Asking, int]) -> None:
        """Hand back all leases of these calls, once they have ended."""
        await asyncio.gather(*calls, return_exceptions=True)
        for call, shard in calls.items():
            for lease in () if call.cancelled() or call.exception() else call.result():
                with suppress(TransientError):
                    await self._health.shards[shard].hand_back(lease.claim)


async def _restrict(wanted: LeaseRequest, queue: QueueBackend) -> LeaseRequest:
    """Return the request without pools that may not overtake the next tasks of this queue."""
    stats = (await queue.stats([*wanted.watched_pools()])).pools
    for pool, offer in wanted.pools.items():
        is_held_back = any(stats[fed].waiting > limit for fed, limit in offer.backpressure.items())
        for task in await queue.peek(pool, 1) if stats[pool].waiting and not is_held_back else ():
            missing = offer.missing_resources(task.resources, {})
            if (
                missing
                and pool in wanted.pools
                and (wanted.priority_above is None or task.priority > wanted.priority_above)
            ):
                others = {
                    name: other
                    for name, other in wanted.pools.items()
                    if other.stage_depth > offer.stage_depth or missing.isdisjoint(other.amounts)
                }
                wanted = msgspec.structs.replace(wanted, pools=others)
    return wanted


def _delegate(
    verb: Callable[Concatenate[QueueBackend, P], Awaitable[T]], call_shards: Callable[..., Awaitable[T]]
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method that calls `verb` on the shards that `call_shards` selects."""

    async def delegate(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await call_shards(self, lambda queue: getattr(queue, verb.__name__)(*args, **kwargs), *args[:1])

    return delegate


class ShardedQueue(QueueBackend):
    """A queue backend that shards requests over several queues by a hash of their ids.

    All processes must name the same `shards` in the same order. Leases and the order of tasks are those of each shard;
    workers call the shards round-robin. Each shard has an equal part of the limits. The worker registry and
    declarations are in all shards, the encoder index and secrets in the first. Times are the first reachable shard's,
    so the shards' clocks must agree. `unsharded` are the queues without shards at the same addresses: `check_address`
    checks that these addresses store no other layout.
    """

    async def _at_home(self, work: Work[T], subject: str | Claim | Change) -> T:
        """Call the shard of a request."""
        match subject:
            case Claim():
                subject = subject.request
            case Change():
                subject = subject.context.id
        return await self._health.call(self.shard_of(subject), work)

    async def _at_first(self, work: Work[T], *_: object) -> T:
        """Call the first shard. Raises TransientError at once while it is known to be unreachable."""
        if reason := self._health.unreachable.get(0):
            raise TransientError(reason)
        return await self._health.call_with_timeout(0, work)

    async def _at_each(self, work: Work[object], *_: object) -> None:
        """Call all reachable shards."""
        await self._health.call_each(work)

    async def _of_all(self, work: Work[Sequence[T]], *_: object) -> builtins.list[T]:
        """Call all reachable shards. Returns their results in one list."""
        return [*chain(*(await self._health.call_each(work)).values())]

    load, commit = _delegate(QueueBackend.load, _at_home), _delegate(QueueBackend.commit, _at_home)
    progress, read_deltas = _delegate(QueueBackend.progress, _at_home), _delegate(QueueBackend.read_deltas, _at_home)
    hand_back, refuse = _delegate(QueueBackend.hand_back, _at_home), _delegate(QueueBackend.refuse, _at_home)
    drop, secret = _delegate(QueueBackend.drop, _at_home), _delegate(QueueBackend.secret, _at_first)
    put_encoding, remove_encoding = (
        _delegate(QueueBackend.put_encoding, _at_first),
        _delegate(QueueBackend.remove_encoding, _at_first),
    )
    check, register = _delegate(QueueBackend.check, _at_each), _delegate(QueueBackend.register, _at_each)
    sweep_expired, drop_ended_before = (
        _delegate(QueueBackend.sweep_expired, _of_all),
        _delegate(QueueBackend.drop_ended_before, _of_all),
    )
    damaged, discard = _delegate(QueueBackend.damaged, _of_all), _delegate(QueueBackend.discard, _at_each)

    def __init__(self, shards: Sequence[QueueBackend], unsharded: Sequence[QueueBackend] = ()) -> None:
        self.shared = any(shard.shared for shard in shards)
        self._unsharded = unsharded
        self._count = len(shards)
        self._health = ShardHealth(shards, self._restore_declarations)
        self._each = self._health.call_each
        self._rotation = ShardRotation(self._health)
        self._declared: dict[str, DeclaredModels] = {}
        #: Tenant and number of arrival of the last requests of listed pages, by id.
        self._listed: dict[str, tuple[str, int]] = {}
        self._latest = 0.0

    @classmethod
    def open(cls, url: str, clock: Clock | None = None) -> QueueBackend:
        """Not available: the address of a Redis queue has the number of its shards."""
        raise NotImplementedError

    def shard_of(self, name: str) -> int:
        """Return the shard number for a request id, or for a name that requests share."""
        return crc32(name.encode(errors="replace")) % self._count

    @override
    async def now(self) -> float:
        self._latest = max(self._latest, await self._health.first(lambda queue: queue.now()))
        return self._latest

    @override
    async def check_address(self) -> None:
        checks = (queue.check_address() for queue in (*self._unsharded, *self._health.shards))
        for error in await asyncio.gather(*checks, return_exceptions=True):
            if error is not None:
                raise error

    @override
    def unreachable_parts(self) -> Sequence[str]:
        return tuple(self._health.unreachable.values())

    @override
    def is_reachable(self, request: str) -> bool:
        return self.shard_of(request) in self._health.reachable()

    @override
    def choose_id(self, ids: Iterator[str], caller: Caller) -> str:
        tenant_shard, key_shard = self._shared_homes(caller.tenant, caller.idempotency_key)
        if caller.limits == TenantLimits() and not caller.idempotency_key:
            reachable = self._health.reachable()
            return next(id for id in ids if self.shard_of(id) in reachable)
        shard = key_shard if caller.limits == TenantLimits() else tenant_shard
        return next(id for id in ids if self.shard_of(id) == shard)

    def _shared_homes(self, tenant: str, key: str) -> tuple[int, int]:
        """Return the shard of a tenant with an allowance, and that of an idempotency key.

        The second one is for tenants without an allowance.
        """
        return self.shard_of(tenant), self.shard_of(f"{tenant}\0{key}")

    @override
    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: QueueLimits
    ) -> RequestRecord:
        max_cost = None if limits.max_cost is None else limits.max_cost / self._count
        max_active, max_queue = -(-limits.max_active // self._count), -(-limits.max_queue // self._count)
        # The tenant's limits are not divided: all requests of a tenant with an allowance are in one shard.
        shard_limits = QueueLimits(max_active, max_queue, max_cost, limits.tenant)
        return await self._at_home(lambda queue: queue.submit(context, tasks, events, shard_limits), context.id)

    @override
    async def lease(self, worker: str, wanted: LeaseRequest, ttl: float, wait: float = 0.0) -> builtins.list[Lease]:
        if wanted.slots < 1:
            return []
        requests = dict.fromkeys(self._rotation.of(worker), wanted)
        try:
            leases, requests = await self._rotation.claim(worker, wanted, ttl, requests)
        except TransientError:
            if not wait:
                raise
            leases = []
        return leases if leases or not wait else await self._rotation.wait(worker, requests, ttl, wait)

    @override
    async def renew(self, claims: Sequence[Claim], ttl: float) -> RenewalResult:
        """Claims of an unreachable shard count as renewed; later calls with them detect lost leases."""
        renewals = await self._by_home(claims, lambda claim: claim.request, lambda queue, part: queue.renew(part, ttl))
        ended = {claim for renewal in renewals for claim in renewal.ended}
        renewed = tuple(claim for claim in claims if claim not in ended)
        return RenewalResult(renewed, tuple(claim for claim in claims if claim in ended))

    @override
    async def append_deltas(self, outputs: Sequence[OutputDeltas]) -> builtins.list[bool]:
        """Each shard records all of its part or nothing. Raises the errors of all shards."""
        check_deltas(outputs)
        shards = [self.shard_of(output.claim.request) for output in outputs]
        results = dict[int, Iterator[bool]]()
        for shard in dict.fromkeys(shards):
            part = [output for output, other in zip(outputs, shards, strict=True) if other == shard]
            results[shard] = iter(await self._health.call(shard, partial(_append_all, part)))
        return [next(results[shard]) for shard in shards]

    @override
    async def commit_and_lease(
        self, change: Change, worker: str, wanted: LeaseRequest, ttl: float
    ) -> tuple[RequestRecord, builtins.list[Lease]]:
        """Leases of the same transaction are from the request's shard.

        If that shard has no task, the next one is called after the transaction. Sometimes the transaction leases
        nothing and all other shards are called first, so that a worker does not stay with one shard.
        """
        request = change.context.id
        request_shard = self.shard_of(request)
        leases = builtins.list[Lease]()
        if is_due := wanted.slots > 0 and self._rotation.is_due(worker):
            record = await self.commit(change)
        else:
            record, leases = await self._at_home(
                lambda queue: queue.commit_and_lease(change, worker, wanted, ttl), request
            )
        if wanted.slots > 0 and not leases:
            shards = self._rotation.of(worker, last=request_shard)
            with suppress(TransientError):
                leases, _ = await self._rotation.claim(worker, wanted, ttl, shards if is_due else shards[:1])
                if any(lease.task.request == request for lease in leases):
                    record = await self.load(request)
        return record, leases

    @override
    def cached_record(self, claim: Claim) -> RequestRecord | None:
        return self._health.shards[self.shard_of(claim.request)].cached_record(claim)

    @override
    async def ended_among(self, requests: Sequence[str]) -> builtins.list[str]:
        results = await self._by_home(requests, lambda request: request, lambda queue, part: queue.ended_among(part))
        ended = {*chain(*results)}
        return [request for request in requests if request in ended]

    @override
    async def list(
        self, which: RequestFilter, *, after: str | int | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[RequestRecord]:
        """The order of arrival is as exact as the shards' clocks agree.

        A filter by idempotency key raises KeyUnavailable while a shard that may have the request is unreachable.
        """
        after_shard: int | None = None
        if isinstance(after, str):
            after_shard = self.shard_of(after)
            after = await self._number(after, which.tenant)
        bounds = {queue: after for queue in self._health.shards}
        if after is not None and after_shard is not None:
            # Of two requests with one number, that in the lower shard came first.
            for shard, queue in enumerate(self._health.shards):
                bounds[queue] = (
                    after + (shard < after_shard and not oldest_first) - (shard > after_shard and oldest_first)
                )
        pages = await self._each(
            lambda queue: queue.list(which, after=bounds[queue], limit=limit, oldest_first=oldest_first)
        )
        entries = ((record.number, shard, record) for shard, page in pages.items() for record in page)
        merged = sorted(entries, key=itemgetter(0, 1), reverse=not oldest_first)

        if which.tenant is not None and which.idempotency_key and not merged:
            for shard in {*self._shared_homes(which.tenant, which.idempotency_key)} - pages.keys():
                raise KeyUnavailable(self._health.unreachable.get(shard, "a shard of the queue is unreachable"))
        listed = [record for _, _, record in merged[:limit]]
        self._remember(listed)
        return listed

    async def _number(self, request: str, tenant: str | None) -> int:
        """Return a request's number of arrival. Raises NotFound, also for a request of another tenant.

        The number of a request that was listed recently is known even while its shard is unreachable.
        """
        try:
            record = await self.load(request)
            request_tenant, number = record.context.caller.tenant, record.number
        except TransientError:
            if request not in self._listed:
                raise
            request_tenant, number = self._listed[request]
        if tenant not in (None, request_tenant):
            raise NotFound(f"request {request} does not exist")
        return number

    def _remember(self, listed: Sequence[RequestRecord]) -> None:
        """Store tenant and number of a page's last request, after which the next page starts."""
        for record in listed[-2:]:  # callers may list one record more than a page has
            self._listed.pop(record.context.id, None)
            self._listed[record.context.id] = record.context.caller.tenant, record.number
        while len(self._listed) > MAX_LISTED:
            del self._listed[next(iter(self._listed))]

    @override
    async def stats(self, pools: Sequence[str]) -> QueueStats:
        shards = (await self._each(lambda queue: queue.stats(pools))).values()
        by_pool = {pool: [shard.pools[pool] for shard in shards] for pool in pools}
        summed = {
            pool: PoolStats(sum(s.waiting for s in parts), max(s.oldest_s for s in parts), sum(s.left_s for s in parts))
            for pool, parts in by_pool.items()
        }
        return QueueStats(sum(shard.active for shard in shards), summed)

    @override
    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        fronts = (await self._each(lambda queue: queue.peek(pool, limit))).values()
        return [*islice(merge(*fronts, key=lambda task: (-task.priority, task.order)), limit)]

    @override
    def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        return self._health.shards[self.shard_of(request)].watch(request, after)

    @override
    async def find_encoding(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        """While only the first shard is unreachable, a lookup with `use` misses instead of raising."""
        try:
            return await self._at_first(lambda queue: queue.find_encoding(keys, use=use))
        except TransientError:
            if use and len(self._health.unreachable) < self._count:
                return {}
            raise

    @override
    async def cached_bytes(self) -> int:
        return 0 if 0 in self._health.unreachable else await self._at_first(lambda queue: queue.cached_bytes())

    @override
    async def unregister(self, worker: str) -> None:
        self._rotation.forget(worker)
        await self._each(lambda queue: queue.unregister(worker))

    @override
    async def declare(self, by: str, declaration: DeclaredModels, *, new: bool = False) -> bool:
        """The first reachable shard decides whether a `new` declaration is stored."""
        if new and not await self._health.first(lambda queue: queue.declare(by, declaration, new=True)):
            return False
        self._declared[by] = declaration
        await self._each(lambda queue: queue.declare(by, declaration))
        return True

    @override
    async def declarations(self) -> dict[str, DeclaredModels]:
        declarations = await self._health.first(lambda queue: queue.declarations())
        self._declared |= declarations  # a shard that returns also gets the declarations of other processes
        return declarations

    @override
    async def workers(self) -> Sequence[RegisteredWorker]:
        members = dict[str, RegisteredWorker]()
        for member in chain(*(await self._each(lambda queue: queue.workers())).values()):
            other = members.get(member.info.id)
            if other is not None:
                # Each shard has some of the worker's leases. Heartbeats may lack specs, and miss an unreachable shard.
                newest = max(other, member, key=lambda worker: worker.last_heartbeat)
                specs = newest.models or other.models or member.models
                member = msgspec.structs.replace(newest, models=specs, leased=other.leased + member.leased)
            members[member.info.id] = member
        return [*members.values()]

    @override
    async def close(self) -> None:
        await asyncio.gather(self._health.close(), *(queue.close() for queue in self._unsharded))

    async def _restore_declarations(self, shard: QueueBackend) -> None:
        """Store all known declarations in a shard that is reachable again."""
        for by, declaration in self._declared.items():
            await shard.declare(by, declaration)

    async def _by_home(
        self,
        items: Sequence[Item],
        request_of: Callable[[Item], str],
        call: Callable[[QueueBackend, builtins.list[Item]], Awaitable[T]],
    ) -> Iterable[T]:
        """Call each shard with the items of its requests. Returns the reachable shards' results."""
        parts = defaultdict[QueueBackend, builtins.list[Item]](list)
        for item in items:
            parts[self._health.shards[self.shard_of(request_of(item))]].append(item)
        shards = {self.shard_of(request_of(item)) for item in items}
        return (await self._each(lambda queue: call(queue, parts[queue]), shards)).values()


async def _append_all(outputs: Sequence[OutputDeltas], queue: QueueBackend) -> Sequence[bool]:
    return await queue.append_deltas(outputs)
