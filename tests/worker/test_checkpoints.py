"""When a running task's state is kept, and what the step loop makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tests.worker.test_step_loop import Bench, Count
from unfuse.core.errors import ArenaFull, ConfigError, PermanentError
from unfuse.core.messages import Done, Progress, Saved, Stopped
from unfuse.core.object_ref import ObjectRef
from unfuse.core.task import Lease
from unfuse.stages.base import Checkpoint, StageInput
from unfuse.stores.tensor_store import TensorStore
from unfuse.worker.checkpoints import FAILS_S, Policy, pack, unpack
from unfuse.worker.compute_messages import Cancel, Run
from unfuse.worker.step_loop import StepLoop


@pytest.mark.parametrize(("text", "expected"), [
    ("10", (10, 0.0, False)), ("30s", (0, 30.0, False)), ("0.5s", (0, 0.5, False)), ("auto", (0, 0.0, True)),
    ("none", (0, 0.0, False)),
])  # fmt: skip
def test_a_policy_is_spoken(text: str, expected: tuple[int, float, bool]) -> None:
    policy = Policy.parse(text)
    assert (policy.steps, policy.seconds, policy.auto) == expected
    assert policy.never == (text == "none")


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "ten", "10 s", "1e3", "nones", "5m"])
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="say auto, none"):
        Policy.parse(text)


@given(st.integers(0, 100), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1e-6, 100))
def test_auto_saves_no_more_often_than_pays(steps: int, unsaved_s: float, left_s: float, cost_s: float) -> None:
    """Whenever it is due, what a failure would cost on average, over the interval or what is left, is at least half of
    what saving costs; and it is due whenever both are far longer than that."""
    policy = Policy(auto=True)
    policy.cost_s = cost_s
    interval = (2 * cost_s * FAILS_S) ** 0.5
    due = policy.due(steps, unsaved_s, left_s)
    assert not due or unsaved_s * left_s / FAILS_S >= cost_s * 0.99
    assert due or unsaved_s < interval or left_s < interval / 2


def test_a_costly_save_is_made_less_often() -> None:
    policy = Policy(auto=True)
    for _ in range(20):
        policy.took(0.001)
    assert policy.due(1, 10.0, 100.0)
    for _ in range(20):
        policy.took(1.0)
    assert not policy.due(1, 100.0, 1000.0)
    assert policy.due(1, 200.0, 1000.0)


@pytest.mark.parametrize("values", [{}, {"step": 3, "scheduler": {"list": [None, {"tensor": "x", "cpu": True}, 1.5]}}])
def test_a_checkpoint_goes_through_a_store_unchanged(values: dict[str, Any]) -> None:
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


def test_any_other_object_is_no_checkpoint() -> None:
    with pytest.raises(PermanentError, match="no checkpoint"):
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
        {"count": count}, bench.store, bench.results, bench.inbox, bench.sent.append, policy=Policy.parse(policy)
    )
    return bench, count


def kept(bench: Bench) -> list[int]:
    return [message.step for message in bench.sent if isinstance(message, Saved)]


def again(bench: Bench, lease: Lease, checkpoint: ObjectRef | None) -> Lease:
    """The task's next attempt, from a checkpoint."""
    task = msgspec.structs.replace(lease.task, attempt=2)
    bench.sent.clear()
    second = msgspec.structs.replace(lease, task=task, checkpoint=checkpoint)
    bench.inbox.put(Run(second, {}))
    return second


def last_kept(bench: Bench) -> ObjectRef:
    return [message.checkpoint for message in bench.sent if isinstance(message, Saved)][-1]


def counted(bench: Bench, done: object) -> float:
    assert isinstance(done, Done)
    assert done.output is not None
    with bench.store.get(done.output) as held:
        return float(held["x"][0])


@pytest.mark.parametrize(("policy", "expected"), [("3", [3, 6, 9]), ("none", []), ("auto", []), ("3600s", [])])
def test_states_are_kept_as_the_policy_says_and_never_at_the_end(
    tmp_path: Path, policy: str, expected: list[int]
) -> None:
    """Steps that take no time are not worth saving, unless somebody wants it."""
    bench, _ = loop(tmp_path, policy)
    done = bench.outcome(bench.run(steps=9 + 1))
    assert (kept(bench), counted(bench, done)) == (expected, 10.0)


