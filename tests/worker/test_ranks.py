"""Step loops of several ranks: the first decides, all carry out the same, and what one cannot do none does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.worker.test_step_loop import Bench, Count, Large, Shared
from tools.server import until
from unfuse.core.codec import encode
from unfuse.core.errors import ConfigError, ResultsUnavailable, TransientError
from unfuse.core.messages import TaskCompleted, TaskFailed, TaskStopped
from unfuse.core.task import Claim
from unfuse.stages.base import StageInput, StageOutput, SteppedStage
from unfuse.stages.bitwise import first_difference
from unfuse.worker.batch_invariance import DIFFERENT, SETTLED_AFTER, TRUSTED_AFTER, InvarianceResults
from unfuse.worker.compute import _check_agreement
from unfuse.worker.compute_messages import (
    CancelTask,
    FromCompute,
    InputArrived,
    InputTaken,
    RankStatus,
    RunTask,
    StepPlan,
    TaskWaits,
)
from unfuse.worker.ranks import Ranks
from unfuse.worker.step_loop import StepLoop

WAIT_S = 20.0


class Table:
    """Where the ranks of a test meet."""

    def __init__(self, size: int) -> None:
        self.said = [b""] * size
        self.barrier = threading.Barrier(size)


class Rank:
    """One of them."""

    def __init__(self, rank: int, table: Table) -> None:
        self.rank, self.size, self._table, self.waited_s = rank, len(table.said), table, 0.0

    def exchange(self, own: bytes) -> list[bytes]:
        self.waited_s += self.rank + 1  # as if it had taken so long
        self._table.said[self.rank] = own
        self._table.barrier.wait(WAIT_S)
        found = [*self._table.said]
        self._table.barrier.wait(WAIT_S)
        return found

    def together(self) -> AbstractContextManager[None]:
        return self._together()

    @contextmanager
    def _together(self) -> Iterator[None]:
        error = None
        try:
            yield
        except Exception as caught:
            error = caught
        said = self.exchange(str(error or "").encode())
        if error or any(said):
            raise error or TransientError(b"".join(said).decode())


class Group:
    """Loops of two ranks, each in a thread, that read one store, behind one parent."""

    def __init__(
        self, folder: Path, stages: Sequence[SteppedStage[Any]], exact: bool = False, overlapped: bool = False
    ) -> None:
        self.overlapped = overlapped
        self.bench = Bench(folder, {"count": stages[0]}, 4)
        self.sent: list[list[FromCompute]] = [[] for _ in stages]
        self.inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in stages]
        self.changed = threading.Condition()
        self.ended = False
        table = Table(len(stages))
        self.loops = [self._loop(Rank(rank, table), stage, folder, exact) for rank, stage in enumerate(stages)]
        self.threads = [threading.Thread(target=self._run, args=(loop,), daemon=True) for loop in self.loops]
        for thread in self.threads:
            thread.start()

    def _loop(self, rank: Rank, stage: SteppedStage[Any], folder: Path, exact: bool) -> StepLoop:
        def send(message: FromCompute) -> None:
            if isinstance(message, StepPlan):
                assert rank.rank == 0
                for inbox in self.inboxes[1:]:
                    inbox.put(message)
                return
            with self.changed:
                self.sent[rank.rank].append(message)
                self.changed.notify_all()

        sure = InvarianceResults(folder / f"{rank.rank}.json", chance=lambda: 1.0) if exact else None
        loop = StepLoop(
            {"count": stage},
            self.bench.store,
            self.bench.results,
            self.inboxes[rank.rank],
            send,
            4,
            exactness=sure,
            ranks=Ranks(rank, send),
            overlapped=self.overlapped,
        )
        loop._batches.sizes = Large(4)
        return loop

    def _run(self, loop: StepLoop) -> None:
        try:
            while not self.ended:
                loop._status.report(busy=bool(loop._jobs))
                turn = loop.decide() if loop._ranks.leads else loop._receive_plan()
                loop._ranks.send_plan(turn)
                loop.carry_out(turn)
        except threading.BrokenBarrierError:
            return

    def begin(self, **params: Any) -> RunTask:
        self.bench.run(**params)
        run = self.bench.inbox.get()
        assert isinstance(run, RunTask)
        self.give(run)
        return run

    def give(self, message: RunTask | InputArrived) -> None:
        """As the executor does: the task, or a piece of its input, to all."""
        for inbox in reversed(self.inboxes):
            inbox.put(message)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), what
        return condition()

    def outcome(self, run: RunTask) -> TaskCompleted | TaskFailed | TaskStopped:
        def ends() -> list[Any]:
            return [
                m
                for m in self.sent[0]
                if isinstance(m, TaskCompleted | TaskFailed | TaskStopped) and m.claim == run.lease.claim
            ]

        (end,) = self.until(ends, "the task to end")
        return end


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(*stages: SteppedStage[Any], exact: bool = False, overlapped: bool = False) -> Group:
        made.append(Group(tmp_path, stages, exact, overlapped))
        return made[-1]

    yield make
    for one in made:
        one.ended = True
        for inbox in one.inboxes:
            inbox.put(StepPlan())  # wakes the loop
        for thread in one.threads:
            thread.join(WAIT_S)


Make = Callable[..., Group]


def test_all_ranks_run_the_same_batches_and_only_rank_0_reports_tasks(group: Make) -> None:
    stages = Count(), Count()
    ranks = group(*stages)
    runs = [ranks.begin(tag=tag, steps=5 + tag, priority=tag % 2) for tag in range(4)]
    for run in runs:
        done = ranks.outcome(run)
        assert isinstance(done, TaskCompleted)
        assert done.output
        assert done.timings.exchange_s == done.timings.steps, "one exchange a step"
        with ranks.bench.store.get(done.output) as held:
            assert np.array_equal(held["x"], np.full(3, run.lease.task.params["steps"]))
    assert stages[0].batches == stages[1].batches
    ranks.until(lambda: bool(ranks.sent[1]) and not ranks.loops[1]._jobs, "the other rank to report its time")
    reports = [message for message in ranks.sent[1] if isinstance(message, RankStatus)]
    assert ranks.sent[1] == reports, "the first one reports all else"
    assert reports[-1].time.exchange_s > 0.0
    assert reports[-1].time.exchange_s % 2 == 0, "of each its own"


def test_task_that_one_rank_cannot_start_fails_on_all_ranks(group: Make) -> None:
    class Picky(Count):
        def verify(self, task: Any) -> None:
            if task.params["tag"] == 1:
                raise ValueError("not here")

    stages = Count(), Picky()
    ranks = group(*stages)
    good, bad = ranks.begin(tag=0, steps=3), ranks.begin(tag=1, steps=3)
    failed = ranks.outcome(bad)
    assert isinstance(failed, TaskFailed)
    assert "not here" in failed.message
    assert isinstance(ranks.outcome(good), TaskCompleted)
    assert stages[0].order == stages[1].order == [0, 0, 0]


def test_step_that_fails_on_one_rank_fails_the_task_on_all_ranks(group: Make) -> None:
    stages = Count(), Count(raises=lambda size: TransientError("full"), fail_at=2)
    ranks = group(*stages)
    failed = ranks.outcome(ranks.begin(tag=0, steps=3))
    assert isinstance(failed, TaskFailed)
    assert "full" in failed.message
    assert isinstance(ranks.outcome(ranks.begin(tag=1, steps=1)), TaskCompleted)


def test_cancel_received_by_rank_0_stops_all_ranks(group: Make) -> None:
    stages = Count(), Count()
    ranks = group(*stages)
    long = ranks.begin(tag=0, steps=10**9)
    ranks.until(lambda: len(stages[0].batches) > 3, "it to run")
    ranks.inboxes[0].put(CancelTask(long.lease.claim))
    assert isinstance(ranks.outcome(long), TaskStopped)
    assert isinstance(ranks.outcome(ranks.begin(tag=1, steps=1)), TaskCompleted)
    assert stages[0].batches == stages[1].batches


def test_cancel_during_a_step_stops_all_ranks_after_that_step(group: Make) -> None:
    amid, go_on = threading.Barrier(3), threading.Event()

    class Held(Count):
        def step(self, states: Any) -> Any:
            if len(self.batches) == 2 and not go_on.is_set():
                amid.wait(WAIT_S)
                go_on.wait(WAIT_S)
            return super().step(states)

    stages = Held(), Held()
    ranks = group(*stages)
    long = ranks.begin(tag=0, steps=10**9)
    amid.wait(WAIT_S)
    ranks.inboxes[0].put(CancelTask(long.lease.claim))
    go_on.set()
    assert isinstance(ranks.outcome(long), TaskStopped)
    assert isinstance(ranks.outcome(ranks.begin(tag=1, steps=1)), TaskCompleted)
    assert stages[0].batches == stages[1].batches == [[0], [0], [0], [1]]


def test_checkpoint_unreadable_on_one_rank_restarts_the_task_on_all(group: Make) -> None:
    class Forgets(Count):
        def resume(self, task: Any, saved: Any) -> Any:
            raise ValueError("unreadable")

    class Remembers(Count):
        def resume(self, task: Any, saved: Any) -> Any:
            return task, 7

    stages = Remembers(), Forgets()
    ranks = group(*stages)
    ranks.bench.run(tag=0, steps=9)
    lease = ranks.bench.inbox.get().lease  # type: ignore[union-attr]
    saved = ranks.bench.store.put({"x": np.zeros(1)}, request=lease.task.request, stage="stage", attempt=0)
    run = RunTask(replace(lease, checkpoint=saved), {})
    ranks.give(run)
    assert isinstance(ranks.outcome(run), TaskCompleted)
    assert len(stages[0].batches) == len(stages[1].batches) == 9


def test_task_waits_on_all_ranks_while_one_cannot_read_its_upload(group: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Uploaded(Count):
        uploads = ("image",)

    stages = Uploaded(), Uploaded()
    ranks = group(*stages)
    asked: list[int] = []

    def attached(request: str, name: str) -> bytes:
        asked.append(threading.get_ident())
        if len(asked) == 1:
            raise ResultsUnavailable("gone for a moment")
        return b"bytes"

    monkeypatch.setattr(ranks.bench.results, "attached", attached)
    with capture_logs() as logs:
        run = ranks.begin(tag=0, steps=3)
        assert isinstance(ranks.outcome(run), TaskCompleted)
    assert any(isinstance(message, TaskWaits) for message in ranks.sent[0])
    assert {line["reason"] for line in logs} == {"gone for a moment", "another rank waits for it"}
    assert len(asked) == 4
    assert stages[0].batches == stages[1].batches


@pytest.mark.parametrize("sloppy", [0, 1])
def test_batch_that_differs_on_one_rank_is_not_shared_on_any(group: Make, sloppy: int) -> None:
    stages = [Shared(), Shared()]
    stages[sloppy].sloppy = 2
    ranks = group(*stages, exact=True)
    runs = [ranks.begin(tag=tag, steps=TRUSTED_AFTER + 3) for tag in (1, 2, 3, 4)]
    for run in runs:
        assert isinstance(ranks.outcome(run), TaskCompleted)
    assert stages[0].batches == stages[1].batches
    assert sum(len(batch) > 1 for batch in stages[0].batches) <= 2


def test_rank_that_cannot_compare_results_keeps_no_other_rank_waiting(
    group: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_given = threading.Event()

    class Waits(Shared):
        """Starts no task before both were given, so that they share a forward however slow the test is."""

        def verify(self, task: Any) -> None:
            assert all_given.wait(WAIT_S)

    stages = [Waits(), Waits()]
    ranks = group(*stages, exact=True)
    failed = list[int]()

    def compare(alone: Sequence[Any], together: Sequence[Any]) -> int | None:
        if not failed:
            failed.append(1)
            raise MemoryError
        return first_difference(alone, together)

    monkeypatch.setattr("unfuse.worker.batches.first_difference", compare)
    runs = [ranks.begin(tag=tag, steps=3) for tag in (1, 2)]
    all_given.set()
    for run in runs:
        assert isinstance(ranks.outcome(run), TaskCompleted)
    assert failed and stages[0].batches == stages[1].batches


def test_pool_becomes_batched_on_all_ranks_when_the_first_one_decides_so(group: Make) -> None:
    """Given a first rank whose file has the differences, and a second one whose file has none of them."""
    stages = [Shared(), Shared()]
    for stage in stages:
        stage.exact = True
    ranks = group(*stages, exact=True)
    results = InvarianceResults(None, or_batched=True)
    for size in range(SETTLED_AFTER):
        results.record(("count", (size,), ()), 2, DIFFERENT)
    ranks.loops[0]._batches._exactness = results
    runs = [ranks.begin(tag=tag, steps=3) for tag in (1, 2)]
    for run in runs:
        assert isinstance(ranks.outcome(run), TaskCompleted)
    assert stages[0].batches == stages[1].batches
    assert [stage.exact for stage in stages] == [False, False]


claims = st.builds(Claim, st.sampled_from("ab"), st.just("denoise.0"), st.just(1), st.just(b""))
failed = st.builds(TaskFailed, claims, st.sampled_from(("transient", "permanent")), st.text(max_size=3))
verdicts = st.one_of(st.integers(0, 3), st.builds(TaskWaits, claims), failed)


@given(st.lists(st.lists(verdicts, min_size=2, max_size=2), min_size=2, max_size=4))
def test_ranks_agree_and_start_only_tasks_that_all_can_start(said: list[list[Any]]) -> None:
    class Heard:
        size, rank, waited_s = 2, 0, 0.0

        def exchange(self, own: bytes) -> list[bytes]:
            return [own, *others]

        def together(self) -> AbstractContextManager[None]:
            return nullcontext()

    others = [encode(rank) for rank in said[1:]]
    agreed = Ranks(Heard(), lambda turn: None).receive_plan(said[0])
    for task, found in enumerate(agreed):
        own = [rank[task] for rank in said]
        if isinstance(found, int) and found >= 0:
            assert own == [found] * len(said)
        elif found == -1:
            assert all(isinstance(one, int) for one in own)
        else:
            assert found in own
            assert isinstance(found, TaskFailed) or not any(isinstance(one, TaskFailed) for one in own)


@pytest.mark.parametrize(
    ("outcome", "pools", "difference"),
    [
        ({"torch": "3", "device": "A100"}, ["denoise:a"], "torch is '3', not '2'"),
        (
            {"torch": "2", "device": "L4"},
            ["denoise:a"],
            "device is 'L4', not 'A100': ranks need GPUs of one model, so name such GPUs by --device or --place",
        ),
        ({"device": "A100"}, ["denoise:a"], "torch is 'missing', not '2'"),
        ({"torch": "2", "device": "A100"}, ["denoise:b"], "its weights differ"),
    ],
    ids=["version", "device", "library", "weights"],
)
def test_ranks_with_different_numerics_do_not_start(outcome: dict[str, str], pools: list[str], difference: str) -> None:
    class Others:
        def exchange(self, own: bytes) -> list[bytes]:
            return [own, own, other]

    class Listens:
        def exchange(self, own: bytes) -> list[bytes]:
            nonlocal other
            other = own
            return [own]

    other = b""
    _check_agreement(Listens(), outcome, pools)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"rank 2 does not compute the same results as rank 0: {difference}$"):
        _check_agreement(Others(), {"device": "A100", "torch": "2"}, ["denoise:a"])  # type: ignore[arg-type]
    _check_agreement(None, outcome, pools)


class Taker(Count):
    """Takes inputs in pieces, and logs what it does. It `fails` at the piece from that offset on."""

    def __init__(self, fails: int = -1, unavailable: int = 0) -> None:
        super().__init__()
        self.fails, self.unavailable, self.log = fails, unavailable, list[str]()

    def receive(self, params: Any, priority: int, names: Any) -> Taker:
        self.log.append(f"receive {sorted(names)}")
        return self

    def write(self, piece: Any) -> None:
        self.log.append(f"take {int(piece[0])}")
        if int(piece[0]) == self.fails:
            raise RuntimeError("no memory")

    def drop(self) -> None:
        self.log.append("drop")

    def verify(self, task: StageInput) -> None:
        if self.unavailable:
            self.unavailable -= 1
            raise ResultsUnavailable("gone for a moment")

    def start(self, task: StageInput) -> tuple[StageInput, int]:
        self.log.append(f"start {'with' if task.received is self else 'without'} what came")
        return super().start(task)

    def step(self, batch: Any) -> Any:
        self.log.append(f"step of {len(batch)}")
        return super().step(batch)

    def finish(self, state: tuple[StageInput, int]) -> StageOutput:
        return StageOutput({})


class Pieces:
    """A task whose input comes in pieces."""

    def __init__(self, ranks: Group, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ranks.bench.store, "memory", lambda offset, nbytes: np.full(nbytes, offset))
        ranks.bench.run(steps=2)
        run = ranks.bench.inbox.get()
        assert isinstance(run, RunTask)
        task = run.lease.task
        (self.ref,) = task.inputs
        self.ranks, self.claim = ranks, run.lease.claim
        self.run = replace(run, lease=replace(run.lease, task=replace(task, inputs=())))

    def answers(self, rank: int) -> list[str]:
        return [message.error for message in self.ranks.sent[rank] if isinstance(message, InputTaken)]

    def arrive(self, start: int) -> None:
        before = len(self.answers(0))
        self.ranks.give(InputArrived(self.run.lease, self.ref, start, start, start + 10))
        for rank in range(2):
            self.ranks.until(lambda rank=rank: len(self.answers(rank)) > before, "each rank to answer")


def test_all_ranks_receive_input_pieces_between_the_same_steps(group: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a task that runs meanwhile, since what is taken needs room, of which all ranks have equally much."""
    stages = Taker(), Taker()
    ranks = group(*stages)
    long, pieces = ranks.begin(steps=10**9), Pieces(ranks, monkeypatch)
    ranks.until(lambda: stages[0].batches, "it to run")
    for start in (0, 10, 20):
        pieces.arrive(start)
    ranks.give(pieces.run)
    assert isinstance(ranks.outcome(pieces.run), TaskCompleted)
    ranks.inboxes[0].put(CancelTask(long.lease.claim))
    assert isinstance(ranks.outcome(long), TaskStopped)
    until(lambda: stages[0].log == stages[1].log, "both to have done the same")
    told = [line for line in stages[0].log if "step" not in line]
    assert told == ["start without what came", "receive ['x']", "take 0", "take 10", "take 20", "start with what came"]
    assert pieces.answers(0) == pieces.answers(1) == [""] * 3
    assert not any(loop._factory.receives for loop in ranks.loops)


