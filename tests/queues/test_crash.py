"""Stop at every write of a history with every transition, and go on from what is left: nothing that was answered is
missing, nothing is half done, and everything comes to its end under its id."""

from __future__ import annotations

import random
import shutil
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from tests.queues.conftest import Server
from tests.queues.disk import Disk, failing_disk
from unfuse import queues
from unfuse.core.errors import ConfigError, TransientError
from unfuse.core.plan import ExecutionPlan
from unfuse.core.request import TERMINAL_EVENTS, Event, GenerationRequest, RequestContext, StageState
from unfuse.core.task import Lease
from unfuse.queues.base import QueueBackend, RequestFilter
from unfuse.queues.journal import Journal, RequestRow
from unfuse.queues.redis import RedisQueue
from unfuse.queues.sqlite import SqliteQueue
from unfuse.testing import ManualClock
from unfuse.testing.queue_samples import (
    LIMITS,
    TTL,
    advance_clock,
    append,
    change,
    completion,
    count_waiting,
    history,
    lease_next,
    lease_request,
    request,
    request_context,
    task,
)

FOLLOWS = {"one": "two", "two": "three"}
FEW = 24
"""Cuts of each kind that are made where not all of them are."""

T = TypeVar("T")
Record = Callable[[str, object], None]


class Life:
    """A history as it goes on."""

    def __init__(self, queue: QueueBackend, clock: ManualClock) -> None:
        self.queue, self.clock = queue, clock
        self.lease: Lease | None = None

    async def submit(self, name: str) -> None:
        context = msgspec.structs.replace(request(name), stages={"one": StageState("queued", 1)})
        await self.queue.submit(context, [task(name, "one")], [Event("queued")], LIMITS)

    async def take(self) -> None:
        self.lease = await lease_next(self.queue)

    async def report(self) -> None:
        assert self.lease
        assert await self.queue.progress(self.lease.claim, [Event("progress", step=1, steps=2)])

    async def grow(self, offset: int, *pieces: bytes) -> None:
        assert self.lease
        assert await append(self.queue, self.lease.claim, offset, pieces)

    async def renew(self) -> None:
        assert self.lease
        assert (await self.queue.renew([self.lease.claim], TTL)).renewed

    async def hand_back(self) -> None:
        assert self.lease
        assert await self.queue.hand_back(self.lease.claim)

    async def complete(self) -> None:
        assert self.lease
        await complete(self.queue, self.lease)

    async def fail(self) -> None:
        assert self.lease
        await again(self.queue, self.lease, not_before=await self.queue.now() + 3)
        self.clock.advance(3)

    async def expire(self) -> None:
        (late,) = await advance_clock(self.queue, self.clock, TTL)
        await again(self.queue, late)

    async def end(self, name: str, status: str) -> None:
        record = await self.queue.load(name)
        at = self.clock.wall()
        await self.queue.commit(
            change(record, status=status, completed_at=at, is_dead_letter=status == "failed", events=(Event(status),))
        )

    async def look_at(self, name: str) -> None:
        await self.queue.commit(change(await self.queue.load(name), is_dead_letter=False))


async def complete(queue: QueueBackend, lease: Lease) -> None:
    """A stage is done, and the next one is queued; after the last the request is over."""
    record, stage = await queue.load(lease.task.request), lease.task.stage
    events = [Event("stage_completed", stage=stage)]
    ready = completion(record, lease)
    if stage not in FOLLOWS:
        ended = {"status": "completed", "completed_at": 1_800_000_000.0}
        await queue.commit(completion(record, lease, events=(*events, Event("completed")), **ended))
        return
    stages = ready.context.stages | {FOLLOWS[stage]: StageState("queued", 1)}
    push = (task(record.context.id, FOLLOWS[stage]),)
    await queue.commit(
        change(record, lease.claim, status="in_progress", stages=stages, push=push, events=tuple(events))
    )


