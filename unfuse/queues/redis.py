"""The queue in Redis (6.2 or later) or Valkey: any number of schedulers over one server, by one set of Lua scripts.

Every verb is one run of the script in `scripts/`, so Redis makes it a transaction. Who waits is woken by pub/sub, and
looks whenever the listener has a new connection, so nothing is missed while there was none.
"""

from __future__ import annotations

import asyncio
import builtins
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from unfuse.core.card import ModelCard
from unfuse.core.clock import AlarmClock, Clock
from unfuse.core.codec import decode, encode
from unfuse.core.errors import ConfigError, Conflict, LeaseLost, NotFound, Overloaded, TransientError, UnfuseError
from unfuse.core.event import Event
from unfuse.core.messages import WorkerInfo
from unfuse.core.request import Change, Record, RequestContext, Running
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues import script
from unfuse.queues.base import PREFERENCE_AMONG, PREFERENCE_S, Filter, Limits, Member, Renewal, TaskQueue, Wanted
from unfuse.queues.history import MAX_EVENTS

try:
    from redis import Redis as BlockingRedis
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import NoScriptError, RedisError
except ImportError as error:
    raise ConfigError("a queue in Redis needs the library redis: pip install 'unfuse[redis]'") from error

REFUSALS: dict[str, type[UnfuseError]] = {
    "NOTFOUND": NotFound,
    "LEASELOST": LeaseLost,
    "CONFLICT": Conflict,
    "OVERLOADED": Overloaded,
}
ADDRESS = "redis://[user:password@]host[:port][/database][?prefix=name]"

RETRY_S = 0.2
SWEEP_S = 5.0
"""How long until a lost connection is tried again, and until those who wait look by themselves, should nothing come."""

TOGETHER = 128
SCANNED = 500
SEEN = 10_000
"""Calls in one round trip, requests that one run looks through, ids that are remembered to exist."""


