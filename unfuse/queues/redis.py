"""A queue in Redis (6.2 or later) or Valkey that any number of schedulers share.

Every method is one run of the Lua script in `scripts/`, so it is a transaction. Waiting callers are woken by pub/sub
messages, and whenever the subscription reconnects, so that they miss no message.
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
from unfuse.core.errors import ConfigError, NotFound, ProtocolError, RecordDamaged, TransientError, UsageError
from unfuse.core.messages import WorkerInfo
from unfuse.core.modalities import VIDEO
from unfuse.core.model_spec import ModelSpec
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import readable_pool
from unfuse.core.request import Change, Event, RequestContext, RequestRecord, Timings
from unfuse.core.task import MAX_DELTAS_PER_MESSAGE, Claim, Lease, OutputDeltas, Task, check_deltas
from unfuse.queues import script
from unfuse.queues.base import (
    FRONT_TASKS,
    MAX_CACHED,
    MAX_REFUSALS,
    NANOSECONDS,
    PREFERENCE_S,
    PREFERENCE_TASKS,
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
from unfuse.queues.script import RecordCache, UnreadableRecords
from unfuse.queues.shards import ShardedQueue

try:
    from redis.exceptions import RedisError

    from unfuse.queues import connection
except ImportError as error:
    raise ConfigError("a Redis queue needs the redis library: pip install 'unfuse[redis]'") from error

#: Longest time for `check`, in seconds.
CHECK_S = 2.0
#: Most requests that one run of the script reads.
SCANNED = 500


class RedisQueue(QueueBackend):
    """A queue backend in Redis or Valkey, on the server's clock.

    `now` never runs backwards in one process, even if that clock does. A method raises TransientError when the server
    does not answer; then its effect is unknown. Waiting calls of `lease` and streams of `watch` continue when the
    server is back.
    """

    shared = True

    def __init__(self, address: connection.RedisAddress, clock: Clock | None) -> None:
        self._address = address
        self._tag = address.tag
        #: Replaces the server's clock, if not None.
        self._clock = clock
        self._redis = address.connect()
        self._background = NamedTasks()
        self._calls = connection.PipelinedCalls(self._execute, self._background)
        self._unreadable = UnreadableRecords()
        self._known = RecordCache(clock or SystemClock())
        self._waiting = RemoteWaiters(self._call, self._read_leases, self._background, clock or SystemClock())
        self._subscription = connection.Subscription(self._redis, self._tag, self._waiting)
        self._closed = False
        self._latest = 0.0

    @classmethod
    def open(cls, url: str, clock: Clock | None = None) -> QueueBackend:
        """Open the queue, or its shards, at a URL of the form `connection.ADDRESS`.

        `clock` replaces the clocks of the servers.
        """
        addresses = connection.parse_address(url)
        shards = [cls(address, clock) for address in addresses]
        # A set: shards at one server have the same unsharded address.
        unsharded = [
            cls(address, clock) for address in {address.unsharded for address in addresses if address.unsharded}
        ]
        return ShardedQueue(shards, unsharded) if len(shards) > 1 else shards[0]

    @override
    async def now(self) -> float:
        self._latest = max(self._latest, float(await self._call("now")))
        return self._latest

    @override
    async def check_address(self) -> None:

        async def probe() -> None:
            (reply,) = await self._execute([("now", encode({"part": self._address.part}))])
            if isinstance(reply, Exception):
                raise reply

        if reason := await connection.permanent_failure(self._address.server, probe):
            raise UsageError(f"the queue at {self._address.display_name} cannot be used: {reason}")

    @override
    async def check(self) -> None:
        try:
            async with asyncio.timeout(CHECK_S):
                await self._call("check")
        except TimeoutError as error:
            raise script.error(error, self._address.display_name) from error

    @override
    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: QueueLimits
    ) -> RequestRecord:
        fields = script.context_fields(context, tasks, events)
        new_tasks = Counter(task.planned.pool for task in tasks)
        names = {pool: readable_pool(pool) for pool in new_tasks}
        reply = await self._call("submit", **fields, limits=limits, more=new_tasks, names=names)
        return self._known.put(script.record(reply, context))

    @override
    async def lease(self, worker: str, wanted: LeaseRequest, ttl: float, wait: float = 0.0) -> list[Lease]:
        if wanted.slots < 1 or self._closed:
            return []
        if wait > 0:
            self._background.run("listen", self._subscription.listen)
        return await self._waiting.claim(worker, wanted, ttl, wait)

    @override
    async def renew(self, claims: Sequence[Claim], ttl: float) -> RenewalResult:
        replies = await self._call("renew", claims=[script.claim_fields(claim) for claim in claims], ttl=ttl)
        results = list(zip(claims, replies, strict=True))
        renewed = tuple(claim for claim, is_renewed in results if is_renewed)
        ended = tuple(claim for claim, is_renewed in results if not is_renewed)
        return RenewalResult(renewed, ended)

    @override
    async def progress(self, claim: Claim, events: Sequence[Event], used: Timings | None = None) -> bool:
        check_numbers(*events)
        return bool(await self._call("progress", claim=script.claim_fields(claim), events=events, used=used))

    @override
    async def append_deltas(self, outputs: Sequence[OutputDeltas]) -> list[bool]:
        check_deltas(outputs)
        replies = await self._call("append_deltas", grown=[script.delta_fields(output) for output in outputs])
        return [bool(has_lease) for has_lease in replies]

    @override
    async def read_deltas(
        self, request: str, stage: str, after: int = 0, limit: int = MAX_DELTAS_PER_MESSAGE
    ) -> list[bytes]:
        return list(await self._call("read_deltas", id=request, stage=stage, after=after, limit=limit))

    @override
    async def commit(self, change: Change) -> RequestRecord:
        reply = await self._call("commit", **script.change_fields(change))
        return self._known.put(script.record(reply, change.context))

    @override
    async def commit_and_lease(
        self, change: Change, worker: str, wanted: LeaseRequest, ttl: float
    ) -> tuple[RequestRecord, list[Lease]]:
        waiter = LeaseWaiter(worker, wanted, ttl, patient=False)
        reply, now, claims, wall = await self._call(
            "commit_and_lease", **script.change_fields(change), ask=waiter.request
        )
        record = self._known.put(script.record(reply, change.context))
        return record, self._read_leases(waiter, claims, now, wall)

    def _read_leases(
        self, waiter: LeaseWaiter, claims: list[tuple[bytes, bytes, int]], now: bytes, wall: bytes
    ) -> builtins.list[Lease]:
        """Return a waiter's new leases, decoded from a reply of the script.

        Each gets the next of the waiter's tokens.
        `claims`: the stored task, the attempt, and the number of recorded output deltas, for each lease.
        `now`, `wall`: the queue's time and the Unix time of the leases.
        """
        tokens = (waiter.tokens[start : start + 16] for start in range(0, len(waiter.tokens), 16))
        leases = []
        for (stored, attempt, appended), token in zip(claims, tokens, strict=False):
            task = self._unreadable.read("task", f"of {waiter.worker}", script.task, stored, attempt)
            if task:
                leases.append(Lease(task, waiter.worker, token, float(now) + waiter.ttl, recorded_deltas=appended))
        self._known.leased(leases, float(wall))
        return leases

    @override
    async def hand_back(self, claim: Claim) -> bool:
        return bool(await self._call("hand_back", claim=script.claim_fields(claim)))

    @override
    async def refuse(self, claim: Claim) -> int:
        return int(await self._call("refuse", claim=script.claim_fields(claim)))

    @override
    async def sweep_expired(self, ttl: float) -> list[Lease]:
        stored = await self._call("sweep_expired", ttl=ttl)
        leases = (
            self._unreadable.read("lease", script.printable_name(fields[5]), script.lease, *fields) for fields in stored
        )
        return [lease for lease in leases if lease]

    @override
    async def load(self, request: str) -> RequestRecord:
        try:
            return script.record(await self._call("load", id=request))
        except (ProtocolError, TypeError, RecordDamaged) as error:
            self._unreadable.note("request", request, str(error))
            raise RecordDamaged(
                f"the stored record of request {request} cannot be read: see `unfuse dead ls`"
            ) from error

    @override
    def cached_record(self, claim: Claim) -> RequestRecord | None:
        return self._known.of(claim)

    @override
    async def list(
        self, which: RequestFilter, *, after: str | int | None = None, limit: int = 100, oldest_first: bool = False
    ) -> builtins.list[RequestRecord]:
        tenant, field, value = which.index_key
        conditions = {name: script.text(value) for name, value in which.conditions().items()}
        query = {"which": conditions, "heading": (tenant, field, script.text(value)), "oldest_first": oldest_first}
        records: list[RequestRecord] = []
        start_number: str | None = "-inf" if oldest_first else "+inf"
        if isinstance(after, int):
            after, start_number = None, str(after)

        # One run of the script reads a bounded number of requests. The next run continues after `start_number`.
        while start_number is not None and len(records) < limit:
            remaining = limit - len(records)
            last_number, page, damaged = await self._call(
                "list", **query, after=after, beyond=start_number, limit=remaining
            )
            readable = (
                self._unreadable.read("request", script.printable_name(reply[3]), script.record, reply)
                for reply in page
            )
            records += [record for record in readable if record]
            for id in damaged:
                self._unreadable.note("request", script.printable_name(id), "it is not a request record")
            after, start_number = None, last_number and last_number.decode()
        return records

    @override
    async def ended_among(self, requests: Sequence[str]) -> builtins.list[str]:
        batches = [requests[first : first + SCANNED] for first in range(0, len(requests), SCANNED)]
        replies = await asyncio.gather(*(self._call("ended_among", ids=batch) for batch in batches))
        results = (is_over for reply in replies for is_over in reply)
        return [request for request, is_over in zip(requests, results, strict=True) if is_over]

    @override
    async def stats(self, pools: Sequence[str]) -> QueueStats:
        active, replies = await self._call("stats", pools=list(pools), front=FRONT_TASKS)
        stats = (PoolStats(int(size), float(oldest), int(left) / NANOSECONDS) for size, oldest, left in replies)
        return QueueStats(int(active), dict(zip(pools, stats, strict=True)))

    @override
    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        stored = await self._call("peek", pool=pool, limit=limit)
        return [task for fields in stored if (task := self._unreadable.read("task", pool, script.task, *fields))]

    @override
    async def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        self._background.run("listen", self._subscription.listen)
        is_known = is_over = False
        try:
            while not self._closed and not is_over:
                # Before the read, so that a change between the read and the wait is not missed.
                changed = self._subscription.news_of(request)
                try:
                    over, events = await self._call("events", id=request, after=after)
                except NotFound:
                    if is_known:  # the request was dropped since the last read
                        return
                    raise
                except TransientError:
                    await asyncio.sleep(RETRY_S)
                    continue

                is_known = True
                is_over = over == b"1"
                for stored in events:
                    event = self._unreadable.read("event", request, decode, stored, Event)
                    if event:
                        yield event
                        after = event.seq
                if not is_over:
                    await changed
        finally:
            # Removes this stream's future. Other streams of the request read once more in vain.
            self._subscription.notify(request)

    @override
    async def put_encoding(self, key: str, ref: ObjectRef, room: int) -> None:
        entry = {"id": ref.id, "nbytes": ref.nbytes, "ref": script.raw(encode(ref))}
        await self._call("put_encoding", key=key, room=room, most=MAX_CACHED, **entry)

    @override
    async def find_encoding(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        replies = await self._call("find_encoding", keys=keys, use=use)
        stored = [(key, ref) for key, ref in zip(keys, replies, strict=True) if ref]
        refs = {key: self._unreadable.read("cached output", key, decode, ref, ObjectRef) for key, ref in stored}
        return {key: ref for key, ref in refs.items() if ref}

    @override
    async def cached_bytes(self) -> int:
        return int(await self._call("cached_bytes"))

    @override
    async def remove_encoding(self, key: str, id: str) -> None:
        await self._call("remove_encoding", key=key, id=id)

    @override
    async def register(self, worker: WorkerInfo, specs: Sequence[ModelSpec] = ()) -> None:
        encoded_specs = script.raw(encode(tuple(specs))) if specs else None
        await self._call("register", worker=worker.id, info=script.raw(encode(worker)), cards=encoded_specs)

    @override
    async def unregister(self, worker: str) -> None:
        await self._call("unregister", worker=worker)

    @override
    async def declare(self, by: str, declaration: DeclaredModels, *, new: bool = False) -> bool:
        body = script.raw(encode(declaration))
        return bool(await self._call("declare", by=by, declaration=body, new=new))

    @override
    async def secret(self, name: str, proposed: str) -> str:
        return bytes(await self._call("secret", name=name, proposed=proposed)).decode()

    @override
    async def declarations(self) -> dict[str, DeclaredModels]:
        stored = await self._call("declarations")
        pairs = [(script.printable_name(by), data) for by, data in zip(stored[::2], stored[1::2], strict=True)]
        declarations = {
            by: self._unreadable.read("declaration", by, script.decoded, data, DeclaredModels) for by, data in pairs
        }
        return {by: declaration for by, declaration in declarations.items() if declaration}

    @override
    async def workers(self) -> Sequence[RegisteredWorker]:
        workers: list[RegisteredWorker] = []
        for id, info, stored_specs, last_heartbeat, leased in await self._call("workers"):
            name = script.printable_name(id)
            specs = stored_specs and self._unreadable.read(
                "card", name, script.decoded, stored_specs, tuple[ModelSpec, ...]
            )
            worker = self._unreadable.read("worker", name, script.member, info, specs or (), last_heartbeat, leased)
            workers += [worker] if worker else []
        return workers

    @override
    async def damaged(self) -> Sequence[DamagedRecord]:
        await self.workers()  # records the workers that are unreadable now
        for record in [record for record in self._unreadable.all() if record.kind == "request"]:
            # A request that was dropped, or is readable again, is not damaged any more.
            with suppress(RecordDamaged):
                with suppress(NotFound):
                    await self.load(record.id)
                self._unreadable.remove(record.id)

        reply = await self._call("damaged")
        pairs = zip(reply[::2], reply[1::2], strict=True)
        incomplete = [
            DamagedRecord(script.printable_name(name), kind.decode(), "its task is incomplete") for name, kind in pairs
        ]
        return [*(record for record in self._unreadable.all() if record.kind in script.DROPPABLE), *incomplete]

    @override
    async def discard(self, id: str) -> None:
        await self._call("discard", id=script.raw_name(id))
        self._unreadable.remove(id)

    @override
    async def drop_ended_before(self, before: float) -> Sequence[str]:
        dropped: list[str] = []
        while batch := await self._call("drop_ended_before", before=before):
            dropped += [script.printable_name(request) for request in batch]
        return dropped

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
        """Run a verb of the script. Raises TransientError, and the errors of the verb."""
        # `undo` hands back the leases of a cancelled caller. They would otherwise stay leased until they expire.
        if self._closed and "undo" not in args:
            raise TransientError("the queue is closed")
        args |= {"max_events": MAX_EVENTS, "among": PREFERENCE_TASKS, "moment": PREFERENCE_S}
        args |= {"most_returns": MAX_REFUSALS, "scan": SCANNED, "video_id": VIDEO.prefix, "part": self._address.part}
        if self._clock:
            args |= {"now": self._clock.now(), "wall": self._clock.wall()}
        if args.get("push"):
            # The waiters of this process then lease in the same run of the script. A task that one of them leases at
            # once wakes no other process.
            self._waiting.serve()
        try:
            return await self._calls.call(verb, encode(args))
        except (RedisError, OSError) as error:
            raise script.error(error, self._address.display_name) from error

    async def _execute(self, calls: Sequence[connection.Call]) -> builtins.list[Any]:
        return await connection.answers(self._redis, self._tag, calls, self._address.replicas)
