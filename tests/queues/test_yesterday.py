"""What an earlier version left in a queue is found, and completes; and that version may go on beside this one."""

import asyncio
import hashlib
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from tests.queues.conftest import Server
from tests.queues.yesterday.fill import CARD, POOLS, STATES, WORKER, done
from unfuse import queues
from unfuse.core.codec import decode, encode
from unfuse.core.errors import LeaseLost
from unfuse.core.request import Allowance, Record, StageState
from unfuse.core.task import ARENA, SLOTS, Task
from unfuse.queues.base import Filter, Limits, TaskQueue
from unfuse.queues.redis import SCANNED, RedisQueue
from unfuse.queues.wanted import Wanted
from unfuse.scheduler.scheduler import Scheduler
from unfuse.supervision.clock import SystemClock
from unfuse.testing import ManualClock
from unfuse.testing.queue_lists import check_lists
from unfuse.testing.queue_samples import LIMITS, TTL, change, planned, request, submitted, task, wanted

FOLDER = Path(__file__).parent / "yesterday"
SCRIPT = (FOLDER / "script.lua").read_text()
SCRIPT_ID = hashlib.sha1(SCRIPT.encode()).hexdigest()
LATER = 1795356737.0 + 3600
"""An hour after it was filled."""

NEWEST_FIRST = ["req_late", *reversed(STATES)]
ACTIVE = ["req_queued", "req_encoding", "req_encoded", "req_denoising", "req_retried", "video_queued"]


def restore(server: Server) -> None:
    """Have the server hold what the earlier version's held."""

    def stored(value: Any) -> Any:
        match value:
            case str():
                return value.encode("latin-1")
            case dict():
                return {stored(name): stored(one) for name, one in value.items()}
        return value

    for line in (FOLDER / "redis.jsonl").read_text().strip("\n").split("\n"):
        key, kind, value = json.loads(line)
        if kind == "hash":
            server.client.hset(stored(key), mapping=stored(value))
        elif kind == "zset":
            server.client.zadd(stored(key), {stored(member): score for member, score in value})
        else:
            add = server.client.sadd if kind == "set" else server.client.rpush
            add(stored(key), *map(stored, value))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(LATER, LATER)


async def ids(queue: TaskQueue, **asked: Any) -> list[str]:
    return [record.context.id for record in await queue.list(Filter(**asked))]


