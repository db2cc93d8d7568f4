"""One queue over several, its shards. A request lives in one, which its id says, with all that belongs to it.

So what a shard promises of a request, the whole does; what is promised between requests holds among those of a shard:
all of a tenant that has an allowance, and repeats of one idempotency key. Nothing is decided of two shards at once.

A shard that does not answer takes its requests with it until it does; all else goes on: new requests go to others,
lists, sums and registers leave it out.
"""

from __future__ import annotations

import asyncio
import builtins
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from heapq import merge
from itertools import chain, islice
from operator import itemgetter
from typing import Any, Concatenate, ParamSpec, TypeVar
from zlib import crc32

import msgspec
from typing_extensions import override

from unfuse.core.clock import Clock
from unfuse.core.errors import KeyUnavailable, NotFound, TransientError
from unfuse.core.event import Event
from unfuse.core.growth import Grown, check_growth
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Allowance, Caller, Change, Record, RequestContext
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import Declaration, Filter, Limits, Member, PoolStats, QueueBackend, Renewal, Stats, Wanted
from unfuse.queues.turns import Answering, Turns

MOST_LISTED = 1024  # pages whose last requests are remembered

P = ParamSpec("P")
T = TypeVar("T")
One = TypeVar("One")
Verb = Callable[Concatenate[QueueBackend, P], Awaitable[T]]
Asked = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]


