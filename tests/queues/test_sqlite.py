"""The SQLite backend: the suite, restarts, a disk that stops at every write, and who may open its file."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import apsw
import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from structlog.testing import capture_logs

from tests.disks import fill, small_disk
from tests.examples import examples
from tests.queues.disk import failing_disk
from unfuse import queues
from unfuse.core.clock import SystemClock
from unfuse.core.errors import ConfigError, NotFound, Overloaded, ProtocolError, RecordDamaged, TransientError
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Pipeline
from unfuse.core.request import Delivery, Event, StageState
from unfuse.queues import journal
from unfuse.queues.base import MAX_REFUSALS, DeclaredModels, PoolStats, QueueLimits, QueueStats, RequestFilter
from unfuse.queues.journal import StoredTask
from unfuse.queues.memory import MemoryQueue
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
    expect_error,
    history,
    lease_all,
    lease_next,
    lease_request,
    next_event,
    plan_with_costs,
    request,
    start_task,
    submit,
    task,
    worker_info,
)
from unfuse.testing.queue_suite import RULES, Rule, check_rule


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


@pytest.fixture
async def queue(path: Path, clock: ManualClock) -> AsyncIterator[SqliteQueue]:
    queue = SqliteQueue(path, clock)
    yield queue
    await queue.close()


async def again(queue: SqliteQueue, clock: ManualClock) -> SqliteQueue:
    """The same queue in the next process."""
    await queue.close()
    return SqliteQueue(queue._journal.path, clock)


@contextmanager
def sqlite_copy(queue: SqliteQueue) -> Iterator[Path]:
    """The file of a queue as it is on the disk now, as if its process were killed."""
    path = queue._journal.path
    with tempfile.TemporaryDirectory() as folder:
        for file in path.parent.glob(f"{path.name}*"):
            if not file.name.endswith(".lock"):
                shutil.copy(file, folder)
        yield Path(folder, path.name)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
async def test_queue_rules_hold(rule: Rule, clock: ManualClock, path: Path) -> None:
    await check_rule(rule, SqliteQueue.open(f"sqlite:{path}", clock), clock)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
async def test_queue_rules_hold_after_a_restart(rule: Rule, clock: ManualClock, path: Path) -> None:
    """Given a file with a past, whose requests are gone, then the rules hold on it too."""
    queue = SqliteQueue(path, clock)
    record = await submit(queue, "past")
    await queue.commit(change(record, status="failed"))
    await queue.drop("past")
    await check_rule(rule, await again(queue, clock), clock)


class TestARestart:
    async def test_context_and_task_fields_survive_a_restart(self, queue: SqliteQueue, clock: ManualClock) -> None:
        stages = {"s": StageState("queued", 1, b"\0\xff", "w", queued_at=0.1, failures=2, crashes=1, recomputes=3)}
        own = {"tenant": "ü", "fingerprint": "f", "deadline": 1.5, "metadata": {"k": "v"}, "created_at": 0.1}
        params = {"s": "é", "i": 2**40, "f": 0.1, "n": None, "b": True}
        context = request("a", params=params, stages=stages, **own)
        sent = task(
            "a", final=True, output_size=2**40, priority=-3, order=0.1, deadline=2.5, preferred_node="n", affinity="a"
        )
        await queue.submit(context, [sent], [], LIMITS)
        queue = await again(queue, clock)
        assert (await queue.load("a")).context == context
        assert (await lease_next(queue)).task == sent
        await queue.close()

    async def test_keys_counts_costs_and_lists_survive_a_restart(self, queue: SqliteQueue, clock: ManualClock) -> None:
        tight = QueueLimits(max_active=3, max_queue=2, max_cost=10.0)
        for name in "abc":
            await queue.submit(request(name, tenant=name, idempotency_key="k", cost=3.0), [task(name)], [], LIMITS)
        await queue.commit(change(await queue.load("b"), status="failed", is_dead_letter=True))
        queue = await again(queue, clock)
        assert [record.context.id for record in await queue.list(RequestFilter())] == list("cba")
        assert [record.context.id for record in await queue.list(RequestFilter(is_dead_letter=True))] == ["b"]
        assert (await queue.submit(request("z", tenant="a", idempotency_key="k"), [], [], tight)).context.id == "a"
        await expect_error(Overloaded, queue.submit(request("d", cost=5.0), [], [], tight))
        await expect_error(Overloaded, queue.submit(request("d"), [task("d")], [], tight))
        await queue.submit(request("d", cost=4.0), [], [], tight)
        await expect_error(Overloaded, queue.submit(request("e"), [], [], tight))
        await queue.close()

    async def test_declarations_survive_a_kill(self, queue: SqliteQueue, clock: ManualClock) -> None:
        """Given a process that is killed, then what was declared is there at the next start, as it was last."""
        card = ModelSpec("m", "/m", "f", Pipeline(()), {"max": 1.5}, {}, {"a": "1"}, {})
        admitted = DeclaredModels((card,), {"p": 3}, source="admin", server="here")
        await queue.declare("model m", DeclaredModels((card,)))
        assert await queue.declare("model m", admitted) and await queue.declare("serve", DeclaredModels((card,)))
        await queue.declare("serve", DeclaredModels(()))
        with sqlite_copy(queue) as path:
            killed = SqliteQueue(path, clock)
            assert await killed.declarations() == {"model m": admitted, "serve": DeclaredModels(())}
            assert not await killed.declare("model m", admitted, new=True)
            await killed.close()

    async def test_unreadable_declaration_is_logged_and_skipped_after_a_restart(
        self, queue: SqliteQueue, clock: ManualClock
    ) -> None:
        await queue.declare("model m", DeclaredModels(()))
        await queue.declare("serve", DeclaredModels(()))
        queue._journal._file.execute("UPDATE declarations SET body = x'ff' WHERE name = 'model m'")
        with capture_logs() as logs:
            queue = await again(queue, clock)
        assert await queue.declarations() == {"serve": DeclaredModels(())}
        assert [line["name"] for line in logs if "cannot be read" in line["event"]] == ["model m"]
        await queue.declare("model m", DeclaredModels((), withdrawn=("m",)))
        assert len(await queue.declarations()) == 2
        await queue.close()

    async def test_ended_request_does_not_run_again_after_a_restart(
        self, queue: SqliteQueue, clock: ManualClock
    ) -> None:
        """Given a repeated completion that arrives after the restart, then it is known; its history still ends."""
        record = await submit(queue, "a")
        lease = await lease_next(queue)
        ending = completion(record, lease, status="completed", events=(Event("completed"),))
        await queue.commit(ending)
        queue = await again(queue, clock)
        assert (await queue.commit(ending)).context.version == 1
        assert [(e.seq, e.type) for e in await history(queue, "a")] == [
            (1, "queued"),
            (2, "stage_started"),
            (3, "completed"),
        ]
        assert await lease_all(queue) == []
        await queue.close()

    async def test_worker_retains_its_lease_across_restarts(self, queue: SqliteQueue, clock: ManualClock) -> None:
        """Given a worker that outlives the scheduler, then it may renew and complete, once, and nobody else starts."""
        record = await submit(queue, "a")
        lease = await lease_next(queue)
        for _ in range(2):
            clock.advance(TTL - 1)
            queue = await again(queue, clock)
            (running,) = (await queue.load("a")).running
            assert (running.stage, running.attempt, running.worker) == ("s", 1, "w")
            assert (await queue.sweep_expired(TTL), await lease_all(queue)) == ([], [])
        assert (await queue.renew([lease.claim], TTL)).renewed == (lease.claim,)
        await queue.commit(completion(record, lease))
        assert (await queue.renew([lease.claim], TTL)).ended == (lease.claim,)
        await queue.close()

    async def test_leases_of_lost_workers_are_requeued_uncharged_after_a_restart(
        self, queue: SqliteQueue, clock: ManualClock
    ) -> None:
        """Given workers that went with the scheduler, when a lease time has passed, then their tasks stand where they
        stood, uncharged; the lease of one that was heard of since expires as any other."""
        for name in "abc":
            await submit(queue, name)
        gone, there = await lease_next(queue), await lease_next(queue)
        queue = await again(queue, clock)
        assert (await queue.renew([there.claim], TTL)).renewed == (there.claim,)
        assert await advance_clock(queue, clock, TTL - 1) == []
        assert [lease.claim for lease in await advance_clock(queue, clock, 1)] == [there.claim]
        assert await queue.peek("p") == [task("a", attempt=2), task("c")]
        assert not await queue.hand_back(gone.claim)
        queue = await again(queue, clock)
        assert await queue.peek("p") == [task("a", attempt=2), task("c")]
        await queue.close()

    async def test_event_numbers_are_not_reused_after_a_restart(self, queue: SqliteQueue, clock: ManualClock) -> None:
        """Given a client that saw progress no file ever saw, then all that comes after the restart is news to it."""
        record = await submit(queue, "a")
        lease = await lease_next(queue)
        seen = 2
        for _ in range(3):
            for step in range(5):
                await queue.progress(lease.claim, [Event("progress", step=step, steps=5)])
            numbers = await taken(queue, "a", seen, 5)
            assert numbers[0] > seen
            seen = numbers[-1]
            queue = await again(queue, clock)
        await queue.commit(completion(record, lease, status="completed", events=(Event("completed"),)))
        assert [event.type for event in await history(queue, "a", after=seen)] == ["completed"]
        assert [e.type for e in await history(queue, "a")] == ["queued", "stage_started", "completed"]
        await queue.close()

    async def test_not_before_delay_survives_a_reset_of_the_monotonic_clock(
        self, queue: SqliteQueue, path: Path
    ) -> None:
        """Given a machine that starts again 4 s later, then what was to come in 5 s comes in 1 s."""
        await submit(queue, "a", not_before=await queue.now() + 5)
        await queue.close()
        restarted = ManualClock(now=7.0, wall=1_700_000_004.0)
        queue = SqliteQueue(path, restarted)
        assert (await count_waiting(queue, "p"), list(await queue.peek("p"))) == (1, [])
        waiting = await start_task(queue.lease("w", lease_request("p"), TTL, wait=60.0))
        restarted.advance(1)
        assert [lease.task.request for lease in await waiting] == ["a"]
        await queue.close()

    async def test_repushed_task_retains_its_position_after_a_restart(
        self, queue: SqliteQueue, clock: ManualClock
    ) -> None:
        """Given one that went behind the others, then it stays there, and before what comes after the restart."""
        for name in "abc":
            await submit(queue, name)
        await queue.commit(change(await queue.load("a"), push=(task("a", attempt=2),)))
        queue = await again(queue, clock)
        await submit(queue, "d")
        assert await lease_all(queue) == list("bcad")
        await queue.close()

    async def test_worker_registrations_do_not_survive_a_restart(self, queue: SqliteQueue, clock: ManualClock) -> None:
        await queue.register(worker_info("w"))
        queue = await again(queue, clock)
        assert await queue.workers() == []
        await queue.close()

    async def test_file_shrinks_on_restart_after_ended_requests_are_dropped(
        self, queue: SqliteQueue, clock: ManualClock
    ) -> None:
        """Given a thousand requests that are over and forgotten, then the file is as small as it was before them."""
        await submit(queue, "kept")
        queue = await again(queue, clock)
        small = queue._journal.path.stat().st_size
        params = {"prompt": "a red circle on white" * 50}
        for batch in range(10):
            names = [f"{batch}-{number}" for number in range(100)]
            contexts = [request(name, params=params) for name in names]
            await asyncio.gather(*(queue.submit(context, [task(context.id)], [], LIMITS) for context in contexts))
            over = [change(await queue.load(name), status="completed", completed_at=1.0) for name in names]
            await asyncio.gather(*(queue.commit(one) for one in over))
        queue = await again(queue, clock)
        assert queue._journal.path.stat().st_size > 50 * small
        assert len(await queue.drop_ended_before(2.0)) == 1000
        queue = await again(queue, clock)
        assert [record.context.id for record in await queue.list(RequestFilter())] == ["kept"]
        assert queue._journal.path.stat().st_size <= 2 * small
        await queue.close()

    async def test_output_deltas_survive_restarts_until_the_request_is_dropped(
        self, queue: SqliteQueue, clock: ManualClock
    ) -> None:
        """And how much that is, under a lease of before, and under the next one; until its request is dropped."""
        record = await submit(queue, "a")
        lease = await lease_next(queue)
        await append(queue, lease.claim, 0, [b"a", b"b"])
        await append(queue, lease.claim, 2, [b"c"])
        queue = await again(queue, clock)
        assert await queue.read_deltas("a", "s") == [b"a", b"b", b"c"]
        assert await append(queue, lease.claim, 2, [b"C", b"d"])
        await queue.hand_back(lease.claim)
        lease = await lease_next(queue)
        assert lease.recorded_deltas == 4
        await expect_error(ProtocolError, append(queue, lease.claim, 5, [b"f"]))
        await queue.commit(change(record, status="cancelled", completed_at=1.0))
        queue = await again(queue, clock)
        assert await queue.read_deltas("a", "s", 1) == [b"b", b"c", b"d"]
        await queue.drop_ended_before(2.0)
        queue = await again(queue, clock)
        assert stored_pieces(queue) == []
        await queue.close()


def stored_pieces(queue: SqliteQueue) -> list[tuple[Any, ...]]:
    return [*queue._journal._file.execute("SELECT * FROM pieces")]


async def taken(queue: SqliteQueue, name: str, after: int, number: int) -> list[int]:
    """The numbers of the next events of a request that is not over."""
    stream = queue.watch(name, after)
    return [(await anext(stream)).seq for _ in range(number)]


SENT = st.tuples(
    st.sampled_from("pq"), st.integers(-1, 1), st.sampled_from([0.0, 1.5, 2.5]), st.sampled_from([0, 0, 5])
)


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(SENT, max_size=12), st.integers(0, 4), st.booleans())
def test_task_order_survives_a_restart(sent: list[tuple[str, int, float, int]], taken: int, hand_back: bool) -> None:
    """Whatever was pushed in whatever order, leased and handed back: both queues give the same tasks from then on."""

    async def lived(queue: MemoryQueue) -> None:
        now = await queue.now()
        for number, (pool, priority, order, later) in enumerate(sent):
            name = f"r{number}"
            fields = {"priority": priority, "order": order, "not_before": now + later if later else 0.0}
            await queue.submit(request(name), [task(name, pool=pool, **fields)], [], LIMITS)
        leases = await queue.lease("w", lease_request("p", "q", slots=taken), TTL)
        for lease in leases if hand_back else ():
            await queue.hand_back(lease.claim)

    async def left(queue: MemoryQueue, clock: ManualClock) -> list[tuple[str, int]]:
        now = [lease.task for lease in await queue.lease("w", lease_request("p", "q", slots=99), TTL)]
        await submit(queue, "new")
        clock.advance(5)
        later = [lease.task for lease in await queue.lease("w", lease_request("p", "q", slots=99), TTL)]
        await queue.close()
        return [(one.request, one.attempt) for one in (*now, *later)]

    async def compare(folder: str) -> None:
        ours, theirs = ManualClock(), ManualClock()
        memory, queue = MemoryQueue(theirs), SqliteQueue(Path(folder) / "queue.db", ours)
        await lived(memory)
        await lived(queue)
        assert await left(await again(queue, ours), ours) == await left(memory, theirs)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(folder))


class TestADiskThatFails:
    async def test_disk_failure_fails_all_calls_and_loses_no_acknowledged_write(
        self, path: Path, clock: ManualClock
    ) -> None:
        """Given a disk that fails once and recovers, then memory might know what the disk does not: nothing is
        answered any more, who waits is told, and the next start has all that was acknowledged."""
        with failing_disk() as disk:
            queue = SqliteQueue(path, clock)
            record = await submit(queue, "a")
            lease = await lease_next(queue)
            await queue.load("a")
            waiting = await start_task(queue.lease("w", lease_request("q"), TTL, wait=60.0))
            stream = queue.watch("a", after=2)
            watching = await start_task(anext(stream))  # type: ignore[arg-type]
            disk.stops_at = disk.changes + 1
            refusal = await expect_error(TransientError, submit(queue, "b"))
            disk.stops_at = None
            assert "repair the disk, then restart the server" in str(refusal)
            assert str(path.parent) not in str(refusal)
            for work in (waiting, watching):
                assert str(await expect_error(TransientError, work)) == str(refusal)
            for call in (
                submit(queue, "c"),
                queue.lease("w", lease_request("p"), TTL),
                queue.renew([lease.claim], TTL),
                queue.progress(lease.claim, []),
                queue.commit(completion(record, lease)),
                queue.hand_back(lease.claim),
                queue.sweep_expired(TTL),
                queue.check(),
                queue.load("a"),
                queue.list(RequestFilter()),
                queue.workers(),
            ):
                assert str(await expect_error(TransientError, call)) == str(refusal)
            with pytest.raises(TransientError):
                queue.watch("a")
            await queue.close()
        queue = SqliteQueue(path, clock)
        assert (await queue.load("a")).context == record.context
        await queue.commit(completion(record, lease))
        await queue.close()


class TestADiskThatIsFull:
    async def test_full_disk_hides_output_deltas_until_they_are_written(self, path: Path, clock: ManualClock) -> None:
        """Given pieces that cannot be written, then neither they nor their repeat are taken for recorded, and who
        watches hears of none, until there is room."""
        with failing_disk() as disk, patch.object(journal, "FULL_PAUSE_S", 0.01):
            queue = SqliteQueue(path, clock)
            await submit(queue, "a")
            claim = (await lease_next(queue)).claim
            await append(queue, claim, 0, [b"a"])
            disk.full = True
            watching = await start_task(next_event(queue.watch("a", after=3)))
            calls = [await start_task(append(queue, claim, 1, [b"b", b"c"])) for _ in range(2)]
            for call in (*calls, append(queue, claim, 1, [b"b"]), queue.read_deltas("a", "s")):
                assert "full" in str(await expect_error(TransientError, call))
            assert not watching.done()
            assert [pieces for *_, pieces in stored_pieces(queue)] == [msgspec.msgpack.encode([b"a"])]
            disk.full = False
            event = await watching
            assert event is not None and event.step == 3
            assert await append(queue, claim, 1, [b"b", b"c"])
            assert await queue.read_deltas("a", "s") == [b"a", b"b", b"c"]
            await queue.close()

    async def test_full_disk_rejects_a_declaration_and_retains_the_previous_one(
        self, path: Path, clock: ManualClock
    ) -> None:
        with failing_disk() as disk, patch.object(journal, "FULL_PAUSE_S", 0.01):
            queue = SqliteQueue(path, clock)
            await queue.declare("model m", DeclaredModels(()))
            disk.full = True
            gone = DeclaredModels((), withdrawn=("m",))
            assert "full" in str(await expect_error(TransientError, queue.declare("model m", gone)))
            assert await queue.declarations() == {"model m": DeclaredModels(())}
            disk.full = False
            assert await queue.declare("model m", gone)
            queue = await again(queue, clock)
            assert await queue.declarations() == {"model m": gone}
            await queue.close()

    async def test_full_disk_rejects_changes_until_space_is_free(self, path: Path, clock: ManualClock) -> None:
        """Given a full disk, then changes are refused and named, what is written can be read, and nobody is told of
        what is not; with room again all goes on by itself, and the file has what memory has."""
        with failing_disk() as disk, patch.object(journal, "FULL_PAUSE_S", 0.01):
            queue = SqliteQueue(path, clock)
            record, other = await submit(queue, "a"), await submit(queue, "b")
            lease = await lease_next(queue)
            await queue.load("a")
            ending = await start_task(history(queue, "a", after=2))
            disk.full = True
            for call in (
                queue.commit(completion(record, lease, status="completed", events=(Event("completed"),))),
                submit(queue, "c"),
                queue.lease("w", lease_request("p"), TTL),
                queue.renew([lease.claim], TTL),
                queue.progress(lease.claim, []),
                queue.commit(change(other, status="failed")),
                queue.hand_back(lease.claim),
                queue.sweep_expired(TTL),
                queue.check(),
                queue.load("a"),
            ):
                assert "full" in str(refusal := await expect_error(TransientError, call))
                assert str(path.parent) not in str(refusal)
            assert (await queue.load("b")).context == other.context
            assert await queue.workers() == []
            assert not ending.done()
            disk.full = False
            assert [event.type for event in await ending] == ["completed"]
            await queue.check()
            await submit(queue, "d")
            stands = [await queue.load(name) for name in "abd"]
            queue = await again(queue, clock)
            assert [(await queue.load(name)).context for name in "abd"] == [record.context for record in stands]
            assert stands[0].context.status == "completed"
            await expect_error(NotFound, queue.load("c"))
            await queue.close()

    async def test_full_disk_lists_requests_as_last_written(self, path: Path, clock: ManualClock) -> None:
        """Given one request that cannot be written as it is now, and a new one that cannot be written at all, then the
        others are listed, the first one as it was written last, where that is asked for; nothing else is over."""
        with failing_disk() as disk, patch.object(journal, "FULL_PAUSE_S", 0.01):
            queue = SqliteQueue(path, clock)
            record, _ = await submit(queue, "a"), await submit(queue, "b")
            ended = await submit(queue, "c")
            await queue.commit(change(ended, status="cancelled"))
            lease = await lease_next(queue)
            await queue.load("a")
            disk.full = True
            ending = completion(record, lease, status="completed")
            assert "full" in str(await expect_error(TransientError, queue.commit(ending)))
            with patch.object(queue, "_check_writable"):
                await expect_error(TransientError, queue.submit(request("d"), [], [], LIMITS))

            async def listed(**which: Any) -> list[tuple[str, str]]:
                return [(one.context.id, one.status) for one in await queue.list(RequestFilter(**which))]

            assert await listed() == [("c", "cancelled"), ("b", "queued"), ("a", "in_progress")]
            assert await listed(status="completed") == []
            assert await listed(status="queued") == [("b", "queued")]
            assert await queue.ended_among(["a", "b", "c", "unknown"]) == ["c", "unknown"]
            disk.full = False
            while queue._writer.is_blocked(queue._entry("a")):
                await asyncio.sleep(0.01)
            assert [id for id, _ in await listed()] == ["d", "c", "b", "a"]
            assert await listed(status="completed") == [("a", "completed")]
            assert await queue.ended_among(["a", "b", "c", "unknown"]) == ["a", "c", "unknown"]
            await queue.close()

    @pytest.mark.slow
    async def test_queue_closes_cleanly_on_a_full_disk(self, tmp_path: Path, clock: ManualClock) -> None:
        """Given a disk that stays full, then what was acknowledged is there at the next start, and nothing else."""
        with small_disk(tmp_path, 256) as disk:
            queue = SqliteQueue(disk / "queue.db", clock)
            record = await submit(queue, "a")
            fill(disk)
            large = Delivery(metadata={"k": "v" * 50_000})
            await expect_error(TransientError, queue.commit(change(record, delivery=large)))
            await queue.close()
            (disk / "filler").unlink()
            queue = SqliteQueue(disk / "queue.db", clock)
            assert (await queue.load("a")).context == record.context
            await queue.close()

    @pytest.mark.slow
    async def test_opening_on_a_full_disk_raises_transient_error_and_can_be_retried(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """Given a disk without room, whether or not the file is there, then opening says so and can be repeated."""
        with small_disk(tmp_path, 256) as disk:
            for is_new in (True, False):
                fill(disk)
                for _ in range(2):
                    with pytest.raises(TransientError, match="full"):
                        SqliteQueue(disk / "queue.db", clock)
                (disk / "filler").unlink()
                queue = SqliteQueue(disk / "queue.db", clock)
                if is_new:
                    await submit(queue, "a")
                assert [record.context.id for record in await queue.list(RequestFilter())] == ["a"]
                await queue.close()

    @pytest.mark.slow
    async def test_real_full_disk_is_detected_and_recovers(self, tmp_path: Path, clock: ManualClock) -> None:
        with small_disk(tmp_path, 256) as disk, patch.object(journal, "FULL_PAUSE_S", 0.01):
            queue = SqliteQueue(disk / "queue.db", clock)
            record = await submit(queue, "a")
            fill(disk)
            large = Delivery(metadata={"k": "v" * 50_000})
            refusal = await expect_error(TransientError, queue.commit(change(record, delivery=large)))
            assert "full" in str(refusal)
            (disk / "filler").unlink()
            while True:
                with suppress(TransientError):
                    await queue.check()
                    break
                await asyncio.sleep(0.01)
            assert (await queue.load("a")).context.delivery.metadata == {"k": "v" * 50_000}
            await queue.close()


async def test_invalid_unicode_raises_protocol_error_without_side_effects(queue: SqliteQueue) -> None:
    """Given text that is not Unicode, then it has no effect, and the others go on."""
    record = await submit(queue, "a")
    await expect_error(ProtocolError, queue.submit(request("b", metadata={"k": "\ud800"}), [], [], LIMITS))
    await expect_error(ProtocolError, queue.submit(request("b"), [task("b", preferred_node="\ud800")], [], LIMITS))
    await expect_error(ProtocolError, queue.commit(change(record, events=(Event("failed", message="\ud800"),))))
    await expect_error(NotFound, queue.load("b"))
    assert (await queue.load("a")).context.version == 0
    await submit(queue, "b")


async def test_reads_wait_for_the_pending_transaction(queue: SqliteQueue) -> None:
    """Given a commit whose transaction is not over, then readers wait for it as its caller does."""
    record = await submit(queue, "a")
    release = asyncio.Event()
    loop, write = asyncio.get_running_loop(), queue._journal.write

    def slow(*batch: Any) -> None:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        write(*batch)

    with patch.object(queue._journal, "write", slow):
        ending = await start_task(queue.commit(change(record, status="failed", events=(Event("failed"),))))
        asking = [
            await start_task(work)
            for work in (
                queue.load("a"),
                queue.ended_among(["a"]),
                queue.list(RequestFilter()),
                history(queue, "a", after=1),
                submit(queue, "a"),
                queue.read_deltas("a", "s"),
            )
        ]
        assert not any(one.done() for one in (ending, *asking))
        release.set()
        await asyncio.wait([ending, *asking])
    assert asking[0].result().context.status == "failed"


async def test_callers_share_transactions(queue: SqliteQueue) -> None:
    """Given many callers at once, then far fewer transactions are written than calls made."""
    with patch.object(queue._journal, "write", side_effect=queue._journal.write) as write:
        await asyncio.gather(*(submit(queue, f"r{number}") for number in range(200)))
    assert write.call_count <= 2


async def test_unreadable_row_is_listed_as_damaged_and_others_are_loaded(queue: SqliteQueue, path: Path) -> None:
    """Given a row that is garbage, when the queue is opened, then all others are there, and it is kept, listed and
    shown as damaged until it is dropped; the next start knows nothing of it."""
    for name in "abc":
        await submit(queue, name)
    await queue.close()
    with apsw.Connection(str(path)) as file:
        file.execute("UPDATE requests SET body = x'c1' WHERE id = 'c'")
    file.close()
    queue = SqliteQueue(path, ManualClock())
    assert [record.context.id for record in await queue.list(RequestFilter())] == ["b", "a"]
    assert [(one.id, one.kind) for one in await queue.damaged()] == [("c", "request")]
    await expect_error(RecordDamaged, queue.load("c"))
    assert await queue.ended_among(["a", "c", "nobody"]) == ["nobody"]
    await submit(queue, "d")  # whose number is another one
    await queue.discard("c")
    await expect_error(NotFound, queue.load("c"))
    queue = await again(queue, ManualClock())
    assert await queue.damaged() == []
    assert [record.context.id for record in await queue.list(RequestFilter())] == ["d", "b", "a"]
    await queue.close()


async def test_queue_wait_statistics_survive_a_restart(queue: SqliteQueue, clock: ManualClock) -> None:
    """Given tasks that wait and one that is leased, when that comes back, then all have waited since they came."""
    for name in "ab":
        await queue.submit(request(name, plan=plan_with_costs(p=1.5)), [task(name)], [], LIMITS)
        clock.advance(5)
    lease = await lease_next(queue)
    before = await queue.stats(["p"])
    queue = await again(queue, clock)
    assert await queue.stats(["p"]) == before == QueueStats(2, {"p": PoolStats(1, 5.0, 3.0)})
    await queue.hand_back(lease.claim)
    assert (await queue.stats(["p"])).pools == {"p": PoolStats(2, 10.0, 3.0)}
    await queue.close()


async def test_refusal_counts_survive_a_restart(queue: SqliteQueue, clock: ManualClock) -> None:
    """Given counts from before, then they go on; a row of a version that kept none is read, and one that keeps more."""
    await submit(queue, "a")
    for _ in range(MAX_REFUSALS - 1):
        assert await queue.refuse((await lease_next(queue, worker="v")).claim) == 0
    queue = await again(queue, clock)
    assert await queue.refuse((await lease_next(queue, worker="v")).claim) == 1
    queue = await again(queue, clock)
    assert await queue.lease("v", lease_request("p"), TTL) == []
    assert len(await queue.lease("w", lease_request("p"), TTL)) == 1
    await queue.close()
    stood = msgspec.msgpack.decode(msgspec.msgpack.encode(StoredTask(3, task("a"), 2.0, {"v": 3}, "w", b"t", 1.0)))
    longer = msgspec.msgpack.encode([*stood, "from a later version"])
    assert msgspec.msgpack.decode(longer, type=StoredTask).since == 1.0


async def test_commit_and_lease_on_a_full_disk_leaves_the_next_task_unleased(queue: SqliteQueue) -> None:
    """Or it would wait for the end of a lease that no worker knows, and be charged for it."""
    for name in ("a", "b"):
        await submit(queue, name)
    lease = await lease_next(queue, "p")
    record = await queue.load(lease.task.request)
    write, full = queue._writer._journal.write, [True]

    def writes(*batch: Any) -> None:
        if full[0]:
            raise TransientError("full")
        write(*batch)

    queue._writer._journal.write = writes  # type: ignore[method-assign]
    with pytest.raises(TransientError, match="disk of the queue is full"):
        await queue.commit_and_lease(completion(record, lease), "w", lease_request("p"), 60.0)
    full[0] = False
    while queue._writer._full:
        await asyncio.sleep(0.01)
    (given,) = await queue.lease("other", lease_request("p"), 60.0)
    assert given.task.request != lease.task.request


async def test_deltas_of_a_request_dropped_in_the_same_transaction_are_deleted(queue: SqliteQueue) -> None:
    """Also where another request of that id follows in it."""
    record = await submit(queue, "a")
    lease = await lease_next(queue)
    with patch.object(queue._writer, "_flush") as flush:
        growing = await start_task(append(queue, lease.claim, 0, [b"a"]))
        ending = await start_task(queue.commit(change(record, status="cancelled", completed_at=1.0)))
        dropping = await start_task(queue.drop("a"))
        submitting = await start_task(submit(queue, "a"))
        (lease,) = await queue.lease("w", lease_request("p"), TTL)
        next_growing = await start_task(append(queue, lease.claim, 0, [b"of the next"]))
        flush.assert_called()
    queue._writer._flush()
    await asyncio.gather(growing, ending, dropping, submitting, next_growing)
    assert await queue.read_deltas("a", "s") == [b"of the next"]
    assert len(stored_pieces(queue)) == 1


async def test_row_encoding_failure_raises_transient_error_instead_of_blocking(queue: SqliteQueue) -> None:
    """Given a row that cannot be made, as nobody has foreseen, then nobody waits for it for ever."""
    with patch.object(queue._writer, "_row", side_effect=KeyError("s")):
        assert "repair the disk" in str(await expect_error(TransientError, submit(queue, "a")))


class TestTheFile:
    @pytest.mark.slow
    async def test_database_file_is_locked_by_one_process(self, queue: SqliteQueue, path: Path) -> None:
        with pytest.raises(ConfigError, match=f"process {os.getpid()} uses it"):
            queues.open(f"sqlite:{path}")
        script = f"from unfuse import queues; queues.open('sqlite:{path}')"
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert f"InUse: the queue cannot use {path}: process {os.getpid()} uses it. Stop" in other.stderr

    async def test_closing_the_queue_releases_the_file_lock(self, queue: SqliteQueue, clock: ManualClock) -> None:
        await (await again(queue, clock)).close()

    async def test_queue_files_have_mode_0600(self, queue: SqliteQueue, path: Path) -> None:
        await submit(queue, "a")
        files = list(path.parent.iterdir())
        assert {file.name for file in files} == {"queue.db", "queue.db-wal", "queue.db.lock"}
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}

    def test_sqlite_addresses_resolve_to_file_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        addresses = ("sqlite:a.db", f"sqlite:{tmp_path}/b/b.db", f"sqlite://{tmp_path}/c.db", "sqlite:~/d.db")
        for address in (*addresses, "unfuse.queues.sqlite:SqliteQueue://e.db"):
            asyncio.run(queues.open(address).close())
        assert all((tmp_path / name).exists() for name in ("a.db", "b/b.db", "c.db", "home/d.db", "e.db"))
        with pytest.raises(ConfigError, match="needs the path of a file, such as sqlite:queue.db"):
            queues.open("sqlite")

    @staticmethod
    def refused(path: Path, sentence: str) -> None:
        """It is refused in one sentence; its bytes, and what lies beside it, are as they were."""
        before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
        with pytest.raises(ConfigError, match=sentence) as caught:
            queues.open(f"sqlite:{path}")
        assert "\n" not in str(caught.value)
        assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before

    def test_foreign_or_invalid_database_file_raises_config_error(self, path: Path) -> None:
        """Another program's database, another layout, no database, a folder: each is refused, and left as it is."""
        with apsw.Connection(str(path)) as other:
            other.execute("CREATE TABLE songs (title)")
        other.close()
        self.refused(path, "it is the database of another program")
        other = apsw.Connection(str(path))
        other.pragma("journal_mode", "WAL")
        other.close()
        self.refused(path, "it is the database of another program")
        path.unlink()
        asyncio.run(queues.open(f"sqlite:{path}").close())
        newer = apsw.Connection(str(path))
        newer.pragma("user_version", journal.SCHEMA_VERSION + 1)
        newer.close()
        self.refused(path, f"schema {journal.SCHEMA_VERSION + 1}, this version needs {journal.SCHEMA_VERSION}")
        for name in (path.name, f"{path.name}.lock"):
            path.with_name(name).unlink(missing_ok=True)
        for content in ("a letter to somebody, which is no database" * 100, "short"):
            path.write_text(content)
            self.refused(path, "it is not a SQLite database: use")
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(ConfigError, match="it is not a file"):
            queues.open(f"sqlite:{path}")
        path.unlink()
        path.write_text("short")
        with pytest.raises(ConfigError, match="the queue cannot use"):
            queues.open(f"sqlite:{path}/queue.db")
        with pytest.raises(ConfigError, match="the queue cannot use"):
            queues.open(f"sqlite:{path.parent}")

    @pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs"])
    def test_network_file_system_raises_config_error(self, kind: str, path: Path, tmp_path: Path) -> None:
        device = tmp_path.stat().st_dev
        line = "36 35 {}:{} / /mnt rw,noatime shared:1 - {} host:/share rw\n"
        table = tmp_path / "mountinfo"
        table.write_text(line.format(os.major(device), os.minor(device), kind))
        with patch.object(journal, "MOUNTS", table), pytest.raises(ConfigError, match=f"network file system .{kind}."):
            queues.open(f"sqlite:{path}")
        table.write_text(line.format(os.major(device) + 1, 0, kind) + line.format(os.major(device), 0, "ext4"))
        with patch.object(journal, "MOUNTS", table):
            asyncio.run(queues.open(f"sqlite:{path}").close())