class Stored:
    """What holds of every queue that an earlier version filled."""

    async def test_what_was_stored_is_found(self, queue: TaskQueue) -> None:
        assert await ids(queue, tenant="other") == [*STATES][1::2][::-1]
        assert await ids(queue, over=False) == [id for id in NEWEST_FIRST if id in (*ACTIVE, "req_late")]
        assert await ids(queue, status="completed", tenant="default") == ["video_completed"]
        assert await ids(queue, status="in_progress") == ["req_retried", "req_denoising", "req_encoded", "req_encoding"]
        assert await ids(queue, dead=True) == ["req_dead"]
        assert await ids(queue, video=True) == ["video_queued", "video_completed"]
        assert await ids(queue, tenant="default", fingerprint="body of req_queued") == ["req_queued"]
        for place, id in enumerate(STATES):
            assert await ids(queue, tenant=("default", "other")[place % 2], idempotency_key=f"key of {id}") == [id]
        assert await ids(queue) == NEWEST_FIRST
        await check_lists(queue)

    async def test_what_there_is_to_do_is_counted_once(self, queue: TaskQueue) -> None:
        """At the first scrape what is stored, as looking at each would find; at the next one nothing is read."""
        active = [record.context for record in await queue.list(Filter(over=False))]
        left = {pool: 0.0 for pool in POOLS.values()}
        for context in active:
            for stage in context.plan.stages:
                left[stage.pool] += stage.cost * (context.stages[stage.name].status != "done")
        first = await queue.stats([*left])
        with patch.object(queue, "load", side_effect=AssertionError("a record was loaded")):
            assert await queue.stats([*left]) == first
        assert first.active == len(active) == 7
        assert {pool: line.left_s for pool, line in first.pools.items()} == pytest.approx(left)
        assert {pool: line.waiting for pool, line in first.pools.items()} == {
            pool: await queue.size(pool) for pool in left
        }
        assert max(line.oldest_s for line in first.pools.values()) >= 3500

    async def test_a_repeat_joins_what_was_stored(self, queue: TaskQueue) -> None:
        for place, id in enumerate(STATES):
            again = request("again", tenant=("default", "other")[place % 2], idempotency_key=f"key of {id}")
            assert (await queue.submit(again, [task("again")], [], LIMITS)).context.id == id
        assert await ids(queue) == NEWEST_FIRST

    async def test_what_was_accepted_completes(self, queue: TaskQueue, clock: ManualClock) -> None:
        """Through the scheduler: what waited, was leased by a worker that is gone, was to be tried again; but for
        one whose time is over. What had ended stays as it was."""
        before = {record.context.id: record for record in await queue.list(Filter())}
        scheduler = Scheduler(queue, cards=[CARD], clock=clock)
        await scheduler.start()
        await queue.hello(WORKER, [CARD])
        found: dict[str, Record] = {}
        async with asyncio.timeout(60):
            while len(found) < len(before):
                clock.advance(5.0)
                for lease in await queue.lease("w", wanted(*POOLS.values(), slots=16), 15.0):
                    with suppress(LeaseLost):  # whose time is over
                        await scheduler.complete(done(lease), "w")
                found = {one.context.id: one for one in await queue.list(Filter(over=True))}
                await queue.expired(15.0)
                await asyncio.sleep(0.01)
        await scheduler.close()

        assert [found[id].status for id in ACTIVE] == ["completed"] * len(ACTIVE)
        assert found["req_late"].status == "expired"
        assert {id: found[id] for id in before.keys() - {*ACTIVE, "req_late"}} == {
            id: record for id, record in before.items() if record.context.over
        }
        events = [event.type async for event in queue.watch("req_queued")]
        assert (events[0], events[-1]) == ("queued", "completed")
        assert await ids(queue, status="completed", over=True) == [
            id for id in NEWEST_FIRST if id in (*ACTIVE, "req_completed", "video_completed")
        ]
        assert (await ids(queue, over=False), await ids(queue, dead=True)) == ([], ["req_dead"])
        assert sorted(await queue.forget(clock.wall() + 1)) == sorted(before)


class TestInSqlite(Stored):
    @pytest.fixture
    async def queue(self, clock: ManualClock, tmp_path: Path) -> AsyncIterator[TaskQueue]:
        queue = queues.open(f"sqlite:{shutil.copy(FOLDER / 'queue.db', tmp_path)}", clock)
        yield queue
        await queue.close()


class TestInRedis(Stored):
    @pytest.fixture
    async def queue(self, clock: ManualClock, server: Server) -> AsyncIterator[TaskQueue]:
        restore(server)
        queue = queues.open(server.url, clock)
        yield queue
        await queue.close()


class Reviewed(RedisQueue):
    """A queue whose scheduler has just looked through what is not over, as each does every few seconds."""

    async def list(self, *args: Any, **more: Any) -> list[Record]:
        await super().list(Filter(over=False), limit=1000)
        return await super().list(*args, **more)


OURS = {
    "append_all",
    "appended",
    "list",
    "over",
    "stats",
    "count",
    "commit_and_lease",
    "workers",
    "expired",
    "turn_down",
    "cached_bytes",
    "damaged",
    "discard",
    "declare",
    "declared",
}
"""Verbs that the earlier version does not have, or answers otherwise."""


Packed = dict[str, msgspec.Raw]


