"""The step loop, turn by turn, with stages that only count."""

from __future__ import annotations

import queue
import secrets
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace as changed
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from unfuse.core.codec import decode, encode
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import ArenaFull, PermanentError, ResultsUnavailable, TransientError, UnsupportedRequest
from unfuse.core.messages import CachePrefix, StepProgress, TaskCompleted, TaskFailed, TaskStopped
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import NOTHING_DERIVED, Params, Value, prefix_key
from unfuse.core.request import new_request_id
from unfuse.core.task import MAX_DELTA_BYTES, MAX_DELTAS_PER_MESSAGE, Lease, OutputDeltas
from unfuse.core.text import TextStats
from unfuse.stages.base import EncodedMedia, PrefixBlock, Stage, StageInput, StageOutput, SteppedStage, Tensors
from unfuse.stores.results import open_results
from unfuse.stores.tensor_store import TensorStore
from unfuse.testing.queue_samples import task_of
from unfuse.worker import step_loop
from unfuse.worker.batch_invariance import SETTLED_AFTER, TRUSTED_AFTER, InvarianceResults
from unfuse.worker.batch_sizes import BatchSizes
from unfuse.worker.compute_messages import CancelTask, FromCompute, RunTask, StepPlan, TaskWaits
from unfuse.worker.step_loop import StepLoop


class Count(SteppedStage["tuple[StageInput, int]"]):
    """Adds one to its input at each of `steps` steps; whoever steps through `fail_at` fails.

    It raises what `raises` says of a batch of that size, or returns `returns` for the tasks concerned.
    """

    kind = "denoise"
    uploads: tuple[str, ...] = ()

    def __init__(
        self,
        returns: Exception | None = None,
        raises: Callable[[int], Exception | None] = lambda size: None,
        fail_at: int = -1,
    ) -> None:
        self.returns, self.raises, self.fail_at = returns, raises, fail_at
        self.batches: list[list[int]] = []
        self.uploaded: list[bytes] = []

    @property
    def order(self) -> list[int]:
        return [tag for batch in self.batches for tag in batch]

    def verify(self, task: StageInput) -> None:
        if "x" not in task.tensors:
            raise PermanentError("denoise needs x")
        self.uploaded += task.uploads.values()

    def batch_key(self, task: StageInput) -> str:
        return str(task.params.get("size"))

    def start(self, task: StageInput) -> tuple[StageInput, int]:
        return task, 0

    def step(self, batch: Sequence[tuple[StageInput, int]]) -> list[tuple[StageInput, int] | Exception]:
        if (error := self.raises(len(batch))) and any(step + 1 == self.fail_at for _, step in batch):
            raise error
        self.batches.append([int(task.params["tag"] or 0) for task, _ in batch])
        return [
            self.returns if step + 1 == self.fail_at and self.returns and task.params["tag"] == 0 else (task, step + 1)
            for task, step in batch
        ]

    def progress(self, state: tuple[StageInput, int]) -> tuple[int, int]:
        return state[1], int(state[0].params["steps"] or 0)

    def preview(self, state: tuple[StageInput, int]) -> EncodedMedia | None:
        if state[1] == self.fail_at:
            raise ValueError("no picture")
        return EncodedMedia("image/jpeg", f"step {state[1]}".encode())

    def finish(self, state: tuple[StageInput, int]) -> StageOutput:
        x = state[0].tensors["x"]
        assert x is not None
        return StageOutput({"x": x + state[1], "nothing": None})


class Grow(Count):
    """A final stage, whose result can be read while it grows."""

    kind = "vae_decode"

    def video_fragment(self, state: tuple[StageInput, int]) -> bytes:
        return b"" if state[1] == self.fail_at else f"part {state[1]};".encode()

    def finish(self, state: tuple[StageInput, int]) -> StageOutput:
        return StageOutput(media=(EncodedMedia("text/plain", b"whole"),))


class Speak(Count):
    """A stage whose output is read while it grows: at each step by so many pieces as `says` has of it."""

    says = (1, 0, 2)

    def start(self, task: StageInput) -> tuple[StageInput, int]:
        return task, sum(list(accumulate(self.says))[step] <= len(task.recorded) for step in range(len(self.says)))

    def new_chunks(self, state: tuple[StageInput, int]) -> Sequence[bytes]:
        return [b"step %d" % state[1]] * self.says[state[1] - 1]


class Print(Stage):
    """A final stage: writes its input as text."""

    kind = "vae_decode"

    def verify(self, task: StageInput) -> None:
        """Takes anything."""

    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        return [StageOutput(media=(EncodedMedia("text/plain", str(task.tensors["x"]).encode()),)) for task in batch]


class Blocks(Count):
    """Completes a prefix block at each step; the one numbered `missing` cannot be read."""

    can_overlap = True

    def __init__(self, missing: int | None = None) -> None:
        super().__init__()
        self.missing = missing

    def prefix_blocks(self, state: tuple[StageInput, int]) -> Sequence[PrefixBlock]:
        number = state[1] - 1
        return [PrefixBlock(number, partial(self._read, number), f"digest {number}")]

    def _read(self, number: int) -> Tensors:
        if number == self.missing:
            raise RuntimeError("no memory for a copy")
        return {"x": np.full(1, number)}


class Texts:
    """What stages have of texts, which is nothing."""

    retracted = 0

    def load(self) -> TextStats:
        return TextStats()

    def leftovers(self) -> dict[str, int]:
        return {}

    def end_all(self) -> None:
        pass


