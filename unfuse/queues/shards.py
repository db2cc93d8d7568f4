"""One queue over several, its shards. A request lives in one, which its id says, with all that belongs to it.

So what a shard promises of a request, the whole does; what is promised between requests holds among those of a shard:
all of a tenant that has an allowance, and repeats of one idempotency key. Nothing is decided of two shards at once.

A shard that does not answer takes its requests with it until it does; all else goes on: new requests go to others,
lists, sums and registers leave it out.
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
from unfuse.core.errors import KeyUnavailable, NotFound, TransientError, UnfuseError
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Caller, Change, Event, RequestContext, RequestRecord, TenantLimits
from unfuse.core.task import Claim, Lease, OutputDeltas, Task, check_growth
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
from unfuse.queues.remote_waiters import NamedTasks

#: The longest time, in seconds, that all wait for one shard's answer; and until one that gave none is asked again.
PATIENCE_S, LOOK_S = 5.0, 0.2
MOST_LISTED = 1024  # pages whose last requests are remembered

P = ParamSpec("P")
T = TypeVar("T")
One = TypeVar("One")
Work = Callable[[QueueBackend], Awaitable[T]]

log = structlog.get_logger(__name__)


class ShardHealth:
    """Asks the shards of a queue. `returned` is called with each that answers again."""

    def __init__(self, shards: Sequence[QueueBackend], returned: Callable[[QueueBackend], Awaitable[object]]) -> None:
        self.shards, self.background = tuple(shards), NamedTasks()
        self.away: dict[int, str] = {}
        """Why a shard that does not answer does not, in words, by its number."""
        self._returned = returned
        self._closed = False

    async def ask(self, shard: int, work: Work[T]) -> T:
        """What one shard answers. Raises what it raises."""
        try:
            return await work(self.shards[shard])
        except TransientError as error:
            self._miss(shard, str(error))
            raise

    async def ask_briefly(self, shard: int, work: Work[T]) -> T:
        """What one shard answers within PATIENCE_S; raises TransientError if nothing."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.ask(shard, work)
        except TimeoutError as error:
            self._miss(shard, f"no answer in {PATIENCE_S:g} s")
            raise TransientError(self.away.get(shard, "")) from error

    def present(self, among: Iterable[int] | None = None) -> list[int]:
        """Those of these shards that answer; all of these if none of the queue does."""
        asked = range(len(self.shards)) if among is None else among
        return [shard for shard in asked if shard not in self.away or len(self.away) == len(self.shards)]

    async def each(self, work: Work[T], among: Iterable[int] | None = None) -> dict[int, T]:
        """The answers, by number, of those of these shards that answer.

        Raises TransientError if none of the queue does, and any other error.
        """
        asked = self.present(among)
        found = await asyncio.gather(*(self.ask_briefly(shard, work) for shard in asked), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, TransientError):
                raise error
        answers = {shard: one for shard, one in zip(asked, found, strict=True) if not isinstance(one, BaseException)}
        if len(self.away) == len(self.shards) and not answers and asked:
            raise next(error for error in found if isinstance(error, BaseException))
        return answers

    async def first(self, work: Work[T]) -> T:
        """What the first shard that answers does, in the order of their numbers. Raises TransientError if none does."""
        *others, last = self.present()
        for shard in others:
            try:
                return await self.ask_briefly(shard, work)
            except TransientError:
                continue
        return await self.ask_briefly(last, work)

    async def close(self) -> None:
        """Close the shards."""
        self._closed = True
        await asyncio.gather(*(shard.close() for shard in self.shards))
        await self.background.end(*(f"shard {shard}" for shard in self.away))

    def _miss(self, shard: int, reason: str) -> None:
        if shard not in self.away and not self._closed:
            self.away[shard] = self._told(shard, reason)
            log.warning("a shard of the queue is away: the others go on", shard=shard, reason=reason)
            self.background.run(f"shard {shard}", partial(self._look_for, shard))

    def _told(self, shard: int, reason: str) -> str:
        return f"shard {shard} of {len(self.shards)}: {reason}"

    async def _look_for(self, shard: int) -> None:
        """Wait until a shard answers again, and as the shard it was: a server may come back with what is another's."""
        queue = self.shards[shard]
        while shard in self.away:
            await asyncio.sleep(LOOK_S)
            try:
                await queue.check()
                await self._returned(queue)
            except UnfuseError as error:
                self.away[shard] = self._told(shard, str(error))
                continue
            del self.away[shard]
        log.info("a shard of the queue answers again", shard=shard)


