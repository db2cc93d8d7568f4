"""Saved states of tasks: when and how, what compute resumes from them, and which of them are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tests.core.graphs import object_for
from tests.worker.test_step_loop import Bench, Count
from tools.addresses import a_worker, unix_address
from unfuse.core.errors import ArenaFull, ConfigError, PermanentError
from unfuse.core.messages import (
    Accepted,
    CachePrefix,
    CheckpointSaved,
    Rejected,
    StepProgress,
    TaskCompleted,
    TaskFailed,
    TaskStopped,
)
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Timings
from unfuse.core.task import Claim, Lease
from unfuse.stages.base import Checkpoint, StageInput
from unfuse.stores.tensor_store import TensorStore
from unfuse.testing.queue_samples import task_of
from unfuse.worker.checkpoints import FAILS_S, CheckpointPolicy, CheckpointWriter, pack, unpack
from unfuse.worker.compute_messages import CancelTask, RunTask
from unfuse.worker.link import TaskSlots
from unfuse.worker.step_loop import StepLoop
from unfuse.worker.worker import Worker


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10", (10, 0.0, False)),
        ("30s", (0, 30.0, False)),
        ("0.5s", (0, 0.5, False)),
        ("auto", (0, 0.0, True)),
        ("none", (0, 0.0, False)),
    ],
)
def test_checkpoint_policy_is_parsed(text: str, expected: tuple[int, float, bool]) -> None:
    policy = CheckpointPolicy.parse(text)
    assert (policy.steps, policy.seconds, policy.auto) == expected
    assert policy.never == (text == "none")


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "ten", "10 s", "1e3", "nones", "5m"])
def test_invalid_checkpoint_policy_raises_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="use auto, none"):
        CheckpointPolicy.parse(text)


@given(st.integers(0, 100), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1e-6, 100))
def test_auto_policy_saves_only_if_the_expected_loss_exceeds_the_cost(
    steps: int, unsaved_s: float, left_s: float, cost_s: float
) -> None:
    """Whenever it is due, what a failure would cost on average, over the interval or what is left, is at least half of
    what saving costs; and it is due whenever both are far longer than that."""
    policy = CheckpointPolicy(auto=True)
    policy.cost_s = cost_s
    interval = (2 * cost_s * FAILS_S) ** 0.5
    due = policy.is_due(steps, unsaved_s, left_s)
    assert not due or unsaved_s * left_s / FAILS_S >= cost_s * 0.99
    assert due or unsaved_s < interval or left_s < interval / 2


def test_auto_policy_saves_less_often_if_saving_is_slow() -> None:
    policy = CheckpointPolicy(auto=True)
    for _ in range(20):
        policy.record_cost(0.001)
    assert policy.is_due(1, 10.0, 100.0)
    for _ in range(20):
        policy.record_cost(1.0)
    assert not policy.is_due(1, 100.0, 1000.0)
    assert policy.is_due(1, 200.0, 1000.0)


@pytest.mark.parametrize("values", [{}, {"step": 3, "scheduler": {"list": [None, {"tensor": "x", "cpu": True}, 1.5]}}])
def test_checkpoint_round_trips_through_the_tensor_store(values: dict[str, Any]) -> None:
    checkpoint = Checkpoint({"latents": torch.arange(6.0).reshape(2, 3), "none": None}, values)
    with TensorStore.create("memory") as store:
        ref = store.put(pack(checkpoint), request="req_0", stage="denoise", attempt=1)
        with store.get(ref, as_torch=True) as held:
            found = unpack(held)
            latents = found.tensors["latents"]
            assert latents is not None
            assert torch.equal(latents, torch.arange(6.0).reshape(2, 3))
    assert found.tensors["none"] is None
    assert found.values == values


def test_unpack_of_another_object_raises_permanent_error() -> None:
    with pytest.raises(PermanentError, match="not a checkpoint"):
        unpack({"latents": torch.ones(1)})


class Saving(Count):
    """Counts, and can go on from where it was; `saves` as `trouble` has it."""

    trouble: Exception | None = None

    def save(self, state: tuple[StageInput, int]) -> Checkpoint | None:
        if self.trouble:
            raise self.trouble
        return Checkpoint({"count": torch.tensor([state[1]])})

    def resume(self, task: StageInput, checkpoint: Checkpoint) -> tuple[StageInput, int]:
        count: Any = checkpoint.tensors["count"]
        return task, int(count[0])


def loop(folder: Path, policy: str, stage: Count | None = None) -> tuple[Bench, Count]:
    count = stage or Saving()
    bench = Bench(folder, {"count": count}, 1)
    bench.loop = StepLoop(
        {"count": count},
        bench.store,
        bench.results,
        bench.inbox,
        bench.sent.append,
        policy=CheckpointPolicy.parse(policy),
    )
    return bench, count


def kept(bench: Bench) -> list[int]:
    return [message.step for message in bench.sent if isinstance(message, CheckpointSaved)]


def again(bench: Bench, lease: Lease, checkpoint: ObjectRef | None) -> Lease:
    """The task's next attempt, from a checkpoint."""
    task = msgspec.structs.replace(lease.task, attempt=2)
    bench.sent.clear()
    second = msgspec.structs.replace(lease, task=task, checkpoint=checkpoint)
    bench.inbox.put(RunTask(second, {}))
    return second