def test_input_that_one_rank_cannot_receive_is_dropped_by_all_ranks(
    group: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that failed keeps what it has until then, or it would have room that others have not."""
    stages = Taker(), Taker(fails=10)
    ranks = group(*stages)
    pieces = Pieces(ranks, monkeypatch)
    for start in (0, 10):
        pieces.arrive(start)
    assert (pieces.answers(0), pieces.answers(1)) == (["", ""], ["", "no memory"])
    assert "drop" not in stages[0].log + stages[1].log
    ranks.inboxes[0].put(CancelTask(pieces.claim))
    until(lambda: all("drop" in stage.log for stage in stages), "both to have dropped it")
    assert isinstance(ranks.outcome(ranks.begin(steps=1)), TaskCompleted)
    until(lambda: stages[0].log == stages[1].log, "both to have done the same")
    assert stages[0].log[3:] == ["drop", "start without what came", "step of 1"]


def test_all_ranks_drop_received_input_if_one_cannot_start_yet(group: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a rank that can begin and one that cannot yet, then both begin without it, since the first has given it up
    with the state that it had made."""
    stages = Taker(), Taker(unavailable=1)
    ranks = group(*stages)
    pieces = Pieces(ranks, monkeypatch)
    pieces.arrive(0)
    ranks.give(pieces.run)
    assert isinstance(ranks.outcome(pieces.run), TaskCompleted)
    for stage in stages:
        until(lambda stage=stage: stage.log[-1] == "step of 1" == stage.log[-2], "both to have made two steps")
        assert stage.log[-4:] == ["drop", "start without what came", "step of 1", "step of 1"]
