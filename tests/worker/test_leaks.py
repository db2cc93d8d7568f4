"""What a worker without a task must not hold: each leak is reported once, and freed where that harms nobody."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.worker.test_objects import PIECE, far, folders, freed, granted, made, near, reading
from tests.worker.test_step_loop import Bench, Count
from unfuse.core.messages import TaskFailed, TaskStopped
from unfuse.core.request import Timings
from unfuse.core.task import Lease
from unfuse.language.paged_kv import PagedKvCache
from unfuse.stages.base import StageInput
from unfuse.stages.sequence_pool import SequencePool
from unfuse.stores.tensor_store import TensorStore
from unfuse.worker.compute_messages import Leak, LeaksFound
from unfuse.worker.objects import MAX_LOGGED_LEAKS, WorkerLeakCheck, WorkerObjects
from unfuse.worker.status_reporter import ComputeLeakCheck

__all__ = ["far", "folders", "near"]

BLOCK = 2 * 3 * 2 * 16 * 8 * 4
"""Bytes of a block: keys and values of 3 layers, 2 heads, 16 tokens and 8 numbers of float32."""


def sequences() -> SequencePool:
    """Of a model that is not asked for anything."""
    model: Any = None
    return SequencePool(model, PagedKvCache(3, 2, 8, tokens=160))


def check(texts: SequencePool, store: TensorStore, *, frees: bool = True) -> tuple[ComputeLeakCheck, list[LeaksFound]]:
    sent = list[LeaksFound]()
    stages: Any = [SimpleNamespace(texts=texts), SimpleNamespace(texts=texts), SimpleNamespace(texts=None)]
    return ComputeLeakCheck(stages, store, sent.append, frees=frees), sent


def test_leaked_sequences_are_reported_once_and_freed() -> None:
    """Given a sequence with blocks and one without, of which no state is left, then both are ended."""
    with TensorStore.create("memory") as store:
        texts = sequences()
        leaks, sent = check(texts, store)
        leaks.check()
        texts.start(0).extend(17)
        texts.start(0)
        leaks.check()
        leaks.check()
        first, second = "sequence 1 of 17 tokens", "sequence 2 of 0 tokens"
        assert sent == [LeaksFound((Leak("kv", first, 2 * BLOCK, True), Leak("kv", second, 0, True)))]
        assert texts.usage().used == 0
        texts.start(0).extend(1)
        leaks.check()
        assert sent[1:] == [LeaksFound((Leak("kv", "sequence 3 of 1 tokens", BLOCK, True),))]


def test_leaked_kv_blocks_without_a_sequence_are_reported_not_freed() -> None:
    with TensorStore.create("memory") as store:
        texts = sequences()
        leaks, sent = check(texts, store)
        texts._kv.sequence().extend(40)
        for _ in range(2):
            leaks.check()
        assert sent == [LeaksFound((Leak("kv", "3 blocks of no sequence", 3 * BLOCK),))]


def test_ranks_report_sequences_and_do_not_free_them() -> None:
    """All ranks need the same blocks, and another one may not have this leak."""
    with TensorStore.create("memory") as store:
        texts = sequences()
        leaks, sent = check(texts, store, frees=False)
        texts.start(0).extend(1)
        for _ in range(2):
            leaks.check()
        assert sent == [LeaksFound((Leak("kv", "sequence 1 of 1 tokens", BLOCK),))]
        assert texts.usage().used == 1


def test_inputs_that_are_still_mapped_are_reported() -> None:
    """Those that are only garbage are none."""
    with TensorStore.create("memory") as store:
        leaks, sent = check(sequences(), store)
        ref = store.put({"x": np.ones(5, np.uint8)}, request="req_a", stage="s", attempt=1)
        garbage: dict[str, Any] = {"held": store.get(ref)}
        garbage["itself"] = garbage
        del garbage
        leaks.check()
        assert not sent

        held = store.get(ref)
        for _ in range(2):
            leaks.check()
        assert sent == [LeaksFound((Leak("arena", f"input object {ref.id} of req_a, s", ref.nbytes),))]
        held.close()
        assert not store.open_refs()


class Idle(queue.SimpleQueue[Any]):
    """The inbox of a loop that ends where it would wait."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.empty():
            raise KeyboardInterrupt
        return super().get()


class Forgetful(Count):
    """Begins a sequence for each task, and ends none."""

    def __init__(self, texts: SequencePool) -> None:
        super().__init__()
        self.texts = texts

    def start(self, task: StageInput) -> tuple[StageInput, int]:
        assert isinstance(self.texts, SequencePool)
        self.texts.start(task.priority).extend(16)
        return super().start(task)


def test_step_loop_checks_for_leaks_when_idle(tmp_path: Path) -> None:
    """Given a stage that leaks at each task, when two tasks run and the loop waits for more, then both leaks are sent
    behind the ends of the tasks, and the blocks are free."""
    bench = Bench(tmp_path, {"count": Forgetful(texts := sequences())}, 1)
    bench.loop._inbox = bench.inbox = Idle()
    for _ in range(2):
        bench.run(steps=2)
    with pytest.raises(KeyboardInterrupt):
        bench.loop.run()
    kinds = [type(message).__name__ for message in bench.sent]
    assert kinds.index("LeaksFound") > max(at for at, kind in enumerate(kinds) if kind == "TaskCompleted")
    (found,) = (message for message in bench.sent if isinstance(message, LeaksFound))
    assert [(leak.bytes, leak.freed) for leak in found.leaks] == [(BLOCK, True)] * 2
    assert texts.usage().used == 0