def last_kept(bench: Bench) -> ObjectRef:
    return [message.checkpoint for message in bench.sent if isinstance(message, CheckpointSaved)][-1]


def counted(bench: Bench, done: object) -> float:
    assert isinstance(done, TaskCompleted)
    assert done.output is not None
    with bench.store.get(done.output) as held:
        return float(held["x"][0])


@pytest.mark.parametrize(("policy", "expected"), [("3", [3, 6, 9]), ("none", []), ("auto", []), ("3600s", [])])
def test_checkpoints_follow_the_policy_and_skip_the_last_step(tmp_path: Path, policy: str, expected: list[int]) -> None:
    """Steps that take no time are not worth saving, unless somebody wants it."""
    bench, _ = loop(tmp_path, policy)
    done = bench.outcome(bench.run(steps=9 + 1))
    assert (kept(bench), counted(bench, done)) == (expected, 10.0)


def test_next_attempt_resumes_from_the_checkpoint(tmp_path: Path) -> None:
    bench, count = loop(tmp_path, "4")
    lease = bench.run(steps=10)
    bench.outcome(lease)
    count.batches.clear()

    second = again(bench, lease, last_kept(bench))
    done = bench.outcome(second)

    assert isinstance(done, TaskCompleted)
    assert (len(count.batches), done.timings.steps, done.timings.resumed) == (2, 2, 8)
    assert counted(bench, done) == 10.0
    steps = [message for message in bench.sent if isinstance(message, StepProgress) and message.step]
    assert [step for message in steps for step in range(message.first, message.step + 1)] == [9, 10]
    assert kept(bench) == []


@pytest.mark.parametrize("lost", ["gone", "damaged", "no checkpoint"])
def test_task_with_a_lost_or_damaged_checkpoint_restarts(tmp_path: Path, lost: str) -> None:
    bench, count = loop(tmp_path, "4")
    lease = bench.run(steps=6)
    bench.outcome(lease)
    ref = last_kept(bench)
    if lost == "gone":
        bench.store.delete(ref)
    elif lost == "damaged":
        ref = msgspec.structs.replace(ref, tensors=ref.tensors[:1])
    else:
        ref = bench.input
    count.batches.clear()

    assert counted(bench, bench.outcome(again(bench, lease, ref))) == 6.0
    assert len(count.batches) == 6


def test_preempted_task_saves_one_checkpoint(tmp_path: Path) -> None:
    bench, _ = loop(tmp_path, "auto")
    patient = bench.run(steps=5)
    bench.turn()
    urgent = bench.run(steps=3, priority=1)
    bench.outcome(urgent)
    assert [(message.claim, message.step) for message in bench.sent if isinstance(message, CheckpointSaved)] == [
        (patient.claim, 1)
    ]
    assert isinstance(bench.outcome(patient), TaskCompleted)