class Bench:
    """A loop with its surroundings."""

    def __init__(self, folder: Path, stages: Mapping[str, Stage], batch: int, overlapped: bool = False) -> None:
        self.store = TensorStore.create("memory", owner="w", node="n")
        self.results = open_results(f"disk:{folder}")
        self.inbox: queue.SimpleQueue[RunTask | CancelTask] = queue.SimpleQueue()
        self.sent: list[FromCompute] = []
        own = self.store, self.results, self.inbox, self.sent.append
        self.loop = StepLoop(stages, *own, batch, overlapped=overlapped)
        self.input = self.store.put({"x": np.zeros(3, "float32")}, request=new_request_id(), stage="before", attempt=1)

    def run(
        self,
        pool: str = "count",
        *refs: ObjectRef,
        steps: int = 3,
        tag: int = 0,
        priority: int = 0,
        prefixes: tuple[str, ...] = (),
        extends: str = "",
        derived: DerivedFacts = NOTHING_DERIVED,
        **more: Value,
    ) -> Lease:
        own: Params = {"steps": steps, "tag": tag, **more}
        task = task_of(
            new_request_id(),
            "stage",
            1,
            pool,
            pool,
            "m",
            own,
            refs or (self.input,),
            final=pool == "print",
            priority=priority,
            prefixes=prefixes,
            extends_prefix_of=extends,
            derived=derived,
        )
        lease = Lease(task, "w", secrets.token_bytes(16), 0.0)
        self.inbox.put(RunTask(lease, {}))
        return lease

    def turn(self) -> None:
        """Turn until a step is made, or nothing is left to do now: what comes in has turns of its own."""
        while True:
            turn = self.loop.decide()
            self.loop.carry_out(turn)
            if turn.step or not self.loop._jobs:
                return

    def outcome(self, lease: Lease) -> TaskCompleted | TaskFailed | TaskStopped:
        """Turn until a task has ended."""
        for _ in range(1000):
            ends = [
                m
                for m in self.sent
                if isinstance(m, TaskCompleted | TaskFailed | TaskStopped) and m.claim == lease.claim
            ]
            if ends:
                (end,) = ends
                return end
            self.turn()
        raise AssertionError("the task did not end")


def bench(folder: Path, batch: int = 1, **options: Any) -> tuple[Bench, Count]:
    count = Count(**options)
    return Bench(folder, {"count": count, "print": Print()}, batch), count


class Large(BatchSizes):
    """For whom a larger batch always pays off, whatever was measured."""

    def size(self, key: Hashable, waiting: int) -> int:
        return min(waiting, self._of(key).most)


def grown(folder: Path, **options: Any) -> tuple[Bench, Count]:
    """A loop that has found out that four at a time pay off."""
    loop, count = bench(folder, batch=4, **options)
    loop.loop._batches.sizes = Large(4)
    return loop, count


def test_waiting_task_yields_to_others_regardless_of_priority(tmp_path: Path) -> None:
    """Given an urgent task that waits for something, then others step; where nobody else is left, it does."""

    class Waiting(Count):
        def waits(self, state: tuple[StageInput, int]) -> bool:
            return state[0].params["tag"] == 1

    count = Waiting()
    loop = Bench(tmp_path, {"count": count}, 1)
    urgent, other = loop.run(tag=1, priority=9), loop.run(tag=2)
    assert isinstance(loop.outcome(other), TaskCompleted)
    assert count.order == [2, 2, 2]
    assert isinstance(loop.outcome(urgent), TaskCompleted)


@dataclass(frozen=True)
class Tagged:
    """A request between two steps: all that it computed so far."""

    tag: int
    steps: int
    found: tuple[float, ...] = ()


class Shared(SteppedStage[Tagged]):
    """A stage of which a request's numbers depend on how many share the forward, from `sloppy` on."""

    kind = "denoise"

    def __init__(self, sloppy: int = 99, raises: Callable[[int], Exception | None] = lambda size: None) -> None:
        self.sloppy, self.raises = sloppy, raises
        self.batches: list[list[int]] = []

    def verify(self, task: StageInput) -> None:
        """Takes anything."""

    def exact_batch_key(self, state: Tagged) -> Hashable | None:
        return state.tag // 10 if state.tag >= 0 else None

    def start(self, task: StageInput) -> Tagged:
        return Tagged(int(task.params["tag"] or 0), int(task.params["steps"] or 0))

    def step(self, batch: Sequence[Tagged]) -> list[float | Exception]:
        if error := self.raises(len(batch)):
            raise error
        self.batches.append([state.tag for state in batch])
        return [state.tag + len(state.found) + 0.5 * (len(batch) >= self.sloppy) for state in batch]

    def advance(self, state: Tagged, result: float) -> Tagged:
        return changed(state, found=(*state.found, result))

    def progress(self, state: Tagged) -> tuple[int, int]:
        return len(state.found), state.steps

    def finish(self, state: Tagged) -> StageOutput:
        return StageOutput({"found": torch.tensor(state.found)})


def exact(folder: Path, stage: Shared, batch: int = 4) -> Bench:
    """A loop of an exact pool, for which a larger batch always pays off."""
    loop = Bench(folder, {"count": stage}, batch)
    sure = InvarianceResults(folder / "exactness.json", chance=lambda: 1.0)
    own = loop.store, loop.results, loop.inbox, loop.sent.append
    loop.loop = StepLoop({"count": stage}, *own, batch, exactness=sure)
    loop.loop._batches.sizes = Large(batch)
    return loop


def found(loop: Bench, lease: Lease) -> list[float]:
    done = loop.outcome(lease)
    assert isinstance(done, TaskCompleted)
    assert done.output is not None
    with loop.store.get(done.output, as_torch=True) as held:
        return [float(one) for one in held["found"]]  # type: ignore[union-attr]


def test_exact_loop_compares_before_batching_and_stores_the_result(tmp_path: Path) -> None:
    stage = Shared()
    loop = exact(tmp_path, stage)
    leases = [loop.run(tag=tag, steps=TRUSTED_AFTER + 2) for tag in (1, 2, 3, 4)]
    assert [found(loop, lease) for lease in leases] == [
        [float(t + s) for s in range(TRUSTED_AFTER + 2)] for t in (1, 2, 3, 4)
    ]
    assert stage.batches == [*TRUSTED_AFTER * [[1], [2], [3], [4], [1, 2, 3, 4]], [1, 2, 3, 4], [1, 2, 3, 4]]

    again = Shared()
    loop = exact(tmp_path, again)
    for lease in [loop.run(tag=tag, steps=1) for tag in (4, 5, 6, 7)]:
        found(loop, lease)
    assert again.batches == [[4, 5, 6, 7]], "another process, later"