def test_the_next_attempt_goes_on_where_the_last_one_was_saved(tmp_path: Path) -> None:
    bench, count = loop(tmp_path, "4")
    lease = bench.run(steps=10)
    bench.outcome(lease)
    count.batches.clear()

    second = again(bench, lease, last_kept(bench))
    done = bench.outcome(second)

    assert isinstance(done, Done)
    assert (len(count.batches), done.timings.steps, done.timings.resumed) == (2, 2, 8)
    assert counted(bench, done) == 10.0
    steps = [message for message in bench.sent if isinstance(message, Progress) and message.step]
    assert [step for message in steps for step in range(message.first, message.step + 1)] == [9, 10]
    assert kept(bench) == []


@pytest.mark.parametrize("lost", ["gone", "damaged", "no checkpoint"])
def test_without_its_checkpoint_a_task_starts_from_the_beginning(tmp_path: Path, lost: str) -> None:
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


def test_what_steps_aside_is_saved_first_and_once(tmp_path: Path) -> None:
    bench, _ = loop(tmp_path, "auto")
    patient = bench.run(steps=5)
    bench.turn()
    urgent = bench.run(steps=3, priority=1)
    bench.outcome(urgent)
    assert [(message.claim, message.step) for message in bench.sent if isinstance(message, Saved)] == [
        (patient.claim, 1)
    ]
    assert isinstance(bench.outcome(patient), Done)


def test_what_is_stopped_to_be_saved_says_so_in_this_order(tmp_path: Path) -> None:
    bench, _ = loop(tmp_path, "auto")
    lease = bench.run(steps=5)
    bench.turn()
    bench.turn()
    bench.inbox.put(Cancel(lease.claim, save=True))
    assert isinstance(stopped := bench.outcome(lease), Stopped)
    assert stopped.timings.steps == 2
    assert [type(message) for message in bench.sent[-2:]] == [Saved, Stopped]
    assert kept(bench) == [2]


@pytest.mark.parametrize("policy", ["none", "auto"])
def test_what_is_cancelled_is_not_saved(tmp_path: Path, policy: str) -> None:
    """Nor is anything saved for a drain where nothing ever is."""
    bench, _ = loop(tmp_path, policy)
    lease = bench.run(steps=5)
    bench.turn()
    bench.inbox.put(Cancel(lease.claim, save=policy == "none"))
    bench.outcome(lease)
    assert kept(bench) == []


class Unsaved(Saving):
    def save(self, state: tuple[StageInput, int]) -> Checkpoint | None:
        return None


@pytest.mark.parametrize("why", ["trouble", "no room", "cannot"])
def test_what_cannot_be_saved_runs_on(tmp_path: Path, why: str) -> None:
    stage = Unsaved() if why == "cannot" else Saving()
    stage.trouble = PermanentError("a secret") if why == "trouble" else None
    bench, _ = loop(tmp_path, "1", stage)
    if why == "no room":
        bench.loop._store = Full(bench.store)  # type: ignore[assignment]
    lease = bench.run(steps=4)
    while not any(isinstance(message, Done) for message in bench.sent):
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


def test_what_can_be_saved_is_dropped_at_its_next_step(tmp_path: Path) -> None:
    """Given two tasks, one of which has made no step, when they are to be dropped if they can be saved, then both are
    stopped without another step, and the one that has something to save is saved."""
    bench, count = loop(tmp_path, "auto")
    runs = bench.run(steps=5)
    bench.turn()
    waits = bench.run(steps=5, tag=1)
    for lease in (runs, waits):
        bench.inbox.put(Cancel(lease.claim, save=True, if_saved=True))
    assert all(isinstance(bench.outcome(lease), Stopped) for lease in (runs, waits))
    assert (kept(bench), len(count.batches)) == ([1], 1)
    assert counted(bench, bench.outcome(again(bench, runs, last_kept(bench)))) == 5.0


@pytest.mark.parametrize("lacks", ["room", "save", "wish"])
def test_what_cannot_be_saved_goes_on(tmp_path: Path, lacks: str) -> None:
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
        bench.inbox.put(Cancel(one.claim, save=True, if_saved=True))
    bench.turn()
    bench.inbox.put(Cancel(other.claim, save=True))
    assert isinstance(bench.outcome(other), Stopped)
    assert counted(bench, bench.outcome(lease)) == 5.0


def test_a_task_that_is_unknown_is_not_waited_for(tmp_path: Path) -> None:
    """Given a task that has ended, when it is to be dropped if it can be saved, then others go on."""
    bench, _ = loop(tmp_path, "auto")
    ended = bench.run(steps=1)
    bench.outcome(ended)
    lease = bench.run(steps=3)
    bench.inbox.put(Cancel(ended.claim, save=True, if_saved=True))
    assert isinstance(bench.outcome(lease), Done)