async def again(queue: QueueBackend, lease: Lease, **fields: float) -> None:
    """A stage is to be tried once more."""
    record, stage = await queue.load(lease.task.request), lease.task.stage
    stages = record.context.stages | {stage: StageState("queued", lease.task.attempt + 1)}
    push = (task(record.context.id, stage, attempt=lease.task.attempt + 1, **fields),)
    await queue.commit(change(record, lease.claim, stages=stages, push=push, events=(Event("retrying"),)))


STEPS: tuple[tuple[bool, Callable[[Life], Awaitable[object]]], ...] = (
    (True, lambda life: life.submit("a")),
    (False, Life.take),
    (False, Life.report),
    (True, lambda life: life.grow(0, b"a", b"b")),
    (True, lambda life: life.grow(1, b"B", b"c", b"d")),
    (True, Life.complete),
    (True, lambda life: life.submit("b")),
    (False, Life.take),
    (False, Life.hand_back),
    (False, Life.take),
    (False, Life.renew),
    (True, lambda life: life.grow(0, b"e" * 5000)),
    (True, Life.fail),
    (True, lambda life: life.end("b", "cancelled")),
    (False, Life.take),
    (True, Life.expire),
    (True, lambda life: life.submit("c")),
    (False, Life.take),
    (True, Life.complete),
    (True, lambda life: life.end("c", "failed")),
    (False, lambda life: life.queue.drop("b")),
    (True, lambda life: life.submit("d")),
    (False, Life.take),
    (True, Life.complete),
    (True, lambda life: life.look_at("c")),
    (False, lambda life: life.queue.drop_ended_before(1_750_000_000.0)),
    (False, Life.take),
)
"""The steps, and whether each is to survive a loss of power."""


async def seen(queue: QueueBackend, tasks: Iterable[tuple[str, str, int]]) -> object:
    """What a queue knows and has to do, without how far it is; a task may be leased or wait."""
    contexts = [record.context for record in await queue.list(RequestFilter())]
    grown = {c.id: [await queue.read_deltas(c.id, stage) for stage in ("one", *FOLLOWS.values())] for c in contexts}
    known = [
        (
            c.id,
            c.version,
            c.status,
            c.is_dead_letter,
            [(name, s.status, s.attempt) for name, s in c.stages.items()],
            grown[c.id],
        )
        for c in contexts
    ]
    return sorted(known), sorted(tasks)


async def all_goes_on(queue: QueueBackend, clock: ManualClock) -> None:
    """Whoever is there now brings what is not over to its end, each stage completed once."""
    while unfinished := await queue.list(RequestFilter(is_over=False)):
        for lease in await queue.lease("another", lease_request("p", slots=9), TTL):
            await complete(queue, lease)
        for late in await advance_clock(queue, clock, TTL + 1):
            await again(queue, late)
        assert len(await queue.list(RequestFilter(is_over=False))) <= len(unfinished)
    assert await count_waiting(queue, "p") == 0
    for record in await queue.list(RequestFilter()):
        events = await history(queue, record.context.id)
        assert [event.seq for event in events] == sorted({event.seq for event in events})
        assert [event.type for event in events if event.type in {"queued", *TERMINAL_EVENTS}] == [
            "queued",
            record.context.status,
        ]
        stages = [event.stage for event in events if event.type == "stage_completed"]
        assert len(stages) == len(set(stages))
        assert record.context.status != "completed" or stages == ["one", "two", "three"]


def some(cuts: list[T], request: pytest.FixtureRequest, few: int = FEW) -> list[T]:
    """All of them at night, otherwise the first, the last, and a few between."""
    if request.node.get_closest_marker("nightly"):
        return cuts
    chosen = random.Random(request.node.name).sample(range(len(cuts)), min(few, len(cuts)))
    return [cut for number, cut in enumerate(cuts) if number in {0, len(cuts) - 1, *chosen}]


