"""The queue in Redis (6.2 or later) or Valkey: any number of schedulers over one server, by one set of Lua scripts.

Every verb is one run of the script in `scripts/`, so Redis makes it a transaction. Who waits is woken by pub/sub, and
looks whenever the listener has a new connection, so nothing is missed while there was none.
"""

from __future__ import annotations

import asyncio
import builtins
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from unfuse.core.card import ModelCard
from unfuse.core.clock import AlarmClock, Clock
from unfuse.core.codec import decode, encode
from unfuse.core.errors import ConfigError, Damaged, NotFound, ProtocolError, TransientError
from unfuse.core.event import Event
from unfuse.core.media import VIDEO
from unfuse.core.messages import WorkerInfo
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Change, Record, RequestContext
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues import script
from unfuse.queues.base import (
    FRONT,
    MAX_CACHED,
    MOST_RETURNS,
    Damage,
    Declaration,
    Filter,
    Limits,
    Member,
    PoolStats,
    Renewal,
    Stats,
    TaskQueue,
    check_storable,
)
from unfuse.queues.history import MAX_EVENTS
from unfuse.queues.remaining import NANOSECONDS
from unfuse.queues.remote_waiters import RETRY_S, TOGETHER, Background, RemoteWaiters, Waiter
from unfuse.queues.unreadable import Unreadable
from unfuse.queues.wanted import PREFERENCE_AMONG, PREFERENCE_S, Wanted

try:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import NoScriptError, RedisError

    from unfuse.queues.obstacles import address, obstacle
    from unfuse.queues.subscription import Subscription
except ImportError as error:
    raise ConfigError("a queue in Redis needs the library redis: pip install 'unfuse[redis]'") from error

ANSWER_S = 15.0
CHECK_S = 2.0
"""Seconds that an answer, or a check, may take."""

COUNTS = 3
"""So often what an earlier version changes meanwhile is counted before sums are told."""

SCANNED = 500
"""Requests that one run looks through."""