def test_checkpoint_is_reported_before_the_task_stops_for_a_drain(tmp_path: Path) -> None:
    bench, _ = loop(tmp_path, "auto")
    lease = bench.run(steps=5)
    bench.turn()
    bench.turn()
    bench.inbox.put(CancelTask(lease.claim, save=True))
    assert isinstance(stopped := bench.outcome(lease), TaskStopped)
    assert stopped.timings.steps == 2
    assert [type(message) for message in bench.sent[-2:]] == [CheckpointSaved, TaskStopped]
    assert kept(bench) == [2]


@pytest.mark.parametrize("policy", ["none", "auto"])
def test_cancelled_task_saves_no_checkpoint(tmp_path: Path, policy: str) -> None:
    """Nor is anything saved for a drain where nothing ever is."""
    bench, _ = loop(tmp_path, policy)
    lease = bench.run(steps=5)
    bench.turn()
    bench.inbox.put(CancelTask(lease.claim, save=policy == "none"))
    bench.outcome(lease)
    assert kept(bench) == []


class Unsaved(Saving):
    def save(self, state: tuple[StageInput, int]) -> Checkpoint | None:
        return None


@pytest.mark.parametrize("why", ["trouble", "no room", "cannot"])
def test_task_completes_if_its_checkpoint_cannot_be_saved(tmp_path: Path, why: str) -> None:
    stage = Unsaved() if why == "cannot" else Saving()
    stage.trouble = PermanentError("a secret") if why == "trouble" else None
    bench, _ = loop(tmp_path, "1", stage)
    if why == "no room":
        bench.loop._store = Full(bench.store)  # type: ignore[assignment]
    lease = bench.run(steps=4)
    while not any(isinstance(message, TaskCompleted) for message in bench.sent):
        bench.turn()
    assert kept(bench) == []
    assert bench.outcome(lease)