class TestSqlite:
    @staticmethod
    def standing(queue: SqliteQueue) -> list[tuple[str, str, int]]:
        rows = [row for entry in queue._requests.values() if (row := queue._row(entry))]
        return [(*stood.task.key, stood.task.attempt) for row in rows for stood in row.tasks]

    async def lived(self, path: Path, clock: ManualClock, states: list[object] | None, disk: Disk | None = None) -> int:
        """Live through all steps, or up to where the disk stops. Returns how many were answered."""
        try:
            queue = SqliteQueue(path, clock)
        except ConfigError:
            return 0
        life, answered = Life(queue, clock), 0
        try:
            for _, step in ((None, None), *STEPS):
                if step is not None:
                    await step(life)
                    answered += 1
                if states is not None:
                    states.append(await seen(queue, self.standing(queue)))
        except TransientError:
            assert states is None
        if disk and not disk.stopped:
            disk.stops_at = None
        await queue.close()
        return answered

    async def cut(self, folder: Path, stops_at: int, ending: str, states: list[object]) -> None:
        """Given a disk that does this write by half and none after it, when the queue is opened again, then it stands
        where the last answered step left it, or the one in progress would have."""
        folder.mkdir()
        path, clock = folder / "queue.db", ManualClock()
        with failing_disk() as disk:
            disk.stops_at = stops_at
            answered = await self.lived(path, clock, None, disk)
            if ending == "power":
                disk.lose_power(path)
        least = answered
        while ending == "power" and least and not STEPS[least - 1][0]:
            least -= 1
        queue = SqliteQueue(path, clock)
        assert await seen(queue, self.standing(queue)) in states[least : answered + 2], f"at write {stops_at}"
        await all_goes_on(queue, clock)
        await queue.close()

    @pytest.mark.parametrize("ending", ["kill", "power"])
    async def test_sqlite_queue_recovers_from_a_crash_at_sampled_writes(
        self,
        ending: str,
        tmp_path: Path,
        request: pytest.FixtureRequest,
        record_property: Record,
    ) -> None:
        """Where the power goes too, what was not synced goes with it, and no step is lost that is to survive that."""
        states: list[object] = []
        with failing_disk() as disk:
            assert await self.lived(tmp_path / "whole.db", ManualClock(), states) == len(STEPS)
        cuts = some(list(range(1, disk.changes + 1)), request)
        for stops_at in cuts:
            await self.cut(tmp_path / str(stops_at), stops_at, ending, states)
        assert disk.changes > 3 * len(STEPS)
        record_property("counted", f"sqlite, {ending}: {len(cuts)} of {disk.changes} writes cut")

    @pytest.mark.nightly
    @pytest.mark.parametrize("ending", ["kill", "power"])
    async def test_sqlite_queue_recovers_from_a_crash_at_every_write(
        self,
        ending: str,
        tmp_path: Path,
        request: pytest.FixtureRequest,
        record_property: Record,
    ) -> None:
        await self.test_sqlite_queue_recovers_from_a_crash_at_sampled_writes(ending, tmp_path, request, record_property)

    def test_journal_transaction_is_atomic_when_the_disk_fails(self, tmp_path: Path) -> None:
        """Given a disk that stops at any write of a transaction, then all of its rows are there, or none."""
        rows = [(number, RequestRow(_context(f"r{number}"), (), (), (), 0)) for number in range(3)]
        found: set[int] = set()
        for stops_after in range(1, 100):
            path = tmp_path / f"{stops_after}.db"
            with failing_disk() as disk:
                journal = Journal(path)
                journal.write([(9, RequestRow(_context("before"), (), (), (), 0))], durable=True)
                disk.stops_at = disk.changes + stops_after
                try:
                    journal.write([*rows, (9, None)], durable=True)
                except Exception:
                    assert disk.stopped
                stopped, disk.stops_at = disk.stopped, None
                journal.close()
            journal = Journal(path)
            found.add(len(journal.rows))
            assert [row.context.id for _, row in journal.rows] in (["before"], ["r0", "r1", "r2"])
            journal.close()
            if not stopped:
                break
        assert found == {1, 3}