class RedisQueue(TaskQueue):
    """A queue that many processes share. Its clock is the server's, as steady as that one's wall clock.

    A method raises TransientError when the server does not answer; whether it had an effect is then unknown.
    Who waits or watches goes on when the server is back.
    """

    shared = True

    def __init__(self, url: str, prefix: str, clock: Clock) -> None:
        self._url, self._tag, self._clock = url, f"{{{prefix}}}", clock
        self._redis = Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_timeout=ANSWER_S)
        self._unsent: list[tuple[str, bytes, asyncio.Future[Any]]] = []
        self._background = Background()
        self._unreadable = Unreadable()
        self._waiting = RemoteWaiters(self._call, self._background, clock, self._unreadable)
        self._hearing = Subscription(self._redis, f"{self._tag}:changes", self._waiting)
        self._closed = False
        self._latest = 0.0

    @classmethod
    def at(cls, url: str, clock: Clock) -> RedisQueue:
        """The queue at `redis://host:port/database?prefix=unfuse`; a clock with alarms stands in for the server's."""
        return cls(*address(url), clock)

    async def now(self) -> float:
        """The server's clock."""
        self._latest = max(self._latest, float(await self._call("now")))
        return self._latest

    async def reach(self) -> None:
        """Have the server do something, as who it is told that we are."""

        async def ask() -> None:
            (reply,) = await self._execute([("now", encode({}))])
            if isinstance(reply, Exception):
                raise reply

        if reason := await obstacle(self._url, ask):
            raise ConfigError(f"the queue at {self._url.rpartition('@')[2]} cannot be used: {reason}")

    async def check(self) -> None:
        """Have the server run the script. Raises TransientError when it does not, or takes longer than CHECK_S."""
        try:
            async with asyncio.timeout(CHECK_S):
                await self._call("now")
        except TimeoutError as error:
            raise self._error(error) from error

    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: Limits
    ) -> Record:
        """Store a new request, once."""
        check_storable(context, *tasks, *events)
        more = Counter(task.pool for task in tasks)
        return script.record(
            await self._call("submit", **script.facts(context, tasks, events), limits=limits, more=more)
        )

    async def lease(self, worker: str, wanted: Wanted, ttl: float, wait: float = 0.0) -> list[Lease]:
        """Claim tasks, waiting for a first one."""
        if wanted.slots < 1 or self._closed:
            return []
        if wait > 0:
            self._background.run("listen", self._hearing.listen)
        return await self._waiting.claim(worker, wanted, ttl, wait)

    async def renew(self, claims: Sequence[Claim], ttl: float) -> Renewal:
        """Extend what is held."""
        held = await self._call("renew", claims=[script.shown(claim) for claim in claims], ttl=ttl)
        marked = list(zip(claims, held, strict=True))
        return Renewal(tuple(c for c, held in marked if held), tuple(c for c, held in marked if not held))

    async def progress(self, claim: Claim, events: Sequence[Event]) -> bool:
        """Publish while held."""
        check_storable(*events)
        return bool(await self._call("progress", claim=script.shown(claim), events=events))

    async def commit(self, change: Change) -> Record:
        """Check everything, then apply everything."""
        check_storable(change.context, *change.push, *change.events)
        return script.record(await self._call("commit", **script.changed(change)))

    async def commit_and_lease(
        self, change: Change, worker: str, wanted: Wanted, ttl: float
    ) -> tuple[Record, list[Lease]]:
        """Apply a transition, then claim tasks, in one run of the script."""
        check_storable(change.context, *change.push, *change.events)
        asking = Waiter(worker, wanted, ttl, patient=False)
        record, now, claims = await self._call("commit_and_lease", **script.changed(change), ask=asking.ask)
        return script.record(record), asking.leases(claims, float(now), self._unreadable)

    async def hand_back(self, claim: Claim) -> bool:
        """Put a leased task back where it stood."""
        return bool(await self._call("hand_back", claim=script.shown(claim)))

    async def turn_down(self, claim: Claim) -> int:
        """Put a leased task back where it stood, and remember whose it was."""
        return int(await self._call("turn_down", claim=script.shown(claim)))

    async def expired(self, ttl: float) -> list[Lease]:
        """Leases whose time has passed; none after a gap, which all of them are forgiven."""
        found = await self._call("expired", ttl=ttl)
        leases = (
            self._unreadable.sound("lease", script.shown_text(one[5]), partial(script.lease, *one)) for one in found
        )
        return [lease for lease in leases if lease]

    async def load(self, request: str) -> Record:
        """The stored request."""
        try:
            return script.record(await self._call("load", id=request))
        except (ProtocolError, TypeError, Damaged) as error:
            self._unreadable.note("request", request, str(error))
            raise Damaged(f"what is stored of request {request} cannot be read, `unfuse dead ls` lists it") from error

    async def list(
        self, which: Filter, *, after: str | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[Record]:
        """Requests in the order of their arrival."""
        tenant, field, value = which.heading
        asked = {name: script.text(value) for name, value in which.asked().items()}
        asks = {"which": asked, "heading": (tenant, field, script.text(value)), "oldest_first": oldest_first}
        found: list[Record] = []
        beyond: str | None = "-inf" if oldest_first else "+inf"
        while beyond is not None and len(found) < limit:
            left = limit - len(found)
            last, page, damaged = await self._call("list", **asks, after=after, beyond=beyond, limit=left)
            records = (
                self._unreadable.sound("request", script.shown_text(one[3]), partial(script.record, one))
                for one in page
            )
            found += [record for record in records if record]
            for id in damaged:
                self._unreadable.note("request", script.shown_text(id), "it is not what is stored of a request")
            after, beyond = None, last and last.decode()
        return found

    async def over(self, requests: Sequence[str]) -> builtins.list[str]:
        """Which of these are over, or not known."""
        pieces = [requests[first : first + SCANNED] for first in range(0, len(requests), SCANNED)]
        answers = await asyncio.gather(*(self._call("over", ids=piece) for piece in pieces))
        found = (is_over for answer in answers for is_over in answer)
        return [request for request, is_over in zip(requests, found, strict=True) if is_over]

    async def size(self, pool: str) -> int:
        """Tasks that wait, their time come or not."""
        return int(await self._call("size", pool=pool))

    async def stats(self, pools: Sequence[str]) -> Stats:
        """How much there is to do. What an earlier version has stored or changed is counted first."""
        for _ in range(COUNTS):
            active, lines, uncounted = await self._call("stats", pools=list(pools), front=FRONT)
            if not uncounted:
                break
            await asyncio.gather(*(self._count(id) for id in uncounted))
        shown = (PoolStats(int(size), float(oldest), int(left) / NANOSECONDS) for size, oldest, left in lines)
        return Stats(int(active), dict(zip(pools, shown, strict=True)))

    async def _count(self, request: bytes) -> None:
        """Have what is left of a request counted."""
        share = script.UNREADABLE
        with suppress(NotFound, Damaged):
            share = script.counted((await self.load(script.shown_text(request))).context)
        await self._call("count", id=script.raw(request), **share)

    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        """The tasks that would be leased next."""
        found = await self._call("peek", pool=pool, limit=limit)
        return [one for kept in found if (one := self._unreadable.sound("task", pool, partial(script.task, *kept)))]

    async def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        """Follow a request's history."""
        self._background.run("listen", self._hearing.listen)
        is_known = is_over = False
        try:
            while not self._closed and not is_over:
                news = self._hearing.of(request)
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
                    found = self._unreadable.sound("event", request, partial(decode, event, Event))
                    if found:
                        yield found
                        after = found.seq
                if not is_over:
                    await news
        finally:
            self._hearing.tell(request)

    async def cache(self, key: str, ref: ObjectRef, room: int) -> None:
        """Keep a handle, and no more than there is room for."""
        kept = {"id": ref.id, "nbytes": ref.nbytes, "ref": script.raw(encode(ref))}
        await self._call("cache", key=key, room=room, most=MAX_CACHED, **kept)

    async def cached(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        """Look handles up."""
        found = await self._call("cached", keys=keys, use=use)
        kept = {key: partial(decode, ref, ObjectRef) for key, ref in zip(keys, found, strict=True) if ref}
        refs = {key: self._unreadable.sound("cached output", key, read) for key, read in kept.items()}
        return {key: ref for key, ref in refs.items() if ref}

    async def cached_bytes(self) -> int:
        """Their sum."""
        return int(await self._call("cached_bytes"))

    async def uncache(self, key: str, id: str) -> None:
        """Give that object up."""
        await self._call("uncache", key=key, id=id)

    async def hello(self, worker: WorkerInfo, cards: Sequence[ModelCard] = ()) -> None:
        """Register a worker; cards it brought before are kept when it brings none."""
        brought = script.raw(encode(tuple(cards))) if cards else None
        await self._call("hello", worker=worker.id, info=script.raw(encode(worker)), cards=brought)

    async def bye(self, worker: str) -> None:
        """Forget a worker."""
        await self._call("bye", worker=worker)

    async def declare(self, by: str, declaration: Declaration) -> None:
        """Keep what somebody declares."""
        await self._call("declare", by=by, declaration=script.raw(encode(declaration)))

    async def declared(self) -> dict[str, Declaration]:
        """All of it that can be read."""
        stored = await self._call("declared")
        named = [(script.shown_text(by), data) for by, data in zip(stored[::2], stored[1::2], strict=True)]
        read = {by: self._unreadable.sound("declaration", by, partial(script.declaration, data)) for by, data in named}
        return {by: found for by, found in read.items() if found}

    async def workers(self) -> Sequence[Member]:
        """The registry, in order of arrival."""
        found: list[Member] = []
        for id, info, brought, seen, leased in await self._call("workers"):
            name = script.shown_text(id)
            cards = self._unreadable.sound("card", name, partial(script.cards, brought)) if brought else ()
            member = self._unreadable.sound("worker", name, partial(script.member, info, cards or (), seen, leased))
            found += [member] if member else []
        return found

    async def damaged(self) -> Sequence[Damage]:
        """What was met, as far as it is still there, and what the scripts have put aside."""
        await self.workers()
        for one in [one for one in self._unreadable.all() if one.kind == "request"]:
            with suppress(Damaged):
                with suppress(NotFound):
                    await self.load(one.id)
                self._unreadable.forget(one.id)
        aside = await self._call("damaged")
        pairs = zip(aside[::2], aside[1::2], strict=True)
        found = [Damage(script.shown_text(name), kind.decode(), "its task is not whole") for name, kind in pairs]
        return [*(one for one in self._unreadable.all() if one.kind in script.DROPPABLE), *found]

    async def discard(self, id: str) -> None:
        """Drop it, whatever it is."""
        await self._call("discard", id=script.stored(id))
        self._unreadable.forget(id)

    async def forget(self, before: float) -> Sequence[str]:
        """Drop requests that were over before `before`."""
        old: list[str] = []
        while some := await self._call("forget", before=before):
            old += [script.shown_text(request) for request in some]
        return old

    async def drop(self, request: str) -> None:
        """Drop one that is over."""
        await self._call("drop", id=request)

    async def close(self) -> None:
        """Wake everyone who waits, end what runs, and hang up."""
        self._closed = True
        self._hearing.close()
        await self._background.end("listen")
        self._waiting.close()
        await self._redis.aclose()

    def _error(self, error: Exception) -> Exception:
        return script.error(error, self._url.rpartition("@")[2])

    async def _call(self, verb: str, **args: Any) -> Any:
        """Run a verb of the script. Raises TransientError, and what the verb refuses with."""
        if self._closed and "undo" not in args:
            raise TransientError("this queue was closed")
        args |= {"max_events": MAX_EVENTS, "among": PREFERENCE_AMONG, "moment": PREFERENCE_S}
        args |= {"most_returns": MOST_RETURNS, "scan": SCANNED, "video_id": VIDEO.prefix}
        if isinstance(self._clock, AlarmClock):
            args |= {"now": self._clock.now(), "wall": self._clock.wall()}
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unsent.append((verb, encode(args), answer))
        self._background.run("send", self._send)
        return await answer

    async def _send(self) -> None:
        """Send what there is, together; calls that come meanwhile are the next to go."""
        while self._unsent:
            batch, self._unsent = self._unsent[:TOGETHER], self._unsent[TOGETHER:]
            try:
                replies = await self._execute([(verb, args) for verb, args, _ in batch])
            except Exception as error:  # whatever it is, those who wait must hear of it
                replies = [error] * len(batch)
            for (_, _, answer), reply in zip(batch, replies, strict=True):
                if answer.done():
                    continue
                if isinstance(reply, RedisError | OSError):
                    answer.set_exception(self._error(reply))
                elif isinstance(reply, Exception):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)

    async def _execute(self, calls: builtins.list[tuple[str, bytes]]) -> builtins.list[Any]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for verb, args in calls:
                pipeline.evalsha(script.SCRIPT_ID, 1, self._tag, verb, args)
            replies = await pipeline.execute(raise_on_error=False)
        if unknown := [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]:
            await self._redis.script_load(script.SCRIPT)
            for n, reply in zip(unknown, await self._execute([calls[n] for n in unknown]), strict=True):
                replies[n] = reply
        return replies