def as_it_asked(arguments: bytes) -> bytes | None:
    """What the earlier version would have sent to lease the same; None where it knew no such thing."""
    whole = msgspec.msgpack.decode(arguments[1:], type=Packed)
    asks = []
    for ask in msgspec.msgpack.decode(whole["asks"], type=list[Packed]):
        wanted = msgspec.msgpack.decode(ask["wanted"], type=Wanted)
        rooms = {pool: offer.amounts.get(ARENA) for pool, offer in wanted.pools.items()}
        if any(offer.amounts.keys() - {SLOTS, ARENA} for offer in wanted.pools.values()):
            return None
        room = max((room for room in rooms.values() if room is not None), default=None)
        earlier = msgspec.structs.asdict(wanted) | {
            "pools": list(wanted.pools),
            "slots": wanted.slots,
            "room": room,
            "keep": {pool: room - left for pool, left in rooms.items() if room is not None and left is not None},
            "later": {pool: offer.later for pool, offer in wanted.pools.items()},
            "behind": {pool: offer.behind for pool, offer in wanted.pools.items()},
        }
        asks.append(ask | {"wanted": msgspec.Raw(msgspec.msgpack.encode(earlier))})
    return arguments[:1] + msgspec.msgpack.encode(whole | {"asks": msgspec.Raw(msgspec.msgpack.encode(asks))})


def as_it_accepted(arguments: bytes) -> bytes | None:
    """What the earlier version would have sent to submit the same; None where a tenant has an allowance."""
    limits = msgspec.msgpack.decode(arguments[1:], type=Packed)["limits"]
    return arguments if msgspec.msgpack.decode(limits, type=Limits).tenant == Allowance() else None


AS_IT_WAS = {"lease": as_it_asked, "submit": as_it_accepted}


def numbered(verb: str, reply: Any) -> Any:
    """An answer with a record as this version reads it: the earlier one does not say the number."""
    is_record = verb in ("submit", "commit", "load") and isinstance(reply, list)
    return [*reply[:3], None, 0] if is_record else reply


class Yesterdays(Reviewed):
    """One whose script is the earlier version's, and hears what that one said, but for what that one does not know."""

    async def _execute(self, calls: Any) -> Any:
        told = [(verb, AS_IT_WAS[verb](arguments) if verb in AS_IT_WAS else arguments) for verb, arguments in calls]
        if any(verb in OURS or arguments is None for verb, arguments in told):
            return await super()._execute(calls)
        await self._redis.script_load(SCRIPT)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for verb, arguments in told:
                pipeline.evalsha(SCRIPT_ID, 1, self._tag, verb, arguments)
            replies = await pipeline.execute(raise_on_error=False)
        wall = b"%f" % (self._servers_time or SystemClock()).wall()
        await self._tidy()
        return [
            [*await self._counted(reply), wall] if verb == "lease" else numbered(verb, reply)
            for (verb, _), reply in zip(told, replies, strict=True)
        ]

    async def _counted(self, reply: Any) -> Any:
        """Its leases, and of each how many pieces are recorded, which it does not tell."""
        for claim in (claim for claims in reply[2] for claim in claims):
            task = decode(claim[0], Task)
            name = f"{len(task.request)}:{task.request}:{task.stage}"
            claim.append(await self._redis.llen(f"{self._tag}:pieces:{name}"))
        return reply

    async def _tidy(self) -> None:
        """Let go of the pieces of what it drops, as this version does by and by."""
        for name in await self._redis.smembers(f"{self._tag}:grown"):
            _, id, _ = name.decode().split(":")
            if not await self._redis.exists(f"{self._tag}:request:{id}"):
                await self._redis.delete(f"{self._tag}:pieces:{name.decode()}")
                await self._redis.srem(f"{self._tag}:grown", name)