Asking = asyncio.Task[list[Lease]]


class ShardRotation:
    """Whose turn it is, by worker. A claim takes from one shard, by its rules.

    While a worker has no room for the next task of a shard, it takes from the others only what that shard would let by:
    else what needs much would wait for ever beside what needs little.
    """

    def __init__(self, answering: ShardHealth) -> None:
        self._answering, self._count = answering, len(answering.shards)
        self._next, self._outcomes = Counter[str](), Counter[str]()
        self._kept = set[str]()

    def of(self, worker: str, last: int = -1) -> list[int]:
        """The shards that answer, in the order in which a worker asks them; but this one comes `last`."""
        turn = self._next[worker]
        return self._answering.present(
            sorted(range(self._count), key=lambda shard: (shard == last, (shard - turn) % self._count))
        )

    def is_due(self, worker: str) -> bool:
        """Whether a worker that has an outcome is to ask others first: every so many times, and while one keeps it."""
        self._outcomes[worker] += 1
        return worker in self._kept or self._outcomes[worker] % self._count == 0

    def forget(self, worker: str) -> None:
        """A worker is gone."""
        del self._next[worker], self._outcomes[worker]
        self._kept.discard(worker)

    async def claim(
        self, worker: str, wanted: LeaseRequest, ttl: float, among: Iterable[int]
    ) -> tuple[list[Lease], dict[int, LeaseRequest]]:
        """Claim tasks of the first of these shards that has any; else says what may be waited for at each.

        Raises TransientError if none answers.
        """
        wants, found, keeper = dict[int, LeaseRequest](), list[Lease](), None
        failures = dict[int, TransientError]()
        for shard in among:
            wants[shard] = wanted
            try:
                found = await self._answering.ask(shard, lambda queue: queue.lease(worker, wants[shard], ttl))  # noqa: B023
                if found:
                    self._next[worker] = shard + 1
                    break
                wanted = await self._answering.ask(shard, partial(_let_by, wanted))
            except TransientError as error:
                failures[shard] = error
            if keeper is None and wanted is not wants[shard]:
                keeper = shard
            if not wanted.pools:
                break
        if failures and len(failures) == len(wants):
            raise failures.popitem()[1]
        self._kept.discard(worker)
        if keeper is not None:
            self._kept.add(worker)
            self._next[worker] = keeper
        return found, wants

    async def wait(self, worker: str, wants: Mapping[int, LeaseRequest], ttl: float, wait: float) -> list[Lease]:
        """Claim tasks of whichever shard has any first within `wait` seconds; what others gave then goes back.

        A shard that is away is not waited for. Raises TransientError if none answers.
        """
        asking = {
            asyncio.create_task(self._answering.shards[shard].lease(worker, wanted, ttl, wait)): shard
            for shard, wanted in wants.items()
        }
        waiting, won = {*asking}, None
        try:
            while won is None and waiting and not self._are_away(asking[one] for one in waiting):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                won = next((one for one in done if one.exception() is None and one.result()), None)
            failed = [one for one in asking if one.done() and one.exception()]
            return won.result() if won else failed[0].result() if len(failed) == len(asking) else []
        finally:
            lost = {one: shard for one, shard in asking.items() if one is not won}
            for one in lost:
                one.cancel()
            given = self._answering.background.run(f"wait {id(lost)}", partial(self._give_back, lost))
            if won is None:
                await asyncio.shield(given)

    def _are_away(self, shards: Iterable[int]) -> bool:
        away = self._answering.away
        return len(away) < self._count and all(shard in away for shard in shards)

    async def _give_back(self, lost: Mapping[Asking, int]) -> None:
        await asyncio.gather(*lost, return_exceptions=True)
        for one, shard in lost.items():
            for lease in () if one.cancelled() or one.exception() else one.result():
                with suppress(TransientError):
                    await self._answering.shards[shard].hand_back(lease.claim)


async def _let_by(wanted: LeaseRequest, queue: QueueBackend) -> LeaseRequest:
    """What a worker may take of others while it has no room for the next tasks of this queue."""
    lines = (await queue.stats([*wanted.watched_pools()])).pools
    for pool, offer in wanted.pools.items():
        is_held_back = any(lines[fed].waiting > most for fed, most in offer.behind.items())
        for task in await queue.peek(pool, 1) if lines[pool].waiting and not is_held_back else ():
            lacking = offer.lacks(task.resources, {})
            if lacking and pool in wanted.pools and (wanted.above is None or task.priority > wanted.above):
                others = {
                    name: other for name, other in wanted.pools.items()
                    if other.later > offer.later or lacking.isdisjoint(other.amounts)
                }  # fmt: skip
                wanted = msgspec.structs.replace(wanted, pools=others)
    return wanted