def test_unbatchable_texts_run_round_robin_and_other_tasks_in_order(tmp_path: Path) -> None:
    for together, batches in ((True, [[-1], [-2], [-3]] * 3), (False, [[-1]] * 3 + [[-2]] * 3 + [[-3]] * 3)):
        stage = Shared()
        stage.all_together = together
        loop = exact(tmp_path, stage)
        leases = [loop.run(tag=tag, steps=3) for tag in (-1, -2, -3)]
        assert [len(found(loop, lease)) for lease in leases] == [3, 3, 3]
        assert stage.batches == batches


def test_batch_that_changes_bytes_is_never_used_for_results(tmp_path: Path) -> None:
    stage = Shared(sloppy=4)
    loop = exact(tmp_path, stage)
    leases = [loop.run(tag=tag, steps=8) for tag in (1, 2, 3, 4)]
    assert [found(loop, lease) for lease in leases] == [[float(t + s) for s in range(8)] for t in (1, 2, 3, 4)]
    assert sum(len(batch) == 4 for batch in stage.batches) == 1, "compared once, and nobody looks for the function"
    assert any(len(batch) == 2 for batch in stage.batches), "and a smaller one may do"
    assert loop.loop._batches.sizes.size(("count", stage.batch_key(StageInput({}, {})), 0), 4) <= 2, (
        "and nobody asks for the larger one again"
    )


