"""The queue in Redis (6.2 or later) or Valkey: any number of schedulers share one server.

Every verb is one run of the Lua script in `scripts/`, so it is a transaction. Callers that wait are woken by pub/sub,
and whenever the subscription has a new connection, so that they miss nothing.
"""

from __future__ import annotations

import asyncio
import builtins
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from typing_extensions import override

from unfuse.core.clock import Clock, SystemClock
from unfuse.core.codec import decode, encode
from unfuse.core.errors import ConfigError, Damaged, NotFound, ProtocolError, TransientError, UsageError
from unfuse.core.messages import WorkerInfo
from unfuse.core.modalities import VIDEO
from unfuse.core.model_spec import ModelSpec
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Change, Event, RequestContext, RequestRecord, Timings
from unfuse.core.task import PIECES_AT_ONCE, Claim, Lease, OutputDeltas, Task, check_growth
from unfuse.queues import script
from unfuse.queues.base import (
    FRONT,
    MAX_CACHED,
    MOST_RETURNS,
    NANOSECONDS,
    PREFERENCE_AMONG,
    PREFERENCE_S,
    DamagedRecord,
    DeclaredModels,
    LeaseRequest,
    PoolStats,
    QueueBackend,
    QueueLimits,
    QueueStats,
    RegisteredWorker,
    RenewalResult,
    RequestFilter,
    check_numbers,
)
from unfuse.queues.index import MAX_EVENTS
from unfuse.queues.remote_waiters import RETRY_S, LeaseWaiter, NamedTasks, RemoteWaiters
from unfuse.queues.script import KnownRecords, UnreadableRecords
from unfuse.queues.shards import ShardedQueue

try:
    from redis.exceptions import RedisError

    from unfuse.queues import connection
except ImportError as error:
    raise ConfigError("a queue in Redis needs the library redis: pip install 'unfuse[redis]'") from error

CHECK_S = 2.0  # the longest time, in seconds, for `check`
SCANNED = 500  # how many requests one run of the script may read