def _spread(
    verb: Callable[Concatenate[QueueBackend, P], Awaitable[T]], ask: Callable[..., Awaitable[T]]
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A verb of the port which `ask` has one shard do, or several; it gets the verb's first argument too."""

    async def spread(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await ask(self, lambda queue: getattr(queue, verb.__name__)(*args, **kwargs), *args[:1])

    return spread


class ShardedQueue(QueueBackend):
    """A queue whose requests are spread over `shards`, of whatever kind; all users name the same in the same order.

    Leases, limits and the order of tasks are those of each shard; a worker asks them in turns. Each has its part of the
    limits. The registry and declarations are in all of them, the encoder cache's index and secrets in the first. Times
    are of the first that answers, so their clocks have to agree. What lies `beside` them is only looked at, at the
    start.
    """

    async def _at_home(self, work: Work[T], subject: str | Claim | Change) -> T:
        """What the shard answers in which the request lives."""
        match subject:
            case Claim():
                subject = subject.request
            case Change():
                subject = subject.context.id
        return await self._answering.ask(self.home(subject), work)

    async def _at_first(self, work: Work[T], *_: object) -> T:
        """What the first shard answers. Raises TransientError at once while it is known to be away."""
        if reason := self._answering.away.get(0):
            raise TransientError(reason)
        return await self._answering.ask_briefly(0, work)

    async def _at_each(self, work: Work[object], *_: object) -> None:
        """Have all shards do it that answer."""
        await self._answering.each(work)

    async def _of_all(self, work: Work[Sequence[T]], *_: object) -> builtins.list[T]:
        """What all shards have that answer."""
        return [*chain(*(await self._answering.each(work)).values())]

    load, commit = _spread(QueueBackend.load, _at_home), _spread(QueueBackend.commit, _at_home)
    progress, appended = _spread(QueueBackend.progress, _at_home), _spread(QueueBackend.appended, _at_home)
    hand_back, turn_down = _spread(QueueBackend.hand_back, _at_home), _spread(QueueBackend.turn_down, _at_home)
    drop, secret = _spread(QueueBackend.drop, _at_home), _spread(QueueBackend.secret, _at_first)
    cache, uncache = _spread(QueueBackend.cache, _at_first), _spread(QueueBackend.uncache, _at_first)
    check, hello = _spread(QueueBackend.check, _at_each), _spread(QueueBackend.hello, _at_each)
    expired, forget = _spread(QueueBackend.expired, _of_all), _spread(QueueBackend.forget, _of_all)
    damaged, discard = _spread(QueueBackend.damaged, _of_all), _spread(QueueBackend.discard, _at_each)

    def __init__(self, shards: Sequence[QueueBackend], beside: Sequence[QueueBackend] = ()) -> None:
        self.shared, self._beside = any(shard.shared for shard in shards), beside
        self._count = len(shards)
        self._answering = ShardHealth(shards, self._returned)
        self._each, self._turns = self._answering.each, ShardRotation(self._answering)
        self._declared: dict[str, DeclaredModels] = {}
        self._listed: dict[str, tuple[str, int]] = {}  # tenant and number of the last requests of pages, by id
        self._latest = 0.0

    @classmethod
    def at(cls, url: str, clock: Clock | None = None) -> QueueBackend:
        """Shards have no address of their own: that of a queue in Redis says how many there are."""
        raise NotImplementedError

    def home(self, name: str) -> int:
        """The number of the shard where the request of this id lives, or requests that have to be together."""
        return crc32(name.encode(errors="replace")) % self._count

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
        if caller.allowance == TenantLimits() and not caller.idempotency_key:
            present = self._answering.present()
            return next(id for id in ids if self.home(id) in present)
        home = together[caller.allowance == TenantLimits()]
        return next(id for id in ids if self.home(id) == home)

    def _together(self, tenant: str, key: str) -> tuple[int, int]:
        """Where a tenant lives that has an allowance, and where repeats of the key do of one that has none."""
        return self.home(tenant), self.home(f"{tenant}\0{key}")

    @override
    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: QueueLimits
    ) -> RequestRecord:
        cost = None if limits.max_cost is None else limits.max_cost / self._count
        active, queue = -(-limits.max_active // self._count), -(-limits.max_queue // self._count)
        share = QueueLimits(active, queue, cost, limits.tenant)
        return await self._at_home(lambda queue: queue.submit(context, tasks, events, share), context.id)

    @override
    async def lease(self, worker: str, wanted: LeaseRequest, ttl: float, wait: float = 0.0) -> builtins.list[Lease]:
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
    async def renew(self, claims: Sequence[Claim], ttl: float) -> RenewalResult:
        """Those of a shard that does not answer count as held: whether they are, it says when they are used."""
        found = await self._parts(claims, lambda claim: claim.request, lambda queue, part: queue.renew(part, ttl))
        ended = {claim for renewal in found for claim in renewal.ended}
        return RenewalResult(
            tuple(one for one in claims if one not in ended), tuple(one for one in claims if one in ended)
        )

    @override
    async def append_all(self, grown: Sequence[OutputDeltas]) -> builtins.list[bool]:
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
        self, change: Change, worker: str, wanted: LeaseRequest, ttl: float
    ) -> tuple[RequestRecord, builtins.list[Lease]]:
        """Claims in the same transaction are of the request's shard. Now and then the others are asked first, behind
        the transaction, and one of them where it has nothing: so that no worker stays with one shard.
        """
        request, leases = change.context.id, builtins.list[Lease]()
        home = self.home(request)
        if is_due := wanted.slots > 0 and self._turns.is_due(worker):
            record = await self.commit(change)
        else:
            record, leases = await self._at_home(
                lambda queue: queue.commit_and_lease(change, worker, wanted, ttl), request
            )
        if wanted.slots > 0 and not leases:
            asked = self._turns.of(worker, last=home)
            with suppress(TransientError):
                leases, _ = await self._turns.claim(worker, wanted, ttl, asked if is_due else asked[:1])
                if any(lease.task.request == request for lease in leases):
                    record = await self.load(request)
        return record, leases

    @override
    def known(self, claim: Claim) -> RequestRecord | None:
        return self._answering.shards[self.home(claim.request)].known(claim)

    @override
    async def over(self, requests: Sequence[str]) -> builtins.list[str]:
        found = await self._parts(requests, lambda request: request, lambda queue, part: queue.over(part))
        over = {*chain(*found)}
        return [request for request in requests if request in over]

    @override
    async def list(
        self, which: RequestFilter, *, after: str | int | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[RequestRecord]:
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

    def _remember(self, listed: Sequence[RequestRecord]) -> None:
        """Remember the last request of a page, behind which the next one begins."""
        for record in listed[-2:]:  # a page may be read with one record more than it shows
            self._listed.pop(record.context.id, None)
            self._listed[record.context.id] = record.context.caller.tenant, record.number
        while len(self._listed) > MOST_LISTED:
            del self._listed[next(iter(self._listed))]

    @override
    async def stats(self, pools: Sequence[str]) -> QueueStats:
        found = (await self._each(lambda queue: queue.stats(pools))).values()
        lines = {pool: [one.pools[pool] for one in found] for pool in pools}
        summed = {
            pool: PoolStats(
                sum(one.waiting for one in of), max(one.oldest_s for one in of), sum(one.left_s for one in of)
            )
            for pool, of in lines.items()
        }
        return QueueStats(sum(one.active for one in found), summed)

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
            return await self._at_first(lambda queue: queue.cached(keys, use=use))
        except TransientError:
            if use and len(self._answering.away) < self._count:
                return {}
            raise

    @override
    async def cached_bytes(self) -> int:
        return 0 if 0 in self._answering.away else await self._at_first(lambda queue: queue.cached_bytes())

    @override
    async def bye(self, worker: str) -> None:
        self._turns.forget(worker)
        await self._each(lambda queue: queue.bye(worker))

    @override
    async def declare(self, by: str, declaration: DeclaredModels, *, new: bool = False) -> bool:
        """Whether a `new` one is stored, the first shard that answers decides."""
        if new and not await self._answering.first(lambda queue: queue.declare(by, declaration, new=True)):
            return False
        self._declared[by] = declaration
        await self._each(lambda queue: queue.declare(by, declaration))
        return True

    @override
    async def declared(self) -> dict[str, DeclaredModels]:
        found = await self._answering.first(lambda queue: queue.declared())
        self._declared |= found  # what others have declared since is not undone in a shard that comes back
        return found

    @override
    async def workers(self) -> Sequence[RegisteredWorker]:
        found = dict[str, RegisteredWorker]()
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


async def _append_all(grown: Sequence[OutputDeltas], queue: QueueBackend) -> Sequence[bool]:
    return await queue.append_all(grown)