class Timed(Shared):
    """Each forward takes one second by the clock of `monkeypatch`, however many share it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seconds = 0.0
        monkeypatch.setattr("unfuse.worker.batches.time", SimpleNamespace(monotonic=lambda: self.seconds))

    def step(self, batch: Sequence[Tagged]) -> list[float | Exception]:
        self.seconds += 1.0
        return super().step(batch)


def share_of(loop: Bench, lease: Lease) -> float:
    done = loop.outcome(lease)
    assert isinstance(done, TaskCompleted)
    return done.timings.share_s


def test_tasks_in_a_batch_are_charged_their_share_of_its_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Timed(monkeypatch)
    loop = Bench(tmp_path, {"count": stage}, 2)
    loop.loop._batches.sizes = Large(2)
    long, short = loop.run(tag=1, steps=6), loop.run(tag=2, steps=2)
    shares = share_of(loop, long), share_of(loop, short)
    assert stage.seconds == 6.0, "of eight steps, two pairs shared a forward"
    assert shares == (pytest.approx(5.0, abs=0.5), pytest.approx(1.0, abs=0.5))
    assert sum(shares) == pytest.approx(stage.seconds, abs=0.5)


def test_invariance_comparisons_are_not_charged_to_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Timed(monkeypatch)
    loop = exact(tmp_path, stage, batch=2)
    leases = [loop.run(tag=tag, steps=1) for tag in (1, 2)]
    shares = [share_of(loop, lease) for lease in leases]
    assert stage.seconds == 3.0, "each alone, and both together to compare"
    assert shares == [pytest.approx(1.0, abs=0.4)] * 2
    (result,) = loop.loop._batches._exactness.all()  # type: ignore[union-attr]
    assert (result.alone_s, result.together_s) == (1.0, 0.5), "what each request costs, alone and in a pair"


def test_exact_loop_uses_only_power_of_two_batch_sizes(tmp_path: Path) -> None:
    stage = Shared()
    loop = exact(tmp_path, stage, batch=7)
    own = loop.store, loop.results, loop.inbox, loop.sent.append
    loop.loop = StepLoop({"count": stage}, *own, batch=7, exactness=InvarianceResults(tmp_path / "exactness.json"))
    for lease in [loop.run(tag=tag, steps=40 + tag) for tag in range(7)]:
        loop.outcome(lease)
    assert {1, 2, 4} >= {len(batch) for batch in stage.batches} > {1}


def test_only_tasks_with_equal_exact_batch_keys_share_a_forward(tmp_path: Path) -> None:
    stage = Shared()
    loop = exact(tmp_path, stage)
    for lease in [loop.run(tag=tag, steps=5) for tag in (1, 11, 2, 12, -1, -2)]:
        loop.outcome(lease)
    assert {tuple(sorted(batch)) for batch in stage.batches if len(batch) > 1} == {(1, 2), (11, 12)}


def test_comparison_that_runs_out_of_memory_does_not_affect_tasks(tmp_path: Path) -> None:
    stage = Shared(raises=lambda size: torch.OutOfMemoryError() if size > 2 else None)
    loop = exact(tmp_path, stage)
    leases = [loop.run(tag=tag, steps=8) for tag in (1, 2, 3, 4)]
    assert [found(loop, lease) for lease in leases] == [[float(t + s) for s in range(8)] for t in (1, 2, 3, 4)]
    assert max(map(len, stage.batches)) == 2


def test_fused_cfg_halves_that_run_out_of_memory_run_separately(tmp_path: Path) -> None:
    stage = Shared()
    loop = exact(tmp_path, stage)
    stage.differs_alone = True
    lease = loop.run(tag=1, steps=TRUSTED_AFTER + 3)
    for _ in range(TRUSTED_AFTER + 1):
        loop.turn()
    stage.raises = lambda size: torch.OutOfMemoryError()
    stage.step_alone = lambda state: state.tag + len(state.found)  # type: ignore[method-assign]
    assert found(loop, lease) == [float(1 + step) for step in range(TRUSTED_AFTER + 3)]


def test_failed_comparison_is_not_retried(tmp_path: Path) -> None:
    asked = Counter[int]()

    def fails(size: int) -> Exception | None:
        asked[size] += 1
        return RuntimeError("no kernel for that") if size == 2 else None

    loop = exact(tmp_path, Shared(raises=fails), batch=2)
    leases = [loop.run(tag=tag, steps=5) for tag in (1, 2)]
    assert [found(loop, lease) for lease in leases] == [[float(t + s) for s in range(5)] for t in (1, 2)]
    assert asked[2] == 1


def settled(folder: Path, stage: Shared, *, or_batched: bool) -> Bench:
    """A loop after comparisons of three exact batch keys, all of which showed a difference."""
    loop = exact(folder, stage, batch=2)
    sure = InvarianceResults(folder / "exactness.json", chance=lambda: 1.0, or_batched=or_batched)
    loop.loop = StepLoop({"count": stage}, loop.store, loop.results, loop.inbox, loop.sent.append, 2, exactness=sure)
    loop.loop._batches.sizes = Large(2)
    for exact_key in range(SETTLED_AFTER):
        for lease in [loop.run(tag=10 * exact_key + tag, steps=2) for tag in (1, 2)]:
            found(loop, lease)
    pairs = [batch for batch in stage.batches if len(batch) == 2]
    assert pairs[:SETTLED_AFTER] == [[1, 2], [11, 12], [21, 22]], "each key was compared once"
    assert len(pairs) == SETTLED_AFTER + or_batched
    stage.batches.clear()
    return loop


def mode_of(loop: Bench) -> str:
    return loop.loop._batches.sharing["count"].mode


def test_pool_with_three_differing_keys_computes_each_request_alone(tmp_path: Path) -> None:
    stage = Shared(sloppy=2)
    loop = settled(tmp_path, stage, or_batched=False)
    leases = [loop.run(tag=tag, steps=2) for tag in (41, 42)]
    assert [found(loop, lease) for lease in leases] == [[41.0, 42.0], [42.0, 43.0]]
    assert max(map(len, stage.batches)) == 1, "a new key is not compared"
    assert mode_of(loop) == "alone"

    again = Shared(sloppy=2)
    loop = exact(tmp_path, again, batch=2)
    for lease in [loop.run(tag=tag, steps=1) for tag in (51, 52)]:
        found(loop, lease)
    assert max(map(len, again.batches)) == 1, "nor in another process, later"
    assert mode_of(loop) == "alone"


def test_pool_with_three_differing_keys_falls_back_to_batched_where_allowed(tmp_path: Path) -> None:
    stage = Shared(sloppy=2)
    stage.exact = True
    loop = settled(tmp_path, stage, or_batched=True)
    leases = [loop.run(tag=tag, steps=1) for tag in (41, 42, 1, 2)]
    assert [found(loop, lease) for lease in leases] == [[41.5], [42.5], [1.5], [2.5]]
    assert stage.batches == [[41, 42], [1, 2]], "also of a key that showed a difference"
    assert mode_of(loop) == "batched"
    assert not stage.exact


def test_requests_of_other_exact_keys_share_a_forward_once_a_pool_is_batched(tmp_path: Path) -> None:
    stage = Shared(sloppy=2)
    loop = settled(tmp_path, stage, or_batched=True)
    leases = [loop.run(tag=tag, steps=1) for tag in (41, 1)]
    assert [found(loop, lease) for lease in leases] == [[41.5], [1.5]]
    assert stage.batches == [[41, 1]]


def test_comparison_that_a_rank_fails_shows_no_difference(tmp_path: Path) -> None:
    error = TimeoutError("rank 1 is gone")
    loop = exact(tmp_path, Shared(raises=lambda size: error if size == 2 else None), batch=2)
    for lease in [loop.run(tag=tag, steps=1) for tag in (1, 2)]:
        loop.outcome(lease)
    assert not (tmp_path / "exactness.json").exists()


@pytest.mark.parametrize("size", [1, 2], ids=["alone", "in a comparison"])
def test_device_error_ends_the_loop_and_is_neither_a_failure_nor_a_difference(tmp_path: Path, size: int) -> None:
    error = RuntimeError("CUDA error: misaligned address")
    loop = exact(tmp_path, Shared(raises=lambda number: error if number == size else None), batch=2)
    leases = [loop.run(tag=tag, steps=1) for tag in (1, 2)]
    with pytest.raises(RuntimeError, match="misaligned address"):
        loop.outcome(leases[1])
    assert not [message for message in loop.sent if isinstance(message, TaskFailed)]
    assert not (tmp_path / "exactness.json").exists()


def test_stepped_task_completes_with_readable_output(tmp_path: Path) -> None:
    loop, _ = bench(tmp_path)
    done = loop.outcome(loop.run(steps=5))
    assert isinstance(done, TaskCompleted)
    assert done.output is not None
    with loop.store.get(done.output, as_torch=True) as held:
        assert torch.equal(held["x"], torch.full((3,), 5.0))
        assert held["nothing"] is None
    assert done.timings.run_s > 0
    assert (done.timings.steps, done.timings.resumed) == (5, 0)


def test_start_and_every_step_are_reported_once_in_order(tmp_path: Path) -> None:
    loop, _ = bench(tmp_path)
    lease = loop.run(steps=50)
    loop.outcome(lease)
    reports = [message for message in loop.sent if isinstance(message, StepProgress)]
    assert reports[0] == StepProgress(lease.claim, 0, 0, 0)
    listed = [step for report in reports[1:] for step in range(report.first, report.step + 1)]
    assert listed == list(range(1, 51))
    assert len(reports) < 50  # quick steps share a message


def test_final_stage_writes_its_results_before_completion(tmp_path: Path) -> None:
    loop, _ = bench(tmp_path)
    lease = loop.run("print")
    done = loop.outcome(lease)
    assert isinstance(done, TaskCompleted)
    assert (done.output, [file.index for file in done.results]) == (None, [0])
    assert loop.results.read(lease.task.request, 0) == b"tensor([0., 0., 0.])"


def test_tasks_run_by_priority_then_in_order_of_arrival(tmp_path: Path) -> None:
    loop, count = bench(tmp_path)
    leases = [loop.run(tag=1), loop.run(tag=2), loop.run(tag=3, priority=5)]
    for lease in leases:
        assert isinstance(loop.outcome(lease), TaskCompleted)
    assert count.order == [3, 3, 3, 1, 1, 1, 2, 2, 2]


def test_cancelled_task_stops_at_its_next_step_and_others_continue(tmp_path: Path) -> None:
    loop, count = bench(tmp_path)
    first, second = loop.run(steps=900, tag=1), loop.run(steps=2, tag=2)
    loop.turn()
    loop.inbox.put(CancelTask(first.claim))
    stopped = loop.outcome(first)
    assert isinstance(stopped, TaskStopped)
    assert isinstance(loop.outcome(second), TaskCompleted)
    assert count.order == [1, 2, 2]
    assert (stopped.timings.steps, stopped.timings.share_s) == (1, stopped.timings.run_s) != (1, 0.0)


def test_cancel_of_a_completed_task_is_ignored(tmp_path: Path) -> None:
    loop, _ = bench(tmp_path)
    lease = loop.run()
    loop.outcome(lease)
    loop.inbox.put(CancelTask(lease.claim))
    assert isinstance(loop.outcome(loop.run()), TaskCompleted)
    assert not any(isinstance(message, TaskStopped) for message in loop.sent)


REASONS = {UnsupportedRequest: "refused", torch.OutOfMemoryError: "out_of_memory"}


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (PermanentError("cannot be"), "permanent", "cannot be"),
        (UnsupportedRequest("not with this model"), "permanent", "not with this model"),
        (ArenaFull(10, 5, 20), "transient", "--arena"),
        (RuntimeError("library trouble"), "transient", "RuntimeError: library trouble"),
        (OSError("caf\udce9.bin"), "transient", "OSError: caf?.bin"),
        (
            torch.OutOfMemoryError("Tried to allocate 20.00 GiB"),
            "permanent",
            "Tried to allocate 20.00 GiB; reduce the request",
        ),
    ],
)
def test_exception_type_decides_the_reported_failure_kind(
    tmp_path: Path, error: Exception, kind: str, says: str
) -> None:
    loop, count = bench(tmp_path, raises=lambda _: error, fail_at=2)
    failed = loop.outcome(loop.run())
    assert isinstance(failed, TaskFailed)
    assert (failed.kind, says in failed.message, "Traceback" in failed.evidence) == (kind, True, True)
    assert failed.reason == REASONS.get(type(error), "")
    encode(failed)
    count.fail_at = -1
    assert isinstance(loop.outcome(loop.run()), TaskCompleted)


def test_lost_input_is_reported_with_its_object_id(tmp_path: Path) -> None:
    loop, _ = bench(tmp_path)
    loop.store.delete(loop.input)
    failed = loop.outcome(loop.run())
    assert isinstance(failed, TaskFailed)
    assert (failed.kind, failed.object_id) == ("object_lost", loop.input.id)


def test_wrong_inputs_fail_the_task_permanently(tmp_path: Path) -> None:
    loop, _ = bench(tmp_path)
    other = loop.store.put({"y": np.zeros(1)}, request=new_request_id(), stage="before", attempt=1)
    failed = loop.outcome(loop.run("count", other))
    assert isinstance(failed, TaskFailed)
    assert (failed.kind, failed.message) == ("permanent", "denoise needs x")


@pytest.mark.parametrize("ending", ["done", "failed", "stopped"])
def test_inputs_are_released_whether_a_task_completes_fails_or_stops(tmp_path: Path, ending: str) -> None:
    loop, _ = bench(tmp_path, raises=lambda _: PermanentError("no"), fail_at=1 if ending == "failed" else -1)
    lease = loop.run()
    if ending == "stopped":
        loop.inbox.put(CancelTask(lease.claim))
    loop.outcome(lease)
    for request in loop.store.stored_requests():
        loop.store.release(request)
    assert loop.store.usage().used == 0


def test_tasks_of_one_batch_key_join_and_leave_between_steps(tmp_path: Path) -> None:
    loop, count = grown(tmp_path)
    leases = [loop.run(tag=1, steps=2), loop.run(tag=2, steps=4)]
    loop.turn()
    leases += [loop.run(tag=3, steps=2), loop.run(tag=4, steps=2, size="other")]

    for lease, steps in zip(leases, (2, 4, 2, 2), strict=True):
        done = loop.outcome(lease)
        assert isinstance(done, TaskCompleted)
        assert done.output is not None
        with loop.store.get(done.output, as_torch=True) as held:
            assert torch.equal(held["x"], torch.full((3,), float(steps)))
    assert count.batches == [[1, 2], [1, 2, 3], [2, 3], [2], [4], [4]]


def test_pools_run_round_robin_and_urgent_tasks_first(tmp_path: Path) -> None:
    """Given a long task, then what comes later of another stage is done beside it, and what is urgent before both."""
    loop, count = bench(tmp_path)
    loop.loop._factory._stages["other"] = other = Count()
    long = loop.run(tag=1, steps=9)
    loop.turn()
    short = loop.run("other", tag=2, steps=3)
    assert isinstance(loop.outcome(short), TaskCompleted)
    assert (len(other.order), 3 <= len(count.order) <= 4) == (3, True)
    urgent = loop.run("other", tag=3, steps=3, priority=1)
    before = len(count.order)
    assert isinstance(loop.outcome(urgent), TaskCompleted)
    assert len(count.order) == before
    assert isinstance(loop.outcome(long), TaskCompleted)


def test_one_step_tasks_run_before_the_next_step_of_longer_tasks(tmp_path: Path) -> None:
    loop, count = bench(tmp_path)
    long = loop.run(tag=1, steps=5)
    loop.turn()
    loop.loop._factory._stages["once"] = Print()
    first, shown = loop.run("once"), [loop.run("print") for _ in range(2)]
    for lease in shown:
        assert isinstance(loop.outcome(lease), TaskCompleted)
    assert not [
        m for m in loop.sent if isinstance(m, TaskFailed | TaskCompleted) and m.claim == first.claim
    ]  # what ends requests
    loop.outcome(first)
    assert len(count.order) == 1
    assert isinstance(loop.outcome(long), TaskCompleted)


@pytest.mark.parametrize(("most", "sizes"), [(0, {20}), (6, {6})])
def test_all_together_stage_batches_all_tasks_from_the_first_step(tmp_path: Path, most: int, sizes: set[int]) -> None:
    """Given twenty tasks of such a stage, when nobody says how many may share a forward, then all do from the first."""
    loop, count = bench(tmp_path, batch=most)
    count.all_together = True
    leases = [loop.run(tag=tag) for tag in range(20)]
    for _ in range(3):
        loop.turn()
    assert {len(batch) for batch in count.batches} == sizes
    for lease in leases:
        assert isinstance(loop.outcome(lease), TaskCompleted)


def test_all_together_batch_shrinks_to_fit_in_memory(tmp_path: Path) -> None:
    loop, count = bench(
        tmp_path, batch=0, raises=lambda size: torch.OutOfMemoryError() if size > 5 else None, fail_at=2
    )
    count.all_together = True
    for lease in [loop.run(tag=tag) for tag in range(20)]:
        assert isinstance(loop.outcome(lease), TaskCompleted)
    assert len(count.batches[0]) == 20
    assert {len(batch) for batch in count.batches[1:]} == {5}


def test_long_prompt_prefill_alternates_with_decoding(tmp_path: Path) -> None:
    """Given a text that is written, when a prompt of several chunks comes, then they take turns."""
    loop = Bench(tmp_path, {"print": Grow(), "count": Count()}, 1)
    loop.loop._factory._stages["print"].texts = loop.loop._factory._stages["count"].texts = Texts()
    text = loop.run("print", steps=9)
    loop.turn()
    assert isinstance(loop.outcome(loop.run(steps=3)), TaskCompleted)
    assert not any(isinstance(message, TaskCompleted) and message.claim == text.claim for message in loop.sent)
    assert isinstance(loop.outcome(text), TaskCompleted)


def test_prefill_that_waits_for_memory_lets_decoding_finish(tmp_path: Path) -> None:
    """Given a text that is written, when a short prompt comes for which there is no room before that ends, then it
    ends, and the prompt is computed."""

    class Waiting(Count):
        def step(self, batch: Sequence[tuple[StageInput, int]]) -> list[tuple[StageInput, int] | Exception]:
            return [(task, step + ended()) for task, step in batch]

    loop = Bench(tmp_path, {"print": Grow(), "count": Waiting()}, 1)
    loop.loop._factory._stages["print"].texts = loop.loop._factory._stages["count"].texts = Texts()
    text = loop.run("print", steps=9)

    def ended() -> bool:
        return any(isinstance(message, TaskCompleted) and message.claim == text.claim for message in loop.sent)

    loop.turn()
    assert isinstance(loop.outcome(loop.run(steps=1)), TaskCompleted)
    assert ended()


def test_batch_size_1_runs_each_task_alone(tmp_path: Path) -> None:
    loop, count = bench(tmp_path)
    for lease in [loop.run(tag=tag) for tag in (1, 2)]:
        loop.outcome(lease)
    assert count.batches == [[1], [1], [1], [2], [2], [2]]


def test_running_batch_is_preempted_by_a_more_urgent_task_and_resumes(tmp_path: Path) -> None:
    loop, count = grown(tmp_path)
    patient = [loop.run(tag=1, steps=3), loop.run(tag=2, steps=3)]
    loop.turn()
    urgent = loop.run(tag=9, steps=2, priority=1)
    for lease in (*patient, urgent):
        assert isinstance(loop.outcome(lease), TaskCompleted)
    assert count.batches == [[1, 2], [9], [9], [1, 2], [1, 2]]


def test_task_that_fails_in_a_batch_does_not_affect_the_others(tmp_path: Path) -> None:
    loop, count = grown(tmp_path, returns=PermanentError("not finite at step 2 of 3"), fail_at=2)
    bad, good = loop.run(tag=0), loop.run(tag=1)
    failed = loop.outcome(bad)
    assert isinstance(failed, TaskFailed)
    assert (failed.kind, failed.message) == ("permanent", "not finite at step 2 of 3")
    assert isinstance(loop.outcome(good), TaskCompleted)
    assert count.batches == [[0, 1], [0, 1], [1]]


def test_batch_that_runs_out_of_memory_is_halved_and_all_tasks_complete(tmp_path: Path) -> None:
    loop, count = grown(tmp_path, raises=lambda size: torch.OutOfMemoryError() if size > 2 else None, fail_at=2)
    leases = [loop.run(tag=tag) for tag in range(1, 5)]
    for lease in leases:
        assert isinstance(loop.outcome(lease), TaskCompleted)
    assert count.batches[0] == [1, 2, 3, 4]
    assert all(len(batch) <= 2 for batch in count.batches[1:])


def test_tasks_of_a_failed_batch_are_retried_one_by_one(tmp_path: Path) -> None:
    loop, _ = grown(tmp_path, raises=lambda size: RuntimeError("bad mate") if size > 1 else None, fail_at=1)
    leases = [loop.run(tag=tag) for tag in (1, 2, 3)]
    assert all(isinstance(loop.outcome(lease), TaskCompleted) for lease in leases)


def test_previews_are_attached_and_reported_every_n_steps(tmp_path: Path) -> None:
    loop, _ = bench(tmp_path, fail_at=4)
    lease = loop.run(steps=7, preview_every=2)
    assert isinstance(loop.outcome(lease), TaskCompleted)

    told = [step for message in loop.sent if isinstance(message, StepProgress) for step in message.previews]
    assert told == [2, 6]
    assert loop.results.attached(lease.task.request, "preview-stage-6") == b"step 6"


def test_no_previews_are_created_by_default(tmp_path: Path) -> None:
    loop, _ = bench(tmp_path)
    lease = loop.run(steps=4)
    loop.outcome(lease)
    assert all(message.previews == () for message in loop.sent if isinstance(message, StepProgress))


def growing(folder: Path, fail_at: int = -1) -> tuple[Bench, Grow]:
    grow = Grow(fail_at=fail_at)
    return Bench(folder, {"print": grow, "count": Count()}, 1), grow


def names(folder: Path) -> set[str]:
    """What is kept of all requests."""
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_result_parts_are_stored_before_their_steps_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unfuse.worker.step_reporter.PROGRESS_INTERVAL_S", 0.0)
    loop, _ = growing(tmp_path)
    lease, told = loop.run("print", steps=4), list[int]()

    def send(message: FromCompute) -> None:
        if isinstance(message, StepProgress):
            told.append(message.step)
            for step in range(1, min(message.step, 3) + 1):
                assert loop.results.attached(lease.task.request, f"part-1-{step}") == f"part {step};".encode()
        loop.sent.append(message)

    loop.loop._send = loop.loop._reporter._send = send
    assert isinstance(loop.outcome(lease), TaskCompleted)
    assert told == [0, 1, 2, 3, 4]
    assert names(tmp_path) == {"attached-part-1-1", "attached-part-1-2", "attached-part-1-3", "0"}
    assert loop.results.read(lease.task.request, 0) == b"whole"


@pytest.mark.parametrize("recorded", [(), (b"step 1",)])
def test_output_deltas_continue_the_recorded_ones_before_completion(
    recorded: tuple[bytes, ...], tmp_path: Path
) -> None:
    loop = Bench(tmp_path, {"count": Speak()}, 1)
    lease = loop.run()
    loop.inbox.put(replace(loop.inbox.get(), recorded=recorded))
    assert isinstance(loop.outcome(lease), TaskCompleted)
    whole = [(0, (b"step 1",)), (1, (b"step 3", b"step 3"))]
    assert [(m.offset, m.deltas) for m in loop.sent if isinstance(m, OutputDeltas)] == whole[len(recorded) :]
    assert all(m.claim == lease.claim for m in loop.sent if isinstance(m, OutputDeltas))
    assert isinstance(loop.sent[-1], TaskCompleted)


@pytest.mark.parametrize("pieces", [[b"x"] * (MAX_DELTAS_PER_MESSAGE + 1), [bytes(MAX_DELTA_BYTES + 1)]])
def test_output_deltas_over_the_limit_fail_the_task_permanently(pieces: list[bytes], tmp_path: Path) -> None:
    speak = Speak()
    speak.new_chunks = lambda state: pieces  # type: ignore[method-assign]
    loop = Bench(tmp_path, {"count": speak}, 1)
    failed = loop.outcome(loop.run())
    assert isinstance(failed, TaskFailed)
    assert (failed.kind, "cannot be recorded" in failed.message) == ("permanent", True)


@pytest.mark.parametrize(("missing", "kept"), [(None, ["a", "b"]), (0, ["b"])])
def test_task_completes_even_if_a_prefix_block_cannot_be_stored(
    missing: int | None, kept: list[str], tmp_path: Path
) -> None:
    loop = Bench(tmp_path, {"count": Blocks(missing)}, batch=1)
    lease = loop.run(prefixes=("a", "b"))
    assert isinstance(loop.outcome(lease), TaskCompleted)
    assert [said.key for said in loop.sent if isinstance(said, CachePrefix)] == kept


@pytest.mark.parametrize("overlapped", [False, True])
def test_prefix_blocks_are_stored_under_given_or_digest_keys(tmp_path: Path, overlapped: bool) -> None:
    """Given a task with a key for its first block, when it may add others, then those have the keys of their digests in
    its space, and each is there when it is told of."""
    loop = Bench(tmp_path, {"count": Blocks()}, 1, overlapped)
    lease = loop.run(prefixes=("a",), extends="space")
    assert isinstance(loop.outcome(lease), TaskCompleted)
    kept = [said for said in loop.sent if isinstance(said, CachePrefix)]
    expected = [("a", ""), *((prefix_key("space", f"digest {number}"), f"digest {number}") for number in (1, 2))]
    assert [(said.key, said.digest) for said in kept] == expected
    assert [loop.store.get(said.output)["x"].item() for said in kept] == [0, 1, 2]


def test_prefix_is_not_extended_from_a_reduced_precision_input(tmp_path: Path) -> None:
    """Not behind an input that was stored in fewer bits, and not where nobody asks for it."""
    given = list[bool]()

    class Asked(Blocks):
        def start(self, task: StageInput) -> tuple[StageInput, int]:
            given.append(task.extends)
            return super().start(task)

    loop = Bench(tmp_path, {"count": Asked()}, 1)
    x = {"x": np.zeros(3, "float32")}
    narrow = loop.store.put(x, request=new_request_id(), stage="before", attempt=1, encoding="fp16")
    for lease in (loop.run(extends="space"), loop.run("count", narrow, extends="space"), loop.run()):
        loop.outcome(lease)
    assert given == [True, False, False]


def test_step_without_a_fragment_stores_no_part(tmp_path: Path) -> None:
    loop, _ = growing(tmp_path, fail_at=2)
    assert isinstance(loop.outcome(loop.run("print", steps=4)), TaskCompleted)
    assert names(tmp_path) == {"attached-part-1-1", "attached-part-1-3", "0"}


def test_no_parts_are_stored_after_one_fails_and_result_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, _ = growing(tmp_path)
    attach = loop.results.attach

    def full(request: str, name: str, data: bytes, *, durable: bool = True) -> None:
        if name == "part-1-2":
            raise ResultsUnavailable("no room")
        attach(request, name, data, durable=durable)

    monkeypatch.setattr(loop.results, "attach", full)
    lease = loop.run("print", steps=4)
    assert isinstance(loop.outcome(lease), TaskCompleted)
    assert names(tmp_path) == {"attached-part-1-1", "0"}
    assert loop.results.read(lease.task.request, 0) == b"whole"


def test_cancelled_task_deletes_only_its_own_parts(tmp_path: Path) -> None:
    loop, _ = growing(tmp_path)
    lease = loop.run("print", steps=4)
    loop.results.attach(lease.task.request, "part-11-1", b"of a later attempt")
    loop.turn()
    loop.turn()
    assert {"attached-part-1-1", "attached-part-1-2"} <= names(tmp_path)

    loop.inbox.put(CancelTask(lease.claim))

    assert isinstance(loop.outcome(lease), TaskStopped)
    assert names(tmp_path) == {"attached-part-11-1"}


def test_cancelled_task_stops_even_if_its_parts_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, _ = growing(tmp_path)
    lease = loop.run("print", steps=4)
    loop.turn()

    def away(request: str, beginning: str = "") -> None:
        raise ResultsUnavailable("cannot be reached")

    monkeypatch.setattr(loop.results, "detach", away)
    loop.inbox.put(CancelTask(lease.claim))
    assert isinstance(loop.outcome(lease), TaskStopped)


def test_final_stages_run_after_one_step_tasks_and_before_the_others(tmp_path: Path) -> None:
    order: list[str] = []

    class Noted(Count):
        def step(self, batch: Sequence[tuple[StageInput, int]]) -> list[tuple[StageInput, int] | Exception]:
            order.append("count")
            return super().step(batch)

    class NotedGrow(Grow):
        def step(self, batch: Sequence[tuple[StageInput, int]]) -> list[tuple[StageInput, int] | Exception]:
            order.append("grow")
            return super().step(batch)

    loop = Bench(tmp_path, {"print": NotedGrow(), "count": Noted(), "once": Noted()}, 1)
    long, last = loop.run("count", steps=3), loop.run("print", steps=4)
    loop.turn()
    short = loop.run("once", steps=1)
    for lease in (short, last, long):
        assert isinstance(loop.outcome(lease), TaskCompleted)
    assert order == ["grow", "count", *["grow"] * 3, *["count"] * 3]


def test_stage_receives_the_uploads_it_declares(tmp_path: Path) -> None:
    loop, count = bench(tmp_path)
    count.uploads = ("image",)
    lease = loop.run()
    loop.results.attach(lease.task.request, "image", b"a picture")
    assert isinstance(loop.outcome(lease), TaskCompleted)
    assert count.uploaded == [b"a picture"]

    failed = loop.outcome(loop.run())
    assert isinstance(failed, TaskFailed)
    assert (failed.kind, "has no image" in failed.message) == ("permanent", True)


class Full:
    """A result store whose place has no room, for writing or for reading, until it is made."""

    def __init__(self, loop: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room, self._blobs = False, loop.results._blobs
        monkeypatch.setattr(step_loop, "PAUSE_S", 0.001)
        monkeypatch.setattr(loop.results, "_blobs", self)

    def __getattr__(self, name: str) -> Any:
        if not self.room:
            raise TransientError("/srv/results: no space left on device")
        return getattr(self._blobs, name)


def waits(loop: Bench, lease: Lease, tries: int = 1) -> None:
    """Turn until a task has been told of as one that waits, so many times."""
    for _ in range(1000):
        if loop.sent.count(TaskWaits(lease.claim)) >= tries:
            return
        loop.turn()
    raise AssertionError("it does not wait")


class TestAResultStoreWithoutRoom:
    def test_full_result_store_makes_results_wait_while_other_tasks_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop, count = bench(tmp_path)
        place = Full(loop, monkeypatch)
        waiting = [loop.run("print"), loop.run("print")]
        for lease in waiting:
            waits(loop, lease, tries=3)
        assert isinstance(loop.outcome(loop.run(tag=7)), TaskCompleted)
        assert count.order == [7, 7, 7]
        place.room = True
        for lease in waiting:
            done = loop.outcome(lease)
            assert isinstance(done, TaskCompleted)
            assert loop.results.read(lease.task.request, done.results[0].index) == b"tensor([0., 0., 0.])"
        assert not any(isinstance(message, TaskFailed) for message in loop.sent)

    def test_task_that_waits_for_a_full_result_store_can_be_cancelled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop, _ = bench(tmp_path)
        place = Full(loop, monkeypatch)
        lease = loop.run("print")
        waits(loop, lease)
        loop.inbox.put(CancelTask(lease.claim))
        stopped = loop.outcome(lease)
        assert isinstance(stopped, TaskStopped) and stopped.timings.share_s > 0
        place.room = True
        assert isinstance(loop.outcome(loop.run("print")), TaskCompleted)
        assert not list(tmp_path.glob(f"{lease.task.request}/*"))

    def test_task_waits_for_its_upload_if_the_result_store_is_unreachable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop, count = bench(tmp_path)
        count.uploads = ("image",)
        lease = loop.run()
        loop.results.attach(lease.task.request, "image", b"picture")
        place = Full(loop, monkeypatch)
        waits(loop, lease, tries=2)
        assert not count.batches
        place.room = True
        assert isinstance(loop.outcome(lease), TaskCompleted)
        assert count.uploaded == [b"picture"]


def test_step_plan_of_one_loop_runs_identically_in_another(tmp_path: Path) -> None:
    """Given two loops that are given the same tasks, when the turns of the first are carried out by both, then both
    make the same steps in the same company, and the same outputs."""
    stages = Count(), Count()
    one, other = (Bench(tmp_path / str(n), {"count": stage}, 2) for n, stage in enumerate(stages))
    leases = [one.run(tag=tag, steps=3 + tag, priority=tag // 3) for tag in range(4)]
    for lease in leases:
        other.inbox.put(RunTask(replace(lease, task=replace(lease.task, inputs=(other.input,))), {}))
    one.inbox.put(CancelTask(leases[1].claim))
    other.loop._collect_messages(waits=False)

    while sum(isinstance(message, TaskCompleted) for message in one.sent) < 3:
        turn = decode(encode(one.loop.decide()), StepPlan)
        for loop in (one.loop, other.loop):
            loop.carry_out(turn)

    assert stages[0].batches == stages[1].batches
    made = [
        {m.claim: held(bench, m.output) for m in bench.sent if isinstance(m, TaskCompleted)} for bench in (one, other)
    ]
    assert made[0] == made[1]


def held(bench: Bench, ref: ObjectRef | None) -> list[float]:
    assert ref is not None
    with bench.store.get(ref) as found:
        return list(np.asarray(found["x"]))