class RedisQueue(TaskQueue):
    """A queue that many processes share. Its clock is the server's, as steady as that one's wall clock.

    A method raises TransientError when the server does not answer; whether it had an effect is then unknown.
    Who waits or watches goes on when the server is back.
    """

    def __init__(self, url: str, prefix: str, clock: Clock) -> None:
        self._url, self._tag, self._clock = url, f"{{{prefix}}}", clock
        self._redis = Redis.from_url(url, retry=Retry(NoBackoff(), 0))
        self._unsent: list[tuple[str, bytes, asyncio.Future[Any]]] = []
        self._waiters: dict[script.Waiter, None] = {}
        self._followers: dict[str, list[asyncio.Future[None]]] = {}
        self._seen: dict[str, None] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stale = self._closed = False
        self._withdraw_alarm: Callable[[], None] = lambda: None
        self._latest = 0.0

    @classmethod
    def at(cls, url: str, clock: Clock) -> RedisQueue:
        """The queue at `redis://host:port/database?prefix=unfuse`; a clock with alarms stands in for the server's."""
        try:
            parts = urlsplit(url if "//" in url else "redis://127.0.0.1")
            options = dict(parse_qsl(parts.query, keep_blank_values=True))
            prefix = options.pop("prefix", "unfuse")
            if options or parts.port == 0 or not re.fullmatch(r"/?\d* [\w.-]{1,64}", f"{parts.path} {prefix}"):
                raise ValueError
        except ValueError:
            raise ConfigError(f"a queue in Redis is {ADDRESS}") from None
        return cls(parts._replace(query="").geturl(), prefix, clock)

    async def now(self) -> float:
        """The server's clock."""
        self._latest = max(self._latest, float(await self._call("now")))
        return self._latest

    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: Limits
    ) -> Record:
        """Store a new request, once."""
        more = Counter(task.pool for task in tasks)
        return self._record(
            await self._call("submit", **script.facts(context, tasks, events), limits=limits, more=more)
        )

    async def lease(self, worker: str, wanted: Wanted, ttl: float, wait: float = 0.0) -> list[Lease]:
        """Claim tasks, waiting for a first one. All who ask here at the same time are served by one call, in order."""
        if wanted.slots < 1 or self._closed:
            return []
        waiter = script.Waiter(worker, wanted, ttl, patient=wait > 0)
        self._waiters[waiter] = None
        self._serve()
        withdraw_alarm = self._wait(waiter, wait)
        try:
            await asyncio.wait([waiter.answer])
            return waiter.answer.result()
        except asyncio.CancelledError:
            waiter.patient = False
            if waiter.asked or waiter.answer.done():
                undo = f"undo {id(waiter)}"
                self._run(undo, partial(self._undo, waiter))
                await asyncio.shield(self._tasks[undo])
                del self._tasks[undo]
            raise
        finally:
            withdraw_alarm()
            del self._waiters[waiter]

    async def renew(self, claims: Sequence[Claim], ttl: float) -> Renewal:
        """Extend what is held."""
        held = await self._call("renew", claims=[script.shown(claim) for claim in claims], ttl=ttl)
        marked = list(zip(claims, held, strict=True))
        return Renewal(tuple(c for c, held in marked if held), tuple(c for c, held in marked if not held))

    async def progress(self, claim: Claim, events: Sequence[Event]) -> bool:
        """Publish while held."""
        return bool(await self._call("progress", claim=script.shown(claim), events=events))

    async def commit(self, change: Change) -> Record:
        """Check everything, then apply everything."""
        parts = script.facts(change.context, change.push, change.events) | {"close": change.close}
        return self._record(await self._call("commit", **parts, claim=change.claim and script.shown(change.claim)))

    async def hand_back(self, claim: Claim) -> bool:
        """Put a leased task back where it stood."""
        return bool(await self._call("hand_back", claim=script.shown(claim)))

    async def expired(self) -> list[Lease]:
        """Leases whose time has passed."""
        return [
            Lease(script.task(task, attempt), worker.decode(), mark.partition(b":")[2], float(expires))
            for task, attempt, worker, mark, expires in await self._call("expired")
        ]

    async def load(self, request: str) -> Record:
        """The stored request."""
        return self._record(await self._call("load", id=request))

    async def list(self, which: Filter, *, after: str | None = None, limit: int = 100) -> builtins.list[Record]:
        """Requests, newest first."""
        fields = {
            name: script.text(value) for name, value in msgspec.structs.asdict(which).items() if value is not None
        }
        found: list[Record] = []
        below: str | None = "+inf"
        while below is not None and len(found) < limit:
            last, page = await self._call(
                "list", which=fields, after=after, below=below, limit=limit - len(found), scan=SCANNED
            )
            found += [self._record(one) for one in page]
            after, below = None, last and last.decode()
        return found

    async def size(self, pool: str) -> int:
        """Tasks that wait, their time come or not."""
        return int(await self._call("size", pool=pool))

    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        """The tasks that would be leased next."""
        return [script.task(*found) for found in await self._call("peek", pool=pool, limit=limit)]

    def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        """Follow a request's history. For an id that was never met here, the server is asked at once, the loop waits.

        Raises TransientError when it does not answer that.
        """
        if request not in self._seen:
            try:
                with BlockingRedis.from_url(self._url, socket_timeout=1.0, socket_connect_timeout=1.0) as server:
                    known = server.exists(f"{self._tag}:request:{request}")
            except (RedisError, OSError) as error:
                raise self._error(error) from error
            if not known:
                raise NotFound(f"no request {request}")
        return self._follow(request, after)

    async def hello(self, worker: WorkerInfo, cards: Sequence[ModelCard] = ()) -> None:
        """Register a worker; cards it brought before are kept when it brings none."""
        brought = script.raw(encode(tuple(cards))) if cards else None
        await self._call("hello", worker=worker.id, info=script.raw(encode(worker)), cards=brought)

    async def bye(self, worker: str) -> None:
        """Forget a worker."""
        await self._call("bye", worker=worker)

    async def workers(self) -> Sequence[Member]:
        """The registry, in order of arrival."""
        found: list[Member] = []
        for info, brought, seen, leased in await self._call("workers"):
            known = script.cards(brought) if brought else ()
            found.append(Member(decode(info, WorkerInfo), known, float(seen), int(leased or 0)))
        return found

    async def forget(self, before: float) -> Sequence[str]:
        """Drop requests that were over before `before`."""
        old: list[str] = []
        while some := await self._call("forget", before=before, scan=SCANNED):
            old += [request.decode() for request in some]
        return old

    async def drop(self, request: str) -> None:
        """Drop one that is over."""
        await self._call("drop", id=request)

    async def close(self) -> None:
        """Wake everyone who waits, end what runs, and hang up."""
        self._closed = True
        for waiter in self._waiters:
            self._give_up(waiter)
        self._wake_followers(*self._followers)
        if "listen" in self._tasks:
            self._tasks["listen"].cancel()
        while running := [task for task in self._tasks.values() if not task.done()]:
            await asyncio.wait(running)
        self._withdraw_alarm()
        await self._redis.aclose()

    def _error(self, error: Exception) -> Exception:
        """What a refusal of the script or of the server is here."""
        kind, _, text = str(error).partition(" ")
        if kind in REFUSALS:
            return REFUSALS[kind](text)
        return TransientError(f"the queue at {self._url.rpartition('@')[2]} does not answer: {error}")

    def _record(self, reply: builtins.list[Any]) -> Record:
        context, running, position = reply
        record = Record(decode(context, RequestContext), decode(running, tuple[Running, ...]), position)
        self._seen[record.context.id] = None
        if len(self._seen) > SEEN:
            del self._seen[next(iter(self._seen))]
        return record

    async def _follow(self, request: str, after: int) -> AsyncIterator[Event]:
        self._run("listen", self._listen)
        while not self._closed:
            news = asyncio.get_running_loop().create_future()
            self._followers.setdefault(request, []).append(news)
            try:
                over, events = await self._call("events", id=request, after=after)
            except NotFound:
                return
            except TransientError:
                await asyncio.sleep(RETRY_S)
                continue
            for event in events:
                found: Event = decode(event, Event)
                yield found
                after = found.seq
            if over == b"1":
                return
            await news

    def _run(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have the task of that name run, unless it does."""
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(work())

    async def _call(self, verb: str, **args: Any) -> Any:
        """Run a verb of the script. Raises TransientError, and what the verb refuses with."""
        if self._closed and "undo" not in args:
            raise TransientError("this queue was closed")
        args |= {"max_events": MAX_EVENTS, "among": PREFERENCE_AMONG, "moment": PREFERENCE_S}
        if isinstance(self._clock, AlarmClock):
            args |= {"now": self._clock.now(), "wall": self._clock.wall()}
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unsent.append((verb, encode(args), answer))
        self._run("send", self._send)
        return await answer

    async def _send(self) -> None:
        """Send what there is, together; calls that come meanwhile are the next to go."""
        while self._unsent:
            batch, self._unsent = self._unsent[:TOGETHER], self._unsent[TOGETHER:]
            try:
                replies = await self._execute([(verb, args) for verb, args, _ in batch])
            except (RedisError, OSError) as error:
                replies = [error] * len(batch)
            for (_, _, answer), reply in zip(batch, replies, strict=True):
                if answer.done():
                    continue
                if isinstance(reply, Exception):
                    answer.set_exception(self._error(reply))
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

    async def _listen(self) -> None:
        """Hear what changed. On a new connection, and when it is quiet, everyone looks."""
        while not self._closed:
            with suppress(RedisError, OSError):
                async with self._redis.pubsub() as ear:
                    await ear.subscribe(f"{self._tag}:changes")
                    while not self._closed:
                        self._hear(await ear.get_message(timeout=SWEEP_S))
            await asyncio.sleep(RETRY_S)

    def _hear(self, message: dict[str, Any] | None) -> None:
        if message is None or message["type"] != "message":
            self._serve()
            self._wake_followers(*self._followers)
            return
        kind, _, name = message["data"].decode().partition(":")
        if kind == "request":
            self._wake_followers(name)
        elif any(name in waiter.pools for waiter in self._waiters):
            self._serve()

    def _wake_followers(self, *requests: str) -> None:
        for news in [news for request in requests for news in self._followers.pop(request, ())]:
            if not news.done():
                news.set_result(None)

    def _serve(self) -> None:
        """Have everyone who waits asked for, once more if that is being done."""
        self._stale = True
        if self._waiters:
            self._run("ask", self._ask)

    async def _ask(self) -> None:
        while self._stale:
            self._stale = False
            self._withdraw_alarm()
            waiting = [waiter for waiter in self._waiters if not waiter.answer.done()]
            waiting.sort(key=lambda waiter: waiter.above)
            for first in range(0, len(waiting), TOGETHER):
                await self._claim(waiting[first : first + TOGETHER])

    async def _claim(self, asking: builtins.list[script.Waiter]) -> None:
        """Settle who gets something, and who does not wait; have the others asked for when a task's time comes."""
        for waiter in asking:
            waiter.asked = True
        try:
            now, ripens, answers = await self._call("lease", asks=[waiter.ask for waiter in asking])
        except UnfuseError as error:
            for waiter in asking:
                waiter.settle([], error)
            self._withdraw_alarm = asyncio.get_running_loop().call_later(RETRY_S, self._serve).cancel
            return
        for waiter, claims in zip(asking, answers, strict=True):
            waiter.settle(waiter.leases(claims, float(now)))
        if ripens is not None:
            self._withdraw_alarm = self._call_at(float(now), float(ripens), self._serve)

    def _wait(self, waiter: script.Waiter, wait: float) -> Callable[[], None]:
        if not waiter.patient:
            return lambda: None
        self._run("listen", self._listen)
        now = self._clock.now()
        return self._call_at(now, now + wait, partial(self._give_up, waiter))

    def _give_up(self, waiter: script.Waiter) -> None:
        """A waiter's time is over: it is answered now, or with what the call under way brings."""
        waiter.patient = False
        if not waiter.asked:
            waiter.settle([])

    async def _undo(self, waiter: script.Waiter) -> None:
        """Give back what a caller who is gone has claimed."""
        with suppress(TransientError):
            for lease in await waiter.answer:
                await self._call("hand_back", claim=script.shown(lease.claim), undo=True)

    def _call_at(self, now: float, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Set an alarm for a time of a clock that shows `now`; returns what takes it back."""
        if not isinstance(self._clock, AlarmClock):
            return asyncio.get_running_loop().call_later(max(0.0, when - now), callback).cancel
        if when > self._clock.now():
            return self._clock.call_at(when, callback)
        callback()
        return lambda: None