def _context(name: str) -> RequestContext:
    return request_context(GenerationRequest(name, "model", {"prompt": "x" * 20_000}), ExecutionPlan(()))


class TestRedisAndValkey:
    @staticmethod
    def standing(server: Server) -> list[tuple[str, str, int]]:
        found = [server.client.hmget(key, "request", "stage", "attempt") for key in server.client.scan_iter("*:task:*")]
        return [(one.decode(), stage.decode(), int(attempt)) for one, stage, attempt in found]

    @staticmethod
    def written(folder: Path) -> Path:
        """What the server writes every change to."""
        (file,) = (folder / "appendonlydir").glob("*.incr.aof")
        return file

    async def lived(self, server: Server, file: Path) -> tuple[list[object], list[int], list[float]]:
        """What is seen after each step, how much was written down then, and what time it was."""
        clock = ManualClock()
        queue = queues.open(server.url, clock)
        life = Life(queue, clock)
        states, sizes, times = [await seen(queue, ())], [file.stat().st_size], [clock.now()]
        for _, step in STEPS:
            await step(life)
            states.append(await seen(queue, self.standing(server)))
            sizes.append(file.stat().st_size)
            times.append(clock.now())
        await queue.close()
        return states, sizes, times

    async def test_redis_queue_recovers_from_sampled_truncations_of_the_aof(
        self,
        shared_server: Server,
        tmp_path: Path,
        request: pytest.FixtureRequest,
        record_property: Record,
    ) -> None:
        """Given a server that starts on its append-only file, cut behind or within any command, then what was answered
        by then is there, and of the step in progress all or nothing."""
        whole = tmp_path / "whole"
        whole.mkdir()
        server = shared_server.on(whole)
        server.sync("always")
        states, sizes, times = await self.lived(server, self.written(whole))
        server.stop()
        ends = boundaries(self.written(whole).read_bytes())
        cuts = some([*ends, *(end + 7 for end in ends[:-1])], request, 16)
        for cut in cuts:
            folder = tmp_path / str(cut)
            shutil.copytree(whole, folder)
            with self.written(folder).open("rb+") as file:
                file.truncate(cut)
            answered = max(number for number, size in enumerate(sizes) if size <= max(cut, sizes[0]))
            restarted = shared_server.on(folder)
            try:
                clock = ManualClock(now=times[min(answered + 1, len(STEPS))])
                queue = RedisQueue.open(restarted.url, clock)
                now = await seen(queue, self.standing(restarted))
                assert now in states[answered : answered + 2], f"cut at {cut}"
                await all_goes_on(queue, clock)
                await queue.close()
            finally:
                restarted.stop()
            shutil.rmtree(folder)
        record_property("counted", f"{shared_server.name}: cut at {len(cuts)} of {2 * len(ends) - 1} places")

    @pytest.mark.nightly
    @pytest.mark.timeout(3600)
    async def test_redis_queue_recovers_from_every_truncation_of_the_aof(
        self,
        shared_server: Server,
        tmp_path: Path,
        request: pytest.FixtureRequest,
        record_property: Record,
    ) -> None:
        await self.test_redis_queue_recovers_from_sampled_truncations_of_the_aof(
            shared_server, tmp_path, request, record_property
        )


def boundaries(data: bytes) -> list[int]:
    """Where the commands of an append-only file end, and where the first begins."""
    ends, at = [0], 0
    while at < len(data):
        line = data.index(b"\r\n", at)
        parts, at = int(data[at + 1 : line]), line + 2
        for _ in range(parts):
            line = data.index(b"\r\n", at)
            at = line + 2 + int(data[at + 1 : line]) + 2
        ends.append(at)
    return ends