def _by_request(verb: Verb[P, T]) -> Asked[P, T]:
    """A verb that the shard answers in which the request lives that its first argument is of."""

    async def ask(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        request = args[0]
        match request:
            case Claim():
                request = request.request
            case Change():
                request = request.context.id
        found: T = await self._at(str(request), lambda queue: getattr(queue, verb.__name__)(*args, **kwargs))
        return found

    return ask


def _by_first(verb: Verb[P, T]) -> Asked[P, T]:
    """A verb that the first shard answers."""

    async def ask(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found: T = await self._first(lambda queue: getattr(queue, verb.__name__)(*args, **kwargs))
        return found

    return ask


def _told_all(verb: Verb[P, None]) -> Asked[P, None]:
    """A verb that all shards are told that answer."""

    async def ask(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        await self._each(lambda queue: getattr(queue, verb.__name__)(*args, **kwargs))

    return ask


def _by_all(verb: Verb[P, Sequence[T]]) -> Asked[P, list[T]]:
    """A verb whose answer is what all shards have that answer."""

    async def ask(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        found = await self._each(lambda queue: getattr(queue, verb.__name__)(*args, **kwargs))
        return [*chain(*found.values())]

    return ask


class ShardedQueue(QueueBackend):
    """A queue whose requests are spread over `shards`, of whatever kind; all users name the same in the same order.

    Leases, limits and the order of tasks are those of each shard; a worker asks them in turns. Each has its part of the
    limits. The registry and declarations are in all of them, the encoder cache's index and secrets in the first. Times
    are of the first that answers, so their clocks have to agree. What lies `beside` them is only looked at, at the
    start.
    """

    load, commit = _by_request(QueueBackend.load), _by_request(QueueBackend.commit)
    progress, appended = _by_request(QueueBackend.progress), _by_request(QueueBackend.appended)
    hand_back, turn_down = _by_request(QueueBackend.hand_back), _by_request(QueueBackend.turn_down)
    drop = _by_request(QueueBackend.drop)
    cache, uncache = _by_first(QueueBackend.cache), _by_first(QueueBackend.uncache)
    secret = _by_first(QueueBackend.secret)
    check, hello, discard = (
        _told_all(QueueBackend.check),
        _told_all(QueueBackend.hello),
        _told_all(QueueBackend.discard),
    )
    expired, forget, damaged = (
        _by_all(QueueBackend.expired),
        _by_all(QueueBackend.forget),
        _by_all(QueueBackend.damaged),
    )

    def __init__(self, shards: Sequence[QueueBackend], beside: Sequence[QueueBackend] = ()) -> None:
        self.shared, self._beside = any(shard.shared for shard in shards), beside
        self._count = len(shards)
        self._answering = Answering(shards, self._returned)
        self._each, self._turns = self._answering.each, Turns(self._answering)
        self._declared: dict[str, Declaration] = {}
        self._listed: dict[str, tuple[str, int]] = {}  # tenant and number of the last requests of pages, by id
        self._latest = 0.0

    @classmethod
    def at(cls, url: str, clock: Clock | None = None) -> QueueBackend:
        """Shards have no address of their own: that of a queue in Redis says how many there are."""
        raise NotImplementedError

    def home(self, name: str) -> int:
        """The number of the shard where the request of this id lives, or requests that have to be together."""
        return crc32(name.encode(errors="replace")) % self._count

    def _at(self, request: str, work: Callable[[QueueBackend], Awaitable[T]]) -> Awaitable[T]:
        return self._answering.ask(self.home(request), work)

    @override
    async def now(self) -> float:
        self._latest = max(self._latest, await self._answering.first(lambda queue: queue.now()))
        return self._latest

    @override
    async def reach(self) -> None:
        looked_at = (queue.reach() for queue in (*self._beside, *self._answering.shards))
        for error in await asyncio.gather(*looked_at, return_exceptions=True):
            if error is not None:
                raise error

    @override
    def away(self) -> Sequence[str]:
        return tuple(self._answering.away.values())

    @override
    def answers(self, request: str) -> bool:
        return self.home(request) in self._answering.present()

    @override
    def placed(self, ids: Iterator[str], caller: Caller) -> str:
        together = self._together(caller.tenant, caller.idempotency_key)
        if caller.allowance == Allowance() and not caller.idempotency_key:
            present = self._answering.present()
            return next(id for id in ids if self.home(id) in present)
        home = together[caller.allowance == Allowance()]
        return next(id for id in ids if self.home(id) == home)

    def _together(self, tenant: str, key: str) -> tuple[int, int]:
        """Where a tenant lives that has an allowance, and where repeats of the key do of one that has none."""
        return self.home(tenant), self.home(f"{tenant}\0{key}")

    @override
    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: Limits
    ) -> Record:
        cost = None if limits.max_cost is None else limits.max_cost / self._count
        active, queue = -(-limits.max_active // self._count), -(-limits.max_queue // self._count)
        share = Limits(active, queue, cost, limits.tenant)
        return await self._at(context.id, lambda queue: queue.submit(context, tasks, events, share))

    @override
    async def lease(self, worker: str, wanted: Wanted, ttl: float, wait: float = 0.0) -> builtins.list[Lease]:
        if wanted.slots < 1:
            return []
        wants = dict.fromkeys(self._turns.of(worker), wanted)
        try:
            leases, wants = await self._turns.claim(worker, wanted, ttl, wants)
        except TransientError:
            if not wait:
                raise
            leases = []
        return leases if leases or not wait else await self._turns.wait(worker, wants, ttl, wait)

    @override
    async def renew(self, claims: Sequence[Claim], ttl: float) -> Renewal:
        """Those of a shard that does not answer count as held: whether they are, it says when they are used."""
        found = await self._parts(claims, lambda claim: claim.request, lambda queue, part: queue.renew(part, ttl))
        ended = {claim for renewal in found for claim in renewal.ended}
        return Renewal(tuple(one for one in claims if one not in ended), tuple(one for one in claims if one in ended))

    @override
    async def append_all(self, grown: Sequence[Grown]) -> builtins.list[bool]:
        """Each shard records its part, or nothing of it. Raises what any of them raises."""
        check_growth(grown)
        homes = [self.home(one.claim.request) for one in grown]
        held = dict[int, Iterator[bool]]()
        for home in dict.fromkeys(homes):
            part = [one for one, at in zip(grown, homes, strict=True) if at == home]
            held[home] = iter(await self._answering.ask(home, partial(_append_all, part)))
        return [next(held[home]) for home in homes]

    @override
    async def commit_and_lease(
        self, change: Change, worker: str, wanted: Wanted, ttl: float
    ) -> tuple[Record, builtins.list[Lease]]:
        """Claims in the same transaction are of the request's shard. Now and then the others are asked first, behind
        the transaction, and one of them where it has nothing: so that no worker stays with one shard.
        """
        request, leases = change.context.id, builtins.list[Lease]()
        home = self.home(request)
        if is_due := wanted.slots > 0 and self._turns.is_due(worker):
            record = await self.commit(change)
        else:
            record, leases = await self._at(request, lambda queue: queue.commit_and_lease(change, worker, wanted, ttl))
        if wanted.slots > 0 and not leases:
            asked = self._turns.of(worker, last=home)
            with suppress(TransientError):
                leases, _ = await self._turns.claim(worker, wanted, ttl, asked if is_due else asked[:1])
                if any(lease.task.request == request for lease in leases):
                    record = await self.load(request)
        return record, leases

    @override
    def known(self, claim: Claim) -> Record | None:
        return self._answering.shards[self.home(claim.request)].known(claim)

    @override
    async def over(self, requests: Sequence[str]) -> builtins.list[str]:
        found = await self._parts(requests, lambda request: request, lambda queue, part: queue.over(part))
        over = {*chain(*found)}
        return [request for request in requests if request in over]

    @override
    async def list(
        self, which: Filter, *, after: str | int | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[Record]:
        """In the order of arrival, as far as the clocks of the shards agree. A filter by idempotency key raises
        KeyUnavailable while a shard is away that may have the request.
        """
        last: int | None = None
        if isinstance(after, str):
            last = self.home(after)
            after = await self._number(after, which.tenant)
        bounds = {queue: after for queue in self._answering.shards}
        if after is not None and last is not None:  # of two with one number, the one in the lower shard came first
            for shard, queue in enumerate(self._answering.shards):
                bounds[queue] = after + (shard < last and not oldest_first) - (shard > last and oldest_first)
        pages = await self._each(
            lambda queue: queue.list(which, after=bounds[queue], limit=limit, oldest_first=oldest_first)
        )
        found = sorted(
            ((record.number, shard, record) for shard, page in pages.items() for record in page),
            key=itemgetter(0, 1), reverse=not oldest_first,
        )  # fmt: skip
        if which.tenant is not None and which.idempotency_key and not found:
            for shard in {*self._together(which.tenant, which.idempotency_key)} - pages.keys():
                raise KeyUnavailable(self._answering.away.get(shard, "a shard of the queue does not answer"))
        listed = [record for _, _, record in found[:limit]]
        self._remember(listed)
        return listed

    async def _number(self, request: str, tenant: str | None) -> int:
        """Return a request's number of arrival; that of one that was listed lately also while its shard is away.

        Raises NotFound, also for another tenant's.
        """
        try:
            record = await self.load(request)
            owner, number = record.context.caller.tenant, record.number
        except TransientError:
            if request not in self._listed:
                raise
            owner, number = self._listed[request]
        if tenant not in (None, owner):
            raise NotFound(f"no request {request}")
        return number

    def _remember(self, listed: Sequence[Record]) -> None:
        """Remember the last request of a page, behind which the next one begins."""
        for record in listed[-2:]:  # a page may be read with one record more than it shows
            self._listed.pop(record.context.id, None)
            self._listed[record.context.id] = record.context.caller.tenant, record.number
        while len(self._listed) > MOST_LISTED:
            del self._listed[next(iter(self._listed))]

    @override
    async def stats(self, pools: Sequence[str]) -> Stats:
        found = (await self._each(lambda queue: queue.stats(pools))).values()
        lines = {pool: [one.pools[pool] for one in found] for pool in pools}
        summed = {
            pool: PoolStats(
                sum(one.waiting for one in of), max(one.oldest_s for one in of), sum(one.left_s for one in of)
            )
            for pool, of in lines.items()
        }
        return Stats(sum(one.active for one in found), summed)

    @override
    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        lines = (await self._each(lambda queue: queue.peek(pool, limit))).values()
        return [*islice(merge(*lines, key=lambda task: (-task.priority, task.order)), limit)]

    @override
    def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        return self._answering.shards[self.home(request)].watch(request, after)

    @override
    async def cached(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        """While the first shard is away nothing is found to be used."""
        try:
            return await self._first(lambda queue: queue.cached(keys, use=use))
        except TransientError:
            if use and len(self._answering.away) < self._count:
                return {}
            raise

    @override
    async def cached_bytes(self) -> int:
        return 0 if 0 in self._answering.away else await self._first(lambda queue: queue.cached_bytes())

    async def _first(self, work: Callable[[QueueBackend], Awaitable[T]]) -> T:
        """What the first shard answers. Raises TransientError at once while it is known to be away."""
        if reason := self._answering.away.get(0):
            raise TransientError(reason)
        return await self._answering.ask_briefly(0, work)

    @override
    async def bye(self, worker: str) -> None:
        self._turns.forget(worker)
        await self._each(lambda queue: queue.bye(worker))

    @override
    async def declare(self, by: str, declaration: Declaration, *, new: bool = False) -> bool:
        """Whether a `new` one is stored, the first shard that answers decides."""
        if new and not await self._answering.first(lambda queue: queue.declare(by, declaration, new=True)):
            return False
        self._declared[by] = declaration
        await self._each(lambda queue: queue.declare(by, declaration))
        return True

    @override
    async def declared(self) -> dict[str, Declaration]:
        found = await self._answering.first(lambda queue: queue.declared())
        self._declared |= found  # what others have declared since is not undone in a shard that comes back
        return found

    @override
    async def workers(self) -> Sequence[Member]:
        found = dict[str, Member]()
        for member in chain(*(await self._each(lambda queue: queue.workers())).values()):
            other = found.get(member.info.id)
            if other is not None:
                newest = max(other, member, key=lambda one: one.seen)
                cards, leased = newest.cards or other.cards or member.cards, other.leased + member.leased
                member = msgspec.structs.replace(newest, cards=cards, leased=leased)
            found[member.info.id] = member
        return [*found.values()]

    @override
    async def close(self) -> None:
        await asyncio.gather(self._answering.close(), *(queue.close() for queue in self._beside))

    async def _returned(self, shard: QueueBackend) -> None:
        """Tell a shard that answers again what was declared here."""
        for by, declaration in self._declared.items():
            await shard.declare(by, declaration)

    async def _parts(
        self,
        all: Sequence[One],
        request: Callable[[One], str],
        ask: Callable[[QueueBackend, builtins.list[One]], Awaitable[T]],
    ) -> Iterable[T]:
        """What the shards that answer say, each of its part of all."""
        parts = defaultdict[QueueBackend, builtins.list[One]](list)
        for one in all:
            parts[self._answering.shards[self.home(request(one))]].append(one)
        homes = {self.home(request(one)) for one in all}
        return (await self._each(lambda queue: ask(queue, parts[queue]), homes)).values()


async def _append_all(grown: Sequence[Grown], queue: QueueBackend) -> Sequence[bool]:
    return await queue.append_all(grown)