class RedisQueue(QueueBackend):
    """A queue that many processes share. Its clock is the server's wall clock, made to never run backwards.

    A method raises TransientError when the server does not answer; then it may have had its effect or not. Callers of
    `lease` that wait, and `watch`, go on when the server is back.
    """

    shared = True

    def __init__(self, at: connection.RedisAddress, clock: Clock | None) -> None:
        self._address, self._tag, self._servers_time = at, at.tag, clock
        self._redis = at.connect()
        self._background = NamedTasks()
        self._calls = connection.PipelinedCalls(self._execute, self._background)
        self._unreadable = UnreadableRecords()
        self._known = KnownRecords(clock or SystemClock())
        self._waiting = RemoteWaiters(self._call, self._read_leases, self._background, clock or SystemClock())
        self._subscription = connection.Subscription(self._redis, self._tag, self._waiting)
        self._closed = False
        self._latest = 0.0

    @classmethod
    def at(cls, url: str, clock: Clock | None = None) -> QueueBackend:
        """Open the queue, or its shards, at such an address as ADDRESS says. A given clock replaces the servers'."""
        found = connection.parse_address(url)
        shards = [cls(one, clock) for one in found]
        beside = [cls(one, clock) for one in {one.beside for one in found if one.beside}]
        return ShardedQueue(shards, beside) if len(shards) > 1 else shards[0]

    @override
    async def now(self) -> float:
        self._latest = max(self._latest, float(await self._call("now")))
        return self._latest

    @override
    async def reach(self) -> None:

        async def ask() -> None:
            (reply,) = await self._execute([("now", encode({"part": self._address.part}))])
            if isinstance(reply, Exception):
                raise reply

        if reason := await connection.obstacle(self._address.server, ask):
            raise UsageError(f"the queue at {self._address.shown} cannot be used: {reason}")

    @override
    async def check(self) -> None:
        try:
            async with asyncio.timeout(CHECK_S):
                await self._call("check")
        except TimeoutError as error:
            raise script.error(error, self._address.shown) from error

    @override
    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: QueueLimits
    ) -> RequestRecord:
        fields, more = script.context_fields(context, tasks, events), Counter(task.planned.pool for task in tasks)
        return self._known.keep(script.record(await self._call("submit", **fields, limits=limits, more=more), context))

    @override
    async def lease(self, worker: str, wanted: LeaseRequest, ttl: float, wait: float = 0.0) -> list[Lease]:
        if wanted.slots < 1 or self._closed:
            return []
        if wait > 0:
            self._background.run("listen", self._subscription.listen)
        return await self._waiting.claim(worker, wanted, ttl, wait)

    @override
    async def renew(self, claims: Sequence[Claim], ttl: float) -> RenewalResult:
        held = await self._call("renew", claims=[script.claim_fields(claim) for claim in claims], ttl=ttl)
        marked = list(zip(claims, held, strict=True))
        return RenewalResult(tuple(c for c, held in marked if held), tuple(c for c, held in marked if not held))

    @override
    async def progress(self, claim: Claim, events: Sequence[Event], used: Timings | None = None) -> bool:
        check_numbers(*events)
        return bool(await self._call("progress", claim=script.claim_fields(claim), events=events, used=used))

    @override
    async def append_all(self, grown: Sequence[OutputDeltas]) -> list[bool]:
        check_growth(grown)
        held = await self._call("append_all", grown=[script.grown_fields(one) for one in grown])
        return [bool(one) for one in held]

    @override
    async def appended(self, request: str, stage: str, after: int = 0, limit: int = PIECES_AT_ONCE) -> list[bytes]:
        return list(await self._call("appended", id=request, stage=stage, after=after, limit=limit))

    @override
    async def commit(self, change: Change) -> RequestRecord:
        answer = await self._call("commit", **script.change_fields(change))
        return self._known.keep(script.record(answer, change.context))

    @override
    async def commit_and_lease(
        self, change: Change, worker: str, wanted: LeaseRequest, ttl: float
    ) -> tuple[RequestRecord, list[Lease]]:
        asking = LeaseWaiter(worker, wanted, ttl, patient=False)
        record, now, claims, wall = await self._call("commit_and_lease", **script.change_fields(change), ask=asking.ask)
        kept = self._known.keep(script.record(record, change.context))
        return kept, self._read_leases(asking, claims, now, wall)

    def _read_leases(
        self, waiter: LeaseWaiter, claims: list[tuple[bytes, bytes, int]], now: bytes, wall: bytes
    ) -> builtins.list[Lease]:
        """The leases that the script made for a waiter, each with the next one of its tokens."""
        tokens = (waiter.tokens[at : at + 16] for at in range(0, len(waiter.tokens), 16))
        leases = []
        for (stored, attempt, appended), token in zip(claims, tokens, strict=False):
            task = self._unreadable.read("task", f"of {waiter.worker}", script.task, stored, attempt)
            if task:
                leases.append(Lease(task, waiter.worker, token, float(now) + waiter.ttl, appended=appended))
        self._known.leased(leases, float(wall))
        return leases

    @override
    async def hand_back(self, claim: Claim) -> bool:
        return bool(await self._call("hand_back", claim=script.claim_fields(claim)))

    @override
    async def turn_down(self, claim: Claim) -> int:
        return int(await self._call("turn_down", claim=script.claim_fields(claim)))

    @override
    async def expired(self, ttl: float) -> list[Lease]:
        found = await self._call("expired", ttl=ttl)
        leases = (self._unreadable.read("lease", script.printable_name(one[5]), script.lease, *one) for one in found)
        return [lease for lease in leases if lease]

    @override
    async def load(self, request: str) -> RequestRecord:
        try:
            return script.record(await self._call("load", id=request))
        except (ProtocolError, TypeError, Damaged) as error:
            self._unreadable.note("request", request, str(error))
            raise Damaged(f"the stored record of request {request} cannot be read: see `unfuse dead ls`") from error

    @override
    def known(self, claim: Claim) -> RequestRecord | None:
        return self._known.of(claim)

    @override
    async def list(
        self, which: RequestFilter, *, after: str | int | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[RequestRecord]:
        tenant, field, value = which.heading
        asked = {name: script.text(value) for name, value in which.asked().items()}
        asks = {"which": asked, "heading": (tenant, field, script.text(value)), "oldest_first": oldest_first}
        found: list[RequestRecord] = []
        beyond: str | None = "-inf" if oldest_first else "+inf"
        if isinstance(after, int):
            after, beyond = None, str(after)
        while beyond is not None and len(found) < limit:
            left = limit - len(found)
            last, page, damaged = await self._call("list", **asks, after=after, beyond=beyond, limit=left)
            records = (
                self._unreadable.read("request", script.printable_name(one[3]), script.record, one) for one in page
            )
            found += [record for record in records if record]
            for id in damaged:
                self._unreadable.note("request", script.printable_name(id), "it is not the record of a request")
            after, beyond = None, last and last.decode()
        return found

    @override
    async def over(self, requests: Sequence[str]) -> builtins.list[str]:
        pieces = [requests[first : first + SCANNED] for first in range(0, len(requests), SCANNED)]
        answers = await asyncio.gather(*(self._call("over", ids=piece) for piece in pieces))
        found = (is_over for answer in answers for is_over in answer)
        return [request for request, is_over in zip(requests, found, strict=True) if is_over]

    @override
    async def stats(self, pools: Sequence[str]) -> QueueStats:
        active, lines = await self._call("stats", pools=list(pools), front=FRONT)
        shown = (PoolStats(int(size), float(oldest), int(left) / NANOSECONDS) for size, oldest, left in lines)
        return QueueStats(int(active), dict(zip(pools, shown, strict=True)))

    @override
    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        found = await self._call("peek", pool=pool, limit=limit)
        return [one for kept in found if (one := self._unreadable.read("task", pool, script.task, *kept))]

    @override
    async def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        self._background.run("listen", self._subscription.listen)
        is_known = is_over = False
        try:
            while not self._closed and not is_over:
                news = self._subscription.news_of(request)
                try:
                    over, events = await self._call("events", id=request, after=after)
                except NotFound:
                    if is_known:
                        return
                    raise
                except TransientError:
                    await asyncio.sleep(RETRY_S)
                    continue
                is_known, is_over = True, over == b"1"
                for event in events:
                    found = self._unreadable.read("event", request, decode, event, Event)
                    if found:
                        yield found
                        after = found.seq
                if not is_over:
                    await news
        finally:
            self._subscription.notify(request)

    @override
    async def cache(self, key: str, ref: ObjectRef, room: int) -> None:
        kept = {"id": ref.id, "nbytes": ref.nbytes, "ref": script.raw(encode(ref))}
        await self._call("cache", key=key, room=room, most=MAX_CACHED, **kept)

    @override
    async def cached(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        found = await self._call("cached", keys=keys, use=use)
        stored = [(key, ref) for key, ref in zip(keys, found, strict=True) if ref]
        refs = {key: self._unreadable.read("cached output", key, decode, ref, ObjectRef) for key, ref in stored}
        return {key: ref for key, ref in refs.items() if ref}

    @override
    async def cached_bytes(self) -> int:
        return int(await self._call("cached_bytes"))

    @override
    async def uncache(self, key: str, id: str) -> None:
        await self._call("uncache", key=key, id=id)

    @override
    async def hello(self, worker: WorkerInfo, cards: Sequence[ModelSpec] = ()) -> None:
        brought = script.raw(encode(tuple(cards))) if cards else None
        await self._call("hello", worker=worker.id, info=script.raw(encode(worker)), cards=brought)

    @override
    async def bye(self, worker: str) -> None:
        await self._call("bye", worker=worker)

    @override
    async def declare(self, by: str, declaration: DeclaredModels, *, new: bool = False) -> bool:
        body = script.raw(encode(declaration))
        return bool(await self._call("declare", by=by, declaration=body, new=new))

    @override
    async def secret(self, name: str, proposed: str) -> str:
        return bytes(await self._call("secret", name=name, proposed=proposed)).decode()

    @override
    async def declared(self) -> dict[str, DeclaredModels]:
        stored = await self._call("declared")
        named = [(script.printable_name(by), data) for by, data in zip(stored[::2], stored[1::2], strict=True)]
        read = {
            by: self._unreadable.read("declaration", by, script.decoded, data, DeclaredModels) for by, data in named
        }
        return {by: found for by, found in read.items() if found}

    @override
    async def workers(self) -> Sequence[RegisteredWorker]:
        found: list[RegisteredWorker] = []
        for id, info, brought, seen, leased in await self._call("workers"):
            name = script.printable_name(id)
            cards = brought and self._unreadable.read("card", name, script.decoded, brought, tuple[ModelSpec, ...])
            member = self._unreadable.read("worker", name, script.member, info, cards or (), seen, leased)
            found += [member] if member else []
        return found

    @override
    async def damaged(self) -> Sequence[DamagedRecord]:
        await self.workers()
        for one in [one for one in self._unreadable.all() if one.kind == "request"]:
            with suppress(Damaged):
                with suppress(NotFound):
                    await self.load(one.id)
                self._unreadable.forget(one.id)
        aside = await self._call("damaged")
        pairs = zip(aside[::2], aside[1::2], strict=True)
        found = [
            DamagedRecord(script.printable_name(name), kind.decode(), "its task is not whole") for name, kind in pairs
        ]
        return [*(one for one in self._unreadable.all() if one.kind in script.DROPPABLE), *found]

    @override
    async def discard(self, id: str) -> None:
        await self._call("discard", id=script.raw_name(id))
        self._unreadable.forget(id)

    @override
    async def forget(self, before: float) -> Sequence[str]:
        old: list[str] = []
        while some := await self._call("forget", before=before):
            old += [script.printable_name(request) for request in some]
        return old

    @override
    async def drop(self, request: str) -> None:
        await self._call("drop", id=request)

    @override
    async def close(self) -> None:
        self._closed = True
        self._subscription.close()
        await self._background.end("listen")
        self._waiting.close()
        await connection.close(self._redis)

    async def _call(self, verb: str, **args: Any) -> Any:
        """Run a verb of the script. Raises TransientError, and its errors."""
        if self._closed and "undo" not in args:
            raise TransientError("this queue was closed")
        args |= {"max_events": MAX_EVENTS, "among": PREFERENCE_AMONG, "moment": PREFERENCE_S}
        args |= {"most_returns": MOST_RETURNS, "scan": SCANNED, "video_id": VIDEO.prefix, "part": self._address.part}
        if self._servers_time:
            args |= {"now": self._servers_time.now(), "wall": self._servers_time.wall()}
        if args.get("push"):  # who waits here asks in the same run: what is taken at once wakes nobody elsewhere
            self._waiting.serve()
        try:
            return await self._calls.answer(verb, encode(args))
        except (RedisError, OSError) as error:
            raise script.error(error, self._address.shown) from error

    async def _execute(self, calls: Sequence[connection.Call]) -> builtins.list[Any]:
        return await connection.answers(self._redis, self._tag, calls, self._address.replicas)