class Full:
    """A store with no room for checkpoints."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, tensors: Mapping[str, Any], **about: Any) -> ObjectRef:
        if "count" in tensors:
            filler = np.zeros(self._store.usage().free + 1, np.uint8)
            return self._store.put({"filler": filler}, request="req_1", stage="s", attempt=1)
        return self._store.put(tensors, **about)


def test_cancel_if_saved_stops_tasks_that_can_be_saved_before_a_step(tmp_path: Path) -> None:
    """Given two tasks, one of which has made no step, when they are to be dropped if they can be saved, then both are
    stopped without another step, and the one that has something to save is saved."""
    bench, count = loop(tmp_path, "auto")
    runs = bench.run(steps=5)
    bench.turn()
    waits = bench.run(steps=5, tag=1)
    for lease in (runs, waits):
        bench.inbox.put(CancelTask(lease.claim, save=True, if_saved=True))
    assert all(isinstance(bench.outcome(lease), TaskStopped) for lease in (runs, waits))
    assert (kept(bench), len(count.batches)) == ([1], 1)
    assert counted(bench, bench.outcome(again(bench, runs, last_kept(bench)))) == 5.0


@pytest.mark.parametrize("lacks", ["room", "save", "wish"])
def test_cancel_if_saved_is_ignored_if_the_task_cannot_be_saved(tmp_path: Path, lacks: str) -> None:
    """Given a task whose state cannot be stored, whose stage saves nothing, or whose server never saves, when it is to
    be dropped if it can be saved, then it makes all its steps; a plain cancel drops it still."""
    stage = Count() if lacks == "save" else Saving()
    if lacks == "room":
        stage.trouble = ArenaFull(1, 0, 1)  # type: ignore[attr-defined]
    bench, count = loop(tmp_path, "none" if lacks == "wish" else "auto", stage)
    lease, other = bench.run(steps=5), bench.run(steps=5, tag=1)
    bench.turn()
    bench.turn()
    for one in (lease, other):
        bench.inbox.put(CancelTask(one.claim, save=True, if_saved=True))
    bench.turn()
    bench.inbox.put(CancelTask(other.claim, save=True))
    assert isinstance(bench.outcome(other), TaskStopped)
    assert counted(bench, bench.outcome(lease)) == 5.0


def test_cancel_if_saved_of_an_ended_task_does_not_block_others(tmp_path: Path) -> None:
    """Given a task that has ended, when it is to be dropped if it can be saved, then others go on."""
    bench, _ = loop(tmp_path, "auto")
    ended = bench.run(steps=1)
    bench.outcome(ended)
    lease = bench.run(steps=3)
    bench.inbox.put(CancelTask(ended.claim, save=True, if_saved=True))
    assert isinstance(bench.outcome(lease), TaskCompleted)


CLAIM = Claim("req_1", "denoise.0", 1, b"token")


class Place:
    """Where checkpoints lie; making one durable takes until `written` is set."""

    def __init__(self) -> None:
        self.written, self.durable, self.gone = asyncio.Event(), list[str](), list[str]()
        self.shared: list[str] = []
        self.full = False
        self.written.set()

    def retain(self, key: str, ref: ObjectRef) -> None:
        self.shared.append(key)

    async def save_copy(self, ref: ObjectRef, *, now: bool = False) -> bool:
        await self.written.wait()
        self.durable += [] if self.full else [ref.id]
        return not self.full

    def has_copy(self, ref: ObjectRef) -> bool:
        return ref.id in self.durable or ref.id == "from elsewhere"

    async def delete(self, ref: ObjectRef) -> None:
        self.gone.append(ref.id)


class Scheduler:
    """Answers with what it is told to; portions wait until `takes` is set."""

    def __init__(self) -> None:
        self.answer: Accepted | Rejected = Accepted()
        self.saved: list[int] = []
        self.failed_after: list[list[int]] = []
        self.kept, self.done_after = list[CachePrefix](), list[int]()
        self.takes = asyncio.Event()

    async def call(self, message: CheckpointSaved | TaskFailed | CachePrefix | TaskCompleted) -> Accepted | Rejected:
        if isinstance(message, TaskFailed):
            self.failed_after.append(list(self.saved))
        elif isinstance(message, TaskCompleted):
            self.done_after.append(len(self.kept))
        elif isinstance(message, CachePrefix):
            await self.takes.wait()
            self.kept.append(message)
        else:
            self.saved.append(message.step)
        return self.answer


def saving(before: str = "") -> tuple[CheckpointWriter, Place, Scheduler]:
    """One whose task runs, perhaps from a checkpoint."""
    place, scheduler = Place(), Scheduler()
    made: Any = CheckpointWriter(place, scheduler)  # type: ignore[arg-type]
    checkpoint = object_for(CLAIM, before) if before else None
    made.start_task(Lease(task_of("req_1", "denoise.0", 1, "p", "denoise", "m", {}), "w", b"token", 0.0, checkpoint))
    return made, place, scheduler


def saved(step: int) -> CheckpointSaved:
    return CheckpointSaved(CLAIM, object_for(CLAIM, f"at {step}"), step)


async def test_old_checkpoint_is_deleted_once_the_new_one_is_recorded() -> None:
    made, place, scheduler = saving("from elsewhere")
    for step in (10, 20):
        await made.save(saved(step))
    assert (scheduler.saved, place.durable, place.gone) == ([10, 20], ["at 10", "at 20"], ["from elsewhere", "at 10"])


@pytest.mark.parametrize(("before", "recorded", "gone"), [("from elsewhere", [], ["at 10"]), ("", [10], [])])
async def test_checkpoint_without_durable_copy_does_not_replace_a_durable_one(
    before: str, recorded: list[int], gone: list[str]
) -> None:
    """Given a full disk, then an older checkpoint on it is worth more than a newer one that ends with its worker."""
    made, place, scheduler = saving(before)
    place.full = True
    await made.save(saved(10))
    assert (scheduler.saved, place.gone) == (recorded, gone)


async def test_checkpoint_that_the_scheduler_rejects_is_deleted() -> None:
    made, place, scheduler = saving()
    await made.save(saved(10))
    scheduler.answer = Rejected("not yours any more", lease_lost=True)
    await made.save(saved(20))
    assert place.gone == ["at 20"]


@pytest.mark.parametrize(("done", "gone"), [(True, ["at 10"]), (False, [])])
async def test_checkpoint_is_deleted_when_its_task_completes_but_not_if_it_fails(done: bool, gone: list[str]) -> None:
    made, place, _ = saving()
    await made.save(saved(10))
    await made.end_task(CLAIM, done)
    assert place.gone == gone


async def test_checkpoint_recorded_after_a_failure_is_retained() -> None:
    """Given a slow durable place, when the task ends without being done before its checkpoint is there, then what the
    scheduler knows of is not given up; and who waits for it to be settled waits."""
    made, place, scheduler = saving()
    place.written.clear()
    keeping = asyncio.create_task(made.save(saved(10)))
    await asyncio.sleep(0)
    settled = asyncio.create_task(made.wait_until_saved())
    await asyncio.sleep(0)
    await made.end_task(CLAIM, done=False)
    assert not settled.done()
    place.written.set()
    await asyncio.gather(keeping, settled)
    assert (scheduler.saved, place.gone) == ([10], [])


def join(worker: Any, saved_states: CheckpointWriter, link: Scheduler) -> None:
    """Have a worker serve, with a compute process that runs, and objects that stay."""
    worker._checkpoints, worker._link = saved_states, link
    worker._executor = SimpleNamespace(ready=True)
    worker._objects = SimpleNamespace(end_task=lambda lease, message, local_inputs: message)
    worker._weights = SimpleNamespace(overwritten=lambda pool: None, changed=set())
    worker._served, worker._swapper = SimpleNamespace(local_inputs=()), SimpleNamespace(target_model="")
    worker._slots = TaskSlots(1, {})
    worker._active = worker._slots.leases
    worker._next_request = lambda ended: None


async def test_failure_is_reported_after_the_pending_checkpoint_is_recorded() -> None:
    """Else whoever tries again would begin at the checkpoint before."""
    made, place, scheduler = saving()
    place.written.clear()
    worker: Any = Worker(a_worker(unix_address()))
    await worker._link.close()
    join(worker, made, scheduler)
    await worker._handle_message(saved(10))
    await worker._handle_message(TaskFailed(CLAIM, "crash", "gone"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert scheduler.failed_after == []
    place.written.set()
    await asyncio.gather(*worker._background._tasks)
    assert scheduler.failed_after == [[10]]


@pytest.mark.parametrize("answer", [Accepted(), Rejected("not yours any more", lease_lost=True)])
async def test_completion_is_reported_after_its_prefix_blocks_are_recorded(answer: Accepted | Rejected) -> None:
    """Given portions of an answer, when its task ends while the scheduler takes its time with them, then that waits for
    them, since none would be taken any more; what is not recorded is not held."""
    made, place, scheduler = saving()
    scheduler.answer = answer
    worker: Any = Worker(a_worker(unix_address()))
    await worker._link.close()
    join(worker, made, scheduler)
    worker._draining.set()
    task = task_of("req_1", "denoise.0", 1, "p", "denoise", "m", {}, final=True, extends_prefix_of="space")
    worker._slots.add(Lease(task, "w", b"token", 0.0))
    for key in ("a", "b"):
        await worker._handle_message(CachePrefix(CLAIM, key, object_for(CLAIM, key), f"digest of {key}"))
    await worker._handle_message(TaskCompleted(CLAIM, None, (), Timings()))
    for _ in range(5):
        await asyncio.sleep(0)
    assert scheduler.done_after == []
    scheduler.takes.set()
    await asyncio.gather(*worker._background._tasks)
    assert scheduler.done_after == [2]
    assert [(one.key, one.digest) for one in scheduler.kept] == [("a", "digest of a"), ("b", "digest of b")]
    assert place.shared == (["a", "b"] if isinstance(answer, Accepted) else [])