def test_task_state_is_released_if_its_stage_fails(tmp_path: Path) -> None:
    """Also where nothing says how far it is: before, what it had was never freed."""

    class Lost(Count):
        def progress(self, state: tuple[StageInput, int]) -> tuple[int, int]:
            raise RuntimeError("no progress")

        def release(self, state: tuple[StageInput, int]) -> None:
            given_up.append(state)

    given_up = list[Any]()
    bench = Bench(tmp_path, {"count": Lost()}, 1)
    assert isinstance(bench.outcome(bench.run()), TaskFailed)
    assert len(given_up) == 1


def looked(
    leaks: WorkerLeakCheck, objects: WorkerObjects, times: int = 2, *, idle: bool = True
) -> list[tuple[Any, ...]]:
    """What is logged by so many looks: name, bytes, and whether it was freed."""
    with capture_logs() as logs:
        for _ in range(times):
            leaks.check(objects, idle=idle)
    return [(line["what"], line["bytes"], line["freed"]) for line in logs if line["event"].startswith("memory leak")]


async def test_unfinished_object_is_reported_as_a_leak_once_and_not_freed(near: WorkerObjects) -> None:
    """Also when its request is over: whoever forgot it may still write there. While there is a task, it may be that
    task's."""
    leaks = WorkerLeakCheck()
    extent = near.store.reserve(PIECE, "req_a")
    assert not looked(leaks, near, idle=False)
    assert not looked(leaks, near, times=1)
    assert not looked(leaks, near, times=1, idle=False)
    assert not looked(leaks, near, times=1)
    await near.release(["req_a"])
    assert looked(leaks, near) == [(f"an unfinished object {extent.id} of req_a", PIECE, False)]
    assert not looked(leaks, near)
    assert near.usage().used == PIECE
    assert leaks.take_counts() == {"arena": PIECE}
    assert leaks.take_counts() == {}


async def test_arena_memory_without_an_object_is_reported_as_a_leak(near: WorkerObjects) -> None:
    leaks = WorkerLeakCheck()
    assert near._arena
    near._arena._space.allocate(PIECE)
    assert looked(leaks, near) == [(f"{PIECE} bytes that belong to no object", PIECE, False)]


async def test_objects_of_requests_and_caches_are_not_leaks(near: WorkerObjects) -> None:
    """Whatever is held, deleted, cached or spilled."""
    leaks = WorkerLeakCheck()
    for nbytes in (0, 1, 5000):
        made(near, nbytes=nbytes)
    near.retain("key", cached := made(near, request="req_b"))
    await near.release(["req_b"])
    with near.store.get(deleted := made(near)):
        near.store.delete(deleted)
        assert near._arena
        near._arena.spill(made(near).id)
        assert not looked(leaks, near)
    assert cached.id


async def brought(near: WorkerObjects, far: WorkerObjects, lease: Lease) -> None:
    assert await near.copies.fetch(lease, granted(far))


async def test_leaked_input_copy_of_an_ended_task_is_reported_and_freed(
    near: WorkerObjects, far: WorkerObjects
) -> None:
    """Given a copy that nobody let go of when its task ended, then it is reported, and its room is free."""
    leaks, ref = WorkerLeakCheck(), made(far)
    await brought(near, far, reading(ref))
    assert looked(leaks, near) == [(f"a copy of object {ref.id} for req_a", PIECE, True)]
    await freed(near)
    assert not looked(leaks, near)


async def test_input_copy_retained_for_the_next_attempt_is_not_a_leak(near: WorkerObjects, far: WorkerObjects) -> None:
    leaks, lease = WorkerLeakCheck(), reading(made(far))
    await brought(near, far, lease)
    near.end_task(lease, TaskFailed(lease.claim, "crash", "it died"), read_here=False)
    assert not looked(leaks, near)
    assert near.usage().used == PIECE

    other = reading(made(far, request="req_b"), request="req_b")
    await brought(near, far, other)
    near.end_task(other, TaskStopped(other.claim, Timings()), read_here=False)
    assert not looked(leaks, near)


async def test_unreported_leak_counts_are_added_to_the_next_report(near: WorkerObjects) -> None:
    leaks = WorkerLeakCheck()
    leaks.record([Leak("kv", "one", 5, True), Leak("kv", "another", 6), Leak("arena", "a third", 7)])
    leaks.put_back(leaks.take_counts())
    leaks.record([Leak("arena", "a fourth", 8)])
    assert leaks.take_counts() == {"kv": 11, "arena": 15}


def test_leaks_over_the_log_limit_share_one_log_line() -> None:
    leaks = WorkerLeakCheck()
    with capture_logs() as logs:
        leaks.record(Leak("kv", f"sequence {number}", 3) for number in range(MAX_LOGGED_LEAKS + 2))
    assert len(logs) == MAX_LOGGED_LEAKS + 1
    assert (logs[-1]["number"], logs[-1]["bytes"]) == (2, 6)
    assert leaks.take_counts() == {"kv": 3 * (MAX_LOGGED_LEAKS + 2)}