async def test_what_the_earlier_version_does_meanwhile_is_found(server: Server) -> None:
    """What it stores, at once and by every heading; what it ends; and what it drops leaves nothing for long."""
    old, new = Yesterdays.at(server.url, ManualClock()), queues.open(server.url, ManualClock())
    names = [f"{number:04}" for number in range(SCANNED + 10)]
    many = Limits(max_active=10_000)
    await asyncio.gather(*(old.submit(request(n, tenant="t", fingerprint=n), [], [], many) for n in names))
    found, again = await asyncio.gather(
        new.list(Filter(tenant="t"), limit=2000), new.list(Filter(tenant="t", fingerprint=names[-1]))
    )
    assert [one.context.id for one in found] == names[::-1] and again == found[:1]
    await submitted(new, "a")
    for name in names[:-5]:
        await old.commit(change(await old.load(name), status="failed", completed_at=1.0))
    assert [one.context.id for one in await new.list(Filter(tenant="t", status="failed"), limit=2000)] == names[:-5][
        ::-1
    ]
    assert len(await new.list(Filter(status="queued"))) == 6
    await old.forget(2.0)
    assert len(await new.list(Filter(tenant="t"))) == 5
    for _ in range(9):
        await new.forget(0.0)
    kept = {key.partition(b":list:")[2] for key in server.client.scan_iter() if b":list:" in key}
    of_t = {b"//", b"/over/0", b"/status/queued", *(b"/fingerprint/%b" % name.encode() for name in names[-5:])}
    of_others = {b"7:default://", b"7:default:/over/0", b"7:default:/status/queued", b"/status/queued"}
    assert kept == {b"1:t:" + heading for heading in of_t} | of_others
    assert server.client.hlen("{unfuse}:listed") == 6
    for queue in (old, new):
        await queue.close()


async def test_pieces_of_what_the_earlier_version_drops_do_not_stay(server: Server) -> None:
    old, new = RedisQueue.at(server.url, ManualClock()), queues.open(server.url, ManualClock())
    await old._redis.script_load(SCRIPT)
    for name in "ab":
        record = await submitted(new, name)
        (lease,) = await new.lease("w", wanted("p"), TTL)
        await new.append(lease.claim, 0, [b"x"])
        await new.commit(change(record, status="completed", completed_at=1.0))
    await old._redis.evalsha(SCRIPT_ID, 1, "{unfuse}", "drop", encode({"id": "a"}))
    assert server.client.exists("{unfuse}:pieces:1:a:s")
    await new.forget(0.0)
    assert [*server.client.scan_iter("*:pieces:*")] == [b"{unfuse}:pieces:1:b:s"]
    assert server.client.smembers("{unfuse}:grown") == {b"1:b:s"}
    await new.forget(2.0)
    assert [*server.client.scan_iter()] == [b"{unfuse}:meta"]
    for queue in (old, new):
        await queue.close()


async def test_many_may_open_what_was_stored_at_once(server: Server) -> None:
    restore(server)
    many = [queues.open(server.url, ManualClock(LATER, LATER)) for _ in range(4)]
    with patch("unfuse.queues.redis.SCANNED", 2):
        lists = await asyncio.gather(*(queue.list(Filter(video=True)) for queue in many * 2))
    assert [[one.context.id for one in found] for found in lists] == [["video_queued", "video_completed"]] * 8
    await check_lists(many[0])
    for queue in many:
        await queue.close()


async def test_what_the_earlier_version_does_is_in_the_sums(server: Server) -> None:
    """Given sums that were right, when the earlier version stores, changes and ends requests, then they are again."""
    old, new = Yesterdays.at(server.url, ManualClock()), queues.open(server.url, ManualClock())
    for name in "abc":
        await new.submit(request(name, plan=planned(p=0.5, q=1.0)), [], [], LIMITS)
    assert (await new.stats(["p"])).pools["p"].left_s == 1.5
    await old.submit(request("d", plan=planned(p=2.0)), [], [], LIMITS)
    assert (await new.stats(["p"])).pools["p"].left_s == 3.5
    record = await new.load("a")
    stages = record.context.stages | {"p": StageState("done", attempt=1)}
    await old.commit(change(record, stages=stages))
    assert (await new.stats(["p"])).pools["p"].left_s == 3.0
    await old.commit(change(await new.load("b"), status="failed", completed_at=1.0))
    await new.commit(change(await new.load("c"), status="failed", completed_at=1.0))
    found = await new.stats(["p", "q"])
    assert (found.active, found.pools["p"].left_s, found.pools["q"].left_s) == (2, 2.0, 1.0)
    for queue in (old, new):
        await queue.close()