async def test_delayed_task_becomes_leasable_with_the_system_clock(path: Path) -> None:
    queue = queues.open(f"sqlite:{path}")
    await submit(queue, "a", not_before=await queue.now() + 0.01)
    assert [lease.task.request for lease in await queue.lease("w", lease_request("p"), TTL, wait=30.0)] == ["a"]
    await queue.close()


@pytest.mark.slow
async def test_acknowledged_writes_survive_sigkill(path: Path) -> None:
    """Given a process that is killed at any moment, over and over, then every request stands where it was last said
    to stand or further on, and is whole: what is queued in its context is there to be leased, once, and no more; and
    so are the pieces that were said to be recorded."""
    told: dict[str, tuple[int, str]] = {}
    grown: dict[tuple[str, str], int] = {}
    for seed in range(6):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.queues.sqlite_child", str(path), str(seed)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout
        kill_after = random.Random(seed).randint(100, 600)
        lines = list(islice(child.stdout, kill_after))
        child.kill()
        lines += [line for line in child.stdout if line.endswith("\n")]
        child.wait()
        child.stdout.close()
        assert len(lines) >= kill_after
        said = [line.split() for line in lines]
        told |= {name: (int(version), status) for name, version, status in said if status[0] != "+"}
        grown |= {(name, stage): int(count) for name, stage, count in said if count[0] == "+"}
        queue = SqliteQueue(path, SystemClock())
        for (name, stage), count in grown.items():
            found = [int(piece) for piece in await queue.read_deltas(name, stage)]
            assert found == list(range(len(found))) and len(found) >= count
        for name, (version, status) in told.items():
            context = (await queue.load(name)).context
            assert context.version >= version
            assert context.version > version or context.status == status
            waiting = {stage for stage, state in context.stages.items() if state.status == "queued"}
            row = queue._row(queue._entry(name))
            assert row
            there = [stood.task.stage for stood in row.tasks]
            assert sorted(there) == ([] if context.is_over else sorted(waiting))
            assert context.is_over or there
        await queue.close()
    assert max(grown.values()) > 3
    assert {status for _, status in told.values()} >= {"queued", "in_progress", "completed", "cancelled"}
